"""The figures of HoPE's analysis (Chen et al. 2025, fig. 2, 3, 6, 7, 8), each with its verdicts: H1 to H5.

Every function takes what `hope_measurements` measured of one or several checkpoints and returns a figure with data. The rules stand in
`hope_rules`. Knows nothing about where checkpoints come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.measures.labels import described
from repo_interp.papers.hope import rules
from repo_interp.papers.hope.claims import H1, H2, H3, H4, H4_UPPER, H5, U_SHAPED
from repo_interp.papers.hope.lots import bands, named_bands
from repo_interp.papers.hope.measurements import Measured
from repo_interp.papers.hope.rules import (
    fall,
    in_upper_half,
    outside_share,
    outstanding,
    relative_swing,
    u_shape,
    upper_shares,
)
from repo_interp.papers.hope.steps import mean_curve_vaf
from repo_interp.papers.kit.claims import Verdict, judged
from repo_interp.papers.kit.result import Result, plain
from repo_interp.plots.views.component_curves import beyond_training_length, component_curves, logit_by_distance
from repo_interp.plots.views.component_shares import vaf_by_component, vaf_over_training

_SEEDS = "lots of sequences"
_TOGETHER: Any = {"join": "outer", "coords": "minimal", "compat": "override"}


def logits_by_distance(measured: Sequence[Measured]) -> Result:
    """H1, fig. 2, 6 and 8: mean logit by distance of every checkpoint, within and beyond L, over all layers and heads."""
    arrays, verdicts = [], []
    for one in measured:
        parts = [one.within] if one.beyond is None else [one.within, one.beyond]
        logits = [part["logit"].mean(("repeat", "layer")) for part in parts]
        lengths = xr.IndexVariable(
            "length", [one.training_length * (1 + place) for place in range(len(parts))], {"units": "tokens"}
        )
        stacked = xr.concat(logits, dim=lengths, **_TOGETHER).expand_dims(checkpoint=[one.name])
        arrays.append(
            stacked.assign_coords(scheme=("checkpoint", [one.scheme]), training_length=("checkpoint", [one.training_length]))
        )
        if one.scheme in U_SHAPED and len(set(one.layout)) == 1:
            verdicts.append(_u_shape(one))
    named: xr.DataArray = xr.concat(arrays, dim="checkpoint", **_TOGETHER)  # pyright: ignore[reportAssignmentType]
    logit = described(named, "mean logit of the pairs at a distance", "q·k")
    sampling = measured[0].sampling
    return Result(
        "logit_by_distance",
        f"Mean logit by distance over all layers and heads on {sampling.sequences} sequences of random tokens of length L and, paler, "
        "2L (HoPE fig. 2, 6, 8). Dashed: training length L; grey: the same architecture with random weights. A scheme with "
        "absolute positions ends at L.",
        logit.to_dataset(name="logit"),
        logit_by_distance(logit),
        tuple(verdicts),
    )


def components(one: Measured) -> Result:
    """H5, fig. 3a: every component by distance, averaged over layers and heads."""
    curves = one.within["component_by_distance"].mean("layer")
    band = bands(one.within)
    data = band.assign(component_by_distance=described(curves.sel(weights="trained").mean("repeat"), "mean component", "q·k"))
    return Result(
        f"components_{one.name}",
        f"Rotary components of {one.name} by distance, averaged over layers and heads, each from its own mean; below, all together "
        f"and by band (HoPE fig. 3a). {named_bands(band)}",
        plain(data),
        component_curves(data, one.name),
        (_near_constant(one, curves, band),) if band["activated"].any() and band["low_frequency"].any() else (),
    )


def vaf(one: Measured) -> Result:
    """H2, fig. 7: VAF of every component's mean curve, beside random weights."""
    band = bands(one.within)
    activated = band["activated"].values
    curves = one.within["component_by_distance"].mean("layer")
    shares = mean_curve_vaf(curves)
    trained = shares.sel(weights="trained")
    heights = [outstanding(values, activated) for values in trained.values]
    others = {
        str(weights): outstanding(shares.sel(weights=weights).mean("repeat").values, activated)
        for weights in shares["weights"].values
    }
    height = others["trained"]
    above = [height > value for weights, value in others.items() if weights != "trained"]
    verdict = Verdict(
        H2,
        one.name,
        judged(height >= rules.OUTSTANDING and all(above)),
        "activated above other components, in their standard deviations",
        height,
        float(np.std(heights, ddof=1)),
        _SEEDS,
        one.sampling.sequences,
        _controls(others),
        note=f"VAF of the activated {_percent(trained.mean('repeat').values[activated])}, largest other "
        f"{_percent(trained.mean('repeat').values[~activated].max(keepdims=True))}; over heads, of all pairs' logits: "
        f"{_percent(one.within['vaf'].sel(weights='trained').mean(('repeat', 'layer', 'head')).values[activated])}",
    )
    data = band.assign(
        vaf=described(shares.mean("repeat"), "variance of the mean logit by distance that a component accounts for", "%"),
        spread=described(trained.std("repeat", ddof=1), "standard deviation over lots of sequences", "%"),
        vaf_of_pairs=described(
            one.within["vaf"].mean(("repeat", "layer", "head")), "the same of all pairs' logits, mean over heads", "%"
        ),
    )
    return Result(
        f"vaf_{one.name}",
        f"Variance of the mean logit by distance that each component of {one.name} accounts for (HoPE fig. 7; standard definition). "
        f"Diamonds: random weights. {named_bands(band)}",
        plain(data),
        vaf_by_component(data, f"{one.name}: share of the mean curve's variance"),
        (verdict,),
    )


