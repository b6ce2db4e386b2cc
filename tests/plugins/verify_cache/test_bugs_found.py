"""Bugs of public trackers, made again: docs/bugs_found.md says of each what is printed here."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import repo_interp as ri
from repo_interp.cli import main
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import observable
from repo_interp.positions.rotary import rotate

PAGE = Path(__file__).parents[3] / "docs" / "bugs_found.md"
TOKENS = torch.randint(3, 120, (40,), generator=torch.Generator().manual_seed(5))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


def llama(**rope):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=120,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10_000.0},
    )
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def keys_of(model, tokens, cache=None, **arguments):
    cache = DynamicCache() if cache is None else cache
    model(tokens[None], past_key_values=cache, use_cache=True, **arguments)
    return [layer.keys for layer in cache.layers]


def of_cache(model, keys):
    return ri.verify_cache(model, TOKENS, [(one, None) for one in keys]).attrs["findings"]


def of_tables(model, folder, theta, positions=None, tables=torch.float32, scale=1.0):
    """Findings about tables that a runtime makes of frequencies and positions."""
    index = torch.arange(400)
    at = (index if positions is None else positions).to(theta.dtype)
    angles = (at[:, None] * theta).to(torch.float32)
    both = {"cos": scale * angles.cos(), "sin": scale * angles.sin()}
    np.savez(folder / "t.npz", **{name: part.to(tables).float() for name, part in both.items()})
    return ri.verify(model, folder / "t.npz").attrs["findings"]


def joined_caches(folder):
    model = llama()
    parts = [keys_of(model, part) for part in TOKENS.split(20)]
    return of_cache(model, [torch.cat(both, 2) for both in zip(*parts, strict=True)])


def turned_again(folder):
    model = llama()
    theta = as_decoder(observable(model)).by_layer[0].frequencies
    keys = keys_of(model, TOKENS)
    return of_cache(model, [rotate(one, torch.arange(40.0), theta) for one in keys])


def offset_of_kept_rows(folder):
    model, cache = llama(), DynamicCache()
    keys_of(model, TOKENS[:24], cache)
    kept = torch.cat([torch.arange(4), torch.arange(12, 24)])
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    at = torch.arange(16, 32)[None]
    return of_cache(model, keys_of(model, TOKENS[24:], cache, position_ids=at))


def scaling_after_loading(folder):
    model = llama()
    model.config.rope_parameters = dict(YARN)
    return ri.verify(model).attrs["findings"]


def theta_of_the_default(folder):
    return of_tables(llama(**LLAMA3), folder, llama().model.rotary_emb.inv_freq)


def factor_of_one(folder):
    model = llama(**YARN)
    return of_tables(model, folder, model.model.rotary_emb.inv_freq)


def rounded_frequencies(folder):
    model = llama()
    theta = model.model.rotary_emb.inv_freq.bfloat16().float()
    return of_tables(model, folder, theta)


def rounded_positions(folder):
    model = llama()
    theta = model.model.rotary_emb.inv_freq
    positions = torch.arange(400).bfloat16().float()
    return of_tables(model, folder, theta, positions, torch.bfloat16)


CASES = {
    "MemTensor/MemOS/issues/2315": joined_caches,
    "NeuraLegion/shainet/pull/110": turned_again,
    "rajveer43/VeloxQuant-MLX/issues/389": offset_of_kept_rows,
    "MakazhanAlpamys/Soup/issues/793": scaling_after_loading,
    "Open-Athena/MarinFold/pull/184": theta_of_the_default,
    "turboderp-org/exllamav3/issues/259": factor_of_one,
    "sgl-project/sglang-jax/issues/1472": rounded_frequencies,
    "huggingface/candle/pull/3520": rounded_positions,
}


@pytest.mark.parametrize("thread", CASES)
def test_a_bug_is_found_as_the_page_says(thread, tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    _, _, rest = page.partition(f"https://github.com/{thread}")
    section = rest.partition("\n## ")[0]
    first = CASES[thread](tmp_path).splitlines()[0]
    assert first and f"\n{first}\n" in section, first


def test_sound_ones_have_no_finding(tmp_path):
    model = llama()
    assert of_cache(model, keys_of(model, TOKENS)) == ""
    assert of_tables(model, tmp_path, model.model.rotary_emb.inv_freq) == ""
    for rope in (LLAMA3, YARN):
        scaled = llama(**rope)
        rotary = scaled.model.rotary_emb
        found = of_tables(scaled, tmp_path, rotary.inv_freq, scale=rotary.attention_scaling)
        assert found == "" and ri.verify(scaled).attrs["findings"] == ""


def test_the_command_finds_them_too(tmp_path, capsys):
    llama(**YARN).save_pretrained(tmp_path / "model")
    factor_of_one(tmp_path)
    assert main(["verify", str(tmp_path / "model"), str(tmp_path / "t.npz")]) == 1
    assert "lengthened by 1.139 (attention factor)" in " ".join(capsys.readouterr().out.split())
