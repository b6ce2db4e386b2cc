"""Load, save and identify a checkpoint, strictly.

Three formats, told apart by config.json: the released one (`pe_config`), ours (`position_layout`, model_type "repo_interp" so that no
other library can mistake it for a plain decoder), and stock Hugging Face decoders. Weights are safetensors only. A checkpoint whose
weights do not fit its layout - one missing, one too many, one of another shape, one not finite - is refused by name: there is no
fallback to RoPE.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from repo_interp.errors import InputError
from repo_interp.models.families import FAMILIES, native_layout, require_family
from repo_interp.models.fetched import fetched_directory
from repo_interp.models.gguf import SUFFIX, converted
from repo_interp.models.released import released_layout
from repo_interp.models.reposition import layout, reposition
from repo_interp.models.schemes import scheme_options
from repo_interp.positions.layouts import format_layout, scheme_names

OURS = "repo_interp"
_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Checkpoint:
    """What a directory holds, found out without reading its weights."""

    directory: Path
    format: str
    """"released", "repo_interp" or "hugging face"."""
    config: PretrainedConfig
    layout: tuple[str, ...]
    """The scheme of every layer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Choices within schemes, as `reposition` takes them."""


def identify(path: str | os.PathLike[str]) -> Checkpoint:
    """Say what the checkpoint at `path`, a directory or a hub id, is. Raises InputError when it is none that we can read."""
    directory = _directory(path)
    raw = _read_json(directory / "config.json")
    kind = _format(raw)
    config = _configuration(raw, directory)
    require_family(config)
    layers = config.num_hidden_layers
    if kind == "released":
        if not isinstance(raw["pe_config"], Mapping):
            raise InputError(f"{directory / 'config.json'}: pe_config is {raw['pe_config']!r}; wanted an object")
        return Checkpoint(directory, kind, config, released_layout(raw["pe_config"], layers))
    if kind == OURS:
        return Checkpoint(directory, kind, config, *_own_layout(raw, layers, directory))
    return Checkpoint(directory, kind, config, native_layout(config))


def load_model(
    checkpoint: Checkpoint | str | os.PathLike[str],
    device: str = "cpu",
    dtype: str = "float32",
    rope_scaling: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The repositioned Hugging Face model of a checkpoint, every layer checked, in evaluation mode.

    `rope_scaling` exchanges how frequencies are scaled, e.g. {"rope_type": "yarn", "factor": 2.0,
    "original_max_position_embeddings": 4096}; it reaches every layer that rotates, learned positions included.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = identify(checkpoint)
    if dtype not in _DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown; wanted one of {', '.join(_DTYPES)}")
    config = checkpoint.config
    if rope_scaling is not None:
        config = scaled_configuration(config, rope_scaling)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
        reposition(model, ",".join(checkpoint.layout), **checkpoint.options)
    _load_weights(model, checkpoint, torch.device(device), _DTYPES[dtype])
    model.tie_weights()
    model.config.dtype = _DTYPES[dtype]
    generation = checkpoint.directory / "generation_config.json"
    if generation.is_file() and model.generation_config is not None:
        for name, value in _read_json(generation).items():
            if name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(model.generation_config, name, value)
    return model.to(device).eval()


def scaled_configuration(config: PretrainedConfig, rope_scaling: Mapping[str, Any]) -> PretrainedConfig:
    """`config` with its rotation scaled otherwise; the base frequency (rope_theta) stays unless given."""
    raw = config.to_dict()
    base = raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in base.values()):
        raise InputError(f"{config.model_type} scales each kind of layer by itself; rope_scaling cannot be exchanged for it")
    parameters = {"rope_theta": base.get("rope_theta"), **rope_scaling}
    if "type" in parameters:
        parameters["rope_type"] = parameters.pop("type")
    raw["rope_parameters"] = parameters
    return _configured(raw, "rope_scaling")


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """The tokenizer that stands beside the weights; None where there is none."""
    directory = checkpoint.directory
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, config=checkpoint.config)
    except Exception as error:
        raise InputError(f"{directory} has a tokenizer that does not load: {_one_line(error)}") from None


def save(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write `model` as config.json, generation_config.json, model.safetensors (and the tokenizer's files) into `directory`.

    Loading gives the same bits back. A layout that is the stock decoder's own is written as a stock checkpoint. Save before bridging.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    schemes = layout(model)
    raw = model.config.to_dict() | {
        "dtype": str(model.dtype).removeprefix("torch."),
        "architectures": [type(model).__name__],
    }
    raw.pop("_name_or_path", None)
    if schemes == native_layout(model.config):
        raw.pop("position_layout", None)
    else:
        raw |= {"model_type": OURS, "base_model_type": model.config.model_type}
    weights = {_file_key(name): tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw, indent=1, sort_keys=True) + "\n")
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _directory(path: str | os.PathLike[str]) -> Path:
    directory = Path(path)
    if directory.is_dir():
        return directory
    if directory.is_file() and directory.suffix == SUFFIX:
        return converted(directory)
    if directory.exists():
        raise InputError(f"{path} is a file; wanted a checkpoint directory with config.json and safetensors, or a GGUF file")
    text = os.fspath(path)
    fetched = fetched_directory(text)
    if fetched is not None:
        return fetched
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise InputError(
            f"there is no checkpoint directory {text}; wanted a directory with config.json, or a hub id such as owner/name"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=["*.json", "*.safetensors", "tokenizer*", "*.model", "merges.txt"]))
    except Exception as error:
        raise InputError(f"{text} is no directory here and could not be fetched from the hub: {_one_line(error)}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{file.parent} has no {file.name}; wanted a checkpoint directory as save_pretrained writes it"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{file} is not JSON: {_one_line(error)}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{file} holds {type(raw).__name__}; wanted an object")
    return raw


def _format(raw: Mapping[str, Any]) -> str:
    if "pe_config" in raw:
        return "released"
    return OURS if "position_layout" in raw or raw.get("model_type") == OURS else "hugging face"


def _configuration(raw: dict[str, Any], directory: Path) -> PretrainedConfig:
    plain = {key: value for key, value in raw.items() if key not in ("pe_config", "position_layout", "base_model_type")}
    if raw.get("model_type") == OURS:
        plain["model_type"] = raw.get("base_model_type")
    if plain.get("model_type") not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise InputError(
            f"{directory / 'config.json'}: model_type {plain.get('model_type')!r} cannot be repositioned; these can: {known}"
        )
    return _configured(plain, str(directory / "config.json"))


def _configured(raw: dict[str, Any], source: str) -> PretrainedConfig:
    try:
        raw = dict(raw)
        config = AutoConfig.for_model(raw.pop("model_type"), **raw)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(f"{heads} heads cannot share {kv_heads} key-value heads")
        if config.hidden_size % heads and not raw.get("head_dim"):
            raise ValueError(f"a width of {config.hidden_size} does not split into {heads} heads")
        return config
    except Exception as error:
        raise InputError(f"{source} describes no decoder: {_one_line(error)}") from None


def _own_layout(raw: Mapping[str, Any], layers: int, directory: Path) -> tuple[tuple[str, ...], dict[str, Any]]:
    stored = raw.get("position_layout")
    options = dict(stored) if isinstance(stored, Mapping) else {}
    schemes = options.pop("layers", None)
    if not isinstance(schemes, list) or len(schemes) != layers or not set(schemes) <= set(scheme_names()):
        raise InputError(
            f"{directory / 'config.json'}: position_layout is {stored!r}; wanted one known scheme for each of {layers} layers"
        )
    try:
        scheme_options(options)
    except InputError as error:
        raise InputError(f"{directory / 'config.json'}: {error}") from None
    return tuple(schemes), options


def _file_key(name: str) -> str:
    """A parameter's name in the file: the released format has what a scheme learns directly under self_attn."""
    return name.replace(".self_attn.assigner.", ".self_attn.").replace(".self_attn.position_logits.", ".self_attn.")


