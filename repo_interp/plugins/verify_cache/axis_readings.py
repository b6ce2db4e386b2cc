"""Positions of cached keys by axis: time, height and width of a prompt with an image (mRoPE).

position(l, h, s, a)     from the pairs of layer l, key-value head h, slot s that turn by axis a;
                         see `repo_interp.plugins.verify_axes.axes`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from repo_interp.plugins.verify_axes.axes import AXES, axis_faults, positions_by_axis, turns_by_axis
from repo_interp.plugins.verify_cache.alignment import FARTHEST, choose_tokens, match_tokens
from repo_interp.plugins.verify_cache.cache_faults import CacheFault, token_faults
from repo_interp.plugins.verify_cache.cache_readings import (
    STOCK,
    lengths_of,
    order_of,
    ordered,
    tolerances,
)
from repo_interp.plugins.verify_cache.reference_keys import ReferenceKeys

_FEW = 3
"""Least number of misplaced keys of a head in a deep layer for a fault."""


@dataclass(frozen=True)
class AxisReading:
    """Tokens and positions of the slots of one layer."""

    layer: int
    tokens: Int[np.ndarray, "slot"]
    """Index of the slot's token; -1 if the key belongs to no token."""
    positions: Float[np.ndarray, "axis head slot"]
    """NaN if the key does not determine the position."""
    wanted: Float[np.ndarray, "axis slot"]
    of_tokens: tuple[CacheFault, ...]
    """Slots of no token, and tokens without a slot."""
    of_axes: tuple[CacheFault, ...] = ()
    unread: tuple[str, ...] = ()
    """The unknown positions, and the reason."""
    order: str = STOCK


def read_by_axis(
    cached: Mapping[int, Tensor],
    references: Mapping[int, ReferenceKeys],
    positions: Int[Tensor, "axis token"],
    needed: Callable[[ReferenceKeys], int],
    dtype: torch.dtype,
) -> list[AxisReading]:
    """Find the token, and the position on every axis, of every slot of all layers.

    Args:
        cached: Keys by layer [kv_head, slot, entry].
        references: Keys of the model by layer, from a pass with these positions.
        positions: Positions of the prompt.
        needed: By layer, the first token that later tokens see.
        dtype: Precision of the model.

    Returns:
        Readings of the layers.
    """
    first = min(cached)
    order = order_of(cached[first], references[first], tolerances(cached[first], dtype)[1])
    known: dict[int, AxisReading] = {}
    found = []
    for layer in sorted(cached):
        slots = cached[layer].shape[1]
        reading = _read_layer(
            cached[layer], references[layer], order, positions, dtype, known.get(slots), needed
        )
        known.setdefault(slots, reading)
        found.append(reading)
    return found


def _read_layer(
    keys: Tensor,
    reference: ReferenceKeys,
    order: str,
    positions: Tensor,
    dtype: torch.dtype,
    known: AxisReading | None,
    needed: Callable[[ReferenceKeys], int],
) -> AxisReading:
    layer, axes = reference.attention.layer_idx, reference.attention.rotation.axes
    cached, plain = ordered(keys, reference, order)
    match = match_tokens(lengths_of(cached), lengths_of(plain), tolerances(keys, dtype)[1])
    # Placeholders of an image have equal keys; a slot then takes the token of the same index.
    tokens = choose_tokens(match.compatible, None, None) if known is None else known.tokens
    held = torch.as_tensor(tokens).clamp_min(0)
    wanted, (heads, slots) = positions[:, held], cached.shape[:2]
    nothing = np.full((len(AXES), heads, slots), np.nan)
    of_tokens = tuple(token_faults(tokens, needed(reference)))
    reading = AxisReading(layer, tokens, nothing, wanted.numpy(), of_tokens, order=order)
    if axes is None or reference.frequencies is None:
        return replace(reading, unread=("it does not turn by axes",))
    if known is not None and float(match.distance.median()) >= FARTHEST:
        return replace(reading, unread=("their keys are not those of a dense pass",))
    own = torch.as_tensor(tokens >= 0)
    coarsest = max(keys.dtype, dtype, key=lambda kind: torch.finfo(kind).eps)
    turns = turns_by_axis(
        cached[:, own],
        plain[:, held[own]],
        reference.frequencies,
        axes,
        wanted[:, own],
        held[own],
        coarsest,
    )
    at, lost = positions_by_axis(turns)
    if known is not None:
        # A few keys in a deep layer may be off: sinks have the largest rounding errors.
        off = lost | ((at - turns.wanted[:, None]).nan_to_num() != 0)
        few = off & (off.sum(-1, keepdim=True) < _FEW)
        at, lost = at.masked_fill(few, torch.nan), lost & ~few
    nothing[..., own.numpy()] = at.numpy()
    faults = tuple(CacheFault(*vars(fault).values()) for fault in axis_faults(turns, at, lost))
    # A layer with fewer known positions than the first layer, and no contradiction, gets its
    # faults.
    if known is not None and not bool(lost.any()) and _agree(nothing, known.positions):
        faults = known.of_axes
    unread = []
    for name, unclear, number in zip(AXES, at.isnan() & ~lost, range(len(AXES)), strict=True):
        if not bool((turns.axes == number).any()):
            unread.append(f"no pair turns by {name}")
        elif bool(unclear.any()):
            many = "all" if bool(unclear.all()) else "some"
            unread.append(f"neighboring positions in {name} look alike for {many} keys")
    return replace(reading, of_axes=faults, unread=tuple(unread))


def _agree(told: np.ndarray, known: np.ndarray) -> bool:
    """Whether some positions are known in both, and all of these agree."""
    if told.shape != known.shape:
        return False
    both = ~np.isnan(told) & ~np.isnan(known)
    return bool(both.any() and (told[both] == known[both]).all())


def verdicts_by_axis(kinds: Sequence[str], told: Sequence[bool]) -> str:
    """Give a verdict for each axis.

    Args:
        kinds: Kinds of faults.
        told: Whether some position is known, by axis.

    Returns:
        The text, such as "time: contiguous; height: height shifted by +1; width: not told".
    """
    texts = []
    for name, known in zip(AXES, told, strict=True):
        of_axis = [kind for kind in kinds if name in kind or not any(axis in kind for axis in AXES)]
        found = ", ".join(dict.fromkeys(of_axis)) or "contiguous"
        texts.append(f"{name}: {found if known else 'not told'}")
    return "; ".join(texts)
