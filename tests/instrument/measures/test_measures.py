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
from repo_interp.measures.kernels.rank_trend import Index, rank_trend
from repo_interp.measures.kernels.segmentation import variance_between
from repo_interp.measures.patterns import Patterns, chunk_patterns
from repo_interp.measures.positions import Positions, position_range
from repo_interp.measures.statistics import Measure, Statistics, merge

ANALYSIS = np.load(OFFICIAL / "expected_analysis.npz")


# positions
# --------------------------------------------------------------------------------------------------


def measured(measure, inputs, spans=None):
    return measure.conclude(measure.observe(inputs, spans or {}))


@pytest.mark.parametrize("name", ["repo_mha", "repo_scaled", "multihead_continuous"])
def test_ranges_and_chunks_are_the_authors(name):
    for row, layer in enumerate(np.load(OFFICIAL / name / "expected.npz")["repo_layers"]):
        inputs = official_inputs(name, int(layer))
        found, valid = inputs.positions, inputs.valid[:, None]
        assert_allclose(position_range(found, valid), ANALYSIS[f"{name}/range_d"][row], rtol=1e-6)
        for suffix, last_chunk in (("", "drop"), ("_keep_partial", "keep")):
            labels = chunk_patterns(found, valid, last_chunk=last_chunk)
            expected = ANALYSIS[f"{name}/chunk_label{suffix}"][row]
            assert_array_equal(labels[..., : expected.shape[-1]], expected)


def test_heads_that_share_a_key_are_listed_each_and_padding_is_nan():
    inputs = with_holes(random_inputs(heads=4, kv_heads=2))
    position = measured(Positions(), inputs)["position"]
    assert position.dims == ("prompt", "layer", "head", "token")
    assert_allclose(position.sel(layer=0), inputs.head_positions, rtol=1e-6)
    assert np.isnan(position.values[~inputs.valid.numpy()[:, None, None].repeat(4, 2)]).all()


def test_a_layer_without_positions_has_nan():
    inputs = random_inputs(scheme="nope")
    positions, patterns = (measured(measure, inputs) for measure in (Positions(), Patterns()))
    for group, name in (
        (positions, "position"),
        (positions, "position_range"),
        (patterns, "pattern_share"),
        (patterns, "pattern_share_all"),
    ):
        assert group[name].isnull().all(), name
    assert (patterns["chunk_pattern"] == -1).all()


# patterns
# --------------------------------------------------------------------------------------------------


def pattern_of(chunk, **options):
    positions, count = torch.as_tensor(chunk, dtype=torch.float64), len(chunk)
    return int(chunk_patterns(positions, torch.ones(count).bool(), count, **options)[0])


def test_equal_neighbours_are_not_monotone_and_the_edge_of_constant_belongs_to_it():
    assert pattern_of(-np.arange(16.0)) == 1
    assert pattern_of([*range(15), 14]) == 2
    assert pattern_of(np.linspace(0, 0.3, 16)) == 0, "constant is asked first"
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


@pytest.mark.parametrize(("size", "epsilon"), [(16, 0.2), (4, 0.3)])
def test_patterns_equal_the_slow_reading(size, epsilon):
    drift = torch.linspace(0, 0.3, 20, dtype=torch.float64)[:, None]
    positions = (0.1 * torch.randn(20, 64, dtype=torch.float64) + drift).cumsum(-1)
    expected = [slow_patterns(row.tolist(), size, epsilon) for row in positions]
    assert {label for row in expected for label in row} == {0, 1, 2}
    valid = torch.ones(64, dtype=torch.bool)
    assert_array_equal(chunk_patterns(positions, valid, size, epsilon), expected)


