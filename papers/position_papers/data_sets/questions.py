"""Questions of data sets that users have as files, and what checkpoints answer: generated greedily, scored as each data set is.

    plain       prompts as they are                     reordered   Qasper's, with a share of the tokens moved (Position Generalization)

Beyond the training length L the rotation is extended by `extension` with the factor length / L, for all questions, as in RePo's table 3.
Knows no claim.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xarray as xr

from position_papers.kit.cache import Cache
from position_papers.kit.samples import Sample
from position_papers.kit.subjects import Subject
from repo_interp.errors import InputError
from repo_interp.experiments.generated_scores import question_scores
from repo_interp.experiments.perturbation import transposed
from repo_interp.models.checkpoints import load_model
from repo_interp.models.interventions.extension import allowed_methods, extended
from repo_interp.tasks import Prompt, digest
from repo_interp.tasks.data_sets import NAMES, data_set_prompts, require_name
from repo_interp.values import Count, CountOrNone, Seed

PLAIN, REORDERED = "plain", "reordered"
MOVED, WITHIN = 0.05, 5
"""Share of the tokens that change places, and how far, as in table 1 of Position Generalization."""


@dataclass(frozen=True)
class Options:
    """How much is asked, and of which files. Raises InputError for what allows no error, or cannot be asked."""

    questions: Count = 100
    """Per part of a data set; all, where it has fewer."""
    length: CountOrNone = 0
    """Tokens of a prompt with its answer; 0: the training length of each checkpoint."""
    extension: str = "yarn"
    """How the rotation is extended where `length` is longer: yarn, interpolation, plain."""
    batch_size: Count = 8
    seed: Seed = 0
    device: str = "cpu"
    data: tuple[tuple[str, str], ...] = ()
    """Names of data sets and where they are."""

    def __post_init__(self) -> None:
        if self.questions < 2:
            raise InputError(f"questions is {self.questions}; wanted at least 2, for an error")
        if self.length and self.length < 8:
            raise InputError(f"length is {self.length}; wanted at least 8 tokens, or 0 for the training length")
        if self.extension not in ("yarn", "interpolation", PLAIN):
            raise InputError(f"extension is {self.extension!r}; wanted yarn, interpolation or plain")


class Questions(NamedTuple):
    """A data set, and which of its metrics count: the mean over the parts with one of them, each the mean over its questions."""

    data_set: str
    metrics: tuple[str, ...]


HYBRIDQA = Questions("hybridqa", ("exact match",))
LONGBENCH = Questions("longbench", ("F1", "ROUGE-L", "classification", "retrieval", "count", "edit similarity"))
MMLU_PRO = Questions("mmlu_pro", ("accuracy",))
GLUE = Questions("glue", ("following",))
QASPER = Questions("qasper", ("F1",))


@dataclass(frozen=True)
class Answers:
    """What was asked and scored."""

    subjects: Sequence[Subject]
    options: Options
    scores: Mapping[tuple[str, str], xr.Dataset]
    """By checkpoint and data set: what `question_scores` gives, with `order`: plain, and reordered for Qasper."""

    @property
    def absent(self) -> list[str]:
        """Data sets that no file was given of."""
        return [name for name in NAMES if name not in dict(self.options.data)]

    def sample(self, checkpoint: str, questions: Questions, order: str = PLAIN) -> Sample:
        """All questions of the parts that have one of the metrics, in their order.

        Every part counts alike, as in LongBench: a question of a part with fewer counts more, by N / (parts * questions of its part).
        """
        scores = self.scores[checkpoint, questions.data_set]
        counts = np.isin(scores["metric"].values.astype(str), list(questions.metrics))
        chosen = scores["score"].sel(order=order).values[counts]
        asked = np.isfinite(chosen)
        weights = asked.sum() / (len(asked) * asked.sum(axis=1, keepdims=True))
        known = (chosen * weights)[asked]
        return Sample(np.array([known.mean()]), known, len(known), True)


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> Answers:
    """The scores of all checkpoints on all data sets that a file was given of.

    Raises InputError for an unknown data set, a file that is not in its format, and a checkpoint that has no tokenizer.
    """
    data = dict(options.data)
    for name in data:
        require_name(name)
    scores = {
        (subject.name, name): _asked(subject, name, Path(data[name]), options, cache)
        for name in NAMES
        if name in data
        for subject in subjects
    }
    return Answers(subjects, options, scores)


def _asked(subject: Subject, name: str, path: Path, options: Options, cache: Cache) -> xr.Dataset:
    """The scores of one checkpoint on one data set, from the cache where it was asked before."""
    length = options.length or subject.training_length
    prompts = data_set_prompts(name, path, subject.tokenizer, length, options.questions, options.seed)
    depends = {
        "checkpoint": subject.digest,
        "data_set": name,
        "prompts": _digest(prompts),
        "length": length,
        "extension": options.extension,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "device": options.device,
    }
    return cache.dataset(_scores, depends, subject, name, prompts, length, options)


def _scores(subject: Subject, name: str, prompts: Sequence[Prompt], length: int, options: Options) -> xr.Dataset:
    """The scores [order, ...] of all questions: as they are and, for Qasper, reordered."""
    model = load_model(subject.path, options.device)
    extends = length > subject.training_length and options.extension in allowed_methods(model)
    method = options.extension if extends else PLAIN
    orders: dict[str, Sequence[Prompt]] = {PLAIN: prompts}
    if name == QASPER.data_set:
        orders[REORDERED] = [_reordered(prompt, options.seed, place) for place, prompt in enumerate(prompts)]
    parts = [
        question_scores(
            model, subject.tokenizer, asked, options.batch_size, extended(model, method, length, subject.training_length)
        )
        for asked in orders.values()
    ]
    return xr.concat(parts, dim=xr.IndexVariable("order", list(orders))).assign_attrs(method=method)


def _reordered(prompt: Prompt, seed: int, place: int) -> Prompt:
    """`prompt` with a share of its tokens, but for the first, exchanged in pairs within a distance; spans stay where they are."""
    generator = np.random.default_rng([seed, place])
    order = transposed(generator, np.arange(1, len(prompt.tokens)), len(prompt.tokens), MOVED, WITHIN)
    tokens = tuple(prompt.tokens[token] for token in order)
    return replace(prompt, tokens=tokens, token_text=None, text=None, characters=None)


def _digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of what is asked, of the answers, and of how they are scored."""
    known = [digest(prompts), *([prompt.answers, dict(prompt.attributes)] for prompt in prompts)]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
