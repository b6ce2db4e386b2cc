"""What the claims of Position Generalization are measured on: a checkpoint's text or task, and twins of it with random weights.

    language models    the task `language` in the checkpoint's own tokens, windows of the training length L, or of `length` tokens where
                       that is less; the same decoder with random weights is the control of the fits
    other tasks        tolerance alone, with the task's score, on prompts as in training

Every measure of every checkpoint, trained or random, is kept on its own, whichever experiment asks for it first. Knows nothing about
claims and figures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.analysis.analyze import analyze
from repo_interp.analysis.cost import estimate
from repo_interp.errors import InputError
from repo_interp.measures.fake_distance import FakeDistance
from repo_interp.measures.maps import Maps
from repo_interp.measures.rotation import Rotation
from repo_interp.measures.statistics import Measure
from repo_interp.measures.three_axis import ThreeAxis
from repo_interp.models.checkpoints import load_model
from repo_interp.models.load import load, load_fresh
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.scale import Scale
from repo_interp.papers.kit.subjects import Subject
from repo_interp.tasks import Prompt, Task, digest, make_task
from repo_interp.training.responses import forced_responses
from repo_interp.values import Count, CountOrNone, Seed

SOURCE = "Position Generalization"
TIMED = 512
"""Most tokens of the text that a cost is extrapolated from."""
MODEL = Scale(28, 3072)
"""Llama-3.2-3B, the model of the paper."""
TEXT_MODELS = ("language/rope", "language/rope_continued", "language/repo", "language/learned")
"""Language models of the zoo."""
WIDER = 1.0
"""Prominence, over the median of a head's components, from which on more components count as dominating than by the measure's 2."""


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    sequences: Count = 8
    """Of text, for the fits and the perturbations."""
    length: CountOrNone = 0
    """Tokens of a sequence, at most the training length; 0: the training length."""
    prompts: Count = 100
    """Of other tasks, for the perturbations."""
    controls: Count = 10
    """Twins with random weights: what a null is made of."""
    draws: Count = 3
    """Seeds of the judged perturbations: they give the spread."""
    gammas: tuple[float, ...] = (0.001, 0.01, 0.05, 0.1, 0.5)
    """Shares of the perturbations that are drawn."""
    l_maxes: tuple[int, ...] = (1, 5, 10, 100)
    longer: Count = 64
    """Sequences for the extrapolation; half of them are the reference."""
    reach: Count = 4
    """Longest length, in training lengths: a power of 2."""
    corpus: str = ""
    """A text file or folder; empty: what the checkpoint was trained on, else the standard library's sources."""
    batch_size: Count = 8
    seed: Seed = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.sequences < 2 or self.prompts < 2 or self.controls < 1 or self.draws < 2 or self.longer < 8:
            raise InputError(
                "at least 2 sequences and prompts, 1 control, 2 draws and 8 longer sequences are needed for a verdict"
            )
        if self.reach < 2 or self.reach & (self.reach - 1):
            raise InputError(f"reach is a power of 2 from 2 on, not {self.reach}")
        if self.length < 0 or 0 < self.length < 32:
            raise InputError(f"length is {self.length}; wanted at least 32 tokens, or 0 for the training length")


@dataclass(frozen=True)
class Measured:
    """One checkpoint, with the groups that an experiment asked for."""

    subject: Subject
    length: int
    """Tokens of a sequence."""
    run: xr.DataTree
    twins: tuple[xr.DataTree, ...] = ()
    """The same groups with random weights."""

    @property
    def name(self) -> str:
        """What the caller calls the checkpoint."""
        return self.subject.name

    def group(self, name: str) -> xr.Dataset:
        """One group of the run."""
        return self.run[name].to_dataset()

    def of_twins(self, name: str) -> list[xr.Dataset]:
        """One group of every twin."""
        return [twin[name].to_dataset() for twin in self.twins]


def is_language_model(subject: Subject) -> bool:
    """Whether a checkpoint has weights and is judged on text: those of our other tasks are not."""
    return subject.has_weights and subject.kind in ("language", "text")


def length_of(subject: Subject, options: Options) -> int:
    """Tokens of a sequence of text for this checkpoint."""
    return min(subject.training_length, options.length or subject.training_length)


