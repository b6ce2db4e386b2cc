"""Charts of position and semantics in a head's logits: r of the three-axis fit, maps and axes.

    W_ij ~ a_{i-j} + b_i + c_j        Position Generalization, sec. 3.1

Draws the groups `three_axis` and `maps`; fig. 2 is in `fit_figure`. This module knows nothing about
how fits are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import xarray as xr

from repo_interp.plots.marks import (
    Chart,
    Finding,
    HeadCurves,
    HeadImage,
    HeadNumber,
    Heads,
    Panels,
    Table,
    figures_of_heads,
    first_prompt,
    group,
    layer_table,
    nanmean,
    number,
    over,
    over_prompts,
    ranked_heads,
    strongest_head,
)
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, style
from repo_interp.plots.view import View
from repo_interp.plugins.three_axis.fit_figure import three_axis_fit

FITS = {"three_axis": "three-axis", "fake_distance": "fake-distance"}
EXACT = 1 - 1e-9
"""Least mean r of a fit that is exact up to rounding."""
CORRELATIONS = {
    "r": "r of the three-axis fit",
    "r_attention": "r on attention weights",
    "r_position": "r with learned distances",
    "r_shuffled": "r, distances shuffled",
    "r2_held_out": "R² on held-out rows",
}
"""Variables [prompt, layer, head] that measure how well the fit holds, the main one first, and
their labels.
"""


@style()
def fit_correlations(run: xr.DataTree) -> PaperFigure:
    """Draw r of the run's fits for every layer and head.

    r is the mean over prompts; colors end at its smallest and largest value. Bars show the schemes
    of layers. A head is gray if its logits are a sum of the axes by construction: r = 1 is then no
    finding.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: The run has neither `three_axis` nor `fake_distance`.
    """
    return correlation_grid(run).figure()


def correlation_grid(run: xr.DataTree) -> Panels:
    """Make the chart of `fit_correlations`.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The chart.
    """
    panels = {}
    for name in [name for name in FITS if name in run.children] or ["three_axis"]:
        values = over_prompts(group(run, name)["r"]).transpose("layer", "head")
        # Left out of the mean too: r = 1 by construction would raise it.
        telling = values.where(values < EXACT)
        mean = (
            f"mean {number(float(nanmean(telling.values)))}"
            if bool(telling.notnull().any())
            else ""
        )
        trivial = "gray: r = 1 by construction" if bool((values >= EXACT).any()) else ""
        panels[f"r of the {FITS[name]} fit: {'; '.join(filter(None, (mean, trivial)))}"] = telling
    width = 0.0 if len(panels) == 1 else PAGE_WIDTH
    return Panels(
        "fit_correlations",
        panels,
        bar={"label": "r"},
        cell=0.15,
        width=width,
        live=True,
        caption="Correlation r of each head's logits with the fit, mean over prompts. Colors end at the "
        "smallest and the largest r; gray: r = 1 by construction.",
    )


def example_heads(dataset: xr.Dataset) -> list[tuple[int, int]]:
    """Choose the heads with the largest, the median and the smallest r.

    Args:
        dataset: Group of a run.

    Returns:
        Labels (layer, head); fewer than three if there are fewer heads.
    """
    order = ranked_heads(over_prompts(dataset["r"]))
    return (
        # dict.fromkeys, since with one or two heads these places coincide.
        [order[place] for place in dict.fromkeys((0, (len(order) - 1) // 2, len(order) - 1))]
        if order
        else []
    )


def heads_with_maps(run: xr.DataTree, fit: xr.Dataset) -> list[tuple[int, int]]:
    """List the heads of `example_heads` that have maps in the run.

    Args:
        run: Tree of a run, a group per measure.
        fit: Group of the fit.

    Returns:
        Labels (layer, head); none without maps.
    """
    if "maps" not in run.children:
        return []
    maps = group(run, "maps")
    both = fit.sel(
        # A run may have maps of some layers and heads only.
        layer=np.intersect1d(fit["layer"], maps["layer"]),
        head=np.intersect1d(fit["head"], maps["head"]),
    )
    has_map = maps["logit_map"].notnull().any(("query_block", "key_block"))
    return example_heads(both.where(has_map))


def correlations(dataset: xr.Dataset, names: Mapping[str, str]) -> dict[str, xr.DataArray]:
    """Average correlations over prompts.

    Args:
        dataset: Group of a run.
        names: Label by variable.

    Returns:
        Means [layer, head] by label, of the variables that `dataset` has.
    """
    # Decided by the main correlation, which is first; the others then mean nothing either.
    exact = over_prompts(dataset[next(iter(names))]) >= EXACT
    present = {
        label: over_prompts(dataset[name]).where(~exact)
        for name, label in names.items()
        if name in dataset
    }
    return {
        label: values.assign_attrs(long_name=label, units="1") for label, values in present.items()
    }


def correlation_tables(
    group_name: str, names: Mapping[str, str]
) -> Callable[[xr.DataTree], Sequence[Table]]:
    """Make a function that tabulates correlations, as `layer_table` does.

    Args:
        group_name: Name of the group.
        names: Label by variable.

    Returns:
        Function of a run that returns its tables.
    """
    note = (
        "Means over heads and prompts; a dash where the correlation is undefined, or r is 1 by "
        "construction."
    )

    def tables(run: xr.DataTree) -> Sequence[Table]:
        present = correlations(group(run, group_name), names)
        return (
            layer_table(
                group_name, next(iter(present)).removeprefix("r of ").capitalize(), present, note
            ),
        )

    return tables


def correlation_maps(fit: xr.Dataset, names: Mapping[str, str]) -> list[Heads]:
    """Make maps of heads of correlations.

    Args:
        fit: Group of the fit.
        names: Label by variable.

    Returns:
        The charts.
    """
    return [Heads(values) for values in correlations(fit, names).values()]


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    """Chart the run's correlations by head, and fig. 2 if the run has maps and axes."""
    yield correlation_grid(run)
    dataset = group(run, "three_axis")
    if "distance_axis" in dataset:
        draw, heads = partial(three_axis_fit, run), heads_with_maps(run, dataset)
        caption = "logits of the first prompt, the three axes of their fit, and the sum of these."
        yield from figures_of_heads("three_axis", draw, heads, caption, live=True)
    yield from correlation_maps(dataset, CORRELATIONS)
    axes = {
        "Distance axis": ("distance", "distance (tokens)"),
        "Query and key axes": ("query key", "token"),
    }
    yield from fit_charts(dataset, "r of the three axes", axes)


