"""Every variable of a run is shown somewhere: a table, figure, sentence or the page depends on it.

A variable counts as shown, too, where comparisons have a figure of it (`View.compared`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import structured_runs
import xarray as xr

import repo_interp as ri
from repo_interp.plots.view import PageOptions, View
from repo_interp.plots.view_catalogue import view_of
from repo_interp.plugins.causes import saliency_view as saliency
from repo_interp.plugins.cope import view as gates
from repo_interp.plugins.segments import view as segments
from repo_interp.tasks import make_task

READ = (
    *("get_text", "get_xydata", "get_offsets", "get_array"),
    *("get_xy", "get_height", "get_segments", "get_path"),
)
NOT_SHOWN = {
    "text of the prompt: shown where there is no text": ("positions.token_id", "saliency.token_id"),
    "depend on the length of a prompt; its order by distance is shown": (
        "patterns.chunk_trend",
        "patterns.trend_slope",
    ),
    "prompts of this test are too few and short for a clock or a shape": (
        "patterns.resolution",
        "patterns.order_told",
        "patterns.order_prompts",
        "patterns.counts_tokens",
        "position_sources.resolution",
        "position_sources.shape",
        "position_sources.segments_ahead",
        "position_sources.alone_null",
    ),
    "bounds and errors beside numbers that are shown; for analyses of one's own": (
        "position_sources.r_squared_error",
        "position_sources.follows_from_token",
        "position_sources.share_null",
        "position_sources.shape_null",
        "position_sources.segments_ahead_null",
        "perturbation.task_score_error",
    ),
    "counts behind means that are shown": (
        "components.distance_pairs",
        "gates.last_segment_queries",
        "perturbation.moved_share",
    ),
    "the formula as the paper prints it, kept for the record": (
        "components.vaf_printed",
        "components.vaf_curve",
        "components.vaf_curve_printed",
    ),
    "of schemes that add to logits; this model's adds nothing": (
        "components.position_logit_by_distance",
    ),
    "behind the shares of turns that are shown": (
        "components.position_reach",
        "components.turn_mean",
        "components.turn_upper",
    ),
    "behind the arrows and circles that are shown": (
        "rotation.query_deviation",
        "rotation.start_angle",
    ),
    "means over a pair's two dimensions are shown": (
        "rotation.query_dimension_norm",
        "rotation.key_dimension_norm",
    ),
    "the table computes them from the changes, also for older runs": (
        "effects.set_less_controls",
        "effects.set_less_controls_change",
        "effects.set_less_controls_low",
        "effects.set_less_controls_high",
    ),
    "of the pass without a change; changes are shown": (
        "effects.clean_log_probability",
        "effects.clean_logit_difference",
        "effects.clean_score",
    ),
    "the same change in another unit; log-probabilities are shown": (
        "effects.control_logit_difference_change",
        "effects.set_logit_difference_change",
        "effects.layer_logit_difference_change",
        "effects.layer_score_change",
    ),
    "which heads make the set that is shown": ("effects.in_set",),
    "further controls; shuffled ones are shown": (
        "gates.gate_sum",
        "gates.last_segment_chance",
        "gates.last_segment_even",
        "gates.separator_share_even",
    ),
    "by prompt; means are shown": ("scores.score",),
    "read by the table of a comparison": ("scores.prompts_digest",),
    "of tasks with two axes": ("scores.score_map",),
}
"""Variables that nothing shows here, by the reason why a run keeps them."""


@pytest.fixture(scope="module")
def groups(measured) -> dict[str, xr.DataTree]:
    """By group a run that has it: of a model of learned positions, of gates, and of scores."""
    structured = structured_runs.run(asked=structured_runs.prompts((40, 32)))
    structured["gates/largest_position"] *= 0.2  # so that sums of few tokens come near it
    scored = ri.score(ri.zoo("reversal/repo"), make_task("reversal"), count=4)
    return dict.fromkeys(("gates", "segments"), structured) | {
        name: measured if name in measured.children else scored
        for name in (*measured.children, "scores")
    }


def altered(array: xr.DataArray) -> xr.DataArray:
    """The array with every value another, still of its type."""
    kind = array.dtype.kind
    if kind in "OUST":
        return array + "x"
    return ~array if kind == "b" else array * 1.5 + 0.25 if kind == "f" else array + 1


def shown(view: View, run: xr.DataTree) -> Iterator[str]:
    """Tables, sentences, the page's data; then by figure where every mark is, and its texts."""
    parts: tuple[Callable[[], list[Any]], ...] = (
        lambda: [(table.formatted(), table.note) for table in view.tables(run)],
        lambda: [(finding.sentence, finding.evidence) for finding in view.findings(run)],
        lambda: [chart.data() for chart in view.charts(run)],
        lambda: [] if view.interactive is None else [view.interactive.data(run, PageOptions())[0]],
    )
    yield from (json.dumps(part(), default=str) for part in parts)
    for chart in view.drawings(run):
        marks = []
        for artist in chart.figure().findobj():
            for read in (getattr(artist, name) for name in READ if hasattr(artist, name)):
                given = read()
                given = getattr(given, "vertices", given)
                marks.append(given if isinstance(given, str) else np.asarray(given).tolist())
        yield json.dumps(marks, default=str)


def changes(view: View, before: list[str], run: xr.DataTree, name: str, altering: list) -> bool:
    """Whether the view shows another thing where variables are others; impossible ones are."""
    changed, dataset = run.copy(), run[name].to_dataset()
    others = {
        variable: altered(dataset[variable]).assign_attrs(dataset[variable].attrs)
        for variable in altering
    }
    changed[name] = dataset.assign(others)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # values that no model has
        try:
            # Up to the first part that differs; figures, which take longest, come last.
            return any(one != other for one, other in zip_longest(before, shown(view, changed)))
        except (ValueError, KeyError, IndexError, TypeError):
            return True


@pytest.mark.parametrize(
    "name",
    [
        *structured_runs.MEASURES,
        *("effects", "saliency", "perturbation", "atlas", "gates", "segments", "scores"),
    ],
)
def test_every_variable_of_a_run_is_shown_or_says_why_not(groups, name, monkeypatch):
    for module in (gates, saliency, segments):
        monkeypatch.setattr(module, "HEADS", 1)  # figures of single heads
    run, view = groups[name], view_of(name)
    assert view is not None
    before = list(shown(view, run))
    known = {one for listed in NOT_SHOWN.values() for one in listed}
    hidden = [one for one in run[name].data_vars if f"{name}.{one}" in known]
    assert {f"{name}.{one}" for one in hidden} == {
        one for one in known if one.startswith(f"{name}.")
    }
    # All at once, as each alone takes every figure.
    assert not hidden or not changes(view, before, run, name, hidden), "one of them is shown"
    for variable in run[name].data_vars:
        if variable not in hidden and variable not in (view.compared or run[name].data_vars):
            assert changes(view, before, run, name, [variable]), variable
