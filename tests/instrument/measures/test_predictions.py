"""What the model expects next: the softmax of its own logits, from the pass that everything is
measured in; of the first prompt by token, of the answers and texts of all prompts their means.
"""

import numpy as np
import pytest
import torch
from families import repositioned, tiny
from numpy.testing import assert_allclose, assert_array_equal

import repo_interp as ri
from repo_interp.entry_points import EXPERIMENTS, MEASURES, OWN
from repo_interp.measures import predictions
from repo_interp.measures.predictions import Predictions
from repo_interp.plots.views.predictions import prediction_table
from repo_interp.tasks.prompt import Prompt


@pytest.fixture(scope="module")
def bridge():
    # whose logits are capped, and whose output weights are tied
    return ri.bridge(ri.reposition(tiny("gemma2"), "repo@1"))


TOKENS = torch.randint(3, 64, (3, 20), generator=torch.Generator().manual_seed(1)).tolist()


def prompts():
    return [
        Prompt(tuple(row[: 20 - number]), {"needle": (4, 5)}, generated=(15,))
        for number, row in enumerate(TOKENS)
    ]


@torch.no_grad()
def log_probabilities(bridge, prompt):
    """Of every next token after every token, dense."""
    return torch.log_softmax(bridge(torch.tensor([prompt.tokens]))[0].double(), -1).numpy()


@pytest.mark.parametrize(("at_a_time", "batch_size"), [(1, 1), (32, 3)])
def test_they_are_the_softmax_of_the_models_logits(bridge, at_a_time, batch_size, monkeypatch):
    monkeypatch.setattr(predictions, "_ROWS", at_a_time)
    group = ri.analyze(bridge, prompts(), ("predictions",), batch_size=batch_size)["predictions"]
    dense = np.exp(log_probabilities(bridge, prompts()[0]))
    assert group["token"].values.tolist() == list(range(20)) and "layer" not in group.dims
    order = np.argsort(-dense, axis=-1, kind="stable")[:, :8]
    assert_array_equal(group["next_token"], order)
    assert_allclose(group["probability"], np.take_along_axis(dense, order, -1), rtol=1e-4)
    follows = dense[np.arange(19), TOKENS[0][1:]]
    assert_allclose(group["probability_of_next"], [*follows, np.nan], rtol=1e-4)
    assert_array_equal(group["rank_of_next"], [*(dense[:19] > follows[:, None]).sum(-1), -1])


def test_long_prompts_keep_the_tokens_of_their_spans_first(bridge):
    group = ri.analyze(bridge, prompts(), [Predictions(rows=6, candidates=100)])["predictions"]
    assert {4, 5, 15} <= set(group["token"].values.tolist())
    assert group.sizes == {"token": 6, "rank": 64, "prompt": 3}
    assert_allclose(group["probability"].sum("rank"), 1, rtol=1e-6)


def test_they_are_measured_by_default_where_the_pass_goes_through_all_layers(bridge):
    whole, some = (ri.analyze(bridge, prompts()[:1], layers=layers) for layers in (None, [0]))
    assert {"attention_rows", "predictions"} <= set(whole.children)
    assert "attention_rows" in some.children and "predictions" not in some.children
    seen = ri.analyze(bridge, prompts()[:1], ("attention_rows", "predictions"), layers=[0])
    assert_array_equal(seen["predictions"]["probability"], whole["predictions"]["probability"])
    assert seen["attention_rows"].sizes["layer"] == 1


def test_texts_stand_beside_tokens_and_spans_in_the_table():
    bridge, (prompt,) = ri.load("reversal/rope"), ri.tasks.make_task("reversal").prompts(1)
    run = ri.analyze(bridge, [prompt], ("attention_rows", "predictions"))
    first = prompt.generated[0] - 1
    text = run["predictions"]["next_text"].sel(token=first, rank=0)
    assert str(text.values) == prompt.token_text[first + 1]
    rows = {row[0]: row for row in prediction_table(run).rows}
    assert rows["generated"][1:3] == (len(prompt.generated), 100.0) and rows["words"][2] < 100


