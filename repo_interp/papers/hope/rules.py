"""The rules by which claims H1 to H5 about HoPE's analysis are judged, on plain curves. Written before anything was measured.

    m(t)   mean logit at distance t, over pairs, sequences, heads and layers;   C_r(t) the same of component r;   L the training length

H1  U-shape: m, smoothed over L/16 distances and without distance 0 (a token with itself), has its minimum strictly inside, and its
    right end rises above the minimum by at least `RISE` of the fall on the left; fall and rise exceed `SIGNIFICANT` standard errors.
H2  outstanding: the mean VAF of the activated components lies `OUTSTANDING` standard deviations above the mean of the others, and
    further above than on every control. VAF of the mean curve: 100 (1 - var(m - C_r) / var(m)).
H3  falling: rank correlation of the activated components' VAF with the step at most `FALLING`, and the mean of the last third of
    steps below that of the first third by more than `SIGNIFICANT` standard errors.
H4  beyond L, in the first layer: at `OUTSIDE` or more of the distances in [L, 2L) an activated component lies outside the range that
    it had within L, by more than `TOLERANCE` of this range. As the paper words it: it is in its upper half there (above the middle
    of its range) at `UPPER` or more of the distances, and `UPPER_MORE` more often than in the second half of [0, L).
    (A cosine that passes its lowest point within L, as theta L > pi makes it, has seen most of its values there: of a lone
    component without phase the wording can hold, the range of values cannot be left.)
H5  near constant: peak to peak within L, the median lower component has at most `CONSTANT` of the mean activated one.

Curves of H4 and H5 are smoothed over L/16 distances too, without distance 0: at the longest there are few pairs.
Knows nothing about models, runs or figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import spearmanr

RISE = 0.25
SIGNIFICANT = 3.0
OUTSTANDING = 2.0
FALLING = -0.5
OUTSIDE = 0.25
TOLERANCE = 0.05
UPPER = 0.5
UPPER_MORE = 0.25
CONSTANT = 0.1

Curve = Float[np.ndarray, " distance"]


@dataclass(frozen=True)
class UShape:
    """How a curve falls and rises again."""

    fall: float
    """From the left end to the minimum, in the curve's unit."""
    rise: float
    """From the minimum to the right end."""
    minimum: int
    """Distance of the minimum, in tokens."""
    inside: bool
    """Whether the minimum lies strictly between the ends."""

    @property
    def ratio(self) -> float:
        """Rise over fall: 0 for a decay, 1 for a symmetric U; 0 where nothing falls."""
        return self.rise / self.fall if self.fall > 0 else 0.0

    def holds(self, standard_error: float = 0.0) -> bool:
        """Whether it is a U-shape, given the standard error of the curve's points."""
        threshold = SIGNIFICANT * standard_error
        return self.inside and self.fall > threshold and self.rise > threshold and self.ratio >= RISE


def smoothed(curve: Curve, width: int) -> Curve:
    """Means over `width` neighbouring points; shorter by `width` - 1."""
    return np.convolve(curve, np.full(width, 1 / width), mode="valid")


def u_shape(curve: Curve) -> UShape:
    """The shape of a curve over distances 0 .. L-1; distance 0 is left out, and neighbours are averaged over L/16."""
    width = _width(len(curve))
    smooth = smoothed(np.asarray(curve, dtype=float)[1:], width)
    lowest = int(smooth.argmin())
    return UShape(
        fall=float(smooth[0] - smooth[lowest]),
        rise=float(smooth[-1] - smooth[lowest]),
        minimum=1 + lowest + width // 2,
        inside=0 < lowest < len(smooth) - 1,
    )


def curve_vaf(components: Float[np.ndarray, "component distance"]) -> Float[np.ndarray, " component"]:
    """VAF of every component's mean curve in their sum, in per cent (HoPE, eq. 5 in its standard form). NaN for a flat sum."""
    whole = components.sum(0)
    variance = whole.var()
    left = (whole - components).var(axis=1)
    return 100 * (1 - left / variance) if variance > 0 else np.full(len(components), np.nan)


def outstanding(vaf: Float[np.ndarray, " component"], activated: Bool[np.ndarray, " component"]) -> float:
    """Mean VAF of the activated components above the mean of the others, in standard deviations of the others."""
    others = vaf[~activated]
    return float((vaf[activated].mean() - others.mean()) / others.std())


@dataclass(frozen=True)
class Fall:
    """How a number went over training."""

    correlation: float
    """Spearman's, with the step."""
    change: float
    """Mean of the last third of steps minus mean of the first third."""
    standard_error: float

    @property
    def holds(self) -> bool:
        """Whether it fell."""
        return self.correlation <= FALLING and self.change < -SIGNIFICANT * self.standard_error


def fall(values: Float[np.ndarray, "step repeat"]) -> Fall:
    """The course of a number over steps, measured several times at each. Raises ValueError for fewer than four steps."""
    steps, repeats = values.shape
    if steps < 4:
        raise ValueError(f"a course over training needs at least four steps, not {steps}")
    means, third = values.mean(1), max(1, steps // 3)
    changes = values[-third:].mean(0) - values[:third].mean(0)
    error = float(changes.std(ddof=1) / np.sqrt(repeats)) if repeats > 1 else 0.0
    return Fall(
        float(spearmanr(np.arange(steps), means)[0]),  # pyright: ignore[reportArgumentType]
        float(changes.mean()),
        error,
    )


def outside_share(within: Curve, beyond: Curve) -> float:
    """Share of the distances beyond the training length where a curve is outside the range it had `within`; both smoothed."""
    near, far = _both_smoothed(within, beyond)
    margin = TOLERANCE * (near.max() - near.min())
    return float(((far < near.min() - margin) | (far > near.max() + margin)).mean())


def upper_shares(within: Curve, beyond: Curve) -> tuple[float, float]:
    """Shares of distances where a curve is above the middle of its range within: in the second half of [0, L), and beyond L."""
    near, far = _both_smoothed(within, beyond)
    middle = (near.min() + near.max()) / 2
    return float((near[len(near) // 2 :] > middle).mean()), float((far > middle).mean())


def in_upper_half(shares: tuple[float, float]) -> bool:
    """Whether a component goes to its upper half beyond the training length."""
    within, beyond = shares
    return beyond >= UPPER and beyond - within >= UPPER_MORE


def relative_swing(
    components: Float[np.ndarray, "component distance"],
    activated: Bool[np.ndarray, " component"],
    low: Bool[np.ndarray, " component"],
) -> Float[np.ndarray, " low_component"]:
    """Peak to peak of every lower component's smoothed curve over the mean peak to peak of the activated ones."""
    width = _width(components.shape[1])
    swing = np.array([np.ptp(smoothed(curve[1:], width)) for curve in components])
    return swing[low] / swing[activated].mean()


def _both_smoothed(within: Curve, beyond: Curve) -> tuple[Curve, Curve]:
    width = _width(len(within))
    return smoothed(within[1:], width), smoothed(beyond, width)


def _width(training_length: int) -> int:
    return max(1, training_length // 16)
