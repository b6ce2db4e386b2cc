"""Positions in a key-value cache: they travel inside the keys, as further columns.

    cached key of token j:   [ k_j | z_j | length | gate keys | memory ]        k_j unrotated

The length is that of the pass of token j, where frequencies depend on it: as in a stock cache, a
key keeps the frequencies it came with. The memory is what an assigner remembers of the token.

So whatever a cache does to keys - growing, reordering for beams, cropping, sliding windows - it
does to their positions. A cached position keeps all its bits: where keys are of half precision, it
takes two columns of theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.positions.assigners import RememberingAssigner
from repo_interp.positions.rotary import expand_heads


class CacheOfPositions:
    """A layer's view of a cache, whose `update` stores positions beside keys."""

    def __init__(self, cache: Any, attention: Any) -> None:
        """`attention`: the `RepositionedAttention` whose pass this is."""
        self._cache, self._attention = cache, attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys, values and positions of a pass.

        Args:
            keys: [batch, kv_head, token, d_head], of this pass.
            values: [batch, kv_head, token, d_value], of this pass.
            layer: Number of the layer.
            *arguments: Further arguments of the cache.
            **keywords: Further arguments of the cache.

        Returns:
            Keys and values of all tokens so far, as a stock cache gives them; positions and gate
            keys go to the pass.
        """
        current = self._attention.active_pass
        if (keys.shape[1], keys.shape[-1]) == (self._attention.kv_heads, self._attention.d_head):
            keys, values = self._attention.process_new(keys, values)
            keys = self._attention.stock_order(keys)
        # else latents, of which keys are made later, before the hooks on keys
        parts = [keys]
        positions = current.positions
        shape = None if positions is None else positions.shape
        if positions is not None:
            rows_of = positions.expand(len(keys), *positions.shape[1:])
            if positions.ndim == 4:  # a row for every pair
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
        # One tensor, so that the cache treats positions as it treats keys.
        sizes = [part.shape[-1] for part in parts]
        stored, values = self._cache.update(
            torch.cat(parts, dim=-1), values, layer, *arguments, **keywords
        )
        keys, *beside = stored.split(sizes, dim=-1)
        if positions is not None and shape is not None:
            # with their gradient, which bits do not have
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


def remembered(keys: Tensor, assigner: RememberingAssigner) -> Float[Tensor, "batch key feature"]:
    """Read the memory of an assigner off cached keys.

    Args:
        keys: As a cache holds them [batch, kv_head, key, column].
        assigner: The assigner of the layer.

    Returns:
        Its memory of the cached tokens, in its precision.
    """
    dtype, groups = assigner.dtype, -(-assigner.features // keys.shape[1])
    columns = keys[..., -groups * max(1, dtype.itemsize // keys.dtype.itemsize) :]
    return _rows(columns, dtype, assigner.features).transpose(1, 2)


def _columns(positions: Tensor, keys: Tensor) -> Tensor:
    """Unrounded positions [batch, P, token] as [batch, kv_head, token, column] of keys' dtype."""
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


def _rows(columns: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """The inverse of `_columns`: [batch, P, token] with P = `rows`."""
    if columns.dtype.itemsize < dtype.itemsize:
        columns = columns.clone(memory_format=torch.contiguous_format).view(dtype)
    by_head = columns.to(dtype).transpose(2, 3).flatten(1, 2)
    return by_head[:, :rows]
