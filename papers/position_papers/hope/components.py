"""H5: components of lower frequency than the activated ones are near constant over distances within L (HoPE fig. 3a).

swing of a component   peak to peak of its mean curve C_r(t), smoothed over L/16 distances, over the mean peak to peak of the activated
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from position_papers.hope import replicates
from position_papers.hope.mean_curves import NAME, random_phases, smoothed
from position_papers.hope.replicates import NEEDS_ROPE, Sampling, bands
from position_papers.hope.wording import OVER_REPLICATES, capped, named_bands, random_weights
from position_papers.kit.cache import Cache
from position_papers.kit.claims import EVERY_SEED, Claim, Verdict, verdict
from position_papers.kit.experiment import Drawing, Experiment
from position_papers.kit.rules import All, AtMost, BeyondNull, Observed, beside_null
from position_papers.kit.subjects import Subject
from repo_interp.measures.labels import described
from repo_interp.plots.views.component_curves import FEW_PAIRS, component_curves

SWING = (
    "peak to peak within L, smoothed over L/16 distances, of the one that swings most over the mean of the activated components,"
)

H5 = Claim(
    "H5",
    "components of lower frequency than the activated ones are near constant",
    "HoPE fig. 3a",
    "figure",
    AtMost(SWING, 0.1),
    also=("beyond random weights and phases", EVERY_SEED),
)
SWING_BESIDE_TWINS, SWING_BESIDE_PHASES = "this number", "and"
H5_NULLS = Claim(
    "H5",
    "components of lower frequency are more constant than random weights and geometry make them",
    H5.source,
    "none",
    All(
        H5.rule,
        BeyondNull(SWING_BESIDE_TWINS, 0.95, relation="below"),
        BeyondNull(SWING_BESIDE_PHASES, 0.95, NAME, "below"),
    ),
    "beyond random weights and phases",
)


def relative_swing(
    components: Float[np.ndarray, "component distance"],
    activated: Bool[np.ndarray, " component"],
    low: Bool[np.ndarray, " component"],
) -> Float[np.ndarray, " low_component"]:
    """Peak to peak of every lower component's smoothed curve over the mean peak to peak of the activated ones."""
    swing = np.array([np.ptp(smoothed(curve[1:], components.shape[1])) for curve in components])
    return swing[low] / swing[activated].mean()


def measure(subjects: Sequence[Subject], options: Sampling, cache: Cache) -> xr.Dataset:
    """Replicates of the checkpoint within L."""
    return replicates.seen(replicates.within(subjects[0], options, cache))


def judge(data: xr.Dataset) -> Iterable[Verdict]:
    """Verdict on the checkpoint, where it has activated components and lower ones."""
    band, name = bands(data), data.attrs["checkpoint"]
    masks = band["activated"].values, band["low_frequency"].values
    if not (masks[0].any() and masks[1].any()):
        return
    measured = "largest peak to peak of a lower component over the mean of the activated ones"

    def swing(of_components: xr.DataArray) -> float:
        return float(relative_swing(of_components.transpose("component", "distance").values, *masks).max())

    curves = data["component_by_distance"]
    means = curves.mean("repeat")
    swings = {str(weights): swing(means.sel(weights=weights)) for weights in curves["weights"].values}
    of_replicates = [swing(curves.sel(weights="trained", repeat=repeat)) for repeat in curves["repeat"].values]
    ours, spread = swings["trained"], float(np.std(of_replicates, ddof=1))
    numbers = (ours, spread, OVER_REPLICATES, data.attrs["sequences"], random_weights(swings))
    each = relative_swing(means.sel(weights="trained").transpose("component", "distance").values, *masks)
    largest = int(np.flatnonzero(masks[1])[each.argmax()])
    note = f"r = {largest} swings most of {len(each)} lower ones; their median {np.median(each):.3g}"
    judged = verdict(H5, name, measured, {SWING: ours}, *numbers, note=note, unmeasurable=capped(data))
    yield judged
    twins = Observed(ours, [value for weights, value in swings.items() if weights != "trained"])
    of_phases = random_phases(
        band["frequency"].values, data.sizes["distance"], lambda curves: float(relative_swing(curves, *masks).max())
    )
    phases = Observed(ours, of_phases)
    values = {SWING: ours, SWING_BESIDE_TWINS: twins, SWING_BESIDE_PHASES: phases}
    note = f"random phases: {beside_null(phases, share=0.05)}"
    note = f"random weights: {beside_null(twins, share=0.05)}; {note}" if len(twins.null) else note
    yield judged.on(H5_NULLS, values, note)


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Fig. 3a: every component by distance, averaged over layers and heads."""
    name, band = data.attrs["checkpoint"], bands(data)
    curves = data["component_by_distance"].sel(weights="trained").mean("repeat")
    drawn = band.assign(component_by_distance=described(curves, "mean component", "q·k"))
    caption = (
        f"Rotary components of {name} by distance, averaged over layers, heads and {data.attrs['sequences']} sequences of random "
        f"tokens, each from its own mean; below, all together and by band (HoPE fig. 3a). Yellow: "
        f"the last 1/{FEW_PAIRS} of the distances, which few pairs have. {named_bands(band, data)}"
    )
    yield Drawing(f"components_{name}", component_curves(drawn, name), caption, drawn)


COMPONENTS = Experiment("components", (H5, H5_NULLS), NEEDS_ROPE, measure, judge, draw)
