"""Errors by test set, in and out of distribution (CoPE sec. 5.1 to 5.3): C1, C2 and C3, on the
tasks that `error_tasks` describes.

    error     100 (1 - score) per cent; score: share of reads that are right (flip-flop), exact match (the other two)
    floor     the error of a model that gives the most frequent answer everywhere
    learned   one of the schemes that are compared has an error in distribution of at most half its floor

There is no verdict where no scheme learned the task, nor where all make hardly any errors.
"Relative" in the paper is a learned vector per distance; RoPE stands for it here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from position_papers.kit import (
    Above,
    Cache,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Sample,
    Scale,
    Scored,
    ScoreOptions,
    Subject,
    between,
    draw_scores,
    evidence,
    first_of,
    handles,
    in_layers,
    in_legend,
    in_words,
    missing,
    note,
    numbers_of,
    of_tasks,
    records_of,
    score_subject,
    score_table,
    trained_alike,
    unmeasured,
)
from position_papers.training.trained import configured_task, recorded_scores
from repo_interp.checkpoint_files.stored import stored_digest
from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.tasks import Prompt, Task
from repo_interp.tasks.task import Response

COPE = "cope"
RIVALS = {"rope": "RoPE", "learned": "learned absolute positions"}
"""Schemes that CoPE is compared with, and what rules call them."""
IN_DISTRIBUTION = "in_distribution"
LEARNED = 0.5
"""Of the floor: the largest error in distribution of a scheme that learned a task."""
CEILING, CLOSE = 5.0, "CoPE and a rival make hardly any errors (a ceiling)"
"""Per cent: errors up to which this is said."""


@dataclass(frozen=True)
class LowerError(Above):
    """CoPE's error is below that of each rival; nothing is said where nobody learned the task, or
    no error is large enough.
    """

    rivals: tuple[str, ...] = tuple(RIVALS.values())
    relation: str = "below"
    required: tuple[str, ...] | None = ()
    apart: float = 1.0
    """Per cent."""

    @property
    def words(self) -> str:
        """The rule in words."""
        return (
            f"{super().words}; not measurable where all of these errors are at most {self.apart:g} "
            "%, or no scheme learned the task: has an error in distribution of at most "
            f"{LEARNED:g} of that of always giving the most frequent answer"
        )


@dataclass(frozen=True)
class Alike:
    """Checkpoints that were trained on the same task."""

    title: str
    scored: Sequence[Scored]
    floors: Mapping[str, float]
    """By test set, in per cent."""

    @property
    def given(self) -> dict[str, Scored]:
        """The checkpoints that are compared, by scheme."""
        return {
            name: each
            for name in (COPE, *RIVALS)
            if (each := first_of(self.scored, name)) is not None
        }

    def shown(self, errors: Mapping[str, Sample], test_set: str) -> str:
        """Errors beside their floor in words."""
        each = [f"{name} {100 * sample.mean:.3g} %" for name, sample in errors.items()]
        return ", ".join([*each, f"always the most frequent answer {self.floors[test_set]:.3g} %"])

    @property
    def not_learned(self) -> str:
        """By which errors no scheme learned the task; "" where one did."""
        errors = {name: errors_of(each, IN_DISTRIBUTION) for name, each in self.given.items()}
        if any(
            100 * sample.mean <= LEARNED * self.floors[IN_DISTRIBUTION]
            for sample in errors.values()
        ):
            return ""
        return (
            "no scheme learned the task, errors in distribution: "
            f"{self.shown(errors, IN_DISTRIBUTION)}"
        )


@dataclass(frozen=True)
class ErrorTask:
    """A task whose schemes are compared by their errors."""

    name: str
    zoo: Sequence[str]
    """The zoo's checkpoints, without the name of the task."""
    asked: Sequence[tuple[Claim, str]]
    """Claims, each with a test set that it is judged on; a claim may have several."""
    title: Callable[[Any], str]
    """What the task of a checkpoint is called; those of one title are compared."""
    figure: Callable[[Any], str]
    caption: Callable[[Any], str]
    scale: Scale
    besides: tuple[str, ...] = ()
    """Options of the task in which checkpoints of one figure differ."""
    count: Callable[[Any], int] = lambda options: options.count
    """Prompts of every test set."""
    tabulate: Callable[[Claim, Alike, str], Evidence] = lambda claim, alike, test_set: lower_error(
        claim, alike, test_set
    )
    """The verdict on a claim about the errors on a test set."""


def errors_of(scored: Scored, test_set: str) -> Sample:
    """Errors as shares between 0 and 1."""
    right = scored.sample([test_set])
    return replace(right, seeds=1 - right.seeds, prompts=1 - right.prompts)


