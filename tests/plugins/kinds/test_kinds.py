"""What kinds of heads are for: losses against whole passes by hand, kinds as the measure names
them, intervals in closed form.
"""

from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from families import tiny
from numpy.testing import assert_allclose
from refusals import refused
from scipy.stats import t as student

import repo_interp as ri
from repo_interp import interventions as iv
from repo_interp.analysis.defaults import default_experiments
from repo_interp.experiments import Kinds
from repo_interp.experiments.experiment_catalogue import planned
from repo_interp.models.decoder import as_decoder
from repo_interp.models.side_by_side import SideBySide
from repo_interp.plots.marks import number
from repo_interp.plugins.causes.effects import drawn_sets
from repo_interp.plugins.kinds import kinds
from repo_interp.plugins.kinds.kinds import (
    BLOCK,
    CASES,
    EVERY,
    blocks_of,
    intervals,
    rows_by_kind,
    token_classes,
)
from repo_interp.plugins.kinds.view import VIEW, kind_table, losses_by_kind
from repo_interp.plugins.sources.names import GROUP_OF, GROUPS, NAMES
from repo_interp.tasks import Prompt, make_task

WORDS = ("one two three \n four 5 six \n " * 13).split(" ")[:100]
KNOWN = {word: 3 + place for place, word in enumerate(dict.fromkeys(WORDS))}
TEXT = Prompt(tokens=tuple(KNOWN[word] for word in WORDS), token_text=tuple(WORDS))
OTHER = Prompt(
    tokens=tuple(torch.randint(3, 20, (41,), generator=torch.Generator().manual_seed(3)).tolist())
)
PROMPTS = [
    TEXT,
    OTHER,
    Prompt(tokens=TEXT.tokens[5:50], token_text=tuple(WORDS[5:50]), generated=(43, 44)),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return ri.reposition(tiny("llama"), "repo@1").eval()


@pytest.fixture(scope="module")
def run(model):
    return ri.analyze(model, PROMPTS, ["position_sources"], experiments=["kinds"])


@torch.no_grad()
def losses(model, prompt, context):
    """-log p of every token but the first by a whole pass."""
    tokens = torch.tensor([prompt.tokens])
    with context:
        log_p = model(tokens).logits[0, :-1].double().log_softmax(-1)
    return -log_p.gather(-1, tokens[0, 1:, None])[:, 0].numpy()


def test_losses_and_controls_are_those_of_whole_passes(model, run):
    group, rows = run["kinds"], rows_by_kind(as_decoder(model), PROMPTS)
    blocks = np.concatenate(blocks_of([len(prompt.tokens) for prompt in PROMPTS]))
    every = [head for _, heads in rows for head in heads]
    assert every == [(layer, head) for layer in (1, 2) for head in range(4)]

    def by_hand(change, *arguments):
        return np.concatenate([losses(model, prompt, change(*arguments)) for prompt in PROMPTS])

    def assert_found(heads, change=iv.frozen, **place):
        changed = by_hand(change, model, heads) - plain
        expected = [changed[blocks == block].mean() for block in np.unique(blocks)]
        assert_allclose(group["block_change"].sel(place), expected, atol=2e-5)

    plain = by_hand(torch.no_grad)
    assert_allclose(group["loss"], plain.mean(), atol=1e-5)
    for case, change in zip(CASES, (iv.frozen, iv.straightened, iv.linearised), strict=True):
        assert_found(every, change, kind=case, draw=0)
    kinds = [kind for kind in group["kind"].values if kind not in CASES]
    assert kinds
    for kind in kinds:
        own = [heads for known, heads in rows if known == kind]
        others = [heads for known, heads in rows if known != kind]
        drawn = drawn_sets(others, len(own), 3, 0)
        for draw, chosen in enumerate([own, *drawn]):
            assert_found([head for heads in chosen for head in heads], kind=kind, draw=draw)
        assert group["block_change"].sel(kind=kind)[1 + len(drawn) :].isnull().all()
    assert group["block_change"].sel(kind=EVERY)[1:].isnull().all()


def test_kinds_are_those_of_the_measure_and_rows_are_shared_positions(model, run):
    named = run["position_sources"]["kind"]
    for kind, heads in rows_by_kind(as_decoder(model), PROMPTS):
        assert len(heads) == 2
        of_heads = {str(named.sel(layer=layer, head=head).values) for layer, head in heads}
        assert {GROUP_OF[name] for name in of_heads} == {kind}


def test_every_name_has_one_group():
    names = [name for group in GROUPS.values() for name in group]
    assert len(names) == len(set(names)) and {*NAMES} < {*names}


def test_the_size_of_batches_and_a_store_change_nothing(model, run, tmp_path):
    for size, store in ((3, None), (1, tmp_path / "store")):
        again = ri.analyze(model, PROMPTS, (), experiments=["kinds"], batch_size=size, store=store)
        xr.testing.assert_identical(again["kinds"].to_dataset(), run["kinds"].to_dataset())


def interval(values, block):
    array = xr.DataArray([[values]], {"block": ("sample", block)}, ("kind", "draw", "sample"))
    return intervals(array)[0, 0]


def test_an_interval_over_unequal_blocks_weighs_tokens_and_leaves_empty_ones_out():
    found = interval([1.0, 3.0, 2.0, np.nan, 6.0], [0, 0, 1, 2, 3])
    error = np.sqrt(3 / 2 * ((4 - 2 * 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2)) / 4
    reach = student.ppf(0.975, 2) * error
    assert_allclose(found, [3, 3 - reach, 3 + reach])


def test_where_all_blocks_are_equal_there_is_no_interval():
    assert_allclose(interval(np.zeros(20), np.arange(20)), [0, np.nan, np.nan])


def test_blocks_are_stretches_of_few_prompts_and_each_of_many():
    (one,) = blocks_of([100])
    assert len(one) == 99 and np.bincount(one).min() >= BLOCK and {*one} == {0, 1, 2}
    assert (np.diff(one) >= 0).all()
    first, second = blocks_of([3, 70])
    assert first.tolist() == [0, 0] and {*second} == {1, 2}
    assert [{*each} for each in blocks_of([9, 200, *[40] * 8])] == [{n} for n in range(10)]


def test_every_token_has_the_first_class_that_fits():
    assert token_classes(PROMPTS[2])[43:] == ["generated"] * 2
    line, other, number, copy = "first of lines", "others", "numbers", "copies"
    expected = [line, other, other, other, line, number, other, other, line, copy, copy, copy]
    assert token_classes(TEXT)[:12] == expected
    assert {*token_classes(OTHER)} <= {"copies", "others"}


def test_classes_and_their_counts_sum_to_all(run):
    group = run["kinds"]
    counts, mean = group["tokens"], group["loss_change"].sel(of="change", bound="mean")
    assert counts[0] == counts[1:].sum() == sum(len(prompt.tokens) - 1 for prompt in PROMPTS)
    weighed = (mean * counts).isel(token_class=slice(1, None)).sum("token_class") / counts[0]
    assert_allclose(weighed, mean.isel(token_class=0), atol=1e-12)


def test_it_plans_what_it_can_need_and_refuses_models_without_learned_positions(model):
    (plan,) = planned(as_decoder(model), PROMPTS, [Kinds()])
    assert sum(plan.passes) == 186 * (2 + np.ceil(27 * 2 / 3))
    assert [each.name for each in default_experiments(as_decoder(model), [TEXT], None)] == ["kinds"]
    with refused(r"no layer of this model \(rope\) learns any"):
        planned(as_decoder(ri.reposition(tiny("llama"), "rope")), PROMPTS, [Kinds()])
    with refused("nothing to predict"):
        planned(as_decoder(model), [Prompt(tokens=(3,))], [Kinds()])


def edited(run, kind, on_copies=10, **losses):
    """The run with other (mean, low, high) of one kind, by `of`; so many times that on copies."""
    group = run["kinds"].to_dataset().copy(deep=True)
    for of, values in losses.items():
        group["loss_change"].loc[{"kind": kind, "of": of}] = np.array(values)
        group["loss_change"].loc[{"kind": kind, "of": of, "token_class": "copies"}] *= on_copies
    return xr.DataTree.from_dict({"/": run.to_dataset(), "/kinds": group})


def sentences(run, about):
    return [one.sentence for one in VIEW.findings(run) if about in one.sentence]


def test_a_finding_needs_a_clear_difference_and_names_the_tokens_that_lose_most(run):
    kind = next(kind for kind in run["kinds"]["kind"].values if kind not in (*CASES, EVERY))
    own, others = (0.4, 0.39, 0.41), (0.05, 0.04, 0.06)
    about = f"{int(run['kinds']['heads'].sel(kind=kind))} heads whose positions"
    clear = edited(run, kind, change=own, controls=others, difference=(0.35, 0.34, 0.36))
    (sentence,) = sentences(clear, about)
    assert (
        "changes the loss by 0.400 nats (95 %: 0.390" in sentence
        and "other heads 0.0500" in sentence
    )
    assert "on copies 3.5" in sentence
    less = edited(run, kind, 0, change=others, controls=own, difference=(-0.35, -0.36, -0.34))
    assert "on copies" not in sentences(less, about)[0]
    equal = edited(run, kind, change=own, controls=own, difference=(0.0, -0.1, 0.1))
    assert not sentences(equal, about), "no finding of absence"


def test_the_finding_of_all_heads_has_the_special_cases(run):
    (found,) = (one for one in VIEW.findings(run) if "(of 8 heads)" in one.sentence)
    costs = run["kinds"]["loss_change"].sel(token_class="generated", of="change", bound="mean")
    frozen, lines, index = (number(float(costs.sel(kind=case))) for case in CASES)
    assert found.sentence == (
        f"Freezing all learned positions (of 8 heads) costs {frozen} nats per token of the answer; "
        f"the token index in their place {index} nats"
    )
    assert f"each at its mean {frozen} nats (" in found.evidence
    assert f"the straight line fitted to those of each head {lines} nats (" in found.evidence
    assert "undisturbed" in kind_table(run).note


def test_a_cost_that_cannot_be_told_from_nothing_is_a_bound(run):
    """Found: the first finding of a model of sixty steps was a cost of 0.000177 nats."""
    (sentence,) = sentences(edited(run, EVERY, change=(2e-4, -1e-4, 5e-4)), "(of 8 heads)")
    assert "costs less than 0.000500 nats per token of the answer" in sentence


def test_a_change_below_the_rounding_of_float32_is_no_number(run):
    (sentence,) = sentences(edited(run, EVERY, change=2e-8), "(of 8 heads)")
    assert "(of 8 heads) costs nothing per token of the answer" in sentence


def test_its_page_has_one_small_chart_and_one_table(run):
    figure = losses_by_kind(run).figure()
    assert next(label.get_text() for label in figure.axes[0].get_yticklabels()) == "all heads (8)"
    table = kind_table(run)
    assert len(table.rows) == run["kinds"].sizes["kind"] and {len(row) for row in table.rows} == {
        len(table.columns)
    }


def test_heads_that_answer_are_judged_by_answers():
    prompts = make_task("niah").prompts(10, test_set="64")
    run = ri.analyze(ri.zoo("niah/repo"), prompts, (), experiments=[Kinds(draws=1)])
    group = run["kinds"]
    assert group.attrs["metric"] == "exact match" and group.attrs["block"] == "prompt"
    assert group["heads"].sel(kind=EVERY) == 16 and group["tokens"].sel(token_class="generated") > 0
    assert np.isfinite(group["score_change"].sel(of="change", bound="mean")).all()


def test_prompts_that_share_passes_lose_what_single_ones_lose(monkeypatch):
    torch.manual_seed(0)
    model = ri.reposition(tiny("llama"), "repo@1").double()
    # of two lengths, in an order in which they do not stand together
    again = Prompt(tokens=TEXT.tokens[50:95], token_text=tuple(WORDS[50:95]), generated=(1, 2))
    prompts = [PROMPTS[2], PROMPTS[1], again]
    run, passes = partial(ri.analyze, model, prompts, (), experiments=["kinds"]), []
    as_decoder(model).stack.register_forward_hook(lambda *given: passes.append(1))
    together, few = run()["kinds"].to_dataset(), len(passes)
    monkeypatch.setattr(kinds, "batch_limit", lambda *_: SideBySide(prompts=1))
    alone = run()["kinds"].to_dataset()
    assert 2 * (len(passes) - few) == 3 * few, "two passes in place of three"
    xr.testing.assert_allclose(together, alone, rtol=1e-6, atol=1e-9)
