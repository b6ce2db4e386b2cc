"""Labelled arrays of a run -> matplotlib figures, plain tables, one page.

Knows no torch, no model, no measure and no task. Names are imported when they are first asked for;
`__init__.pyi` has their types.
"""

from typing import Any

from lazy_loader import attach

# At once, since its module has the same name
from repo_interp.plots.style import style as style

_find, __dir__, __all__ = attach(
    "repo_interp",
    submod_attrs={
        "plots.marks.head_map": ["head_grid"],
        "plots.marks.table": ["Table"],
        "plots.pages.report": ["report_page"],
        "plots.style": ["paper_figure", "save_figure"],
        "plots.view": ["View"],
        "plots.view_catalogue": ["figures_of", "tables", "write_figures"],
        "plots.views.attention_mass": ["heads_ranked", "mass_by_span"],
        "plots.views.components": ["figures_of_components"],
        "plots.views.patterns": ["pattern_sensitivity", "pattern_shares"],
        "plots.views.positions": ["position_grid", "position_lines"],
        "plots.views.ranges": ["position_ranges"],
        "plugins.causes.effects_view": ["effect_maps", "effects_of_sets"],
        "plugins.causes.saliency_view": ["heads_by_saliency", "saliency_text"],
        "plugins.cope.view": ["gate_lines", "gate_scores", "position_attention"],
        "plugins.fake_distance.view": ["fake_distance_fit"],
        "plugins.heads.view": ["atlas_names", "atlas_overview"],
        "plugins.lengths.extrapolation_view": ["output_traces"],
        "plugins.lengths.perturbation_view": ["perturbation_grid"],
        "plugins.one_head.one_head_figure": ["attention_pattern", "logit_parts"],
        "plugins.rotation.view": ["rotating_pairs", "rotation_grid"],
        "plugins.segments.view": ["segment_positions", "segment_scores"],
        "plugins.sources.view": ["head_kinds"],
        "plugins.three_axis.view": ["fit_correlations", "three_axis_fit"],
    },
)
__all__ = [*__all__, "style"]


def __getattr__(name: str) -> Any:
    # Every figure of a comparison, as of any run
    return _find("figures_of" if name == "comparison_figures" else name)
