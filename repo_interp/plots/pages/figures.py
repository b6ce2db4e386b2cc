"""Every figure that a run allows, each as PNG, SVG and PDF: what `analyze` leaves in `figures/`.

A registry of figures keyed by the groups they need; a run without the groups is drawn without the figure. A new measure adds
a `Plot`; another package an entry point (`added.py`). Knows which figures there are; knows nothing about how one is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xarray as xr

from repo_interp.errors import InputError
from repo_interp.plots.marks.choice import main_span, telling_heads
from repo_interp.plots.marks.reading import group, has_groups
from repo_interp.plots.pages.added import added_drawers
from repo_interp.plots.style import PaperFigure, save_figure
from repo_interp.plots.views import disentanglement_figures as disentangled
from repo_interp.plots.views.component_figures import figures_of_components, figures_of_rotation
from repo_interp.plots.views.gates import figures_of_gates
from repo_interp.plots.views.mass import heads_ranked, mass_by_span, mass_grid
from repo_interp.plots.views.patterns import pattern_sensitivity, pattern_shares
from repo_interp.plots.views.positions import position_grid, position_lines
from repo_interp.plots.views.ranges import position_ranges
from repo_interp.plots.views.segments import figures_of_segments
from repo_interp.plots.views.task_scores import figures_of_scores

LINES = 3
"""Heads whose positions are drawn on their own."""


@dataclass(frozen=True)
class Plot:
    """A way of drawing a run: the groups it needs, and the figures it gives, by name, drawn one after the other."""

    groups: tuple[str, ...]
    draw: Callable[[xr.DataTree], Iterator[tuple[str, PaperFigure]]]


def write_figures(run: xr.DataTree, directory: str | os.PathLike[str]) -> list[Path]:
    """Write all figures that the groups of `run` allow into `directory`, made where it is not there; return the files.

    The same run gives the same bytes.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for plot in PLOTS:
        if has_groups(run, plot.groups):
            for name, figure in plot.draw(run):
                files += save_figure(figure, directory / name)
    for group_name, draw in added_drawers(run.children).items():
        for name, figure in draw(run):
            if directory / f"{name}.png" in files or directory / name != directory / Path(name).name:
                raise InputError(
                    f"another package draws {group_name!r} as {name!r}; wanted a plain name that no other figure has"
                )
            files += save_figure(figure, directory / name)
    return files


def _positions(run: xr.DataTree) -> Iterator[tuple[str, PaperFigure]]:
    first = int(group(run, "positions")["prompt"].values[0])
    for layer, head in telling_heads(run)[:LINES]:
        yield f"positions_layer{layer}_head{head}", position_lines(run, layer, head, first)
    yield "positions_of_all_heads", position_grid(run, first)
    yield "position_ranges", position_ranges(run)


def _patterns(run: xr.DataTree) -> Iterator[tuple[str, PaperFigure]]:
    yield "pattern_shares", pattern_shares(run)
    yield "pattern_sensitivity", pattern_sensitivity(run)


def _mass(run: xr.DataTree) -> Iterator[tuple[str, PaperFigure]]:
    yield "attention_mass_by_span", mass_by_span(run)
    span = main_span(run)
    if span is not None:
        yield "heads_ranked", heads_ranked(run, span)
        yield "heads_map", mass_grid(run, span)


PLOTS: list[Plot] = [
    Plot(("positions",), _positions),
    Plot(("patterns",), _patterns),
    Plot(("attention_mass",), _mass),
    Plot(("components",), figures_of_components),
    Plot(("rotation",), figures_of_rotation),
    Plot(("three_axis",), disentangled.three_axis),
    Plot(("fake_distance",), disentangled.fake_distance),
    Plot(("rotation",), disentangled.rotation),
    Plot(("perturbation",), disentangled.perturbation),
    Plot(("extrapolation",), disentangled.extrapolation),
    Plot(("output_traces",), disentangled.output_traces),
    Plot(("gates",), figures_of_gates),
    Plot(("segments",), figures_of_segments),
    Plot(("scores",), figures_of_scores),
]
