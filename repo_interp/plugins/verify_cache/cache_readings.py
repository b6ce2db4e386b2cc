"""Compare the cached keys of a layer with the keys of a dense pass: tokens and positions of slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from repo_interp.plugins.verify_cache.alignment import FARTHEST, choose_tokens, match_tokens
from repo_interp.plugins.verify_cache.pieces import Piece, pieces_of
from repo_interp.plugins.verify_cache.reference_keys import ReferenceKeys, pairs
from repo_interp.plugins.verify_cache.turned import UNCLEAR, KeyPhases, key_phases, stand_at

_PRECISION = {torch.bfloat16: (4e-3, 3e-2), torch.float16: (5e-4, 5e-3)}
_WIDE = (1e-4, 2e-3)
"""By precision of keys and model, the tolerance of 1 - a(p) and of the distance of two keys."""
_FEW = 3
"""Least number of slots of a head that no position explains, for a fault."""
STOCK, REORDERED, EXCHANGED = "stock", "reordered", "exchanged"
"""Orders of cached keys: the model's; the other order, of runtimes that permute weights; and the
model's order, but turned in pairs of the other order.
"""


@dataclass(frozen=True)
class Reading:
    """Tokens and positions of the slots of one layer."""

    layer: int
    tokens: Int[np.ndarray, "slot"]
    """Index of the slot's token; -1 if the key belongs to no token."""
    positions: Float[np.ndarray, "head slot"]
    """Positions [head, slot]; NaN where unknown."""
    wanted: Float[np.ndarray, "head slot"]
    """Positions in a dense pass."""
    unexplained: np.ndarray
    """[head, slot]: no position explains the phases."""
    order: str
    length: float
    """Length of cached keys over the length of the model's keys."""
    phases: KeyPhases | None = None
    unread: str = ""
    """The reason why positions are unknown; empty if they are known."""


def order_of(keys: Tensor, reference: ReferenceKeys, step: float) -> str:
    """Find the order in which a cache holds the entries of keys.

    Args:
        keys: Cached keys of one layer [kv_head, slot, entry].
        reference: Keys of the model.
        step: Distance due to rounding.

    Returns:
        One of `STOCK`, `REORDERED` and `EXCHANGED`; the first if several fit.
    """
    farness = {}
    for order in (STOCK, REORDERED, EXCHANGED):
        cached, plain = ordered(keys, reference, order)
        match = match_tokens(lengths_of(cached), lengths_of(plain), step)
        farness[order] = float(match.distance.median())
    # Another order than the model's must fit clearly better.
    best = min(farness, key=lambda order: farness[order])
    return best if farness[best] + step < 0.5 * farness[STOCK] else STOCK


def ordered(keys: Tensor, reference: ReferenceKeys, order: str) -> tuple[Tensor, Tensor]:
    """Return cached and unrotated keys as complex pairs.

    Args:
        keys: Cached keys [kv_head, slot, entry].
        reference: Keys of the model.
        order: Order of the entries.

    Returns:
        Cached keys [kv_head, slot, pair] and unrotated keys [kv_head, token, pair].
    """
    stock, other = reference.orders()
    of_cached = stock if order == STOCK else other
    plain = reference.plain
    if order == EXCHANGED:
        plain = plain[..., stock.argsort()][..., other]
    return pairs(keys[..., of_cached]), pairs(plain) * reference.scaling


def lengths_of(vectors: Tensor) -> Float[Tensor, "token feature"]:
    """Return features that no rotation changes, of all heads.

    Args:
        vectors: Complex pairs [head, token, pair].

    Returns:
        Lengths of pairs.
    """
    return vectors.abs().transpose(0, 1).flatten(1)


def _entries(vectors: Tensor) -> Float[Tensor, "token feature"]:
    return torch.view_as_real(vectors).transpose(0, 1).flatten(1)


def tolerances(keys: Tensor, model: torch.dtype) -> tuple[float, float]:
    """Return the tolerance of 1 - a(p), and of the distance of two keys.

    Args:
        keys: Cached keys.
        model: Precision of the model.

    Returns:
        Both tolerances, of the coarser precision.
    """
    return max(_PRECISION.get(dtype, _WIDE) for dtype in (keys.dtype, model))