def fit_charts(fit: xr.Dataset, title: str, axes: Mapping[str, tuple[str, str]]) -> list[Chart]:
    """Make charts of r of every prompt, and of the axes of the first one.

    Args:
        fit: Group of the fit.
        title: Title of the charts.
        axes: Names of axes and of their x axis, by title.

    Returns:
        The charts; charts of axes only if the run has axes.
    """
    charts: list[Chart] = [HeadNumber(title, fit["r"])]
    for label, (names, x) in axes.items():
        curves = {name: fit[f"{name}_axis"] for name in names.split() if f"{name}_axis" in fit}
        for curve in list(curves.values())[:1]:
            charts.append(
                HeadCurves(
                    f"{label}, first prompt", x, "logits", curve[curve.dims[-1]].values, curves
                )
            )
    return charts


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """State how much of the logits the axes explain.

    The run must hold the null with shuffled distances.
    """
    measured = group(run, "three_axis")
    if "r_shuffled" not in measured:
        return
    r, shuffled = (over_prompts(measured[name]) for name in ("r", "r_shuffled"))
    r = r.where(r < EXACT)  # r = 1 by construction says nothing of the model
    shuffled = shuffled.where(r.notnull())
    gain = r - shuffled
    # Written as `not >=`, so that a median of NaN returns too.
    if not float(gain.median()) >= 0.05:
        return
    layer, head, _ = strongest_head(gain)
    sentence = (
        "Distance matters to the logits: shuffling it takes r of the three-axis fit "
        f"from {float(r.median()):.2f} to "
    )
    sentence += f"{float(shuffled.median()):.2f} in the median head, most in L{layer} H{head}"
    yield Finding(
        sentence,
        f"{over(measured)}; r falls by .05 at least in the median head, of the heads that are not exact by construction",
        0.3,
        "three_axis",
        layer,
        head,
    )


VIEW = View(
    "three_axis",
    "Position and semantics: three axes",
    "Correlation of a head's logits with a part for the distance, one for the query and one "
    "for the key, added up (Position "
    "Generalization, sec. 3.1).",
    _charts,
    tables=correlation_tables("three_axis", CORRELATIONS),
    findings=_findings,
    compared=("r", "r_position", "distance_axis"),
    not_averaged=("distance_axis", "query_axis", "key_axis"),
)


def _map_charts(run: xr.DataTree) -> list[HeadImage]:
    """Chart both maps of every head for the first prompt."""
    maps, shown = group(run, "maps"), first_prompt(run)
    size = int(maps["block_size"])
    prompt, tokens = (
        (0, int(maps["key_block"].values[-1]) + size)
        if shown is None
        else (shown.prompt, shown.count)
    )
    kinds = {
        "logit": ("Logits", "query (token)", True),
        "fake": ("Fake-distance logits", "fake distance (tokens)", False),
    }
    return [
        HeadImage(
            title,
            "key (token)",
            y,
            # [layer, head, query or distance block, key block]
            maps[f"{kind}_map"].transpose(..., "key_block"),
            size,
            tokens,
            prompt,
            is_causal,
        )
        for kind, (title, y, is_causal) in kinds.items()
        if f"{kind}_map" in maps and maps[f"{kind}_map"].notnull().any()
    ]


MAPS = View(
    "maps",
    "Logit maps: where a token looks",
    "Logits of all pairs of tokens of the first prompt, as means over blocks, for the chosen "
    "head; and the attention of the chosen token.",
    _map_charts,
    compared=("logit_map", "fake_map"),
    not_averaged=("logit_map", "fake_map", "block_size"),
)