def from_record(subject: Subject, options: ScoreOptions) -> Subject:
    """The subject without weights where its record has the scores of these weights on as many
    prompts as are asked for, and on the same.
    """
    run = next(iter(recorded_scores(records_of(subject))), None)
    if run is None or run.seed != options.seed or run.prompts < options.count:
        return subject
    tied = not subject.has_weights or run.weights == stored_digest(Path(subject.path))
    return replace(subject, schemes=()) if tied else subject


def experiment(task: ErrorTask, name: str) -> Experiment:
    """The experiment on checkpoints trained on `task`, called `name`."""

    def measure(subjects: Sequence[Subject], options: ScoreOptions, cache: Cache) -> list[Alike]:
        options = replace(options, count=task.count(options))
        groups: dict[str, list[Scored]] = {}
        for each in (
            score_subject(from_record(subject, options), options, cache) for subject in subjects
        ):
            groups.setdefault(task.title(configured_task(each.configuration)), []).append(each)
        return [
            Alike(title, group, floors(group[0], options, cache)) for title, group in groups.items()
        ]

    def tabulate(groups: Sequence[Alike]) -> Iterator[Evidence]:
        for alike in groups:
            for claim, test_set in task.asked if COPE in alike.given else ():
                yield task.tabulate(claim, alike, test_set)

    def draw(groups: Sequence[Alike]) -> Iterator[Drawing]:
        learned = [alike for alike in groups if not alike.not_learned] or list(groups)
        tables = {alike.title: error_table(alike) for alike in groups}
        own = configured_task(groups[0].scored[0].configuration)
        left_out = [each for each in groups if each not in learned]
        drawn = errors_caption([each for alike in learned for each in alike.scored])
        silent = [f"Not drawn: {alike.title} - {alike.not_learned}." for alike in left_out]
        caption = " ".join([task.caption(own), drawn, *silent])
        panels = {alike.title: tables[alike.title] for alike in learned}
        data = xr.concat(
            tables.values(), dim="checkpoint", join="outer", coords="minimal", compat="override"
        )
        yield Drawing(task.figure(own), partial(errors_by_test_set, panels), caption, data)

    otherwise = f"no checkpoint with CoPE in every layer, trained on {task.name}, was given"
    zoo = tuple(f"{task.name}/{each}" for each in task.zoo)
    needs = Needs(trained_alike(of_tasks(task.name), task.besides), otherwise, zoo, task.name)
    return Experiment(
        name,
        tuple(dict.fromkeys(claim for claim, _ in task.asked)),
        needs,
        measure,
        tabulate,
        draw,
        task.scale,
    )


# ---- the floor -----------------------------------------------------------------------------------


def floors(scored: Scored, options: ScoreOptions, cache: Cache) -> dict[str, float]:
    """The floor of every test set of the task that a checkpoint was trained on, in per cent."""
    task = configured_task(scored.configuration)
    depends = {
        "task": json.dumps([task.name, task.options()], sort_keys=True),
        "count": options.count,
        "seed": options.seed,
    }
    floor = cache.get(measure_floors, depends, task, options.count, options.seed)["floor"]
    return floor.to_series().to_dict()


def measure_floors(task: Task, count: int, seed: int) -> xr.Dataset:
    """`floor [test_set]` in per cent, of `count` prompts each."""
    values = [
        100 * (1 - always_the_same(task, task.prompts(count, seed, name)))
        for name in task.test_sets
    ]
    return xr.Dataset({"floor": ("test_set", values)}, {"test_set": list(task.test_sets)})


def always_the_same(task: Task, prompts: Sequence[Prompt]) -> float:
    """The score of a model that gives the most frequent target of `prompts` everywhere."""
    targets = [[prompt.tokens[at] for at in task.targets(prompt)] for prompt in prompts]
    ((most, _),) = Counter(chain.from_iterable(targets)).most_common(1)
    return float(task.score([Response((most,) * len(each)) for each in targets], prompts).mean())


# ---- tabulated --------------------------------------------------------------------------------------