def read_layer(
    keys: Tensor,
    passes: Sequence[ReferenceKeys],
    order: str,
    dtype: torch.dtype,
    known: Reading | None,
) -> Reading:
    """Find the token and the position of every slot of a layer.

    Args:
        keys: Cached keys [kv_head, slot, entry].
        passes: Keys of the model in several passes; each slot uses the nearest.
        order: Order of the entries.
        dtype: Precision of the model.
        known: Reading of another layer with as many slots and therefore the same tokens; None: no
            such layer.

    Returns:
        The reading.
    """
    layer = passes[0].attention.layer_idx
    keys, beside = passes[0].split(keys)
    tolerance, step = tolerances(keys, dtype)
    # A cache of a repositioned model holds unrotated keys, followed by their positions.
    rotates = passes[0].frequencies is not None and beside is None
    features = lengths_of if rotates else _entries
    cached = ordered(keys, passes[0], order)[0]
    matches = []
    for one in passes:
        plain = ordered(keys, one, order)[1]
        matches.append((match_tokens(features(cached), features(plain), step), plain, one))
    match, plain, reference = min(matches, key=lambda found: float(found[0].distance.mean()))
    heads, slots = cached.shape[:2]
    reach = 2 * max(slots, plain.shape[1])
    learned = reference.attention.learned or reference.positions is None
    if known is None:
        at = is_known = None
        if rotates and not learned:
            nearest = key_phases(cached, plain[:, match.nearest], reference.frequencies, tolerance)
            at, agreement = nearest.search(reach, match.nearest)
            allowed = nearest.of_layer.tolerance[0]
            # Positions far away may be common multiples of the turns of all pairs.
            is_known = (agreement >= 1 - allowed) & (allowed < UNCLEAR) & (at.abs() <= reach)
            is_known &= nearest.tells(reach)
        tokens = choose_tokens(match.compatible, at, is_known)
    else:
        tokens = known.tokens
    held = torch.as_tensor(tokens).clamp_min(0)
    nothing = np.full((heads, slots), np.nan)
    reading = Reading(layer, tokens, nothing, nothing, np.zeros((heads, slots), bool), order, 1.0)
    if known is not None and float(match.distance.median()) >= FARTHEST:
        return replace(reading, unread="their keys are not those of a dense pass")
    if reference.positions is None or (not rotates and beside is None):
        return replace(reading, unread="it does not rotate by one position per token")
    wanted = _by_head(reference.positions[:, held], heads)
    reading = replace(reading, wanted=wanted.numpy())
    if beside is not None:
        return replace(reading, positions=_by_head(beside, heads).numpy())
    if len(reference.positions) > heads:
        return replace(reading, unread="its heads share keys and have positions of their own")
    assert reference.frequencies is not None
    phases = key_phases(cached, plain[:, held], reference.frequencies, tolerance)
    ratio = cached.abs().square().sum(-1) / plain[:, held].abs().square().sum(-1).clamp_min(1e-30)
    reading = replace(reading, phases=phases, length=float(ratio.sqrt().median()))
    clear = (phases.tolerance < UNCLEAR) & torch.as_tensor(tokens >= 0)
    if learned:
        agrees = phases.agreement(wanted[..., None])[..., 0] >= 1 - phases.tolerance
        positions = torch.where(clear & agrees, wanted, torch.nan)
        return replace(reading, positions=positions.numpy(), unexplained=(clear & ~agrees).numpy())
    expected = None if known is None else _whole(known.positions, known.tokens)
    positions = _of_heads(phases, tokens, reach, expected)
    unexplained = clear.numpy() & np.isnan(positions)
    # With few slots, coarse rounding may be the reason.
    unexplained &= (unexplained.sum(1, keepdims=True) >= _FEW) & phases.tells(reach)
    if expected is not None:
        # A few keys may be off in a deep layer alone: sinks have the largest rounding errors.
        apart = (positions != expected.numpy()) & ~np.isnan(positions)
        positions[apart & (apart.sum(1, keepdims=True) < _FEW)] = np.nan
    return replace(reading, positions=positions, unexplained=unexplained)


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """Expand rows, one for all heads or one per head, to positions [head, slot]."""
    return rows.expand(heads, -1) if len(rows) == 1 else rows


def _whole(positions: np.ndarray, tokens: np.ndarray) -> Tensor:
    """Positions of slots in the first head where they are known; else the index of the token."""
    with_tokens = np.vstack([positions, tokens])
    first = np.argmax(~np.isnan(with_tokens), 0)
    return torch.as_tensor(with_tokens[first, np.arange(len(tokens))]).long()


def _of_heads(
    phases: KeyPhases, tokens: np.ndarray, reach: int, expected: Tensor | None
) -> np.ndarray:
    """Find positions of all heads together, and separately for heads that differ."""
    joint = stand_at(phases, tokens, reach, expected)
    here = _whole(joint[None].numpy(), tokens)
    near = torch.arange(-2, 3)
    agreement = phases.agreement(here[:, None] + near)
    own = agreement[..., 2]
    fits = (own >= agreement.amax(-1) - phases.tolerance) & (own >= 1 - phases.tolerance)
    is_judged = torch.as_tensor(tokens >= 0) & (phases.tolerance < UNCLEAR)
    rows = []
    for head in range(len(phases.products)):
        if bool((fits[head] | ~is_judged[head]).all()):
            rows.append(here.double().masked_fill(~is_judged[head], torch.nan))
        else:
            rows.append(stand_at(phases.head(head), tokens, reach, here))
    return torch.stack(rows).numpy()


def read_cache(
    cached: Mapping[int, Tensor],
    references: Mapping[int, ReferenceKeys],
    apart: Callable[[Sequence[Piece]], Mapping[int, ReferenceKeys]],
    dtype: torch.dtype,
) -> list[Reading]:
    """Find the token and the position of every slot of all layers.

    Args:
        cached: Keys by layer [kv_head, slot, entry].
        references: Keys of the model by layer, from a pass over all tokens.
        apart: Function that returns keys from passes over single pieces, as for joined caches.
        dtype: Precision of the model.

    Returns:
        Readings of the layers.
    """
    first = next(
        (layer for layer in cached if references[layer].frequencies is not None), min(cached)
    )
    keys, _ = references[first].split(cached[first])
    order = order_of(keys, references[first], tolerances(keys, dtype)[1])
    known: dict[int, Reading] = {}
    passes, found = [references], []
    # Keys of the first layer depend on tokens alone, so it is read first.
    for layer in sorted(cached):
        slots = cached[layer].shape[1]
        several = [one[layer] for one in passes]
        found.append(read_layer(cached[layer], several, order, dtype, known.get(slots)))
        known.setdefault(slots, found[-1])
        if len(found) == 1:
            pieces = list(pieces_of(found[0].tokens, found[0].positions[0]))
            joined = [piece for piece in pieces if piece.moved and piece.step == 1]
            if joined and len(pieces) > 1:
                passes.append(apart(joined))
    return found
