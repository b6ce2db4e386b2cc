"""GGUF files as checkpoints: a reader of the group `repo_interp.readers`, found by the ending.

header, metadata, tensors     the file's metadata as a configuration; no torch is imported
tokenizer, splits             the tokenizer
conversion                    the weights in the order and meaning of Hugging Face

Nothing outside of this folder imports it. Needs the package `gguf` (the extra `[gguf]`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from repo_interp.checkpoint_files.readers import Outline
    from repo_interp.plugins.gguf.conversion import GGUF

VERSION = 3
"""See `repo_interp.checkpoint_files.readers.Reader`."""


def outline(file: Path) -> Outline:
    """Read the header of a GGUF file, and check its tensors against the decoder it describes.

    Args:
        file: The GGUF file.

    Returns:
        Configuration, without factors of frequencies, and shapes.

    Raises:
        InputError: The file is not a GGUF, its family cannot be opened, or its tensors do not fit.
    """
    from repo_interp.plugins.gguf.tensors import tensor_outline

    return tensor_outline(file)


def read(file: Path) -> GGUF:
    """Open a GGUF file.

    Args:
        file: The GGUF file.

    Returns:
        The checkpoint in it.

    Raises:
        InputError: As `outline`; or frequencies are scaled by a rule that is not known.
    """
    from repo_interp.plugins.gguf.conversion import GGUF

    return GGUF(file)
