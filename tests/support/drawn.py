"""What a figure draws, found by the ids (`gid`) that the figures of `repo_interp.plots` give to
their marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from matplotlib.figure import Figure

from repo_interp.plots import view_catalogue as catalogue
from repo_interp.plots.pages import report


def artists(figure: Any, gid: str) -> list[Any]:
    """All artists of a figure, or of axes, with this id."""
    return figure.findobj(lambda artist: artist.get_gid() == gid)


def artist(figure: Any, gid: str) -> Any:
    """The only artist with this id."""
    (found,) = artists(figure, gid)
    return found


def starting(figure: Any, start: str) -> list[Any]:
    """All artists whose id starts so."""
    return figure.findobj(lambda artist: (artist.get_gid() or "").startswith(start))


def texts(figure: Figure) -> list[str]:
    """Every text of a figure, labels of ticks among them."""
    figure.draw_without_rendering()
    return [
        one.get_text()
        for one in figure.findobj(lambda artist: hasattr(artist, "get_text"))
        if one.get_text()
    ]


@contextmanager
def without_pictures() -> Iterator[None]:
    """A context in which pages draw their figures and do not render them: each file and picture is
    an empty SVG.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            report,
            "rendered",
            lambda figure, formats: dict.fromkeys(
                formats, b'<svg xmlns="http://www.w3.org/2000/svg"/>'
            ),
        )
        yield


@contextmanager
def without_figures() -> Iterator[None]:
    """A context in which no figures of runs are drawn or written: they take longer than the
    analysis of a tiny model.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (report, catalogue):
            patch.setattr(module, "figures_of", lambda run, failures=None: iter(()))
        yield
