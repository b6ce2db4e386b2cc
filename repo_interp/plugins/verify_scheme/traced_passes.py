"""Trace a pass of a model layer by layer, and find where two passes first differ.

The first difference is the first in the order of computation: the first layer with different scores
(scaled logits before the softmax), the first token there, and the first head of that token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from repo_interp.models.attention import PARTS, RepositionedAttention
from repo_interp.models.decoder import as_decoder

TOLERANCE = 1e-3
"""Nats, or attention: a larger difference is a finding."""
_SITES = ("positions", "key_positions", "queries", "keys", "scores", "pattern")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass
class LayerTrace:
    """Tensors of one layer in one pass."""

    layer: RepositionedAttention
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By name: `hidden_states`, which enter attention, results of projections, hook sites."""
    calls: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)
    """Calls of the parts of the scheme, in order: name of the part, arguments, result."""


@dataclass(frozen=True)
class TracedPass:
    """Predictions and scores of a pass."""

    predictions: Tensor
    """Log-probabilities of next tokens [prompt, token, id]."""
    scores: list[Tensor]
    """Scores of each layer [prompt, head, query, key]."""
    layers: Sequence[int]
    """Their numbers."""

    def cut(self, start: int, stop: int | None = None) -> TracedPass:
        """Return the tokens from `start` to `stop` alone, as queries and as keys.

        Args:
            start: First token.
            stop: Token after the last one; None: up to the end.

        Returns:
            The part of the pass with these tokens.
        """
        some = slice(start, stop)
        return TracedPass(
            self.predictions[:, some], [each[:, :, some, some] for each in self.scores], self.layers
        )


def joined(passes: Sequence[TracedPass], axis: int) -> TracedPass:
    """Join passes along prompts (axis 0) or tokens (axis 1), where each sees the earlier ones.

    Args:
        passes: Passes in order.
        axis: 0 or 1.

    Returns:
        One pass.
    """
    keys = max(each.scores[0].shape[3] for each in passes)
    by_layer = zip(*(each.scores for each in passes), strict=True)
    return TracedPass(
        torch.cat([each.predictions for each in passes], axis),
        [
            torch.cat([F.pad(part, (0, keys - part.shape[3])) for part in parts], 2 * axis)
            for parts in by_layer
        ],
        passes[0].layers,
    )


def trace(
    model: PreTrainedModel,
    tokens: Tensor,
    given: Callable[[int, str, Tensor], Tensor] | None = None,
    **arguments: Any,
) -> list[LayerTrace]:
    """Run a model and keep what its attention layers compute.

    Args:
        model: Repositioned model with eager attention.
        tokens: Token ids [prompt, token].
        given: Called with the place of a layer, `hidden_states` or the name of a projection, and
            the tensor that was computed; the pass goes on with the tensor that it returns.
        **arguments: Further arguments of the model.

    Returns:
        A trace of every layer with attention.
    """
    traces = [LayerTrace(layer) for layer in as_decoder(model).layers]

    def keep(place: int, name: str, made: Tensor) -> Tensor | None:
        result = None if given is None or name in _SITES else given(place, name, made)
        traces[place].tensors[name] = made if result is None else result
        return result

    def enter(place: int, module: nn.Module, given: tuple, keywords: dict[str, Any]) -> Any:
        # Llama calls its attention by keywords.
        changed = keep(place, "hidden_states", keywords["hidden_states"])
        return None if changed is None else (given, keywords | {"hidden_states": changed})

    def called(place: int, name: str, part: nn.Module, given: tuple, made: Any) -> None:
        # Layers may share a part; the one that runs has a pass.
        if traces[place].layer.current_pass is not None:
            traces[place].calls.append((name, given, made))

    with ExitStack() as undo:
        for place, each in enumerate(traces):
            module: Any = each.layer.module
            hooks = [
                module.register_forward_pre_hook(
                    partial(enter, place), with_kwargs=True, prepend=True
                )
            ]
            hooks += [
                getattr(module, name).register_forward_hook(
                    lambda part, given, made, place=place, name=name: keep(place, name, made)
                )
                for name in PROJECTIONS
            ]
            hooks += [
                part.register_forward_hook(partial(called, place, name))
                for name in PARTS
                if (part := getattr(module, name)) is not None
            ]
            for hook in hooks:
                undo.callback(hook.remove)
            for name in _SITES:
                undo.callback(each.layer.sites.call(name, partial(keep, place, name)))
        model(input_ids=tokens, **arguments)
    return traces


