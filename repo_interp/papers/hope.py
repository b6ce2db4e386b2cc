"""HoPE's analysis of RoPE (Chen et al. 2025, sec. 3, fig. 2, 3, 6, 7, 8), made again on any checkpoints: claims H1 to H5.

Each recipe takes measured checkpoints and returns figures with data and verdicts. The rules stand in `hope_rules`; what is measured
in `hope_measurements`. Schemes that a claim is about and that no checkpoint has are "not measurable here".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import xarray as xr

from repo_interp.analysis import analyze
from repo_interp.measures.labels import described
from repo_interp.measures.rotation import Rotation
from repo_interp.measures.statistics import Measure
from repo_interp.models.load import load
from repo_interp.papers import hope_rules as rules
from repo_interp.papers.claims import UNMEASURED, Claim, Verdict, judged
from repo_interp.papers.hope_measurements import Measured, Sampling, bands, components_of_pair, measure_checkpoint, random_prompts
from repo_interp.papers.hope_rules import (
    curve_vaf,
    fall,
    in_upper_half,
    outside_share,
    outstanding,
    relative_swing,
    u_shape,
    upper_shares,
)
from repo_interp.papers.result import Result
from repo_interp.plots.component_curves import beyond_training_length, component_curves, logit_by_distance
from repo_interp.plots.component_shares import pair_norms, pair_of_tokens, turn_histogram, vaf_by_component, vaf_over_training
from repo_interp.positions.layouts import LEARNED

H1 = Claim(
    "H1",
    "mean logit by distance is U-shaped for learned APE, RoPE and KERPLE, no global decay",
    "HoPE fig. 2",
    "figure",
    f"smoothed over L/16 distances, the minimum lies strictly inside and the right end rises from it by at least {rules.RISE} of the "
    f"fall on the left, both above {rules.SIGNIFICANT:g} standard errors",
)
H2 = Claim(
    "H2",
    "components with theta in (pi/L, 2 pi/L) have outstanding VAF",
    "HoPE fig. 3b, 7",
    "figure",
    f"their mean VAF is at least {rules.OUTSTANDING:g} standard deviations above the mean of the other components, and further above "
    "than with random weights",
)
H3 = Claim(
    "H3",
    "the VAF of the activated components falls during training",
    "HoPE fig. 3b",
    "figure",
    f"rank correlation with the step at most {rules.FALLING}, and the last third of steps below the first by more than "
    f"{rules.SIGNIFICANT:g} standard errors",
)
H4 = Claim(
    "H4",
    "beyond L the activated components leave their training range in the first layer",
    "HoPE fig. 3c",
    "figure",
    f"at {rules.OUTSIDE} or more of the distances in [L, 2L) their value is outside the range within L, widened by {rules.TOLERANCE}",
)
H4_UPPER = Claim(
    "H4 (wording)",
    "beyond L the activated components are in the upper half-cycle in the first layer",
    "HoPE sec. 3.3.2 (2)",
    "figure",
    f"above the middle of their range at {rules.UPPER} or more of the distances in [L, 2L), and {rules.UPPER_MORE} more often than "
    "in the second half of [0, L)",
)
H5 = Claim(
    "H5",
    "components of lower frequency than the activated ones are near constant",
    "HoPE fig. 3a",
    "figure",
    f"peak to peak within L, their median is at most {rules.CONSTANT} of the mean of the activated components",
)
TITLE = "HoPE's analysis of RoPE, made again"
U_SHAPED = ("learned", "rope", "kerple")
"""The schemes that H1 is about."""
Options = Sampling
"""What a caller may choose."""
_SEEDS = "lots of sequences"


def figures(
    checkpoints: Mapping[str, str | os.PathLike[str]], sampling: Sampling, progress: Callable[[str], None]
) -> list[Result]:
    """Every figure that the checkpoints (name -> path) allow. `progress` is told what is being done.

    Raises InputError for a checkpoint that cannot be read.
    """
    measured = []
    for name, path in checkpoints.items():
        progress(f"measuring {name}")
        measured.append(measure_checkpoint(name, path, sampling))
    progress("drawing")
    results = [logits_by_distance(measured)]
    rotary = [one for one in measured if set(one.layout) == {"rope"}]
    for one in rotary:
        results.append(components(one))
        if bands(one.within)["activated"].any():
            results += [found for found in (vaf(one), over_training(one), beyond(one)) if found is not None]
        results += [norms(one), pair(one)]
    return results + [turns(one) for one in measured if set(one.layout) & set(LEARNED)]


def unmeasured(results: Sequence[Result]) -> list[Verdict]:
    """A verdict "not measurable here" for each claim, and scheme of H1, that nothing was found about."""
    found = {(verdict.claim.id, verdict.checkpoint) for result in results for verdict in result.verdicts}
    known = {claim for claim, _ in found}
    missing = [
        Verdict(claim, "rope", UNMEASURED, "", note="no checkpoint with RoPE in every layer, or without what the claim needs")
        for claim in (H2, H3, H4, H4_UPPER, H5)
        if claim.id not in known
    ]
    present = {str(scheme) for result in results if result.name == "logit_by_distance" for scheme in result.data["scheme"].values}
    absent = [scheme for scheme in U_SHAPED if scheme not in present]
    return [
        Verdict(H1, scheme, UNMEASURED, "", note=f"no checkpoint of scheme {scheme} was given") for scheme in absent
    ] + missing


def logits_by_distance(measured: Sequence[Measured]) -> Result:
    """H1, fig. 2, 6 and 8: mean logit by distance of every checkpoint, within and beyond L, over all layers and heads."""
    arrays, verdicts = [], []
    for one in measured:
        parts = [one.within] if one.beyond is None else [one.within, one.beyond]
        logits = [part["logit"].mean(("repeat", "layer")) for part in parts]
        lengths = xr.IndexVariable(
            "length", [one.training_length * (1 + place) for place in range(len(parts))], {"units": "tokens"}
        )
        stacked = xr.concat(logits, dim=lengths, join="outer").expand_dims(checkpoint=[one.name])
        arrays.append(
            stacked.assign_coords(scheme=("checkpoint", [one.scheme]), training_length=("checkpoint", [one.training_length]))
        )
        if one.scheme in U_SHAPED and len(set(one.layout)) == 1:
            verdicts.append(_u_shape(one))
    named: xr.DataArray = xr.concat(arrays, dim="checkpoint", join="outer")  # pyright: ignore[reportAssignmentType]
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
        f"and by band (HoPE fig. 3a). {_which(band)}",
        _plain(data),
        component_curves(data, one.name),
        (_near_constant(one, curves, band),) if band["activated"].any() and band["low_frequency"].any() else (),
    )


def vaf(one: Measured) -> Result:
    """H2, fig. 7: VAF of every component's mean curve, beside random weights."""
    band = bands(one.within)
    activated = band["activated"].values
    curves = one.within["component_by_distance"].mean("layer")
    shares = xr.apply_ufunc(
        curve_vaf, curves, input_core_dims=[["component", "distance"]], output_core_dims=[["component"]], vectorize=True
    )
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
        f"Diamonds: random weights. {_which(band)}",
        _plain(data),
        vaf_by_component(data, f"{one.name}: share of the mean curve's variance"),
        (verdict,),
    )


