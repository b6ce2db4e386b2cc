"""What the RePo paper's claims are measured on: checkpoints with the task they were trained on, and prompts for them.

A checkpoint of one of our tasks gets that task's prompts; any other one gets RULER's needle in a haystack in its own tokens, as in the
paper. Prompt i of a length depends on the seed and i alone, so that checkpoints of one task are asked the same.

Knows nothing about claims.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.models.checkpoints import identify, load_tokenizer
from repo_interp.models.families import training_length
from repo_interp.models.provenance import checkpoint_digest
from repo_interp.papers.kit.cache import Cache
from repo_interp.positions.layouts import LEARNED, format_layout
from repo_interp.tasks import Prompt, Task, niah
from repo_interp.training.trained import trained_task

VARIANT = "multikey_1"
"""The needle in a haystack of checkpoints that were trained on no task of ours: several keys, as table 1 has it."""


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    prompts: int = 64
    """Of each length, for positions and attention."""
    score_prompts: int = 100
    """Of each test set that is scored."""
    controls: int = 2
    """Twins with random weights."""
    example_words: int = 11
    """Length of the text whose positions are drawn (fig. 6)."""
    efficiency_layers: int = 8
    efficiency_width: int = 512
    efficiency_heads: int = 8
    efficiency_context: int = 256
    """Tokens of the prompt before the first timed one."""
    efficiency_tokens: int = 32
    """Tokens generated in each timed round."""
    efficiency_rounds: int = 15
    """Rounds of both schemes, in turns."""
    batch_size: int = 16
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("prompts", "score_prompts", "efficiency_rounds"):
            if getattr(self, name) < 2:
                raise InputError(f"{name} is {getattr(self, name)}; a spread needs at least 2")
        if self.controls < 1:
            raise InputError(f"controls is {self.controls}; wanted at least one twin with random weights")


@dataclass(frozen=True)
class Subject:
    """One checkpoint."""

    name: str
    """What the caller calls it."""
    path: str
    schemes: tuple[str, ...]
    """The scheme of every layer."""
    training_length: int
    """In tokens."""
    digest: str
    task: Task | None
    """The task it was trained on, where that is one of ours."""

    @property
    def layout(self) -> str:
        """The layout in short: rope, repo@1, r2n1."""
        return format_layout(self.schemes)

    @property
    def kind(self) -> str:
        """Name of its task; "text" where it was trained on none of ours."""
        return "text" if self.task is None else self.task.name

    @property
    def learned(self) -> tuple[int, ...]:
        """Layers whose positions are learned."""
        return tuple(layer for layer, scheme in enumerate(self.schemes) if scheme in LEARNED)

    @property
    def stem(self) -> str:
        """Its name as a part of a file's name."""
        return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in self.name)

    @cached_property
    def tokenizer(self):
        """The tokenizer beside the weights. Raises InputError where there is none."""
        found = load_tokenizer(identify(self.path))
        if found is None:
            raise InputError(
                f"{self.name}: {self.path} has no tokenizer, so there are no prompts for it; put its tokenizer there"
            )
        return found

    @property
    def tokenizer_digest(self) -> str:
        """What decides how text becomes tokens: equal for checkpoints that can be given the same prompts."""
        file = Path(self.path) / "tokenizer.json"
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else self.digest

    def prompts(self, length: int, count: int, seed: int) -> list[Prompt]:
        """`count` prompts of `length` (in the unit of its task: words for reversal, else tokens), with their answers."""
        if self.task is not None:
            return self.task.prompts(count, seed, str(length))
        return niah(self.tokenizer, VARIANT, length, count, seed)

    def measured(
        self,
        cache: Cache,
        recipe: str,
        options: Options,
        measure: Callable[[], xr.Dataset],
        **more: str | int | float,
    ) -> xr.Dataset:
        """`measure()`, or what it gave before on this checkpoint with the options in `more`, the seed and the device."""
        task = "" if self.task is None else json.dumps([self.task.name, self.task.options()], sort_keys=True)
        fixed = {"checkpoint": self.digest, "task": task, "seed": options.seed, "device": options.device}
        return cache.dataset(f"repo_{recipe}", {**fixed, "batch_size": options.batch_size, **more}, measure)


def subjects(checkpoints: Mapping[str, str | os.PathLike[str]]) -> list[Subject]:
    """What is known of each checkpoint (name -> path) that has weights, without reading them. A training record without is left out.

    Raises InputError for a checkpoint that cannot be read.
    """
    found = []
    for name, path in checkpoints.items():
        if (Path(path) / "training.toml").is_file() and not (Path(path) / "config.json").is_file():
            continue
        known = identify(path)
        found.append(
            Subject(
                name,
                str(known.directory),
                known.layout,
                training_length(known.config),
                checkpoint_digest(known.directory),
                trained_task(known.directory),
            )
        )
    return found


def finite(values: np.ndarray) -> np.ndarray:
    """The values that are there."""
    return np.asarray(values, dtype=float)[np.isfinite(values)]
