"""What positions read: those made of known parts get the shares they must, as a slow fit by dense least squares does."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from attention_inputs import random_inputs
from drawn import artists

import repo_interp as ri
from repo_interp.errors import InputError
from repo_interp.measures.gates import Gates
from repo_interp.measures.kernels.variance_shares import Predictors, explained
from repo_interp.measures.position_sources import FOLLOWS, REST, SOURCES, PositionSources, _piecewise
from repo_interp.measures.statistics import merge
from repo_interp.plots.views import position_sources as view
from repo_interp.run import make_run, with_schemes
from repo_interp.tasks.prompt import Prompt

PROMPTS, TOKENS, WORDS = 10, 96, 12


def made(seed=0, prompts=PROMPTS):
    """Inputs of one layer whose heads read one thing each, and the spans that say where lines begin.

    Heads: token, index, segment (place in the line), previous token, noise, token + previous, constant, token shifted by
    another number for each prompt.
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
    return replace(inputs, positions=torch.as_tensor(np.stack(heads, 1)), tokens=torch.as_tensor(ids)), spans


def part(inputs, spans, rows):
    """Some prompts, in the order of `rows`, with their own numbers."""
    return (
        replace(
            inputs,
            **{name: getattr(inputs, name)[rows] for name in ("queries", "keys", "positions", "valid", "prompts", "tokens")},
        ),
        {name: mask[rows] for name, mask in spans.items()},
    )


def concluded(*observed, measure=None):
    measure = PositionSources() if measure is None else measure
    return measure.conclude(merge([measure.observe(inputs, spans) for inputs, spans in observed]))


@pytest.fixture(scope="module")
def group():
    return concluded(made()).isel(layer=0)


def shares(group, head):
    return dict(zip(group["source"].values.tolist(), group["share"].sel(head=head).values.tolist(), strict=True))


@pytest.mark.parametrize(("head", "source"), list(enumerate(SOURCES)))
def test_positions_of_one_source_are_its_own(group, head, source):
    if source == "index":  # which the number of a line nearly tells too
        group = concluded((made()[0], {})).isel(layer=0)
    found = shares(group, head)
    assert found.pop(source) > 0.95, found
    assert all(abs(share) < 0.04 for share in found.values())
    assert group["alone"].sel(head=head, source=source) > FOLLOWS and group["r_squared"].sel(head=head) > 0.97
    assert int(group["follows_from_token"].sel(head=head)) == (source == "token")


def test_noise_is_left_and_what_two_sources_make_is_shared(group):
    noise = shares(group, 4)
    assert noise[REST] > 0.95 and group["r_squared"].sel(head=4) < 0.05
    both = shares(group, 5)
    assert (
        abs(both["token"] - 0.5) < 0.1 and abs(both["previous"] - 0.5) < 0.1 and int(group["follows_from_token"].sel(head=5)) == 0
    )
    # noise is overfitted, and that is said: the held-out R squared of token effects, of which there are many, is below none
    assert float(group["alone"].sel(head=4, source="token")) < 0


def test_what_the_index_and_the_number_of_a_line_both_explain_is_divided(group):
    own = group.sel(head=1)
    assert 0.5 < float(own["share"].sel(source="index")) < 0.7 and 0.3 < float(own["share"].sel(source="segment")) < 0.5
    assert float(own["alone"].sel(source="index")) > 0.99 and abs(float(own["unique"].sel(source="segment"))) < 0.01
    assert 0.0 < float(own["unique"].sel(source="index")) < 0.5


def test_shares_sum_to_one_and_without_the_rest_to_r_squared(group):
    known = [0, 1, 2, 3, 4, 5, 7]
    np.testing.assert_allclose(group["share"].sel(head=known).sum("source"), 1)
    np.testing.assert_allclose(
        group["share"].sel(head=known, source=list(SOURCES)).sum("source"), group["r_squared"].sel(head=known)
    )


