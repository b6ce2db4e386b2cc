"""Attention inputs for the tests: from the authors' arrays, and random ones of every shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from places import OFFICIAL

from repo_interp.inputs import AttentionInputs
from repo_interp.positions.contextual import ContextualPositions, InterpolatedEmbedding
from repo_interp.positions.layouts import LEARNED


def official_inputs(
    name: str, layer: int, variant: str = "expected", dtype: torch.dtype = torch.float64
) -> AttentionInputs:
    """One layer of an official checkpoint, as its original code computed it."""
    arrays = np.load(OFFICIAL / name / f"{variant}.npz")
    queries = torch.as_tensor(arrays["q_prerot"][layer], dtype=dtype)
    repo_layers = arrays["repo_layers"].tolist()
    batch, _, tokens, d_head = queries.shape
    if layer in repo_layers:
        scheme, positions = (
            "repo",
            torch.as_tensor(arrays["pred_indices"][repo_layers.index(layer)], dtype=dtype),
        )
    else:
        scheme, positions = "rope", torch.arange(tokens, dtype=dtype).expand(batch, 1, -1)
    return AttentionInputs(
        layer=layer,
        scheme=scheme,
        learned=scheme in LEARNED,
        queries=queries,
        keys=torch.as_tensor(arrays["k_prerot"][layer], dtype=dtype),
        positions=positions,
        frequencies=torch.as_tensor(arrays["inv_freq"], dtype=dtype),
        attention_scaling=float(arrays["attention_scaling"]),
        logit_scale=d_head**-0.5,
        valid=torch.ones(batch, tokens, dtype=torch.bool),
        prompts=torch.arange(batch),
    )


def random_inputs(
    prompts: int = 2,
    heads: int = 4,
    kv_heads: int = 4,
    tokens: int = 24,
    d_head: int = 8,
    position_rows: int | None = None,
    scheme: str = "repo",
    valid: torch.Tensor | None = None,
    window: int | None = None,
    layer: int = 0,
    seed: int = 0,
    first_prompt: int = 0,
    dtype: torch.dtype = torch.float64,
) -> AttentionInputs:
    """Random queries, keys and learned positions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    positions = (
        None if scheme == "nope" else 10 * normal(prompts, position_rows or kv_heads, tokens)
    )
    residual = torch.randn(
        *(prompts, tokens, 6), generator=torch.Generator().manual_seed(seed + 1000)
    ).to(dtype)
    values = torch.randn(
        *(prompts, kv_heads, tokens, 5), generator=torch.Generator().manual_seed(seed + 2000)
    ).to(dtype)
    return AttentionInputs(
        layer=layer,
        scheme=scheme,
        learned=scheme in LEARNED,
        read_residual=lambda: residual,
        read_values=lambda: values,
        queries=normal(prompts, heads, tokens, d_head),
        keys=normal(prompts, kv_heads, tokens, d_head),
        positions=positions,
        frequencies=None
        if scheme == "nope"
        else (100.0 ** (-torch.arange(d_head // 2, dtype=torch.float64) / (d_head // 2))).to(dtype),
        attention_scaling=1.0,
        logit_scale=d_head**-0.5,
        valid=torch.ones(prompts, tokens, dtype=torch.bool) if valid is None else valid,
        prompts=torch.arange(first_prompt, first_prompt + prompts),
        window=window,
        tokens=torch.randint(3, 12, (prompts, tokens), generator=generator),
    )


def with_holes(inputs: AttentionInputs) -> AttentionInputs:
    """Two prompts with padding on the right, on the left, and a token left out; NaN there."""
    tokens = inputs.valid.shape[1]
    valid = torch.ones(inputs.valid.shape, dtype=torch.bool)
    valid[0, tokens - 4 :] = valid[1, :5] = valid[1, tokens // 2] = False
    hidden = ~valid[:, None, :, None]
    return replace(
        inputs,
        valid=valid,
        queries=inputs.queries.masked_fill(hidden, torch.nan),
        keys=inputs.keys.masked_fill(hidden, torch.nan),
        positions=None
        if inputs.positions is None
        else inputs.positions.masked_fill(hidden[..., 0], torch.nan),
    )


devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
        ),
    ],
)


def on(inputs: AttentionInputs, device: str) -> AttentionInputs:
    """The same inputs on a device."""
    tensors = ("queries", "keys", "positions", "frequencies", "valid", "prompts", "tokens")
    return replace(
        inputs,
        **{
            name: value.to(device)
            for name in tensors
            if (value := getattr(inputs, name)) is not None
        },
        read_values=inputs.read_values and (lambda: inputs.values.to(device)),
    )


def cope_inputs(p_max=9, weight=None, queries=None, gate_features=None, **shape):
    """Random inputs of a CoPE layer with gates of its keys, or of `gate_features`."""
    shape = {"kv_heads": 2, **shape}
    inputs = random_inputs(scheme="nope", **shape)
    inputs = replace(inputs, scheme="cope", queries=inputs.queries if queries is None else queries)
    table = InterpolatedEmbedding(p_max, inputs.queries.shape[-1]).double()
    generator = torch.Generator().manual_seed(5)
    table.weight.data = (
        torch.randn(table.weight.shape, generator=generator).double() if weight is None else weight
    )
    scheme = ContextualPositions(table, "values")
    features = inputs.keys if gate_features is None else gate_features
    index, visible = torch.arange(inputs.valid.shape[1])[None], inputs.visible

    @torch.no_grad()
    def position_logits(rows):
        return scheme(
            inputs.queries[:, :, rows],
            inputs.keys,
            index,
            index,
            visible(rows)[:, None],
            inputs.logit_scale,
            features,
        )

    return replace(
        inputs,
        gate_features=features,
        largest_position=table.maximum,
        position_logits=position_logits,
    )


PADDED = torch.ones(2, 24, dtype=torch.bool)
PADDED[0, 17:] = False
LEFT = torch.ones(2, 24, dtype=torch.bool)
LEFT[1, :9] = False
CASES = {
    "every head its key": {},
    "shared keys": {"kv_heads": 2},
    "positions a head": {"kv_heads": 2, "position_rows": 4},
    "no positions": {"scheme": "nope"},
    "padding on the right": {"valid": PADDED},
    "padding on the left": {"valid": LEFT},
    "window": {"window": 6},
    "window and padding": {"window": 6, "valid": LEFT, "kv_heads": 2},
}
