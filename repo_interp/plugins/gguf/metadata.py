"""The metadata of a GGUF file as a Hugging Face configuration, with llama.cpp's defaults.

    llama.block_count -> num_hidden_layers, llama.rope.scaling.{type, factor, ...} and
    rope_freqs.weight -> rope_parameters, ...

llama.cpp turns pair i by theta^(-2i/d) / (factors_i * scale): the factors are rope_freqs.weight,
which converters write for Llama 3.1 and later. Hugging Face has no list of factors, so the module
searches for the llama3 rule with the same factors, and refuses a file if there is none. It also
refuses unknown keys of the architecture, which might change how the model attends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from repo_interp.checkpoint_files.architectures import class_name
from repo_interp.checkpoint_files.fields import Fields, Theta
from repo_interp.errors import InputError
from repo_interp.plugins.gguf.header import Header
from repo_interp.plugins.gguf.tokenizer import special_ids, split_rule
from repo_interp.storage.records import validate
from repo_interp.values import PositiveOrZero, checked, shortened

_REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_TOKENS = ("bos", "eos", "pad", "unk")


@dataclass(frozen=True)
class Architecture:
    """Storage and computation in llama.cpp of decoders with one `general.architecture`."""

    model_type: str
    """`model_type` in transformers."""
    interleaved: bool = False
    """Whether query and key maps have the two rows of a rotary pair next to each other; in Hugging
    Face they are half a head apart.
    """
    offset_norms: bool = False
    """Whether norms are stored as 1 + weight."""
    further: Mapping[str, str] = field(default_factory=dict)
    """Keys that only this architecture has, with their names in the configuration."""
    full_every: int = 0
    """Period of layers that attend to all tokens, while others have a window; 0: no windows.
    """
    wide_layers: int = 0
    """Number of layers with which logits are scaled by width / heads, not by the length of a head.
    """
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a block that only some architectures have, with their axes: width D, queries Q,
    keys K, feed-forward F, head H.
    """
    biases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Further tensors, by the option of the configuration that adds them."""


_QUERIES_KEYS_VALUES = {"attn_q.bias": "Q", "attn_k.bias": "K", "attn_v.bias": "K"}
_BIASES = {"attention_bias": _QUERIES_KEYS_VALUES | {"attn_output.bias": "D"}}
_MLP_BIASES = {"mlp_bias": {"ffn_gate.bias": "F", "ffn_up.bias": "F", "ffn_down.bias": "D"}}
_HEAD_NORMS = {"attn_q_norm.weight": "H", "attn_k_norm.weight": "H"}
_NORMS_BEHIND = {"post_attention_norm.weight": "D", "post_ffw_norm.weight": "D"}
# Gemma's names for caps and windows, which the other architectures do not have
_CAPPED = {
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True, biases=_BIASES | _MLP_BIASES),
    "qwen2": Architecture("qwen2", tensors=_QUERIES_KEYS_VALUES),
    "qwen3": Architecture("qwen3", tensors=_HEAD_NORMS, biases=_BIASES),
    "gemma2": Architecture(
        "gemma2",
        offset_norms=True,
        further=_CAPPED | {"attn_logit_softcapping": "attn_logit_softcapping"},
        full_every=2,
        # The 27B models scale their logits differently; only their number of layers identifies
        # them.
        wide_layers=46,
        tensors=_NORMS_BEHIND,
        biases=_BIASES,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        offset_norms=True,
        further=_CAPPED,
        full_every=6,
        wide_layers=62,
        tensors=_HEAD_NORMS | _NORMS_BEHIND,
        biases=_BIASES,
    ),
}
"""By `general.architecture`."""


def architecture_of(metadata: Mapping[str, Any], file: str) -> Architecture:
    """Find the architecture that a GGUF file names.

    Args:
        metadata: Metadata of the file.
        file: Name of the file, for errors.

    Returns:
        The architecture.

    Raises:
        InputError: The architecture is not supported.
    """
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError(
            f"{file} holds a model of architecture {shortened(repr(name))}; wanted one that "
            f"can be repositioned: {known}"
        )
    return ARCHITECTURES[name]


def keys_of(header: Header) -> dict[str, Any]:
    """Translate the metadata of a GGUF file to keys of config.json, without rotary factors.

    Args:
        header: Header of the file.

    Returns:
        Keys of config.json; every number is checked.

    Raises:
        InputError: A key is missing or out of range, or the model attends differently from the
            Hugging Face decoder.
    """
    file, metadata, shapes = str(header.file), header.metadata, header.shapes
    architecture, prefix = architecture_of(metadata, file), f"{metadata['general.architecture']}."
    stated = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    kinds = get_type_hints(Fields, include_extras=True)

    # Popped: keys that remain at the end are unknown and may be refused.
    def take(key: str, default: Any, name: str) -> Any:
        return checked(stated.pop(key, default), kinds.get(name, float), f"{file}: {prefix}{key}")

    lacking = [key for key in _REQUIRED if key not in stated]
    if lacking:
        raise InputError(
            f"{file} lacks {prefix}{lacking[0]}; wanted a whole model as llama.cpp's "
            "converters write it"
        )
    raw: dict[str, Any] = {name: take(key, None, name) for key, name in _REQUIRED.items()}
    layers, width, heads = raw["num_hidden_layers"], raw["hidden_size"], raw["num_attention_heads"]
    raw["num_key_value_heads"] = take("attention.head_count_kv", heads, "num_key_value_heads")
    # llama.cpp's default where a file states no length of a head
    head = raw["head_dim"] = take("attention.key_length", max(2, width // heads), "head_dim")
    tokens = metadata.get("tokenizer.ggml.tokens")
    words = take("vocab_size", len(tokens) if isinstance(tokens, range) else None, "vocab_size")
    # The list of tokens takes precedence; vocab_size may be absent.
    raw["vocab_size"] = len(tokens) if isinstance(tokens, range) else words
    for key, name in architecture.further.items():
        if key in stated:
            raw[name] = take(key, None, name)
    split_rule(header)  # refuses an unknown tokenizer
    special = special_ids(header)
    raw |= {f"{name}_token_id": special.get(name) for name in _TOKENS}
    # llama.cpp stores a tied unembedding as no tensor at all.
    raw["tie_word_embeddings"] = "output.weight" not in shapes
    # GGUF has no key for biases, so they are inferred from the tensors of the first layer.
    biased = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    raw |= {name: True for name, tensor in biased.items() if tensor in shapes}
    scale = head
    if architecture.full_every:
        # Gemma scales logits by a number of the configuration, not by the length of a head.
        scale = raw["query_pre_attn_scalar"] = (
            width // heads if layers == architecture.wide_layers else head
        )
        kinds_of_layers = ("sliding_attention", "full_attention")
        # True is 1: the last layer of every `full_every` attends to all tokens.
        raw["layer_types"] = [
            kinds_of_layers[(layer + 1) % architecture.full_every == 0] for layer in range(layers)
        ]
    raw["rope_parameters"] = _rotation(stated, prefix, raw, file)
    if architecture.model_type == "gemma3_text":
        if "sliding_window" not in raw:
            raise InputError(
                f"{file} lacks {prefix}attention.sliding_window; without one its layers "
                "would attend otherwise"
            )
        local = {
            "rope_type": "default",
            # llama.cpp's default for layers with a window, and Gemma 3's value
            "rope_theta": take("rope.freq_base_swa", 10000.0, "rope_theta"),
        }
        raw["rope_parameters"] = {
            "full_attention": raw["rope_parameters"],
            "sliding_attention": local,
        }
    windows = [kind == "sliding_attention" for kind in raw.get("layer_types", ())]
    # Values that the Hugging Face decoder uses anyway
    harmless = {
        "attention.value_length": (head,),
        "attention.causal": (True,),
        "attention.scale": (scale**-0.5,),
        "attention.sliding_window_pattern": (architecture.full_every, windows),
        "rope.dimension_count": (head,),
        "tensor_data_layout": ("Meta AI original pth",),
    }
    for key, value in stated.items():
        # 0, false or empty: an option that is off.
        if value and not any(_same(value, same) for same in harmless.get(key, ())):
            raise InputError(
                f"{file} says {prefix}{key} = {shortened(str(value))}, which the Hugging "
                "Face decoder does not follow; refused"
            )
    raw |= {
        "model_type": architecture.model_type,
        "dtype": "float32",
        "architectures": [class_name(architecture.model_type)],
    }
    # The same checks as for config.json, where these numbers go.
    validate(raw, Fields, file)
    return raw


def _rotation(
    stated: dict[str, Any], prefix: str, raw: Mapping[str, Any], file: str
) -> dict[str, Any]:
    """Translate the rotation, and remove its keys from `stated`; YaRN has llama.cpp's defaults."""

    def number(key: str, default: float, kind: Any = PositiveOrZero) -> float:
        return checked(stated.pop(f"rope.{key}", default), kind, f"{file}: {prefix}rope.{key}")

    # llama.cpp's defaults: linear scaling by no factor is none
    kind = stated.pop("rope.scaling.type", "linear")
    # The older key has the factor; the newer one takes precedence.
    older = number("scale_linear", 0.0)
    factor = number("scaling.factor", older) or 1.0
    stated.pop("rope.scaling.finetuned", None)  # llama.cpp prints it
    parameters = {"rope_type": "default", "rope_theta": number("freq_base", 10000.0, Theta)}
    if kind not in ("none", "linear", "yarn"):
        raise InputError(
            f"{file} says {prefix}rope.scaling.type = {shortened(str(kind))}; wanted none, "
            "linear or yarn"
        )
    # Both names multiply in llama.cpp.
    temperature = number("scaling.attn_factor", 1.0) * number("scaling.yarn_attn_factor", 1.0)
    if kind == "yarn":
        length = (
            stated.pop("rope.scaling.original_context_length", 0) or raw["max_position_embeddings"]
        )
        parameters |= {
            "beta_fast": number("scaling.yarn_beta_fast", 32.0),
            "beta_slow": number("scaling.yarn_beta_slow", 1.0),
        }
        parameters |= {
            "original_max_position_embeddings": length,
            # llama.cpp multiplies its factor by YaRN's 1 + 0.1 ln(s);
            # transformers takes the product.
            "attention_factor": temperature * (1 + 0.1 * math.log(factor)),
        }
        if (extended := number("scaling.yarn_ext_factor", 1.0)) != 1.0:
            # It mixes interpolated and plain frequencies, for which transformers has no option.
            raise InputError(
                f"{file} says {prefix}rope.scaling.yarn_ext_factor = {extended:g}; Hugging "
                "Face's YaRN knows 1 alone"
            )
    elif temperature != 1.0:
        raise InputError(
            f"{file} says {prefix}rope.scaling.attn_factor = {temperature:g}, which only "
            "YaRN can follow; refused"
        )
    if kind == "yarn" or (kind == "linear" and factor != 1.0):
        parameters |= {"rope_type": kind, "factor": factor}
    return parameters


def _same(value: Any, wanted: Any) -> bool:
    return (
        # Numbers were float32 in the file, so 0.1 there is not 0.1 here.
        math.isclose(value, wanted, rel_tol=1e-5)
        if isinstance(value, float) and isinstance(wanted, float)
        else value == wanted
    )