def test_a_constant_head_has_no_variance_and_a_shift_of_a_prompt_is_none(group):
    assert group["share"].sel(head=6).isnull().all() and int(group["follows_from_token"].sel(head=6)) == -1
    np.testing.assert_allclose(group["share"].sel(head=7), group["share"].sel(head=0), atol=2e-3)
    assert int(group["follows_from_token"].sel(head=7)) == 1


def test_named_spans_are_segments_and_a_segment_is_asked_of_other_prompts():
    inputs, spans = made()
    inside = torch.zeros(PROMPTS, TOKENS, dtype=torch.bool)
    for row, begin in enumerate(np.random.default_rng(3).integers(5, 80, PROMPTS)):
        inside[row, begin : begin + 10] = True
    positions = torch.where(inside, 7.0, 0.0)[:, None].expand(-1, 8, -1).double()
    named = concluded((replace(inputs, positions=positions), {**spans, "needle": inside, "needle.1": inside}))
    assert float(named["share"].isel(layer=0).sel(head=0, source="segment")) > 0.95
    unnamed = concluded((replace(inputs, positions=positions), spans))
    assert float(unnamed["r_squared"].isel(layer=0).sel(head=0)) < 0.2


def test_tokens_that_no_other_prompt_holds_are_not_judged():
    inputs, spans = made()
    ids = inputs.tokens.clone()
    ids[3, 10:30] = torch.arange(1000, 1020)
    odd = inputs.positions.clone()
    odd[3, :, 10:30] = 1e4  # nobody could know
    strange = concluded((replace(inputs, tokens=ids, positions=odd), spans)).isel(layer=0)
    assert float(strange["counted_share"]) == pytest.approx(1 - 21 / (PROMPTS * (TOKENS - 1)))  # these, and the one behind them
    held_out = PositionSources(folds=PROMPTS)
    assert int(concluded((replace(inputs, tokens=ids), spans), measure=held_out)["counted_tokens"]) == PROMPTS * (TOKENS - 1) - 21


def test_layers_without_positions_heads_that_share_them_and_too_few_prompts():
    inputs, spans = made()
    one_row = replace(inputs, positions=inputs.positions[:, :1], layer=1)
    nope = replace(inputs, positions=None, frequencies=None, layer=2, scheme="nope")
    group = concluded((inputs, spans), (one_row, spans), (nope, spans))
    assert group["share"].sel(layer=2).isnull().all() and (group["follows_from_token"].sel(layer=2) == -1).all()
    np.testing.assert_array_equal(group["share"].sel(layer=1), [group["share"].sel(layer=0, head=0)] * 8)
    single = concluded(part(inputs, spans, np.arange(1)))
    assert single["share"].isnull().all() and np.isnan(single["counted_share"]) and int(single["counted_tokens"]) == 0
    twice = part(inputs, spans, np.array([0, 0]))
    same = concluded((replace(twice[0], prompts=torch.arange(2)), twice[1]))
    assert same["share"].isnull().all(), "equal prompts are no held-out ones"


def test_long_prompts_are_thinned_by_their_content():
    measure = PositionSources(tokens=20)
    (inputs, spans) = made()
    statistics = measure.observe(inputs, spans).per_prompt
    assert statistics["value"].sizes["sample"] == 20
    index = statistics["token_index"].values[:, 0]
    assert (np.diff(index, axis=1) > 0).all() and index.min() >= 1 and len(np.unique(index[0])) == 20
    assert float(concluded((inputs, spans), measure=measure)["share"].isel(layer=0).sel(head=0, source="token")) > 0.8


def test_token_ids_are_asked_for():
    inputs, spans = made()
    with pytest.raises(InputError, match="needs the ids of tokens"):
        PositionSources().observe(replace(inputs, tokens=None), spans)


# the arithmetic -------------------------------------------------------------------------------------------------------------------


