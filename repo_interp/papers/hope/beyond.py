"""H4: beyond L the activated components of the first layer leave the range of values that they had within L (HoPE fig. 3c, sec. 3.3.2).

    curves C_r(t) of the first layer, smoothed over L/16 distances, without distance 0;   range: from the lowest to the highest within [0, L)

As the paper words it, they are in their upper half-cycle there: above the middle of their range. A cosine that passes its lowest point
within L, as theta L > pi makes it, has seen most of its values there: of a lone component without phase the wording can hold, and the range
of values cannot be left. So both are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float

from repo_interp.measures.labels import described
from repo_interp.papers.hope import replicates
from repo_interp.papers.hope.replicates import (
    NEEDS_ROPE,
    OVER_REPLICATES,
    Sampling,
    bands,
    capped,
    capped_caption,
    named_bands,
    random_weights,
    smoothed,
)
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import SEEN, Claim, Evidence
from repo_interp.papers.kit.experiment import Drawing, Experiment
from repo_interp.papers.kit.rules import All, AtLeast
from repo_interp.papers.kit.subjects import Subject
from repo_interp.plots.views.component_curves import beyond_training_length

TOLERANCE = 0.05
"""Share of the range within L by which a value has to be outside of it."""
OUTSIDE = f"the share of the distances in [L, 2L) where their value is outside the range within L, widened by {TOLERANCE} of it,"
UPPER = "the share of the distances in [L, 2L) where they are above the middle of their range within L"
UPPER_MORE = "this share minus that in the second half of [0, L)"

H4 = Claim(
    "H4",
    "beyond L the activated components leave their training range in the first layer",
    "HoPE fig. 3c",
    "figure",
    AtLeast(OUTSIDE, 0.25),
    written=SEEN,
)
H4_WORDING = Claim(
    "H4",
    "beyond L the activated components are in the upper half-cycle in the first layer",
    "HoPE sec. 3.3.2 (2)",
    "figure",
    All(AtLeast(UPPER, 0.5), AtLeast(UPPER_MORE, 0.25)),
    "wording",
    SEEN,
)
Curve = Float[np.ndarray, " distance"]


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


def upper_values(shares: tuple[float, float]) -> dict[str, float]:
    """What the rule of the wording asks for, from what `upper_shares` returns."""
    within, beyond = shares
    return {UPPER: beyond, UPPER_MORE: beyond - within}


def measure(subjects: Sequence[Subject], options: Sampling, cache: Cache) -> xr.DataTree | None:
    """Replicates of the checkpoint "within" and "beyond" L; None where it has no activated component."""
    within = replicates.within(subjects[0], options, cache)
    if not bands(within)["activated"].any():
        return None
    return xr.DataTree.from_dict({"within": within, "beyond": replicates.beyond(subjects[0], options, cache)})


def judge(tree: xr.DataTree) -> Iterable[Evidence]:
    """Evidence on the checkpoint, on the claim and on how it is worded."""
    within, beyond = tree["within"].to_dataset(), tree["beyond"].to_dataset()
    name = within.attrs["checkpoint"]
    measured = [f"share of distances in [L, 2L) {where} the range within L" for where in ("outside", "in the upper half of")]
    if capped(within):
        yield from (
            Evidence(claim, name, of, unmeasurable=capped(within)) for claim, of in zip((H4, H4_WORDING), measured, strict=True)
        )
        return
    near = within["component_by_distance"].isel(layer=0)
    far = beyond["component_by_distance"].isel(layer=0).sel(distance=slice(within.attrs["length"], None))
    activated = np.flatnonzero(bands(within)["activated"].values)

    def over_activated(share: Callable[[Curve, Curve], float | tuple[float, float]], **chosen: object) -> np.ndarray:
        parts = [part.sel(chosen) for part in (near, far)]
        parts = [part.mean("repeat") if "repeat" in part.dims else part for part in parts]
        each = [share(*(part.isel(component=r).values for part in parts)) for r in activated]
        return np.asarray(each, dtype=float).mean(0)

    names, repeats = near["weights"].values.astype(str).tolist(), near["repeat"].values.tolist()
    outside = {weights: float(over_activated(outside_share, weights=weights)) for weights in names}
    upper = {weights: over_activated(upper_shares, weights=weights) for weights in names}
    outsides = [float(over_activated(outside_share, weights="trained", repeat=repeat)) for repeat in repeats]
    uppers = [over_activated(upper_shares, weights="trained", repeat=repeat)[1] for repeat in repeats]
    over = (OVER_REPLICATES, within.attrs["sequences"])
    ours, spread, control = outside["trained"], float(np.std(outsides, ddof=1)), random_weights(outside)
    yield Evidence(H4, name, measured[0], {OUTSIDE: ours}, ours, spread, *over, control)
    first, ours = (float(share) for share in upper["trained"])
    spread, control = (
        float(np.std(uppers, ddof=1)),
        random_weights({weights: float(share[1]) for weights, share in upper.items()}),
    )
    note = f"in the second half of [0, L): {first:.2f}"
    yield Evidence(H4_WORDING, name, measured[1], upper_values((first, ours)), ours, spread, *over, control, note)


def draw(tree: xr.DataTree) -> Iterator[Drawing]:
    """Fig. 3c: the first layer and the later ones on sequences of 2 L tokens."""
    within, trained = tree["within"].to_dataset(), tree["beyond"].to_dataset().sel(weights="trained").mean("repeat")
    name, length, band = within.attrs["checkpoint"], within.attrs["length"], bands(within)
    drawn = band.assign(
        component_by_distance=described(trained["component_by_distance"], "mean component", "q·k"),
        logit_by_distance=described(trained["logit"], "mean logit", "q·k"),
    )
    caption = (
        f"{name} on sequences of 2L = {2 * length} tokens: components and mean logit of the first layer, and mean logit of the "
        f"later ones (HoPE fig. 3c), smoothed over L/32. Red band: the range of the activated component within L. {named_bands(band)}"
        f"{capped_caption(within)}"
    )
    yield Drawing(f"beyond_training_length_{name}", beyond_training_length(drawn, length), caption, drawn)


BEYOND = Experiment("beyond", (H4, H4_WORDING), NEEDS_ROPE, measure, judge, draw)


def _both_smoothed(within: Curve, beyond: Curve) -> tuple[Curve, Curve]:
    return smoothed(within[1:], len(within)), smoothed(beyond, len(within))
