"""What the model expects next: the softmax of its own logits, from the pass that everything is
measured in; of the first prompt by token, of the answers and texts of all prompts their means.
"""

import numpy as np
import pytest
import torch
from families import tiny
from numpy.testing import assert_allclose, assert_array_equal

import repo_interp as ri
from repo_interp.measures import predictions
from repo_interp.measures.predictions import NextTokens
from repo_interp.plots.catalogue import figures_of, tables
from repo_interp.plots.views.predictions import prediction_table
from repo_interp.tasks.prompt import Prompt


@pytest.fixture(scope="module")
def bridge():
    # whose logits are capped, and whose output weights are tied
    return ri.bridge(ri.reposition(tiny("gemma2"), "repo@1"))


def prompts(count=3, length=20):
    rows = torch.randint(
        3, 64, (count, length), generator=torch.Generator().manual_seed(1)
    ).tolist()
    return [
        Prompt(tokens=tuple(row[: length - number]), spans={"needle": (4, 5)}, generated=(15,))
        for number, row in enumerate(rows)
    ]


@pytest.mark.parametrize("at_a_time", [1, 32])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_they_are_the_softmax_of_the_models_logits(bridge, at_a_time, batch_size, monkeypatch):
    monkeypatch.setattr(predictions, "_ROWS", at_a_time)
    given = prompts()
    group = ri.analyze(bridge, given, ("predictions",), batch_size=batch_size)["predictions"]
    with torch.no_grad():
        dense = torch.softmax(bridge(torch.tensor([given[0].tokens]))[0].double(), -1).numpy()
    assert group["token"].values.tolist() == list(range(20)) and "layer" not in group.dims
    order = np.argsort(-dense, axis=-1, kind="stable")[:, :8]
    assert_array_equal(group["next_token"], order)
    assert_allclose(group["probability"], np.take_along_axis(dense, order, -1), rtol=1e-4)
    follows = dense[np.arange(19), list(given[0].tokens[1:])]
    assert_allclose(group["probability_of_next"], [*follows, np.nan], rtol=1e-4)
    assert_array_equal(group["rank_of_next"], [*(dense[:19] > follows[:, None]).sum(-1), -1])


def test_long_prompts_keep_the_tokens_of_their_spans_first(bridge):
    run = ri.analyze(bridge, prompts(), [NextTokens(rows=6, candidates=100)])
    group = run["predictions"]
    assert {4, 5, 15} <= set(group["token"].values.tolist())
    assert group.sizes == {"token": 6, "rank": 64, "prompt": 3}
    assert group["probability"].sum("rank").values == pytest.approx(1)


def test_they_are_measured_by_default_where_the_pass_goes_through_all_layers(bridge):
    whole, some = ri.analyze(bridge, prompts(1)), ri.analyze(bridge, prompts(1), layers=[0])
    assert {"attention_rows", "predictions"} <= set(whole.children)
    assert "attention_rows" in some.children and "predictions" not in some.children
    seen = ri.analyze(bridge, prompts(1), ("attention_rows", "predictions"), layers=[0])
    assert_array_equal(seen["predictions"]["probability"], whole["predictions"]["probability"])
    assert seen["attention_rows"].sizes["layer"] == 1


def test_texts_stand_beside_tokens_and_spans_in_the_table():
    bridge, task = ri.load("reversal/rope"), ri.tasks.make_task("reversal")
    run = ri.analyze(bridge, task.prompts(1, test_set="5"), ("attention_rows", "predictions"))
    group, prompt = run["predictions"], task.prompts(1, test_set="5")[0]
    first = prompt.generated[0] - 1
    assert str(group["next_text"].sel(token=first, rank=0).values) == prompt.token_text[first + 1]
    rows = {row[0]: row for row in prediction_table(run).rows}
    assert rows["generated"][1:3] == (len(prompt.generated), 100.0) and rows["words"][2] < 100
    assert {table.name for table in tables(run)} == {"predictions"}
    assert [one.name for one in figures_of(run)] == ["predictions"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_of_all_prompts_and_texts_are_scored(bridge, batch_size):
    given = prompts()
    given[1] = Prompt(given[1].tokens, generated=(0, 15, 16, 17))  # nothing precedes token 0
    given[2] = Prompt(given[2].tokens)
    with torch.no_grad():
        logs = [
            torch.log_softmax(bridge(torch.tensor([prompt.tokens]))[0].double(), -1)
            for prompt in given
        ]
    given[0] = Prompt(
        (*given[0].tokens[:19], int(logs[0][18].argmax())), {"needle": (4, 5)}, generated=(19,)
    )
    group = ri.analyze(bridge, given, ("predictions",), batch_size=batch_size)["predictions"]

    def mean(number, places):
        return np.mean([float(logs[number][i - 1, given[number].tokens[i]]) for i in places])

    answers = [mean(0, [19]), mean(1, [15, 16, 17]), np.nan]
    assert_allclose(group["answer_log_probability"], answers, rtol=1e-4)
    assert_array_equal(group["answer_is_likeliest"], [1, 0, np.nan])
    assert_allclose(group["loss"], [np.nan, np.nan, -mean(2, range(1, 18))], rtol=1e-4)


def test_the_loss_of_a_long_text_is_over_rows_evenly_spread(bridge):
    text = Prompt(prompts(1)[0].tokens, {"needle": (4, 5, 6)})
    group = ri.analyze(bridge, [text], [NextTokens(rows=5)])["predictions"]
    with torch.no_grad():
        logs = torch.log_softmax(bridge(torch.tensor([text.tokens]))[0].double(), -1)
    spread = [0, 5, 10, 14]  # and 19, which has no successor
    expected = -np.mean([float(logs[i, text.tokens[i + 1]]) for i in spread])
    assert_allclose(group["loss"], [expected], rtol=1e-4)
    assert {4, 5, 6} <= set(group["token"].values.tolist())
    assert "answer_log_probability" not in group
