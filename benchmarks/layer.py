"""One decoder layer of OLMo-2-1B's shape with random weights: its own forward pass, and its attention inputs.

Width 2048, 16 heads of 128, MLP 8192, SDPA. Positions are learned ones, one row per head: drifting and jumping. The hidden states have a
mean as large as their spread, as real ones do. Spans are those of a needle prompt with 64 generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Olmo2Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer, Olmo2RotaryEmbedding

from repo_interp.inputs import AttentionInputs, Spans


class Layer:
    """A layer and hidden states of one prompt of `tokens` tokens."""

    def __init__(self, tokens: int, heads: int = 16, d_head: int = 128) -> None:
        width = heads * d_head
        config = Olmo2Config(
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=4 * width,
            num_hidden_layers=1,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        )
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        self._layer = Olmo2DecoderLayer(config, layer_idx=0).eval()
        self._rotary = Olmo2RotaryEmbedding(config)
        self._hidden = torch.randn(1, tokens, width) + torch.randn(width)
        self._heads, self._d_head = heads, d_head

    def forward(self) -> Callable[[], Tensor]:
        """The layer's own forward pass, as a call."""
        positions = torch.arange(self._hidden.shape[1])[None]
        tables = self._rotary(self._hidden, positions)
        return lambda: self._layer(self._hidden, position_embeddings=tables, position_ids=positions)

    def inputs(self) -> AttentionInputs:
        """What the layer's attention computes with, at learned positions."""
        attention, tokens = self._layer.self_attn, self._hidden.shape[1]
        split = (1, tokens, self._heads, self._d_head)
        drift = 0.3 * torch.randn(1, self._heads, tokens).cumsum(-1)
        return AttentionInputs(
            layer=0,
            scheme="repo",
            queries=attention.q_norm(attention.q_proj(self._hidden)).view(split).transpose(1, 2),
            keys=attention.k_norm(attention.k_proj(self._hidden)).view(split).transpose(1, 2),
            positions=drift + 4 * torch.randn(1, self._heads, tokens),
            frequencies=self._rotary.inv_freq,
            attention_scaling=1.0,
            logit_scale=self._d_head**-0.5,
            valid=torch.ones(1, tokens, dtype=torch.bool),
            prompts=torch.arange(1),
        )

    def spans(self) -> Spans:
        """A needle of 32 tokens, a query of 32, 64 generated tokens, and the rest."""
        spans = {name: torch.zeros(1, self._hidden.shape[1], dtype=torch.bool) for name in ("needle", "query", "generated")}
        third = self._hidden.shape[1] // 3
        spans["needle"][:, third : third + 32] = True
        spans["query"][:, -96:-64] = True
        spans["generated"][:, -64:] = True
        return spans | {"rest": ~(spans["needle"] | spans["query"] | spans["generated"])}
