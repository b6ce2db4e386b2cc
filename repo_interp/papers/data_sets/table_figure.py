"""A table of scores by data set and checkpoint, a row a data set: a dot a checkpoint with its error, and what is missing said in words.

Draws what `papers.data_sets` measures. Knows nothing about how that is done.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.plots.marks.drawing import legend_below, number
from repo_interp.plots.marks.scores import handles, looks
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style

ERRORS = 2.0
"""Standard errors that a bar shows to either side."""


def data_set_table(data: xr.Dataset) -> PaperFigure:
    """`score [row, checkpoint]`, `standard_error`, `questions` and the texts `needs` along row."""
    scores, errors = (100 * data[name].transpose("row", "checkpoint").values for name in ("score", "standard_error"))
    known = [not str(needs) for needs in data["needs"].values]
    tall = np.array([0.5 * max(scores.shape[1], 1) + 0.5 if there else 1.0 for there in known])
    heights = np.cumsum(tall) - tall / 2
    found = looks(data) if data.sizes["checkpoint"] else {}
    with style():
        figure = paper_figure(PAGE_WIDTH, 0.75 + 0.17 * tall.sum())
        ax = figure.subplots()
        for place, (name, look) in enumerate(found.items()):
            y = heights + 0.5 * (place - (len(found) - 1) / 2)
            there = np.isfinite(scores[:, place])
            spread = ERRORS * np.nan_to_num(errors[:, place])
            ax.hlines(
                y[there],
                (scores[:, place] - spread)[there],
                (scores[:, place] + spread)[there],
                color=look["color"],
                linewidth=0.9,
            )
            ax.plot(
                scores[there, place],
                y[there],
                look["marker"],
                color=look["color"],
                markersize=3,
                markeredgewidth=0,
                gid=f"score {name}",
            )
            for row in np.flatnonzero(there):
                ax.annotate(
                    number(scores[row, place]),
                    (scores[row, place] + spread[row], y[row]),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=5,
                    color="#333333",
                )
        for height, needs in zip(heights, data["needs"].values, strict=True):
            if str(needs):
                along = ax.get_yaxis_transform()
                ax.text(0.02, height, str(needs), va="center", fontsize=6, color="#5A5A5A", transform=along, gid="needs data")
        for edge in np.cumsum(tall)[:-1]:
            ax.axhline(edge, color="#DDDDDD", linewidth=0.5)
        labels = [
            f"{row}, n = {int(count)}" if there else str(row)
            for row, count, there in zip(data["row"].values, data["questions"].values, known, strict=True)
        ]
        ax.set_yticks(heights, labels)
        ax.set_ylim(tall.sum(), 0)
        ax.set_xlim(
            0, 100 if not np.isfinite(scores).any() else max(10.0, 1.15 * float(np.nanmax(scores + np.nan_to_num(errors))))
        )
        ax.set_xlabel("score (%)")
        ax.grid(axis="x")
        legend_below(figure, handles(data) if found else [])
    return figure
