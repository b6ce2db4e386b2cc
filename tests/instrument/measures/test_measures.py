"""positions, patterns, attention_mass: closed forms and invariants, a slow reference, the authors'
numbers; exact merging.
"""

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
import xarray as xr
from attention_inputs import OFFICIAL, official_inputs, random_inputs, with_holes
from families import repositioned
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused
from scipy.stats import spearmanr

import repo_interp as ri
from repo_interp.experiments import Atlas
from repo_interp.measures.attention_mass import AttentionMass
from repo_interp.measures.kernels.rank_trend import counts_tokens, trend_null
from repo_interp.measures.kernels.segmentation import variance_between
from repo_interp.measures.patterns import Patterns, chunk_patterns
from repo_interp.measures.positions import Positions, position_range
from repo_interp.measures.statistics import Statistics, merge

ANALYSIS = np.load(OFFICIAL / "expected_analysis.npz")
VALID = torch.ones(64, dtype=torch.bool)


# positions
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["repo_mha", "repo_scaled", "multihead_continuous"])
def test_ranges_are_the_authors(name):
    expected = ANALYSIS[f"{name}/range_d"]
    for row, layer in enumerate(np.load(OFFICIAL / name / "expected.npz")["repo_layers"]):
        inputs = official_inputs(name, int(layer))
        assert_allclose(
            position_range(inputs.positions, inputs.valid[:, None]), expected[row], rtol=1e-6
        )


def test_heads_that_share_a_key_are_listed_each_and_padding_is_nan():
    valid = torch.ones(2, 24, dtype=torch.bool)
    valid[1, 20:] = False
    inputs = random_inputs(heads=4, kv_heads=2, valid=valid)
    group = Positions().conclude(Positions().observe(inputs, {}))
    assert group["position"].dims == ("prompt", "layer", "head", "token")
    assert_array_equal(group["position"].isel(head=0), group["position"].isel(head=1))
    assert np.isnan(group["position"].sel(prompt=1).isel(token=slice(20, None))).all()
    assert_allclose(group["position"].sel(prompt=0, layer=0), inputs.head_positions[0], rtol=1e-6)


def test_a_layer_without_positions_has_nan():
    group = Positions().conclude(Positions().observe(random_inputs(scheme="nope"), {}))
    assert np.isnan(group["position"]).all() and np.isnan(group["position_range"]).all()


# patterns
# --------------------------------------------------------------------------------------------------


def pattern_of(chunk, **options):
    positions = torch.as_tensor(chunk, dtype=torch.float64)
    return int(
        chunk_patterns(positions, torch.ones(len(chunk), dtype=torch.bool), len(chunk), **options)[
            0
        ]
    )


def wandering(rows, tokens=64):
    """Random walks: some hardly move, some drift steadily, some turn."""
    steps = torch.randn(rows, tokens, dtype=torch.float64) * 0.15
    drift = torch.tensor([0.0, 0.5, 0.05]).repeat(rows)[:rows, None]
    return ((steps + drift) * torch.tensor([0.2, 1.0, 1.0]).repeat(rows)[:rows, None]).cumsum(-1)


def test_the_three_patterns():
    wave = np.sin(np.arange(16))
    assert pattern_of(np.full(16, 3.0)) == 0
    assert pattern_of(3 + 0.15 * wave) == 0
    assert pattern_of(np.arange(16.0)) == pattern_of(-np.arange(16.0)) == 1
    assert pattern_of(5 * wave) == 2
    assert pattern_of(np.r_[np.arange(15.0), 14.0]) == 2, (
        "equal neighbours are not strictly increasing"
    )


def test_constant_is_asked_first_and_its_edge_belongs_to_it():
    assert pattern_of(np.linspace(0, 0.3, 16)) == 0
    assert pattern_of([-0.25, 0.25] * 8, epsilon=0.25) == 0
    assert pattern_of([-0.25, 0.25] * 8, epsilon=0.2499) == 2


def slow_patterns(row, size, epsilon):
    labels = []
    for start in range(0, len(row) - size + 1, size):
        chunk = row[start : start + size]
        if max(abs(z - sum(chunk) / size) for z in chunk) <= epsilon:
            labels.append(0)
        elif all(b > a for a, b in pairwise(chunk)) or all(b < a for a, b in pairwise(chunk)):
            labels.append(1)
        else:
            labels.append(2)
    return labels


@pytest.mark.parametrize(("size", "epsilon"), [(16, 0.2), (8, 0.1), (4, 0.3)])
def test_patterns_equal_the_slow_reading(size, epsilon):
    positions = wandering(20)
    expected = [slow_patterns(row.tolist(), size, epsilon) for row in positions]
    assert {label for row in expected for label in row} == {0, 1, 2}
    assert_array_equal(chunk_patterns(positions, VALID, size, epsilon), expected)