def _load_weights(model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
    wanted = {_file_key(name): name for name in model.state_dict()}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found: dict[str, Tensor] = {}
    unexpected = []
    for key, tensor in _weights(checkpoint.directory):
        if key not in wanted:
            unexpected.append(key)
            continue
        if tuple(tensor.shape) != shapes[wanted[key]]:
            raise InputError(
                f"{checkpoint.directory}: {key} has shape {list(tensor.shape)}, the layout {format_layout(checkpoint.layout)} "
                f"wants {list(shapes[wanted[key]])}"
            )
        if not torch.isfinite(tensor).all():
            raise InputError(f"{checkpoint.directory}: {key} holds values that are not finite; the checkpoint is damaged")
        found[wanted[key]] = tensor.to(device=device, dtype=dtype)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    missing = [key for key, name in wanted.items() if name not in found and key not in tied]
    if missing or unexpected:
        faults = [
            f"{len(keys)} {what} (first: {keys[0]})" for keys, what in ((missing, "missing"), (unexpected, "unexpected")) if keys
        ]
        raise InputError(
            f"{checkpoint.directory}: the weights do not fit the layout {format_layout(checkpoint.layout)}: {', '.join(faults)}; "
            "nothing was loaded"
        )
    model.load_state_dict(found, strict=False, assign=True)


def _weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for file in weight_files(directory):
        try:
            with safe_open(file, "pt") as weights:
                for key in weights.keys():  # noqa: SIM118 - not a mapping
                    yield key, weights.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} cannot be read as safetensors: {_one_line(error)}") from None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, all present. Raises InputError naming what is missing."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        named = _read_json(index).get("weight_map")
        if not isinstance(named, Mapping):
            raise InputError(f"{index} has no weight_map; wanted the index that save_pretrained writes")
        files = sorted({directory / name for name in named.values()})
    else:
        files = [directory / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise InputError(f"{directory} has no {file.name}; weights are read from safetensors only")
    return files


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
