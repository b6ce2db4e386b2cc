"""How long the figures and the page of a run take: a sample figure is drawn and saved, and counted as often as they are worth.

Knows how heavy the figures of our measures are; those of other packages count as one sample each.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_SAMPLES = {
    "positions": 5.5,
    "patterns": 1.9,
    "attention_mass": 2.8,
    "components": 2.1,
    "three_axis": 1.6,
    "fake_distance": 0.2,
    "rotation": 2.8,
    "gates": 4.0,
    "segments": 2.0,
    "maps": 3.0,
    "attention_rows": 0.0,
    "predictions": 0.7,
    "effects": 2.6,
    "perturbation": 2.0,
    "extrapolation": 2.5,
    "saliency": 8.0,
    "position_sources": 2.0,
    "atlas": 2.0,
}
"""Sample figures that the figures of a measure or an experiment take as long as, in three formats."""
_PAGE = 0.6
"""Sample figures that the page takes as long as."""


def drawing_seconds(names: Iterable[str]) -> float:
    """Seconds that the figures of the measures and experiments `names` take on this machine, with the page."""
    return _sample_seconds() * (_PAGE + sum(_SAMPLES.get(name, 1.0) for name in names))


@cache
def _sample_seconds() -> float:
    """Seconds of a sample figure, measured once in a process."""
    times = [_draw_sample() for _ in range(3)]
    return min(times[1:])  # the first figure looks for fonts; one of the others may be disturbed


def _draw_sample() -> float:
    """Seconds that the sample figure took."""
    import numpy as np

    from repo_interp.plots.style import PAGE_WIDTH, paper_figure, save_figure, style

    start = time.perf_counter()
    with style(), tempfile.TemporaryDirectory() as directory:
        figure = paper_figure(PAGE_WIDTH, 2.4)
        for number, axes in enumerate(np.ravel(figure.subplots(1, 3))):
            places = np.linspace(0, 6, 200)
            axes.plot(places, np.sin(places + number), label="sample")
            axes.scatter(places, np.cos(places + number), s=4)
            axes.set(xlabel="tokens", ylabel="share", title=f"panel {number}")
            axes.legend()
        save_figure(figure, Path(directory) / "sample")
    return time.perf_counter() - start