def lower_error(claim: Claim, alike: Alike, test_set: str) -> Evidence:
    """The verdict on whether CoPE's error on a test set is below those of its rivals."""
    rule = claim.rule
    assert isinstance(rule, LowerError)
    cope = alike.given[COPE]
    names = [name for name, called in RIVALS.items() if called in rule.rivals]
    given = {name: each for name, each in alike.given.items() if name in (COPE, *names)}
    compared = {name: each for name, each in given.items() if test_set in each.test_sets}
    unscored = [each.name for name, each in given.items() if name not in compared]
    absent = [
        missing([name for name in names if name not in given], cope.configuration.task),
        f"{', '.join(unscored)} without a score on {test_set}" if unscored else "",
    ]
    if COPE not in compared or len(compared) == 1:
        return unmeasured(claim, cope.name, "; ".join(filter(None, absent)))
    samples = {name: errors_of(each, test_set) for name, each in compared.items()}
    errors = {name: 100 * sample.mean for name, sample in samples.items()}
    shown = alike.shown(samples, test_set)
    # 100 (1 - 0.99) is a little more than 1
    easy = np.round(list(errors.values()), 9).max() <= rule.apart
    differences = {
        name: between(samples[name], samples[COPE]) for name in names if name in compared
    }
    near = max(errors[COPE], min(errors[name] for name in differences)) <= CEILING
    apart = in_words(differences, "below", " points", 100)
    silent = alike.not_learned or (
        f"too easy to tell the schemes apart, errors: {shown}" if easy else ""
    )
    return evidence(
        claim,
        cope.name,
        f"error in {alike.title}, test set {test_set}, %",
        {rule.quantity: {RIVALS[name]: difference for name, difference in differences.items()}},
        **numbers_of(samples[COPE], 100),
        control=shown.partition(", ")[2],
        note=note(
            list(compared.values()),
            shown,
            CLOSE if near else "",
            apart,
            *absent,
        ),
        unmeasurable=(silent, apart) if silent else (),
    )


# ---- drawn ---------------------------------------------------------------------------------------

_FLOOR: Mapping[str, Any] = {"color": "#222222", "linewidth": 0.7, "linestyle": "--"}


def error_table(alike: Alike) -> xr.Dataset:
    """Errors [checkpoint, test_set, seed] in per cent with their standard errors over prompts and
    their floors [checkpoint, test_set], of the test sets that several checkpoints have, as
    `errors_by_test_set` draws them.
    """
    counts = Counter(name for each in alike.scored for name in each.test_sets)
    names = [name for name, count in counts.items() if count > 1 or len(alike.scored) == 1]
    layouts = [in_layers(each) for each in alike.scored]
    labels = [in_legend(each, alike.scored) for each in alike.scored]
    table = score_table(alike.scored, names).assign_coords(
        layout=("checkpoint", layouts), label=("checkpoint", labels)
    )
    axes, unit = ("checkpoint", "test_set"), {"units": "%"}
    errors = [[100 * _error_of_one_seed(each, name) for name in names] for each in alike.scored]
    return table.assign(
        score=(100 * (1 - table["score"])).assign_attrs(
            long_name=f"error (1 - {alike.scored[0].metric})", **unit
        ),
        standard_error=(axes, errors, {"long_name": "standard error over prompts", **unit}),
        floor=(
            axes,
            [[alike.floors[name] for name in names]] * len(alike.scored),
            {"long_name": "error of one answer", **unit},
        ),
    )


def _error_of_one_seed(scored: Scored, test_set: str) -> float:
    """The standard error over prompts; NaN where there are other seeds, or no score."""
    sample = scored.sample([test_set]) if test_set in scored.test_sets else None
    return (
        np.nan
        if sample is None or len(sample.seeds) != 1 or sample.standard_error is None
        else sample.standard_error
    )


@style()
def errors_by_test_set(panels: Mapping[str, xr.Dataset]) -> PaperFigure:
    """Every error table of `panels`, by its title, one row each (CoPE tables 2 to 4); dashed: the
    floor.
    """
    figure = paper_figure(PAGE_WIDTH, 0.45 + 1.55 * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False, sharey=True)[:, 0]
    entries: dict[str, Line2D] = {}
    for ax, (title, data) in zip(axes, panels.items(), strict=True):
        names = [str(name).replace("_", " ") for name in data["test_set"].values]
        draw_scores(ax, data.assign_coords(test_set=names)).set_title(title[:1].upper() + title[1:])
        entries |= {str(entry.get_label()): entry for entry in handles(data)}
        for place, floor in enumerate(data["floor"].isel(checkpoint=0).values):
            ax.hlines(floor, place - 0.4, place + 0.4, **_FLOOR, gid="floor")
    axes[0].set_ylim(bottom=-2)  # marks at 0 are seen whole
    legend_below(
        figure,
        [*entries.values(), Line2D([], [], **_FLOOR, label="always the most frequent answer")],
    )
    return figure


def errors_caption(scored: Sequence[Scored]) -> str:
    """The sentences of a caption on the training seeds and prompts behind the errors."""
    samples = [each.sample(each.test_sets[:1]) for each in scored]
    seeds, prompts = (
        {min(counts), max(counts)}
        for counts in zip(*((len(own.seeds), own.count) for own in samples), strict=True)
    )
    return (
        f"Marks: means over training seeds ({' to '.join(map(str, sorted(seeds)))}); small "
        "dots: each; bars of a single seed: standard "
        f"error over prompts; {' to '.join(map(str, sorted(prompts)))} prompts each. No "
        "mark: no score; learned positions end at the "
        "training length. Dashed: the error of always giving the most frequent answer."
    )
