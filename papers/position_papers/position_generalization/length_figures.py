"""Divergence of outputs and log perplexity beyond the training length (Position Generalization
table 2): the charts of the view `extrapolation` side by side.
"""

from __future__ import annotations

import xarray as xr

from repo_interp.plots.marks import group, legend_below
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.plugins.lengths.extrapolation_view import charts_by_length


@style()
def extrapolation_by_length(run: xr.DataTree) -> PaperFigure:
    """Draw divergence and log perplexity by length, and divergence by layer (table 2).

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: The run has no extrapolation.
    """
    dataset = group(run, "extrapolation")
    figure = paper_figure(PAGE_WIDTH, 2.2)
    axes = figure.subplots(1, 3)
    titles = (
        "KL of attention outputs",
        f"log perplexity, last {dataset.attrs['judged']} tokens",
        f"KL at {dataset['length'].values[-1]:,} tokens",
    )
    for ax, title, chart in zip(axes, titles, charts_by_length(run), strict=True):
        chart.figure(ax=ax)
        ax.set_title(title)
    legends = [ax.get_legend() for ax in axes]
    entries = legends[0].legend_handles
    for entry, text in zip(entries, legends[0].get_texts(), strict=True):
        entry.set_label(text.get_text())
    for legend in legends:
        legend.remove()  # one below all panels names the same methods
    legend_below(figure, entries)
    return figure
