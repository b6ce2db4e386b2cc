"""An experiment of a paper: its claims with their rules, what it needs, how it is measured, judged
and drawn - one object, in one file.

    checkpoints -> needs.groups -> measure (kept by its own file) -> tabulate -> table of evidence, which `kit.judge` reads
                                                                  -> draw     -> figures with captions and data

Measuring is the only expensive part, and the only one that is kept. Knows nothing about any paper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import xarray as xr
from matplotlib.figure import Figure

from position_papers.items import Item
from position_papers.kit.cache import Cache
from position_papers.kit.charts import draw
from position_papers.kit.judge.claims import Claim, Evidence, unmeasured
from position_papers.kit.scale import Scale
from position_papers.kit.subjects import Subject

Part = TypeVar("Part", xr.Dataset, xr.DataArray)


@dataclass(frozen=True)
class Drawing:
    """A figure with what belongs to it."""

    name: str
    """Stem of its files."""
    chart: partial[Any]
    """What draws it, and its arguments, which `kit.charts` can store."""
    caption: str
    data: xr.Dataset
    """The numbers behind the figure, kept beside it."""

    @property
    def figure(self) -> Figure:
        """The figure, drawn now."""
        return draw(self.chart)


@dataclass(frozen=True)
class Needs:
    """Which checkpoints an experiment is about, and why its claims cannot be measured without
    them.
    """

    groups: Callable[[Sequence[Subject]], Sequence[Sequence[Subject]]]
    """The checkpoints that are measured together, out of all that are given: one each, or those
    that are compared.
    """
    otherwise: str
    """Why nothing can be measured where no checkpoint fits, as a note of the verdict."""
    zoo: tuple[str, ...] = ()
    """Names of the checkpoints that come with the package and fit."""
    checkpoint: str = "none"
    """The name in the column of checkpoints where none fits."""
    otherwise_of: Mapping[str, str] = field(default_factory=dict)
    """Why nothing can be measured of those claims, by label, that have a reason of their own."""
    why_not: Callable[[Subject, Any, Cache], Sequence[str]] = lambda subject, options, cache: ()
    """Why a checkpoint that fits cannot be judged nevertheless, so that rows on it are not
    measurable; empty where it can.

    The first text says it, others by which numbers.
    """


@dataclass(frozen=True)
class Experiment:
    """See the module.

    `tabulate` and `draw` see what `measure` returns - datasets, a tree, runs with names - and nothing
    else.
    """

    name: str
    claims: tuple[Claim, ...]
    needs: Needs
    measure: Callable[[Sequence[Subject], Any, Cache], Any]
    """What is measured of one group of checkpoints, with the paper's options; expensive parts go
    through `Cache.get`.
    """
    tabulate: Callable[[Any], Iterable[Evidence]]
    """The evidence on its claims, for the table that `kit.judge` reads."""
    draw: Callable[[Any], Iterator[Drawing]]
    scale: Scale = field(default_factory=Scale)
    """The model that the paper's claims are about."""


@dataclass(frozen=True)
class Paper:
    """The experiments of a paper, and how much of them is measured."""

    name: str
    title: str
    experiments: tuple[Experiment, ...]
    options: type
    """A frozen dataclass of how much is measured; every field has a default, `seed` and `device`
    among them.
    """
    fast: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the options for a quick look."""
    items: tuple[Item, ...] = ()
    """Its figures and tables, each with what makes it again or why nothing does."""
    drawn: tuple[Item, ...] = ()
    """Those of the items whose figures are drawn; empty: all figures."""
    terms: str = ""
    """What words of its claims mean, as sentences, for the page over all papers."""

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Every claim that an experiment judges, in order."""
        return tuple(
            dict.fromkeys(claim for experiment in self.experiments for claim in experiment.claims)
        )

    @property
    def zoo(self) -> tuple[str, ...]:
        """Names of the checkpoints that come with the package and that an experiment is about."""
        return tuple(
            dict.fromkeys(name for experiment in self.experiments for name in experiment.needs.zoo)
        )


@dataclass(frozen=True)
class Result:
    """The figures and the evidence of one experiment on one group of checkpoints."""

    experiment: Experiment
    drawings: tuple[Drawing, ...]
    evidence: tuple[Evidence, ...]


def run(
    experiment: Experiment,
    subjects: Sequence[Subject],
    options: Any,
    cache: Cache,
    progress: Callable[[str], None],
) -> Iterator[Result]:
    """The result of `experiment` on every group of `subjects` that it is about.

    At the end comes why the claims that no group speaks about are not measurable. `progress` is
    called with what is being done.
    """
    drawings: list[tuple[Sequence[Subject], tuple[Drawing, ...]]] = []
    told: list[tuple[Evidence, ...]] = []
    seen: set[tuple[str, ...]] = set()
    for group in experiment.needs.groups(subjects):
        progress(
            f"{experiment.name}: {', '.join(subject.name for subject in group)}"
            if group
            else experiment.name
        )
        data = experiment.measure(group, options, cache)
        if data is None:
            continue
        told.append(evidence(experiment, data, reasons_against(experiment, group, options, cache)))
        drawings.append(
            (group, tuple(experiment.draw(data)) if _is_drawn(experiment, group, seen) else ())
        )
    for of_group, drawn in zip(told, _distinct_names(drawings), strict=True):
        yield Result(experiment, drawn, of_group)
    known, needs = {each.claim for of_group in told for each in of_group}, experiment.needs
    missing = [claim for claim in experiment.claims if claim not in known]
    if missing:
        reasons = {claim: needs.otherwise_of.get(claim.label, needs.otherwise) for claim in missing}
        yield Result(
            experiment,
            (),
            tuple(unmeasured(claim, needs.checkpoint, reason) for claim, reason in reasons.items()),
        )


