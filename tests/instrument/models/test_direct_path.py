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
from benchmarks.families import small_configuration, small_model
from repo_interp.models.capture import capture
from repo_interp.models.decoder import as_decoder
from repo_interp.models.direct_path import direct_path, inner
from repo_interp.models.reposition import with_layout
from repo_interp.plots.views.atlas import atlas_table
from repo_interp.positions.rotary import expand_heads
from repo_interp.tasks.prompt import Prompt

ROWS = torch.tensor([3, 9])
ANSWERS = torch.tensor([7, 20])


def changed(config, factors):
    for name, value in factors.items():
        setattr(config, name, value)
    return config


FAMILIES = {
    **dict.fromkeys(
        ("llama", "qwen3"), (lambda layer: layer.self_attn, lambda decoder: decoder.norm, {})
    ),
    **dict.fromkeys(
        ("olmo2", "gemma2"),
        (lambda layer: layer.post_attention_layernorm, lambda decoder: decoder.norm, {}),
    ),
    "gpt_neox": (lambda layer: layer.attention, lambda decoder: decoder.final_layer_norm, {}),
    "gpt2": (lambda layer: layer.attn, lambda decoder: decoder.ln_f, {}),
    "opt": (lambda layer: layer.self_attn, lambda decoder: decoder.decoder.final_layer_norm, {}),
    "glm4": (lambda layer: layer.post_self_attn_layernorm, lambda decoder: decoder.norm, {}),
    "cohere": (lambda layer: layer.self_attn, lambda decoder: decoder.norm, {}),
    "deepseek_v3": (lambda layer: layer.self_attn, lambda decoder: decoder.norm, {}),
    "qwen3_next": (lambda layer: layer.self_attn, lambda decoder: decoder.norm, {}),
    "granite": (
        lambda layer: layer.self_attn,
        lambda decoder: decoder.norm,
        {"residual_multiplier": 0.25, "logits_scaling": 8.0, "attention_multiplier": 0.3},
    ),
}
"""Families with their norms, gates and factors: what attention adds, the last norm, and factors of
the configuration.
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_contributions_of_all_heads_and_keys_are_those_of_attention_through_norms_gates_and_factors(
    family,
):
    """Against a derivative: how logits answer when what attention adds, but its bias, grows behind
    a frozen last norm.
    """
    attended, last, factors = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(changed(small_configuration(family), factors)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(
                0.2 * torch.randn_like(parameter)
            ) if "norm" in name or "ln_" in name or "bias" in name else None
    model = with_layout(model, None)
    before = hooks_of(model)
    tokens, moved, added, kept = torch.randint(3, 60, (1, 12)), {}, {}, {}

    def receive(inputs):
        values = expand_heads(path.values.pop(inputs.layer), inputs.heads)[0]
        moved[inputs.layer] = (inputs.pattern(ROWS)[0].to(values.dtype) @ values).transpose(0, 1)

    with direct_path(model) as path:
        capture(
            model,
            tokens,
            torch.ones_like(tokens, dtype=torch.bool),
            torch.zeros(1, dtype=torch.long),
            receive,
        )
        found = {
            layer: path.contributions(layer, values, ROWS, ANSWERS)
            for layer, values in moved.items()
        }
    assert hooks_of(model) == before and set(found) == {
        attention.layer_idx for attention in as_decoder(model).layers
    }
    decoder, norm = as_decoder(model).stack, last(as_decoder(model).stack)
    handles = [
        norm.register_forward_hook(lambda module, given, output: kept.update(given=given[0]))
    ]
    for attention in as_decoder(model).layers:
        part = attended(as_decoder(model).blocks[attention.layer_idx])

        def keep(module, given, output, layer=attention.layer_idx):
            added[layer] = output

        handles.append(part.register_forward_hook(keep))
    with torch.no_grad():
        decoder(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    hidden = kept["given"].detach()
    centred = (
        hidden - hidden.mean(-1, keepdim=True)
        if isinstance(norm, nn.LayerNorm) or "cohere" in family
        else hidden
    )
    frozen = torch.rsqrt(
        centred.square().mean(-1, keepdim=True)
        + getattr(norm, "eps", getattr(norm, "variance_epsilon", 1e-5))
    )
    gain = norm(torch.tensor([[[1e4, -1e4] * (hidden.shape[-1] // 2)]])) - norm(
        torch.tensor([[[-1e4, 1e4] * (hidden.shape[-1] // 2)]])
    )
    gain = gain / 2 * torch.tensor([1.0, -1.0]).repeat(hidden.shape[-1] // 2)
    for layer, contributions in found.items():
        output = added[layer][0] if isinstance(added[layer], tuple) else added[layer]
        bias = getattr(
            inner(
                next(a for a in as_decoder(model).layers if a.layer_idx == layer).output_projection
            ),
            "bias",
            None,
        )
        written = (output[0] - (0 if bias is None else bias))[ROWS] * factors.get(
            "residual_multiplier", 1.0
        )
        if centred is not hidden:
            written = written - written.mean(-1, keepdim=True)
        logits = (written * frozen[0, ROWS] * gain[0, 0]) @ inner(
            model.get_output_embeddings()
        ).weight.T
        logits = (
            logits / factors.get("logits_scaling", 1.0) * getattr(model.config, "logit_scale", 1.0)
        )
        expected = logits[torch.arange(2), ANSWERS] - logits.mean(-1)
        torch.testing.assert_close(contributions.sum(-1), expected.detach(), rtol=2e-3, atol=2e-4)


def test_norms_and_factors_are_measured_in_one_pass():
    """Found: a pass per layer, for every prompt of an atlas."""
    model = ri.reposition(tiny("llama"), "rope")
    passes: list[int] = []
    handle = as_decoder(model).stack.register_forward_hook(lambda *given: passes.append(1))
    with direct_path(model):
        assert len(passes) == 1
    handle.remove()


@pytest.mark.parametrize(
    "family", ["inkling_text", "gemma3n_text", "jetmoe", "longcat_flash", "falcon_h1"]
)
def test_layers_whose_sum_with_attention_is_not_found_have_no_direct_path(family):
    """A convolution, several streams, experts that project, a second attention, a state space model
    beside: contributions are left out.
    """
    model = with_layout(small_model(family), None)
    prompt = Prompt(tokens=tuple(range(3, 15)), spans={"needle": (4,)}, generated=(10, 11))
    run = ri.analyze(
        ri.bridge(model),
        [prompt],
        ["positions"],
        experiments=[ri.experiments.Atlas(twins=1, sequences=1)],
    )
    atlas = run["atlas"].to_dataset()
    with direct_path(model) as path:
        without = set(range(as_decoder(model).layer_count)) - set(path.layers)
    assert without
    assert atlas["source_mass"].notnull().all()
    if "contribution" in atlas:
        missing = atlas["contribution"].isnull().all("head")
        assert set(atlas["layer"].values[missing.values]) == without
        assert not atlas["contribution"].isnull().any("head")[~missing].any()
    note = atlas_table(run).note
    assert f"Contributions are missing in layers {', '.join(map(str, sorted(without)))}:" in note
