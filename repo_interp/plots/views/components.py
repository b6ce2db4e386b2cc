"""Logits by distance, their rotary components, and the variance these account for.

Group `components` of a run.

    VAF = 100 (1 - var(y - C_r) / var(y))      per cent, by component r; r = 0 turns fastest, wavelength 2 pi / theta in tokens

Bands are those of `component_bands`; the page follows one component, chosen by the slider of
`component_slider`. This module knows nothing about how components are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise

import numpy as np
import xarray as xr

from repo_interp.plots.marks import (
    Chart,
    Finding,
    HeadCurves,
    Lines,
    Panels,
    Table,
    charts_of,
    colour_map,
    counted,
    group,
    learned_layers,
    over,
    percent,
    runner_up,
    strongest_head,
    table_of,
    unit_label,
    with_run_axis,
)
from repo_interp.plots.view import Interactive, View
from repo_interp.plots.views.component_bands import (
    BAND_COLOURS,
    BAND_NAMES,
    band_length,
    bands,
    bands_over,
    named_bands,
    of_many_pairs,
    rotating_layers,
    trained_on,
    vaf_of_heads,
    wavelengths,
)
from repo_interp.plots.views.component_slider import component_data

ALL = "all components"
MEAN_LOGIT = (
    "Mean logit of the pairs of tokens at a distance, by layer: line, mean over heads; band, the middle "
    "half of them. Distances that fewer than a sixteenth of the tokens have are left out."
)
DECAY_BOUND = (
    "Upper bound on the size of a logit by distance, in units of the differences between neighboring "
    "pairs (RoFormer, sec. 3.4.3). It follows from the rotary frequencies, whatever the model has "
    "learned."
)
VAF = (
    "Share of the variance of all pairs' logits that each rotary component accounts for, by layer; "
    "component 0 turns fastest. Line: mean over heads; band: the middle half of them."
)
BY_DISTANCE = (
    "Rotary components of the logits by distance, from their means: left, those of a band; right, their "
    "sums. Distances that fewer than a sixteenth of the tokens have are left out."
)
BEYOND_TRAINING = (
    "Components of the first layer that rotates, by distance, beyond the training length too (dotted "
    "line). Unit: their range within the training length."
)
TURNS = (
    "How far learned positions turn each rotary component: of all pairs of tokens, the share that turns "
    "it by an angle. Mean over the heads that learn positions."
)
BEYOND = 1.25
"""Training lengths from which a run's distances are drawn as beyond it."""


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    """Chart the logit by distance, components by distance, their VAF, and turns.

    Components are drawn where layers rotate, turns where positions are learned.
    """
    components = group(run, "components")
    logits = _in_tokens(components["logit_by_distance"])
    apart = of_many_pairs(logits)
    if apart.sizes["distance"]:  # else every prompt is a single token
        named = {"long_name": "mean logit by distance", "training_length": trained_on(run)}
        for chart in charts_of(
            "logit_by_distance", *with_run_axis(run, apart.assign_attrs(named)), live=True
        ):
            yield replace(chart, caption=MEAN_LOGIT)
    if layers := rotating_layers(components):
        subset = components.sel(layer=layers)
        band = bands(components, layers[0])
        # [component, distance]; layers that rotate alike have comparable components.
        curves = _in_tokens(subset["component_by_distance"]).mean("layer", keep_attrs=True)
        curves = curves.dropna("distance", how="all")
        length, of_bands = trained_on(run), band_length(components, layers[0])
        windowed = f"L = {of_bands:,} tokens" if of_bands < length else ""
        if curves.sizes["distance"] > 1 and "decay_bound" in subset:  # runs of before lack it
            # The bound follows from the frequencies, which these layers share.
            bound = subset["decay_bound"].isel(layer=0, drop=True).rename("bound")
            named = {"long_name": "bound on a logit's size by distance, from its frequencies alone"}
            yield Lines(
                *with_run_axis(run, bound.assign_attrs(named)),
                *("distance", None),
                name="decay_bound",
                live=True,
                caption=DECAY_BOUND,
            )
        colours = {name: BAND_COLOURS[kind] for kind, name in BAND_NAMES.items()}
        named = xr.DataArray([*colours], dims="band", attrs={"colours": colours})
        kinds = xr.DataArray(named_bands(band), dims="component")
        if curves.sizes["distance"] > 1:
            yield _by_band(run, curves, kinds, named, windowed)
        title = f"variance of the logits by component (VAF){f', {windowed}' if windowed else ''}"
        vaf = (
            vaf_of_heads(subset)
            .assign_attrs(long_name=title, units="%")
            # [component, band]: NaN outside of the component's band, so that every band is a line
            # with a different color.
            .where(kinds == named)
            .assign_coords(band=named)
        )
        yield Lines(
            *with_run_axis(run, vaf),
            *("component", "band", "layer"),
            name="component_vaf",
            live=True,
            caption=VAF,
        )
        if curves.sizes["distance"] > BEYOND * length:
            yield _beyond(run, subset.isel(layer=0)["component_by_distance"], kinds.values, length)
    if learned := learned_layers(components):
        yield turns_grid(components, learned)
    title, y = "Mean logit by distance, chosen head", unit_label("logit", logits)
    at = apart["distance"].values
    yield HeadCurves(title, "distance (tokens)", y, at, {"mean logit": apart})


