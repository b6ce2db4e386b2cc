"""Labelled arrays of a run -> matplotlib figures, plain tables, one page.

Knows no torch, no model, no measure and no task.
"""

from repo_interp.plots.marks.head_map import head_grid as head_grid
from repo_interp.plots.marks.table import Table as Table
from repo_interp.plots.pages.report import report_page as report_page
from repo_interp.plots.style import paper_figure as paper_figure
from repo_interp.plots.style import save_figure as save_figure
from repo_interp.plots.style import style as style
from repo_interp.plots.view import View as View
from repo_interp.plots.view_catalogue import figures_of
from repo_interp.plots.view_catalogue import tables as tables
from repo_interp.plots.view_catalogue import write_figures as write_figures
from repo_interp.plots.views.attention_mass import heads_ranked as heads_ranked
from repo_interp.plots.views.attention_mass import mass_by_span as mass_by_span
from repo_interp.plots.views.components import figures_of_components as figures_of_components
from repo_interp.plots.views.patterns import pattern_sensitivity as pattern_sensitivity
from repo_interp.plots.views.patterns import pattern_shares as pattern_shares
from repo_interp.plots.views.positions import position_grid as position_grid
from repo_interp.plots.views.positions import position_lines as position_lines
from repo_interp.plots.views.ranges import position_ranges as position_ranges
from repo_interp.plugins.causes.effects_view import effect_maps as effect_maps
from repo_interp.plugins.causes.effects_view import effects_of_sets as effects_of_sets
from repo_interp.plugins.causes.saliency_view import heads_by_saliency as heads_by_saliency
from repo_interp.plugins.causes.saliency_view import saliency_text as saliency_text
from repo_interp.plugins.cope.view import gate_lines as gate_lines
from repo_interp.plugins.cope.view import gate_scores as gate_scores
from repo_interp.plugins.cope.view import position_attention as position_attention
from repo_interp.plugins.fake_distance.view import fake_distance_fit as fake_distance_fit
from repo_interp.plugins.heads.view import atlas_names as atlas_names
from repo_interp.plugins.heads.view import atlas_overview as atlas_overview
from repo_interp.plugins.lengths.extrapolation_view import output_traces as output_traces
from repo_interp.plugins.lengths.perturbation_view import perturbation_grid as perturbation_grid
from repo_interp.plugins.rotation.view import rotating_pairs as rotating_pairs
from repo_interp.plugins.rotation.view import rotation_grid as rotation_grid
from repo_interp.plugins.segments.view import segment_positions as segment_positions
from repo_interp.plugins.segments.view import segment_scores as segment_scores
from repo_interp.plugins.sources.view import head_kinds as head_kinds
from repo_interp.plugins.three_axis.one_head_figure import attention_pattern as attention_pattern
from repo_interp.plugins.three_axis.one_head_figure import logit_parts as logit_parts
from repo_interp.plugins.three_axis.view import fit_correlations as fit_correlations
from repo_interp.plugins.three_axis.view import three_axis_fit as three_axis_fit

comparison_figures = figures_of
"""Every figure of a comparison, as of any run."""