@pytest.mark.parametrize("name", ["repo_mha", "repo_scaled", "multihead_continuous"])
def test_chunks_are_the_authors(name):
    for row, layer in enumerate(np.load(OFFICIAL / name / "expected.npz")["repo_layers"]):
        inputs = official_inputs(name, int(layer))
        for suffix, last_chunk in (("", "drop"), ("_keep_partial", "keep")):
            labels = chunk_patterns(inputs.positions, inputs.valid[:, None], last_chunk=last_chunk)
            expected = ANALYSIS[f"{name}/chunk_label{suffix}"][row]
            assert_array_equal(labels[..., : expected.shape[-1]], expected)


def test_shares_count_what_was_labelled_and_all_is_over_learned_layers():
    parts, labels = [], {}
    for layer in range(6):
        inputs = official_inputs("repo_mha", layer)
        parts.append(Patterns().observe(inputs, {}))
        labels[layer] = chunk_patterns(inputs.head_positions, inputs.valid[:, None]).numpy()
    group = Patterns().conclude(merge(parts))
    for layer, found in labels.items():
        for head in range(4):
            for code, pattern in enumerate(("constant", "mono", "hybrid")):
                share = (found[:, head] == code).mean()
                assert_allclose(
                    group["pattern_share"].sel(layer=layer, head=head, pattern=pattern), share
                )
    overall = json.loads((OFFICIAL / "expected_analysis.json").read_text())["repo_mha"][
        "positions"
    ]["overall"]
    for pattern in ("constant", "mono", "hybrid"):
        assert_allclose(group["pattern_share_all"].sel(pattern=pattern), overall[pattern])
        assert_allclose(
            group["sensitivity"].sel(chunk_size=16, epsilon=0.2, pattern=pattern), overall[pattern]
        )
    assert_allclose(group["sensitivity"].sum("pattern"), 1)
    constant = group["sensitivity"].sel(pattern="constant")
    assert (constant.diff("epsilon") >= 0).all() and constant.diff("epsilon").max() > 0


def test_layers_without_positions_have_no_chunk_and_no_share():
    group = Patterns().conclude(Patterns().observe(random_inputs(scheme="nope"), {}))
    assert (group["chunk_pattern"] == -1).all()
    assert np.isnan(group["pattern_share"]).all() and np.isnan(group["pattern_share_all"]).all()


def test_the_trend_is_the_rank_correlation_with_the_index_and_its_null_that_of_permutations():
    random, valid = np.random.default_rng(0), torch.arange(200) < torch.tensor([[200], [150]])
    index = np.arange(200)
    heads = [
        index,
        -0.04 * index + random.normal(size=200),
        random.normal(size=200),
        np.round(np.sin(index), 1),
        np.full(200, 2.0),
    ]
    positions = torch.as_tensor(np.broadcast_to(np.array(heads, float), (2, 5, 200)).copy())
    positions[1, :, 150:] = torch.nan
    inputs = dataclasses.replace(
        random_inputs(heads=5, kv_heads=5, valid=valid), positions=positions
    )
    measure = Patterns()
    group = measure.conclude(measure.observe(inputs, {})).isel(layer=0)
    for prompt, count in enumerate((200, 150)):
        for head in range(4):
            z = heads[head][:count]
            own = group.sel(prompt=prompt, head=head)
            assert float(own["trend"]) == pytest.approx(spearmanr(z, index[:count]).statistic)
            assert float(own["trend_slope"]) == pytest.approx(
                np.polyfit(index[:count], z, 1)[0], abs=1e-12
            )
        drawn = [
            abs(spearmanr(random.permutation(heads[3][:count]), index[:count]).statistic)
            for _ in range(300)
        ]
        assert float(group["trend_null"].sel(prompt=prompt)) == pytest.approx(
            np.quantile(drawn, 0.95), rel=0.2
        ), "ties change little"
    chunks = [
        spearmanr(heads[1][at : at + 16], range(16)).statistic
        for at in (*range(0, 192, 16), *range(0, 144, 16))
    ]
    assert float(group["chunk_trend"].sel(head=1)) == pytest.approx(np.mean(chunks))
    assert group["trend"].sel(head=4).isnull().all() and np.isnan(group["chunk_trend"].sel(head=4))
    assert group["counts_tokens"].values.tolist() == [1, 1, 0, 0, -1]


def test_a_head_counts_where_every_prompt_is_beyond_both_limits():
    trend = np.array([[0.9, -0.9, 0.9, np.nan], [0.81, -0.85, 0.7, 0.9]])
    assert counts_tokens(trend, np.array([0.1, 0.2])).tolist() == [True, True, False, False]
    assert not counts_tokens(trend, np.array([0.1, 0.95])).any()
    assert (
        trend_null(2) == 1
        and np.isnan(trend_null(1))
        and trend_null(1000) == trend_null(1000) < 0.08
    )


