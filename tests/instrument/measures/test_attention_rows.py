"""Rows of attention: the largest weights of the dense softmax, whatever is padded or shared; rows
that fit, those of spans first.
"""

import pytest
import torch
from attention_inputs import CASES, PADDED, random_inputs, with_holes
from torch.testing import assert_close

from repo_interp.inputs import select_prompts
from repo_interp.measures.attention_rows import AttentionRows
from repo_interp.runtime.memory import working_memory


def kept_rows(inputs, spans=None, **parameters):
    measure = AttentionRows(**parameters)
    return measure.conclude(measure.observe(inputs, spans or {}))


def test_rows_of_the_first_prompt_fit_into_their_budget():
    inputs = random_inputs(tokens=24, layer=3)
    needle = torch.arange(24).expand(2, -1)
    spans = {"needle": (needle == 5) | (needle == 6), "rest": torch.ones(2, 24, dtype=torch.bool)}
    group = kept_rows(inputs, spans, rows=8, keys=4)
    assert group["weight"].dims == ("layer", "head", "query", "rank") and group.sizes["query"] == 8
    assert {5, 6} <= set(group["query"].values.tolist()) and group["layer"].values.tolist() == [3]
    assert group["key"].sel(query=group["query"].values[0]).min() == -1
    assert not AttentionRows().observe(random_inputs(first_prompt=1), spans).first_prompt
    # room for 48 x 4 weights of a head: 8 keys for each of 24 rows
    kept = kept_rows(inputs, spans, rows=48, keys=4)
    assert kept["weight"].shape == (1, inputs.heads, 24, 8)
    everything = kept_rows(inputs, spans, keys=99)
    assert everything["weight"].sum("rank").values == pytest.approx(1)


@pytest.mark.parametrize(
    ("case", "memory"), [*((case, 1) for case in (*CASES, "holes")), ("window and padding", 2**24)]
)
def test_every_token_of_the_first_prompts_has_its_strongest_keys(case, memory):
    inputs = with_holes(random_inputs()) if case == "holes" else random_inputs(**CASES[case])
    with working_memory(memory):
        group = kept_rows(inputs, prompt_keys=3).sel(layer=inputs.layer)
    known = group["prompt_log_total"].isel(head=0).notnull().values
    assert (known == inputs.valid.numpy()).all()
    for row in range(len(inputs.valid)):
        tokens = inputs.valid[row].nonzero()[:, 0]
        prompt = select_prompts(inputs, slice(row, row + 1))
        dense = prompt.pattern(tokens)[0].float()
        largest = dense.topk(3, dim=-1).values
        own = group.sel(prompt=row, token=tokens.tolist()).transpose(
            "head", "token", "strongest", ...
        )
        weights, keys, totals = (
            torch.from_numpy(own[f"prompt_{name}"].values)
            for name in ("weight", "key", "log_total")
        )
        assert_close(totals, prompt.logits(tokens)[0].logsumexp(-1).float())
        assert (weights.isnan() == (keys < 0)).all()
        assert_close(weights.nan_to_num(0.0), largest)
        assert_close(
            torch.where(keys < 0, 0.0, dense.gather(-1, keys.long().clamp_min(0))), largest
        )


def test_prompts_that_are_too_many_or_too_long_have_no_rows():
    inputs = random_inputs(valid=PADDED)
    long, short = sorted(inputs.valid.sum(1).tolist(), reverse=True)
    assert kept_rows(inputs)["prompt"].values.tolist() == [0, 1]
    assert kept_rows(inputs, prompts=1)["prompt"].values.tolist() == [0]
    assert kept_rows(inputs, rows=long - 1)["prompt"].values.tolist() == [
        int(inputs.valid.sum(1).argmin())
    ]
    assert "prompt" not in kept_rows(inputs, rows=short - 1).dims
