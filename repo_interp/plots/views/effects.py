"""Effects of the positions of heads on the answer.

A map of heads per kind of change, the most needed heads with controls, screened and exact changes.

    map       mean change of log p(answer) when the positions of one head are changed
    dot       the same of the most needed heads together, with its standard deviation over prompts     grey dots   as many other heads
    scatter   the change of the logit difference as one backward pass estimates it, over the exact one, a dot per head

Draws the group `effects`. Knows nothing about how positions were changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D

from repo_interp.intervals import half_interval
from repo_interp.plots.marks import (
    CONTROL,
    LEARNED_SCHEMES,
    Cell,
    Chart,
    CustomFigure,
    Finding,
    Grid,
    Heads,
    Table,
    cells,
    counted,
    group,
    head_rows,
    legend_below,
    over,
    panels,
    ranked_heads,
    scheme_handles,
    schemes,
    signed_decades,
)
from repo_interp.plots.style import (
    PAGE_WIDTH,
    PaperFigure,
    paper_figure,
    scheme_colour,
    scheme_name,
    style,
)
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
    "ranked": "their ranks",
    "segmented": "numbers of segments",
}
"""Kinds of changes as they are shown: the changed positions."""
BESIDE = 3
"""Maps of heads side by side."""
LISTED = 8
"""Heads of a kind that the table lists."""
LINEAR = 0.01
"""Nats that the colours of a map reach at least; logit difference below which the axes of the
screening are linear.
"""
LOG_ABOVE = 100.0
"""Ratio of two kinds' changes from which those of sets have a logarithmic axis: a linear one would
hide the smaller.
"""
_COLUMNS = (
    *("log p (nats per token)", "others, lowest", "others, highest"),
    *("less the others' mean", "95 % from", "95 % to", "score", "others' score"),
    *("most needed layer", "log p of that layer", "less the sum of its heads"),
    *("rank r: gradient x positions", "gradient x output"),
)
_OF_HEADS = (
    "positions become",
    "layer",
    "head",
    "scheme",
    "log p (nats per token)",
    "± over prompts",
    "logit difference",
    "score",
)


NEEDED = "#D55E00"
"""Colour of the most needed heads."""


@style()
def effect_maps(run: xr.DataTree) -> PaperFigure:
    """Draw the mean change of log p(answer) per layer and head, a map per kind.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: The run has no effects.
    """
    return effect_grid(run).figure()


def effect_grid(run: xr.DataTree) -> Grid:
    """Make the chart of `effect_maps`.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The chart.
    """
    effects, panels = group(run, "effects"), {}
    shown = effects["effect"].round(4) + 0.0  # smaller changes are rounding, and -0
    reach = max(float(np.nanmax(np.abs(shown))), LINEAR)
    for kind in effects["kind"].values.tolist():
        drawn = effects["control_effect"].sel(kind=kind).dropna("draw").values
        ends = " to ".join(
            dict.fromkeys(
                f"{end(drawn).round(4) + 0.0:.3g}" for end in (np.min, np.max) if drawn.size
            )
        )
        others = (
            f"\n{int(effects.attrs['set_heads'])} others together: {ends}" if drawn.size else ""
        )
        panels[f"positions: {KIND_NAMES.get(kind, kind)}{others}"] = shown.sel(kind=kind)
    look = {"cmap": "PuOr", "norm": Normalize(-reach, reach, clip=True)}
    title = "change of log p(answer), nats per token, by the head whose positions are changed"
    return Grid("effects_by_head", panels, title, look=look, bar={}, cell=0.15, width=PAGE_WIDTH)


@style()
def effects_of_sets(run: xr.DataTree) -> PaperFigure:
    """Draw the effects of changing the most needed heads together.

    As many other heads, drawn at random, are the control. Log p(answer) and the score are shown for
    all kinds.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.
    """
    effects = group(run, "effects")
    figure = paper_figure(PAGE_WIDTH, 2.3)
    left, right = figure.subplots(1, 2)
    for ax, name in ((left, "log_probability"), (right, "score")):
        _draw_sets(ax, effects[f"set_{name}_change"], effects[f"control_{name}_change"])
    left.set_title("change of log p(answer), nats per token")
    right.set_title(f"change of the score ({effects.attrs['metric']})")
    needed = f"most needed {counted(int(effects.attrs['set_heads']), 'head')}"
    handles = [
        Line2D([], [], marker="o", linestyle="none", markersize=size, color=colour, label=label)
        for size, colour, label in (
            (4, NEEDED, needed),
            (2.6, CONTROL, "as many others, each draw"),
        )
    ]
    legend_below(
        figure,
        [
            *handles,
            Line2D([], [], color="#222222", linewidth=0.8, label="standard deviation over prompts"),
        ],
    )
    return figure


@style()
def screening_fit(run: xr.DataTree) -> PaperFigure:
    """Draw estimated against exact changes of the logit difference.

    A dot is a head that was measured; kinds have their panels.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.
    """
    effects = group(run, "effects")
    kinds = effects["kind"].values.tolist()
    figure, axes = panels(
        len(kinds), BESIDE, 1.9, 0.4, PAGE_WIDTH if len(kinds) > 1 else PAGE_WIDTH / 2
    )
    exact = effects["logit_difference_change"].mean("prompt")
    colours = {layer: scheme_colour(scheme) for layer, scheme in schemes(effects).items()}
    for ax, kind in zip(axes, kinds, strict=True):
        truth, estimate = (
            exact.sel(kind=kind),
            effects["screened_effect"].sel(kind=kind, screening="output"),
        )
        for layer, colour in colours.items():
            ax.plot(
                truth.sel(layer=layer),
                estimate.sel(layer=layer),
                "o",
                color=colour,
                markersize=2.6,
                markeredgewidth=0,
            )
        ends = [*ax.get_xlim(), *ax.get_ylim()]
        ax.plot(
            [min(ends), max(ends)], [min(ends), max(ends)], color="#8A8A8A", linewidth=0.6, zorder=0
        )
        if max(map(abs, ends)) > 2 * LINEAR:  # else one decade or none would have a tick
            signed_decades(ax, "x", LINEAR)
            signed_decades(ax, "y", LINEAR)
        else:
            ax.locator_params(nbins=3)
        rho = float(effects["rank_correlation"].sel(kind=kind, screening="output"))
        ax.set_title(f"{KIND_NAMES.get(kind, kind)}\nrank r = {rho:.2f}")
        ax.set(xlabel="exact", ylabel="one backward pass")
    figure.suptitle("change of the logit difference; line: equal", x=0.01, ha="left")
    legend_below(figure, scheme_handles(schemes(effects).values(), "o"))
    return figure


def effect_tables(run: xr.DataTree) -> tuple[Table, ...]:
    """Tabulate the effects of kinds and of the heads that do most.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per kind for the most needed heads, controls, layers and screening, and one row per
        head of those that do most.
    """
    effects = group(run, "effects")
    rows: list[tuple[Cell, ...]] = []
    heads: list[tuple[Cell, ...]] = []
    for kind in effects["kind"].values.tolist():
        of_kind = effects.sel(kind=kind)
        named, control, layers = (
            KIND_NAMES.get(kind, kind),
            of_kind["control_effect"],
            of_kind["layer_effect"].values,
        )
        needed = of_kind.isel(layer=int(np.nanargmin(layers)) if np.isfinite(layers).any() else 0)
        of_sets = (
            of_kind["set_effect"],
            control.min(),
            control.max(),
            *_less_controls(of_kind, of_kind["set_log_probability_change"]),
            of_kind["set_score_change"].mean(),
            of_kind["control_score_change"].mean(),
        )
        of_layer = (
            needed["layer_effect"],
            needed["interaction"],
            *of_kind["rank_correlation"].values,
        )
        rows.append((named, *cells(of_sets), int(needed["layer"]), *cells(of_layer)))
        changes = (
            of_kind[f"{name}_change"].mean("prompt") for name in ("logit_difference", "score")
        )
        of_heads = head_rows(
            [of_kind["effect"], of_kind["effect_spread"], *changes],
            ranked_heads(-of_kind["effect"])[:LISTED],
        )
        heads += [(named, *row) for row in of_heads]
    size = counted(int(effects.attrs["set_heads"]), "head")
    about = (
        f"{counted(int(effects.attrs['prompts']), 'prompt')} of the task "
        f"{effects.attrs['task']}; score: {effects.attrs['metric']}."
    )
    title = f"The most needed {size} changed together, and as many others at random"
    note = (
        f"Mean changes over {about} 95 %: Student's interval over prompts, of the difference in "
        "every prompt. Rank correlations of screened and exact changes of "
        "the logit difference over heads."
    )
    sets, draws = (
        int(effects.attrs.get("control_sets", effects.sizes["draw"])),
        effects.sizes["draw"],
    )
    note += (
        f" There are {sets} different sets of as many other heads, not {draws}."
        if sets < draws
        else ""
    )
    note_of_heads = (
        "Mean changes when the positions of this head alone are changed, "
        f"{about} ±: standard deviation over prompts."
    )
    return (
        Table("effects", title, ("positions become", *_COLUMNS), tuple(rows), note),
        Table(
            "effects_by_head",
            "Heads whose positions the answer needs most",
            _OF_HEADS,
            tuple(heads),
            note_of_heads,
        ),
    )


def _draw_sets(ax: Axes, changes: xr.DataArray, controls: xr.DataArray) -> None:
    """A dot per kind with its spread over prompts, the controls to its right."""
    kinds, places = changes["kind"].values.tolist(), np.arange(changes.sizes["kind"])
    mean, spread = (
        changes.mean("prompt"),
        changes.std("prompt", ddof=1).fillna(0) if changes.sizes["prompt"] > 1 else 0.0,
    )
    drawn = controls.mean("prompt").transpose("draw", "kind").values
    ax.vlines(places - 0.12, mean - spread, mean + spread, color="#222222", linewidth=0.8)
    ax.plot(places - 0.12, mean, "o", color=NEEDED, markersize=4, markeredgewidth=0, gid="sets")
    x = np.broadcast_to(places + 0.12, drawn.shape)
    ax.plot(
        x.ravel(),
        drawn.ravel(),
        "o",
        color=CONTROL,
        markersize=2.6,
        markeredgewidth=0,
        gid="controls",
    )
    ax.axhline(0, color="#8A8A8A", linewidth=0.6, zorder=0)
    # the axis reaches `LINEAR` at least: smaller changes are rounding
    ax.update_datalim([(0, -LINEAR), (0, LINEAR)])
    ax.autoscale_view(scalex=False)
    sizes = np.abs(mean.values)
    # a linear axis would hide a change that is none of rounding
    if ((sizes > LINEAR) & (sizes * LOG_ABOVE < np.nanmax(sizes))).any():
        signed_decades(ax, "y", LINEAR)
        # margins of a linear axis would cut the bars of standard deviations
        ends = np.concatenate([mean - spread, mean + spread, drawn.ravel(), [-LINEAR, LINEAR]])
        ax.set_ylim(2 * np.nanmin(ends), 2 * np.nanmax(ends))
    ax.set_xticks(
        range(len(kinds)),
        [KIND_NAMES.get(kind, str(kind)) for kind in kinds],
        rotation=20 if len(kinds) > 4 else 0,
    )
    ax.set_xlim(-0.6, len(kinds) - 0.4)
    ax.grid(axis="y")


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    yield effect_grid(run)
    yield CustomFigure("effects_of_sets", partial(effects_of_sets, run))
    yield CustomFigure("effects_screening", partial(screening_fit, run))
    effects = group(run, "effects")["effect"]
    for kind in effects["kind"].values.tolist():
        name = (
            f"change of log p(answer), mean over its tokens, positions {KIND_NAMES.get(kind, kind)}"
        )
        yield Heads(effects.sel(kind=kind, drop=True).assign_attrs(long_name=name, units="nat"))


_DOES = {
    "linearised": "replacing them by the token index",
    "frozen": "freezing them",
    "permuted": "permuting them",
    "swapped": "swapping neighbours",
    "scaled": "scaling them",
    "rounded": "rounding them",
    "clipped": "clipping them",
    "shifted": "shifting those of a span",
    "transplanted": "taking those of another prompt",
    "ranked": "replacing them by their ranks",
    "segmented": "replacing them by numbers of segments",
}
STANDARD_ERRORS = 3.0
"""An effect is found where it is that many standard errors over prompts from 0, and beyond that of
every set of other heads.
"""
LEAST = 0.01
"""Nats that a found effect costs, at least."""


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Find the layer and the head whose positions the answer needs most.

    The kind of change is the one that costs most.
    """
    measured = group(run, "effects")
    if measured.sizes["prompt"] < 2:
        return
    others = measured["control_effect"].min("draw").fillna(0.0)
    is_needed = False
    for variable, weight in (
        ("layer_log_probability_change", 0.97),
        ("log_probability_change", 0.88),
    ):
        mean, errors = _mean_and_error(measured[variable])
        needed = mean.where((mean < -STANDARD_ERRORS * errors) & (mean < -LEAST) & (mean < others))
        if not needed.notnull().any():
            continue
        is_needed, where = True, _lowest(needed)
        lost, error, control = (
            float(values.sel(where)) for values in (needed, errors, others.broadcast_like(needed))
        )
        scheme = schemes(measured)[where["layer"]]
        token_index = (
            "" if scheme in LEARNED_SCHEMES else f" ({scheme_name(scheme)}, which learns none)"
        )
        name = (
            f"layer {where['layer']}"
            if "head" not in where
            else f"L{where['layer']} H{where['head']} alone"
        )
        name += token_index if {*schemes(measured).values()} & {*LEARNED_SCHEMES} else ""
        moved = _DOES.get(where["kind"], where["kind"])
        sentence = (
            f"The answer needs the positions of {name}: {moved} costs {-lost:.2g} "
            f"nats of its log-probability per token, {over(measured)}"
        )
        controls = f"{control:.2g}" if abs(control) > error / STANDARD_ERRORS else "0"
        evidence = (
            f"{lost:.2g} nats, standard error {error:.1g}; the same change to "
            f"{counted(int(measured.attrs['set_heads']), 'other head')}, drawn at random: "
            f"{controls} nats at worst"
        )
        less, low, high = _less_controls(
            measured.sel(kind=where["kind"]), measured[variable].sel(where)
        )
        if np.isfinite(low):
            evidence += (
                f"; less their mean, prompt by prompt: {less:.2g} nats, 95 % interval {low:.2g} "
                f"to {high:.2g}"
            )
        yield Finding(sentence, evidence, weight, "effects", where["layer"], where.get("head"))
    if not is_needed:
        yield from _robust(measured)
    yield from _outdone(measured)