def test_shares_count_what_was_labelled_and_all_is_over_learned_layers():
    layers = [official_inputs("repo_mha", layer) for layer in range(6)]
    group = Patterns().conclude(merge([Patterns().observe(inputs, {}) for inputs in layers]))
    for inputs in layers:
        labels = chunk_patterns(inputs.head_positions, inputs.valid[:, None])
        shares = [(labels == code).double().mean((0, 2)) for code in range(3)]
        found = group["pattern_share"].sel(layer=inputs.layer).transpose("pattern", "head")
        assert_allclose(found, torch.stack(shares))
    analysis = json.loads((OFFICIAL / "expected_analysis.json").read_text())["repo_mha"]
    overall = [analysis["positions"]["overall"][str(name)] for name in group["pattern"].values]
    assert_allclose(group["pattern_share_all"], overall)
    assert_allclose(group["sensitivity"].sel(chunk_size=16, epsilon=0.2), overall)
    assert_allclose(group["sensitivity"].sum("pattern"), 1)
    constant = group["sensitivity"].sel(pattern="constant")
    assert (constant.diff("epsilon") >= 0).all() and constant.diff("epsilon").max() > 0


def test_the_trend_is_the_rank_correlation_with_the_index():
    random, valid = np.random.default_rng(0), torch.arange(200) < torch.tensor([[200], [150]])
    index = np.arange(200)
    noise = random.normal(size=(2, 200))
    heads = [index, noise[0] - 0.04 * index, noise[1], np.round(np.sin(index), 1), 0 * index + 2]
    positions = torch.as_tensor(np.tile(np.array(heads, float), (2, 1, 1)))
    positions[1, :, 150:] = torch.nan
    inputs = dataclasses.replace(
        random_inputs(heads=5, kv_heads=5, valid=valid), positions=positions
    )
    group = measured(Patterns(), inputs).isel(layer=0)

    def rank(values):
        return spearmanr(values, range(len(values))).statistic

    for prompt, count in enumerate((200, 150)):
        own = group.sel(prompt=prompt)
        some = [head[:count] for head in heads[:4]]
        slopes = [np.polyfit(index[:count], z, 1)[0] for z in some]
        assert_allclose(own["trend"][:4], [*map(rank, some)])
        assert_allclose(own["trend_slope"][:4], slopes, atol=1e-12)
    chunks = [rank(heads[1][at : at + 16]) for at in (*range(0, 192, 16), *range(0, 144, 16))]
    assert float(group["chunk_trend"].sel(head=1)) == pytest.approx(np.mean(chunks))
    assert group["trend"].sel(head=4).isnull().all() and np.isnan(group["chunk_trend"].sel(head=4))


