"""What the claims of Position Generalization are measured on: language models on text, and
random-weight controls.

    language models    the task `language` in the checkpoint's own tokens, windows of the training length L, or of `length` tokens where
                       that is less; the same decoder with random weights is the control of the fits
    long windows       1,024 tokens unless options ask for more: what two cores measure of 135 million parameters in an hour and a half

What is measured of a checkpoint, trained or random, is kept on its own, whichever experiment asks
for it first. Knows nothing about claims and figures.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from position_papers.kit import Cache, Scale, Subject
from repo_interp.analysis.analyze import analyze
from repo_interp.analysis.notes import SilentMeasure
from repo_interp.checkpoint_files.stated import tokens_of
from repo_interp.errors import InputError
from repo_interp.measures.statistics import Measure
from repo_interp.models.fresh_weights import load_fresh
from repo_interp.models.load import load
from repo_interp.plugins.fake_distance.fake_distance import FakeDistance
from repo_interp.plugins.fake_distance.maps import Maps
from repo_interp.plugins.rotation.rotation import Rotation
from repo_interp.plugins.three_axis.three_axis import ThreeAxis
from repo_interp.tasks import Prompt, Task, digest, make_task
from repo_interp.values import Count, CountOrNone, Seed, Share, Tokens

SOURCE = "Position Generalization"
MODEL = Scale(28, 3072)
"""Llama-3.2-3B, the model of the paper."""
TEXT_MODELS = ("language/rope", "language/rope_continued", "language/repo", "language/learned")
"""Language models of the zoo."""
TWIN_TOKENS = 4096
"""Of text that a random-weight control gets at most: there one sequence is like another."""
GRID_TOKENS = 2048
"""Of text that every point of the drawn perturbations gets at most; what is judged gets all."""


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    sequences: Count = 8
    """Of text, for the fits and the perturbations."""
    length: CountOrNone = 1024
    """Tokens of a sequence, at most the training length; 0: the training length."""
    controls: Count = 10
    """Random-weight controls: what a null is made of."""
    draws: Count = 3
    """Seeds of the judged perturbations: they give the spread."""
    gammas: tuple[Share, ...] = (0.001, 0.01, 0.05, 0.1, 0.5)
    """Shares of the perturbations that are drawn."""
    l_maxes: tuple[Tokens, ...] = (1, 5, 10, 100)
    longer: Count = 64
    """Sequences for the extrapolation; half of them are the reference."""
    reach: Count = 4
    """Longest length, in training lengths: a power of 2."""
    corpus: str = ""
    """A text file or folder; empty: what the checkpoint was trained on, else the standard library's
    sources.
    """
    batch_size: Count = 8
    seed: Seed = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.sequences < 2 or self.controls < 1 or self.draws < 2 or self.longer < 8:
            raise InputError(
                "at least 2 sequences, 1 control, 2 draws and 8 longer sequences are needed "
                "for a verdict"
            )
        if self.reach < 2 or self.reach & (self.reach - 1):
            raise InputError(f"reach is a power of 2 from 2 on, not {self.reach}")
        if self.length < 0 or 0 < self.length < 32:
            raise InputError(
                f"length is {self.length}; wanted at least 32 tokens, or 0 for the training length"
            )


@dataclass(frozen=True)
class Measured:
    """One checkpoint, with the groups that an experiment needs."""

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

    @property
    def tokens(self) -> str:
        """How long a sequence is, as captions say it."""
        trained = self.subject.training_length
        return f"{self.length} tokens" + (
            f" (of the {trained} of training)" if self.length < trained else ""
        )

    def group(self, name: str) -> xr.Dataset:
        """One group of the run."""
        return self.run[name].to_dataset()

    def of_twins(self, name: str) -> list[xr.Dataset]:
        """One group of every control."""
        return [twin[name].to_dataset() for twin in self.twins]


def is_language_model(subject: Subject) -> bool:
    """Whether a checkpoint has weights and is judged on text: those of our other tasks are not."""
    return subject.has_weights and subject.kind in ("language", "text")


def length_of(subject: Subject, options: Options) -> int:
    """Tokens of a sequence of text for this checkpoint."""
    return min(subject.training_length, options.length or subject.training_length)


def task_of(subject: Subject, options: Options) -> Task:
    """The task whose prompts the checkpoint gets.

    Raises InputError for one without a tokenizer of its own.
    """
    tokenizer = tokens_of(Path(subject.path)) / "tokenizer.json"
    if not tokenizer.is_file():
        raise InputError(
            f"{subject.path} has no tokenizer.json; language checkpoints are judged with "
            "their own tokenizer"
        )
    corpus = options.corpus or (
        str(subject.task.options()["corpus"]) if subject.task is not None else ""
    )
    length = length_of(subject, options)
    return make_task(
        "language",
        corpus=corpus,
        tokenizer_file=str(tokenizer),
        length=length,
        longest_test=length * options.reach,
    )


def prompts_of(subject: Subject, options: Options) -> list[Prompt]:
    """The sequences of text. Raises InputError where there is too little."""
    return task_of(subject, options).prompts(
        options.sequences, options.seed, str(length_of(subject, options))
    )


def fits(subject: Subject, options: Options, cache: Cache) -> Measured:
    """All that `measures` are of a language model, and of its controls: each loaded once, each
    prompt passed once.
    """
    prompts = prompts_of(subject, options)
    length, few = length_of(subject, options), of_tokens(prompts, TWIN_TOKENS)

    def groups(seed: int | None) -> xr.DataTree:
        known = {
            "prompts": digest(prompts if seed is None else few),
            "length": length,
            "weights": str(seed),
        }
        return subject.measured(cache, measure_fits, options, seed, **known)

    return Measured(
        subject, length, groups(None), tuple(groups(seed) for seed in range(options.controls))
    )


def measure_fits(subject: Subject, options: Options, seed: int | None) -> xr.DataTree:
    """The groups of `measures` on trained weights, or on those of a random `seed`."""
    prompts = prompts_of(subject, options)
    with warnings.catch_warnings():
        # claims about rotation say themselves that a model has none
        warnings.simplefilter("ignore", SilentMeasure)
        if seed is None:
            return analyze(load(subject.path, options.device), prompts, measures(subject, options))
        bridge = load_fresh(subject.path, seed, options.device)
        return analyze(bridge, of_tokens(prompts, TWIN_TOKENS), measures_of_twins(subject, options))


def of_tokens(prompts: Sequence[Prompt], tokens: int) -> Sequence[Prompt]:
    """The first `prompts` that have so many `tokens` together; at least two."""
    ends = np.cumsum([len(prompt.tokens) for prompt in prompts])
    return prompts[: max(2, int((ends <= tokens).sum()))]


def measures(subject: Subject, options: Options) -> list[Measure]:
    """Every measure that a claim rests on, and the maps that are drawn."""
    three_axis = ThreeAxis(axes="first_prompt", extras=("position", "shuffled", "held_out"))
    return [three_axis, *measures_of_twins(subject, options)[1:], Maps()]


def measures_of_twins(subject: Subject, options: Options) -> list[Measure]:
    """Those that are compared with random weights."""
    length = length_of(subject, options)
    return [
        ThreeAxis(),
        FakeDistance(),
        Rotation(length),
        Rotation(length, semantic="printed", name="rotation_printed"),
    ]
