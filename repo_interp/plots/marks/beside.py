"""One variable of several runs in one figure, by one rule from its axes.

    mean over prompts first; then, by the axes other than `run`,
      layer, head                    `maps`, and their difference                steps: also `lines` over the training step, one per head
      two block axes                 `maps` of the head in which runs differ most
      names (span, pattern, kind)    `dots`, all layers and heads together       steps: `lines`, one per name; of a name, one per head
      numbers (distance, component)  `lines`, one per run, a panel per layer

This module knows shapes and looks; knows no measure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import xarray as xr

from repo_interp.plots.marks.arrays import over_prompts
from repo_interp.plots.marks.dot_chart import Dots
from repo_interp.plots.marks.line_chart import LINE_COLOURS, Lines
from repo_interp.plots.marks.map_chart import RunMaps
from repo_interp.plots.marks.reading import names_along
from repo_interp.plots.marks.runs import Runs, runs_with_values


def charts_of(
    name: str, array: xr.DataArray, runs: Runs, live: bool = False
) -> Iterator[Lines | Dots | RunMaps]:
    """Choose charts for an array of several runs by the rule of this module.

    Bars are drawn between coordinates `low` and `high`.

    Args:
        name: Start of the charts' names.
        array: Floats [run, ...].
        runs: Names, titles and looks of the runs.
        live: Passed on to the charts.

    Returns:
        The charts; none if no rule fits, or if fewer than two of several runs have a value.
    """
    # Texts and counts have no mean, and one run compares with nothing
    if array.dtype.kind != "f" or len(runs_with_values(array)) < min(2, len(runs.names)):
        return
    prompts, values = array.sizes.get("prompt", 0), over_prompts(array)
    caption = f"{array.attrs.get('long_name', array.name)}{f', mean over {prompts} prompts' if prompts > 1 else ''}"
    heads = [dim for dim in ("layer", "head") if dim in values.dims]
    names = [
        dim
        for dim in values.dims
        # Object, unicode, bytes and numpy's variable-width strings: names, not numbers
        if dim not in ("run", *heads) and values[dim].dtype.kind in "OUST"
    ]
    for dim in [
        dim
        for dim in names
        if runs.steps is None and all(str(label).isdecimal() for label in values[dim].values)
    ]:
        named = (dim, values[dim].values.astype(int), values[dim].attrs)
        values = values.assign_coords({dim: named}).sortby(dim)  # lengths, as test sets are called
        names.remove(dim)
    numbers = [dim for dim in values.dims if dim not in ("run", *heads, *names)]
    for chart in _charts(values, runs, heads, names, numbers):
        yield replace(
            chart,
            name="_".join(filter(None, (name, chart.name))),
            live=live,
            caption=f"{caption[:1].upper()}{caption[1:]}{chart.caption}.",
        )


def _charts(
    values: xr.DataArray,
    runs: Runs,
    heads: list[str],
    names: list[Hashable],
    numbers: list[Hashable],
) -> Iterator[Lines | Dots | RunMaps]:
    """The charts, with the ends of their names and captions."""
    if not names and not numbers and not heads:
        # One number per run: an axis with one name, so that dots can show it
        names, values = ["of"], values.expand_dims(of=[str(values.name)])
    if len(numbers) == 2 and not names and all(str(dim).endswith("_block") for dim in numbers):
        moved = values.transpose("run", *heads, ...)
        # Mean squared difference to the first run [layer, head], where another one begins to differ
        squares = (
            ((moved - moved.isel(run=0)) ** 2)
            .isel(run=slice(1, None))
            .mean(["run", *numbers])
            # If no two runs share a value, argmax over only NaN would raise
            .fillna(-1.0)
        )
        head = {str(dim): int(place) for dim, place in squares.argmax(...).items()} if heads else {}
        named = ", ".join(f"{dim} {int(moved[dim][place])}" for dim, place in head.items())
        caption = f". {named}, the head in which the runs differ most"
        yield RunMaps(moved.isel(head), runs, named, caption=caption)
    elif not names and not numbers and len(heads) == 2:
        size = f"{values.sizes['layer']} layers of {values.sizes['head']} heads"
        yield RunMaps(values, runs, size)
        yield from _over_steps(values, runs, "over_steps")
    elif not names and not numbers and heads == ["layer"]:
        yield Lines(values, runs, "layer")
    elif len(names) == 1 and not numbers:
        (axis,) = names
        yield (Dots(values, runs, axis) if runs.steps is None else Lines(values, runs, "run", axis))
        for label in names_along(values, axis) if len(heads) == 2 else ():
            # Parts of spans ("needle.1.key") would make too many figures
            if "." not in label:
                yield from _over_steps(_named(values, axis, label), runs, f"{label}_over_steps")
    elif numbers and len(names) + len(numbers) <= 3:
        # The longest axis runs along x, shorter ones become panels or figures
        x = max(numbers, key=lambda dim: values.sizes[dim])
        panel, apart = [*(dim for dim in [*numbers, *names] if dim != x), None, None][:2]
        if values.sizes[x] == 1 and panel is None:
            yield Dots(values.assign_coords({x: [f"{values[x].item():g}"]}), runs, x)
        elif apart is None:
            yield Lines(values, runs, x, panel=panel or ("layer" if "layer" in heads else None))
        else:
            for label in values[apart].values:
                named, caption = _named(values, apart, label), f": {apart} {label}"
                if named.notnull().any():
                    yield Lines(named, runs, x, panel=panel, name=str(label), caption=caption)


def _named(values: xr.DataArray, axis: Hashable, label: Any) -> xr.DataArray:
    """`values` at `label` of `axis`, which its name then holds."""
    return values.sel({axis: label}).assign_attrs(
        long_name=f"{values.attrs.get('long_name', values.name)}: {label}"
    )


def _over_steps(values: xr.DataArray, runs: Runs, suffix: str) -> Iterator[Lines]:
    """Chart `values` [run, layer, head] over training steps.

    A line is a head, or their mean if there are more heads than colors.
    """
    if runs.steps is not None:
        few = values.sizes["head"] <= len(LINE_COLOURS)
        named = values.assign_coords(head=[f"head {number}" for number in values["head"].values])
        yield Lines(named, runs, "run", "head" if few else None, "layer", name=suffix)
