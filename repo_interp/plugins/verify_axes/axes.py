"""Find positions of pairs on the axes of 3-D positions (mRoPE), and the axis of each pair.

    z_r(h, s, p) = |x_r - exp(i theta_r p) k_r|^2 / sigma_r^2
                        of head h, token s, pair r: x the turned pair, k the unrotated one (in a
                        table k = 1), p a position, theta_r radians per position, sigma the noise
    a position fits     mean of z_r over the pairs of an axis <= `FITS`
    a position is known it fits, and neither neighbor does

sigma is the rounding of the precision, or the difference of the lengths |x_r| and |k_r|, which no
rotation changes, if that is larger. For slow pairs in a coarse precision, neighboring positions fit
equally well, so these positions are unknown. A fault gets the name of the simplest mistake that
explains all tokens: sections exchanged, one index for all axes, or an axis shifted. This module
knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from repo_interp.values import format_ranges

AXES = ("time", "height", "width")
FITS = 16.0
"""Largest mean of z at which a position fits: four standard deviations."""
_FITS_PAIR = 25.0
"""The same limit for one pair at all tokens."""
_ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
_FINE = 4e-6
"""Relative rounding by precision."""
_ANGLE = 2.0**-22
"""Relative error of an angle computed in float32."""
_BLOCK = 64
"""Number of tokens that are compared with all shifts at once."""
_NAMED = 5
"""Most groups of tokens that a finding names."""


@dataclass(frozen=True)
class AxisFault:
    """One mistake on some axes."""

    kind: str
    """The verdict, in a few words."""
    text: str
    heads: tuple[int, ...] = ()
    """Heads with the fault; empty: all."""


@dataclass(frozen=True)
class AxisTurns:
    """Turned and unrotated pairs, and the expected positions."""

    turned: Complex[Tensor, "head token pair"]
    plain: Complex[Tensor, "head token pair"]
    frequencies: Float[Tensor, "pair"]
    axes: Int[Tensor, "pair"]
    """The axis by which each pair should turn, an index in `AXES`."""
    wanted: Float[Tensor, "axis token"]
    tokens: Int[Tensor, "token"]
    """Indices of the tokens."""
    noise: Float[Tensor, "head token pair"]
    """Variance of the noise, sigma squared."""

    def misfit(self, positions: Float[Tensor, "*head token"]) -> Float[Tensor, "head token pair"]:
        """Compute z of every pair.

        Args:
            positions: Positions of the tokens, [head, token] or [token] for all heads.

        Returns:
            z [head, token, pair].
        """
        angles = positions[..., None] * self.frequencies
        expected = torch.polar(torch.ones_like(angles), angles) * self.plain
        return (self.turned - expected).abs().square() / self.noise

    def fits(
        self, axis: int, positions: Float[Tensor, "*head token"]
    ) -> Bool[Tensor, "head token"]:
        """Return whether positions on an axis fit.

        Args:
            axis: Index in `AXES`; some pair turns by it.
            positions: As in `misfit`.

        Returns:
            True where they fit [head, token].
        """
        return self.misfit(positions)[..., self.axes == axis].mean(-1) <= FITS


def turns_by_axis(
    turned: Complex[Tensor, "head token pair"],
    plain: Complex[Tensor, "head token pair"],
    frequencies: Float[Tensor, "pair"],
    axes: Int[Tensor, "pair"],
    wanted: Int[Tensor, "axis token"],
    tokens: Int[Tensor, "token"],
    dtype: torch.dtype,
) -> AxisTurns:
    """Compare turned pairs with unrotated ones.

    Args:
        turned: Turned pairs.
        plain: Unrotated pairs.
        frequencies: Radians per position; pairs of frequency 0 are left out.
        axes: Axis of each pair.
        wanted: Expected positions of the tokens by axis.
        tokens: Indices of the tokens.
        dtype: The coarsest precision of their computation.

    Returns:
        Pairs with their noise.
    """
    live = frequencies != 0
    turned, plain = (part[..., live].to(torch.complex128) for part in (turned, plain))
    frequencies, axes, wanted = frequencies[live].double(), axes[live], wanted.double()
    sizes = plain.abs()
    # With few pairs lengths may agree by chance, so the noise is estimated over all heads.
    radial = (turned.abs() - sizes).square().sum((0, 2))
    radial = radial / sizes.square().sum((0, 2)).clamp_min(1e-30)
    rounding = _ROUNDING.get(dtype, _FINE) ** 2
    relative = (2 * radial.maximum(radial.median())).clamp_min(rounding)
    angle = (frequencies * wanted.max().clamp_min(1.0) * _ANGLE).square()
    noise = relative[:, None] * sizes.square().mean(-1, keepdim=True) + angle * sizes.square()
    noise = noise.clamp_min(1e-30)
    return AxisTurns(turned, plain, frequencies, axes, wanted, tokens, noise)


def positions_by_axis(turns: AxisTurns) -> tuple[Tensor, Tensor]:
    """Find the positions of tokens on every axis.

    Args:
        turns: Turned pairs.

    Returns:
        Positions [axis, head, token], float64, NaN where unknown; and a mask with the same axes,
        True where no position explains the phases.
    """
    found = [_on_axis(turns, axis) for axis in range(len(AXES))]
    positions, lost = (torch.stack(parts) for parts in zip(*found, strict=True))
    return positions, lost


def _on_axis(turns: AxisTurns, axis: int) -> tuple[Tensor, Tensor]:
    heads, tokens, _ = turns.turned.shape
    nothing = torch.full((heads, tokens), torch.nan, dtype=torch.float64)
    if not bool((turns.axes == axis).any()):
        return nothing, torch.zeros(heads, tokens, dtype=torch.bool)
    own = turns.wanted[axis]
    positions = own.expand(heads, -1).clone()
    left = ~turns.fits(axis, positions)
    if bool(left.any()):
        shifts, fitting = _shifts(turns, axis)
        lines = [*turns.wanted, turns.tokens.double(), torch.zeros_like(own), 2 * own]
        line = next((line for line in lines if bool(turns.fits(axis, line).all())), None)
        if line is not None and not bool(fitting.all((0, 1)).any()):
            positions, left = line.expand(heads, -1).clone(), torch.zeros_like(left)
        while bool(left.any()):
            votes = fitting[left].sum(0)
            best = int((votes - shifts.abs() / (1 + len(shifts))).argmax())
            taken = left & fitting[..., best]
            if not bool(taken.any()):
                break
            positions = torch.where(taken, own + shifts[best], positions)
            left = left & ~taken
    unclear = turns.fits(axis, positions + 1) | turns.fits(axis, positions - 1)
    return torch.where(left | unclear, torch.nan, positions), left


def _shifts(turns: AxisTurns, axis: int) -> tuple[Tensor, Tensor]:
    """Return candidate shifts of an axis, and whether each fits [head, token, shift]."""
    pairs = turns.axes == axis
    reach = int(2 * turns.wanted.max()) + len(turns.tokens) + 1
    shifts = torch.arange(-reach, reach + 1, dtype=torch.float64)
    frequencies, noise = turns.frequencies[pairs], turns.noise[..., pairs]
    turned, plain = turns.turned[..., pairs], turns.plain[..., pairs]
    angles = turns.wanted[axis][:, None] * frequencies
    expected = torch.polar(torch.ones_like(angles), angles) * plain
    sizes = ((turned.abs().square() + expected.abs().square()) / noise).sum(-1, keepdim=True)
    products = turned * expected.conj() / noise
    waves = torch.polar(torch.tensor(1.0).double(), shifts * frequencies[:, None])
    # Re(product exp(-i theta shift)) as one real product of matrices
    both, of_wave = torch.cat([products.real, products.imag], -1), [waves.real, waves.imag]
    most = FITS * int(pairs.sum())
    blocks = [
        size - 2 * (block @ torch.cat(of_wave)) <= most
        for block, size in zip(both.split(_BLOCK, 1), sizes.split(_BLOCK, 1), strict=True)
    ]
    return shifts, torch.cat(blocks, 1)


def axis_faults(turns: AxisTurns, positions: Tensor, lost: Tensor) -> Iterator[AxisFault]:
    """Name the mistakes of turned pairs.

    Args:
        turns: Turned pairs.
        positions: Positions from `positions_by_axis`.
        lost: Mask from `positions_by_axis`.

    Yields:
        Mistakes; none if all known positions are as expected.
    """
    sections = _sections(turns)
    if sections is not None:
        yield sections
        return
    axes_by_fault: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for axis, name in enumerate(AXES):
        for fault in _of_axis(turns, axis, positions[axis], lost[axis]):
            axes_by_fault.setdefault(fault, []).append(name)
    present = len(turns.axes.unique())
    for (kind, text, heads), names in axes_by_fault.items():
        # A mistake that all axes share is not reported for single axes.
        named = "" if len(names) == present else f"{_join(names)} "
        yield AxisFault(f"{named}{kind}", f"{_join(names)} positions {text}", heads)


def _of_axis(
    turns: AxisTurns, axis: int, positions: Tensor, lost: Tensor
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Kind, text and heads of the mistakes on one axis."""
    wanted = turns.wanted[axis]
    known = ~positions.isnan()
    off = (positions - wanted).nan_to_num()
    heads = tuple((lost | (off != 0)).any(1).nonzero().flatten().tolist())
    heads = heads if len(heads) < len(positions) else ()
    if bool(lost.any()):
        yield "other angles", f"do not explain the phases of {_tokens(turns, lost)}", heads
        return
    if not bool((off != 0).any()):
        return
    rows = (off != 0).any(1)
    off, known, positions = off[rows], known[rows], positions[rows]
    shifts = [int(shift) for shift in off[known].unique()]
    if not bool((positions[known] != 0).any()):
        yield "not turned", "are all 0", heads
    elif torch.equal(positions[known], (2 * wanted).expand_as(positions)[known]):
        yield "turned twice", "are twice those wanted", heads
    elif len(shifts) == 1:
        yield f"shifted by {shifts[0]:+,}", f"off by {shifts[0]:+,}", heads
    else:
        groups = [
            f"{shift:+,} for {_tokens(turns, known & (off == shift))}" for shift in shifts if shift
        ]
        more = f", and {len(groups) - _NAMED} more" if len(groups) > _NAMED else ""
        yield "off", f"off by {', '.join(groups[:_NAMED])}{more}", heads


