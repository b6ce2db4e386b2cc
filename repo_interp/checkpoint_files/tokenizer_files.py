"""The tokenizer in a directory, according to its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from repo_interp.checkpoint_files.stated import json_object

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def read_tokenizer(
    directory: Path, config: PretrainedConfig | None = None
) -> PreTrainedTokenizerBase:
    """Read a tokenizer, without running code of the directory.

    Args:
        directory: Has a tokenizer.json, or the files of a class of transformers.
        config: Configuration of the model; None: the one in the directory, if any.

    Returns:
        The tokenizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    stated = directory / "tokenizer_config.json"
    named = json_object(stated).get("tokenizer_class") if stated.is_file() else None
    # AutoTokenizer would use Qwen2's class, which splits by Qwen2's rule whatever tokenizer.json
    # states.
    if named == PreTrainedTokenizerFast.__name__ and (directory / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory, config=config, trust_remote_code=False)
