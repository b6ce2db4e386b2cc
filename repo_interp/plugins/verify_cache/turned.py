"""Find the position by which a key is turned, from its phases relative to the unrotated key.

    a(p) = Re sum_r x_r conj(k_r) exp(-i theta_r p) / (|x| |k|)      1 if x = exp(i theta p) k
    rho  = 1 - sum_r |x_r| |k_r| / (|x| |k|)                         0 if x is any rotation of k

x is the cached key, k the unrotated key, r a pair. Rounding and another context change lengths as
much as phases. No rotation changes rho, so it bounds the deviation of 1 - a(p) from 0: the
tolerance of a slot is that of the precision plus `ALLOWED` rho. Positions of a cache lie on a few
lines p = m j + c over the tokens j: m = 1 counts, 0 does not turn, 2 turns twice, -1 turns back.
The line that fits most slots is therefore tried first on all slots. This module knows no model.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

ALLOWED = 8.0
"""Allowed ratio of 1 - a(p) to rho; under rounding its expectation is 2."""
UNCLEAR = 0.05
"""Tolerance at which the position of a slot counts as unknown."""
SLOPES = (1, 0, 2, -1)
_FEW = 3
"""Least number of slots on a line with a slope other than 1."""
_NEAR = 8
"""Positions on both sides of an expected position that are tried first."""
_LONGEST = 1 << 15
"""The farthest position to try, unless the cache is longer."""
_BY_CHANCE = 1e-3
"""Expected number of tried positions that may fit the phases of a slot by chance."""
_SLACK = 1e-4
"""Penalty on a(p) at the farthest position; it grows linearly from 0 at position 0."""
_MOST = 0.8
"""Share of slots that may have a common offset, above which they are taken to have it."""
_BLOCK = 1 << 22
"""Most numbers that are computed at once."""


@dataclass(frozen=True)
class KeyPhases:
    """Phases of cached keys relative to unrotated keys."""

    products: Complex[Tensor, "head slot pair"]
    sizes: Float[Tensor, "head slot"]
    """|x| |k|."""
    frequencies: Float[Tensor, "pair"]
    tolerance: Float[Tensor, "head slot"]

    @property
    def of_layer(self) -> KeyPhases:
        """All heads joined into one, since heads of a layer mostly have the same positions."""
        weights = self.sizes / self.sizes.sum(0).clamp_min(1e-30)
        return KeyPhases(
            self.products.sum(0, keepdim=True),
            self.sizes.sum(0, keepdim=True),
            self.frequencies,
            (weights * self.tolerance).sum(0, keepdim=True),
        )

    def head(self, head: int) -> KeyPhases:
        """Phases of one head.

        Args:
            head: Key-value head.

        Returns:
            Phases with a head axis of length 1.
        """
        one = slice(head, head + 1)
        return KeyPhases(self.products[one], self.sizes[one], self.frequencies, self.tolerance[one])

    def at(self, slots: Tensor) -> KeyPhases:
        """Phases of some slots.

        Args:
            slots: Mask of slots.

        Returns:
            Their phases.
        """
        return KeyPhases(
            self.products[:, slots],
            self.sizes[:, slots],
            self.frequencies,
            self.tolerance[:, slots],
        )

    def agreement(self, positions: Tensor) -> Float[Tensor, "head slot candidate"]:
        """Compute a(p).

        Args:
            positions: Candidates [slot, candidate], or [head, slot, candidate].

        Returns:
            a(p) [head, slot, candidate].
        """
        by_candidate = []
        for at in positions.unbind(-1):  # one by one: all at once would not fit
            angles = at[..., None].double() * self.frequencies
            turned = self.products * torch.polar(torch.ones_like(angles), -angles)
            by_candidate.append(turned.real.sum(-1))
        return torch.stack(by_candidate, -1) / self.sizes[..., None].clamp_min(1e-30)

    @property
    def reach(self) -> float:
        """The farthest position up to which no phases fit by chance."""
        chance = float((2 * self.of_layer.tolerance.median()).sqrt().clamp(max=1.0)) / math.pi
        pairs = int((self.frequencies * _LONGEST > math.pi).sum())
        by_chance = chance**pairs  # 0 for exact keys, or for many pairs
        enough = 0.5 * _BY_CHANCE
        return enough / by_chance if by_chance * _LONGEST > enough else _LONGEST

    def tells(self, reach: int) -> bool:
        """Whether there are enough pairs to distinguish all positions of a cache.

        Args:
            reach: The last position in both directions.

        Returns:
            True if there are enough.
        """
        return self.reach >= reach

    def search(
        self, reach: int, tokens: Tensor
    ) -> tuple[Int[Tensor, "slot"], Float[Tensor, "slot"]]:
        """Find the position that explains the phases of each slot best, over all heads.

        Args:
            reach: The last position in both directions, at least; farther positions are tried as
                long as none fits by chance.
            tokens: Token of each slot; if a common offset is possible for most slots, it is
                preferred.

        Returns:
            The position, and a(p) at it.
        """
        product, size = self.products.sum(0), self.sizes.sum(0).clamp_min(1e-30)
        phases = product / size[:, None]
        joint = self.of_layer
        if self.tells(reach):
            best = self._best(phases, max(reach, int(self.reach)))
        else:  # too few pairs: any result would fit by chance
            lines = torch.stack([slope * tokens for slope in SLOPES], 1)
            best = lines.gather(1, joint.agreement(lines)[0].argmax(1)[:, None])[:, 0]
        agreement = joint.agreement(best[:, None])[0, :, 0]
        back = torch.polar(torch.ones_like(phases.real), -tokens[:, None] * self.frequencies)
        together = tokens + self._best((phases * back).mean(0, keepdim=True), _LONGEST)
        also = joint.agreement(together[:, None])[0, :, 0]
        fits = also >= 1 - joint.tolerance[0]
        if float(fits.double().mean()) > _MOST:
            best, agreement = torch.where(fits, together, best), torch.where(fits, also, agreement)
        return best, agreement

    def _best(self, phases: Complex[Tensor, "slot pair"], reach: int) -> Int[Tensor, "slot"]:
        positions = torch.arange(-reach, reach + 1)
        angles = self.frequencies[:, None] * positions.double()
        waves = torch.cat([angles.cos(), angles.sin()]).float()
        both = torch.cat([phases.real, phases.imag], 1).float()
        less = _SLACK * positions.abs() / reach
        places = [
            (block @ waves - less).argmax(1)
            for block in both.split(max(1, _BLOCK // len(positions)))
        ]
        return positions[torch.cat(places)]


def key_phases(
    cached: Complex[Tensor, "head slot pair"],
    plain: Complex[Tensor, "head slot pair"],
    frequencies: Float[Tensor, "pair"],
    tolerance: float,
) -> KeyPhases:
    """Compare cached keys with the unrotated keys of their tokens.

    Args:
        cached: Keys of the slots.
        plain: Unrotated keys of the tokens that the slots hold.
        frequencies: Radians per position.
        tolerance: Tolerance of 1 - a(p) for the precision.

    Returns:
        Phases of the slots.
    """
    turning = frequencies != 0
    cached, plain, frequencies = cached[..., turning], plain[..., turning], frequencies[turning]
    products = cached * plain.conj()
    sizes = cached.abs().square().sum(-1).sqrt() * plain.abs().square().sum(-1).sqrt()
    radial = 1 - products.abs().sum(-1) / sizes.clamp_min(1e-30)
    typical = radial.median(1, keepdim=True).values
    return KeyPhases(products, sizes, frequencies, tolerance + ALLOWED * radial.maximum(typical))


def stand_at(
    phases: KeyPhases,
    tokens: Int[np.ndarray, "slot"],
    reach: int,
    expected: Int[Tensor, "slot"] | None = None,
) -> Float[Tensor, "slot"]:
    """Find the positions of slots, over all heads of `phases`.

    Args:
        phases: Phases of the slots.
        tokens: Token of each slot.
        reach: The last position to try, in both directions.
        expected: Positions in another layer, tried first; None: all positions are tried.

    Returns:
        Whole positions; NaN where no position explains the phases, or several do.
    """
    joint = phases.of_layer
    held = torch.as_tensor(tokens)
    allowed = joint.tolerance[0]
    if expected is None:
        best, agreement = joint.search(reach, held)
    else:
        near = torch.arange(-_NEAR, _NEAR + 1)
        lines = torch.stack([slope * held for slope in SLOPES[1:]], 1)
        tried = torch.cat([expected[:, None] + near, held[:, None] + near, lines], 1)
        agreements = joint.agreement(tried)[0]
        agreement, places = agreements.max(1)
        best = tried.gather(1, places[:, None])[:, 0]
        lost = (agreement < 1 - allowed) & (allowed < UNCLEAR)
        if bool(lost.any()):
            best[lost], agreement[lost] = joint.at(lost).search(reach, held[lost])
    positions = torch.full((len(held),), torch.nan, dtype=torch.float64)
    alone = torch.zeros(len(held), dtype=torch.bool)
    left = (agreement >= 1 - allowed) & (allowed < UNCLEAR) & (held >= 0)
    while bool(left.any()):
        line = _line(best[left].tolist(), held[left].tolist())
        on_line = line[0] * held + line[1]
        near = joint.agreement(on_line[:, None])[0, :, 0] >= agreement - allowed
        taken = left & near
        if not bool(taken.any()):  # rounding of the agreement itself
            taken = left & (best == on_line)
        positions[taken] = on_line[taken].double()
        alone |= taken if int(taken.sum()) == 1 else torch.zeros_like(taken)
        left = left & ~taken
    # With few pairs, common multiples of their turns fit by chance; these are far off any line.
    alone &= positions.abs() > reach
    if int(alone.sum()) >= _FEW:
        positions[alone] = torch.nan
    return positions


def _line(best: list[int], tokens: list[int]) -> tuple[int, int]:
    """Slope and offset that fit most slots; among equals, those nearest to counting."""
    asked: Counter[tuple[int, int]] = Counter()
    for slope in SLOPES:
        votes = Counter(at - slope * token for at, token in zip(best, tokens, strict=True))
        asked.update(
            {
                (slope, offset): count
                for offset, count in votes.items()
                if slope == 1 or count >= min(_FEW, len(best))
            }
        )
    return max(asked, key=lambda line: (asked[line], -SLOPES.index(line[0]), -abs(line[1])))