def _outdone(measured: xr.Dataset) -> Iterator[Finding]:
    """Say so where other heads, drawn at random, lose more than those that seemed most needed."""
    controls = measured["control_log_probability_change"]
    worst = controls.mean("prompt").fillna(0.0).argmin("draw")
    lost = controls.isel(draw=worst)
    excess = measured["set_log_probability_change"] - lost  # paired, prompt by prompt
    error = excess.std("prompt", ddof=1) / excess.sizes["prompt"] ** 0.5
    other, needed = lost.mean("prompt"), measured["set_log_probability_change"].mean("prompt")
    beyond = excess.mean("prompt").where(
        (other < -LEAST) & (needed - other > STANDARD_ERRORS * error)
    )
    if not beyond.notnull().any():
        return
    kind = str(measured["kind"].values[int(np.nanargmax(beyond.values))])
    other, needed = float(other.sel(kind=kind)), float(needed.sel(kind=kind))
    size = counted(int(measured.attrs["set_heads"]), "head")
    sentence = (
        f"Other heads matter more than the {size} that seemed most needed: changing their "
        f"positions ({_DOES.get(kind, kind)}) costs {-other:.2g} nats per token of the answer, "
        f"those of the {size} {max(0.0, -needed):.2g}, {over(measured)}"
    )
    evidence = f"the worst of {measured.sizes['draw']} sets of as many other heads, drawn at random"
    yield Finding(sentence, evidence, 0.6, "effects")


