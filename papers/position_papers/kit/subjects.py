"""The checkpoints for experiments: those of the zoo that a paper names, and a user's, each with the
task of its training.

    name -> directory, with a digest of its content            a user's checkpoint replaces that of the zoo with the same name

For some checkpoints the zoo has only the records of training, without weights; they are subjects
too. A checkpoint of one of our tasks gets the prompts of this task; others get RULER's needle in a
haystack in their tokens. Prompt i of a length depends only on the seed and i, so checkpoints of one
task get the same prompts. This module knows nothing about single papers.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import xarray as xr
from torch import nn

from position_papers.kit.cache import Cache, Kept
from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.trained import seed_of, trained_configuration, zoo_runs
from position_papers.zoo_directory import DIRECTORY, recorded_at
from repo_interp.analysis.trained_task import trained_name, trained_task
from repo_interp.checkpoint_files import shipped
from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.checkpoint_files.checkpoint_digest import checkpoint_digest
from repo_interp.checkpoint_files.stated import tokens_of
from repo_interp.errors import InputError
from repo_interp.models.checkpoints import identify, load_tokenizer
from repo_interp.models.fresh_weights import load_fresh
from repo_interp.models.load import load
from repo_interp.positions.layouts import LEARNED, format_layout
from repo_interp.tasks import Prompt, Task, make_task, niah

RECORDS = ("scores.json", "training.toml", "log.jsonl", "steps.nc")
"""Files of a checkpoint that are read in addition to its configuration and weights."""
VARIANT = "multikey_1"
"""Variant of the needle in a haystack for checkpoints without one of our tasks: several keys, as in
RePo's table 1.
"""


@dataclass(frozen=True)
class Subject:
    """One checkpoint."""

    name: str
    """Name from the caller."""
    path: str
    schemes: tuple[str, ...]
    """The scheme of every layer; empty without weights."""
    training_length: int
    """Training length in tokens; 0 without weights."""
    digest: str
    """Digest of configuration and weights; empty without weights."""
    task: Task | None
    """The task of its training, if it is one of ours."""
    configuration: TrainingConfiguration | None = None
    """Configuration of its training, from training.toml if there is one."""
    runs: str = ""
    """The directory with the records of its training, and other seeds in seed-N, if it differs from
    `path`.
    """

    @property
    def has_weights(self) -> bool:
        """Whether it has weights, not only records of its training."""
        return bool(self.schemes)

    @property
    def layout(self) -> str:
        """The layout in its short form, such as rope, repo@1 or r2n1; from the training record if
        there are no weights.
        """
        if not self.schemes:
            return "" if self.configuration is None else self.configuration.scheme
        return format_layout(self.schemes)

    @property
    def kind(self) -> str:
        """The name of its task; "text" if it is not one of ours."""
        if self.task is not None:
            return self.task.name
        return "text" if self.configuration is None else self.configuration.task

    @property
    def learned(self) -> tuple[int, ...]:
        """Layers with learned positions."""
        return tuple(layer for layer, scheme in enumerate(self.schemes) if scheme in LEARNED)

    @property
    def stem(self) -> str:
        """Its name as a part of file names."""
        return stem(self.name)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer next to the weights. Raises InputError if there is none."""
        tokenizer = load_tokenizer(identify(self.path))
        if tokenizer is None:
            why = "has no tokenizer, so there are no prompts for it; put its tokenizer there"
            raise InputError(f"{self.name}: {self.path} {why}")
        return tokenizer

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer: equal for checkpoints that can get the same prompts."""
        file = tokens_of(Path(self.path)) / "tokenizer.json"
        return _file_digest(file) if file.is_file() else self.digest

    def prompts(self, length: int, count: int, seed: int) -> list[Prompt]:
        """Make `count` prompts of `length` (in the unit of the task: words for reversal, else
        tokens), with their answers.
        """
        if self.task is not None:
            return self.task.prompts(count, seed, str(length))
        return niah(self.tokenizer, VARIANT, length, count, seed)

    def bridges(self, options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield this checkpoint, "trained", then `options.controls` random-weight controls, "random
        0", ..., each created when needed.
        """
        yield "trained", load(self.path, options.device)
        for seed in range(options.controls):
            yield f"random {seed}", load_fresh(self.path, seed, options.device)

    def measured(
        self,
        cache: Cache,
        function: Callable[..., Kept],
        options: Any,
        *given: Any,
        **depends: str | int | float,
    ) -> Kept:
        """Return `function(self, options, *given)`, cached by this checkpoint, its task, `depends`,
        the seed, batch size and device.
        """
        return cache.get(function, self._decisive(options) | depends, self, options, *given)

    def measured_by_points(
        self,
        cache: Cache,
        function: Callable[..., xr.Dataset],
        options: Any,
        **depends: str | int | float,
    ) -> xr.Dataset:
        """Return `function(self, options, grid)`, cached as by `measured`; after an interruption it
        continues from the points in `grid`.
        """
        known = self._decisive(options) | depends
        return cache.get(function, known, self, options, cache.points(function, known))

    def _decisive(self, options: Any) -> dict[str, str | int | float]:
        task = (
            ""
            if self.task is None
            else json.dumps([self.task.name, _contents(self.task)], sort_keys=True)
        )
        return {
            "checkpoint": self.digest,
            "task": task,
            "texts": texts_of(self.task),
            "seed": options.seed,
            "device": options.device,
            "batch_size": options.batch_size,
        }


@dataclass(frozen=True)
class Given:
    """The checkpoints of one paper, by name."""

    paths: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    """Names of the zoo that the package lacks."""

    def subjects(self, corpus: str = "") -> list[Subject]:
        """Read the facts of each checkpoint without its weights; language models read `corpus`, if
        it is given, instead of the text of their training.

        Raises InputError for a checkpoint that cannot be read.
        """
        return [subject(name, path, corpus) for name, path in self.paths.items()]


