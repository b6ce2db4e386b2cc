"""An experiment of a paper, as one object in one file: claims with rules, requirements,
measurement, table of evidence and drawings.

    checkpoints -> needs.groups -> measure (kept by its own file) -> tabulate -> table of evidence, which `kit.judge` reads
                                                                  -> draw     -> figures with captions and data

Only measuring is expensive, and only its results are cached. This module knows nothing about single
papers.
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
    """A figure with its caption and data."""

    name: str
    """Stem of the names of its files."""
    chart: partial[Any]
    """Function that draws it, with arguments that `kit.charts` can store."""
    caption: str
    data: xr.Dataset
    """The numbers behind the figure, stored with it."""

    @property
    def figure(self) -> Figure:
        """Draw the figure."""
        return draw(self.chart)


@dataclass(frozen=True)
class Needs:
    """The checkpoints that an experiment needs, and the reasons for notes if they are missing."""

    groups: Callable[[Sequence[Subject]], Sequence[Sequence[Subject]]]
    """Function from all checkpoints to groups that are measured together: single checkpoints, or
    checkpoints to compare.
    """
    otherwise: str
    """Note of the verdict if no checkpoint fits."""
    zoo: tuple[str, ...] = ()
    """Names of fitting checkpoints of the package."""
    checkpoint: str = "none"
    """Entry of the column of checkpoints if none fits."""
    otherwise_of: Mapping[str, str] = field(default_factory=dict)
    """Separate notes of single claims, by label."""
    why_not: Callable[[Subject, Any, Cache], Sequence[str]] = lambda subject, options, cache: ()
    """Function that returns why a fitting checkpoint cannot be judged, so that its rows are not
    measurable; empty if it can.

    The first text is the reason, further texts are the numbers behind it.
    """


@dataclass(frozen=True)
class Experiment:
    """See the module.

    `tabulate` and `draw` see only the result of `measure`: datasets, a tree, or runs with names.
    """

    name: str
    claims: tuple[Claim, ...]
    needs: Needs
    measure: Callable[[Sequence[Subject], Any, Cache], Any]
    """Measure one group of checkpoints with the paper's options; expensive parts use `Cache.get`.
    """
    tabulate: Callable[[Any], Iterable[Evidence]]
    """Return the evidence on the claims, for the table that `kit.judge` reads."""
    draw: Callable[[Any], Iterator[Drawing]]
    scale: Scale = field(default_factory=Scale)
    """The model that the paper's claims are about."""


@dataclass(frozen=True)
class Paper:
    """The experiments of a paper, and their options."""

    name: str
    title: str
    experiments: tuple[Experiment, ...]
    options: type
    """A frozen dataclass of options, such as numbers of prompts, with defaults; `seed` and `device`
    are among the fields.
    """
    fast: Mapping[str, Any] = field(default_factory=dict)
    """Values of the options for a quick look."""
    items: tuple[Item, ...] = ()
    """Figures and tables of the paper, each with our experiment, or the reason why there is none.
    """
    drawn: tuple[Item, ...] = ()
    """Items whose figures are drawn; empty: all figures."""
    terms: str = ""
    """Sentences that explain terms of the claims, for the page over all papers."""

    @property
    def claims(self) -> tuple[Claim, ...]:
        """All claims that the experiments judge, in order."""
        return tuple(
            dict.fromkeys(claim for experiment in self.experiments for claim in experiment.claims)
        )

    @property
    def zoo(self) -> tuple[str, ...]:
        """Names of the checkpoints of the package that the experiments use."""
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
    """Yield the result of `experiment` on every group of `subjects` that it needs.

    The last result has the reasons for claims that no group can judge. `progress` is called with
    the name of the current work.
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
    """Whether `group` gets figures: the first group of each task and scheme does, and the group
    that the experiment names first.

    Figures of variants of a model look alike, so only their numbers are judged. `seen` has the
    groups that were drawn already.
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
    """Return the drawings of all groups; if groups share a name, it is extended by the group's
    first checkpoint.
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
    """Return why checkpoints of a group cannot be judged, by name; others are missing."""
    return {subject.name: experiment.needs.why_not(subject, options, cache) for subject in group}


def evidence(
    experiment: Experiment, data: Any, reasons: Mapping[str, Sequence[str]]
) -> tuple[Evidence, ...]:
    """Return the evidence from `data` of one group; checkpoints with `reasons` are not measurable."""
    return tuple(
        own.without_a_number(*reasons.get(own.checkpoint, ())) for own in experiment.tabulate(data)
    )


def joined(parts: Mapping[Any, Part], axis: str, join: Literal["exact", "outer"] = "exact") -> Part:
    """Join `parts` along a new axis of their names; other coordinates are those of the first part.

    "exact" raises ValueError if parts differ in an axis; "outer" gives NaN for labels that a part
    lacks.
    """
    either: Any = list(parts.values())  # Any, since xarray has separate types for the two
    return xr.concat(
        either,
        dim=xr.IndexVariable(axis, list(parts)),
        join=join,
        coords="minimal",
        compat="override",
    )


Groups = Callable[[Sequence[Subject]], Sequence[Sequence[Subject]]]
"""Function from all checkpoints to groups that are measured together."""


def each(fits: Callable[[Subject], bool]) -> Groups:
    """Make a group for each checkpoint that fits."""
    return lambda subjects: [[subject] for subject in subjects if fits(subject)]


def together(fits: Callable[[Subject], bool]) -> Groups:
    """Make one group of all checkpoints that fit; no group if none fits."""
    return alike(fits, lambda subject: None)


def trained_alike(fits: Callable[[Subject], bool], besides: Sequence[str] = ()) -> Groups:
    """Make groups of fitting checkpoints that were trained on a task with equal options, except the
    options named in `besides`.
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
    """Make one group without checkpoints, for measurements on fresh models."""
    return [()]
