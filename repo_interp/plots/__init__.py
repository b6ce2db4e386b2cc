"""Labelled arrays of a run -> matplotlib figures, plain tables, one page. Knows no torch, no model, no measure and no task."""

from repo_interp.plots.catalogue import figures_of as comparison_figures
from repo_interp.plots.catalogue import tables, write_figures
from repo_interp.plots.marks.heads import head_grid
from repo_interp.plots.marks.table import Table
from repo_interp.plots.one_head import attention_pattern, logit_parts
from repo_interp.plots.pages.report import report_page
from repo_interp.plots.style import paper_figure, save_figure, style
from repo_interp.plots.view import View
from repo_interp.plots.views.atlas import atlas_names, atlas_overview
from repo_interp.plots.views.attention_mass import heads_ranked, mass_by_span, mass_grid
from repo_interp.plots.views.component_curves import beyond_training_length, component_curves, logit_by_distance
from repo_interp.plots.views.component_shares import (
    pair_norms,
    pair_of_tokens,
    turn_histogram,
    vaf_by_component,
    vaf_over_training,
)
from repo_interp.plots.views.components import figures_of_components
from repo_interp.plots.views.effects import effect_maps, effects_of_sets, screening_fit
from repo_interp.plots.views.extrapolation import extrapolation_by_length, output_traces
from repo_interp.plots.views.fake_distance import fake_distance_fit
from repo_interp.plots.views.gates import gate_lines, gate_scores, position_attention
from repo_interp.plots.views.patterns import pattern_sensitivity, pattern_shares
from repo_interp.plots.views.perturbation import perturbation_grid
from repo_interp.plots.views.position_sources import position_source_bars
from repo_interp.plots.views.positions import position_grid, position_lines
from repo_interp.plots.views.ranges import position_ranges
from repo_interp.plots.views.rotation import rotating_pairs, rotation_grid
from repo_interp.plots.views.saliency import heads_by_saliency, saliency_heads, saliency_text
from repo_interp.plots.views.segments import segment_grid, segment_positions, segment_scores
from repo_interp.plots.views.task_scores import score_grid, task_perplexity, task_scores
from repo_interp.plots.views.three_axis import fit_correlations, three_axis_fit

__all__ = [
    "Table",
    "View",
    "atlas_names",
    "atlas_overview",
    "attention_pattern",
    "beyond_training_length",
    "comparison_figures",
    "component_curves",
    "effect_maps",
    "effects_of_sets",
    "extrapolation_by_length",
    "fake_distance_fit",
    "figures_of_components",
    "fit_correlations",
    "gate_lines",
    "gate_scores",
    "head_grid",
    "heads_by_saliency",
    "heads_ranked",
    "logit_by_distance",
    "logit_parts",
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
    "position_source_bars",
    "report_page",
    "rotating_pairs",
    "rotation_grid",
    "saliency_heads",
    "saliency_text",
    "save_figure",
    "score_grid",
    "screening_fit",
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
