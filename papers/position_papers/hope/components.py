"""H5: components of lower frequency than the activated ones are near constant over distances within
L (HoPE fig. 3a).

swing of a component   peak to peak of its mean curve C_r(t), smoothed over L/16 distances, over the mean peak to peak of the activated
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from position_papers.hope import replicates
from position_papers.hope.component_figures import component_curves
from position_papers.hope.mean_curves import NAME, random_phases, smoothed, turning
from position_papers.hope.replicates import NEEDS_ROPE, bands, evidence_of
from position_papers.hope.wording import named_bands
from position_papers.kit import (
    AtMost,
    BeyondNull,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Observed,
    beside_null,
    over_seeds,
)
from repo_interp.measures.labels import with_attrs
from repo_interp.plots.views.component_bands import FEW_PAIRS

SWING = (
    "peak to peak within L, smoothed over L/16 distances, of the one that swings most "
    "over the mean of the activated components,"
)

H5 = Claim(
    "H5",
    "components of lower frequency than the activated ones are near constant",
    "HoPE fig. 3a",
    "figure",
    AtMost(SWING, 0.1),
    also=("beyond random weights and phases",),
)
SWING_BESIDE_TWINS, SWING_BESIDE_PHASES = "this number", "and"
H5_NULLS = H5.beyond(
    "components of lower frequency are more constant than random weights and geometry make them",
    BeyondNull(SWING_BESIDE_TWINS, 0.95, relation="below"),
    BeyondNull(SWING_BESIDE_PHASES, 0.95, NAME, "below"),
)


def relative_swing(
    smooth: Float[np.ndarray, "... component point"],
    activated: Bool[np.ndarray, " component"],
    low: Bool[np.ndarray, " component"],
) -> Float[np.ndarray, "... low_component"]:
    """Peak to peak of every lower component's smoothed curve over the mean peak to peak of the
    activated ones.
    """
    swing = np.ptp(smooth, axis=-1)
    return swing[..., low] / swing[..., activated].mean(-1, keepdims=True)


def tabulate(data: xr.Dataset) -> Iterable[Evidence]:
    """Evidence on the checkpoint, where it has activated components and lower ones."""
    band = bands(data)
    masks = band["activated"].values, band["low_frequency"].values
    if not (masks[0].any() and masks[1].any()):
        return
    smooth = _smoothed(data)
    each = relative_swing(smooth.mean("repeat").values, *masks)
    ours, *controls = each.max(-1).tolist()
    of_replicates = relative_swing(smooth.sel(weights="trained").values, *masks).max(-1)
    measured = "largest peak to peak of a lower component over the mean of the activated ones"
    largest = int(np.flatnonzero(masks[1])[each[0].argmax()])
    note = (
        f"r = {largest} swings most of {each.shape[1]} lower ones; their median "
        f"{np.median(each[0]):.3g}"
    )
    judged = evidence_of(H5, data, measured, {SWING: ours}, ours, of_replicates, controls, note)
    yield judged
    twins = Observed(ours, controls)
    waves = smoothed(
        turning(band["frequency"].values, data.sizes["distance"]), data.attrs["length"]
    ).values
    phases = Observed(
        ours, random_phases(waves, lambda curves: float(relative_swing(curves, *masks).max()))
    )
    values = {SWING: ours, SWING_BESIDE_TWINS: twins, SWING_BESIDE_PHASES: phases}
    note = f"random phases: {beside_null(phases, share=0.05)}"
    note = f"random weights: {beside_null(twins, share=0.05)}; {note}" if len(twins.null) else note
    yield judged.on(H5_NULLS, values, note)


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Fig. 3a: every component by distance, averaged over layers and heads."""
    name, band = data.attrs["checkpoint"], bands(data)
    curves = data["component_by_distance"].sel(weights="trained").mean("repeat")
    drawn = band.assign(component_by_distance=with_attrs(curves, "mean component", "q·k"))
    caption = (
        f"Rotary components of {name} by distance, averaged over layers, heads and "
        f"{data.attrs['sequences']} sequences of random "
        f"tokens, each from its own mean; below, all together and by band (HoPE fig. 3a). Yellow: "
        f"the last 1/{FEW_PAIRS} of the distances, which few pairs have. {named_bands(band, data)}"
    )
    yield Drawing(f"components_{name}", partial(component_curves, drawn, name), caption, drawn)


def units(data: xr.Dataset) -> xr.Dataset:
    """Peak to peak of the smoothed components of one seed: `swing` of the mean over replicates, and
    `swing_of_replicate`.
    """
    curves = {
        "swing": _smoothed(data).mean("repeat"),
        "swing_of_replicate": _smoothed(data).sel(weights="trained"),
    }
    return xr.Dataset(
        {name: curve.max("middle") - curve.min("middle") for name, curve in curves.items()}
    )


def _smoothed(data: xr.Dataset) -> xr.DataArray:
    """The components [weights, repeat, component, middle], smoothed."""
    curves = data["component_by_distance"].transpose("weights", "repeat", "component", "distance")
    return smoothed(curves, data.attrs["length"])


COMPONENTS = over_seeds(
    Experiment(
        "components",
        (H5, H5_NULLS),
        NEEDS_ROPE,
        lambda subjects, options, cache: replicates.within(subjects[0], options, cache),
        tabulate,
        draw,
    ),
    units,
)
