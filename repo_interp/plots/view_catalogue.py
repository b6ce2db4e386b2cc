"""The view of each group of a run, and all figures and tables of views.

Our views come in the order of the page, then those of other packages.

The groups of a comparison, a tree with an axis `run`, are shown by the same views, with all runs in
one figure (`beside`).

All views, ours and other packages', are entry points (`entry_points.VIEWS`) under the name of their
group. Another package provides a `View`, or a function of a run that yields (name, figure) pairs;
such a function becomes a view with defaults in all other fields.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import xarray as xr
from matplotlib.figure import Figure

from repo_interp.entry_points import OWN, VIEWS, called, find, given_by, names
from repo_interp.errors import InputError
from repo_interp.plots.compared import view_of_runs
from repo_interp.plots.lacking import reading
from repo_interp.plots.marks import (
    Chart,
    CustomFigure,
    Drawing,
    Heads,
    Table,
    cells,
    charts_of,
    evenly_spaced,
    has_runs,
    over_prompts,
    ranked_heads,
    unit_label,
    with_run_axis,
)
from repo_interp.plots.style import FORMATS, rendered, write_pictures
from repo_interp.plots.view import View
from repo_interp.run import require_run
from repo_interp.runtime.failures import until_failure
from repo_interp.storage.files import path_of, require_directory

_TEXTS = ("token_text", "next_text", "name", "band", "kind", "prompts_digest")
"""Variables of our groups that hold text."""
MOST_ROWS = 50
"""Heads in the table of a group without a view."""
_HEAD_AXES = ("prompt", "layer", "head")
MOST_MAPS = 8
"""Most labels of an axis (not prompts, layers, heads) with maps; of more, evenly spread ones."""


def view_of_heads(run: xr.DataTree) -> View | None:
    """Find the first view that has a table of heads.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The view, whose `heads` makes the table; None if no view has one.
    """
    views = map(view_of, run.children)
    return next((view for view in views if view is not None and view.heads is not None), None)


def view_of(group: str) -> View | None:
    """Find the view that shows a group.

    Args:
        group: Name of the group of a run.

    Returns:
        The view; None if there is none.

    Raises:
        InputError: The view of another package cannot be imported, or is neither a `View` nor a
            function.
    """
    given = find(VIEWS, group)
    if given is None:
        return None
    if isinstance(given, View):
        silent = given.charts is given.tables is given.given  # it names none
        by_axes = _of_heads(group)
        return replace(given, charts=by_axes.charts, tables=by_axes.tables) if silent else given
    if not callable(given):
        raise InputError(
            f"{called(VIEWS, group)} is of type {type(given).__name__}; wanted a View, or a "
            "function of a run that gives figures"
        )

    def lead(run: xr.DataTree) -> str:
        shown: list[Any] = [
            array.attrs.get("long_name", name) for name, array in run[group].data_vars.items()
        ]
        return f"A measure of another package: {'; '.join(map(str, shown))}.{_left_out(run, group)}"

    def charts(run: xr.DataTree) -> list[Heads]:
        return [replace(one, name="") for one in _head_maps(run, group)]

    # The figures of the function are written as files; maps without a name are drawn on the page
    # only.
    return replace(_of_heads(group), lead=lead, charts=charts, given=cast(Any, given))


def views_of(run: xr.DataTree) -> list[View]:
    """List the views of the groups of a run, in the order of the page.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One view per group with a view. For several runs, one per group.

    Raises:
        InputError: As in `view_of`; not for several runs.
    """
    require_run(run)
    known = names(VIEWS)
    # Our views compute with these variables; text in a damaged run would fail deep inside xarray.
    # Groups of other packages may hold text.
    for group in set(run.children) & set(OWN[VIEWS]):
        _require_numbers(run[group].to_dataset(), group)
    if has_runs(run):
        return [
            view_of_runs(group, view_of)
            # `index` finds the first place: known groups in the order of the page, others as in the
            # run.
            for group in sorted(run.children, key=[*known, *run.children].index)
        ]
    views = (view_of(name) for name in known if name in run.children)
    further = (
        _of_heads(name) for name in run.children if name not in known and _head_maps(run, name)
    )
    return [*(view for view in views if view is not None), *further]


def _require_numbers(group: xr.Dataset, name: str) -> None:
    """Raise InputError if one of our groups has text instead of numbers."""
    numbers = {*map(str, group.data_vars), "layer", "head", "prompt", "token"} - {*_TEXTS}
    for variable, array in group.variables.items():
        if variable in numbers and array.dtype.kind not in "fiub":
            raise InputError(
                f"{name}/{variable} of the run holds text; wanted numbers, as repo-interp "
                "analyze writes them"
            )


def _of_heads(group: str) -> View:
    """Make a view for a group without one: charts by its axes, and a table of heads."""
    return View(
        group,
        group.replace("_", " ").capitalize(),
        lambda run: (
            "Drawn by its axes: the measure has no view of its own." + _left_out(run, group)
        ),
        lambda run: _by_axes(run, group),
        lambda run: _head_table(run, group),
    )


def _by_axes(run: xr.DataTree, group: str) -> Iterator[Chart]:
    """Map values by layer and head; chart other variables by their axes."""
    maps = _head_maps(run, group)
    yield from maps
    for name, array in run[group].data_vars.items():
        # A long axis has a chart of all its labels too.
        is_long = any(array.sizes[axis] > MOST_MAPS for axis in {*array.dims} - {*_HEAD_AXES})
        mapped = name in {one.values.name for one in maps} and not is_long
        if {*array.dims} - {"prompt"} and not mapped:
            yield from charts_of(re.sub(r"\W+", "_", f"{group}_{name}"), *with_run_axis(run, array))


def _head_maps(run: xr.DataTree, group: str) -> list[Heads]:
    """Map all numeric variables by layer and head, one map per label of a further axis.

    Maps are means over prompts; their names are file names.
    """
    maps = []
    for name, array in run[group].data_vars.items():
        further = [axis for axis in array.dims if axis not in _HEAD_AXES]
        if array.dtype.kind not in "fiub" or not {"layer", "head"} <= {*array.dims} & {
            *array.coords
        }:
            continue
        if len(further) > 1:
            continue
        title = str(array.attrs.get("long_name") or str(name).replace("_", " "))
        labels = [
            (place, f"{title}, {axis} {label}", str(label))
            for axis in further
            for place, label in _shown(array, axis)
        ]
        # Without a further axis, `dict.fromkeys` is empty and `isel` changes nothing.
        for place, long_name, label in labels or [(0, title, "")]:
            one = array.isel(dict.fromkeys(further, place), drop=True)
            mean = over_prompts(one.astype(float)).transpose("layer", "head")
            # Labels become parts of file names, so slashes and spaces must go.
            file = re.sub(r"\W+", "_", "_".join(filter(None, (group, str(name), label))))
            values = mean.assign_attrs(array.attrs | mean.attrs | {"long_name": long_name})
            maps.append(Heads(values, prompts=one if "prompt" in one.dims else None, name=file))
    return maps


def _shown(array: xr.DataArray, axis: Hashable) -> list[tuple[int, Any]]:
    """Places and labels of an axis that get maps: all, or the ends and evenly spread ones."""
    places = evenly_spaced(range(array.sizes[axis]), MOST_MAPS)
    return [(place, array[axis].values[place]) for place in places]


def _left_out(run: xr.DataTree, group: str) -> str:
    """Say how many labels of long axes have maps; empty if all have."""
    maps = {one.values.name for one in _head_maps(run, group)}
    axes = dict.fromkeys(
        (axis, array.sizes[axis])
        for name, array in run[group].data_vars.items()
        for axis in array.dims
        if name in maps and axis not in _HEAD_AXES and array.sizes[axis] > MOST_MAPS
    )
    return "".join(
        f" {MOST_MAPS} of {count} labels of the axis {axis}, evenly spread, are shown; run.nc has "
        "all."
        for axis, count in axes
    )


def _head_table(run: xr.DataTree, group: str) -> list[Table]:
    """Tabulate the heads with the largest values of the first map, and their other values."""
    maps = [one.values for one in _head_maps(run, group)]
    if not maps:
        return []
    heads = ranked_heads(maps[0])[:MOST_ROWS]
    rows = tuple(
        (layer, head, *cells(one.sel(layer=layer, head=head) for one in maps))
        for layer, head in heads
    )
    columns = ("layer", "head", *(unit_label(str(one.attrs["long_name"]), one) for one in maps))
    words = group.replace("_", " ").capitalize()
    note = (
        f"{len(rows)} of {maps[0].size:,} heads, in descending order of the first "
        "number; means over prompts."
    )
    note += _left_out(run, group)
    return [Table(group, words, columns, rows, note)]


class DrawnFigures(NamedTuple):
    """One figure: the view that gives it, its chart, and the figure."""

    view: View
    chart: Drawing
    figure: Figure

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.chart.name

    @property
    def measure(self) -> str:
        """The group that is drawn."""
        return self.view.group

    @property
    def caption(self) -> str:
        """The caption, else the title that the figure has, else the name in words."""
        words = _title_of(self.figure) or self.name.replace("_", " ")
        return (
            self.chart.caption
            or getattr(self.figure, "caption", "")
            or words[:1].upper() + words[1:]
        )


def _title_of(figure: Figure) -> str:
    """The title of a figure, or of its only axes, on one line."""
    titled = [ax.get_title(loc="left") or ax.get_title() for ax in figure.axes]
    titles = list(filter(None, titled))
    title = figure.get_suptitle() or (titles[0] if len(titles) == 1 else "")
    return ", ".join(line.strip() for line in title.split("\n"))


def figures_of(run: xr.DataTree, failures: list[str] | None = None) -> Iterator[DrawnFigures]:
    """Draw all figures of one run or several, one after the other.

    Args:
        run: Tree of a run, a group per measure.
        failures: Gets one line per view that fails to draw its figures. None: the error is raised.

    Returns:
        The figures with their names, made on demand.

    Raises:
        InputError: `failures` is None and two figures have the same name, a name is not a plain
            name, or the run lacks a variable.
    """
    taken: set[str] = set()
    for view in views_of(run):
        yield from until_failure(
            partial(_drawn, view, run, taken),
            f"the figures of {view.group!r}{given_by(VIEWS, view.group)}",
            failures,
        )


def _drawn(view: View, run: xr.DataTree, taken: set[str]) -> Iterator[DrawnFigures]:
    with reading(run, view.group):
        for chart in chain(view.drawings(run), _given(view, run)):
            # The name becomes a file: a second one would be overwritten, a path would leave the
            # directory.
            if chart.name in taken or chart.name != Path(chart.name).name:
                raise InputError(
                    f"the view of {view.group!r} draws a figure as {chart.name!r}; wanted a "
                    "plain name that no other figure has"
                )
            taken.add(chart.name)
            yield DrawnFigures(view, chart, chart.figure())


def _given(view: View, run: xr.DataTree) -> Iterator[CustomFigure]:
    """The figures of another package's plain function, as they are given."""
    for drawn in view.given(run):
        pair = isinstance(drawn, tuple) and len(drawn) == 2
        if not pair or not isinstance(drawn[0], str) or not isinstance(drawn[1], Figure):
            raise InputError(
                f"{called(VIEWS, view.group)} draws a {type(drawn).__name__}; wanted pairs "
                "of a name and a figure"
            )
        # The default binds the figure now; `drawn` is another one when the chart is drawn.
        yield CustomFigure(drawn[0], lambda figure=drawn[1]: figure)


