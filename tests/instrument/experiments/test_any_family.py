"""Experiments on families that nothing was written for: hybrids, experts, sinks, other norms,
parallel layers.

The atlas and saliency are tried in models/test_families.py.
"""

import numpy as np
import pytest
import torch

import repo_interp as ri
from benchmarks.tiny_models import small_model
from repo_interp.models.decoder import as_decoder
from repo_interp.tasks.prompt import Prompt

DRAWN = np.random.default_rng(0).integers(3, 60, (4, 24))


def prompts():
    return [
        Prompt(tokens=tuple(map(int, row)), spans={"needle": (17, 18)}, generated=(20, 21, 22))
        for row in DRAWN
    ]


@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss", "gpt_neox"])
def test_experiments_name_the_layers_that_have_attention_and_find_something_there(family):
    torch.manual_seed(0)
    bridge = ri.bridge(ri.reposition(small_model(family), "rope"))
    asked = [
        ri.experiments.Perturbation(gammas=(0.5,), l_maxes=(4,)),
        ri.experiments.Effects(kinds=("permuted",), draws=2),
    ]
    run, attending = (
        ri.analyze(bridge, prompts(), (), experiments=asked),
        as_decoder(bridge).by_layer,
    )
    for group, measured in (("perturbation", "log_perplexity_rise"), ("effects", "layer_effect")):
        assert run[group]["layer"].values.tolist() == list(attending)
        assert "-" not in run[group]["scheme"].values
        assert (
            np.isfinite(run[group][measured]).all() and float(abs(run[group][measured]).max()) > 0
        )
