"""Experiments on families that nothing was written for: hybrids, experts, sinks, other norms,
parallel layers.

The atlas and saliency are tried in models/test_families.py.
"""

import numpy as np
import pytest
import torch

import repo_interp as ri
from benchmarks.families import small_model
from repo_interp.models.decoder import as_decoder
from repo_interp.tasks.prompt import Prompt

DRAWN = np.random.default_rng(0).integers(3, 60, (4, 24))


def prompts():
    return [
        Prompt(tokens=tuple(map(int, row)), spans={"needle": (17, 18)}, generated=(20, 21, 22))
        for row in DRAWN
    ]


@pytest.fixture(scope="module", params=["qwen3_next", "gpt_oss", "gpt_neox"])
def bridge(request):
    torch.manual_seed(0)
    return ri.bridge(ri.reposition(small_model(request.param), "rope"))


@pytest.mark.parametrize(
    "experiment",
    [ri.experiments.Perturbation(gammas=(0.5,), l_maxes=(4,)), ri.experiments.Effects(draws=2)],
    ids=lambda experiment: experiment.name,
)
def test_it_names_the_layers_that_have_attention_and_leaves_no_trace(bridge, experiment):
    tokens = torch.tensor([prompts()[0].tokens])
    with torch.no_grad():
        before = bridge(tokens)
    group = ri.analyze(bridge, prompts(), ["positions"], experiments=[experiment])[
        experiment.name
    ].to_dataset()
    with torch.no_grad():
        assert torch.equal(bridge(tokens), before)
    attending = list(as_decoder(bridge).by_layer)
    if "layer" in group.dims:
        assert group["layer"].values.tolist() == attending
        assert "-" not in group["scheme"].values
    else:
        assert np.atleast_1d(group.attrs["layers"]).tolist() == attending
    measured = {"perturbation": "log_perplexity", "effects": "layer_effect"}[experiment.name]
    assert np.isfinite(group[measured]).all() and float(abs(group[measured]).max()) > 0
