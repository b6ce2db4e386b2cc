"""GGUF files as checkpoints: dequantised once, strictly, and kept as a plain safetensors directory.

    model.gguf -> CACHE/gguf/SHA256-VERSION/{config.json, model.safetensors, tokenizer.json, ...}

Every tensor of the model comes from the file and every tensor of the file is used, in the model's shape, or the file is refused by name;
how the model rotates and attends is read in `gguf_metadata`. Weights of a quantised file are those that its blocks stand for, in float32.
The kept directory is named after the file's content, so that a changed file is converted anew, and it appears whole or not at all. A file
is data: nothing of it is run, and files beside it are not looked at. Needs the package `gguf` (the extra `[gguf]`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from repo_interp.errors import InputError, one_line
from repo_interp.files import replaced
from repo_interp.models.gguf_metadata import FACTORS, Architecture, architecture_of, configuration
from repo_interp.models.weights import stored_weights

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSION = 2
"""Raised whenever the same file is converted to something else, so that what an older version kept is not taken."""


def cache_directory() -> Path:
    """Where converted and fetched checkpoints are kept: $REPO_INTERP_CACHE, else repo_interp in the user's cache directory."""
    chosen = os.environ.get("REPO_INTERP_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "repo_interp"


def converted(file: str | os.PathLike[str]) -> Path:
    """The checkpoint directory that the GGUF file stands for, converted on the first call and kept.

    Raises InputError for a file that is no GGUF, holds a model of a family that cannot be repositioned, cannot be read, or has tensors
    or metadata that do not fit, and where the disk has no room.
    """
    file = Path(file)
    directory = cache_directory() / "gguf" / f"{_digest(file)}-{_VERSION}"
    if not is_whole(directory):
        write_converted(file, directory)
    return directory


def is_whole(directory: Path) -> bool:
    """Whether a converted checkpoint in `directory` still has its configuration and all weights, as far as their headers say."""
    try:
        return (directory / "config.json").is_file() and sum(1 for _ in stored_weights(directory)) > 0
    except InputError:
        return False


def write_converted(file: Path, directory: Path, texts: Iterable[Path] = ()) -> None:
    """Write what the GGUF `file` stands for into `directory`, with copies of `texts`, whole or not at all.

    Raises InputError as `converted` does.
    """
    header = described(file)
    try:
        model, weights = header.model, _weights(header)
        with tempfile.TemporaryDirectory() as alone:  # files beside it say nothing about the tokenizer
            (Path(alone) / "model.gguf").symlink_to(file.resolve())
            tokenizer = AutoTokenizer.from_pretrained(
                alone, gguf_file="model.gguf", local_files_only=True, trust_remote_code=False
            )
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{file} cannot be read as GGUF: {one_line(error, 200)}") from None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with replaced(directory) as unfinished:
            unfinished.mkdir()
            save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
            model.config.save_pretrained(unfinished)
            if model.generation_config is not None:
                model.generation_config.eos_token_id = tokenizer.eos_token_id
                model.generation_config.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            for text in texts:
                shutil.copy(text, unfinished)
    except Exception as error:  # safetensors and tokenizers have errors of their own for a full disk
        raise InputError(
            f"{file} could not be converted into {directory}: {one_line(error)}; make room there, or set REPO_INTERP_CACHE"
        ) from None


_LONG = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
"""Lists as long as the vocabulary, which say nothing about the decoder."""


@dataclass(frozen=True)
class Header:
    """What the header of a GGUF file says."""

    model: PreTrainedModel
    """Without weights (on the meta device)."""
    architecture: Architecture
    tensors: dict[str, Any]
    """Where the file has each tensor, by its name there."""
    names: dict[str, str]
    """The tensor of every weight of the model, by the weight's name."""


def described(file: Path) -> Header:
    """What the header of a GGUF `file` says; no weights are read. Raises InputError as `converted` does, but for its weights."""
    if find_spec("gguf") is None:
        raise InputError(f"{file} is a GGUF file; to read it install the package gguf: pip install 'repo-interp[gguf]'")
    _require_magic(file)
    try:
        return _header(file)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{file} cannot be read as GGUF: {one_line(error, 200)}") from None


def _header(file: Path) -> Header:
    from gguf import GGUFReader, dequantize

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):  # else an array of 2^60 items is walked
                raise InputError(f"{file} cannot be read as GGUF: it ends before all that its header announces")
            return super()._get(offset, dtype, count, *order, **named)

    reader = Reader(file)
    metadata = {name: field.contents() for name, field in reader.fields.items() if name not in _LONG}
    architecture = architecture_of(metadata, str(file))
    tensors, begin = {tensor.name: tensor for tensor in reader.tensors}, int(reader.data_offset)
    for name, tensor in tensors.items():
        if tensor.data_offset != begin:  # as llama.cpp has it: else two tensors could have the same values
            raise InputError(
                f"{file}: {one_line(name, 100)} begins at byte {tensor.data_offset:,}; the tensor before it ends at {begin:,}"
            )
        begin += -(-int(tensor.n_bytes) // int(reader.alignment)) * int(reader.alignment)
    values = tensors.pop(FACTORS, None) if architecture.interleaved else None  # llama.cpp reads it for no other of ours
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    factors = None if values is None else dequantize(values.data, values.tensor_type)
    config = configuration(metadata, shapes, factors, str(file))
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Header(model, architecture, tensors, _fitting(model, shapes, metadata["general.architecture"], str(file)))


def _weights(header: Header) -> dict[str, Tensor]:
    """The weights of the model in float32, by name."""
    from gguf import dequantize

    weights = {}
    for name, stored in header.names.items():
        tensor = header.tensors[stored]
        array = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        weights[name] = torch.from_numpy(_as_hugging_face(array, stored, header.architecture, header.model.config))
    return weights


def _fitting(model: PreTrainedModel, shapes: dict[str, tuple[int, ...]], architecture: str, file: str) -> dict[str, str]:
    """The tensor in the file of every weight of `model`, by the weight's name. Raises InputError where the two do not fit."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    known = get_tensor_name_map(number, model.config.num_hidden_layers)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    names = {name: f"{known.get_name(name.rpartition('.')[0])}.{name.rpartition('.')[2]}" for name in wanted}
    described = f"a {architecture} of {model.config.num_hidden_layers} blocks"
    absent = [stored for stored in names.values() if stored not in shapes]
    unused = sorted(shapes.keys() - set(names.values()))
    for faults, what in (
        (absent, f"lacks {len(absent)} of the tensors of {described}"),
        (unused, f"holds {len(unused)} that {described} lacks"),
    ):
        if faults:
            raise InputError(f"{file} {what} (first: {one_line(faults[0], 100)}); nothing was loaded")
    for name, stored in names.items():
        if shapes[stored] != wanted[name]:
            raise InputError(f"{file}: {stored} has shape {list(shapes[stored])}; {described} wants {list(wanted[name])}")
    return names


def _as_hugging_face(array: np.ndarray, stored: str, architecture: Architecture, config: Any) -> np.ndarray:
    """The values of the tensor `stored` in Hugging Face's order and meaning."""
    if architecture.offset_norms and stored.endswith("norm.weight"):
        return array - 1
    maps = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    heads = next((count for part, count in maps.items() if part in stored), None)
    if not architecture.interleaved or heads is None:
        return array
    rows = array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(rows.reshape(array.shape))


def _require_magic(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise InputError(f"{file} does not begin as a GGUF file does; wanted one that llama.cpp or a model hub gives")


def _digest(file: Path) -> str:
    _require_magic(file)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
