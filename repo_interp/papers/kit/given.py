"""The checkpoints that a paper's figures are made on: those of the zoo that it names, and a user's.

    name -> directory, with a digest of all that it holds      a user's checkpoint stands in for the zoo's of the same name

Of some checkpoints the zoo has only the records of training (scores.json, training.toml), not the weights; they are given too. Knows
nothing about any paper.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.models.checkpoints import identify
from repo_interp.models.provenance import checkpoint_digest

ZOO = Path(__file__).parents[2] / "zoo"
RECORDS = ("scores.json", "training.toml", "steps.nc")
"""What is read of a checkpoint beside its configuration and weights."""


@dataclass(frozen=True)
class Given:
    """The checkpoints of one paper."""

    paths: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    """Names of the zoo that the package has not."""


def given(wanted: Iterable[str], users: Mapping[str, str], zoo: Path = ZOO) -> Given:
    """The checkpoints `wanted` from the zoo, and the users'. Raises InputError for a users' path where no checkpoint is."""
    paths, missing = {}, []
    for name in wanted:
        if name in users:
            continue
        if _is_there(zoo / name):
            paths[name] = str(zoo / name)
        else:
            missing.append(name)
    paths |= users
    return Given(paths, {name: digest(path) for name, path in paths.items()}, tuple(missing))


def digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 over a checkpoint and its records, those of other seeds included. Raises InputError where there is neither."""
    directory = Path(path)
    found: dict[str, str] = {}
    if not directory.is_dir() or (directory / "config.json").is_file():
        found["checkpoint"] = checkpoint_digest(identify(path).directory)
    if directory.is_dir():
        records = [file for folder in ("", "seed-*/") for name in RECORDS for file in sorted(directory.glob(folder + name))]
        found |= {file.relative_to(directory).as_posix(): file_digest(file) for file in records}
    if not found:
        raise InputError(
            f"there is no checkpoint at {directory}; wanted a directory with config.json and weights, or with scores.json"
        )
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def file_digest(file: str | os.PathLike[str]) -> str:
    """SHA-256 over a file, or over all files below a directory with their names."""
    path = Path(file)
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    below = [one for one in sorted(path.rglob("*")) if one.is_file()]
    return hashlib.sha256(json.dumps([(str(one.relative_to(path)), file_digest(one)) for one in below]).encode()).hexdigest()


def _is_there(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("config.json", "scores.json")) or any(
        directory.glob("seed-*/scores.json")
    )