def _is_drawn(experiment: Experiment, group: Sequence[Subject], seen: set[tuple[str, ...]]) -> bool:
    """Whether `group` gets figures: of checkpoints of one task and scheme the first does, and the
    one that the experiment names first.

    Variants of a model look alike; their numbers are judged all the same. `seen` holds what was
    drawn already.
    """
    if len(group) != 1:
        return True
    (subject,) = group
    like = (subject.task.name if subject.task else subject.name, *subject.schemes[-1:])
    if like in seen and subject.name not in experiment.needs.zoo[:1]:
        return False
    seen.add(like)
    return True


def _distinct_names(
    drawings: Sequence[tuple[Sequence[Subject], tuple[Drawing, ...]]],
) -> Iterator[tuple[Drawing, ...]]:
    """The drawings of every group; those of one name in several groups are also called by their
    group's first checkpoint.
    """
    names = Counter(drawing.name for _, drawn in drawings for drawing in drawn)
    for group, drawn in drawings:
        yield tuple(
            replace(drawing, name=f"{drawing.name}_{group[0].name}")
            if names[drawing.name] > 1 and group
            else drawing
            for drawing in drawn
        )


def reasons_against(
    experiment: Experiment, group: Sequence[Subject], options: Any, cache: Cache
) -> dict[str, Sequence[str]]:
    """Why checkpoints of a group cannot be judged, by name; nothing for those that can."""
    return {subject.name: experiment.needs.why_not(subject, options, cache) for subject in group}


def evidence(
    experiment: Experiment, data: Any, reasons: Mapping[str, Sequence[str]]
) -> tuple[Evidence, ...]:
    """The evidence from `data` of one group; checkpoints with one of `reasons` are not
    measurable.
    """
    return tuple(
        own.without_a_number(*reasons.get(own.checkpoint, ())) for own in experiment.tabulate(data)
    )


def joined(parts: Mapping[Any, Part], axis: str, join: Literal["exact", "outer"] = "exact") -> Part:
    """`parts` side by side along a new axis of their names; other coordinates are the first's.

    "exact": raises ValueError where they differ in an axis; "outer": NaN where one lacks a place of
    it.
    """
    either: Any = list(parts.values())  # xarray's types want to know which of the two
    return xr.concat(
        either,
        dim=xr.IndexVariable(axis, list(parts)),
        join=join,
        coords="minimal",
        compat="override",
    )


Groups = Callable[[Sequence[Subject]], Sequence[Sequence[Subject]]]
"""Which checkpoints are measured together, out of all that are given."""


def each(fits: Callable[[Subject], bool]) -> Groups:
    """Groups of one checkpoint each: those that fit."""
    return lambda subjects: [[subject] for subject in subjects if fits(subject)]


def together(fits: Callable[[Subject], bool]) -> Groups:
    """One group of all checkpoints that fit; none where none does."""
    return alike(fits, lambda subject: None)


def trained_alike(fits: Callable[[Subject], bool], besides: Sequence[str] = ()) -> Groups:
    """Groups of those that fit and were trained on a task with the same options, `besides` those of
    that name.
    """

    def trained_on(subject: Subject) -> Any:
        assert subject.configuration is not None, subject.path
        options = subject.configuration.task_options.items()
        return subject.configuration.task_size, *sorted(
            option for option in options if option[0] not in besides
        )

    return alike(fits, trained_on)


def asked_the_same(fits: Callable[[Subject], bool]) -> Groups:
    """Groups of those that fit and can be given the same prompts: one per task (tokenizer, where
    there is none) and training length.
    """
    return alike(
        fits, lambda subject: (subject.task or subject.tokenizer_digest, subject.training_length)
    )


def alike(fits: Callable[[Subject], bool], by: Callable[[Subject], Any]) -> Groups:
    """Groups of those that fit, by what `by` gives of each."""

    def groups(subjects: Sequence[Subject]) -> Sequence[Sequence[Subject]]:
        found: dict[Any, list[Subject]] = {}
        for subject in filter(fits, subjects):
            found.setdefault(by(subject), []).append(subject)
        return list(found.values())

    return groups


def without_checkpoints(subjects: Sequence[Subject]) -> Sequence[Sequence[Subject]]:
    """One group without checkpoints, for what is measured on fresh models."""
    return [()]