# attention mass
# --------------------------------------------------------------------------------------------------


def spans_of(prompts, tokens, **named):
    masks = {}
    for name, places in named.items():
        masks[name] = torch.zeros(prompts, tokens, dtype=torch.bool)
        masks[name][:, places] = True
    return masks


def test_uniform_attention_gives_each_span_its_share_of_the_past():
    inputs = dataclasses.replace(
        random_inputs(), queries=torch.zeros(2, 4, 24, 8, dtype=torch.float64)
    )
    spans = spans_of(2, 24, needle=[3, 4], query=[10], generated=[19])
    own = AttentionMass(rows="generated")
    group = own.conclude(own.observe(inputs, spans))
    assert_allclose(group["mass"].sel(span="needle"), 2 / 20)
    assert_allclose(group["mass_per_token"].sel(span=["needle", "query", "generated"]), 1 / 20)
    assert_allclose(group["table"].sel(span="query"), 100 / 20)
    produced = AttentionMass().conclude(AttentionMass().observe(inputs, spans))
    assert_allclose(produced["mass"].sel(span="needle"), 2 / 19)
    assert_allclose(produced["mass"].sel(span="generated"), 0)


@pytest.mark.parametrize("rows", ["generated", "producing"])
def test_chance_is_what_equal_weights_give_also_within_a_window(rows):
    measure = AttentionMass(rows=rows)
    spans = spans_of(2, 24, needle=[8, 13, 14], rest=list(range(8)), generated=[20, 21])
    random = measure.conclude(measure.observe(random_inputs(window=9), spans))
    even = dataclasses.replace(
        random_inputs(window=9), queries=torch.zeros(2, 4, 24, 8, dtype=torch.float64)
    )
    masses = measure.conclude(measure.observe(even, spans))["mass"]
    assert_allclose(
        random["chance"].transpose("prompt", "layer", "span"),
        masses.isel(head=0).transpose("prompt", "layer", "span"),
    )


def slow_mass(inputs, rows, span):
    queries, keys = inputs.rotated_queries, inputs.rotated_keys
    result = np.zeros(queries.shape[:2])
    for p in range(queries.shape[0]):
        for h in range(queries.shape[1]):
            kv = h * keys.shape[1] // queries.shape[1]
            for i in rows:
                seen = [j for j in range(i + 1) if inputs.valid[p, j]]
                weights = np.exp(
                    [float(queries[p, h, i] @ keys[p, kv, j]) * inputs.logit_scale for j in seen]
                )
                result[p, h] += (
                    sum(w for w, j in zip(weights, seen, strict=True) if j in span)
                    / weights.sum()
                    / len(rows)
                )
    return result


