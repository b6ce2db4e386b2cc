"""The authors' checkpoints give the authors' numbers.

Goldens: official/README.md (original code, fp32, CPU).
"""

import json

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import repo_interp as ri
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import mix_with_index

CHECKPOINTS = [
    "continuous", "multihead_continuous", "n2r1", "nope", "r2n1", "repo_layer_ids", "repo_mha", "repo_scaled", "rope_none",
]  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_positions_and_logits_are_the_original_codes(name, official, expected):
    arrays = expected(name)
    bridge = ri.load(official / name)
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(
            torch.as_tensor(arrays["input_ids"]),
            names_filter=lambda hook: hook.endswith("hook_positions"),
        )
    assert_allclose(logits, arrays["logits"], atol=2e-4)
    for row, layer in enumerate(arrays["repo_layers"]):
        positions = cache[f"blocks.{layer}.attn.hook_positions"].numpy()
        assert_allclose(
            np.broadcast_to(positions, arrays["pred_indices"][row].shape),
            arrays["pred_indices"][row],
            atol=5e-4,
        )


@pytest.mark.parametrize("variant", ["yarn2", "yarn4", "linear2"])
def test_scaled_frequencies_reach_layers_with_learned_positions(variant, official, expected):
    override = json.loads((official / "repo_scaled" / "rope_overrides.json").read_text())[variant]
    arrays = expected("repo_scaled", f"expected_{variant}")
    model = load_model(official / "repo_scaled", rope_scaling=override["rope_scaling"])
    with torch.no_grad():
        logits = model(torch.as_tensor(arrays["input_ids"])).logits
    assert_allclose(logits, arrays["logits"], atol=2e-4)
    *_, attention = as_decoder(model).layers
    assert_allclose(attention.frequencies, arrays["inv_freq"], rtol=1e-6)
    assert_allclose(attention.attention_scaling, arrays["attention_scaling"], rtol=1e-6)


def test_yarn_takes_its_factor_as_stock_transformers_does_not_as_the_fork(official, expected):
    """With max_position_embeddings 512 and factor 4 the fork scales by 512/32 = 16; stock
    transformers, and we, by 4.
    """
    override = json.loads((official / "repo_scaled" / "rope_overrides.json").read_text())
    factor_4 = load_model(
        official / "repo_scaled", rope_scaling=override["yarn_maxpos_mismatch"]["rope_scaling"]
    )
    assert as_decoder(factor_4).layers[0].attention_scaling == pytest.approx(0.1 * np.log(4) + 1)
    assert expected("repo_scaled", "expected_yarn_maxpos_mismatch")[
        "attention_scaling"
    ] == pytest.approx(0.1 * np.log(16) + 1)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_positions_mixed_with_the_index(share, official, expected):
    arrays = expected("repo_scaled")
    model = load_model(official / "repo_scaled")
    mix_with_index(as_decoder(model), share)
    with torch.no_grad():
        logits = model(torch.as_tensor(arrays["input_ids"])).logits
    assert_allclose(logits, arrays[f"logits_pdrop{share}"], atol=2e-4)


def test_generation_gives_the_original_tokens(official, expected):
    arrays = expected("repo_mha")
    model = load_model(official / "repo_mha")
    prompt = torch.as_tensor(arrays["greedy_ids"][:, :20])
    for use_cache in (True, False):
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            use_cache=use_cache,
            eos_token_id=None,
        )
        np.testing.assert_array_equal(out, arrays["greedy_ids"])


def test_attentions_are_the_original_codes(official, expected):
    arrays = expected("repo_mha")
    bridge = ri.load(official / "repo_mha")
    _, cache = bridge.run_with_cache(
        torch.as_tensor(arrays["input_ids"]),
        names_filter=lambda hook: hook.endswith("hook_pattern"),
    )
    for layer in range(6):
        assert_allclose(
            cache[f"blocks.{layer}.attn.hook_pattern"].detach(),
            arrays["attentions"][layer],
            atol=1e-4,
        )
