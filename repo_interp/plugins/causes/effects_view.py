"""Charts of the effects of heads' positions on the answer.

A map of heads per kind of change, the most needed heads beside other heads, screened and exact
changes.

    map       mean change of log p(answer) when the positions of one head are changed
    dot       the same of the most needed heads together, with its standard deviation over prompts     gray dots   as many other heads
    dots      the exact change of the logit difference, a dot per head    gray bars   as one backward pass estimates it

Draws the group `effects`. This module knows nothing about how positions were changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.colors import Normalize

from repo_interp.intervals import half_interval
from repo_interp.plots.marks import (
    CONTROL,
    Cell,
    Chart,
    Dots,
    Finding,
    HeadDots,
    Heads,
    Panels,
    Runs,
    Table,
    counted,
    group,
    head_rows,
    layer_scheme,
    learned_layers,
    over,
    ranked_heads,
    table_of,
)
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, style
from repo_interp.plots.view import View

LISTED = 8
"""Heads of a kind that the table lists."""
LINEAR = 0.01
"""Least range of a map's colors, in nats; also the logit difference below which the axes of the
screening are linear.
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
"""Color of the most needed heads."""


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


def effect_grid(run: xr.DataTree) -> Panels:
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
            f"\n{int(effects.attrs['set_heads'])} other heads at once: {ends}" if drawn.size else ""
        )
        panels[f"positions: {_word(effects, kind)}{others}"] = shown.sel(kind=kind)
    # Symmetric about 0, and at least LINEAR wide, so that rounding is not drawn in full colors.
    look = {"cmap": "PuOr", "norm": Normalize(-reach, reach, clip=True)}
    title = "Change of log p(answer), nats per token, by the head whose positions are changed"
    return Panels(
        "effects_by_head",
        panels,
        title,
        look=look,
        bar={},
        cell=0.15,
        width=PAGE_WIDTH,
        caption="How much likelier the answer becomes when the positions of one head are changed; a "
        "panel for each change. Below 0 the answer needs them.",
    )


@style()
def effects_of_sets(run: xr.DataTree) -> PaperFigure:
    """Draw the effects of changing the most needed heads together.

    The null is as many other heads, drawn at random. The figure shows log p(answer) and the score
    for all kinds.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.
    """
    return sets_chart(run).figure()


def sets_chart(run: xr.DataTree) -> Dots:
    """Make the chart of `effects_of_sets`.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The chart.
    """
    effects, panels = group(run, "effects"), {}
    for name, title in (
        ("log_probability", "change of log p(answer), nats per token"),
        ("score", f"change of the score ({effects.attrs['metric']})"),
    ):
        # Draws are renamed to prompts: both are drawn as ticks beside a mean.
        others = effects[f"control_{name}_change"].mean("prompt").rename(draw="prompt")
        panels[title] = xr.concat(
            [
                # Renumbered, or the outer join would match a draw with the prompt of equal number.
                part.assign_coords(prompt=np.arange(part.sizes["prompt"]))
                for part in (effects[f"set_{name}_change"], others)
            ],
            "run",
            join="outer",
        )
    needed = f"most needed {counted(int(effects.attrs['set_heads']), 'head')}"
    drawn = xr.concat(panels.values(), xr.IndexVariable("of", [*panels]))
    named = drawn.assign_coords(
        run=[needed, "as many other heads"],
        kind=[_word(effects, kind) for kind in effects["kind"].values.tolist()],
    )
    named = named.rename("change").assign_attrs(
        long_name="answer with the positions of several heads changed",
        detail="tick: a prompt, or a draw of other heads",
        least=LINEAR,
    )
    return Dots(
        named,
        against_others(needed),
        "kind",
        name="effects_of_sets",
        panel="of",
        caption="What changing the positions of the most needed heads together costs the answer, beside "
        "as many other heads, drawn at random; by what the positions become.",
    )


def against_others(heads: str) -> Runs:
    """Set the looks of some heads and of the same number of others.

    Args:
        heads: Name of the heads in the legend.

    Returns:
        Both as runs.
    """
    colours = {heads: NEEDED, "as many other heads": CONTROL}
    looks = {
        name: {"color": colour, "marker": "o", "label": name} for name, colour in colours.items()
    }
    return Runs(tuple(looks), ("", ""), looks, None)


def screening_chart(run: xr.DataTree) -> HeadDots:
    """Chart exact changes of the logit difference over the estimates of one backward pass.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The chart, with a panel per kind.
    """
    effects, panels = group(run, "effects"), {}
    for kind in effects["kind"].values.tolist():
        of_kind = effects.sel(kind=kind)
        rho = float(of_kind["rank_correlation"].sel(screening="output"))
        exact = of_kind["logit_difference_change"].mean("prompt").assign_attrs(least=LINEAR)
        panels[f"{_word(effects, kind)}, rank r = {rho:.2f}"] = (
            exact,
            of_kind["screened_effect"].sel(screening="output"),
        )
    label = "change of the logit difference"
    return HeadDots(
        "effects_screening",
        panels,
        "estimate of one backward pass",
        label,
        caption="Change of the logit difference when the positions of one head are changed: measured, and "
        "as one backward pass estimates it; by what the positions become.",
    )