def slow(values, columns, groups, prompts, folds, counted, shrinkage):
    """R^2 of every subset by dense least squares, and shares as the mean over all orders, one after the other."""
    sets = [subset for size in range(4) for subset in combinations(range(3), size)]
    missed = dict.fromkeys(sets, 0.0)

    def centred(matrix, of):
        return np.stack([row - matrix[of == prompt].mean(0) for row, prompt in zip(matrix, of, strict=True)])

    for fold in np.unique(folds):
        train, test = folds != fold, (folds == fold) & counted
        for subset in sets:
            chosen = np.isin(groups, subset)
            x, y = centred(columns[train][:, chosen], prompts[train]), centred(values[train], prompts[train])
            ridge = np.sqrt(shrinkage) * np.eye(chosen.sum())
            slope = np.linalg.lstsq(np.concatenate([x, ridge]), np.concatenate([y, np.zeros(chosen.sum())]), rcond=None)[0]
            error = centred(values[test], prompts[test]) - centred(columns[test][:, chosen] @ slope, prompts[test])
            missed[subset] += float(error @ error)
    r_squared = {subset: 1 - error / missed[()] for subset, error in missed.items()}
    share = np.zeros(3)
    for order in permutations(range(3)):
        for place, group in enumerate(order):
            share[group] += (r_squared[tuple(sorted(order[: place + 1]))] - r_squared[tuple(sorted(order[:place]))]) / 6
    unique = [r_squared[0, 1, 2] - r_squared[without] for without in ((1, 2), (0, 2), (0, 1))]
    return share, [r_squared[(group,)] for group in range(3)], unique, r_squared[0, 1, 2]


def test_shares_are_those_of_dense_least_squares():
    random = np.random.default_rng(0)
    count = 300
    prompts = np.repeat(np.arange(6), 50)
    words, counts = random.integers(0, 9, count), random.integers(-1, 70, count)
    # the third group nearly repeats the first: collinear, and shared out
    alike = np.where(random.random(count) < 0.8, words, random.integers(0, 9, count))
    dense = _piecewise(counts).toarray()
    columns = np.concatenate([np.eye(9)[words], dense, np.eye(9)[alike]], axis=1)
    groups = np.repeat([0, 1, 2], [9, dense.shape[1], 9])
    values = np.stack([words + 0.1 * counts + random.normal(size=count), random.normal(size=count)])
    counted = random.random(count) < 0.9
    from scipy import sparse

    found = explained(values, Predictors(sparse.csr_array(columns), groups, groups == 1), 3, prompts, prompts % 3, counted, 1.5)
    for row, one in enumerate(values):
        share, alone, unique, r_squared = slow(one, columns, groups, prompts, prompts % 3, counted, 1.5)
        np.testing.assert_allclose(found.share[row], share, atol=1e-5)
        np.testing.assert_allclose(found.alone[row], alone, atol=1e-5)
        np.testing.assert_allclose(found.unique[row], unique, atol=1e-5)
        assert found.r_squared[row] == pytest.approx(r_squared, abs=1e-5)
    assert found.share[0].min() > 0.1 and found.r_squared[1] < 0.05


def test_counts_are_a_line_and_hats_around_their_knots():
    columns = _piecewise(np.array([-1, 0, 1, 2, 5, 20])).toarray()
    np.testing.assert_allclose(columns[:, 0] * 20, [0, 0, 1, 2, 5, 20])
    np.testing.assert_allclose(columns[1:, 1:].sum(1), 1)  # knots 0, 1, 4, 16
    np.testing.assert_allclose(columns[:, 1:].T[2], [0, 0, 0, 1 / 3, 11 / 12, 0])
    np.testing.assert_allclose(columns[:, 1:].T[3], [0, 0, 0, 0, 1 / 12, 1])
    assert not columns[0].any() and _piecewise(np.array([0, -1, 0])).shape == (3, 0)


# models of the zoo ----------------------------------------------------------------------------------------------------------------


