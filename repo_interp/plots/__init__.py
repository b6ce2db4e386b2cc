"""Labelled arrays of a run -> matplotlib figures, plain tables, one page. Knows no torch, no model, no measure and no task."""

from repo_interp.plots.figures import write_figures
from repo_interp.plots.mass import head_grid, heads_ranked, mass_by_span, mass_grid
from repo_interp.plots.patterns import pattern_sensitivity, pattern_shares
from repo_interp.plots.positions import position_grid, position_lines
from repo_interp.plots.ranges import position_ranges
from repo_interp.plots.report import report_page
from repo_interp.plots.style import save_figure, style
from repo_interp.plots.tables import Table, tables

__all__ = [
    "Table",
    "head_grid",
    "heads_ranked",
    "mass_by_span",
    "mass_grid",
    "pattern_sensitivity",
    "pattern_shares",
    "position_grid",
    "position_lines",
    "position_ranges",
    "report_page",
    "save_figure",
    "style",
    "tables",
    "write_figures",
]
