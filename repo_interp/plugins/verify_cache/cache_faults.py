"""Faults of the keys of a cache, in words.

Slots with tokens j, j + 1, ... at positions that change by a constant step are one piece: step 1
counts (from p = j on, or moved by p - j), 0 is not turned, 2 turned twice, -1 turned back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int

from repo_interp.plugins.verify_cache.cache_readings import EXCHANGED, Reading
from repo_interp.plugins.verify_cache.pieces import Piece, pieces_of
from repo_interp.plugins.verify_cache.turned import KeyPhases
from repo_interp.values import format_ranges

_NAMED = 5
"""Most pieces that a finding names."""
_LENGTH = 2e-2
"""Relative difference of lengths that is a fault."""
_COHERENT = 0.9
"""Least share of a pair's turns between tokens that must agree to determine its frequency."""
_LEARNED = 1e-2
"""Difference of learned positions that is a fault."""


@dataclass(frozen=True)
class CacheFault:
    """One fault of some slots."""

    kind: str
    """The verdict, in one or two words."""
    text: str
    heads: tuple[int, ...] = ()
    """Heads with the fault; empty: all."""


def faults_of(reading: Reading, first: Reading, needed: int) -> Iterator[CacheFault]:
    """Find the faults of one layer.

    Args:
        reading: Reading of the layer.
        first: Reading of the first layer with as many slots; it gives the positions of slots whose
            position is unknown in this layer.
        needed: The first token that later tokens see, by the window of the layer.

    Yields:
        Faults.
    """
    yield from token_faults(reading.tokens, needed)
    if reading.order == EXCHANGED:
        yield CacheFault(
            "other pairs", "keys are turned in other pairs of entries than the model's"
        )
    if reading.phases is not None and abs(reading.length - 1) > _LENGTH:
        text = f"keys are {reading.length:.3g} times as long as the model's (attention factor)"
        yield CacheFault("other length", text)
    if reading.phases is None:
        off = (np.abs(reading.positions - reading.wanted) > _LEARNED) & (reading.tokens >= 0)
        yield from _of_learned(reading, off)
        return
    if not np.array_equal(reading.wanted, np.broadcast_to(reading.tokens, reading.wanted.shape)):
        known = (reading.tokens >= 0) & ~np.isnan(reading.wanted)
        if not np.array_equal(reading.wanted[known], np.floor(reading.wanted[known])):
            yield from _of_learned(reading, reading.unexplained)
            return
    elsewhere = first.positions if first.phases is not None else reading.positions
    by_head = [
        tuple(_of_head(reading, head, elsewhere[head])) for head in range(len(reading.positions))
    ]
    for faults in dict.fromkeys(by_head):
        heads = tuple(head for head, found in enumerate(by_head) if found == faults)
        for fault in faults:
            some = heads if len(heads) < len(by_head) else ()
            yield CacheFault(fault.kind, fault.text, some)


def _of_learned(reading: Reading, off: np.ndarray) -> Iterator[CacheFault]:
    if off.any():
        found = _tokens(reading.tokens[off.any(0)])
        yield CacheFault(
            "other positions", f"in a dense pass other positions are learned for {found}"
        )


def token_faults(tokens: Int[np.ndarray, "slot"], needed: int) -> Iterator[CacheFault]:
    """Find slots of no token, and tokens without a slot, or with several.

    Args:
        tokens: Index of each slot's token, -1 for a slot without one.
        needed: The first token that later tokens see.

    Yields:
        Faults.
    """
    held = tokens[tokens >= 0]
    if (strange := np.flatnonzero(tokens < 0)).size:
        slots = f"slot{'s' * (len(strange) > 1)} {format_ranges(strange.tolist())}"
        yield CacheFault("wrong token", f"keys of none of the tokens in {slots}")
    if not held.size:
        return
    # A cache may end before the tokens do: the last generated token is never cached.
    missing = [token for token in range(needed, int(held.max())) if token not in {*held.tolist()}]
    if missing and not strange.size:
        yield CacheFault("evicted", f"the cache lacks {_tokens(missing)}")
    values, counts = np.unique(held, return_counts=True)
    if (counts > 1).any():
        yield CacheFault("repeated", f"several slots hold {_tokens(values[counts > 1])}")


