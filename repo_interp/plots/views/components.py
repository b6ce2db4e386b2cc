"""Logits by distance, their rotary components, and the variance these account for.

Group `components` of a run.

    VAF = 100 (1 - var(y - C_r) / var(y))      per cent, by component r; r = 0 turns fastest, wavelength 2 pi / theta in tokens

The page follows one component, chosen by a slider: the mean logit and the mean of every component
of a layer over at most `POINTS` distances; `components.html` and `components.js` bring the slider to life. Knows
nothing about how components are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any

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
    digits_of,
    group,
    layer_scheme,
    learned_layers,
    nested_digits,
    over,
    over_prompts,
    percent,
    strongest_head,
    table_of,
    unit_label,
    with_run_axis,
)
from repo_interp.plots.view import Interactive, PageOptions, View

BAND_COLOURS: Mapping[str, str] = {"activated": "#D55E00", "low": "#0072B2", "high": "#A8A8A8"}
"""Orange, blue and grey that colour-blind eyes keep apart."""
BAND_NAMES: Mapping[str, str] = {
    "activated": "activated",
    "low": "lower frequency",
    "high": "higher frequency",
}
ALL = "all components"
FEW_PAIRS = 16
"""Of a sequence of n tokens, distances above n (1 - 1/16) have fewer than n/16 pairs: they alone
may make the ends of a U.
"""
POINTS = 256
"""Distances of a curve in the page."""
BEYOND = 1.25
"""Training lengths from which a run's distances are drawn as beyond it."""


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    """Chart the logit by distance, components by distance, their VAF, and turns.

    Components are drawn where layers rotate, turns where positions are learned.
    """
    components = group(run, "components")
    logits, at = components["logit_by_distance"], components["distance"].values
    # else every prompt is a single token; a token with itself would set the scale, as would the
    # last few pairs
    if len(at) > 1:
        last = at[-1] - len(at) // FEW_PAIRS
        apart = logits.sel(distance=slice(1, last)).assign_attrs(training_length=trained_on(run))
        yield from charts_of("logit_by_distance", *with_run_axis(run, apart), live=True)
    if layers := rotating_layers(components):
        subset = components.sel(layer=layers)
        band = bands(components, layers[0])
        # [component, distance]; layers that rotate alike have comparable components.
        curves = subset["component_by_distance"].mean("layer").dropna("distance", how="all")
        length, of_bands = trained_on(run), band_length(components, layers[0])
        windowed = f"L = {of_bands:,} tokens" if of_bands < length else ""
        if curves.sizes["distance"] > 1 and "decay_bound" in subset:  # runs of before lack it
            # The bound follows from the frequencies, which these layers share.
            bound = with_run_axis(run, subset["decay_bound"].isel(layer=0, drop=True))
            yield Lines(*bound, "distance", None, name="decay_bound", live=True)
        colours = {name: BAND_COLOURS[kind] for kind, name in BAND_NAMES.items()}
        named = xr.DataArray([*colours], dims="band", attrs={"colours": colours})
        kinds = xr.DataArray(named_bands(band), dims="component")
        if curves.sizes["distance"] > 1:
            yield _by_band(run, curves, kinds, named, windowed)
        title = f"VAF of all pairs' logits{f', {windowed}' if windowed else ''}"
        vaf = (
            vaf_of_heads(subset)
            .assign_attrs(long_name=title, units="%")
            # [component, band]: NaN outside of its band, so that every band is a line with its
            # colour.
            .where(kinds == named)
            .assign_coords(band=named)
        )
        yield Lines(
            *with_run_axis(run, vaf), "component", "band", "layer", name="component_vaf", live=True
        )
        if curves.sizes["distance"] > BEYOND * length:
            yield _beyond(run, subset.isel(layer=0)["component_by_distance"], kinds.values, length)
    if learned := learned_layers(components):
        yield turns_grid(components, learned)
    title, y = "Mean logit by distance, chosen head", unit_label("logit", logits)
    yield HeadCurves(title, "distance (tokens)", y, at, {"mean logit": logits})


