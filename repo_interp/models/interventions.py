"""Change what attention computes during forward passes; nothing is left behind.

    set_positions     z_h <- values            for one head or all heads of a layer
    exchanged_keys    k_j <- k_order(j)        features change places; values and positions stay
    moved_keys        z_j <- z_j + shift_j(z)  for keys alone; the query keeps its own position
    interpolated      theta_r <- theta_r / s                                                     (Chen et al. 2023)
    yarn              theta_r <- YaRN's, cosines and sines times 0.1 ln s + 1                    (Peng et al. 2024)
    lm_infinite       query i sees keys j < G and keys i - j < L, at distance min(z_i - z_j, L)  (Han et al. 2024)

A rotated key is turned by theta_r shift_j once more, which is exact: rotations add up. Schemes that add a function of the distance
are given the moved position of the key, the capped distance, or divided indices. Layers without positions (NoPE) and contextual ones
(CoPE) have nothing to move; a learned absolute position is an embedding, so its token - query, key and value - gets another position's
vector, at the model's input.

LM-Infinite's capped distance is no position of a token: it depends on the pair. Only the G global keys are ever further than L,
so their logits alone are computed anew, rotate(q_i, min(z_i - z_j, L)) . k_j - what the authors get from a second pass with the query
at L and global keys at 0 - in O(n G d); the other far keys are masked. Scores of the whole map are materialised meanwhile, by eager
attention: n^2 numbers per head, one layer at a time. Learned positions are capped to +-L by their difference, and masked by the index.

Each is a context manager; its hooks are removed when it ends, also when the pass raised. They may be nested. Works on repositioned
models and the bridges around them. Whole prompts only, padded on the right, without cached keys. Knows nothing about how orders,
shifts and prompts are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.reposition import TABLE, attentions, attentions_of, decoder_of
from repo_interp.positions.biases import PositionBias
from repo_interp.positions.rotary import expand_heads, rotate, rotation_tables, turn
from repo_interp.positions.scaling import interpolate, yarn_attention_scaling, yarn_frequencies

Shift = Callable[[Float[Tensor, "batch any token"]], Float[Tensor, "batch any token"]]
"""What is added to the positions of keys, in positions, given those positions; axes of 1 broadcast."""
KEY_INDEX = 3
"""Place of `key_index` among the arguments of PositionLogits."""


@contextmanager
def set_positions(
    model: nn.Module, layer: int, head: int | None, values: float | Sequence[float] | Tensor | Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """While the context lasts, `values` stand in place of the positions of one head (None: all heads) in `layer`.

        with ri.set_positions(bridge, layer=2, head=1, values=torch.arange(20.0)):
            logits, cache = bridge.run_with_cache(tokens)

    `values` broadcast to [prompt, token], in positions, or are a function of the positions [prompt, row, token] there. Other heads keep
    theirs, also where heads share them: `hook_positions` has one row per head then. Measures see what was set. Raises InputError for
    layers and heads that the model lacks, for layers that rotate nothing, and, in the pass, for values of another length.
    """
    (attention,) = attentions_of(model, [layer])
    heads = attention.config.num_attention_heads
    if head is not None and not 0 <= head < heads:
        raise InputError(f"head {head} was asked for; the model's are 0 to {heads - 1}")
    if attention.assigner is None or attention.frequencies is None:
        raise InputError(
            f"layer {layer} ({attention.scheme}) rotates nothing by positions, so none can be set; choose another layer"
        )

    def put(module: nn.Module, arguments: tuple, positions: Tensor) -> Tensor:
        rows = positions if head is None else expand_heads(positions, heads)
        own = rows if head is None else rows[:, head : head + 1]
        new = values(own) if callable(values) else torch.as_tensor(values, device=own.device)
        new = new[:, None] if new.ndim == 2 else new
        try:
            new = torch.broadcast_tensors(new.to(own.dtype), own)[0]
        except RuntimeError:
            new = new.new_empty(0, 0, 0)
        if new.shape[1:] != own.shape[1:]:
            raise InputError(f"wanted positions that broadcast to {list(own[:, 0].shape)} [prompt, token] in layer {layer}")
        if head is None:
            return new
        rows = rows.expand(len(new), -1, -1)
        return torch.cat([rows[:, :head], new, rows[:, head + 1 :]], dim=1)

    handle = attention.sites.positions.register_forward_hook(put)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def exchanged_keys(model: nn.Module, orders: Mapping[int, Int[Tensor, "batch token"]]) -> Iterator[None]:
    """In the layers named by `orders`, the key at token j is that of token orders[layer][prompt, j], before any norm and rotation.

    What a scheme reads of keys (CoPE's gates) changes with them. Raises InputError for a layer that the model lacks.
    """
    with ExitStack() as hooks:
        for attention in attentions_of(model, orders):
            order = orders[attention.layer_idx]
            _attach(hooks, attention.k_proj.register_forward_hook(_exchange(order)))
        yield


@contextmanager
def moved_keys(model: nn.Module, shifts: Mapping[int, Shift]) -> Iterator[None]:
    """In the layers named by `shifts`, keys stand at z + shifts[layer](z). Raises InputError for a layer that the model lacks.

    With learned absolute positions the shift of layer 0 acts, once for the whole model; an index is rounded, and kept in the table.
    """
    with ExitStack() as hooks:
        for attention in attentions_of(model, shifts):
            shift = shifts[attention.layer_idx]
            if attention.frequencies is not None:
                _turn_keys(hooks, attention, shift)
            if isinstance(attention.position_logits, PositionBias):
                _attach(hooks, attention.position_logits.register_forward_pre_hook(_shift_index(shift)))
            if attention.scheme == "learned" and attention.layer_idx == 0:
                table = getattr(decoder_of(model), TABLE)
                _attach(hooks, table.register_forward_pre_hook(_shift_vectors(shift)))
        yield


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


def _exchange(order: Int[Tensor, "batch token"]) -> Callable:
    def hook(module: nn.Module, arguments: tuple, keys: Tensor) -> Tensor:
        if keys.shape[:2] != order.shape:
            raise ValueError(f"an order of {tuple(order.shape)} prompts and tokens came to keys of {tuple(keys.shape[:2])}")
        return keys.gather(1, order.to(keys.device)[..., None].expand_as(keys))

    return hook


def _turn_keys(hooks: ExitStack, attention: RepositionedAttention, shift: Shift) -> None:
    assigned: list[Tensor] = []

    def remember(module: nn.Module, arguments: tuple, positions: Tensor) -> None:
        assigned[:] = [positions]

    def turn_further(module: nn.Module, arguments: tuple, keys: Tensor) -> Tensor:
        assert attention.frequencies is not None
        shifted = shift(assigned.pop().detach())
        cosines, sines = rotation_tables(shifted, attention.frequencies, 1.0, keys.dtype)
        return turn(keys, expand_heads(cosines, keys.shape[1]), expand_heads(sines, keys.shape[1]))

    _attach(hooks, attention.sites.positions.register_forward_hook(remember))
    _attach(hooks, attention.sites.rotated_keys.register_forward_hook(turn_further))


def _shift_index(shift: Shift) -> Callable:
    def hook(module: nn.Module, arguments: tuple) -> tuple:
        index = arguments[KEY_INDEX]
        index = (index if index.ndim == 3 else index[:, None]).to(torch.float32)
        return (*arguments[:KEY_INDEX], index + shift(index), *arguments[KEY_INDEX + 1 :])

    return hook


def _shift_vectors(shift: Shift) -> Callable:
    def hook(module: Any, arguments: tuple) -> tuple:
        embeddings, index = arguments
        shifted = index + shift(index[:, None].to(torch.float32))[:, 0].round().to(index.dtype)
        return embeddings, torch.where(index < 0, index, shifted.clamp(0, len(module.weight) - 1))

    return hook


def _attach(hooks: ExitStack, handle: Any) -> None:
    hooks.callback(handle.remove)
