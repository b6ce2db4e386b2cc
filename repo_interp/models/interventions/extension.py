"""Extend a model beyond its training length without training: change how its distances count, while a context lasts.

    interpolated     theta_r <- theta_r / s                                                     (Chen et al. 2023)
    yarn             theta_r <- YaRN's, cosines and sines times 0.1 ln s + 1                    (Peng et al. 2024)
    lm_infinite      query i sees keys j < G and keys i - j < L, at distance min(z_i - z_j, L)  (Han et al. 2024)

Schemes that add a function of the distance are given divided indices, or the capped distance.

LM-Infinite's capped distance is no position of a token: it depends on the pair. Only the G global keys are ever further than L,
so their logits alone are computed anew, rotate(q_i, min(z_i - z_j, L)) . k_j - what the authors get from a second pass with the query
at L and global keys at 0 - in O(n G d); the other far keys are masked. Scores of the whole map are materialised meanwhile, by eager
attention: n^2 numbers per head, one layer at a time. Learned positions are capped to +-L by their difference, and masked by the index.

By name: `METHODS`, those that a model's positions allow (`allowed_methods`), and the context of one of them (`extended`).

Whole prompts only, padded on the right, without cached keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.reposition import attentions
from repo_interp.positions.biases import PositionBias
from repo_interp.positions.rotary import expand_heads, rotate
from repo_interp.positions.scaling import interpolate, yarn_attention_scaling, yarn_frequencies

Method = Literal["plain", "lm_infinite", "interpolation", "yarn"]
METHODS: tuple[Method, ...] = get_args(Method)
GLOBAL_TOKENS = 10
"""First tokens that LM-Infinite always shows, by default."""


def extended(
    model: nn.Module, method: str, length: int, training_length: int, global_tokens: int = GLOBAL_TOKENS
) -> AbstractContextManager[None]:
    """The context in which `model` runs prompts of `length` tokens by `method`. Raises InputError for an unknown one."""
    factor = max(1.0, length / training_length)
    ways: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
        "plain": nullcontext,
        "lm_infinite": lambda: lm_infinite(model, training_length, global_tokens),
        "interpolation": lambda: interpolated(model, factor),
        "yarn": lambda: yarn(model, factor, training_length),
    }
    if method not in ways:
        raise InputError(f"methods of extrapolation are {', '.join(METHODS)}, not {method!r}")
    return ways[method]()


def allowed_methods(model: nn.Module) -> tuple[str, ...]:
    """The methods that this model's positions allow."""
    layers = list(attentions(model))
    rotates = any(layer.frequencies is not None for layer in layers)
    added = [layer.position_logits for layer in layers if layer.position_logits is not None]
    by_distance = [isinstance(position_logits, PositionBias) for position_logits in added]
    allowed = {
        "plain": True,
        "lm_infinite": all(by_distance),
        "interpolation": rotates or any(by_distance),
        "yarn": rotates,
    }
    return tuple(method for method in METHODS if allowed[method])


@contextmanager
def interpolated(model: nn.Module, factor: float) -> Iterator[None]:
    """Position interpolation by `factor`: every distance counts as 1 / factor of it. Raises InputError where nothing has distances."""
    rotating, biased = _with_distances(model, "position interpolation")
    with ExitStack() as undo:
        for attention, frequencies in rotating:
            _retune(undo, attention, interpolate(frequencies, factor), 1.0)
        for attention in biased:
            assert attention.position_logits is not None
            handle = attention.position_logits.register_forward_pre_hook(
                lambda module, given: (*given[:2], given[2] / factor, given[3] / factor, *given[4:])
            )
            undo.callback(handle.remove)
        yield


@contextmanager
def yarn(model: nn.Module, factor: float, training_length: int) -> Iterator[None]:
    """YaRN by `factor` from `training_length` tokens, in every layer that rotates. Raises InputError where none does."""
    rotating, _ = _with_distances(model, "YaRN")
    if not rotating:
        raise InputError("YaRN changes how layers rotate, and no layer of this model does; leave the method out")
    with ExitStack() as undo:
        for attention, frequencies in rotating:
            _retune(undo, attention, yarn_frequencies(frequencies, factor, training_length), yarn_attention_scaling(factor))
        yield