def over_training(one: Measured) -> Result | None:
    """H3, fig. 3b: the same over the saved steps of training; None where fewer than four were kept."""
    if one.steps is None or one.steps.sizes["step"] < 4:
        return None
    band, shares = one.steps.drop_vars("vaf"), one.steps["vaf"].transpose("step", "repeat", "component")
    sequences = int(shares.attrs["sequences"])
    course = fall(shares.values[..., band["activated"].values.astype(bool)].mean(-1))
    verdict = Verdict(
        H3,
        one.name,
        judged(course.holds),
        "change of the activated components' VAF from the first to the last third of steps, percentage points",
        course.change,
        course.standard_error,
        f"{_SEEDS}, standard error",
        sequences,
        note=f"rank correlation with the step {course.correlation:.2f} over {shares.sizes['step']} steps, "
        f"{int(shares['step'][0])} to {int(shares['step'][-1])}",
    )
    data = band.assign(
        vaf=described(shares.mean("repeat"), "variance of the mean logit by distance that a component accounts for", "%")
    )
    return Result(
        f"vaf_over_training_{one.name}",
        f"VAF of every component of {one.name} over training, on {sequences} sequences at each saved step "
        f"(HoPE fig. 3b). {named_bands(band)}",
        plain(data),
        vaf_over_training(data),
        (verdict,),
    )