def test_the_zoos_mirror_reads_tokens_in_its_first_layer_and_places_in_the_next():
    """What f_phi of layer 0 reads is the token's embedding: the trivial case. Later it reads where in the words a token stands."""
    task = ri.tasks.make_task("reversal")
    group = ri.analyze(ri.zoo("reversal/repo"), task.prompts(12), ("position_sources",), batch_size=12)["position_sources"]
    assert (group["follows_from_token"].sel(layer=0) == 1).all() and (group["alone"].sel(layer=0, source="token") > 0.98).all()
    assert (group["follows_from_token"].sel(layer=[1, 2, 3]) == 0).all()
    assert (group["alone"].sel(layer=[1, 2], source="segment") > FOLLOWS).all()


def test_gates_are_explained_where_gates_count():
    bridge, task = ri.zoo("counting/cope"), ri.tasks.make_task("counting")
    prompts = task.prompts(6)
    run = ri.analyze(bridge, prompts, ("position_sources", "gates"))
    gates = run["gates"]["gate_by_token"]

    class Copied(PositionSources):
        """The same of positions that are the gates."""

        def observe(self, inputs, spans):
            own = gates.sel(layer=inputs.layer, prompt=inputs.prompts.tolist()).values[..., : inputs.valid.shape[1]]
            return super().observe(replace(inputs, gate_features=None, positions=torch.as_tensor(np.nan_to_num(own))), spans)

    copied = ri.analyze(bridge, prompts, (Copied(),))["position_sources"]
    np.testing.assert_allclose(run["position_sources"]["share"], copied["share"], atol=1e-4)
    assert run["position_sources"]["r_squared"].notnull().all() and Gates().name in run.children


# what is drawn --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    inputs, spans = made()
    layers = [
        replace(inputs, layer=0, scheme="rope", positions=torch.arange(TOKENS).double().expand(PROMPTS, 1, -1)),
        replace(inputs, layer=1),
    ]
    layers.append(replace(inputs, layer=2, positions=inputs.positions[:, :1]))
    group = concluded(*((one, spans) for one in layers))
    return make_run({"position_sources": with_schemes(group, ("rope", "repo", "repo"))}, {"layout": "rope,repo,repo"})


def test_bars_are_the_shares_and_marks_stand_over_heads_that_follow(run):
    figure = view.position_source_bars(run)
    group = run["position_sources"].to_dataset()
    heads = [(layer, head) for layer in (1, 2) for head in range(8) if not (layer == 1 and head == 6)]
    for source in (*SOURCES, REST):
        bars = artists(figure, f"source {source}")
        wanted = [float(group["share"].sel(layer=layer, head=head, source=source)) for layer, head in heads]
        np.testing.assert_allclose([bar.get_height() for bar in bars], wanted)
        negative = [bar.get_y() <= 0 for bar, value in zip(bars, wanted, strict=True) if value < 0]
        assert all(negative), "below 0"
    (marks,) = artists(figure, "follows")
    assert len(marks.get_xdata()) == 2 + 8  # heads 0 and 7 of layer 1, all of layer 2


def test_the_table_has_a_row_per_head_and_one_for_heads_that_share(run):
    (table,) = view.VIEW.tables(run)
    assert [row[:2] for row in table.rows] == [*((1, head) for head in range(8) if head != 6), (2, 0)]
    assert [row[-1] for row in table.rows] == ["yes", *["no"] * 5, "yes", "yes"]
    assert "950 tokens (100 % of all" in table.note
    assert view.VIEW.informative(run) and "10 follow from the token alone" in view.VIEW.lead(run)  # pyright: ignore[reportCallIssue]
    assert {name for name, _ in view.VIEW.figures(run)} == {"position_sources", "positions_from_token"}


def test_of_too_few_prompts_the_page_says_so():
    tokens = tuple(np.random.default_rng(0).integers(3, 20, 12).tolist())
    run = ri.analyze(ri.zoo("reversal/repo"), [Prompt(tokens)], ("position_sources",))
    assert "at least two different prompts" in view.VIEW.lead(run)  # pyright: ignore[reportCallIssue]
    assert not list(view.VIEW.figures(run)) and not view.VIEW.informative(run) and view.VIEW.tables(run)[0].rows == ()
    with pytest.raises(InputError, match="at least two different prompts"):
        view.position_source_bars(run)