def _robust(measured: xr.Dataset) -> Iterator[Finding]:
    """Yield the largest loss that cannot be excluded, if no layer's positions matter."""
    mean, errors = _mean_and_error(measured["layer_log_probability_change"])
    if not bool(mean.notnull().any()) or bool(
        (mean < np.minimum(-STANDARD_ERRORS * errors, -LEAST)).any()
    ):
        return
    changes = measured["layer_log_probability_change"].transpose("kind", "layer", "prompt")
    lowest = mean - half_interval(changes.values)
    where = _lowest(lowest)
    sentence = (
        "Changing the positions of one layer costs the answer at most "
        f"{max(0.0, -float(lowest.min())):.2g} nats of its log-probability per token, by 95 % "
        f"intervals over {measured.sizes['prompt']} prompts (layer {where['layer']}, "
        f"{_DOES.get(where['kind'], where['kind'])})"
    )
    evidence = (
        f"measured there: {float(mean.sel(where)):.2g} nats, standard error "
        f"{float(errors.sel(where)):.1g}; no other interval reaches lower"
    )
    yield Finding(sentence, evidence, 0.3, "effects", int(where["layer"]))


def _less_controls(of_kind: xr.Dataset, changes: xr.DataArray) -> tuple[float, float, float]:
    """Mean of `changes` less those of the controls over prompts, and its 95 % interval."""
    if "control_log_probability_change" not in of_kind:
        return np.nan, np.nan, np.nan
    paired = (changes - of_kind["control_log_probability_change"].mean("draw")).values
    mean, reach = float(paired.mean()), float(half_interval(paired))
    return mean, mean - reach, mean + reach


def _mean_and_error(changes: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """Means of `changes` over prompts, and their standard errors."""
    changes = changes.transpose("kind", "layer", ...)
    return changes.mean("prompt"), changes.std("prompt", ddof=1) / changes.sizes["prompt"] ** 0.5


def _lowest(values: xr.DataArray) -> dict[str, Any]:
    """Labels of the smallest value by axis; NaN left out."""
    places = np.unravel_index(int(np.nanargmin(values.values)), values.shape)
    return {
        str(axis): values[axis].values[place].item()
        for axis, place in zip(values.dims, places, strict=True)
    }


VIEW = View(
    "effects",
    "What the positions of heads cause",
    "The positions of a head are changed during the pass, and the answer is read again: how "
    "much less likely it becomes. A head whose "
    "positions can go alone may still be needed, since others may replace it: layers and "
    "sets of heads are changed too.",
    _charts,
    tables=effect_tables,
    findings=_findings,
    compared=("effect", "layer_effect", "set_effect"),
    not_averaged=("in_set", "screened_effect"),
)
