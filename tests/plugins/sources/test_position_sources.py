"""What positions read: those made of known parts get the shares they must, as a slow fit by dense
least squares does.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from attention_inputs import cope_inputs, random_inputs
from families import repositioned
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused
from scipy import sparse

import repo_interp as ri
from repo_interp.inputs import select_prompts
from repo_interp.measures.statistics import merge
from repo_interp.plots.marks.head_map import MISSING
from repo_interp.plugins.sources import explained
from repo_interp.plugins.sources import view as view
from repo_interp.plugins.sources.explained import Samples, _frequent, piecewise
from repo_interp.plugins.sources.held_out import HeldOut
from repo_interp.plugins.sources.names import REST, SOURCES, named_rows, near_threshold
from repo_interp.plugins.sources.position_sources import FOLLOWS, PositionSources
from repo_interp.plugins.sources.position_texts import clearest
from repo_interp.plugins.sources.rows_picture import COLOURS
from repo_interp.positions.learned_assigners import LearnedPositions
from repo_interp.run import make_run, with_schemes

PROMPTS, TOKENS, WORDS = 10, 96, 12


def made(seed=0, prompts=PROMPTS):
    """Inputs of one layer whose heads read one thing each, and the spans that say where lines
    begin.

    Heads: token, index, segment (place in the line), previous token, noise, token + previous,
    constant, token shifted by another number for each prompt.
    """
    random = np.random.default_rng(seed)
    ids = random.integers(3, 3 + WORDS, (prompts, TOKENS))
    starts = random.random((prompts, TOKENS)) < 0.08
    starts[:, 0] = True
    index = np.broadcast_to(np.arange(TOKENS), ids.shape)
    place = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    word = random.normal(size=3 + WORDS) * 5
    before = np.concatenate([np.zeros((prompts, 1), int), ids[:, :-1]], axis=1)
    heads = [
        word[ids],
        0.3 * index,
        4.0 * (place == 0) + np.sqrt(place),
        word[before],
        random.normal(size=ids.shape),
        word[ids] + word[before],
        np.full(ids.shape, 2.5),
        word[ids] + 100 * random.normal(size=(prompts, 1)),
    ]
    inputs = random_inputs(prompts=prompts, heads=len(heads), kv_heads=len(heads), tokens=TOKENS)
    spans = {
        "segments.lines": torch.ones(prompts, TOKENS, dtype=torch.bool),
        "segments.lines.starts": torch.as_tensor(starts),
        "rest": torch.ones(prompts, TOKENS, dtype=torch.bool),
    }
    return replace(
        inputs, positions=torch.as_tensor(np.stack(heads, 1)), tokens=torch.as_tensor(ids)
    ), spans


def part(inputs, spans, rows):
    """Some prompts, in the order of `rows`, with their own numbers."""
    return select_prompts(inputs, rows), {name: mask[rows] for name, mask in spans.items()}


def concluded(*observed, **parameters):
    measure = PositionSources(**parameters)
    return measure.conclude(merge([measure.observe(inputs, spans) for inputs, spans in observed]))


@pytest.fixture(scope="module")
def group():
    return concluded(made()).isel(layer=0)


def shares(group, head):
    return group["share"].sel(head=head).to_series().to_dict()


@pytest.mark.parametrize(
    ("head", "source"), list(enumerate(("token", "slow", "segment", "previous")))
)
def test_positions_of_one_source_are_its_own(group, head, source):
    found = shares(group, head)
    assert found.pop(source) > 0.95, found
    # few samples near the beginning: the slow part may mislead, no more
    assert all(-0.6 < share < 0.05 for share in found.values()), found
    own = group.sel(head=head)
    assert own["alone"].sel(source=source) > FOLLOWS and own["r_squared"] > 0.97
    if source != "slow":  # what follows the index has a shape in place of a share
        assert own["alone_null"].sel(source=source) < 0.05
    assert int(own["follows_from_token"]) == (source == "token")


def test_noise_is_left_and_what_two_sources_make_is_shared(group):
    noise = shares(group, 4)
    assert noise[REST] > 0.9 and group["r_squared"].sel(head=4) < 0.05
    both = shares(group, 5)
    assert max(abs(both[name] - 0.5) for name in ("token", "previous")) < 0.2 and both[REST] < 0.01
    # noise is overfitted, and that is said: the held-out R squared of token effects, of which there
    # are many, is below none
    assert float(group["alone"].sel(head=4, source="token")) < 0


def test_shares_sum_to_one_and_without_the_rest_to_r_squared(group):
    known = group.sel(head=[0, 1, 2, 3, 4, 5, 7])
    assert_allclose(known["share"].sum("source"), 1)
    assert_allclose(known["share"].sel(source=list(SOURCES)).sum("source"), known["r_squared"])


def test_a_constant_head_has_no_variance_and_a_shift_of_a_prompt_is_none(group):
    constant, shifted = group.sel(head=6), group.sel(head=7)
    assert constant["share"].isnull().all() and constant["kind"].item() == "constant"
    assert_array_equal([constant["follows_from_token"], shifted["follows_from_token"]], [-1, 1])
    assert_allclose(shifted["share"], group["share"].sel(head=0), atol=2e-3)


@pytest.mark.parametrize("case", ["frozen", "one word", "one token", "a flat layer"])
def test_a_head_that_does_not_vary_is_lost_alone(case):
    """Case: one frozen head took the measure away from all heads."""
    model, prompts = ri.load("niah/repo"), ri.tasks.make_task("niah").prompts(3)
    plain = analyzed(model, prompts)
    if case == "frozen":
        with ri.interventions.frozen(model, (3, 1)):
            group = analyzed(model, prompts)
        lost = np.arange(16).reshape(4, 4) == 13
    elif case == "a flat layer":
        maps = [part for part in model.modules() if isinstance(part, LearnedPositions)]
        torch.nn.init.zeros_(maps[3].final_map.weight)
        group, lost = analyzed(model, prompts), np.arange(4)[:, None] == 3 * np.ones(4)
    else:
        further = {"one word": [5] * 64, "one token": [5]}[case]
        group, lost = analyzed(model, [*prompts, further]), np.zeros((4, 4), bool)
        alone = analyzed(model, [further])
        # layer 0 reads the word alone, later ones its rounding
        assert alone["share"][:1].isnull().all() and (alone["kind"][0] == "constant").all()
    share = group["share"].values
    assert np.isnan(share[lost]).all() and np.isfinite(share[~lost]).all()
    assert (group["follows_from_token"].values[lost] == -1).all()
    if case in ("frozen", "a flat layer"):
        assert_array_equal(share[~lost], plain["share"].values[~lost])


def analyzed(model, prompts):
    run = ri.analyze(model, prompts, measures=("position_sources",), experiments=())
    assert "stopped" not in run.attrs
    return run["position_sources"]


def test_named_spans_are_segments_and_a_segment_is_asked_of_other_stretches():
    inputs, spans = made()
    inside = torch.zeros(PROMPTS, TOKENS, dtype=torch.bool)
    for row, begin in enumerate(np.random.default_rng(3).integers(5, 80, PROMPTS)):
        inside[row, begin : begin + 10] = True
    positions = torch.where(inside, 7.0, 0.0)[:, None].expand(-1, 8, -1).double()
    inputs = replace(inputs, positions=positions)
    named, unnamed = (
        concluded((inputs, {**spans, **marks})).isel(layer=0)
        for marks in ({"needle": inside, "needle.1": inside}, {})
    )
    assert shares(named, 0)["segment"] > 0.95
    assert str(named["kind"].values[0]) == "places in segments"
    assert float(unnamed["r_squared"].sel(head=0)) < 0.2


def test_tokens_that_no_other_stretch_holds_are_not_judged():
    inputs, spans = made()
    ids = inputs.tokens.clone()
    ids[3, 10:30] = torch.arange(1000, 1020)
    odd = inputs.positions.clone()
    odd[3, :, 10:30] = 1e4  # nobody could know
    strange = concluded((replace(inputs, tokens=ids, positions=odd), spans)).isel(layer=0)
    # these, and the one behind them
    every = PROMPTS * (TOKENS - 1)
    assert int(strange["counted_tokens"]) == every - 21
    assert float(strange["counted_share"]) == pytest.approx(1 - 21 / every)


def test_one_text_is_enough_and_a_copy_of_it_adds_nothing():
    inputs, spans = part(*made(prompts=1), np.array([0, 0]))
    single = part(inputs, spans, np.array([0]))
    both = concluded((replace(inputs, prompts=torch.arange(2)), spans))
    xr.testing.assert_identical(both, concluded(single))
    alone = both["alone"].isel(layer=0)
    assert float(alone.sel(head=0, source="token")) > 0.8
    assert float(alone.sel(head=1, source="slow")) > FOLLOWS
    assert shares(both.isel(layer=0), 4)[REST] > 0.7


def test_layers_without_positions_heads_that_share_them_and_words_that_never_come_again():
    inputs, spans = made()
    one_row = replace(inputs, positions=inputs.positions[:, :1], layer=1)
    nope = replace(inputs, positions=None, frequencies=None, layer=2, scheme="nope", learned=False)
    group = concluded((inputs, spans), (one_row, spans), (nope, spans))
    none = group.sel(layer=2)
    assert none["share"].isnull().all() and (none["follows_from_token"] == -1).all()
    assert (none["kind"] == "").all()
    assert_array_equal(group["share"].sel(layer=1), [group["share"].sel(layer=0, head=0)] * 8)
    once = torch.arange(PROMPTS * TOKENS).reshape(PROMPTS, TOKENS)
    alone = concluded((replace(inputs, tokens=once), spans)).isel(layer=0)
    assert alone["share"].isnull().all() and int(alone["counted_tokens"]) == 0
    assert alone["kind"].sel(head=1).item() == "counts tokens", "which needs no word twice"
    short, marks = part(inputs, spans, np.arange(2))
    first = replace(short, valid=torch.arange(TOKENS).expand(2, -1) < 1)
    assert concluded((first, marks))["share"].isnull().all()


def test_layers_that_go_by_the_index_have_no_kind_and_clarity_is_that_of_the_kind():
    inputs, spans = made()
    unlearned = replace(inputs, layer=1, scheme="rope", learned=False)
    group = concluded((inputs, spans), (unlearned, spans))
    assert (group["kind"].sel(layer=1) == "").all(), "the index is no position that is learned"
    clear = clearest(make_run({"position_sources": group}, {}))
    assert [*clear] == [
        "counts tokens",
        "places words",
        "places by previous word",
        "places in segments",
    ]
    assert clear["counts tokens"].sel(layer=0, head=1) == 1
    words = clear["places words"].sel(layer=0)
    assert words.notnull().values.tolist() == [True, *[False] * 4, True, False, True]
    assert_allclose(words[0], group["alone"].sel(layer=0, head=0, source="token"))


def rows(count, **values):
    """What explains rows of which nothing is known but `values`."""
    sources = len(SOURCES) + 1
    given = {name: np.zeros((count, sources)) for name in ("alone", "share")} | {
        name: np.zeros(count)
        for name in ("shape", "shape_null", "segments_ahead", "segments_ahead_null")
    }
    given |= {"alone_null": np.full((count, sources), 0.1), "constant": np.zeros(count, bool)}
    given["share_null"] = np.full(sources, 0.05)
    for name, (place, value) in values.items():
        given[name][place] = value
    return given


def test_a_name_needs_its_null_its_threshold_and_the_largest_share():
    token, segment = SOURCES.index("token"), SOURCES.index("segment")
    nothing = np.full(1, np.nan)

    def named(resolution=nothing, **values):
        return named_rows(resolution, rows(1, **values))[0]

    at = np.s_[:, token]
    assert named(alone=(at, 0.31)) == "places words" and named(alone=(at, 0.29)) == "other"
    assert named(alone=(at, 0.5), alone_null=(at, 0.6)) == "other"
    assert named(alone=(at, 0.5), shape=(0, 0.6)) == "slow shape"
    assert named(alone=(at, 0.7), shape=(0, 0.6)) == "places words"
    assert named(shape=(0, 0.49)) == "other" and named(shape=(0, np.nan)) == "other"
    inside = np.s_[:, segment]
    assert named(alone=(inside, 0.5)) == "other", "words may explain that"
    assert named(alone=(inside, 0.5), share=(inside, 0.2)) == "places in segments"
    steps = {"alone": (np.s_[:, 0], 0.8), "segments_ahead": (0, 0.18)}
    assert named(**steps) == named(np.array([15.0]), **steps) == "places in segments"
    clocks = named_rows(np.array([1, 4, 5, 32, 33, 128, 129, np.nan]), rows(8)).tolist()
    kinds = ("counts tokens", "fine clock", "middle clock", "slow clock")
    assert clocks == [name for name in kinds for _ in range(2 - (name == "slow clock"))] + ["other"]
    assert named(constant=(0, True)) == "constant"


def test_names_lie_near_a_threshold_by_the_order_or_by_a_share():
    near = rows(4, alone=(np.s_[:, SOURCES.index("token")], [0.28, 0.4, 0.28, 0.0]))
    names = np.array(["other", "places words", "fine clock", "slow clock"], dtype=object)
    found = near_threshold(names, np.array([0.1, np.nan, 0.99, 0.82]), near)
    assert found.tolist() == [True, False, False, True]


def test_long_prompts_are_thinned_by_their_content():
    inputs, spans = made()
    statistics = PositionSources(tokens=20).observe(inputs, spans).per_prompt
    assert statistics["value"].sizes["sample"] == 20
    index = statistics["ids"].values[:, 0, 2]
    assert (np.diff(index, axis=1) > 0).all() and index.min() >= 1
    group = concluded((inputs, spans), tokens=20).isel(layer=0)
    assert shares(group, 0)["token"] > 0.8


def test_token_ids_are_asked_for():
    inputs, spans = made()
    with refused("needs the ids of tokens"):
        PositionSources().observe(replace(inputs, tokens=None), spans)


# the arithmetic
# --------------------------------------------------------------------------------------------------


def test_errors_are_those_of_dense_least_squares():
    random = np.random.default_rng(0)
    count, shrinkage = 300, 1.5
    prompts, words = np.repeat(np.arange(6), 50), random.integers(0, 9, count)
    folds, judged = (prompts + np.arange(count) // 10) % 3, random.random(count) < 0.9
    dense = np.hstack([np.eye(6)[prompts], piecewise(random.integers(-1, 70, count))])
    values = random.normal(size=(count, 2))
    values[:, 0] += words + dense[:, 6]
    held_out = HeldOut(prompts, folds, judged, shrinkage)
    for categories in (np.eye(9)[words], np.zeros((count, 0))):
        columns = np.hstack([dense, categories])
        missed, wanted = np.zeros_like(values), np.zeros((3, 2))
        for fold in range(3):
            own, known = folds == fold, columns[folds != fold]
            ridge = known.T @ known + shrinkage * np.eye(columns.shape[1])
            slope = np.linalg.solve(ridge, known.T @ values[~own])
            missed[own] = values[own] - columns[own] @ slope
        for prompt in range(6):
            own = judged & (prompts == prompt)
            np.add.at(wanted, folds[own], np.square(missed[own] - missed[own].mean(0)))
        found = held_out.errors(values, sparse.csr_array(dense), sparse.csr_array(categories))
        assert_allclose(found, wanted)
    none = HeldOut(prompts, folds, judged & False, shrinkage)
    assert np.isnan(none.squares(values)).all()


def test_counts_are_a_line_and_hats_around_their_knots():
    columns = piecewise(np.array([-1, 0, 1, 2, 5, 20]))
    hats = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 2 / 3, 1 / 3, 0], [0, 0, 11 / 12, 1 / 12], [0, 0, 0, 1]]
    assert_allclose(columns[:, 0] * 2, [0, 0, 1, 2, 5, 20])
    assert_allclose(columns[:, 1:], [[0] * 4, *hats])  # knots 0, 1, 4, 16


def folds(prompts, tokens):
    """Folds of so many texts of so many tokens, as a table."""
    texts = np.repeat(np.arange(prompts), tokens)
    index, none = np.tile(np.arange(tokens), prompts), np.zeros((0, 3, prompts * tokens), int)
    samples = Samples(texts, index, index, index, none, index < 0)
    return samples.folds.reshape(prompts, tokens)


def test_folds_are_prompts_where_these_are_many_and_short_else_stretches_of_them():
    assert (folds(10, 20) == (np.arange(10) % 5)[:, None]).all()
    (single,) = folds(1, 400)
    assert np.bincount(single).tolist() == [80] * 5
    assert (np.diff(np.flatnonzero(np.diff(single))) == 40).all()
    two = folds(2, 400)
    assert (two[0] != two[1]).all(), "no place of the index is held out everywhere"


def test_only_the_most_frequent_previous_tokens_have_an_effect_of_their_own(monkeypatch):
    assert _frequent(np.array([7, 5, 5, 9, 9, 9, 8])).tolist() == [-1, 5, 5, 9, 9, 9, -1]
    monkeypatch.setattr(explained, "MOST", 1)
    assert _frequent(np.array([7, 5, 5, 9, 9, 9, 8])).tolist() == [-1, -1, -1, 9, 9, 9, -1]


def test_gates_are_explained_where_gates_count():
    """Gates of queries that are all alike are a number of the token."""
    inputs, spans = made()
    word = torch.randn(3 + WORDS, 8, dtype=torch.float64)
    gated = cope_inputs(
        prompts=PROMPTS,
        tokens=TOKENS,
        queries=torch.ones(PROMPTS, 4, TOKENS, 8, dtype=torch.float64),
        gate_features=word[inputs.tokens][:, None].expand(-1, 2, -1, -1),
    )
    gate = torch.sigmoid(word.sum(-1) * gated.logit_scale)[inputs.tokens]
    known = replace(inputs, positions=gate[:, None].expand(-1, 8, -1))
    group = concluded((replace(gated, tokens=inputs.tokens), spans))
    expected = concluded((known, spans)).sel(head=range(4))
    assert_allclose(group["share"], expected["share"], atol=1e-4)
    assert (group["kind"] == "places words").all()
    run = make_run({"position_sources": with_schemes(group, ("cope",))}, {"layout": "cope"})
    sentences = [finding.sentence for finding in view.VIEW.findings(run)]
    assert any("of the variance of gates" in sentence for sentence in sentences)


# what is drawn
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    inputs, spans = made()
    index = torch.arange(TOKENS).double().expand(PROMPTS, 1, -1)
    group = concluded(
        (replace(inputs, scheme="rope", learned=False, positions=index), spans),
        (replace(inputs, layer=1), spans),
        (replace(inputs, layer=2, positions=inputs.positions[:, :1]), spans),
    )
    return make_run(
        {"position_sources": with_schemes(group, ("rope", "repo", "repo"))},
        {"layout": "rope,repo,repo"},
    )


def test_the_map_has_the_colour_of_the_leading_source_and_the_table_every_share(run):
    group = run["position_sources"].to_dataset().sel(layer=1)
    _, largest, _ = (heads.data() for heads in view.VIEW.head_maps(run))
    sources = ("token", "slow", "segment", "previous")
    assert largest["colours"][1][:4] == [COLOURS[source] for source in sources]
    assert largest["colours"][1][6] == MISSING, "a constant head has no source"
    assert largest["values"][1][1] == pytest.approx(shares(group, 1)["slow"], rel=1e-4)
    first = view.source_table(run).rows[0]
    assert first[3:9] == tuple(np.round(100 * group["share"].sel(head=0).values))


def test_findings_name_whole_layers_what_they_do_and_how_much(run):
    kinds, tokens, previous, segments = (finding.sentence for finding in view.VIEW.findings(run))
    for part in ("Of 16 heads", "(9 rows of", "positions 1 order two tokens rightly", " 11 depend"):
        assert part in kinds
    assert tokens.startswith("L1 H0, L1 H5, L1 H7, L2: the word explains")
    assert previous.startswith("L1 H3: the previous word explains 100 %")
    assert segments.startswith("L1 H2: ") and " % of the variance" in segments
    evidence = next(view.VIEW.findings(run)).evidence
    assert f"of {PROMPTS} prompts" in evidence and "lies near a limit" in evidence
    older = run["position_sources"].to_dataset().drop_vars("kind")
    assert not list(view.VIEW.findings(make_run({"position_sources": older}, {})))


def test_of_few_texts_findings_say_of_how_many():
    group = concluded(part(*made(), np.arange(2)))
    few = make_run({"position_sources": with_schemes(group, ("repo",))}, {"layout": "repo"})
    assert "(in 2 prompts" in next(view.VIEW.findings(few)).sentence


def test_of_texts_without_a_word_twice_nothing_is_shown():
    run = ri.analyze(repositioned("repo"), [[*range(3, 12)]], ("position_sources",))
    assert not list(view.VIEW.figures(run)) and not view.VIEW.informative(run)
    assert view.VIEW.tables(run)[0].rows == ()
