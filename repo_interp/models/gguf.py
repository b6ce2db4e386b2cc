"""GGUF files as checkpoints: dequantised once by transformers' own reader, and kept as a plain safetensors directory.

    model.gguf -> CACHE/gguf/SHA256/{config.json, model.safetensors, tokenizer.json, ...}

Weights of a quantised file are those that its blocks stand for, in float32. The kept directory is named after the file's content, so that a
changed file is converted anew, and it appears whole or not at all. Needs the package `gguf` (the extra `[gguf]`). Knows nothing about where
a file came from.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from repo_interp.errors import InputError
from repo_interp.files import replaced
from repo_interp.models.families import FAMILIES

SUFFIX = ".gguf"
_MAGIC = b"GGUF"


def cache_directory() -> Path:
    """Where converted and fetched checkpoints are kept: $REPO_INTERP_CACHE, else repo_interp in the user's cache directory."""
    chosen = os.environ.get("REPO_INTERP_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "repo_interp"


def converted(file: str | os.PathLike[str]) -> Path:
    """The checkpoint directory that the GGUF file stands for, converted on the first call and kept.

    Raises InputError for a file that is no GGUF, holds a model of a family that cannot be repositioned, or cannot be read.
    """
    file = Path(file)
    directory = cache_directory() / "gguf" / _digest(file)
    if not (directory / "config.json").is_file():
        write_converted(file, directory)
    return directory


def write_converted(file: Path, directory: Path) -> None:
    """Write what the GGUF `file` stands for into `directory`, whole or not at all. Raises InputError as `converted` does."""
    if find_spec("gguf") is None:
        raise InputError(f"{file} is a GGUF file; to read it install the package gguf: pip install 'repo-interp[gguf]'")
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(file.parent, **where)
        if config.model_type not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise InputError(f"{file} holds a {config.model_type}, which cannot be repositioned; these can: {known}")
        quantised = AutoModelForCausalLM.from_pretrained(file.parent, **where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{file} cannot be read as GGUF: {' '.join(str(error).split())[:200]}") from None
    # transformers refuses to save a model that it dequantised; a fresh one of the same configuration takes its weights.
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    if plain.generation_config is not None:
        plain.generation_config.eos_token_id = tokenizer.eos_token_id
    directory.parent.mkdir(parents=True, exist_ok=True)
    with replaced(directory) as unfinished:
        plain.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise InputError(f"{file} does not begin as a GGUF file does; wanted one that llama.cpp or a model hub gives")
        stream.seek(0)
        return hashlib.file_digest(stream, "sha256").hexdigest()
