"""One group of a run, and all that is shown of it: `View`, read by `figures/`, the report page and the terminal.

Of several runs, a tree with an axis `run` as `repo_interp.compare` makes it, the variables that a view names are drawn by one rule
(`plots.beside`). A view is data and functions of a run; the page and the terminal decide how to show it. Ours are
listed in `entry_points.OWN`, in the form in which another package gives its own: "module:object", under the name of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any

import xarray as xr
from matplotlib.figure import Figure

from repo_interp.plots.marks.finding import Finding
from repo_interp.plots.marks.head_charts import HeadChart
from repo_interp.plots.marks.heads import HeadMap
from repo_interp.plots.marks.table import Table

Figures = Callable[[xr.DataTree], Iterator[tuple[str, Figure]]]
"""Figures of a run, by the names of their files, drawn one after the other."""


@dataclass(frozen=True)
class PageOptions:
    """The caller's options of a page."""

    prompts: tuple[int, ...] | None = None
    """Prompts whose positions are embedded, in order; None: all, as many as fit."""
    budget: int = 16_000_000
    """Bytes of embedded positions."""


@dataclass(frozen=True)
class Interactive:
    """The part of a section that a reader works with: markup, and the script that brings it to life with data of the run."""

    markup: Traversable
    """A file of HTML, hidden until the script shows it."""
    script: Traversable
    """A file of JavaScript that sets `reportSections[group] = function (section, data, page) {...}`; it may use Plotly."""
    data: Callable[[xr.DataTree, PageOptions], tuple[Any, Sequence[str]]]
    """JSON for the script, None where there is nothing to work with; and sentences for what was left out."""
    parts: tuple[Traversable, ...] = ()
    """Files of JavaScript that run before `script`."""
    leads: bool = False
    """Whether its section comes before the explorer, open."""


def _nothing(run: xr.DataTree) -> Iterator[Any]:
    """What a view gives that has no figures, no tables, no maps or no charts."""
    return iter(())


def one_figure(name: str, draw: Callable[[xr.DataTree], Figure]) -> Figures:
    """The figures of a view that has one, whatever the run holds."""
    return lambda run: iter([(name, draw(run))])


@dataclass(frozen=True)
class Beside:
    """What a view shows of a tree with an axis `run`, in addition to the variables in `View.compared`."""

    figures: Figures = _nothing
    tables: Callable[[xr.DataTree], Iterable[Table]] = _nothing


@dataclass(frozen=True)
class View:
    """All that is shown of the group `group` of a run."""

    group: str
    title: str
    lead: str | Callable[[xr.DataTree], str]
    """A sentence, or a function of the run that gives it: what is shown, and its limits."""
    figures: Figures = _nothing
    tables: Callable[[xr.DataTree], Iterable[Table]] = _nothing
    """The same rows for the page, the terminal and the notebook."""
    findings: Callable[[xr.DataTree], Iterable[Finding]] = _nothing
    """What the group shows, in sentences that passed a threshold or a null."""
    head_maps: Callable[[xr.DataTree], Iterable[HeadMap]] = _nothing
    """Maps of heads for the page: a click opens the head in the explorer, where the run has positions."""
    head_charts: Callable[[xr.DataTree], Iterable[HeadChart]] = _nothing
    """Charts for the page that follow the head, prompt and token chosen in the explorer."""
    live: tuple[str, ...] = ()
    """Patterns of names (`fnmatch`) of figures whose content the page shows as a map or chart; it leaves their pictures out."""
    informative: Callable[[xr.DataTree], bool] = lambda run: True
    """Whether figures and tables are worth reading for this run. The page folds them where not, such as ranges of token indices."""
    describe: Callable[[xr.DataTree], str] = lambda run: ""
    """What a run with this group is about, as the title of its page; "" to leave it to another group or to the title of a section."""
    interactive: Interactive | None = None
    compared: tuple[str, ...] | None = None
    """Variables that have a figure where runs are compared; None: all."""
    not_averaged: tuple[str, ...] = ()
    """Variables without a useful mean over everything: signs cancel, or every run has its own axes."""
    beside: Beside = Beside()
    """What else is shown of several runs."""
