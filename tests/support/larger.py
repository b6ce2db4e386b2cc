"""Tiny random models that see images or hear sound, around a decoder of text, of the installed
transformers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.tiny_models import small_configuration

FAMILIES = (
    *("aria", "cohere_compass", "deepseek_vl", "exaone4_5", "fuyu"),
    *("gemma3", "gemma4", "granite_speech", "idefics2", "internvl"),
    *("kimi_k25", "lfm2_vl", "llama4", "llava", "minimax_m3_vl"),
    *("qwen2_audio", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "voxtral"),
)
"""Those whose weights stand under different names, or whose text parts differ."""
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
}
_SIZES |= {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "depth": 2,
    "embed_dim": 32,
    "image_size": 32,
    "patch_size": 8,
    "vocab_size": 64,
}
_SIZES |= {
    "mm_tokens_per_image": 4,
    "encoder_layers": 2,
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "d_model": 32,
}
_SIZES |= {
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "mm_hidden_size": 32,
}
_SIZES |= {
    "projection_dim": 32,
    "output_hidden_size": 64,
    "num_channels": 3,
    "vision_output_dim": 32,
    "num_global_layers": 1,
}
_SIZES |= {"projector_input_dim": 32, "projector_output_dim": 32, "projector_hidden_size": 32}


def small_larger(family: str, **options: Any) -> Any:
    """A tiny random model of `family`; `options` of its configuration."""
    kind = CONFIG_MAPPING[family]
    default = kind()
    text = small_configuration(default.text_config.model_type)
    text.initializer_range = 0.15
    parts: dict[str, Any] = {"text_config": text}
    for name in kind.sub_configs:
        part = copy.deepcopy(getattr(default, name, None))
        if name == "text_config" or part is None:
            continue
        sizes = {
            size: value
            for size, value in _SIZES.items()
            if not isinstance(getattr(part, size, []), list | tuple)
        }
        for size, value in sizes.items():
            setattr(part, size, value)
        parts[name] = part
    tokens = (
        f"{what}_token_{end}" for what in ("image", "video", "audio") for end in ("id", "index")
    )
    parts |= {name: 110 + place for place, name in enumerate(tokens) if hasattr(default, name)}
    torch.manual_seed(0)
    model: Any = AutoModelForMultimodalLM.from_config(kind(**parts | options), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()
