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


@dataclass(frozen=True)
class Rotation:
    """What a decoder's own rotary embedding uses in one layer."""

    frequencies: Tensor
    """[d_head/2], float32, radians per token."""
    attention_scaling: float
    unscaled: Tensor
    """The frequencies before position interpolation, YaRN or the like: rope_theta^(-2r / d_head)."""


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


def rotations(model: PreTrainedModel) -> tuple[Rotation, ...]:
    """The rotation of every layer, in float32 whatever the model's dtype: computed anew from the configuration."""
    config = model.config
    # Constructing the rotary module again avoids buffers that `.to(bfloat16)` has rounded.
    rotary: nn.Module = type(model.model.rotary_emb)(config)
    return tuple(_layer_rotation(rotary, config, layer) for layer in range(config.num_hidden_layers))


@dataclass(frozen=True)
class Kernel:
    """The arguments that a stock attention module gives the function that attends: what the layer does, whatever its configuration says."""

    scaling: float
    """Factor of the dot products of queries and keys."""
    window: int | None
    """Query i sees keys i - window + 1 .. i; None: all earlier keys."""
    softcap: float | None
    """Of `soft_capped`, for the scaled logits; None: they stay."""


def kernel(stock: Any) -> Kernel:
    """The kernel arguments of a stock attention module, taken from a pass of one token through it.

    A configuration may name a window or a soft cap that its family ignores (Llama, Gemma 3), so it is not read here.
    """
    arguments, _ = _passed(stock)
    return Kernel(arguments["scaling"], arguments.get("sliding_window"), arguments.get("softcap"))


class _Tables:
    """The cosines and sines that a layer is given; `taken` once it reads them."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.taken = table, False

    def __iter__(self) -> Iterator[Tensor]:
        self.taken = True
        return iter((self.table, self.table))


def _passed(stock: Any) -> tuple[dict[str, Any], bool]:
    """What a stock attention module gives the function that attends, for one token, and whether it rotates queries and keys."""
    arguments: dict[str, Any] = {}

    def record(module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **keywords: Any) -> tuple:
        arguments.update(keywords)
        return queries.transpose(1, 2), None

    config, weight = stock.config, stock.q_proj.weight
    token = weight.new_zeros(1, 1, config.hidden_size)
    tables = _Tables(weight.new_zeros(1, 1, stock.head_dim))
    implementation = config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[_RECORD] = record
    config._attn_implementation = _RECORD
    try:
        with torch.no_grad():
            stock(token, position_embeddings=tables, attention_mask=None)
    finally:
        config._attn_implementation = implementation
        del ALL_ATTENTION_FUNCTIONS[_RECORD]
    return arguments, tables.taken


def native_layout(config: PretrainedConfig) -> tuple[str, ...]:
    """The schemes of the stock decoder: RoPE, but for layers whose modules do not rotate (SmolLM3's `no_rope_layers`)."""
    named = getattr(config, "no_rope_layers", None)
    return _native_layout(config.model_type, tuple(named)) if named else ("rope",) * config.num_hidden_layers


@cache
def _native_layout(family: str, no_rope_layers: tuple[int, ...]) -> tuple[str, ...]:
    """Which layers of a `family` rotate where its configuration has these `no_rope_layers`, which most families ignore."""
    config = AutoConfig.for_model(family, num_hidden_layers=len(no_rope_layers), no_rope_layers=list(no_rope_layers))
    with init_empty_weights():
        decoder = AutoModel.from_config(config)
    return tuple("rope" if _passed(layer.self_attn)[1] else "nope" for layer in decoder.layers)


def training_length(config: PretrainedConfig) -> int:
    """Longest prompts the model was trained on, in tokens: before any scaling of its frequencies."""
    lengths = [p.get("original_max_position_embeddings") for p in _rope_parameters(config)]
    known = [length for length in lengths if length]
    return int(min(known)) if known else int(config.max_position_embeddings)


def _rope_parameters(config: PretrainedConfig) -> list[dict]:
    parameters = config.rope_parameters
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return by_layer_type or [parameters]


def _layer_rotation(rotary: nn.Module, config: PretrainedConfig, layer: int) -> Rotation:
    kind = config.layer_types[layer] if getattr(config, "layer_types", None) else None
    prefix = f"{kind}_" if kind is not None and hasattr(rotary, f"{kind}_inv_freq") else ""
    frequencies = getattr(rotary, f"{prefix}inv_freq").detach().float()
    parameters = config.rope_parameters[kind] if prefix else config.rope_parameters
    exponents = torch.arange(len(frequencies), dtype=torch.float32) / len(frequencies)
    return Rotation(
        frequencies=frequencies,
        attention_scaling=float(getattr(rotary, f"{prefix}attention_scaling")),
        unscaled=1.0 / parameters["rope_theta"] ** exponents,
    )
