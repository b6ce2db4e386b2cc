"""Checkpoints in files of other formats, converted once into a Hugging Face directory.

    model.ENDING -> CACHE/ENDING/SHA256-VERSION/{config.json, model.safetensors, tokenizer.json, ...}

A format is an entry point of the group `repo_interp.readers` under the ending of its files, and is
imported when such a file is named. The directory is named after the file's content, so a changed
file is converted again, and it appears as a whole or not at all. Afterwards it is an ordinary
directory. This module loads no torch, and knows no format.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from repo_interp.checkpoint_files.stored import is_complete
from repo_interp.entry_points import READERS, find, names
from repo_interp.errors import InputError, one_line
from repo_interp.storage.files import cache_directory, digest_of, remove, replace_whole

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Outline:
    """Facts of a checkpoint in a file that need no weights."""

    keys: Mapping[str, Any]
    """Keys of config.json."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the weights, by their names in the file."""


class Contents(Protocol):
    """A checkpoint in a file, with the contents of a Hugging Face directory."""

    @property
    def config(self) -> PretrainedConfig:
        """Configuration of the decoder."""
        ...

    @property
    def generation(self) -> GenerationConfig | None:
        """Settings of generation; None: there are none."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Read all weights.

        Returns:
            Values in float32 by transformers' names.
        """
        ...

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Build the tokenizer.

        Returns:
            The tokenizer.
        """
        ...


class Reader(Protocol):
    """A format of checkpoint files, such as the module `repo_interp.plugins.gguf`."""

    VERSION: int
    """Raised whenever the same file is converted to something else: directories that an older
    version wrote are not taken.
    """

    def outline(self, file: Path) -> Outline:
        """Read a file without its weights; loads no torch.

        Args:
            file: The file.

        Returns:
            Configuration and shapes.

        Raises:
            InputError: The file describes no decoder that can be opened.
        """
        ...

    def read(self, file: Path) -> Contents:
        """Open a file, strictly; weights and tokenizer are read when they are asked for.

        Args:
            file: The file.

        Returns:
            The checkpoint in it.

        Raises:
            InputError: The file describes no decoder that can be opened.
        """
        ...


def reader_for(path: str | os.PathLike[str]) -> Reader | None:
    """Find the reader of a file by its ending, and import it.

    Args:
        path: What a user gave as a checkpoint.

    Returns:
        The reader; None if `path` is no file, or has no such ending.
    """
    ending = Path(path).suffix.lower().removeprefix(".")
    known = os.path.isfile(path) and ending in names(READERS)
    return find(READERS, ending) if known else None


def version_of(ending: str) -> int:
    """Return the version of the conversion from a format.

    Args:
        ending: Name of the format.

    Returns:
        The version.
    """
    return find(READERS, ending).VERSION


def converted(file: Path) -> Path:
    """Convert a file to a checkpoint directory, on the first call.

    Args:
        file: A file that has a reader.

    Returns:
        The directory, kept in the cache.

    Raises:
        InputError: The file describes no decoder that can be opened, or the disk is full.
    """
    ending = file.suffix.lower().removeprefix(".")
    # By content and not by name: a file at the same place may have been replaced.
    directory = cache_directory() / ending / f"{digest_of(file)}-{version_of(ending)}"
    if not is_complete(directory):
        write_converted(file, directory)
    return directory


def write_converted(file: Path, directory: Path, texts: Iterable[Path] = ()) -> None:
    """Write the checkpoint in a file as a directory, whole or not at all.

    Two processes may write the same directory; the first to finish wins.

    Args:
        file: A file that has a reader.
        directory: Where to write.
        texts: Files that are copied into it, such as a license.

    Raises:
        InputError: As `converted`.
    """
    reader = reader_for(file)
    assert reader is not None
    contents = reader.read(file)
    tokenizer, weights = contents.tokenizer(), contents.weights()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with replace_whole(directory) as unfinished:
            unfinished.mkdir()
            _write(contents, weights, unfinished)
            tokenizer.save_pretrained(unfinished)
            for text in texts:
                shutil.copy(text, unfinished)
            # Another process may have written the directory meanwhile, and read it now.
            if is_complete(directory):
                remove(unfinished)
    except Exception as error:
        # safetensors and tokenizers raise other errors for a full disk
        raise InputError(
            f"{file} could not be converted into {directory}: {one_line(error)}; make room "
            "there, or set REPO_INTERP_CACHE"
        ) from None


def _write(contents: Contents, weights: dict[str, Tensor], directory: Path) -> None:
    from safetensors.torch import save_file

    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    contents.config.save_pretrained(directory)
    if contents.generation is not None:
        contents.generation.save_pretrained(directory)
