"""`View`: charts, tables and findings of one group of a run, for figures, page and terminal.

For several runs, a tree with an axis `run` from `repo_interp.compare`, one rule draws the variables
that a view names (`plots.compared`). A view consists of data and functions of a run; the page and
the terminal decide how to show it. `entry_points.OWN` lists our views in the same form as another
package declares one: "module:object", under the name of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any

import xarray as xr
from matplotlib.figure import Figure

from repo_interp.plots.marks import Chart, Drawing, Finding, Heads, Table


@dataclass(frozen=True)
class PageOptions:
    """The caller's options of a page."""

    prompts: tuple[int, ...] | None = None
    """Prompts with embedded positions, in order; None: all prompts that fit."""
    budget: int = 16_000_000
    """Bytes of embedded positions."""


@dataclass(frozen=True)
class Interactive:
    """The part of a section that a reader works with.

    It has markup, and the script that brings it to life with data of the run.
    """

    markup: Traversable
    """A file of HTML, hidden until the script shows it."""
    script: Traversable
    """A file of JavaScript that sets `reportSections[group] = function (section, data, page)
    {...}`; it may use Plotly.
    """
    data: Callable[[xr.DataTree, PageOptions], tuple[Any, Sequence[str]]]
    """JSON for the script (None without data), and sentences about parts that were left out.
    """
    parts: tuple[Traversable, ...] = ()
    """Files of JavaScript that run before `script`."""
    follows: bool = False
    """Whether its section comes next after the explorer, open."""


def _nothing(run: xr.DataTree) -> Iterator[Any]:
    """Default of a view that has no charts, no tables or no findings."""
    # One function for all defaults: the catalogue detects defaults by identity.
    return iter(())


@dataclass(frozen=True)
class Beside:
    """The charts and tables of a tree with an axis `run`.

    They are drawn in addition to the variables in `View.compared`.
    """

    charts: Callable[[xr.DataTree], Iterable[Chart]] = _nothing
    tables: Callable[[xr.DataTree], Iterable[Table]] = _nothing


@dataclass(frozen=True)
class View:
    """Charts, tables and findings of the group `group` of a run."""

    group: str
    title: str
    lead: str | Callable[[xr.DataTree], str]
    """A sentence, or a function of the run that gives it: the content of the view, and its limits."""
    charts: Callable[[xr.DataTree], Iterable[Chart]] = _nothing
    """Figures, maps of heads, and charts of the page that follow the head, prompt and token chosen
    in the explorer.

    A view without charts, tables and `given` gets charts and tables from the axes of its group.
    """
    tables: Callable[[xr.DataTree], Iterable[Table]] = _nothing
    """The same rows for the page, the terminal and the notebook."""
    findings: Callable[[xr.DataTree], Iterable[Finding]] = _nothing
    """Findings: sentences that passed a threshold or a null."""
    clause: Callable[[xr.DataTree, Finding], str] = lambda run, finding: ""
    """Addition of this group to the sentence of a finding of another group; "": none."""
    informative: Callable[[xr.DataTree], bool] = lambda run: True
    """Whether figures and tables are worth reading for this run.

    The page folds them where not, such as ranges of token indices.
    """
    describe: Callable[[xr.DataTree], str] = lambda run: ""
    """Title of the page of a run with this group; "" to leave it to another
    group or to the title of a section.
    """
    interactive: Interactive | None = None
    compared: tuple[str, ...] | None = None
    """Variables that have a figure where runs are compared; None: all."""
    not_averaged: tuple[str, ...] = ()
    """Variables without a useful mean over everything: signs cancel, or runs have different axes.
    """
    by_index: tuple[str, ...] = ()
    """Variables that follow from the token index in a layer without learned positions. `compare`
    gives no difference between such a layer and one that learns them, and draws no layer that is
    such in all runs.
    """
    given: Callable[[xr.DataTree], Iterable[tuple[str, Figure]]] = _nothing
    """Names and figures that a plain function of another package gives, drawn one after the other.
    """
    heads: Callable[[xr.DataTree], Any] | None = None
    """Function for a pandas DataFrame with a row per head. It is saved with the run, and shown on
    the explorer's map.
    """
    head_columns: tuple[str, ...] = ()
    """Columns of `heads` that the explorer shows after `layer` and `head`, in order; (): all."""
    beside: Beside = Beside()
    """Further charts and tables of several runs."""

    def figures(self, run: xr.DataTree) -> Iterator[tuple[str, Figure]]:
        """Draw the figures of the charts, one after the other.

        Args:
            run: Tree of a run, a group per measure.

        Returns:
            Pairs of the name of the file and the figure.
        """
        return ((chart.name, chart.figure()) for chart in self.drawings(run))

    def drawings(self, run: xr.DataTree) -> Iterator[Drawing]:
        """Choose the charts that become figures: charts with a name.

        Args:
            run: Tree of a run, a group per measure.

        Returns:
            The charts.
        """
        for chart in self.charts(run):
            if isinstance(chart, Drawing) and chart.name:
                yield chart

    def head_maps(self, run: xr.DataTree) -> list[Heads]:
        """List the maps of heads, on which a click opens a head in the explorer.

        Args:
            run: Tree of a run, a group per measure.

        Returns:
            The charts.
        """
        return [chart for chart in self.charts(run) if isinstance(chart, Heads)]
