"""Attention mass where heads have a sink, which takes a part of the softmax and moves no value."""

from dataclasses import replace

import pytest
import torch
from attention_inputs import random_inputs

from repo_interp.measures.attention_mass import AttentionMass
from repo_interp.measures.attention_rows import strongest_keys


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