def over_training(one: Measured) -> Result | None:
    """H3, fig. 3b: the same over the saved steps of training; None where fewer than four were kept."""
    if one.steps is None or one.steps.sizes["step"] < 4:
        return None
    band = bands(one.steps)
    curves = one.steps["component_by_distance"].mean("layer")
    shares = xr.apply_ufunc(
        curve_vaf, curves, input_core_dims=[["component", "distance"]], output_core_dims=[["component"]], vectorize=True
    ).transpose("step", "repeat", "component")
    course = fall(shares.values[..., band["activated"].values].mean(-1))
    verdict = Verdict(
        H3,
        one.name,
        judged(course.holds),
        "change of the activated components' VAF from the first to the last third of steps, percentage points",
        course.change,
        course.standard_error,
        f"{_SEEDS} (standard error)",
        one.sampling.step_sequences,
        note=f"rank correlation with the step {course.correlation:.2f} over {shares.sizes['step']} steps, "
        f"{int(shares['step'][0])} to {int(shares['step'][-1])}",
    )
    data = band.assign(
        vaf=described(shares.mean("repeat"), "variance of the mean logit by distance that a component accounts for", "%")
    )
    return Result(
        f"vaf_over_training_{one.name}",
        f"VAF of every component of {one.name} over training, on {one.sampling.step_sequences} sequences at each saved step "
        f"(HoPE fig. 3b). {_which(band)}",
        _plain(data),
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
        f"later ones (HoPE fig. 3c), smoothed over L/32. Red band: the range of the activated component within L. {_which(band)}",
        _plain(data),
        beyond_training_length(data, length),
        verdicts,
    )