def beyond(one: Measured) -> Result | None:
    """H4, fig. 3c: the first layer and the later ones beyond L; None where positions end at L."""
    if one.beyond is None:
        return None
    band, length = bands(one.within), one.training_length
    activated = np.flatnonzero(band["activated"].values)
    near = one.within["component_by_distance"].isel(layer=0)
    far = one.beyond["component_by_distance"].isel(layer=0).sel(distance=slice(length, None))

    def over_activated(
        rule: Callable[[np.ndarray, np.ndarray], float | tuple[float, float]], weights: str, repeat: int | None
    ) -> np.ndarray:
        chosen = [part.sel(weights=weights) for part in (near, far)]
        parts = [part.mean("repeat") if repeat is None else part.sel(repeat=repeat) for part in chosen]
        each = [rule(*(part.isel(component=r).values for part in parts)) for r in activated]
        return np.asarray(each, dtype=float).mean(0)

    repeats = near["repeat"].values.tolist()
    outside = {str(name): float(over_activated(outside_share, str(name), None)) for name in near["weights"].values}
    upper = {str(name): over_activated(upper_shares, str(name), None) for name in near["weights"].values}
    outsides = [float(over_activated(outside_share, "trained", repeat)) for repeat in repeats]
    uppers = [over_activated(upper_shares, "trained", repeat)[1] for repeat in repeats]
    common = (_SEEDS, one.sampling.sequences)
    verdicts = (
        Verdict(
            H4,
            one.name,
            judged(outside["trained"] >= rules.OUTSIDE),
            "share of distances in [L, 2L) outside the range within L",
            outside["trained"],
            float(np.std(outsides, ddof=1)),
            *common,
            _controls(outside),
        ),
        Verdict(
            H4_UPPER,
            one.name,
            judged(in_upper_half((float(upper["trained"][0]), float(upper["trained"][1])))),
            "share of distances in [L, 2L) in the upper half of the range within L",
            float(upper["trained"][1]),
            float(np.std(uppers, ddof=1)),
            *common,
            _controls({name: float(values[1]) for name, values in upper.items()}),
            note=f"in the second half of [0, L): {upper['trained'][0]:.2f}",
        ),
    )
    trained = one.beyond.sel(weights="trained").mean("repeat")
    data = band.assign(
        component_by_distance=described(trained["component_by_distance"], "mean component", "q·k"),
        logit_by_distance=described(trained["logit"], "mean logit", "q·k"),
    )
    return Result(
        f"beyond_training_length_{one.name}",
        f"{one.name} on sequences of 2L = {2 * length} tokens: components and mean logit of the first layer, and mean logit of the "
        f"later ones (HoPE fig. 3c), smoothed over L/32. Red band: the range of the activated component within L. {named_bands(band)}",
        plain(data),
        beyond_training_length(data, length),
        verdicts,
    )


def _u_shape(one: Measured) -> Verdict:
    curves = one.within["logit"].mean("layer")
    lots = curves.sel(weights="trained").values
    error = float(lots.std(axis=0, ddof=1)[1:].mean() / np.sqrt(len(lots)))
    shape = u_shape(lots.mean(0))
    without_first = u_shape(one.within["logit_without_first"].sel(weights="trained").mean(("layer", "repeat")).values[:-1])
    # What is random varies about a flat line: its rise counts only beside the fall of the trained curve.
    controls = {
        str(weights): u_shape(curves.sel(weights=weights).mean("repeat").values).rise / shape.fall if shape.fall > 0 else np.nan
        for weights in curves["weights"].values
    }
    return Verdict(
        H1,
        one.name,
        judged(shape.holds(error)),
        "rise on the right over the fall on the left",
        shape.ratio,
        float(np.std([u_shape(lot).ratio for lot in lots], ddof=1)),
        _SEEDS,
        one.sampling.sequences,
        _controls(controls),
        note=f"fall {shape.fall:.3g}, rise {shape.rise:.3g} (q·k, standard error {error:.2g}), minimum at distance {shape.minimum} of "
        f"{one.training_length}; without the first token rise over fall is {without_first.ratio:.3g}",
    )


def _near_constant(one: Measured, curves: xr.DataArray, band: xr.Dataset) -> Verdict:
    masks = band["activated"].values, band["low_frequency"].values

    def swing(of_components: xr.DataArray) -> float:
        return float(np.median(relative_swing(of_components.transpose("component", "distance").values, *masks)))

    means = curves.mean("repeat")
    swings = {str(weights): swing(means.sel(weights=weights)) for weights in curves["weights"].values}
    lots = [swing(curves.sel(weights="trained", repeat=repeat)) for repeat in curves["repeat"].values]
    return Verdict(
        H5,
        one.name,
        judged(swings["trained"] <= rules.CONSTANT),
        "median peak to peak of lower components over that of the activated ones",
        swings["trained"],
        float(np.std(lots, ddof=1)),
        _SEEDS,
        one.sampling.sequences,
        _controls(swings),
    )


def _controls(values: Mapping[str, float]) -> str:
    """The numbers of the twins with random weights, as text."""
    random = [value for weights, value in values.items() if weights != "trained"]
    return "random weights: " + ", ".join(f"{value:.3g}" for value in random) if random else ""


def _percent(values: np.ndarray) -> str:
    return ", ".join(f"{value:.3g} %" for value in values)
