"""The views of our groups; each moves into the file of its group."""

from __future__ import annotations

from collections.abc import Iterator

import xarray as xr
from matplotlib.figure import Figure

from repo_interp.plots.view import View


def _none(run: xr.DataTree) -> Iterator[tuple[str, Figure]]:
    yield from ()


POSITIONS = View("positions", "Positions, head by head", "", _none, compared=("position_range",), not_averaged=("position",))
ATTENTION_MASS = View("attention_mass", "Attention mass by span", "", _none, compared=("mass_per_token", "mass"))
PATTERNS = View("patterns", "Patterns of positions", "", _none, compared=("pattern_share", "sensitivity"))
COMPONENTS = View(
    "components",
    "Rotary components",
    "",
    _none,
    compared=("logit_by_distance", "vaf", "vaf_band", "still_share"),
    not_averaged=(
        *("logit_by_distance", "position_logit_by_distance", "component_by_distance", "turn_share", "turn_upper"),
        *("vaf_printed", "vaf_curve_printed", "distance_pairs", "frequency"),
    ),
)
THREE_AXIS = View(
    "three_axis",
    "Position and semantics: three axes",
    "",
    _none,
    compared=("r", "r_position", "distance_axis"),
    not_averaged=("distance_axis", "query_axis", "key_axis"),
)
FAKE_DISTANCE = View(
    "fake_distance",
    "Position and semantics: fake distance",
    "",
    _none,
    compared=("r", "position_axis"),
    not_averaged=("position_axis", "semantic_axis"),
)
ROTATION = View(
    "rotation",
    "Rotating pairs",
    "",
    _none,
    compared=("query_norm", "key_norm", "closed_form_r"),
    not_averaged=("start_angle", "query_mean_re", "query_mean_im", "key_mean_re", "key_mean_im"),
)
MAPS = View(
    "maps",
    "Logit maps",
    "",
    _none,
    compared=("logit_map", "fake_map"),
    not_averaged=("logit_map", "fake_map", "block_size"),
)
PERTURBATION = View(
    "perturbation", "Tolerance to moved tokens and positions", "", _none, compared=("log_perplexity_rise", "task_score")
)
EXTRAPOLATION = View("extrapolation", "Beyond the training length", "", _none, compared=("kl", "log_perplexity", "task_score"))
OUTPUT_TRACES = View(
    "output_traces",
    "Attention outputs over sliding windows",
    "",
    _none,
    compared=("trace_outside",),
    not_averaged=("pca_reference", "pca_trace", "pca_share"),
)
GATES = View("gates", "Gates", "", _none, compared=("separator_share", "last_segment_mass", "separator_gate"))
SEGMENTS = View("segments", "Positions and segments", "", _none, compared=("variance_between", "boundary_f1"))
SCORES = View("scores", "Scores", "", _none, compared=(), not_averaged=("score", "score_map"))
