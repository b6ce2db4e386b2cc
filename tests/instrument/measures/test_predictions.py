"""What the model expects next: the softmax of its own logits, of the first prompt alone, from the
pass that everything is measured in.
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
    group = ri.analyze(bridge, given, ("predictions",), batch_size=batch_size)[
        "predictions"
    ].to_dataset()
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
    group = ri.analyze(bridge, prompts(), [NextTokens(rows=6, candidates=100)])[
        "predictions"
    ].to_dataset()
    assert {4, 5, 15} <= set(group["token"].values.tolist()) and group.sizes == {
        "token": 6,
        "rank": 64,
    }
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
    assert (
        rows["generated"][1] == len(prompt.generated)
        and rows["generated"][2] == 100.0
        and rows["words"][2] < 100
    )
    assert {table.name for table in tables(run)} == {"predictions"}
    assert [one.name for one in figures_of(run)] == ["predictions"]
