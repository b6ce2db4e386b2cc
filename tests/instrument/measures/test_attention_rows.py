"""Rows of attention: the largest weights of the dense softmax, whatever is padded or shared; rows that fit, those of spans first."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import CASES, random_inputs
from torch.testing import assert_close

from repo_interp.errors import InputError
from repo_interp.inputs import select_prompts
from repo_interp.measures import attention_rows
from repo_interp.measures.attention_rows import AttentionRows, strongest_keys


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cells", [1, 2**24])
def test_weights_are_the_largest_of_the_dense_softmax(case, cells, monkeypatch):
    monkeypatch.setattr(attention_rows, "_CELLS", cells)
    inputs = random_inputs(**CASES[case])
    prompt = select_prompts(inputs, slice(1, 2))
    rows = prompt.valid[0].nonzero()[:, 0]
    weights, keys, totals = strongest_keys(prompt, rows, 5)
    assert_close(totals, torch.logsumexp(prompt.logits(rows)[0].double(), dim=-1))
    dense = torch.softmax(prompt.logits(rows)[0], dim=-1)
    expected = dense.topk(5, dim=-1).values
    seen = keys >= 0
    assert (weights.isnan() == ~seen).all() and (expected[~seen] == 0).all()
    assert_close(weights[seen], expected[seen])
    assert_close(dense.gather(-1, keys.clamp_min(0))[seen], weights[seen])


def test_a_run_holds_the_rows_of_its_first_prompt_alone():
    inputs = random_inputs(tokens=24, layer=3)
    measure = AttentionRows(rows=8, keys=4)
    spans = {"needle": torch.zeros(2, 24, dtype=torch.bool), "rest": torch.ones(2, 24, dtype=torch.bool)}
    spans["needle"][0, [5, 6]] = True
    group = measure.conclude(measure.observe(inputs, spans))
    assert group["weight"].dims == ("layer", "head", "query", "rank") and group.sizes["query"] == 8
    assert {5, 6} <= set(group["query"].values.tolist()) and group["layer"].values.tolist() == [3]
    assert group["key"].sel(query=group["query"].values[0]).min() == -1
    assert not measure.observe(random_inputs(first_prompt=1), spans).first_prompt
    kept = AttentionRows(rows=48, keys=4)  # room for 48 x 4 weights of a head: 8 keys for each of 24 rows
    assert kept.conclude(kept.observe(inputs, spans)).sizes == {"layer": 1, "head": inputs.heads, "query": 24, "rank": 8}
    everything = AttentionRows(keys=99)
    assert everything.conclude(everything.observe(inputs, spans))["weight"].sum("rank").values == pytest.approx(1)


def test_no_rows_are_no_measure():
    with pytest.raises(InputError, match="rows is 0; wanted a whole number from 1"):
        AttentionRows(rows=0)