def effect_tables(run: xr.DataTree) -> tuple[Table, ...]:
    """Tabulate the effects of kinds, and the heads with the largest effects.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per kind for the most needed heads, other heads, layers and screening, and one row
        per head with a large effect.
    """
    effects = group(run, "effects")
    layers, controls = effects["layer_effect"], effects["control_effect"]
    # argmin raises if no layer has a value.
    needed = effects.isel(layer=layers.fillna(np.inf).argmin("layer"))
    columns = (
        *(effects["set_effect"], controls.min("draw"), controls.max("draw")),
        *_less_controls(effects, effects["set_log_probability_change"]),
        *(effects[f"{heads}_score_change"] for heads in ("set", "control")),
        *(needed["layer"], needed["layer_effect"], needed["interaction"]),
        *effects["rank_correlation"].transpose("screening", "kind"),
    )
    means = [column.mean({*column.dims} - {"kind"}) for column in columns]
    heads: list[tuple[Cell, ...]] = []
    few = int((effects["effect"] > -LEAST).sum())
    for kind in effects["kind"].values.tolist():
        of_kind = effects.sel(kind=kind)
        changes = (
            of_kind[f"{name}_change"].mean("prompt") for name in ("logit_difference", "score")
        )
        of_heads = head_rows(
            [of_kind["effect"], of_kind["effect_spread"], *changes],
            ranked_heads(-of_kind["effect"].where(of_kind["effect"] <= -LEAST))[:LISTED],
        )
        heads += [(_word(effects, kind), *row) for row in of_heads]
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
    kinds = {kind: _word(effects, kind) for kind in effects["kind"].values.tolist()}
    names = {**kinds, "kind": "positions become"}
    note_of_heads = (
        "Mean changes when the positions of this head alone are changed, "
        f"{about} ±: standard deviation over prompts."
    )
    # Of less than that, the order of heads is rounding
    left_out = (
        f" {few} of {int(effects['effect'].count())} changes of one head cost less than {LEAST:g} "
        "nats and are not listed."
        if few
        else ""
    )
    sets_table = table_of("effects", title, [*zip(_COLUMNS, means, strict=True)], note, names)
    if not heads:
        return (replace(sets_table, note=note + left_out),)
    return (
        sets_table,
        Table(
            "effects_by_head",
            "Heads whose positions the answer needs most",
            _OF_HEADS,
            tuple(heads),
            note_of_heads + left_out,
        ),
    )


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    yield effect_grid(run)
    yield sets_chart(run)
    yield screening_chart(run)
    effects = group(run, "effects")["effect"]
    for kind in effects["kind"].values.tolist():
        name = f"change of log p(answer), mean over its tokens, positions {_word(effects, kind)}"
        yield Heads(effects.sel(kind=kind, drop=True).assign_attrs(long_name=name, units="nat"))


