"""What kinds of heads are for: losses against whole passes by hand, kinds as the measure names
them, intervals in closed form.
"""

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
from repo_interp.experiments.catalogue import planned
from repo_interp.experiments.effects import drawn_sets
from repo_interp.experiments.kinds import (
    BLOCK,
    CASES,
    CLASSES,
    EVERY,
    blocks_of,
    intervals,
    rows_by_kind,
    token_classes,
)
from repo_interp.plots.marks import number
from repo_interp.plots.views.kinds import VIEW, kind_table, losses_by_kind
from repo_interp.tasks import Prompt

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
def losses(model, prompt, heads, change=iv.frozen):
    """-log p of every token but the first by a whole pass; `heads` changed, None: undisturbed."""
    tokens = torch.tensor([prompt.tokens])
    if heads is None:
        logits = model(tokens).logits
    else:
        with change(model, heads):
            logits = model(tokens).logits
    return -logits[0, :-1].double().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].numpy()


def _on_lines(model, heads):
    """Straight lines by numpy's fit, for one prompt without padding."""

    def fitted(positions, here):
        index = np.arange(positions.shape[-1])
        lines = [
            np.polyval(np.polyfit(index, row, 1), index) for row in positions[0].double().numpy()
        ]
        return torch.tensor(np.stack(lines))[None]

    return iv.replaced(model, fitted, heads)


def test_losses_and_controls_are_those_of_whole_passes(model, run):
    group, rows = run["kinds"], rows_by_kind(model, PROMPTS)
    blocks = np.concatenate(blocks_of([len(prompt.tokens) for prompt in PROMPTS]))
    every = [head for _, heads in rows for head in heads]
    assert every == [(layer, head) for layer in (1, 2) for head in range(4)]

    def by_hand(heads, change=iv.frozen):
        changed = np.concatenate(
            [
                losses(model, prompt, heads, change) - losses(model, prompt, None)
                for prompt in PROMPTS
            ]
        )
        return [changed[blocks == block].mean() for block in np.unique(blocks)]

    plain = np.concatenate([losses(model, prompt, None) for prompt in PROMPTS])
    assert_allclose(group["loss"], plain.mean(), atol=1e-5)
    cases = dict(zip(CASES, (iv.frozen, _on_lines, iv.linearised), strict=True))
    found = {case: group["block_change"].sel(kind=case, draw=0) for case in cases}
    for case, change in cases.items():
        assert_allclose(found[case], by_hand(every, change), atol=2e-5)
    assert len({float(each[0]) for each in found.values()}) == 3
    kinds = [kind for kind in group["kind"].values if kind not in CASES]
    assert kinds
    for kind in kinds:
        own = [heads for known, heads in rows if known == kind]
        others = [heads for known, heads in rows if known != kind]
        drawn = drawn_sets(others, len(own), 2, 0)
        for draw, chosen in enumerate([own, *drawn]):
            assert draw == 0 or not [heads for heads in chosen if heads in own]
            expected = by_hand([head for heads in chosen for head in heads])
            assert_allclose(group["block_change"].sel(kind=kind, draw=draw), expected, atol=2e-5)
        assert group["block_change"].sel(kind=kind)[1 + len(drawn) :].isnull().all()
    assert group["block_change"].sel(kind=EVERY)[1:].isnull().all()


def test_kinds_are_those_of_the_measure_and_rows_are_shared_positions(model, run):
    named = run["position_sources"]["kind"]
    for kind, heads in rows_by_kind(model, PROMPTS):
        assert len(heads) == 2
        assert {str(named.sel(layer=layer, head=head).values) for layer, head in heads} == {kind}


def test_controls_are_different_and_as_many():
    drawn = drawn_sets(["a", "b", "c", "d"], 2, 5, 1)
    assert len({tuple(each) for each in drawn}) == 5 and {len(each) for each in drawn} == {2}
    assert len(drawn_sets(["a", "b"], 2, 5, 1)) == 1 and drawn_sets(["a"], 2, 5, 1) == []


def test_the_size_of_batches_and_a_store_change_nothing(model, run, tmp_path):
    for size, store in ((3, None), (1, tmp_path / "store")):
        again = ri.analyze(model, PROMPTS, (), experiments=["kinds"], batch_size=size, store=store)
        xr.testing.assert_identical(again["kinds"].to_dataset(), run["kinds"].to_dataset())


