"""Losses against transformers' cross-entropy: alone, side by side, padded, packed."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from families import TOKENS, tiny
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused
from torch.nn.functional import cross_entropy

import repo_interp as ri
from repo_interp.errors import NotFinitePrediction


@torch.no_grad()
def by_transformers(model, tokens):
    logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    return cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none").numpy()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "mistral"])
def test_losses_are_transformers_cross_entropies(family):
    torch.manual_seed(0)
    stock, prompts = tiny(family), [TOKENS[0, :n].tolist() for n in (20, 2, 13, 20)]
    model = ri.reposition(deepcopy(stock), "rope")
    found = ri.loss(model, prompts)
    assert found.dims == ("prompt", "token") and found.shape == (4, 20)
    assert found.attrs["units"] == "nat" and found["token"].size == 20
    for values, prompt in zip(found.values, prompts, strict=True):
        assert np.isnan(values[0]) and np.isnan(values[len(prompt) :]).all()
        expected = by_transformers(stock, prompt)
        assert_allclose(values[1 : len(prompt)], expected, atol=1e-5, rtol=1e-5)
        # alone a prompt passes as in transformers, to the last bit
        alone = ri.loss(model, prompt).values[0, 1:]
        assert_array_equal(alone, by_transformers(model, prompt))
    assert_array_equal(ri.loss(model, prompts, batch_size=1), ri.loss(model, prompts, batch_size=1))
    assert_allclose(ri.loss(model, prompts, batch_size=2), found, atol=1e-5, rtol=1e-5)
    mean = stock(torch.tensor([prompts[0]]), labels=torch.tensor([prompts[0]])).loss
    assert float(found[0].mean()) == pytest.approx(float(mean.detach()), rel=1e-5)


def test_a_loss_is_that_of_the_measure_predictions_and_of_the_model_as_it_is_edited():
    bridge = ri.open_model("reversal/repo")
    prompts = ri.tasks.make_task("reversal").prompts(3, seed=1)
    plain = [list(prompt.tokens) for prompt in prompts]
    with ri.interventions.frozen(bridge, layer=2):
        found = ri.loss(bridge, plain).mean("token")
        run = ri.analyze(bridge, plain, ("predictions",))
    assert_allclose(found, run["predictions"]["loss"], rtol=1e-5)
    assert abs(found - ri.loss(bridge, plain).mean("token")).min() > 1e-3


def test_the_first_token_of_a_packed_document_has_no_loss():
    torch.manual_seed(0)
    model = ri.reposition(tiny("llama"), "rope")
    model.set_attn_implementation("sdpa")
    tokens = TOKENS[0].tolist()
    packed = ri.prompt(tokens, model, position_ids=[*range(8), *range(12)])
    found = ri.loss(model, [packed, tokens])
    assert np.flatnonzero(np.isnan(found.values[0])).tolist() == [0, 8]
    assert np.flatnonzero(np.isnan(found.values[1])).tolist() == [0]
    parts = [ri.loss(model, some).values[0, 1:] for some in (tokens[:8], tokens[8:])]
    assert_allclose(
        found.values[0, [*range(1, 8), *range(9, 20)]], np.concatenate(parts), rtol=1e-4
    )


def test_progress_counts_prompts_and_what_has_no_loss_is_refused():
    model, told = ri.reposition(tiny("llama"), "rope"), []
    ri.loss(model, TOKENS, batch_size=1, progress=lambda *done: told.append(done))
    assert told == [(1, 2), (2, 2)]
    for prompts, line in (([], "there are no prompts"), ([[1, 99]], "prompt 0 has token 99")):
        with refused(line):
            ri.loss(model, prompts)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with refused("predictions for prompt 0 are NaN", NotFinitePrediction):
        ri.loss(model, TOKENS)