@contextmanager
def lm_infinite(model: nn.Module, length: int, global_tokens: int = 10) -> Iterator[None]:
    """LM-Infinite's Lambda-shaped mask and capped distance: window and cap of `length` tokens, and `global_tokens` first ones.

    Raises InputError for a model with contextual positions, and inside it for cached keys.
    """
    if length < 1 or global_tokens < 0:
        raise InputError(f"a window of at least 1 token and 0 or more global tokens were wanted; got {length}, {global_tokens}")
    with ExitStack() as undo:
        for attention in attentions(model):
            if attention.position_logits is not None and not isinstance(attention.position_logits, PositionBias):
                raise InputError(
                    f"layer {attention.layer_idx} counts positions by context ({attention.scheme}): LM-Infinite has no distance to cap"
                )
            mask = _Lambda(attention, length, global_tokens)
            attention.observers.append(mask.observe)
            undo.callback(attention.observers.remove, mask.observe)
            undo.callback(attention.sites.scores.register_forward_hook(mask.change).remove)
        yield


@dataclass
class _Lambda:
    """LM-Infinite in one layer; between the two calls of a pass it holds the layer's queries and keys."""

    attention: RepositionedAttention
    length: int
    global_tokens: int
    seen: tuple[Tensor, Tensor, Tensor | None] | None = None

    def observe(self, attention: object, queries: Tensor, keys: Tensor, positions: Tensor | None, logits_of_rows: object) -> None:
        """Remember the tensors of this pass, before rotation."""
        self.seen = queries, keys, positions

    def change(self, module: nn.Module, arguments: tuple, scores: Tensor) -> Tensor:
        """Scores [batch, head, query, key] with far keys masked and global ones at the capped distance."""
        assert self.seen is not None
        (queries, keys, positions), self.seen = self.seen, None
        rows, count = scores.shape[-2:]
        if rows != count:
            raise InputError("LM-Infinite is offered for whole prompts, not with cached keys; pass use_cache=False")
        lowest = torch.finfo(scores.dtype).min
        index = torch.arange(count, device=scores.device)
        distance = index[:, None] - index
        scores = scores.masked_fill((distance >= self.length) & (index >= self.global_tokens), lowest)
        for key in range(min(self.global_tokens, count)):
            far, capped = self._global_scores(queries, keys, positions, key)
            column = scores[..., key]
            scores[..., key] = torch.where(far & (column > lowest / 2), capped.to(scores.dtype), column)
        return scores

    def _global_scores(
        self, queries: Tensor, keys: Tensor, positions: Tensor | None, key: int
    ) -> tuple[Tensor, Float[Tensor, "batch head query"]]:
        """Which pairs with the global token `key` are too far apart, and all their scores at the capped distance."""
        attention, heads = self.attention, queries.shape[1]
        its_key = expand_heads(keys, heads)[:, :, key, :, None]
        far = torch.zeros(1, 1, queries.shape[2], dtype=torch.bool, device=queries.device)
        if attention.frequencies is not None:
            assert positions is not None
            distance = expand_heads(positions - positions[..., key, None], heads)
            far = distance.abs() > self.length
            distance = distance.clamp(-self.length, self.length)
            queries = rotate(queries, distance, attention.frequencies, attention.attention_scaling**2)
        scores = (queries @ its_key)[..., 0] * attention.scaling
        if attention.attn_logit_softcapping is not None:
            scores = torch.tanh(scores / attention.attn_logit_softcapping) * attention.attn_logit_softcapping
        if attention.position_logits is not None:
            index = torch.arange(queries.shape[2], device=queries.device)[None]
            far = far | (index - key > self.length)
            added = attention.position_logits(
                queries,
                keys[:, :, key, None],
                index.clamp(max=key + self.length),
                index[:, key, None],
                torch.ones(1, 1, queries.shape[2], 1, dtype=torch.bool, device=queries.device),
                attention.scaling,
            )
            scores = scores + added[..., 0]
        return far, scores


def _with_distances(
    model: nn.Module, method: str
) -> tuple[list[tuple[RepositionedAttention, Float[Tensor, "component"]]], list[RepositionedAttention]]:
    """Layers that rotate, with their frequencies, and layers that add a function of the distance."""
    layers = list(attentions(model))
    rotating = [(layer, layer.frequencies) for layer in layers if layer.frequencies is not None]
    biased = [layer for layer in layers if isinstance(layer.position_logits, PositionBias)]
    if not rotating and not biased:
        raise InputError(f"{method} changes how distances count, and no layer of this model has any; leave the method out")
    return rotating, biased


def _retune(undo: ExitStack, attention: RepositionedAttention, frequencies: Tensor, scaling: float) -> None:
    """Rotate by `frequencies`, with `scaling` times the attention scaling, until undone."""
    undo.callback(setattr, attention, "frequencies", attention.frequencies)
    undo.callback(setattr, attention, "attention_scaling", attention.attention_scaling)
    attention.frequencies = frequencies
    attention.attention_scaling *= scaling
