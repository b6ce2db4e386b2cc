"""Figures, tables and page sections of gates and segments: what is drawn is what the run holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import structured_runs
import xarray as xr
from drawn import artist, artists
from numpy.testing import assert_allclose, assert_array_equal

from repo_interp.errors import InputError
from repo_interp.plugins.cope import view as gates
from repo_interp.plugins.segments import view as segments
from repo_interp.run import read_run, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    file = tmp_path_factory.mktemp("run") / "run.nc"
    write_run(structured_runs.run(), file)
    return read_run(file)


def test_the_map_is_that_of_the_run_and_plus_signs_are_separators(run):
    figure = gates.position_attention(run, 1, 0)
    group = run["gates"].to_dataset().sel(prompt=0)
    shown = artist(figure, "map")
    assert_array_equal(
        shown.get_array().filled(np.nan), group["position_attention"].sel(layer=1, head=0)
    )
    marks = artist(figure, "separators")
    places = np.flatnonzero(group["separator"] == 1)
    assert_array_equal(marks.get_xdata(), places)
    assert_array_equal(marks.get_ydata(), places)
    assert figure.axes[0].get_title(loc="left") == "Layer 1, head 0 (CoPE), prompt 0; +: separator"


def test_maps_that_are_not_kept_are_asked_for_by_name(run):
    with pytest.raises(InputError, match="maps=2"):
        gates.position_attention(run, 1, 0, prompt=1)
    with pytest.raises(InputError, match="kept of prompt 0, layer 0"):
        gates.position_attention(run, 0, 0)
    bare = run["gates"].to_dataset().drop_vars("position_attention")
    with pytest.raises(InputError, match="with the measure gates and maps=1"):
        gates.position_attention(xr.DataTree.from_dict({"gates": bare}), 1, 0)


def test_gates_are_bars_and_separators_the_darker_ones(run):
    figure = gates.gate_lines(run, 2, 0, prompt=1)
    group = run["gates"].sel(prompt=1, layer=2, head=0).isel(key=slice(80), query=slice(80))
    separators = group["separator"].values == 1
    dark, pale = artists(figure, "separators"), artists(figure, "others")
    bars = [bar for bar in dark if hasattr(bar, "get_height")]
    for drawn, chosen in ((bars, separators), (pale, ~separators)):
        assert_allclose([bar.get_height() for bar in drawn], group["gate_by_token"][chosen])
    assert bars[0].get_facecolor() != pale[0].get_facecolor()
    assert_allclose(artist(figure, "counted").get_ydata(), group["counted"])
    labels = [label.get_text() for label in figure.axes[1].get_xticklabels(minor=True)]
    assert "↵" in labels and len(labels) <= gates.LABELS


def test_gates_without_texts_or_separators_are_drawn_plainly(run):
    bare = run["gates"].to_dataset()
    bare["separator"] = bare["separator"].clip(max=0)
    for name in ("separator_share", "separator_share_shuffled"):
        bare[name] = bare[name] * np.nan
    figure = gates.gate_lines(xr.DataTree.from_dict({"gates": bare}), 1, 3)
    assert not artists(figure, "separators")[0].get_xdata().size
    assert "separators" not in figure.axes[0].get_title(loc="left")
    assert figure.axes[1].get_xlabel() == "token index"
    assert gates.heads_by_gates(bare)[0][0] in (1, 2)
    with pytest.raises(InputError, match=r"layer 0 \(RoPE\) has no gates"):
        gates.gate_lines(run, 0, 0)


def test_heads_that_count_separators_come_first(run):
    ranked = gates.heads_by_gates(run["gates"].to_dataset())
    assert len(ranked) == 8 and set(ranked[:4]) == {(1, 0), (1, 1), (2, 0), (2, 1)}


def test_a_run_without_text_has_no_scores_to_draw():
    spoken = [
        replace(prompt, token_text=("a", "b") * (len(prompt.tokens) // 2))
        for prompt in structured_runs.prompts((20, 16))
    ]
    run = structured_runs.run(asked=spoken, maps=0)
    with pytest.raises(InputError, match="separators or segments"):
        gates.gate_scores(run)
    with pytest.raises(InputError, match=r"examples\.1"):
        segments.segment_scores(run)
    assert list(segments.VIEW.figures(run)) == []
    assert len(list(gates.VIEW.figures(run))) == gates.HEADS
    for view in (segments.VIEW, gates.VIEW):
        assert not list(view.head_maps(run)) and not any(table.rows for table in view.tables(run))


def test_positions_over_shaded_segments_with_the_largest_jumps(run):
    figure = segments.segment_positions(run, 3, 0, kind="lines")
    labels = run["segments"]["segment"].sel(prompt=0, kind="lines").values
    drawn = artist(figure, "positions").get_ydata()
    assert_allclose(drawn, run["positions"]["position"].sel(prompt=0, layer=3, head=0))
    edges = np.flatnonzero(np.diff(labels)) + 1
    assert_array_equal(artist(figure, "jumps").get_xdata() + 0.5, edges)
    bands = [len(artists(figure, f"segment {label}")) for label in range(labels.max() + 1)]
    assert bands == [1 - label % 2 for label in range(len(bands))]
    assert artist(figure, "segment 2").get_x() == np.argmax(labels == 2) - 0.5
    assert "F1 = 1.00" in figure.axes[0].get_title(loc="left")


def test_the_index_has_no_jumps_and_a_layer_without_positions_says_so(run):
    given, none = (segments.segment_positions(run, layer, 0, kind="lines") for layer in (0, 1))
    assert artist(given, "jumps").get_xdata().size == 0
    assert "no positions" in none.axes[0].get_title(loc="left") and not artists(none, "positions")
    with pytest.raises(InputError, match="prompt 0 has no two blocks"):
        segments.segment_positions(run, 3, 0, kind="blocks")
    with pytest.raises(InputError, match="no kind 'verses'"):
        segments.segment_positions(run, 3, 0, kind="verses")


def test_largest_steps_are_those_of_tokens_in_segments():
    values, labels = np.array([90.0, 0, 1, 5, 5, 4, -90]), np.array([-1, 0, 0, 1, 1, 2, -1])
    assert segments.largest_steps(values, labels).tolist() in ([2, 3], [3, 5])


def test_the_kind_that_most_prompts_have_and_the_heads_that_learn_come_first(run):
    group = run["segments"].to_dataset()
    assert segments.main_kind(group) == "sentences"
    assert segments.heads_by_segments(group, "lines")[0] == (3, 0)
    assert {layer for layer, _ in segments.heads_by_segments(group, "lines")} == {3}
    with_examples = group.copy(deep=True)
    with_examples["segment_count"].loc[{"kind": "examples"}] = 2
    assert segments.main_kind(with_examples) == "examples"


def test_maps_of_heads_carry_their_control(run):
    group = run["gates"].to_dataset()
    share = next(iter(gates.VIEW.head_maps(run))).data()
    for shown, name in (("values", "separator_share"), ("control", "separator_share_shuffled")):
        assert_allclose(np.array(share[shown], float), group[name].mean("prompt"), rtol=1e-5)