def given(wanted: Iterable[str], users: Mapping[str, str], zoo: Path = DIRECTORY) -> Given:
    """Find the checkpoints `wanted` from the zoo, and those of users.

    Raises InputError for a user's path without a checkpoint.
    """
    names = [name for name in wanted if name not in users]
    paths = {name: str(place) for name in names if (place := _place(zoo, name)) is not None} | dict(
        users
    )
    missing = tuple(name for name in names if name not in paths)
    return Given(paths, {name: digest(path) for name, path in paths.items()}, missing)


def subject(name: str, path: str | os.PathLike[str], corpus: str = "") -> Subject:
    """Read the checkpoint at `path`, or its record of training; for a directory with only seeds,
    the first seed with weights.

    Language models read `corpus`, if it is given, instead of the text of their training. Raises
    InputError if neither can be read, or if the record of a checkpoint names a file or a folder and
    no `corpus` is given.
    """
    configuration = _configuration(Path(path))
    if configuration is not None and not (Path(path) / "config.json").is_file():
        for first in _seeds_below(Path(path)).values():
            return replace(subject(name, first, corpus), runs=os.fspath(path))
        return Subject(name, os.fspath(path), (), 0, "", None, configuration)
    known = identify(path)
    length = training_length(known.config)
    checkpoint = checkpoint_digest(known.directory)
    task = _trained_task(known.directory, corpus)
    return Subject(
        name, str(known.directory), known.layout, length, checkpoint, task, configuration
    )


def _trained_task(directory: Path, corpus: str) -> Task | None:
    """Return the task of the checkpoint in `directory`; a task on texts uses `corpus`, if it is
    given.
    """
    name = trained_name(directory)
    reads = bool(corpus and name) and "corpus" in make_task(str(name)).options()
    return trained_task(directory, **({"corpus": corpus} if reads else {}))


def seeds_of(own: Subject) -> dict[int, Subject]:
    """Return the same checkpoint for all training seeds, by seed and under one name: itself, and
    the directories seed-N with weights.
    """
    first = 0 if own.configuration is None else own.configuration.seed
    corpus = "" if own.task is None else str(own.task.options().get("corpus", ""))
    others = {
        seed: replace(subject(own.name, path, corpus), task=own.task)
        for seed, path in _seeds_below(records_of(own)).items()
        if seed != first
    }
    return dict(sorted(({first: own} | others).items()))


def records_of(own: Subject) -> Path:
    """Return the directory with the records of all training runs of a checkpoint, one per seed."""
    return recorded_at(Path(own.runs or own.path))


def _seeds_below(directory: Path) -> dict[int, Path]:
    """Return the directories seed-N with weights, by N."""
    places = (file.parent for file in directory.glob("seed-*/config.json"))
    return dict(sorted((seed, place) for place in places if (seed := seed_of(place)) is not None))


def stem(name: str) -> str:
    """Convert a name to a part of file names."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)


def _configuration(path: Path) -> TrainingConfiguration | None:
    """Read the training configuration of a run, or of its first other seed if only these exist."""
    places = (path, *sorted(path.glob("seed-*")))
    return next(
        (known for place in places if (known := trained_configuration(place)) is not None), None
    )


def digest(path: str | os.PathLike[str]) -> str:
    """Compute SHA-256 over a checkpoint and its records, including those of other seeds.

    The text in a record on its making (`made_with`) is not included.

    Raises InputError if there is neither.
    """
    directory, runs = Path(path), zoo_runs(path)
    parts: dict[str, str] = {}
    if (directory / "config.json").is_file() or not (directory.is_dir() or runs):
        parts["checkpoint"] = checkpoint_digest(identify(path).directory)
    if runs:
        for run in runs:
            run.get("training", {}).pop("made_with", None)
        parts["runs"] = hashlib.sha256(json.dumps(runs).encode()).hexdigest()
    names = [*RECORDS, *(f"seed-*/{name}" for name in (*RECORDS, "model.safetensors"))]
    records = recorded_at(directory)
    parts |= {
        file.relative_to(records).as_posix(): _file_digest(file)
        for name in names
        for file in sorted(records.glob(name))
    }
    if not parts:
        wanted = "wanted a directory with config.json and weights, or with scores.json"
        raise InputError(f"there is no checkpoint at {directory}; {wanted}")
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def texts_of(task: Task | None) -> str:
    """Return the origin of the text of prompts, in addition to the task's options: the version of
    Python, whose sources are the default text, or the digest of the corpus.
    """
    if task is None or not task.options().get("corpus"):
        return platform.python_version()
    return hashlib.sha256(task.data.held_out.tobytes()).hexdigest()  # pyright: ignore[reportAttributeAccessIssue]


def _contents(task: Task) -> dict[str, Any]:
    """Return the options of a task, independent of the location of files: a tokenizer by its
    digest, and no corpus, which `texts_of` reads.
    """
    options = {name: value for name, value in task.options().items() if name != "corpus"}
    return options | (
        {"tokenizer_file": _file_digest(Path(file))}
        if (file := options.get("tokenizer_file"))
        else {}
    )


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _place(zoo: Path, name: str) -> Path | None:
    """Return the directory of a checkpoint of the zoo, or of its records; None if there is neither."""
    with_weights = (
        directory / name
        for directory in (zoo, shipped.DIRECTORY)
        if (directory / name / "config.json").is_file()
    )
    return next(with_weights, zoo / name if zoo_runs(zoo / name) else None)