def _in_tokens(by_distance: xr.DataArray) -> xr.DataArray:
    """`by_distance` with units of distance."""
    units = {"units": "tokens"}
    return by_distance.assign_coords(distance=by_distance["distance"].assign_attrs(units))


def _by_band(
    run: xr.DataTree,
    curves: xr.DataArray,
    kinds: xr.DataArray,
    bands: xr.DataArray,
    windowed: str,
) -> Lines:
    """Chart the components of every band by distance, and their sum, from their means.

    Curves lie far apart, and their means would hide how they swing.
    """
    swing = of_many_pairs(curves)
    # Means differ far more between components than swings do, and would hide them.
    swing = (swing - swing.mean("distance")).transpose("component", "distance")
    colours = {ALL: "#000000", **bands.attrs["colours"]}
    named = xr.DataArray([*colours], dims="band", attrs={"colours": colours})
    of_band = swing.where((kinds == named) | (named == ALL)).assign_coords(band=named)
    # min_count: a distance without a value stays NaN and does not become 0.
    total = of_band.sum("component", min_count=1).broadcast_like(of_band)
    parts = xr.concat([of_band, total], "logits")
    drawn = parts.assign_coords(logits=["of a component, mean and middle half", "of their sum"])
    title = ", ".join(filter(None, ("components by distance, each less its mean", windowed)))
    # alike=1: panels share a scale only where their reaches are equal, since a sum swings far more.
    drawn.attrs |= curves.attrs | {"long_name": title, "alike": 1}
    return Lines(
        *with_run_axis(run, drawn),
        *("distance", "band", "logits"),
        name="components_by_distance",
        live=True,
        caption=BY_DISTANCE,
    )


