"""The direct path: what heads add to a logit is what attention adds to the residual stream, read by
the unembedding, in every family.
"""

from __future__ import annotations

import pytest
import torch
from families import tiny
from hooks import hooks_of
from torch import nn
from transformers import AutoModelForCausalLM

import repo_interp as ri
from benchmarks.tiny_models import small_configuration, small_model
from repo_interp.models.capture import capture
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import with_layout
from repo_interp.plugins.heads.view import atlas_table
from repo_interp.plugins.paths.direct_path import direct_path, inner
from repo_interp.positions.rotary import expand_heads
from repo_interp.tasks.prompt import Prompt

ROWS = torch.tensor([3, 9])
ANSWERS = torch.tensor([7, 20])


FAMILIES = {
    "llama": ("self_attn", "norm", {}),
    "gemma2": ("post_attention_layernorm", "norm", {}),
    "gpt_neox": ("attention", "final_layer_norm", {}),
    "gpt2": ("attn", "ln_f", {}),
    "opt": ("self_attn", "decoder.final_layer_norm", {}),
    "glm4": ("post_self_attn_layernorm", "norm", {}),
    "cohere": ("self_attn", "norm", {}),
    "deepseek_v3": ("self_attn", "norm", {}),
    "qwen3_next": ("self_attn", "norm", {}),
    "granite": (
        "self_attn",
        "norm",
        {"residual_multiplier": 0.25, "logits_scaling": 8.0, "attention_multiplier": 0.3},
    ),
}
"""Families with their norms, gates and factors: what attention adds, the last norm, and factors of
the configuration.
"""


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_contributions_of_all_heads_and_keys_are_those_of_attention_through_norms_gates_and_factors(
    family,
):
    """Against a derivative: how logits answer when what attention adds, but its bias, grows behind
    a frozen last norm.
    """
    part, last, factors = FAMILIES[family]
    torch.manual_seed(0)
    config = small_configuration(family)
    for name, value in factors.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name or "bias" in name:
            parameter.add_(0.2 * torch.randn_like(parameter))
    model = with_layout(model, None)
    before = hooks_of(model)
    tokens, moved = torch.randint(3, 60, (1, 12)), {}

    def receive(inputs):
        values = expand_heads(path.values.pop(inputs.layer), inputs.heads)[0]
        moved[inputs.layer] = (inputs.pattern(ROWS)[0].to(values.dtype) @ values).transpose(0, 1)

    with direct_path(as_decoder(model)) as path:
        capture(as_decoder(model), tokens, tokens > 0, torch.zeros(1, dtype=torch.long), receive)
        found = {
            layer: path.contributions(layer, values, ROWS, ANSWERS)
            for layer, values in moved.items()
        }
    decoder = as_decoder(model)
    assert hooks_of(model) == before and list(found) == list(decoder.by_layer)
    norm, kept = decoder.stack.get_submodule(last), {}
    handles = [norm.register_forward_hook(lambda module, given, out: kept.update(last=given[0]))]
    for layer in found:
        handles.append(
            decoder.blocks[layer]
            .get_submodule(part)
            .register_forward_hook(
                lambda module, given, out, layer=layer: kept.update(
                    {layer: out[0] if isinstance(out, tuple) else out}
                )
            )
        )
    decoder.stack(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    hidden = kept["last"]
    centers = isinstance(norm, nn.LayerNorm) or "cohere" in family

    def centred(vectors):
        return vectors - vectors.mean(-1, keepdim=True) if centers else vectors

    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", 1e-5))
    frozen = torch.rsqrt(centred(hidden).square().mean(-1, keepdim=True) + eps)
    signs = torch.tensor([1.0, -1.0]).repeat(hidden.shape[-1] // 2)
    gain = (norm(1e4 * signs[None, None]) - norm(-1e4 * signs[None, None])) / 2 * signs
    unembedding = inner(model.get_output_embeddings()).weight.T
    factor = getattr(model.config, "logit_scale", 1.0) / factors.get("logits_scaling", 1.0)
    for layer, contributions in found.items():
        bias = getattr(inner(decoder.by_layer[layer].output_projection), "bias", None)
        written = (kept[layer][0] - (0 if bias is None else bias))[ROWS]
        written = centred(written * factors.get("residual_multiplier", 1.0))
        logits = (written * frozen[0, ROWS] * gain[0, 0]) @ unembedding * factor
        expected = logits[torch.arange(2), ANSWERS] - logits.mean(-1)
        torch.testing.assert_close(contributions.sum(-1), expected, rtol=2e-3, atol=2e-4)


def test_norms_and_factors_are_measured_in_one_pass():
    """Found: a pass per layer, for every prompt of an atlas."""
    model = ri.reposition(tiny("llama"), "rope")
    passes: list[int] = []
    handle = as_decoder(model).stack.register_forward_hook(lambda *given: passes.append(1))
    with direct_path(as_decoder(model)):
        assert len(passes) == 1
    handle.remove()


@pytest.mark.parametrize("family", ["inkling_text", "gemma3n_text", "longcat_flash", "falcon_h1"])
def test_layers_whose_sum_with_attention_is_not_found_have_no_direct_path(family):
    """A convolution, several streams, a second attention, a state space model beside: contributions
    are left out.
    """
    model = with_layout(small_model(family), None)
    prompt = Prompt(tokens=tuple(range(3, 15)), spans={"needle": (4,)}, generated=(10, 11))
    asked = [ri.experiments.Atlas(twins=1, sequences=1)]
    run = ri.analyze(model, [prompt], ["positions"], experiments=asked)
    atlas = run["atlas"].to_dataset()
    with direct_path(as_decoder(model)) as path:
        without = sorted(set(range(as_decoder(model).layer_count)) - set(path.layers))
    assert without and atlas["source_mass"].notnull().all()
    if "contribution" in atlas:
        missing = atlas["contribution"].isnull().all("head")
        assert atlas["layer"].values[missing.values].tolist() == without
        assert not atlas["contribution"].isnull().any("head")[~missing].any()
    note = f"Contributions are missing in layers {', '.join(map(str, without))}:"
    assert note in atlas_table(run).note
