"""Attention mass where heads have a sink, which takes a part of the softmax and moves no value, and
where every token of an answer has a needle of its own.
"""

from dataclasses import replace

import pytest
import torch
from attention_inputs import random_inputs
from numpy.testing import assert_allclose
from transformers import AutoModelForCausalLM

import repo_interp as ri
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.measures.attention_mass import ROWS, AttentionMass
from repo_interp.measures.attention_rows import strongest_keys
from repo_interp.tasks.prompt import copies_next


def test_a_sink_takes_its_part_of_the_attention():
    """A sink whose logit is that of all keys together gets half; one of minus infinity gets
    nothing.
    """
    inputs = random_inputs(prompts=1, heads=2, kv_heads=2, tokens=6)
    masks = {"generated": [0, 0, 0, 0, 0, 1], "rest": [1, 1, 1, 1, 1, 0]}
    spans = {name: torch.tensor([mask], dtype=torch.bool) for name, mask in masks.items()}
    producing = torch.tensor([4])
    of_all_keys = inputs.logits(producing)[0, :, 0].logsumexp(-1)
    sunk = replace(inputs, sinks=torch.stack([of_all_keys[0], torch.tensor(float("-inf"))]))
    plain, found = (AttentionMass().observe(each, spans).per_prompt for each in (inputs, sunk))
    assert "sink_mass" not in plain
    assert found["sink_mass"].values.reshape(2) == pytest.approx([0.5, 0.0], abs=1e-6)
    halves = plain["mass"].values[0, 0] * [[0.5], [1.0]]
    assert found["mass"].values[0, 0] == pytest.approx(halves, abs=1e-6)
    assert AttentionMass().conclude(AttentionMass().observe(sunk, spans)).sink_mass.dims == (
        "prompt",
        "layer",
        "head",
    )
    weights = [strongest_keys(each, producing, 6)[0][0, 0] for each in (inputs, sunk)]
    assert weights[1][:5].tolist() == pytest.approx((weights[0][:5] / 2).tolist(), abs=1e-6)


@pytest.mark.parametrize("rows", ROWS)
def test_needle_and_query_of_a_copied_answer_are_those_of_every_row(rows):
    """Against a loop over transformers' own attention; a prompt without sources has neither."""
    task = ri.tasks.make_task("reversal")
    prompts = [*task.prompts(2, test_set="4"), *task.prompts(1, test_set="7")]
    prompts.append(replace(prompts[0], attributes={}))
    path = zoo_path("reversal/rope")
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    run = ri.analyze(ri.zoo("reversal/rope"), prompts, [AttentionMass(rows=rows)])["attention_mass"]
    assert run["span"].values.tolist()[-2:] == ["needle", "query"]
    for number, prompt in enumerate(prompts[:3]):
        with torch.no_grad():
            maps = model(torch.tensor([prompt.tokens]), output_attentions=True).attentions
        asked = [at - (rows == "producing") for at in prompt.generated]
        for span, keys in {
            "needle": list(prompt.sources),
            "query": [at - 1 for at in prompt.generated],
        }.items():
            slow = torch.stack([of_layer[0][:, asked, keys].mean(-1) for of_layer in maps])
            mass, chance = (run[name].sel(prompt=number, span=span) for name in ("mass", "chance"))
            assert_allclose(mass.transpose("layer", "head"), slow, atol=1e-5)
            assert_allclose(chance, sum(1 / (row + 1) for row in asked) / len(asked))
    assert run["span_tokens"].sel(span="needle").values.tolist() == [1, 1, 1, 0]
    assert bool(run["mass"].sel(prompt=3, span=["needle", "query"]).isnull().all())


def test_a_needle_that_prompts_name_is_the_only_one():
    prompts = ri.tasks.make_task("copying", sequences=4).prompts(1)
    assert prompts[0].sources is not None and not copies_next(prompts)
    run = ri.analyze(ri.zoo("language/rope"), prompts, ["attention_mass"])
    names = run["attention_mass"]["span"].values.tolist()
    assert names.count("needle") == 1 and run.attrs["main_span"] == "needle"
    assert "needle_is" not in run.attrs