def _sections(turns: AxisTurns) -> AxisFault | None:
    """Find sections of pairs that turn by a wrong axis, if this explains all tokens."""
    candidates = [*turns.wanted, turns.tokens.double()]
    fitting = torch.stack(
        [(turns.misfit(at) <= _FITS_PAIR).all(0).all(0) for at in candidates]
    )  # [candidate, pair]
    numbers = torch.arange(len(turns.axes))
    own = fitting[turns.axes, numbers]
    if bool(own.all()) or not bool(fitting.any(0).all()):
        return None
    for order in permutations(range(len(AXES))):
        if bool(fitting[torch.tensor(order)[turns.axes], numbers].all()):
            moved = [place for place in range(len(AXES)) if order[place] != place]
            names = _join([AXES[place] for place in moved])
            kind = f"sections of {names} {'swapped' if len(moved) == 2 else 'exchanged'}"
            chosen = torch.tensor(order)[turns.axes]
            return AxisFault(kind, _by_axis(turns, chosen))
    if bool(fitting[-1].all()):
        return AxisFault("text-only positions", "all pairs turn by the token index")
    for axis, name in enumerate(AXES):
        if bool(fitting[axis].all()):
            return AxisFault(f"{name} for all axes", f"all pairs turn by {name}")
    chosen = torch.where(own, turns.axes, fitting.int().argmax(0))
    return AxisFault("other sections", _by_axis(turns, chosen))


def _by_axis(turns: AxisTurns, chosen: Tensor) -> str:
    """List the pairs that turn by another axis, with that axis."""
    texts = []
    for place, name in enumerate((*AXES, "the token index")):
        for own in range(len(AXES)):
            pairs = ((chosen == place) & (turns.axes == own) & (place != own)).nonzero().flatten()
            if len(pairs):
                numbers = format_ranges(pairs.tolist())
                texts.append(
                    f"pair{'s' * (len(pairs) > 1)} {numbers} turn{'s' * (len(pairs) == 1)} by "
                    f"{name}, not {AXES[own]}"
                )
    return "; ".join(texts)


def _tokens(turns: AxisTurns, mask: Bool[Tensor, "head token"]) -> str:
    numbers = turns.tokens[mask.any(0)].tolist()
    return f"token{'s' * (len(numbers) > 1)} {format_ranges(numbers)}"


def _join(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