def run_pass(
    model: PreTrainedModel, tokens: Tensor, cache: Any = None, **arguments: Any
) -> TracedPass:
    """Run a model.

    Args:
        model: Repositioned model with eager attention.
        tokens: Token ids [prompt, token].
        cache: Key-value cache; None: none is used.
        **arguments: Further arguments of the model.

    Returns:
        Its predictions and scores.
    """
    layers, scores = as_decoder(model).layers, list[Tensor]()
    with ExitStack() as undo:
        for layer in layers:
            undo.callback(layer.sites.call("scores", scores.append))
        pass_arguments = {"use_cache": cache is not None, "past_key_values": cache} | arguments
        predictions = model(input_ids=tokens, **pass_arguments).logits.log_softmax(-1)
    return TracedPass(predictions, scores, [layer.layer_idx for layer in layers])


def pass_difference(found: TracedPass, wanted: TracedPass) -> float:
    """Return the largest difference of log-probabilities, in nats.

    Args:
        found: A pass of some first prompts and tokens of `wanted`.
        wanted: The pass to compare with.

    Returns:
        The difference.

    Raises:
        FloatingPointError: It is NaN or infinite.
    """
    prompts, tokens = found.predictions.shape[:2]
    error = (found.predictions - wanted.predictions[:prompts, :tokens]).abs().max()
    if not bool(error.isfinite()):
        raise FloatingPointError("predictions are NaN or infinite")
    return float(error)


def differing_scores(
    found: TracedPass, wanted: TracedPass, tolerance: float
) -> Iterator[tuple[int, Bool[Tensor, "prompt head query key"]]]:
    """Find layers whose scores differ between two passes.

    Args:
        found: A pass of some first prompts and tokens of `wanted`.
        wanted: The other pass.
        tolerance: Of scores.

    Yields:
        Number of a layer, and marks of the scores that differ.
    """
    prompts, tokens = found.predictions.shape[:2]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    for layer, ours, theirs in zip(found.layers, found.scores, wanted.scores, strict=True):
        # NaN differs too; hidden keys have -inf, or the least number of a precision.
        differs = ~((ours - theirs[:prompts, :, :tokens, :tokens]).abs() <= tolerance) & seen
        if bool(differs.any()):
            yield layer, differs


def first_difference(found: TracedPass, wanted: TracedPass, tolerance: float) -> str:
    """Say where two passes first differ.

    Args:
        found: A pass of some first prompts and tokens of `wanted`.
        wanted: The other pass.
        tolerance: Of scores, and of log-probabilities where no score differs.

    Returns:
        Such as "first in layer 0 at token 3 of head 1".
    """
    for layer, differs in differing_scores(found, wanted, tolerance):
        return f"first in layer {layer} at {first_place(differs)}"
    prompts, tokens = found.predictions.shape[:2]
    differs = ~((found.predictions - wanted.predictions[:prompts, :tokens]).abs() <= tolerance)
    return (
        f"first at token {int(differs.any(-1).any(0).nonzero()[0])}, with equal logits of attention"
    )


def first_place(differs: Bool[Tensor, "prompt head token *any"]) -> str:
    """Name the first token that is marked, and the first head there.

    Args:
        differs: Marks, at least one of which is set.

    Returns:
        Such as "token 3 of head 1"; the token alone where there is no more than one head.
    """
    by_head = differs.reshape(*differs.shape[:3], -1).any(-1).any(0)
    token = int(by_head.any(0).nonzero()[0])
    head = int(by_head[:, token].nonzero()[0])
    return f"token {token}" + (f" of head {head}" if len(by_head) > 1 else "")