@pytest.mark.parametrize("offset", [0.0, 40.0], ids=["around 0", "far from 0"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_positions_that_differ_by_rounding_alone_share_their_rank(scale, offset):
    """Those of equal words, as float32 gives them in one batch or another."""
    random = np.random.default_rng(0)
    words = random.integers(0, 9, (6, 50))
    table = scale * (random.normal(size=(6, 9)) + offset)
    exact = np.take_along_axis(table, words, 1)
    rounding = np.finfo(np.float32).eps * np.abs(exact) / 2 * random.choice([-1, 1], exact.shape)
    expected = [spearmanr(row, range(50)).statistic for row in exact]
    for values in (exact, exact + rounding, (exact + rounding).astype(np.float32).astype(float)):
        assert_allclose(rank_trend(torch.as_tensor(values)), expected)
        present = torch.arange(60) < torch.full((6, 1), 50)
        padded = torch.nn.functional.pad(torch.as_tensor(values), (0, 10), value=torch.nan)
        assert_allclose(rank_trend(padded, Index(present)), expected)
    flat = scale * (offset + 1) + rounding
    assert rank_trend(torch.as_tensor(flat)).isnan().all()
    order = torch.arange(50.0).double() + 1e5 * offset  # exact, so that nothing is rounding
    assert_allclose(rank_trend(order, equal=torch.zeros(1)), 1.0)


def test_trends_do_not_depend_on_the_batch():
    """Case: -.0153 or -.0298 by batch size, where equal words of layer 0 differ by 6e-11."""
    model, prompts = ri.load("reversal/repo"), ri.tasks.make_task("reversal").prompts(100)[60:70]
    one, many = (
        ri.analyze(model, prompts, measures=("positions", "patterns"), experiments=(), batch_size=b)
        for b in (1, 10)
    )
    for name in ("trend", "chunk_trend", "order", "order_told"):
        assert_allclose(one["patterns"][name], many["patterns"][name], atol=1e-6, err_msg=name)
    # a position of layer 0 is one number per word: the mean over its places
    tokens = np.array(prompts[4].tokens)
    words, place = np.unique(tokens, return_inverse=True)
    for head in range(4):
        z = one["positions"]["position"][4, 0, head].values[: len(tokens)]
        of_word = np.bincount(place, z) / np.bincount(place)
        expected = spearmanr(of_word[place], range(len(z))).statistic
        assert_allclose(one["patterns"]["trend"][4, 0, head], expected, atol=1e-9)
    assert len(words) < len(tokens)


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
    group = measured(AttentionMass(rows="generated"), inputs, spans)
    assert_allclose(group["mass"].sel(span="needle"), 2 / 20)
    assert_allclose(group["mass_per_token"].sel(span=["needle", "query", "generated"]), 1 / 20)
    assert_allclose(group["table"].sel(span="query"), 100 / 20)


@pytest.mark.parametrize("rows", ["generated", "producing"])
def test_chance_is_what_equal_weights_give_also_within_a_window(rows):
    spans = spans_of(2, 24, needle=[8, 13, 14], rest=list(range(8)), generated=[20, 21])
    random = random_inputs(window=9)
    even = dataclasses.replace(random, queries=0 * random.queries)
    found, expected = (measured(AttentionMass(rows=rows), each, spans) for each in (random, even))
    assert_allclose(found["chance"], expected["mass"].isel(head=0).transpose(*found["chance"].dims))


def slow_mass(inputs, rows, span):
    queries, keys = inputs.rotated_queries, inputs.rotated_keys
    result = np.zeros(queries.shape[:2])
    for p, h in np.ndindex(result.shape):
        kv = h * keys.shape[1] // queries.shape[1]
        for i in rows:
            seen = [j for j in range(i + 1) if inputs.valid[p, j]]
            logits = [float(queries[p, h, i] @ keys[p, kv, j]) * inputs.logit_scale for j in seen]
            weights = np.exp(logits)
            result[p, h] += weights[np.isin(seen, span)].sum() / weights.sum() / len(rows)
    return result


@pytest.mark.parametrize(
    ("kv_heads", "position_rows", "rows"),
    [(4, 4, "generated"), (2, 2, "producing"), (2, 1, "generated"), (2, 4, "producing")],
)
def test_mass_equals_the_slow_reading(kv_heads, position_rows, rows):
    inputs = random_inputs(kv_heads=kv_heads, position_rows=position_rows)
    inputs = dataclasses.replace(inputs, valid=(torch.arange(24) < 22).expand(2, -1))
    spans = spans_of(2, 24, needle=[3, 7, 8], generated=[19, 20, 21])
    group = measured(AttentionMass(rows=rows), inputs, spans)
    expected = slow_mass(inputs, [19, 20, 21] if rows == "generated" else [18, 19, 20], [3, 7, 8])
    assert_allclose(group["mass"].sel(span="needle", layer=0), expected, rtol=1e-10)


def test_a_span_that_a_prompt_has_not_is_nan_there_and_left_out_of_the_mean():
    spans = spans_of(2, 24, needle=[3], generated=[20])
    spans["needle"][1] = False
    group = measured(AttentionMass(), random_inputs(), spans).sel(span="needle")
    assert np.isnan(group["mass"].sel(prompt=1)).all()
    assert_allclose(group["table"], 100 * group["mass"].sel(prompt=0).mean())


def test_rows_that_produced_the_first_token_do_not_exist():
    spans = spans_of(2, 24, generated=[0, 1])
    with refused("first token of a prompt is marked generated"):
        AttentionMass(rows="producing").observe(random_inputs(), spans)


# merging
# --------------------------------------------------------------------------------------------------


def test_the_same_prompt_is_not_counted_twice():
    part = Positions().observe(random_inputs(), {})
    with pytest.raises(ValueError, match="observed twice"):
        merge([part, part])


def summed(values, labels):
    """Sums of one layer along an axis."""
    sums = {"s": (("layer", "span"), [values])}
    return Statistics(sums=xr.Dataset(sums, {"layer": [0], "span": labels}))


def test_sums_add_where_axes_grow():
    parts = [summed([1] * count, range(count)) for count in (2, 4, 3)]
    assert merge(parts).sums["s"].values.tolist() == [[3, 3, 2, 1]]
    assert merge([]).sums.sizes == {}


def test_labels_in_another_order_keep_their_values():
    """Ends that look like a run of places are none where the places between are in another
    order.
    """
    merged = merge([summed([1, 2, 3, 4], [*"acbd"]), summed([10], ["e"])]).sums["s"]
    assert merged.sel(layer=0, span=[*"abcde"]).values.tolist() == [1, 3, 2, 4, 10]


def test_of_tokens_that_are_all_equal_nothing_is_said_where_only_rounding_varies():
    bridge = ri.bridge(repositioned("nope,repo,repo"))
    run = ri.analyze(bridge, [[7] * 20, [5]], ("components", "three_axis", "rotation"))
    of_components = ("components/vaf", "components/vaf_band", "components/vaf_curve")
    for name in (*of_components, "three_axis/r", "three_axis/r_position", "rotation/closed_form_r"):
        assert run[name].isnull().all(), name
    atlas = ri.analyze(bridge, [[7] * 20], (), experiments=[Atlas(twins=1, sequences=1)])["atlas"]
    assert "content" not in atlas or atlas["content"].isnull().all()
    other = ri.analyze(bridge, [[7] * 19 + [8]], ("components",))
    assert np.isfinite(other["components/vaf"]).any(), "one other token varies"


def test_a_row_that_varies_by_rounding_has_no_variance_between_segments():
    row, edges = torch.full((1, 12), 0.7), torch.tensor([[4]])
    row[0, 6:] += 4e-7
    for scale in (1, 1000):
        assert variance_between(scale * row, edges).isnan().all()
    row[0, 6:] += 1e-4
    assert float(variance_between(row, edges)) == pytest.approx(0.5, abs=0.01)  # 3 of 8 against 4


def test_negative_shares_and_straight_lines():
    """Closed forms: the index and its shifts are straight, what alternates is not."""
    inputs = with_holes(random_inputs(2, 4, 4, tokens=20, position_rows=4))
    index = torch.arange(20.0, dtype=torch.float64)
    rows = torch.stack([index, 5 - 2 * index, (-1.0) ** index, torch.full((20,), -1.0)])
    hidden = ~inputs.valid[:, None]
    positions = rows.expand(2, -1, -1).masked_fill(hidden, torch.nan)
    group = measured(Positions(), dataclasses.replace(inputs, positions=positions)).isel(layer=0)
    for prompt, valid in enumerate(inputs.valid):
        below, fit = group["negative_share"][prompt], group["linear_r2"][prompt]
        assert_allclose(below, (rows[:, valid] < 0).double().mean(1))
        assert_allclose(fit[:2], 1.0)
        r = np.corrcoef(rows[2][valid], index[valid])[0, 1]
        assert_allclose(fit[2], r**2, atol=1e-12)
        assert np.isnan(fit[3])


def test_a_measure_that_is_no_dataclass_is_refused_in_one_line():
    class Forgotten(Measure):
        name = "forgotten"

        def observe(self, inputs, spans):
            return Statistics()

        def conclude(self, statistics):
            return xr.Dataset()

    with refused("Forgotten is no dataclass"):
        ri.analyze(repositioned("repo"), [list(range(3, 20))], measures=(Forgotten(),))
