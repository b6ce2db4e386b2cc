"""The directory of one training run, whole at every moment.

    training.toml     what decides the result, and what made it          log.jsonl     one record a line
    state.pt          where to go on after an interruption               steps/000500/ checkpoints kept on the way
    config.json, model.safetensors, tokenizer files, scores.json         the finished checkpoint

Every file appears whole or not at all: it is written beside its place, flushed to the disk, and moved there. `config.json` comes last: a
directory that has it is finished. The log is cut to what the state knows before a run goes on.

Knows nothing about training.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from repo_interp.errors import InputError

_UNFINISHED = ".unfinished"


class TrainingFolder:
    """Where a run leaves its files."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.configuration = self.directory / "training.toml"
        self.log = self.directory / "log.jsonl"
        self.state = self.directory / "state.pt"
        self.scores = self.directory / "scores.json"

    @property
    def is_begun(self) -> bool:
        """Whether a run was begun here."""
        return self.configuration.is_file()

    @property
    def is_finished(self) -> bool:
        """Whether a run ended here."""
        return self.is_begun and (self.directory / "config.json").is_file()

    def require_free(self) -> None:
        """Raise InputError when something stands here already."""
        if self.is_finished:
            raise InputError(f"{self.directory} has a finished training run; give another --out, or --overwrite to train it anew")
        if self.is_begun:
            raise InputError(
                f"{self.directory} has an interrupted training run; go on with it by --resume, or give --overwrite to begin anew"
            )
        self._require_own()

    def clear(self) -> None:
        """Remove an earlier run. Raises InputError when the directory holds anything but that."""
        if not self.is_begun:
            self._require_own()
        elif self.directory.is_dir():
            shutil.rmtree(self.directory)

    def begin(self, configuration: str) -> None:
        """Make the directory and put the text of training.toml there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        replace_file(self.configuration, configuration.encode())

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record to the log."""
        with self.log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """The log, as far as it is written."""
        if not self.log.exists():
            return []
        whole = self.log.read_text(encoding="utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def log_size(self) -> int:
        """Bytes of the log, safely on the disk."""
        if not self.log.exists():
            return 0
        with self.log.open("rb") as stream:
            os.fsync(stream.fileno())
        return self.log.stat().st_size

    def cut_log(self, size: int) -> None:
        """Forget what the log says after its first `size` bytes, and half-made checkpoints."""
        if self.log.exists():
            os.truncate(self.log, size)
        for unfinished in (*self.directory.glob(f"*{_UNFINISHED}"), *self.directory.glob(f"steps/*{_UNFINISHED}")):
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()

    def keep(self, step: int, write: Callable[[Path], None]) -> None:
        """Keep the checkpoint that `write` makes in a directory as steps/<step>."""
        kept = self.directory / "steps" / f"{step:06d}"
        unfinished = kept.with_name(kept.name + _UNFINISHED)
        _made_anew(unfinished, write)
        if kept.exists():
            shutil.rmtree(kept)
        unfinished.rename(kept)

    def finish(self, write: Callable[[Path], None]) -> None:
        """Put the finished checkpoint that `write` makes in a directory here; the state is needed no more."""
        unfinished = self.directory / f"final{_UNFINISHED}"
        _made_anew(unfinished, write)
        for file in sorted(unfinished.iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(self.directory / file.name)
        unfinished.rmdir()
        self.state.unlink(missing_ok=True)

    def _require_own(self) -> None:
        if self.directory.exists() and (not self.directory.is_dir() or any(self.directory.iterdir())):
            raise InputError(f"{self.directory} exists and holds no training run; give another --out")


def replace_file(file: Path, content: bytes) -> None:
    """Let `file` have `content`: from one moment to the next, and for good."""
    unfinished = file.with_name(file.name + _UNFINISHED)
    with unfinished.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def _made_anew(directory: Path, write: Callable[[Path], None]) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    write(directory)
    for file in directory.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
