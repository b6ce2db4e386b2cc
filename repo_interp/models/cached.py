"""Key-value caches: the data that a layer caches per token, besides values.

    cached key of token j:   [ R(z_j) k_j ]                                 z_j: the token index
                             [ k_j | z_j | length | gate keys | memory ]    k_j unrotated

The first form is the stock model's, so such caches can be exchanged with it. A layer uses it if
only the index rotates keys, unless an intervention, which may need more of a key, is active when
the cache begins. A cache keeps the form it began with, which shows in the width of its keys. Layers
that cache latents, or that pass their keys to other layers, use the second form.

In the second form positions are further columns of the keys. `length` is the length of token j's
pass, for frequencies that depend on it: as in a stock cache, a key keeps the frequencies of its
pass. `memory` is the data that an assigner remembers of the token. So every operation of a cache on
keys (growing, reordering for beams, cropping, sliding windows) also applies to positions. A cached
position keeps all its bits: with keys in half precision it takes two columns.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import cache_utils

from repo_interp.errors import InputError
from repo_interp.models.masks import visible
from repo_interp.models.rotation_numbers import rows_of
from repo_interp.positions.assigners import RememberingAssigner, TokenIndex
from repo_interp.positions.rotary import expand_heads

_BY_AXIS = "repo_interp_by_axis"
"""Attribute of a cache whose tokens have a position per axis."""
_QUANTIZED = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)
"""Cache layers that round cached values."""


class CacheOfPositions:
    """A layer's view of a cache; `update` stores positions with the keys."""

    def __init__(self, cache: Any, attention: Any) -> None:
        """`attention`: the `RepositionedAttention` that runs."""
        self._cache, self._attention = cache, attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys, values and positions of a pass.

        Args:
            keys: Keys of this pass [batch, kv_head, token, d_head].
            values: Values of this pass [batch, kv_head, token, d_value].
            layer: Number of the layer.
            *arguments: Further arguments of the cache.
            **keywords: Further arguments of the cache.

        Returns:
            Keys and values of all tokens so far, as from a stock cache. Positions and gate keys are
            stored in the pass.
        """
        attention, current = self._attention, self._attention.active_pass
        # A cache that drops keys returns keys that are not consecutive.
        numbers_of = getattr(_layer_of(self._cache, layer), "numbers_of", lambda _: None)
        current.key_numbers = numbers_of(current)
        if (keys.shape[1], keys.shape[-1]) == (attention.kv_heads, attention.d_head):
            keys, values = attention.process_new(keys, values)
            if self._keeps_rotated(layer):
                keys = attention.rotate_new(keys)
                return self._cache.update(
                    attention.stock_order(keys), values, layer, *arguments, **keywords
                )
            keys = attention.stock_order(keys)
        # Otherwise latents; keys are made from them later, before the hooks on keys
        parts = [keys]
        positions = current.new_key_positions
        shape = None if positions is None else positions.shape
        if positions is not None:
            rows_of = positions.expand(len(keys), *positions.shape[1:])
            if positions.ndim == 4:  # one row per pair
                rows_of = rows_of.transpose(2, 3).flatten(1, 2)
            parts.append(_columns(rows_of, keys))
        if current.length is not None:
            parts.append(
                _columns(
                    torch.full(
                        (len(keys), 1, keys.shape[2]), float(current.length), device=keys.device
                    ),
                    keys,
                )
            )
        if current.gate_keys is not None:
            parts.append(expand_heads(current.gate_keys, keys.shape[1]))
        if current.memory is not None:
            parts.append(_columns(current.memory.transpose(1, 2), keys))
        # One tensor, so that the cache treats positions like keys.
        sizes = [part.shape[-1] for part in parts]
        self._require_room(layer, sizes)
        stored, values = self._cache.update(
            torch.cat(parts, dim=-1), values, layer, *arguments, **keywords
        )
        keys, *beside = stored.split(sizes, dim=-1)
        if positions is not None and shape is not None:
            # The original tensors have a gradient; reinterpreted bits do not
            fresh = stored.shape[2] == shape[2]
            columns = beside.pop(0)
            if not fresh:
                positions = _rows(columns, positions.dtype, shape[1] * shape[3:].numel())
                if len(shape) == 4:
                    positions = positions.unflatten(1, (shape[1], shape[3])).transpose(2, 3)
            current.key_positions = positions
        if current.length is not None:
            current.key_lengths = _rows(beside.pop(0), torch.float32, 1)[:, 0]
        if current.gate_keys is not None:
            current.gate_keys = beside[0]
        return keys, values

    def _keeps_rotated(self, layer: int) -> bool:
        """Whether the cache has keys of this layer in the form of the stock model."""
        attention, current = self._attention, self._attention.active_pass
        # None: without rotation the stock model's keys are the unrotated ones
        if current.positions is None or attention.frequencies is None:
            return False
        by_index = isinstance(attention.assigner, TokenIndex) and attention.position_logits is None
        # A remainder may read keys before rotation, as added logits do.
        by_index = by_index and current.of_keys is None and attention.remainder is None
        # Heads that share a key, and turn it by positions or frequencies of their own, need it
        # unrotated.
        rows = max(current.positions.shape[1], rows_of(attention.frequencies))
        by_index = by_index and attention.kv_heads % rows == 0
        held, width = _layer_of(self._cache, layer), _held_width(self._cache, layer)
        if isinstance(held, _QUANTIZED) and current.start:  # no others, see `_require_room`
            width = attention.d_head
        if width is None:
            return by_index and not current.handed_on and not attention.interventions
        if width != attention.d_head:
            return False
        if not by_index or attention.rotation_is_changed or current.handed_on:
            raise InputError(
                f"the cache holds rotated keys of layer {layer} without positions beside them, "
                f"which {attention.scheme!r} needs here; begin a new cache with this model, inside "
                "of the interventions that last now"
            )
        return True

    def _require_room(self, layer: int, sizes: list[int]) -> None:
        """Raise InputError for a cache that cannot hold columns of `sizes`."""
        width, name = _held_width(self._cache, layer), type(self._cache).__name__
        if width not in (None, sum(sizes)):
            raise InputError(
                f"the {name} holds keys of {width} numbers in layer {layer}, and those of this pass "
                f"have {sum(sizes)} ({self._attention.scheme!r}, with positions beside them); begin "
                "a new cache"
            )
        if len(sizes) > 1 and isinstance(_layer_of(self._cache, layer), _QUANTIZED):
            raise InputError(
                f"a quantized cache would round the positions that layer {layer} "
                f"({self._attention.scheme}) stores with its keys; choose another cache, or "
                "generate outside of interventions"
            )


def _layer_of(cache: Any, layer: int) -> Any:
    """A layer of a cache; None if it does not exist yet."""
    layers = getattr(cache, "layers", ())
    return layers[layer] if layer < len(layers) else None


def _held_width(cache: Any, layer: int) -> int | None:
    """Width of the cached keys; None for an empty cache."""
    keys = getattr(_layer_of(cache, layer), "keys", None)
    return None if keys is None or keys.ndim < 4 else keys.shape[-1]


def cached_tokens(cache: Any, layer: int, tokens: int) -> int:
    """Count the tokens in a cache before a pass.

    Args:
        cache: Cache of transformers, or None.
        layer: Number of the layer.
        tokens: Tokens of the pass.

    Returns:
        Number of cached tokens before this pass.
    """
    if cache is None:
        return 0
    try:
        if held := int(cache.get_seq_length(layer)):
            return held
    except ValueError:
        pass
    # The first pass; or a layer without a cache that reads the keys of an earlier layer, which
    # already has the keys of this pass.
    return max(0, int(cache.get_seq_length()) - tokens)


def index_by_axis(
    index: Int[Tensor, "axis batch token"], cache: Any, start: int
) -> Int[Tensor, "*axis batch token"]:
    """Return token indices by axis (of an image), or one index if all axes agree.

    Args:
        index: Time, height and width of every token.
        cache: Cache of transformers; None: there is none.
        start: Tokens in the cache.

    Returns:
        One index if axes agree and no cached token has indices by axis; else indices by axis.

    Raises:
        InputError: Cached tokens have one position each.
    """
    cached = getattr(cache, _BY_AXIS, False)
    if bool((index == index[:1]).all()) and not cached:
        return index[0]
    if start and not cached:
        raise InputError(
            "the tokens in the cache have one position each, and those of this pass one for "
            "each axis (an image's); give all of them to one pass"
        )
    if cache is not None:  # later tokens are cached beside these
        setattr(cache, _BY_AXIS, True)
    return index


def positions_of_keys(attention: Any, keys: Tensor) -> Float[Tensor, "batch any key *pair"] | None:
    """Return positions of all keys: from the cache, or counted if an earlier layer made the keys.

    Args:
        attention: The `RepositionedAttention` that runs.
        keys: Keys of all tokens [batch, kv_head or head, key, d_head].

    Returns:
        Positions in rows; None if the layer assigns no positions.

    Raises:
        InputError: The positions are unknown.
    """
    current, positions = attention.active_pass, attention.active_pass.new_key_positions
    if current.key_positions is not None:
        return current.key_positions
    if positions is None or positions.shape[2] == keys.shape[2]:
        return positions
    if current.turning is not None:
        raise InputError(
            f"the cache holds rotated keys of layer {attention.layer_idx} without positions beside "
            "them, which are wanted here; begin a new cache inside of the interventions that last"
        )
    if attention.scheme != "rope" or attention.follows_length or positions.ndim == 4:
        raise InputError(
            f"layer {attention.layer_idx} ({attention.scheme}) reads keys of another layer, which "
            "have no positions of its own"
        )
    if attention.sites.positions._forward_hooks:
        raise InputError(
            f"layer {attention.layer_idx} reads keys of another layer, and does not know the changed "
            "positions of cached tokens; pass use_cache=False"
        )
    counted = current.counted_index(keys.shape[2])[:, None].to(positions.dtype)
    counted = counted.expand(len(positions), positions.shape[1], -1)
    end = current.end(keys.shape[2])
    begin = end - positions.shape[-1]
    return torch.cat([counted[..., :begin], positions, counted[..., end:]], dim=-1)


def assign_with_memory(
    attention: Any, assigner: RememberingAssigner, hidden_states: Tensor, index: Tensor, cache: Any
) -> Float[Tensor, "batch any token *component"]:
    """Assign positions to tokens from the memory of all keys that they see.

    Args:
        attention: The `RepositionedAttention` that runs; it gets the new memory.
        assigner: Its assigner.
        hidden_states: [batch, token, d_model].
        index: Token indices.
        cache: Cache of transformers; None: there is none.

    Returns:
        Positions of the tokens of the pass.

    Raises:
        InputError: The cache has the memory elsewhere.
    """
    current, rows, device = attention.active_pass, hidden_states.shape[1], hidden_states.device
    past = None
    if current.start:
        if getattr(cache, "offloading", False):
            raise InputError(
                f"layer {attention.layer_idx} ({attention.scheme}) reads its memory of earlier "
                "tokens before an offloaded cache has fetched it; choose another cache"
            )
        keys = cache.layers[attention.layer_idx].keys[:, :, : current.start]
        past = _remembered(keys, assigner)
        if current.attention_mask is not None:  # a full static cache drops its first key
            past = past[:, -max(1, current.attention_mask.shape[-1] - rows) :]
    count = rows if past is None else past.shape[1] + rows
    seen = visible(rows, count, current.attention_mask, device)
    ahead = torch.arange(count - rows, count, device=device)[:, None] - torch.arange(
        count, device=device
    )
    if attention.sliding_window is not None:
        seen = seen & (ahead < attention.sliding_window)
    # Padding sees itself, so that no row is empty
    positions, current.memory = assigner(hidden_states, index, past, seen | (ahead == 0))
    return positions


def _remembered(keys: Tensor, assigner: RememberingAssigner) -> Float[Tensor, "batch key feature"]:
    """Read the memory of an assigner from cached keys [batch, kv_head, key, column]."""
    dtype, groups = assigner.dtype, -(-assigner.features // keys.shape[1])
    columns = keys[..., -groups * max(1, dtype.itemsize // keys.dtype.itemsize) :]
    return _rows(columns, dtype, assigner.features).transpose(1, 2)


def _columns(positions: Tensor, keys: Tensor) -> Tensor:
    """Convert positions [batch, P, token] bitwise to columns [batch, kv_head, token, column]."""
    kv_heads = keys.shape[1]
    if positions.shape[1] > 1:
        positions = nn.functional.pad(positions, (0, 0, 0, -positions.shape[1] % kv_heads))
    groups = max(1, positions.shape[1] // kv_heads)  # heads that share a key
    by_key = (
        expand_heads(positions, kv_heads * groups).unflatten(1, (kv_heads, groups)).transpose(2, 3)
    )
    if positions.dtype == keys.dtype:
        return by_key
    if positions.dtype.itemsize < keys.dtype.itemsize:
        return by_key.to(keys.dtype)
    return by_key.detach().clone(memory_format=torch.contiguous_format).view(keys.dtype)


def read_positions_beside(
    columns: Tensor, dtype: torch.dtype, rows: int
) -> Float[Tensor, "batch row token"]:
    """Read the positions that a cache stores with keys.

    Args:
        columns: Columns after the entries of keys [batch, kv_head, token, column].
        dtype: Precision of the positions.
        rows: Rows of positions: 1, or the number of heads or key-value heads.

    Returns:
        Positions of the cached tokens.
    """
    groups = max(1, rows // columns.shape[1])
    width = groups * max(1, dtype.itemsize // columns.dtype.itemsize)
    return _rows(columns[..., :width], dtype, rows)


def _rows(columns: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """Invert `_columns`: [batch, P, token] with P = `rows`."""
    if columns.dtype.itemsize < dtype.itemsize:
        columns = columns.clone(memory_format=torch.contiguous_format).view(dtype)
    by_head = columns.to(dtype).transpose(2, 3).flatten(1, 2)
    return by_head[:, :rows]