STANDARD_ERRORS = 3.0
"""Least distance of a found effect from 0, in standard errors over prompts. It must also exceed
the effect of every set of other heads.
"""
LEAST = 0.01
"""Least loss of a found effect, in nats."""
TELLING = 1.0
"""Largest loss, in nats, that a finding reports as excluded. A larger bound is not informative."""


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Find the layer and the head with the positions that the answer needs most.

    The finding reports the kind of change with the largest loss.
    """
    measured = group(run, "effects")
    if measured.sizes["prompt"] < 2:
        return
    # The worst set; 0 if a model has too few heads to draw another set.
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
        scheme, learned = layer_scheme(measured, where["layer"]), learned_layers(measured)
        token_index = "" if where["layer"] in learned else f" ({scheme}, which learns none)"
        name = f"layer {where['layer']}"
        if "head" in where:
            name = f"L{where['layer']} H{where['head']}"
        # Only informative in a model that learns positions elsewhere.
        name += token_index if learned else ""
        moved = _word(measured, where["kind"], "does")
        sentence = (
            f"Of all {'heads' if 'head' in where else 'layers'}, the answer needs the positions of "
            f"{name} most: {moved} costs {-lost:.2g} nats per token of the answer"
            f"{_next(mean.sel(kind=where['kind']), where)}"
        )
        controls = f"{-control:.2g}" if abs(control) > error / STANDARD_ERRORS else "0"
        evidence = (
            f"log-probability of the answer, {over(measured)}; standard error {error:.1g}; the same "
            "change to "
            f"{counted(int(measured.attrs['set_heads']), 'other head')}, drawn at random, costs "
            f"{controls} nats at worst"
        )
        of_kind = measured.sel(kind=where["kind"])
        less, low, high = map(float, _less_controls(of_kind, measured[variable].sel(where)))
        if np.isfinite(low):
            evidence += (
                f"; prompt by prompt {-less:.2g} nats more than they cost on average (95 %: "
                f"{-high:.2g} to {-low:.2g})"
            )
        yield Finding(sentence, evidence, weight, "effects", where["layer"], where.get("head"))
    # The group `kinds`, which changes all heads at once, says more
    if not is_needed and "kinds" not in run.children:
        yield from _robust(measured)
    yield from _outdone(measured)


def _next(mean: xr.DataArray, first: Mapping[str, Any]) -> str:
    """Name the layer or the head that the answer needs most after `first`, for comparison."""
    others = mean.copy(deep=True)
    others.loc[{axis: first[str(axis)] for axis in mean.dims}] = np.nan
    if not others.notnull().any():
        return ""
    place = _lowest(others)
    name = f"L{place['layer']} H{place['head']}" if "head" in place else f"layer {place['layer']}"
    lost = -float(others.min())
    return f", next {name} ({f'{lost:.2g}' if lost >= LEAST else f'less than {LEAST:g}'})"


def _outdone(measured: xr.Dataset) -> Iterator[Finding]:
    """Report if random other heads lose more than the heads that seemed most needed."""
    controls = measured["control_log_probability_change"]
    # [kind]; argmin raises for a kind without any draw.
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
    size, does = counted(int(measured.attrs["set_heads"]), "head"), _word(measured, kind, "does")
    sentence = (
        f"Other heads matter more than the {size} that seemed most needed: {does} costs "
        f"{-other:.2g} nats per token there, {max(0.0, -needed):.2g} here"
    )
    evidence = (
        f"{over(measured)}; the worst of {measured.sizes['draw']} sets of as many other heads, drawn "
        "at random"
    )
    yield Finding(sentence, evidence, 0.6, "effects")


def _robust(measured: xr.Dataset) -> Iterator[Finding]:
    """Yield the largest loss that cannot be excluded, if no layer's positions matter.

    Above `TELLING` nothing is reported: there are too few prompts.
    """
    mean, errors = _mean_and_error(measured["layer_log_probability_change"])
    if not bool(mean.notnull().any()) or bool(
        (mean < np.minimum(-STANDARD_ERRORS * errors, -LEAST)).any()
    ):
        return
    # `half_interval` reads prompts from the last axis.
    changes = measured["layer_log_probability_change"].transpose("kind", "layer", "prompt")
    lowest = mean - half_interval(changes.values)
    where = _lowest(lowest)
    excluded = max(0.0, -float(lowest.min()))
    if excluded > TELLING:
        return
    sentence = (
        "No change of one layer's positions moves the answer clearly: a loss above "
        f"{excluded:.2g} nats per token is excluded"
    )
    evidence = (
        f"95 % intervals over {measured.sizes['prompt']} prompts, of which that of layer "
        f"{where['layer']}, {_word(measured, where['kind'], 'does')}, reaches furthest: "
        f"{-float(mean.sel(where)):.2g} nats with a standard error of "
        f"{float(errors.sel(where)):.1g}"
    )
    yield Finding(sentence, evidence, 0.3, "effects", int(where["layer"]))


def _word(effects: xr.Dataset | xr.DataArray, kind: str, word: str = "become") -> str:
    """The run's phrase for a kind of change ("become" or "does"); the kind if there is none."""
    return effects["kind"].attrs.get(f"{word}_{kind}", kind)


def _less_controls(effects: xr.Dataset, changes: xr.DataArray) -> tuple[xr.DataArray, ...]:
    """Mean over prompts of `changes` minus the changes of other heads, and its 95 % interval."""
    if "control_log_probability_change" not in effects:
        return (xr.DataArray(np.nan),) * 3
    # Prompts differ far more than changes do, so the interval is over paired differences.
    paired = changes - effects["control_log_probability_change"].mean("draw")
    mean = paired.mean("prompt")
    reach = half_interval(paired.transpose(*mean.dims, "prompt").values)
    return mean, mean - reach, mean + reach


def _mean_and_error(changes: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """Means of `changes` over prompts, and their standard errors."""
    # Among equal effects `_lowest` takes the first by kind, then by layer.
    changes = changes.transpose("kind", "layer", ...)
    return changes.mean("prompt"), changes.std("prompt", ddof=1) / changes.sizes["prompt"] ** 0.5


def _lowest(values: xr.DataArray) -> dict[str, Any]:
    """Labels of the smallest value by axis, ignoring NaN."""
    return {
        str(axis): values[axis].values[int(place)].item()
        for axis, place in values.argmin(...).items()
    }


VIEW = View(
    "effects",
    "What it costs to change positions",
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
