"""Tiny random decoders of every family that can be repositioned, for the tests."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

import repo_interp as ri
from repo_interp.models.decoder import as_decoder
from repo_interp.positions.layouts import SCHEMES

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 8}

CONFIGS = {
    "llama": lambda: LlamaConfig(**TINY),
    "llama_mha": lambda: LlamaConfig(**TINY | {"num_key_value_heads": 4}),
    "olmo2": lambda: Olmo2Config(**TINY),
    "olmo3": lambda: Olmo3Config(
        **TINY,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2": lambda: Qwen2Config(**TINY),
    "qwen3": lambda: Qwen3Config(**TINY, **HEAD),
    "mistral": lambda: MistralConfig(**TINY, sliding_window=8),
    "gemma": lambda: GemmaConfig(**TINY, **HEAD),
    "gemma2": lambda: Gemma2Config(**TINY, **HEAD, sliding_window=8, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(**TINY, **HEAD, sliding_window=8, query_pre_attn_scalar=8),
    "smollm3": lambda: SmolLM3Config(**TINY),
}
TOKENS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
"""Two prompts of the tiny models."""


def tiny(family: str) -> PreTrainedModel:
    """A random decoder of `family` whose weights are large enough that positions matter."""
    config = CONFIGS[family]()
    config.initializer_range = 0.2
    return AutoModelForCausalLM.from_config(config).eval()


VARIANTS = {scheme: {} for scheme in SCHEMES} | {
    "hope_ab1": {"training_length": 400},  # so that a component lies in the narrow activated band
    "cope separate keys": {"gates": "separate_keys"},
    "cope values": {"gates": "values"},
    "cope open": {"gates": "open", "p_max": 4},
    "cope one map": {"map": "model"},
    "cope p_max": {"p_max": 4},
    "cope_rope separate keys": {"gates": "separate_keys"},
    "repo head": {"assignment": "head"},
    "repo layer": {"assignment": "layer"},
    "repo@1": {},
    "rope,nope,repo": {},
}


def repositioned(variant, family="llama"):
    """A decoder in which positions matter: what schemes start at zero is drawn at random."""
    # High frequencies must exist below the training length of 128 for HoPE to keep some.
    model = ri.reposition(tiny(family), variant.split()[0], **VARIANTS.get(variant, {}))
    with torch.no_grad():
        for module in as_decoder(model).scheme_modules:
            for parameter in module.parameters():
                if bool((parameter == 0).any()):
                    parameter.normal_(std=0.5)
    return model


def model_for(task, scheme="repo@1"):
    """A tiny decoder with the tokens and the training length of a task."""
    torch.manual_seed(0)
    stock = tiny("llama")
    stock.resize_token_embeddings(task.vocabulary_size, mean_resizing=False)
    stock.config.max_position_embeddings = task.training_length
    return ri.reposition(stock, scheme)


def bridge_for(task, scheme="repo@1"):
    return ri.bridge(model_for(task, scheme))
