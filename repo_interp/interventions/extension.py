"""Extend a model beyond its training length without training, inside a `with` block.

The methods change frequencies or distances:

    interpolated     theta_r <- theta_r / s                                                     (Chen et al. 2023)
    yarn             theta_r <- YaRN's, cosines and sines times 0.1 ln s + 1                    (Peng et al. 2024)
    lm_infinite      query i sees keys j < G and keys i - j < L, at distance min(z_i - z_j, L)  (Han et al. 2024)
    infllm           query i sees all keys j <= i, at distance min(z_i - z_j, L)                (Xiao et al. 2024)

InfLLM has no retrieval here: a query sees all keys beyond its local window of L tokens, not only
the most relevant blocks, all at distance L. Both methods use `distances`, and LM-Infinite also
`hidden_keys`: its mask is by token index, and differences of learned positions are capped to +-L.
Schemes that add a function of the distance get divided indices, or the capped distance.

`METHODS` lists all methods by name, `allowed_methods` those that a model's positions allow, and
`extended` returns the context of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

from torch import nn

from repo_interp.checkpoint_files.fields import Length
from repo_interp.errors import InputError, quoted
from repo_interp.interventions.frequencies import Factor, retune, rotates
from repo_interp.interventions.key_masks import hidden_keys
from repo_interp.interventions.pair_distances import (
    distances,
    reason_against_distances,
    require_distances,
)
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import intervention, model_edit
from repo_interp.models.layer_probe import differs_by_pair, logits_by_content
from repo_interp.positions.scaling import (
    interpolate,
    yarn_attention_scaling,
    yarn_frequencies,
)
from repo_interp.values import TokensOrNone, checked

Method = Literal["plain", "lm_infinite", "interpolation", "yarn", "infllm"]
METHODS: tuple[Method, ...] = get_args(Method)
GLOBAL_TOKENS = 10
"""Default number of first tokens that LM-Infinite always shows."""


def extended(
    model: nn.Module,
    method: str,
    length: int,
    training_length: int,
    global_tokens: int = GLOBAL_TOKENS,
) -> AbstractContextManager[None]:
    """Run prompts of one length by a named method of extrapolation.

    Args:
        model: Repositioned model or bridge.
        method: One of `METHODS`.
        length: Tokens of the prompts.
        training_length: Tokens of the prompts of training.
        global_tokens: First tokens that LM-Infinite always shows.

    Returns:
        A context manager.

    Raises:
        InputError: The method is unknown.
    """
    # Prompts within the training length need no extension; a factor below 1 would increase
    # distances.
    factor = max(1.0, length / training_length)
    ways: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
        "plain": nullcontext,
        "lm_infinite": lambda: lm_infinite(model, training_length, global_tokens),
        "interpolation": lambda: interpolated(model, factor),
        "yarn": lambda: yarn(model, factor, training_length),
        "infllm": lambda: infllm(model, training_length),
    }
    if method not in ways:
        raise InputError(f"methods of extrapolation are {', '.join(METHODS)}, not {quoted(method)}")
    return ways[method]()


def allowed_methods(decoder: Decoder) -> tuple[str, ...]:
    """List the methods that the positions of a model allow.

    Args:
        decoder: Decoder of the model.

    Returns:
        Names from `METHODS`, in their order.
    """
    layers = decoder.layers
    turning = any(layer.frequencies is not None for layer in layers)
    # Contextual positions (CoPE) and positions by pair have no distance to cap
    capped = not any(_has_positions(one) and reason_against_distances(one) for one in layers)
    allowed = {
        "plain": True,
        "lm_infinite": capped,
        "interpolation": turning or any(map(_adds_by_position, layers)),
        "yarn": any(rotates(layer) and not differs_by_pair(layer) for layer in layers),
        "infllm": capped,
    }
    return tuple(method for method in METHODS if allowed[method])


@model_edit
def interpolated(model: nn.Module, factor: float) -> Iterator[None]:
    """Divide every distance by a factor (position interpolation) inside a `with` block.

    Args:
        model: Repositioned model or bridge.
        factor: Factor s of the extension.

    Yields:
        None.

    Raises:
        InputError: No layer has distances, or the factor is not a positive number.
    """
    decoder = as_decoder(model)
    factor = checked(factor, Factor, "the factor of an extension")
    rotating, biased = _with_distances(decoder, "position interpolation")
    with intervention(decoder) as undo:
        for attention in rotating:
            retune(undo, attention, lambda frequencies: interpolate(frequencies, factor), 1.0)
        for attention in biased:
            assert attention.position_logits is not None
            handle = attention.position_logits.register_forward_pre_hook(
                # PositionLogits takes queries, keys, index of queries, index of keys, ...
                lambda module, given: (*given[:2], given[2] / factor, given[3] / factor, *given[4:])
            )
            undo.callback(handle.remove)
        yield


@model_edit
def yarn(model: nn.Module, factor: float, training_length: int) -> Iterator[None]:
    """Apply YaRN in every layer that rotates by one position per token inside a `with` block.

    Args:
        model: Repositioned model or bridge.
        factor: Factor s of the extension.
        training_length: Tokens before the extension.

    Yields:
        None.

    Raises:
        InputError: No layer rotates, or a number is out of range.
    """
    decoder = as_decoder(model)
    factor = checked(factor, Factor, "the factor of an extension")
    training_length = checked(training_length, Length, "the training length")
    rotating, _ = _with_distances(decoder, "YaRN")
    rotating = [layer for layer in rotating if not differs_by_pair(layer)]
    if not rotating:
        raise InputError(
            "YaRN changes how layers rotate by one position per token, and no layer of this model "
            "does; leave the method out"
        )
    scaling = yarn_attention_scaling(factor)
    with intervention(decoder) as undo:
        for attention in rotating:
            retune(
                undo,
                attention,
                lambda frequencies: yarn_frequencies(frequencies, factor, training_length),
                scaling,
            )
        yield


def _adds_by_position(attention: RepositionedAttention) -> bool:
    """Whether a layer adds a function of positions to its logits."""
    return attention.position_logits is not None and not logits_by_content(attention)


@model_edit
def lm_infinite(
    model: nn.Module, length: int, global_tokens: int = GLOBAL_TOKENS
) -> Iterator[None]:
    """Apply LM-Infinite's mask and capped distance inside a `with` block.

    Args:
        model: Repositioned model or bridge.
        length: Tokens of the window, and the largest distance.
        global_tokens: First tokens that every query sees.

    Yields:
        None.

    Raises:
        InputError: Positions are contextual; or, in the pass, the cache began without this.
    """
    first = checked(global_tokens, TokensOrNone, "the number of global tokens")
    length = checked(length, Length, "the window of LM-Infinite")
    with (
        _capped(model, "LM-Infinite", length),
        hidden_keys(model, lambda pair: (pair.distance >= length) & (pair.key >= first)),
    ):
        yield


@model_edit
def infllm(model: nn.Module, length: int) -> Iterator[None]:
    """Put all keys beyond a local window at one distance (InfLLM) inside a `with` block.

    Every query sees all earlier keys, without retrieval. Distances are min(z_i - z_j, length).

    Args:
        model: Repositioned model or bridge.
        length: Tokens of the local window, and the distance of all keys beyond it.

    Yields:
        None.

    Raises:
        InputError: Positions are contextual; or, in the pass, the cache began without this.
    """
    with _capped(model, "InfLLM", checked(length, Length, "the window of InfLLM")):
        yield


def _capped(model: nn.Module, method: str, length: int) -> AbstractContextManager[None]:
    """Cap distances in all layers that have distances; learned positions differ in both directions."""
    layers = as_decoder(model).layers
    for attention in layers:
        # Layers without positions need no cap, so they are not an error.
        if _has_positions(attention):
            require_distances(attention, method)
    capped = [each.layer_idx for each in layers if _has_positions(each)]
    if not capped:
        return nullcontext()
    return distances(model, lambda distance, pair: distance.clamp(-length, length), layers=capped)


def _has_positions(attention: RepositionedAttention) -> bool:
    return rotates(attention) or attention.position_logits is not None


def _with_distances(
    decoder: Decoder, method: str
) -> tuple[list[RepositionedAttention], list[RepositionedAttention]]:
    """Layers that rotate or add a function of positions; InputError if there are none."""
    layers = decoder.layers
    rotating = [layer for layer in layers if layer.frequencies is not None]
    biased = [layer for layer in layers if _adds_by_position(layer)]
    if not rotating and not biased:
        raise InputError(
            f"{method} changes how distances count, and no layer of this model rotates or adds "
            "logits by distance alone; leave the method out"
        )
    return rotating, biased
