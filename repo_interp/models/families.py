"""Which Hugging Face decoders can be repositioned, how each rotates by the token index, and how each of its layers attends.

A decoder qualifies when its attention is q_proj, k_proj, v_proj, o_proj, an optional QK-norm, half-split rotation of whole heads,
softmax: then `RepositionedAttention` computes the same numbers. Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from repo_interp.errors import InputError

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""`model_type` of every decoder that can be repositioned, with its class (and TransformerLens architecture)."""

_STATIC_ROTATIONS = {"default", "linear", "yarn", "llama3"}
_RECORD = "repo_interp_record"


def require_family(config: PretrainedConfig) -> None:
    """Raise InputError when decoders of this configuration cannot be repositioned."""
    if config.model_type not in FAMILIES:
        raise InputError(
            f"decoders of type {config.model_type!r} cannot be repositioned; these can: {', '.join(sorted(FAMILIES))}"
        )
    if getattr(config, "rope_parameters", None) is None:
        raise InputError(f"the {config.model_type} configuration has no rope_parameters, so nothing says how to rotate")
    if getattr(config, "use_bidirectional_attention", False):
        raise InputError(
            f"this {config.model_type} decoder attends to later tokens (use_bidirectional_attention); wanted a causal one"
        )
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type", "default")
        if kind not in (*_STATIC_ROTATIONS, *ROPE_INIT_FUNCTIONS):
            raise InputError(f"there is no rope_type {kind!r}; wanted one of {', '.join(sorted(_STATIC_ROTATIONS))}")
        if kind not in _STATIC_ROTATIONS:
            raise InputError(
                f"rope_type {kind!r} changes its frequencies with the prompt's length, which measures could not follow; "
                f"wanted one of {', '.join(sorted(_STATIC_ROTATIONS))}"
            )
        share = parameters.get("partial_rotary_factor", 1.0)
        if share != 1.0:
            raise InputError(f"only {share} of each head is rotated (partial_rotary_factor); wanted whole heads")


def native_layout(config: PretrainedConfig) -> tuple[str, ...]:
    """The schemes of the stock decoder: RoPE, but for layers whose modules do not rotate (SmolLM3's `no_rope_layers`)."""
    named = getattr(config, "no_rope_layers", None) if config.model_type == "smollm3" else None
    return tuple("rope" if each else "nope" for each in named) if named else ("rope",) * config.num_hidden_layers


def training_length(config: PretrainedConfig) -> int:
    """Longest prompts the model was trained on, in tokens: before any scaling of its frequencies."""
    lengths = [p.get("original_max_position_embeddings") for p in _rope_parameters(config)]
    known = [length for length in lengths if length]
    return int(min(known)) if known else int(config.max_position_embeddings)


def _rope_parameters(config: PretrainedConfig) -> list[dict]:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return by_layer_type or [parameters]