@pytest.mark.parametrize(("kv_heads", "position_rows"), [(4, 4), (2, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("rows", ["generated", "producing"])
def test_mass_equals_the_slow_reading(kv_heads, position_rows, rows):
    inputs = random_inputs(kv_heads=kv_heads, position_rows=position_rows)
    inputs = dataclasses.replace(
        inputs, valid=inputs.valid.index_fill(1, torch.tensor([22, 23]), False)
    )
    spans = spans_of(2, 24, needle=[3, 7, 8], generated=[19, 20, 21])
    group = AttentionMass(rows=rows).conclude(AttentionMass(rows=rows).observe(inputs, spans))
    expected = slow_mass(inputs, [19, 20, 21] if rows == "generated" else [18, 19, 20], {3, 7, 8})
    assert_allclose(group["mass"].sel(span="needle", layer=0), expected, rtol=1e-10)


def test_a_span_that_a_prompt_has_not_is_nan_there_and_left_out_of_the_mean():
    spans = spans_of(2, 24, needle=[3], generated=[20])
    spans["needle"][1] = False
    group = AttentionMass().conclude(AttentionMass().observe(random_inputs(), spans))
    assert np.isnan(group["mass"].sel(span="needle", prompt=1)).all()
    assert_allclose(
        group["table"].sel(span="needle"), 100 * group["mass"].sel(span="needle", prompt=0).mean()
    )


def test_rows_that_produced_the_first_token_do_not_exist():

    spans = spans_of(2, 24, generated=[0, 1])
    with refused("first token of a prompt is marked generated"):
        AttentionMass(rows="producing").observe(random_inputs(), spans)


def test_mass_asks_for_no_map(monkeypatch):
    inputs = random_inputs(prompts=1, tokens=512)
    asked = []
    original = type(inputs).logits
    monkeypatch.setattr(
        type(inputs),
        "logits",
        lambda self, rows: (asked.append(len(rows)), original(self, rows))[1],
    )
    AttentionMass().observe(inputs, spans_of(1, 512, generated=[501, 511]))
    assert asked == [2]


# merging
# --------------------------------------------------------------------------------------------------


def test_the_same_prompt_is_not_counted_twice():
    part = Positions().observe(random_inputs(), {})
    with pytest.raises(ValueError, match="observed twice"):
        merge([part, part])


def test_sums_add_where_axes_grow():
    def part(distances):
        return Statistics(
            sums=xr.Dataset(
                {"s": (("layer", "distance"), np.ones((1, distances)))},
                {"layer": [0], "distance": range(distances)},
            )
        )

    assert merge([part(2), part(4), part(3)]).sums["s"].values.tolist() == [[3, 3, 2, 1]]
    assert merge([]).sums.sizes == {}


def test_labels_in_another_order_keep_their_values():
    """Ends that look like a run of places are none where the places between are in another
    order.
    """
    one = Statistics(
        sums=xr.Dataset(
            {"s": (("layer", "span"), [[1.0, 2, 3, 4]])}, {"layer": [0], "span": list("acbd")}
        )
    )
    two = Statistics(
        sums=xr.Dataset({"s": (("layer", "span"), [[10.0]])}, {"layer": [0], "span": ["e"]})
    )
    merged = merge([one, two]).sums["s"].sel(layer=0)
    assert {str(span): float(merged.sel(span=span)) for span in "abcde"} == {
        "a": 1,
        "b": 3,
        "c": 2,
        "d": 4,
        "e": 10,
    }


@pytest.mark.parametrize("scheme", ["nope", "repo"])
def test_of_tokens_that_are_all_equal_nothing_is_said_where_only_rounding_varies(scheme):
    bridge = ri.bridge(repositioned(scheme))
    run = ri.analyze(bridge, [[7] * 20], ("components", "three_axis", "rotation"))
    for group, name in (
        ("components", "vaf"),
        ("components", "vaf_band"),
        ("components", "vaf_curve"),
        ("three_axis", "r"),
    ):
        assert run[group][name].isnull().all(), name
    assert (
        run["three_axis"]["r_position"].isnull().all()
        and run["rotation"]["closed_form_r"].isnull().all()
    )
    alone = ri.analyze(bridge, [[5]], ("components", "three_axis", "rotation"))
    assert alone["components"]["vaf"].isnull().all() and alone["three_axis"]["r"].isnull().all()
    atlas = ri.analyze(bridge, [[7] * 20], (), experiments=[Atlas(twins=1, sequences=1)])["atlas"]
    assert "content" not in atlas or atlas["content"].isnull().all()
    assert np.isfinite(
        ri.analyze(bridge, [[7] * 19 + [8]], ("components",))["components"]["vaf"]
    ).any(), "one other token varies"


def test_a_row_that_varies_by_rounding_has_no_variance_between_segments():
    row, edges = torch.full((1, 12), 0.7), torch.tensor([[4]])
    row[0, 6:] += 4e-7
    assert (
        variance_between(row, edges).isnan().all()
        and variance_between(1000 * row, edges).isnan().all()
    )
    row[0, 6:] += 1e-4
    assert float(variance_between(row, edges)) == pytest.approx(0.5, abs=0.01)  # 3 of 8 against 4


def test_negative_shares_and_straight_lines():
    """Closed forms: the index and its shifts are straight, what alternates is not."""
    inputs = with_holes(random_inputs(2, 4, 4, tokens=20, position_rows=4))
    index = torch.arange(20.0, dtype=torch.float64)
    rows = torch.stack([index, 5 - 2 * index, (-1.0) ** index, torch.full((20,), -1.0)])
    hidden = ~inputs.valid[:, None]
    positions = rows.expand(2, -1, -1).masked_fill(hidden, torch.nan)
    measure = Positions()
    group = measure.conclude(measure.observe(dataclasses.replace(inputs, positions=positions), {}))
    for prompt, valid in enumerate(inputs.valid):
        below, fit = (
            group[name].isel(prompt=prompt, layer=0).values
            for name in ("negative_share", "linear_r2")
        )
        count = int(valid.sum())
        expected = [float((row[valid] < 0).sum()) / count for row in rows]
        assert_allclose(below, expected)
        assert_allclose(fit[:2], 1.0)
        r = np.corrcoef(rows[2][valid], index[valid])[0, 1]
        assert_allclose(fit[2], r**2, atol=1e-12)
        assert np.isnan(fit[3])


def test_a_measure_that_is_no_dataclass_is_refused_in_one_line():
    class Forgotten(Patterns.__mro__[1]):
        name = "forgotten"

        def observe(self, inputs, spans):
            return Statistics()

        def conclude(self, statistics):
            return xr.Dataset()

    with refused("Forgotten is no dataclass"):
        ri.analyze(repositioned("repo"), [list(range(3, 20))], measures=(Forgotten(),))
