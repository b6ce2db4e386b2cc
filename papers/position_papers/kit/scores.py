"""Scores of trained checkpoints, measured anew where weights are at hand, and recorded ones beside
them: what claims about tasks need.

    seed of the checkpoint     scored live on `count` prompts of every test set; its own scores.json where it has no weights
    other seeds                their scores.json; with a method that is not plain, live, those that have weights
    methods                    plain; interpolation (PI) and yarn by the factor max(1, n / L) for test sets of n tokens

The task is the one that training.toml names. Live scores with as many prompts and the seed of the
run are those of its scores.json. Knows nothing about claims and figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import xarray as xr
from scipy import stats
from transformers import PreTrainedModel

from position_papers.kit.cache import Cache
from position_papers.kit.judge.differences import Sample
from position_papers.kit.subjects import Subject, records_of, seeds_of, texts_of
from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.trained import (
    Recorded,
    configured_task,
    on_texts_of_seed_0,
    recorded_scores,
)
from repo_interp.errors import InputError
from repo_interp.experiments.test_set_scores import task_scores
from repo_interp.interventions.extension import extended
from repo_interp.measures.labels import with_attrs
from repo_interp.models.checkpoints import load_model
from repo_interp.models.decoder import as_decoder
from repo_interp.plots.marks.scores import layout_name
from repo_interp.positions.layouts import format_layout, parse_layout
from repo_interp.values import Count, Seed

PLAIN = "plain"
FREE = (
    *("scheme", "scheme_options", "seed"),
    # Of these the result depends in the order of its sums alone
    *("device", "deterministic", "threads", "execution"),
    *("checkpoint_every", "log_every", "score_every", "score_prompts"),
)
"""Fields of a training that may differ between schemes that are compared; all others have to be
equal (of `continue_from`, whether there is one).
"""
SHARES = ("exact match", "accuracy of reads", "share of the values found")
"""Metrics between 0 and 1."""


@dataclass(frozen=True)
class ScoreOptions:
    """How much is scored."""

    count: Count = 200
    """Prompts of every test set."""
    language_count: Count = 64
    """The same in language modelling."""
    batch_size: Count = 32
    seed: Seed = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("count", "language_count"):
            if getattr(self, name) < 2:
                raise InputError(
                    f"{name} is {getattr(self, name)}; wanted at least 2 prompts, for an error"
                )


@dataclass(frozen=True)
class Scored:
    """One checkpoint on the task it was trained on."""

    name: str
    layout: str
    """As `format_layout` writes it; as training.toml names it where there are no weights."""
    configuration: TrainingConfiguration
    training_length: int
    """Tokens of the longest prompt in training."""
    metric: str
    live: xr.Dataset | None
    """`score [method, test_set, prompt]`; None where there are no weights."""
    recorded: tuple[Recorded, ...]
    other_seeds: Mapping[int, xr.Dataset] = field(default_factory=dict)
    """As `live` by seed, of the other seeds that have weights; none where nothing is asked beside
    plain scores, which are recorded.
    """

    @property
    def test_sets(self) -> tuple[str, ...]:
        """Names that there are scores of."""
        if self.live is not None:
            return tuple(self.live["test_set"].values.astype(str).tolist())
        return tuple(name for name, value in self.recorded[0].means.items() if np.isfinite(value))

    def sample(self, test_sets: Sequence[str], method: str = PLAIN) -> Sample:
        """Scores as means over `test_sets`.

        With another method than plain, of the runs with weights.
        """
        measured = {} if self.live is None else {self.configuration.seed: self.live}
        measured |= {} if method == PLAIN else self.other_seeds
        asked = {"method": method, "test_set": list(test_sets)}
        by_run = {
            seed: scores["score"].sel(asked).mean("test_set").values
            for seed, scores in measured.items()
        }
        prompts = next(iter(by_run.values()), np.empty(0))
        means = {seed: float(values.mean()) for seed, values in by_run.items()}
        for run in self.recorded if method == PLAIN else ():
            means.setdefault(
                run.seed, float(np.mean([run.means.get(name, np.nan) for name in test_sets]))
            )
        count = len(prompts) * len(test_sets) or self.recorded[0].prompts * len(test_sets)
        known = {seed: mean for seed, mean in means.items() if np.isfinite(mean)}
        return Sample(
            np.array(list(known.values())), prompts, count, self.metric in SHARES, tuple(known)
        )


def of_tasks(*tasks: str) -> Callable[[Subject], bool]:
    """Whether a subject was trained on one of `tasks`."""
    return lambda subject: subject.configuration is not None and subject.configuration.task in tasks


def score_subject(
    subject: Subject,
    options: ScoreOptions,
    cache: Cache,
    methods: Callable[[str], Sequence[str]] = lambda layout: (),
) -> Scored:
    """The scores of `subject` on the task that it was trained on.

    `methods`: those beside plain for a layout, as `extension.extended` names them. Raises
    InputError where training.toml is missing, or there are neither weights nor recorded scores.
    """
    configuration = subject.configuration
    if configuration is None:
        raise InputError(
            f"{subject.name} ({subject.path}) has no training.toml, so its task is unknown; "
            "give a checkpoint of `repo-interp train`"
        )
    recorded = tuple(recorded_scores(records_of(subject)))
    if configuration.task == "language":
        recorded = tuple(_on_the_same_texts(subject, recorded, options, cache))
    live, others, task = None, {}, configured_task(configuration)
    if subject.has_weights:
        asked = tuple(methods(subject.layout))
        live = _scored(subject, options, cache, asked)
        others = {
            seed: _scored(other, options, cache, asked)
            for seed, other in seeds_of(subject).items()
            if asked and seed != configuration.seed and other.has_weights
        }
    elif not recorded:
        raise InputError(
            f"{subject.name} ({subject.path}) has neither weights nor scores.json; give "
            "a finished training run"
        )
    length = subject.training_length or task.training_length
    return Scored(
        subject.name, subject.layout, configuration, length, task.metric, live, recorded, others
    )


def scores_on_record(subjects: Sequence[Subject]) -> list[Scored]:
    """What training recorded of every checkpoint and its seeds; nothing is scored anew.

    A checkpoint without training.toml is left out.
    """
    return [
        Scored(
            subject.name,
            subject.layout,
            subject.configuration,
            (task := configured_task(subject.configuration)).training_length,
            task.metric,
            None,
            tuple(recorded_scores(records_of(subject))),
        )
        for subject in subjects
        if subject.configuration is not None
    ]


def _scored(
    subject: Subject, options: ScoreOptions, cache: Cache, methods: Sequence[str]
) -> xr.Dataset:
    """The scores of a checkpoint that has weights, with each method."""
    count = options.language_count if subject.kind == "language" else options.count
    return subject.measured(
        cache, _live, options, count, methods, methods=",".join(methods), count=count
    )


def _on_the_same_texts(
    subject: Subject, recorded: Sequence[Recorded], options: ScoreOptions, cache: Cache
) -> Iterator[Recorded]:
    """What is recorded of a language model's first run, and of other seeds their scores on the very
    texts of that one: of those that have weights as they are measured, else where the zoo has
    recorded them.

    Training scores every seed on other windows of the held-out text, which differ by more than
    seeds do.
    """
    others = seeds_of(subject)
    for place, run in enumerate(recorded):
        if place == 0:
            yield run
        elif run.seed in others and others[run.seed].has_weights:
            scores = _scored(others[run.seed], options, cache, ())["score"].sel({"method": PLAIN})
            yield replace(run, means=scores.mean("prompt").to_series().to_dict())
        elif (
            options.seed == 0
            and (means := on_texts_of_seed_0(run, texts_of(subject.task), options.language_count))
            is not None
        ):
            yield replace(run, means=means)


def score_table(
    scored: Sequence[Scored], test_sets: Sequence[str] = (), method: str = PLAIN
) -> xr.Dataset:
    """Scores side by side as `plots.marks.scores` draws them: `score [checkpoint, test_set, seed]`,
    `standard_error [checkpoint, test_set]`, `layout (checkpoint)`; NaN where a checkpoint lacks a
    test set or has fewer seeds.

    `test_sets` empty: every test set that some checkpoint has.
    """
    names = list(test_sets) or list(
        dict.fromkeys(name for checkpoint in scored for name in checkpoint.test_sets)
    )
    samples = {
        each.name: [
            each.sample([name], method) if name in each.test_sets else None for name in names
        ]
        for each in scored
    }
    return sample_table(samples, names, scored[0].metric).assign_coords(
        layout=("checkpoint", [each.layout for each in scored])
    )


def sample_table(
    samples: Mapping[str, Sequence[Sample | None]], test_sets: Sequence[Any], metric: str
) -> xr.Dataset:
    """`score [checkpoint, test_set, seed]` and `standard_error [checkpoint, test_set]` over prompts
    of samples by checkpoint, one per test set; NaN where there is none, or where a checkpoint has
    fewer seeds than another.
    """
    seeds = max(
        (len(sample.seeds) for row in samples.values() for sample in row if sample is not None),
        default=1,
    )
    values = np.full((len(samples), len(test_sets), seeds), np.nan)
    errors = np.full(values.shape[:2], np.nan)
    for row, own in enumerate(samples.values()):
        for column, sample in enumerate(own):
            if sample is not None:
                values[row, column, : len(sample.seeds)] = sample.seeds
                errors[row, column] = (
                    stats.sem(sample.prompts) if len(sample.prompts) > 1 else np.nan
                )
    axes = {"checkpoint": list(samples), "test_set": list(test_sets)}
    # so that tables of other numbers of seeds can be joined
    every_seed = axes | {"seed": np.arange(seeds)}
    score = xr.DataArray(values, every_seed, tuple(every_seed))
    error = xr.DataArray(errors, axes, tuple(axes))
    return xr.Dataset(
        {
            "score": with_attrs(score, metric, "nat" if "log" in metric else "1"),
            "standard_error": with_attrs(error, f"standard error of {metric} over prompts", "1"),
        }
    )


def in_layers(scored: Scored) -> str:
    """The layout of a checkpoint; a start that training.toml gives as a share of the layers becomes
    the number of the layer.
    """
    share = scored.layout.partition("@")[2]
    return (
        format_layout(parse_layout(scored.layout, scored.configuration.layers))
        if "/" in share
        else scored.layout
    )


def in_legend(scored: Scored, among: Iterable[Scored]) -> str:
    """What a legend calls a checkpoint: its layout, or its name where another one of `among` has
    this layout.
    """
    if any(other.layout == scored.layout and other.name != scored.name for other in among):
        return scored.name
    return named_layout(in_layers(scored), scored.configuration.layers)


def named_layout(layout: str, layers: int) -> str:
    """A layout in words: RePo alone is the paper's, from a third of the `layers` on; of another
    start the layer is named.
    """
    scheme, _, start = layout.partition("@")
    if scheme != "repo":
        return layout_name(layout)
    first = int(start or 0)
    return "RePo" if first == layers // 3 else f"RePo from layer {first}"


def first_of(scored: Iterable[Scored], scheme: str) -> Scored | None:
    """The first of `scored` with `scheme` in every layer; None where there is none."""
    return next((each for each in scored if each.layout == scheme), None)


def _live(
    subject: Subject, options: ScoreOptions, count: int, methods: Sequence[str]
) -> xr.Dataset:
    """The scores of every test set by every method, measured with the weights of `subject`."""
    model = load_model(subject.path, options.device)
    task = subject.task
    length = subject.training_length
    assert task is not None, subject.path
    plain = task_scores(
        as_decoder(model), task, None, count, options.seed, batch_size=options.batch_size
    )
    sets = plain["test_set"].values.astype(str).tolist()
    tokens = plain["tokens"].values.tolist()

    def again(place: int) -> np.ndarray:
        return task_scores(
            as_decoder(model),
            task,
            [sets[place]],
            count,
            options.seed,
            batch_size=options.batch_size,
        )["score"].values[0]

    scores = with_methods(model, methods, plain["score"].values, tokens, length, again)
    return xr.Dataset(
        {"score": (("method", "test_set", "prompt"), scores), "tokens": ("test_set", tokens)},
        coords={"method": [PLAIN, *methods], "test_set": sets},
    )


def with_methods(
    model: PreTrainedModel,
    methods: Sequence[str],
    plain: np.ndarray,
    lengths: Sequence[int],
    trained: int,
    score: Callable[[int], np.ndarray],
) -> np.ndarray:
    """The `plain` scores [length, prompt], then those with each of `methods` [method, length,
    prompt]: what `score` gives for the place of a length, while a model that was `trained` on so
    many tokens is extended to it.

    Up to that length nothing is extended.
    """
    by_method = np.stack([plain] * (1 + len(methods)))
    for row, method in enumerate(methods, start=1):
        for place, length in enumerate(lengths):
            if length > trained:
                with extended(model, method, length, trained):
                    by_method[row, place] = score(place)
    return by_method


def note(compared: Sequence[Scored], *texts: str) -> tuple[str, ...]:
    """`texts`, with what differs in the budgets of the checkpoints that are compared.

    Their final losses are a table of the page.
    """
    budgets = unequal_budgets({scored.name: scored.configuration for scored in compared})
    return tuple(text for text in (*texts, budgets) if text)


def unequal_budgets(configurations: Mapping[str, TrainingConfiguration]) -> str:
    """What differs in the budgets of checkpoints by name, as "budgets differ: steps 1500 (rope),
    500 (repo)"; "" where nothing does.
    """
    parts = []
    for part in (option.name for option in fields(TrainingConfiguration)):
        if part in FREE:
            continue
        values: dict[str, list[str]] = {}
        for name, configuration in configurations.items():
            values.setdefault(_shown(part, configuration), []).append(name)
        if len(values) > 1:
            parts.append(
                f"{part} "
                + ", ".join(f"{value} ({', '.join(names)})" for value, names in values.items())
            )
    return f"budgets differ: {'; '.join(parts)}" if parts else ""


def _shown(part: str, configuration: TrainingConfiguration) -> str:
    # 0 stands for a width that others may name
    value = {
        "kv_heads": configuration.key_value_heads,
        "feed_forward": configuration.feed_forward_width,
    }.get(part, getattr(configuration, part))
    if part == "continue_from":
        return "a checkpoint" if value else "nothing"
    return json.dumps(dict(sorted(value.items()))) if isinstance(value, Mapping) else str(value)


def missing(wanted: Iterable[str], task: str) -> str:
    """That there is no checkpoint of some schemes of a task; "" where none is wanted."""
    names = ", ".join(wanted)
    return f"no checkpoint of {names} trained on {task} was given" if names else ""
