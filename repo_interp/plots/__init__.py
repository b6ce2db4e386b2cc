"""Labelled arrays of a run -> matplotlib figures, plain tables, one page. Knows no torch, no model, no measure and no task."""

from repo_interp.plots.comparison import comparison_figures
from repo_interp.plots.component_curves import beyond_training_length, component_curves, logit_by_distance
from repo_interp.plots.component_figures import figures_of_components
from repo_interp.plots.component_shares import pair_norms, pair_of_tokens, turn_histogram, vaf_by_component, vaf_over_training
from repo_interp.plots.disentanglement import fake_distance_fit, fit_correlations, three_axis_fit
from repo_interp.plots.extrapolation import extrapolation_by_length, output_traces
from repo_interp.plots.figures import write_figures
from repo_interp.plots.gates import gate_lines, gate_scores, position_attention
from repo_interp.plots.mass import head_grid, heads_ranked, mass_by_span, mass_grid
from repo_interp.plots.patterns import pattern_sensitivity, pattern_shares
from repo_interp.plots.perturbation import perturbation_grid
from repo_interp.plots.positions import position_grid, position_lines
from repo_interp.plots.ranges import position_ranges
from repo_interp.plots.report import report_page
from repo_interp.plots.rotation import rotating_pairs, rotation_grid
from repo_interp.plots.segments import segment_grid, segment_positions, segment_scores
from repo_interp.plots.style import paper_figure, save_figure, style
from repo_interp.plots.tables import Table, tables
from repo_interp.plots.task_scores import score_grid, task_perplexity, task_scores

__all__ = [
    "Table",
    "beyond_training_length",
    "comparison_figures",
    "component_curves",
    "extrapolation_by_length",
    "fake_distance_fit",
    "figures_of_components",
    "fit_correlations",
    "gate_lines",
    "gate_scores",
    "head_grid",
    "heads_ranked",
    "logit_by_distance",
    "mass_by_span",
    "mass_grid",
    "output_traces",
    "pair_norms",
    "pair_of_tokens",
    "paper_figure",
    "pattern_sensitivity",
    "pattern_shares",
    "perturbation_grid",
    "position_attention",
    "position_grid",
    "position_lines",
    "position_ranges",
    "report_page",
    "rotating_pairs",
    "rotation_grid",
    "save_figure",
    "score_grid",
    "segment_grid",
    "segment_positions",
    "segment_scores",
    "style",
    "tables",
    "task_perplexity",
    "task_scores",
    "three_axis_fit",
    "turn_histogram",
    "vaf_by_component",
    "vaf_over_training",
    "write_figures",
]