def _beyond(run: xr.DataTree, curves: xr.DataArray, kinds: np.ndarray, length: int) -> Lines:
    """Chart activated components of the first layer beyond the training length.

    If none is activated, the lower ones are taken. The unit is their range within the training
    length; values are means over L / 16 neighboring distances.
    """
    # BAND_NAMES is in order of preference.
    kind = next(kind for kind in BAND_NAMES.values() if kind in kinds)
    smooth = curves.isel(component=np.flatnonzero(kinds == kind), distance=slice(1, None))
    smooth = (
        smooth.rolling(distance=max(1, length // 16), center=True)
        .mean()
        .dropna("distance", how="all")
    )
    within = smooth.sel(distance=slice(None, length - 1))
    low, high = within.min("distance"), within.max("distance")
    title = f"layer {int(curves['layer'])}: {kind} components, smoothed"
    drawn = (
        ((smooth - low) / (high - low))
        .drop_vars(["layer", "scheme"], errors="ignore")
        .rename("range within L")
    )
    named = drawn.assign_coords(component=[f"r = {number}" for number in drawn["component"].values])
    named = named.assign_attrs(long_name=title, units="", training_length=length)
    return Lines(
        *with_run_axis(run, named),
        *("distance", "component"),
        name="beyond_training_length",
        caption=BEYOND_TRAINING,
    )


def turns_grid(components: xr.Dataset, layers: list[int]) -> Panels:
    """Chart shares of pairs by the angle that they turn a component.

    Shares are means over heads that learn positions; angles that none turns by are left out.

    Args:
        components: Group `components` of a run.
        layers: Labels of the layers that learn positions.

    Returns:
        The chart.
    """
    share = 100 * components["turn_share"].sel(layer=layers).mean(("layer", "head")).transpose(
        "turn", "component"
    )
    # Angles beyond the last one with pairs would be empty rows; the last bin has no upper end.
    last = 1 + int(np.flatnonzero((share > 0).any("component")).max(initial=0))
    ends = np.append(share["turn"].values, np.inf)[: last + 1]
    names = [
        f"{float(f'{start:.3g}'):,g} to {float(f'{end:.3g}'):,g}"
        for start, end in pairwise(np.degrees(ends))
    ]
    # Large angles on top, as on an axis.
    named = share[:last][::-1].assign_coords(
        turn=("turn", names[::-1], {"long_name": "angle θ |Δz| (degrees)"})
    )
    look = {"cmap": colour_map("turns", "#9DCBE6", "#0072B2", "#003A5C"), "vmin": 0, "vmax": 100}
    return Panels(
        "component_turns",
        {"Pairs by the angle that they turn a component": named},
        "",
        "",
        look,
        bar={"label": "share of pairs (%)"},
        caption=TURNS,
    )


def component_table(run: xr.DataTree) -> Table:
    """Tabulate the components of the layers that rotate alike.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per component: frequency, wavelength, band, and VAF as the median over layers and heads.

    Raises:
        InputError: The run has no components.
    """
    components = group(run, "components")
    layers = rotating_layers(components)
    band = bands(components, layers[0])
    shares = vaf_of_heads(components).sel(layer=layers).median(("layer", "head"))
    theta, length = band["frequency"], band_length(components, layers[0])
    # a band is about a length: that of the prompts may be far below that of training
    known = components["logit_by_distance"].notnull().any(("layer", "head"))
    seen = int(components["distance"].where(known).max()) + 1
    lengths = {f"band over {'the window' if length < trained_on(run) else 'training'}": length}
    lengths["band over the longest prompt"] = min(seen, length)
    columns = [
        ("theta (rad per position)", theta),
        ("wavelength (positions)", wavelengths(theta)),
        *(
            (f"{name} ({tokens:,} tokens)", theta.copy(data=bands_over(theta.values, tokens)))
            for name, tokens in lengths.items()
        ),
        ("VAF (%)", shares),
    ]
    heads = f"VAF of all pairs' logits, the median over the heads of {len(layers)} layers"
    note = (
        f"{heads}, {over(components)}. Bands over L tokens: activated components turn between half "
        "and one whole turn over L, low ones less, high ones more."
    )
    return table_of("components", "Rotary components", columns, note)


def _lead(run: xr.DataTree) -> str:
    if not rotating_layers(group(run, "components")):
        return (
            "No layer of this run rotates queries and keys, so there are no rotary "
            "components: the mean logit by distance is a whole."
        )
    return (
        "The logit of a pair of tokens is a sum of rotary components, one per frequency "
        f"(HoPE, fig. 3): choose one to see its part.{_bands_of(group(run, 'components'))}"
    )


def _bands_of(dataset: xr.Dataset) -> str:
    """Return a sentence on the length L of the bands and on the rotation over these prompts."""
    if "band_length" not in dataset or "distance" not in dataset.sizes:
        return ""
    lengths = dataset["band_length"].values
    known, tokens = (
        sorted({int(length) for length in lengths[lengths > 0]}),
        dataset.sizes["distance"],
    )
    rates = np.nanmax(np.abs(dataset["frequency"].values), axis=0)
    turning = int((rates > 2 * np.pi / tokens).sum())
    ends = " to ".join(f"{length:,}" for length in dict.fromkeys(known[:1] + known[-1:]))
    return (
        f" The bands high, activated and low are about {ends} tokens, the length of training or a "
        f"layer's window; over the {tokens:,} tokens of these prompts {turning} of {rates.size} "
        "pairs turn more than once."
    )


def _tables(run: xr.DataTree) -> Sequence[Table]:
    return (component_table(run),) if rotating_layers(group(run, "components")) else ()


_FILES = files("repo_interp.plots.views")
TIMES_EQUAL = 3.0
"""Times an equal share of all components that a found one accounts for, at least, in the median
head.
"""


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Find the component that accounts for most of the logits' variance.

    The null is an equal share of all components.
    """
    components = group(run, "components")
    layers = rotating_layers(components)
    if not layers:
        return
    shares = vaf_of_heads(components).sel(layer=layers) / 100
    # The median over heads, so that one extreme head makes no finding.
    middle, equal = shares.median(("layer", "head")), 1 / shares.sizes["component"]
    if not bool((middle >= TIMES_EQUAL * equal).any()):
        return
    component = int(middle["component"][int(np.nanargmax(middle.values))])
    of_heads = shares.sel(component=component)
    layer, head, most = strongest_head(of_heads)
    sentence = (
        f"Rotary component {component} makes {percent(float(middle.max()))} of the logits' variance "
        f"in the median head, most in L{layer} H{head} ({percent(most)}){runner_up(of_heads, [(layer, head)])}"
    )
    evidence = (
        f"an equal share of all components is {percent(equal)}; of {counted(len(layers), 'layer')} "
        f"that rotate, {over(components)}"
    )
    yield Finding(sentence, evidence, 0.4, "components", layer, head)


VIEW = View(
    "components",
    "Rotary components",
    _lead,
    _charts,
    tables=_tables,
    findings=_findings,
    interactive=Interactive(_FILES / "components.html", _FILES / "components.js", component_data),
    compared=("logit_by_distance", "vaf", "vaf_band", "still_share"),
    not_averaged=(
        *(
            "logit_by_distance",
            "position_logit_by_distance",
            "component_by_distance",
            "decay_bound",
            "turn_share",
            "turn_upper",
        ),
        *("vaf_printed", "vaf_curve_printed", "distance_pairs", "frequency"),
    ),
)

figures_of_components = VIEW.figures
"""Logit by distance, components, their VAF and turns, as the run allows, by the names of their
files.
"""
