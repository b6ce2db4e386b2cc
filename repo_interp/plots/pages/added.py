"""Figures that other packages add for what their measures leave in a run: as files, and as a section of the page.

An entry point of the group `repo_interp.plots` is a function of a run that gives (name, figure) pairs; it is called for runs that
have the group of its name, and imported for no other. Knows nothing about which packages there are.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from html import escape

import xarray as xr
from matplotlib.figure import Figure

from repo_interp.entry_points import OWN, VIEWS, added
from repo_interp.plots.pages.sections import Content, PageOptions, Section

Drawer = Callable[[xr.DataTree], Iterator[tuple[str, Figure]]]
"""Figures of a run, by the names of their files."""

PAGE_DPI, PAGE_PIXELS = 200, 132
"""Dots, and pixels of the page, an inch of a figure within the page."""


def added_drawers(groups: Iterable[str]) -> dict[str, Drawer]:
    """What other packages draw for `groups` of a run. Raises InputError where a package cannot be imported."""
    found = {name: added(VIEWS, name) for name in groups if name not in OWN[VIEWS]}
    return {name: drawer for name, drawer in found.items() if drawer is not None}


def added_sections(run: xr.DataTree) -> list[Section]:
    """A section of the page for every group of `run` that another package draws: its figures."""
    return [
        Section(f"added-{name}", name.replace("_", " ").capitalize(), (name,), _section(name, drawer))
        for name, drawer in added_drawers(run.children).items()
    ]


def _section(name: str, drawer: Drawer) -> Callable[[xr.DataTree, PageOptions], Content]:
    def build(run: xr.DataTree, options: PageOptions) -> Content:
        figures = "".join(_embedded(title, figure) for title, figure in drawer(run))
        variables = [array.attrs.get("long_name", label) for label, array in run[name].data_vars.items()]
        return Content(f"A measure of another package: {'; '.join(map(str, variables))}.", html=figures)

    return build


def _embedded(name: str, figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=PAGE_DPI)
    width = round(figure.get_figwidth() * PAGE_PIXELS)
    data = b64encode(buffer.getvalue()).decode()
    return (
        f'<figure><img width="{width}" style="max-width: 100%; height: auto" alt="{escape(name)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(name.replace('_', ' '))}</figcaption></figure>"
    )