def _by_band(
    run: xr.DataTree,
    curves: xr.DataArray,
    kinds: xr.DataArray,
    bands: xr.DataArray,
    windowed: str,
) -> Lines:
    """Chart the components of every band by distance, and their sum, from their means.

    Curves lie far apart. A token with itself, and distances that few pairs have, would set the scale.
    """
    length = curves.sizes["distance"]
    swing = curves.sel(distance=slice(1, length - length // FEW_PAIRS))
    # Means differ far more between components than swings do, and would hide them.
    swing = (swing - swing.mean("distance")).transpose("component", "distance")
    colours = {ALL: "#000000", **bands.attrs["colours"]}
    named = xr.DataArray([*colours], dims="band", attrs={"colours": colours})
    of_band = swing.where((kinds == named) | (named == ALL)).assign_coords(band=named)
    # min_count: a distance without a value stays NaN and does not become 0.
    total = of_band.sum("component", min_count=1).broadcast_like(of_band)
    parts = xr.concat([of_band, total], "logits")
    drawn = parts.assign_coords(logits=["of a component, mean and middle half", "of their sum"])
    title = ", ".join(filter(None, ("components, from their mean", windowed)))
    # alike=1: panels share a scale only where their reaches are equal, since a sum swings far more.
    drawn.attrs |= curves.attrs | {"long_name": title, "alike": 1}
    name = "components_by_distance"
    return Lines(*with_run_axis(run, drawn), "distance", "band", "logits", name=name, live=True)


def _beyond(run: xr.DataTree, curves: xr.DataArray, kinds: np.ndarray, length: int) -> Lines:
    """Chart activated components of the first layer beyond the training length.

    If none is activated, the lower ones are taken. The unit is their range within the training
    length; values are means over L / 16 neighbouring distances.
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
    return Lines(*with_run_axis(run, named), "distance", "component", name="beyond_training_length")


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
    names = [f"{start:.3g} to {end:.3g}" for start, end in pairwise(np.degrees(ends))]
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
    )


def band_of(components: xr.Dataset) -> np.ndarray:
    """Name the band of every component.

    Args:
        components: `activated` and `low_frequency` [component].

    Returns:
        Names [component].
    """
    return np.where(
        components["activated"].values,
        "activated",
        np.where(components["low_frequency"].values, "low", "high"),
    )


def named_bands(band: xr.Dataset) -> list[str]:
    """Name the bands of all components.

    Args:
        band: `activated` and `low_frequency` [component].

    Returns:
        Names in the order of the components.
    """
    return [BAND_NAMES[kind] for kind in band_of(band)]


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
            (f"{name} ({tokens:,} tokens)", theta.copy(data=_band_names(theta.values, tokens)))
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


def _band_names(theta: np.ndarray, length: int) -> list[str]:
    """The band of each frequency over `length` tokens."""
    turns = abs(theta) * length / (2 * np.pi)
    return np.where(turns >= 1, "high", np.where(turns > 0.5, "activated", "low")).tolist()


def wavelengths(theta: xr.DataArray) -> xr.DataArray:
    """Return 2 pi / theta in positions; NaN where theta is 0.

    Args:
        theta: Radians per position.

    Returns:
        The wavelengths.
    """
    return 2 * np.pi / abs(theta).where(theta != 0)


def component_data(
    run: xr.DataTree, options: PageOptions
) -> tuple[dict[str, Any] | None, Sequence[str]]:
    """Prepare the data of the components' section of the page.

    Args:
        run: Tree of a run, a group per measure.
        options: Limits and prompts of the page.

    Returns:
        The data, None if no layer rotates, and no sentences, since nothing is left out.
    """
    components = group(run, "components")
    layers = rotating_layers(components)
    if not layers:
        return None, ()
    shares, band = vaf_of_heads(components).sel(layer=layers), bands(components, layers[0])
    logits = components["logit_by_distance"].sel(layer=layers).mean("head")
    # Without distance 0: the logit of a token with itself would set the scale.
    known = np.flatnonzero(logits.notnull().any("layer").values)[1:]
    places = (
        known[np.unique(np.linspace(0, len(known) - 1, POINTS).round().astype(int))]
        if known.size
        else known
    )
    curves = components["component_by_distance"].sel(layer=layers)
    parts = {"logit": logits, "curve": curves, "vaf": shares.median("head")}
    measured = xr.Dataset(parts).isel(distance=places)

    def drawn(layer: int | None, name: str, of_layer: xr.Dataset) -> dict[str, Any]:
        curves = of_layer["curve"].transpose("component", "distance").values
        return {
            "layer": layer,
            "name": name,
            "logit": digits_of(of_layer["logit"]),
            # Four digits: these curves are most of the section's data.
            "components": [digits_of(curve, 4) for curve in curves],
            "vaf": digits_of(of_layer["vaf"]),
            "heads": [] if layer is None else nested_digits(shares.sel(layer=layer).values),
        }

    of_layers = [
        drawn(layer, f"{layer} ({layer_scheme(components, layer)})", measured.sel(layer=layer))
        for layer in layers
    ]
    if len(layers) > 1:
        mean = measured.mean("layer").assign(vaf=shares.median(("layer", "head")))
        of_layers.insert(0, drawn(None, f"mean of {len(layers)} layers", mean))
    kinds, theta = band_of(band), band["frequency"]
    described = [
        {
            "component": number,
            "theta": rate,
            "wavelength": wavelength,
            "band": BAND_NAMES[kind],
            "colour": BAND_COLOURS[kind],
        }
        for number, rate, wavelength, kind in zip(
            components["component"].values.tolist(),
            digits_of(theta),
            digits_of(wavelengths(theta)),
            kinds,
            strict=True,
        )
    ]
    data = {
        "distance": components["distance"].values[places].tolist(),
        "layers": of_layers,
        "components": described,
        "start": int(np.argmax(kinds == "activated")),
        "training_length": band_length(components, layers[0]),
    }
    return data, ()


def rotating_layers(components: xr.Dataset) -> list[int]:
    """List the layers that rotate as the first rotating layer does.

    They share its frequencies and the L of its bands.

    Args:
        components: Group `components` of a run.

    Returns:
        Labels of the layers; none if no layer rotates.
    """
    frequency = components["frequency"].transpose("layer", "component")
    layers = components["layer"].values[frequency.notnull().any("component")].tolist()
    return [
        layer
        for layer in layers
        if band_length(components, layer) == band_length(components, layers[0])
        and np.array_equal(*frequency.sel(layer=[layer, layers[0]]), equal_nan=True)
    ]


def bands(components: xr.Dataset, layer: int) -> xr.Dataset:
    """Select the bands of a layer.

    Args:
        components: Group `components` of a run.
        layer: Label of the layer.

    Returns:
        `frequency`, `activated` and `low_frequency` [component].
    """
    chosen = components[["frequency", "activated", "low_frequency"]].sel(layer=layer)
    return chosen.drop_vars(["layer", "scheme"], errors="ignore")


def vaf_of_heads(components: xr.Dataset) -> xr.DataArray:
    """Average VAF over prompts, however the run keeps it.

    Args:
        components: Group `components` of a run.

    Returns:
        VAF [layer, head, component] in per cent.
    """
    means = components["vaf_mean"] if "vaf_mean" in components else over_prompts(components["vaf"])
    return means.transpose("layer", "head", "component")


def trained_on(run: xr.DataTree) -> int:
    """Return the training length that the bands were made for.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        Length in tokens.
    """
    return int(group(run, "components").attrs["training_length"])


def band_length(components: xr.Dataset, layer: int) -> int:
    """Return L of the bands of a layer.

    Args:
        components: Group `components` of a run.
        layer: Label of the layer.

    Returns:
        L in tokens; the training length if the run does not record L.
    """
    if "band_length" in components:
        return int(components["band_length"].sel(layer=layer))
    return int(components.attrs["training_length"])


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
    """Return a sentence: which length the bands are about, and what pairs do over these prompts."""
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
        f"in the median head, most in L{layer} H{head} ({percent(most)})"
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
