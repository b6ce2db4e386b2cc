"""What the positions of heads cause: a map of heads per kind of change, the most needed heads with controls, screened and exact changes.

    map       mean change of log p(answer) when the positions of one head are changed
    dot       the same of the most needed heads together, with its standard deviation over prompts     grey dots   as many other heads
    scatter   the change of the logit difference as one backward pass estimates it, over the exact one, a dot per head

Draws the group `effects`. Knows nothing about how positions were changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import SymmetricalLogLocator

from repo_interp.plots.marks.arrays import ranked_heads
from repo_interp.plots.marks.drawing import counted, legend_below, plain_decades, scheme_handles
from repo_interp.plots.marks.finding import Finding
from repo_interp.plots.marks.heads import CONTROL, HeadMap, head_grid
from repo_interp.plots.marks.reading import group, schemes
from repo_interp.plots.marks.table import Cell, Table, cells
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, scheme_colour, scheme_name, style
from repo_interp.plots.view import View

KIND_NAMES = {
    "linearised": "token index",
    "frozen": "all the same",
    "permuted": "in random order",
    "swapped": "neighbours swapped",
    "scaled": "scaled",
    "rounded": "rounded",
    "clipped": "clipped",
    "shifted": "span shifted",
    "transplanted": "another prompt's",
}
"""Kinds of changes as they are shown: what the positions become."""
BESIDE = 3
"""Maps of heads side by side."""
LISTED = 8
"""Heads of a kind that the table lists."""
LINEAR = 0.01
"""Nats that the colours of a map reach at least; logit difference below which the axes of the screening are linear."""
NEEDED = "#D55E00"
"""Colour of the most needed heads."""


@style()
def effect_maps(run: xr.DataTree) -> PaperFigure:
    """Layer by head, the mean change of log p(answer), one map per kind. Raises InputError when the run has no effects."""
    effects = group(run, "effects")
    kinds = effects["kind"].values.tolist()
    rows = -(-len(kinds) // BESIDE)
    height = 0.75 + 0.13 * max(8, effects.sizes["layer"])
    figure = paper_figure(PAGE_WIDTH, 0.45 + height * rows)
    panels = figure.subplots(rows, min(BESIDE, len(kinds)), squeeze=False).ravel()
    shown = effects["effect"].round(4) + 0.0  # what is less is rounding, and -0
    reach = max(float(np.nanmax(np.abs(shown))), LINEAR)
    for ax, kind in zip(panels, kinds, strict=False):
        head_grid(shown.sel(kind=kind), ax, (-reach, reach))
        drawn = effects["control_effect"].sel(kind=kind).values
        ends = " to ".join(dict.fromkeys(f"{end + 0.0:.3g}" for end in (drawn.min().round(4), drawn.max().round(4))))
        others = f"{int(effects.attrs['set_heads'])} others together: {ends}"
        ax.set_title(f"positions: {KIND_NAMES.get(kind, kind)}\n{others if np.isfinite(drawn).all() else ''}".rstrip())
    for ax in panels[len(kinds) :]:
        ax.set_axis_off()
    figure.suptitle("change of log p(answer), nats, by the head whose positions are changed", x=0.01, ha="left")
    legend_below(figure, scheme_handles(schemes(effects).values()))
    return figure


@style()
def effects_of_sets(run: xr.DataTree) -> PaperFigure:
    """The most needed heads changed together, and as many others drawn at random, for every kind: log p(answer) and score."""
    effects = group(run, "effects")
    figure = paper_figure(PAGE_WIDTH, 2.3)
    left, right = figure.subplots(1, 2)
    for ax, name in ((left, "log_probability"), (right, "score")):
        _draw_sets(ax, effects[f"set_{name}_change"], effects[f"control_{name}_change"])
    left.set_title("change of log p(answer), nats")
    right.set_title(f"change of the score ({effects.attrs['metric']})")
    heads = counted(int(effects.attrs["set_heads"]), "head")
    legend_below(
        figure,
        [
            Line2D([], [], marker="o", linestyle="none", markersize=4, color=NEEDED, label=f"most needed {heads}"),
            Line2D([], [], marker="o", linestyle="none", markersize=2.6, color=CONTROL, label="as many others, each draw"),
            Line2D([], [], color="#222222", linewidth=0.8, label="standard deviation over prompts"),
        ],
    )
    return figure


@style()
def screening_fit(run: xr.DataTree) -> PaperFigure:
    """Estimated against exact changes of the logit difference, a dot per head that was measured, one panel per kind."""
    effects = group(run, "effects")
    kinds = effects["kind"].values.tolist()
    rows, columns = -(-len(kinds) // BESIDE), min(BESIDE, len(kinds))
    figure = paper_figure(PAGE_WIDTH if columns > 1 else PAGE_WIDTH / 2, 0.4 + 1.9 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    exact = effects["logit_difference_change"].mean("prompt")
    colours = {layer: scheme_colour(scheme) for layer, scheme in schemes(effects).items()}
    for ax, kind in zip(panels, kinds, strict=False):
        truth, estimate = exact.sel(kind=kind), effects["screened_effect"].sel(kind=kind, screening="output")
        for layer, colour in colours.items():
            ax.plot(truth.sel(layer=layer), estimate.sel(layer=layer), "o", color=colour, markersize=2.6, markeredgewidth=0)
        ends = [*ax.get_xlim(), *ax.get_ylim()]
        ax.plot([min(ends), max(ends)], [min(ends), max(ends)], color="#8A8A8A", linewidth=0.6, zorder=0)
        for axis in ("x", "y"):
            getattr(ax, f"set_{axis}scale")("symlog", linthresh=LINEAR)
            getattr(ax, f"{axis}axis").set_major_locator(SymmetricalLogLocator(base=10, linthresh=LINEAR, subs=[1.0]))
        plain_decades(ax.xaxis)
        plain_decades(ax.yaxis)
        rho = float(effects["rank_correlation"].sel(kind=kind, screening="output"))
        ax.set_title(f"{KIND_NAMES.get(kind, kind)}: rank r = {rho:.2f}")
        ax.set(xlabel="exact", ylabel="one backward pass")
    for ax in panels[len(kinds) :]:
        ax.set_axis_off()
    figure.suptitle("change of the logit difference; line: equal", x=0.01, ha="left")
    legend_below(figure, scheme_handles(schemes(effects).values(), "o"))
    return figure


def effect_tables(run: xr.DataTree) -> tuple[Table, ...]:
    """One row per kind - the most needed heads, controls, layers, screening -, and one per head of those that do most."""
    effects = group(run, "effects")
    rows: list[tuple[Cell, ...]] = []
    heads: list[tuple[Cell, ...]] = []
    for kind in effects["kind"].values.tolist():
        own = effects.sel(kind=kind)
        control, layers = own["control_effect"].values, own["layer_effect"].values
        known = control[np.isfinite(control)]
        ends = (known.min(), known.max()) if known.size else (np.nan, np.nan)
        needed = int(np.nanargmin(layers)) if np.isfinite(layers).any() else 0
        interaction = own["interaction"].values[needed]
        named = KIND_NAMES.get(kind, kind)
        scores = own["set_score_change"].mean(), own["control_score_change"].mean()
        fits = own["rank_correlation"].values
        rows.append(
            (
                named,
                *cells((own["set_effect"], *ends, *scores)),
                int(own["layer"].values[needed]),
                *cells((layers[needed], interaction, *fits)),
            )
        )
        for layer, head in ranked_heads(-own["effect"])[:LISTED]:
            of_head = own.sel(layer=layer, head=head)
            scheme = scheme_name(schemes(effects)[layer])
            changes = (of_head[f"{name}_change"].mean("prompt") for name in ("logit_difference", "score"))
            heads.append((named, layer, head, scheme, *cells((of_head["effect"], of_head["effect_spread"], *changes))))
    size = counted(int(effects.attrs["set_heads"]), "head")
    about = f"{counted(int(effects.attrs['prompts']), 'prompt')} of the task {effects.attrs['task']}; score: {effects.attrs['metric']}."
    return (
        Table(
            "effects",
            f"The most needed {size} changed together, and as many others at random",
            (
                "positions become",
                "log p (nats)",
                "others, lowest",
                "others, highest",
                "score",
                "others' score",
                "most needed layer",
                "log p of that layer",
                "less the sum of its heads",
                "rank r: gradient x positions",
                "gradient x output",
            ),
            tuple(rows),
            f"Mean changes over {about} Rank correlations of screened and exact changes of the logit difference over heads.",
        ),
        Table(
            "effects_by_head",
            "Heads whose positions the answer needs most",
            ("positions become", "layer", "head", "scheme", "log p (nats)", "± over prompts", "logit difference", "score"),
            tuple(heads),
            f"Mean changes when the positions of this head alone are changed, {about} ±: standard deviation over prompts.",
        ),
    )


def _draw_sets(ax: Axes, changes: xr.DataArray, controls: xr.DataArray) -> None:
    """A dot per kind with its spread over prompts, the controls to its right."""
    kinds = changes["kind"].values.tolist()
    for place, kind in enumerate(kinds):
        values, drawn = changes.sel(kind=kind).values, controls.sel(kind=kind).mean("prompt").values
        mean, spread = values.mean(), values.std(ddof=1) if values.size > 1 else 0.0
        ax.vlines(place - 0.12, mean - spread, mean + spread, color="#222222", linewidth=0.8)
        ax.plot(place - 0.12, mean, "o", color=NEEDED, markersize=4, markeredgewidth=0, gid=f"set {kind}")
        ax.plot(
            np.full(len(drawn), place + 0.12), drawn, "o", color=CONTROL, markersize=2.6, markeredgewidth=0, gid=f"control {kind}"
        )
    ax.axhline(0, color="#8A8A8A", linewidth=0.6, zorder=0)
    ax.set_xticks(range(len(kinds)), [KIND_NAMES.get(kind, str(kind)) for kind in kinds], rotation=20 if len(kinds) > 4 else 0)
    ax.set_xlim(-0.6, len(kinds) - 0.4)
    ax.grid(axis="y")


def _head_maps(run: xr.DataTree) -> Iterator[HeadMap]:
    effects = group(run, "effects")["effect"]
    for kind in effects["kind"].values.tolist():
        name = f"change of log p(answer), positions {KIND_NAMES.get(kind, kind)}"
        yield HeadMap(effects.sel(kind=kind, drop=True).assign_attrs(long_name=name, units="nat"))


def _figures(run: xr.DataTree) -> Iterator[tuple[str, PaperFigure]]:
    yield "effects_by_head", effect_maps(run)
    yield "effects_of_sets", effects_of_sets(run)
    yield "effects_screening", screening_fit(run)


_DOES = {"linearised": "at the token index", "frozen": "at one constant", "permuted": "in random order"}
STANDARD_ERRORS = 3.0
"""An effect is found where it is that many standard errors over prompts from 0, and beyond that of every set of other heads."""
LEAST = 0.01
"""Nats that a found effect costs, at least."""


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """The layer, and the head, whose positions the answer needs most, for the change of positions that costs most."""
    measured = group(run, "effects")
    if measured.sizes["prompt"] < 2:
        return
    others = np.nan_to_num(measured["control_effect"].min("draw").values, nan=0.0)
    best: list[tuple[float, Finding]] = []
    for place, kind in enumerate(map(str, measured["kind"].values)):
        for variable, weight in (("layer_log_probability_change", 0.97), ("log_probability_change", 0.88)):
            changes = measured[variable].sel(kind=kind)
            mean = changes.mean("prompt")
            errors = changes.std("prompt", ddof=1) / measured.sizes["prompt"] ** 0.5
            needed = mean.where((mean < -STANDARD_ERRORS * errors) & (mean < -LEAST) & (mean < others[place]))
            if not bool(needed.notnull().any()):
                continue
            where = _lowest(needed)
            lost, error = float(needed.sel(where)), float(errors.sel(where))
            name = f"layer {where['layer']}" if "head" not in where else f"L{where['layer']} H{where['head']} alone"
            moved = _DOES.get(kind, f"{kind}")
            sentence = f"The answer needs the positions of {name}: {moved}, its log-probability falls by {-lost:.2g} nats"
            controls = f"{others[place]:.2g}" if abs(others[place]) > error / STANDARD_ERRORS else "0"
            evidence = (
                f"effects.{variable} ({kind}) {lost:.2g} +- {error:.1g} nats; "
                f"the same change to as many other heads, drawn at random: at most {controls} nats"
            )
            best.append((lost, Finding(sentence, evidence, weight, "effects", where["layer"], where.get("head"))))
    if not best:
        yield from _robust(measured)
    for weight in (0.97, 0.88):
        some = [pair for pair in best if pair[1].weight == weight]
        if some:
            yield min(some, key=lambda pair: pair[0])[1]


def _robust(measured: xr.Dataset) -> Iterator[Finding]:
    """That no layer's positions are clearly needed, with the layer and the change that cost most."""
    changes = measured["layer_log_probability_change"].transpose("kind", "layer", "prompt")
    errors = changes.std("prompt", ddof=1) / measured.sizes["prompt"] ** 0.5
    mean = changes.mean("prompt")
    if not bool(mean.notnull().any()) or bool((mean < np.minimum(-STANDARD_ERRORS * errors, -LEAST)).any()):
        return
    where = _lowest(mean)
    moved = _DOES.get(str(where["kind"]), str(where["kind"]))
    sentence = (
        f"The answer clearly needs no layer's positions: the largest loss, with layer {where['layer']} {moved}, is within noise"
    )
    costs = f"{float(mean.sel(where)):.2g} +- {float(errors.sel(where)):.1g} nats"
    evidence = f"effects.layer_log_probability_change {costs}; a finding has {STANDARD_ERRORS:g} standard errors"
    yield Finding(sentence, evidence, 0.6, "effects", int(where["layer"]))


def _lowest(values: xr.DataArray) -> dict[str, Any]:
    """Labels of the smallest value by axis; NaN left out."""
    places = np.unravel_index(int(np.nanargmin(values.values)), values.shape)
    return {str(axis): values[axis].values[place].item() for axis, place in zip(values.dims, places, strict=True)}


VIEW = View(
    "effects",
    "What the positions of heads cause",
    "The positions of a head are changed during the pass, and the answer is read again: how much less likely it becomes. A head whose "
    "positions can go alone may still be needed, since others may replace it: layers and sets of heads are changed too.",
    _figures,
    tables=effect_tables,
    findings=_findings,
    head_maps=_head_maps,
    compared=("effect", "layer_effect", "set_effect"),
    not_averaged=("in_set", "screened_effect"),
)