def write_figures(
    run: xr.DataTree, directory: str | os.PathLike[str], formats: Sequence[str] = FORMATS[:1]
) -> list[Path]:
    """Write all figures that the groups of a run allow into a directory.

    The same run gives the same bytes.

    Args:
        run: Tree of a run, a group per measure.
        directory: Directory to write to; it is made if it does not exist.
        formats: Any of png, svg and pdf.

    Returns:
        Paths of the files written.

    Raises:
        InputError: As in `figures_of`.
    """
    directory = path_of(directory, "a directory for figures")
    require_directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return [
        file
        for one in figures_of(run)
        for file in write_pictures(rendered(one.figure, formats), directory / one.name)
    ]


def tables(run: xr.DataTree, failures: list[str] | None = None) -> list[Table]:
    """Make the tables that the groups of a run allow, in the order of the page.

    Args:
        run: Tree of a run, a group per measure.
        failures: Gets one line per view that fails to make its tables. None: the error is raised.

    Returns:
        The tables.
    """
    of_views = (
        until_failure(
            partial(_tables, view, run),
            f"the tables of {view.group!r}{given_by(VIEWS, view.group)}",
            failures,
        )
        for view in views_of(run)
    )
    return [table for of_view in of_views for table in of_view]


def _tables(view: View, run: xr.DataTree) -> Iterator[Table]:
    with reading(run, view.group):
        yield from view.tables(run)
