"""Labeled arrays of a run -> matplotlib figures, plain tables, one page.

This package imports no torch, no model, no measure and no task. Names are imported at their first
use; `__init__.pyi` has their types.
"""

from importlib import import_module
from typing import Any

# At once, since its module has the same name
from repo_interp.plots.style import style as style

_PLACES = {
    "plots.marks.head_map": ("head_grid",),
    "plots.marks.table": ("Table",),
    "plots.pages.report": ("report_page",),
    "plots.style": ("paper_figure", "save_figure"),
    "plots.view": ("View",),
    "plots.view_catalogue": ("figures_of", "tables", "write_figures"),
    "plots.views.attention_mass": ("heads_ranked", "mass_by_span"),
    "plots.views.components": ("figures_of_components",),
    "plots.views.patterns": ("pattern_sensitivity", "pattern_shares"),
    "plots.views.position_figures": ("position_grid", "position_lines"),
    "plots.views.ranges": ("position_ranges",),
    "plugins.causes.effects_view": ("effect_maps", "effects_of_sets"),
    "plugins.causes.saliency_view": ("heads_by_saliency", "saliency_text"),
    "plugins.cope.view": ("gate_lines", "gate_scores", "position_attention"),
    "plugins.edits.edit_figure": ("edit_costs",),
    "plugins.edits.pair_figure": ("pair_effects",),
    "plugins.fake_distance.view": ("fake_distance_fit",),
    "plugins.head_tables.overview": ("atlas_overview",),
    "plugins.heads.view": ("atlas_names",),
    "plugins.lengths.extrapolation_view": ("output_traces",),
    "plugins.lengths.perturbation_view": ("perturbation_grid",),
    "plugins.one_head.one_head_figure": ("attention_pattern", "logit_parts"),
    "plugins.reuse.reuse_figure": ("reuse_by_head",),
    "plugins.paths.direct_logits_figure": ("direct_logits",),
    "plugins.probe.view": ("position_probe",),
    "plugins.rotation.view": ("rotating_pairs", "rotation_grid"),
    "plugins.segments.view": ("segment_positions", "segment_scores"),
    "plugins.sources.view": ("head_kinds",),
    "plugins.three_axis.fit_figure": ("three_axis_fit",),
    "plugins.three_axis.view": ("fit_correlations",),
    "plugins.writers.logit_figure": ("logit_writers",),
    "plugins.writers.writers_figure": ("position_writers",),
}
"""Names by module, from the top of the package."""
_MODULES = {name: module for module, names in _PLACES.items() for name in names}
__all__ = ["style", *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "comparison_figures":
        name = "figures_of"  # every figure of a comparison, as of any run
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"repo_interp.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    # Only functions: a reader looks for figures
    return sorted(name for name in __all__ if name[0].islower())