@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_of_all_prompts_and_texts_are_scored(bridge, batch_size):
    first, *_ = given = prompts()
    logs = [log_probabilities(bridge, prompt) for prompt in given]
    likeliest = int(logs[0][18].argmax())
    given[0] = Prompt((*first.tokens[:19], likeliest), first.spans, generated=(19,))
    given[1] = Prompt(given[1].tokens, generated=(0, 15, 16, 17))  # nothing precedes token 0
    given[2] = Prompt(given[2].tokens)
    group = ri.analyze(bridge, given, ("predictions",), batch_size=batch_size)["predictions"]

    def mean(number, places):
        return np.mean([logs[number][i - 1, given[number].tokens[i]] for i in places])

    answers = [mean(0, [19]), mean(1, [15, 16, 17]), np.nan]
    assert_allclose(group["answer_log_probability"], answers, rtol=1e-4)
    assert_array_equal(group["answer_is_likeliest"], [1, 0, np.nan])
    assert_allclose(group["loss"], [np.nan, np.nan, -mean(2, range(1, 18))], rtol=1e-4)


def test_the_loss_of_a_long_text_is_over_all_targets(bridge):
    """Of 5 rows, and not of its spans; what is kept does not matter."""
    text = Prompt(tuple(TOKENS[0]), {"needle": (4, 5, 6)})
    logs = log_probabilities(bridge, text)
    for rows in (1, 5, 512):
        group = ri.analyze(bridge, [text], [Predictions(rows=rows)])["predictions"]
        expected = -logs[np.arange(19), TOKENS[0][1:]].mean()
        assert_allclose(group["loss"], [expected], rtol=1e-5)
        assert len(group["token"]) == min(rows, 20) and "answer_log_probability" not in group


@pytest.mark.parametrize("length", [513, 700, 1030])
def test_texts_beyond_the_rows_that_are_kept_have_the_loss_of_transformers(length):
    model = repositioned("rope")
    tokens = torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        expected = float(model(tokens, labels=tokens).loss)
    group = ri.analyze(model, tokens, measures=("predictions",))["predictions"]
    assert_allclose(group["loss"], [expected], rtol=1e-5)
    assert group.sizes["token"] == 512


def test_packed_documents_have_the_loss_of_their_own_targets():
    """The first token of a document, which nothing before it tells, is no target."""
    model = repositioned("rope")
    one, other = TOKENS[0], TOKENS[1][:9]
    ids = (*range(20), *range(5, 14), 0, 1)
    packed = Prompt((*one, *other, 7, 8), position_ids=ids, documents=3)
    answers = Prompt(packed.tokens, generated=(19, 20, 21), position_ids=ids, documents=3)
    offset = Prompt(tuple(other), position_ids=range(5, 14))
    given = [packed, answers, Prompt(tuple(one)), offset, Prompt((7, 8))]
    group = ri.analyze(model, given, measures=("predictions",), batch_size=2)["predictions"]
    loss = group["loss"].values
    assert_allclose(loss[0], (19 * loss[2] + 8 * loss[3] + loss[4]) / 28, rtol=1e-5)
    alone = [
        Prompt(tuple(one), generated=(19,)),
        Prompt(tuple(other), generated=(1,), position_ids=range(5, 14)),
    ]
    answer = ri.analyze(model, alone, measures=("predictions",))["predictions"]
    expected = answer["answer_log_probability"].mean()
    assert_allclose(group["answer_log_probability"][1], expected, rtol=1e-5)


def test_every_measure_and_experiment_has_the_class_of_its_name():
    for kind in (MEASURES, EXPERIMENTS):
        for name, place in OWN[kind].items():
            assert place.rpartition(":")[2] == name.title().replace("_", "")
    with pytest.warns(DeprecationWarning, match="NextTokens is now Predictions"):
        assert ri.measures.NextTokens is Predictions