def _of_head(reading: Reading, head: int, elsewhere: np.ndarray) -> Iterator[CacheFault]:
    lost = reading.unexplained[head]
    if lost.any():
        where = _tokens(reading.tokens[lost])
        assert reading.phases is not None
        frequencies = _frequencies(reading.phases.head(head), reading.tokens)
        yield CacheFault("other angles", f"no position explains the phases of {where}{frequencies}")
        if 2 * lost.sum() >= (~np.isnan(reading.positions[head])).sum():
            return  # a position that fits by chance
    untold = np.isnan(reading.positions[head]) & ~lost
    positions = np.where(untold, elsewhere, reading.positions[head])
    pieces = list(pieces_of(reading.tokens, positions))
    wrong: dict[str, list[Piece]] = {}
    for piece in pieces:
        kind = {0: "not turned", 2: "turned twice", -1: "turned back"}.get(piece.step, "moved")
        if piece.step == 1 and not piece.moved:
            continue
        wrong.setdefault(kind, []).append(piece)
    moved = wrong.pop("moved", [])
    for kind, some in wrong.items():
        means = {
            "not turned": "as if at position {0}",
            "turned twice": "at twice their positions, from {0} on",
            "turned back": "backwards, from {0} on",
        }[kind]
        tokens = [token for piece in some for token in range(piece.tokens[0], piece.tokens[1] + 1)]
        yield CacheFault(kind, f"{_tokens(tokens)} {means.format(some[0].positions[0])}")
    if moved:
        yield _moved(moved, pieces)


def _moved(moved: Sequence[Piece], pieces: Sequence[Piece]) -> CacheFault:
    """Name the fault of pieces that are moved together, or by different distances."""
    by = {piece.moved for piece in moved}
    texts = [
        f"{_tokens(range(piece.tokens[0], piece.tokens[1] + 1))} at "
        f"{_span('position', *piece.positions)}, {abs(piece.moved):,} too "
        f"{'late' if piece.moved > 0 else 'early'}"
        for piece in moved
    ]
    more = f"; and {len(texts) - _NAMED} more pieces" if len(texts) > _NAMED else ""
    text = "; ".join(texts[:_NAMED]) + more
    if len(by) == 1 and len(moved) == len(pieces):
        return CacheFault(f"shifted by {by.pop():+,}", text)
    ends = sorted(piece.positions for piece in pieces)
    dense = all(after[0] == before[1] + 1 for before, after in pairwise(ends))
    note = "; positions run on without a gap" if dense else ""
    return CacheFault("fragments", text + note)


def _frequencies(phases: KeyPhases, tokens: np.ndarray) -> str:
    """State the frequencies of the cache, if turns between tokens agree."""
    products = phases.products[0]
    follows = torch.as_tensor(np.diff(tokens) == 1)
    steps = (products[1:] * products[:-1].conj())[follows]
    total = steps.sum(0)
    if len(steps) < 2 or float(total.abs().sum() / steps.abs().sum().clamp_min(1e-30)) < _COHERENT:
        return ""
    measured = total.angle()
    off = torch.remainder(measured - phases.frequencies + math.pi, 2 * math.pi) - math.pi
    worst = int(off.abs().argmax())
    return (
        f": expected theta {float(phases.frequencies[worst]):.6g} (pair {worst}), measured "
        f"{float(measured[worst]):.6g}"
    )


def _tokens(numbers: Iterable[int]) -> str:
    listed = sorted({int(number) for number in numbers})
    return f"token{'s' * (len(listed) > 1)} {format_ranges(listed)}"


def _span(name: str, first: int, last: int) -> str:
    return f"{name} {first:,}" if first == last else f"{name}s {first:,} to {last:,}"