def task_of(subject: Subject, options: Options) -> Task:
    """The task whose prompts the checkpoint gets. Raises InputError for a language model without a tokenizer of its own."""
    if not is_language_model(subject):
        assert subject.task is not None, subject.path
        return subject.task
    tokenizer = Path(subject.path) / "tokenizer.json"
    if not tokenizer.is_file():
        raise InputError(f"{subject.path} has no tokenizer.json; language checkpoints are judged with their own tokenizer")
    corpus = options.corpus or (str(subject.task.options()["corpus"]) if subject.task is not None else "")
    length = length_of(subject, options)
    return make_task("language", corpus=corpus, tokenizer_file=str(tokenizer), length=length, longest_test=length * options.reach)


def prompts_of(subject: Subject, options: Options) -> list[Prompt]:
    """The sequences of text, or the prompts of the task. Raises InputError where there is too little text."""
    task = task_of(subject, options)
    if is_language_model(subject):
        return task.prompts(options.sequences, options.seed, str(length_of(subject, options)))
    return task.prompts(options.prompts, options.seed)


def fits(subject: Subject, options: Options, cache: Cache, names: Sequence[str]) -> Measured:
    """The measures `names` of a language model, and of its twins; `maps` of the trained weights alone."""
    prompts = digest(prompts_of(subject, options))
    length = length_of(subject, options)

    def groups(seed: int | None) -> xr.DataTree:
        wanted = [name for name in names if seed is None or name != "maps"]
        known: dict[str, Any] = {"prompts": prompts, "length": length, "weights": str(seed)}
        return xr.DataTree.from_dict(
            {name: subject.measured(cache, measure_fit, options, name, seed, group=name, **known) for name in wanted}
        )

    return Measured(subject, length, groups(None), tuple(groups(seed) for seed in range(options.controls)))


def measure_fit(subject: Subject, options: Options, name: str, seed: int | None) -> xr.Dataset:
    """The group `name`, one of those that `_fit` knows, on trained weights, or on those of a random `seed`."""
    bridge = load(subject.path, options.device) if seed is None else load_fresh(subject.path, seed, options.device)
    return analyze(bridge, prompts_of(subject, options), [_fit(name, subject, options)])[name].to_dataset()


def _fit(name: str, subject: Subject, options: Options) -> Measure:
    measures = {
        "three_axis": ThreeAxis(axes="first_prompt", extras=("position", "shuffled", "held_out")),
        "fake_distance": FakeDistance(),
        "rotation": Rotation(length_of(subject, options)),
        "rotation_printed": Rotation(length_of(subject, options), semantic="printed", name="rotation_printed"),
        "rotation_wider": Rotation(length_of(subject, options), prominence=WIDER, name="rotation_wider"),
        "maps": Maps(),
    }
    return measures[name]


def seconds_of_fits(subject: Subject, options: Options, names: Sequence[str]) -> float:
    """Seconds that `fits` takes when nothing is kept: every measure loads its model anew, and is announced as an analysis is."""
    start = time.monotonic()
    bridge, prompts = load(subject.path, options.device), prompts_of(subject, options)
    loading = time.monotonic() - start
    once = {name: loading + estimate(bridge, prompts, [_fit(name, subject, options)]).seconds for name in names}
    return sum(taken * (1 if name == "maps" else 1 + options.controls) for name, taken in once.items())


def seconds(subject: Subject, options: Options, sequences: Mapping[int, int]) -> float:
    """Seconds that forward passes over so many sequences, by their tokens, take: from one timed sequence, text of at most TIMED tokens.

    It grows with the operations of a decoder: n (2 parameters + 4 n layers width) for n tokens, attention computed densely.
    """
    model, task = load_model(subject.path, options.device), task_of(subject, options)
    prompt = prompts_of(subject, replace(options, sequences=2, prompts=2))[0]
    if is_language_model(subject):
        prompt = task.describe(prompt.tokens[:TIMED])
    times = [time.monotonic()]
    for _ in range(2):  # the first warms up
        forced_responses(model, task, [prompt], 1)
        times.append(time.monotonic())
    taken = min(np.diff(times))
    parameters = sum(weight.numel() for weight in model.parameters())
    attention = 4 * model.config.num_hidden_layers * model.config.hidden_size

    def operations(tokens: int) -> float:
        return tokens * (2 * parameters + attention * tokens)

    wanted = sum(count * operations(tokens) for tokens, count in sequences.items())
    return float(taken) * wanted / operations(len(prompt.tokens))
