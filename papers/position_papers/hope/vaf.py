"""H2: components with pi/L < theta < 2 pi/L account for an outstanding share of the mean logit's
variance over distances (HoPE fig. 3b, 7).

VAF_r = 100 (1 - var(m - C_r) / var(m)) of the mean curves      height = (mean VAF of the activated - mean of the others) / their deviation

The frequency of the largest VAF is given in units of pi/L, in which the claim's band is 1 to 2,
with its interval over heads and layers. L is min(window, training length) of each layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from position_papers.hope import replicates
from position_papers.hope.component_figures import vaf_by_component
from position_papers.hope.mean_curves import NAME, curve_vaf, mean_curve_vaf, random_phases, turning
from position_papers.hope.replicates import NEEDS_ROPE, Sampling, bands, evidence_of
from position_papers.hope.wording import named_bands, parts_caption
from position_papers.kit import (
    All,
    AtLeast,
    BeyondNull,
    Cache,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Observed,
    Subject,
    beside_null,
    over_seeds,
)
from repo_interp.measures.labels import with_attrs
from repo_interp.plots.marks.drawing import counted

HEIGHT = "their mean VAF above the mean of the other components, in standard deviations of these,"
SAME = "the same number"

H2 = Claim(
    "H2",
    "components with theta in (pi/L, 2 pi/L) have outstanding VAF",
    "HoPE fig. 3b, 7",
    "figure",
    All(AtLeast(HEIGHT, 2), BeyondNull(SAME)),
    also=("beyond random phases",),
)
BESIDE_PHASES = "this number"
H2_PHASES = H2.beyond(
    "the VAF of components with theta in (pi/L, 2 pi/L) is more outstanding than geometry makes it",
    BeyondNull(BESIDE_PHASES, 0.95, NAME),
)


def outstanding(
    vaf: Float[np.ndarray, " component"], activated: Bool[np.ndarray, " component"]
) -> float:
    """Return the mean VAF of the activated components minus the mean of the others, in standard
    deviations of the others.
    """
    others = vaf[~activated]
    return float((vaf[activated].mean() - others.mean()) / others.std())


def peaks(data: xr.Dataset) -> np.ndarray:
    """Return the frequency of the component with the largest VAF in the mean curve of every head,
    in every layer that rotates, in units of pi/L.
    """
    units = (data["frequency"] * data["band_length"] / np.pi).isel(repeat=0)
    rotating = np.flatnonzero(units.notnull().any("component").values)
    shares = data["vaf_curve"].mean("repeat").isel(layer=rotating)
    units = units.isel(layer=rotating)
    return units.isel(component=shares.argmax("component")).values.ravel()


def measure(subjects: Sequence[Subject], options: Sampling, cache: Cache) -> xr.Dataset | None:
    """Measure replicates of the checkpoint within L; None if it has no activated component."""
    data = replicates.within(subjects[0], options, cache)
    return data if bands(data)["activated"].any() else None


def tabulate(data: xr.Dataset) -> Iterable[Evidence]:
    """Yield evidence on the checkpoint."""
    activated = bands(data)["activated"].values
    length = data.sizes["distance"]
    frequencies = bands(data)["frequency"].values
    shares = mean_curve_vaf(data["component_by_distance"])
    trained = shares.sel(weights="trained")
    means = trained.mean("repeat").values
    ours, *twins = (outstanding(each, activated) for each in shares.mean("repeat").values)
    of_heads = peaks(data.sel(weights="trained"))
    of_pairs = (
        data["vaf"].sel(weights="trained").mean(("repeat", "layer", "head")).values[activated]
    )
    judged = evidence_of(
        H2,
        data,
        "activated above other components, in their standard deviations",
        {HEIGHT: ours, SAME: Observed(ours, twins)},
        ours,
        [outstanding(values, activated) for values in trained.values],
        twins,
        f"VAF of the activated {_percent(means[activated])}, largest other "
        f"{_percent(means[~activated].max(keepdims=True))}; over heads, of all pairs' logits: "
        f"{_percent(of_pairs)}; {_peak(of_heads, means, frequencies * length / np.pi)}",
    )
    yield judged
    waves = turning(frequencies, length).values
    null = random_phases(waves, lambda curves: outstanding(curve_vaf(curves), activated))
    observed = Observed(ours, null)
    values = {BESIDE_PHASES: observed}
    yield judged.on(H2_PHASES, values, beside_null(observed))


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Draw figure 7: VAF of every component's mean curve, compared with random weights."""
    name, band = data.attrs["checkpoint"], bands(data)
    shares = mean_curve_vaf(data["component_by_distance"])
    of_pairs = data["vaf"].mean(("repeat", "layer", "head"))
    drawn = band.assign(
        vaf=with_attrs(
            shares.mean("repeat"),
            "variance of the mean logit by distance that a component accounts for",
            "%",
        ),
        spread=with_attrs(
            shares.sel(weights="trained").std("repeat", ddof=1),
            "standard deviation over replicates",
            "%",
        ),
        vaf_of_pairs=with_attrs(of_pairs, "the same of all pairs' logits, mean over heads", "%"),
    )
    caption = (
        f"Variance of the mean logit by distance that each component of {name} accounts for (HoPE "
        f"fig. 7; standard definition), mean of {counted(shares.sizes['repeat'], 'replicate')} of "
        f"together {data.attrs['sequences']} sequences of random tokens; bars of errors: their "
        "standard deviation, which may be too small to see. Diamonds: random weights, one for each "
        f"model. {named_bands(band, data)}{parts_caption(data)}"
    )
    yield Drawing(
        f"vaf_{name}",
        partial(vaf_by_component, drawn, f"{name}: share of the mean curve's variance"),
        caption,
        drawn,
    )


def units(data: xr.Dataset) -> xr.Dataset:
    """Return the VAF for one seed: `vaf` of the mean over replicates, also for random weights, and
    `vaf_of_replicate`.
    """
    shares = mean_curve_vaf(data["component_by_distance"])
    return xr.Dataset(
        {"vaf": shares.mean("repeat"), "vaf_of_replicate": shares.sel(weights="trained")}
    )


VAF = over_seeds(Experiment("vaf", (H2, H2_PHASES), NEEDS_ROPE, measure, tabulate, draw), units)


def _peak(of_heads: np.ndarray, of_mean_curve: np.ndarray, units: np.ndarray) -> str:
    low, middle, high = np.quantile(of_heads, (0.05, 0.5, 0.95))
    return (
        f"the largest VAF is at {units[of_mean_curve.argmax()]:.2f} pi/L; over {len(of_heads)} "
        f"heads at {middle:.2f} pi/L (90 % of them {low:.2f} to {high:.2f})"
    )


def _percent(values: np.ndarray) -> str:
    return ", ".join(f"{value:.3g} %" for value in values)