def test_an_interval_over_unequal_blocks_weighs_tokens_and_leaves_empty_ones_out():
    values, block = np.array([1.0, 3.0, 2.0, np.nan, 6.0]), np.array([0, 0, 1, 2, 3])
    found = intervals(
        xr.DataArray(values[None, None], {"block": ("sample", block)}, ("kind", "draw", "sample"))
    )[0, 0]
    error = np.sqrt(3 / 2 * ((4 - 2 * 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2)) / 4
    reach = student.ppf(0.975, 2) * error
    assert_allclose(found, [3, 3 - reach, 3 + reach])


def test_where_all_blocks_are_equal_there_is_no_interval():
    found = intervals(
        xr.DataArray(
            np.zeros((1, 1, 20)), {"block": ("sample", np.arange(20))}, ("kind", "draw", "sample")
        )
    )
    assert float(found[0, 0, 0]) == 0
    assert np.isnan(found[0, 0, 1:]).all()


def test_blocks_are_stretches_of_few_prompts_and_each_of_many():
    (one,) = blocks_of([100])
    assert (
        len(one) == 99
        and np.bincount(one).min() >= BLOCK
        and one.max() == 2
        and (np.diff(one) >= 0).all()
    )
    first, second = blocks_of([3, 70])
    assert first.tolist() == [0, 0] and set(second) == {1, 2}
    assert [set(each) for each in blocks_of([9, 200, *[40] * 8])] == [
        {number} for number in range(10)
    ]


def test_every_token_has_the_first_class_that_fits():
    found = token_classes(PROMPTS[2])
    assert found[43:] == ["generated"] * 2
    plain = token_classes(TEXT)
    assert plain[:9] == [
        "first of lines",
        *["others"] * 3,
        "first of lines",
        "numbers",
        "others",
        "others",
        "first of lines",
    ]
    assert plain[9:12] == ["copies"] * 3 and plain[13] == "numbers" and set(plain) <= set(CLASSES)
    assert set(token_classes(OTHER)) <= {"copies", "others"}


def test_classes_and_their_counts_sum_to_all(run):
    group = run["kinds"]
    counts, mean = group["tokens"], group["loss_change"].sel(of="change", bound="mean")
    assert counts[0] == counts[1:].sum() == sum(len(prompt.tokens) - 1 for prompt in PROMPTS)
    weighed = (mean * counts).isel(token_class=slice(1, None)).sum("token_class") / counts[0]
    assert_allclose(weighed, mean.isel(token_class=0), atol=1e-12)


def test_it_plans_what_it_can_need_and_refuses_models_without_learned_positions(model):
    (plan,) = planned(model, PROMPTS, [Kinds()])
    assert sum(plan.passes) == 186 * (2 + np.ceil(15 * 2 / 3))
    assert [each.name for each in default_experiments(model, [TEXT], None)] == ["kinds"]
    with refused(r"no layer of this model \(rope\) learns any"):
        planned(ri.reposition(tiny("llama"), "rope"), PROMPTS, [Kinds()])
    with refused("nothing to predict"):
        planned(model, [Prompt(tokens=(3,))], [Kinds()])


def made(own, others, kind="counts tokens"):
    """A run whose kind changes losses by `own`, other heads by `others`, in 20 blocks with some
    noise.
    """
    noise = np.random.default_rng(0).normal(size=(3, 20)) * 0.01
    values = noise + np.array([own, others, others])[:, None]
    array = xr.DataArray(
        values[None],
        {"kind": [kind], "block": ("sample", np.arange(20))},
        ("kind", "draw", "sample"),
    )
    classes = ["all", *CLASSES]
    spread = xr.concat(
        [intervals(array), *(intervals(array * share) for share in (np.nan, 1, 1, 4, 0.5))],
        "token_class",
    )
    group = xr.Dataset(
        {
            "heads": ("kind", [25]),
            "tokens": ("token_class", [60, 0, 20, 20, 10, 10]),
            "loss_change": spread,
            "score_change": intervals(array),
        },
        {
            "token_class": classes,
            "of": ["change", "controls", "difference"],
            "bound": ["mean", "low", "high"],
        },
        {"block": "stretch of 32 tokens", "metric": "log perplexity"},
    )
    return xr.DataTree.from_dict({"/": xr.Dataset(attrs={"checkpoint": "made"}), "/kinds": group})


def test_a_finding_needs_a_clear_difference_and_names_the_tokens_that_lose_most():
    (finding,) = VIEW.findings(made(0.4, 0.05))
    assert finding.sentence.startswith(
        "Freezing the positions of the 25 heads whose positions follow the token index, each at "
        "its mean, costs 0.398 nats (95 %: 0.394"
    )
    assert "as many other heads 0.05" in finding.sentence and "on copies 1." in finding.sentence
    (less,) = VIEW.findings(made(0.05, 0.4))
    assert "on copies" not in less.sentence and less.weight < finding.weight
    assert not [*VIEW.findings(made(0.05, 0.05))], "no finding of absence"


def test_the_finding_of_all_heads_has_the_special_cases(run):
    sentence = next(
        found.sentence for found in VIEW.findings(run) if "all 8 heads" in found.sentence
    )
    costs = run["kinds"]["loss_change"].sel(token_class="generated", of="change", bound="mean")
    frozen, lines, index = (number(float(costs.sel(kind=case))) for case in CASES)
    assert f"each at its mean, costs {frozen} nats" in sentence
    assert f"the straight line fitted to those of each head {lines} nats" in sentence
    assert f"the token index {index} nats" in sentence
    assert "undisturbed" in kind_table(run).note


def test_a_change_below_the_rounding_of_float32_is_no_number(run):
    group = run["kinds"].to_dataset().copy(deep=True)
    group["loss_change"].loc[{"kind": "all heads"}] = 2e-8
    same = run.copy()
    same["kinds"] = xr.DataTree(group)
    sentence = next(one.sentence for one in VIEW.findings(same) if "all 8 heads" in one.sentence)
    assert "each at its mean, costs less than 1e-06 nats per token" in sentence


def test_its_page_has_one_small_chart_and_one_table(run):
    figure = losses_by_kind(run).figure()
    assert next(label.get_text() for label in figure.axes[0].get_yticklabels()) == "all heads (8)"
    table = kind_table(run)
    assert len(table.rows) == run["kinds"].sizes["kind"] and {len(row) for row in table.rows} == {
        len(table.columns)
    }


def test_heads_that_answer_are_judged_by_answers():
    bridge = ri.load("niah/repo")
    run = ri.analyze(bridge, None, (), experiments=["kinds"])
    group = run["kinds"]
    assert group.attrs["metric"] == "exact match" and group.attrs["block"] == "prompt"
    assert group["heads"].sel(kind=EVERY) == 16 and group["tokens"].sel(token_class="generated") > 0
    assert np.isfinite(group["score_change"].sel(of="change", bound="mean")).all()