def norms(one: Measured) -> Result:
    """Norms of query and key pairs per component, layer and head (which frequencies heads use), on a lot of a few sequences."""
    bridge = load(one.path, one.sampling.device)
    prompts = list(random_prompts(bridge, one.training_length, min(8, one.sampling.sequences), one.sampling.seed))
    measures: list[Measure] = [Rotation(one.training_length)]  # pyright: ignore[reportAssignmentType]
    group = analyze(bridge, prompts, measures)["rotation"].to_dataset()[["query_norm", "key_norm"]]
    band = bands(one.within)
    return Result(
        f"norms_{one.name}",
        f"Mean norm of the rotary pairs of queries and keys of {one.name} by component and head, on {len(prompts)} sequences of random "
        f"tokens. Triangle: activated. {_which(band)}",
        _plain(group.merge(band)),
        pair_norms(group, band),
    )


def pair(one: Measured) -> Result:
    """The components of the logit between the last token and the one half the training length before it, mean over heads."""
    bridge = load(one.path, one.sampling.device)
    prompt = next(random_prompts(bridge, one.training_length, 1, one.sampling.seed))
    query, key = one.training_length - 1, one.training_length // 2 - 1
    of_pair = components_of_pair(bridge, prompt.tokens, query, key)
    band = bands(one.within)
    data = band.assign(
        logit=described(of_pair.mean(("layer", "head")), "component of the logit of a pair, mean over heads", "q·k")
    )
    return Result(
        f"pair_{one.name}",
        f"Components of {one.name}'s logit between query {query} and key {key} of one sequence of random tokens, mean over layers and "
        f"heads, and their sum from the fastest on. {_which(band)}",
        _plain(data.assign(logit_of_head=of_pair)),
        pair_of_tokens(data, f"{one.name}: token {query} to token {key}"),
    )


def turns(one: Measured) -> Result:
    """How far learned positions turn each component, over the layers that learn them."""
    layers = [place for place, scheme in enumerate(one.layout) if scheme in LEARNED]
    group = one.within.sel(weights="trained").isel(layer=layers)
    share = described(group["turn_share"].mean(("repeat", "layer", "head")), "share of pairs by the angle that they turn", "1")
    upper = group["turn_upper"].isel(repeat=0, drop=True)
    data = bands(group).assign(turn_share=share, turn_upper=upper)
    return Result(
        f"turns_{one.name}",
        f"Angles by which the learned positions of {one.name} turn each component, over the pairs of {one.sampling.sequences} sequences "
        f"of {one.training_length} random tokens, mean over the heads that learn positions.",
        _plain(data),
        turn_histogram(data, f"{one.name}: turns by learned positions"),
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


def _which(band: xr.Dataset) -> str:
    chosen = np.flatnonzero(band["activated"].values)
    thetas = band["frequency"].values[chosen]
    named = ", ".join(f"r = {place} (θ = {theta:.4g} rad)" for place, theta in zip(chosen, thetas, strict=True))
    return f"Activated: {named or 'none'}; {int(band['low_frequency'].sum())} components are lower."


def _percent(values: np.ndarray) -> str:
    return ", ".join(f"{value:.3g} %" for value in values)


def _plain(data: xr.Dataset) -> xr.Dataset:
    """What a netCDF file takes: truth values as 0 and 1, only the attributes of variables."""
    kept = data.drop_attrs(deep=False)
    return kept.assign({name: array.astype("int8") for name, array in kept.items() if array.dtype == bool})
