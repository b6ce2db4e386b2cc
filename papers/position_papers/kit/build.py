"""Build one paper's page in its directory: measure what is not kept yet, judge, draw, write.

    options       the paper's defaults, changed by NAME=VALUE for every paper that has it, PAPER.NAME=VALUE for one

Knows nothing about any paper, nor about terminals.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

from position_papers import FORMATS, paper
from position_papers.items import require_items
from position_papers.kit.cache import Cache
from position_papers.kit.experiment import Experiment, Paper, reasons_against, run
from position_papers.kit.paper_directory import Written, claims_in, provenance_of, write_paper
from position_papers.kit.subjects import Given, Subject, seeds_of
from position_papers.tasks.corpus import text_record
from position_papers.training.processes import end_when_asked, side_by_side, threads
from repo_interp.errors import InputError
from repo_interp.run import versions
from repo_interp.runtime import processes
from repo_interp.runtime.memory import machine_memory
from repo_interp.runtime.option_texts import value_of

LIBRARIES, COPIES = 2 * 2**30, 6
"""Memory of a process that measures: bytes beside the model, and how many times what the stored
weights take.
"""


@dataclass(frozen=True)
class Build:
    """One paper, with everything that decides its figures."""

    paper: Paper
    given: Given
    options: Any
    command: str
    """What makes just this paper's figures again."""
    directory: Path
    formats: tuple[str, ...] = FORMATS[:1]
    """What every figure is written as."""
    whole: tuple[Paper, str] | None = None
    """The paper of which only a part is made, and what makes all of it; then the rest stays."""

    @property
    def name(self) -> str:
        """The paper's name."""
        return self.paper.name

    @property
    def subjects(self) -> list[Subject]:
        """The checkpoints; language models among them read the text that the options name, if they
        name one.
        """
        return self.given.subjects(getattr(self.options, "corpus", ""))

    @property
    def provenance(self) -> dict[str, str]:
        """Everything that decides the bytes of the figures."""
        digests = {
            f"checkpoint {name}": f"sha256 {digest}" for name, digest in self.given.digests.items()
        }
        texts = text_record(getattr(self.options, "corpus", ""))
        formats = {"formats": ",".join(self.formats)} if self.formats != FORMATS[:1] else {}
        known = {"command": self.command, **digests, **texts, **formats}
        return {**known, "options": str(self.options), **versions()}

    @property
    def changes(self) -> list[str] | None:
        """The parts of the provenance that changed since the directory was made by the same
        command; None where it was not, or has no evidence to judge.
        """
        before, now = provenance_of(self.directory, self.command), self.provenance
        if before is None:
            return None
        return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))

    @property
    def is_free(self) -> bool:
        """Whether nothing stands where it is made: no page, or one without rows of its claims."""
        if self.whole is None:
            return not self.directory.is_dir()
        return not claims_in(self.directory) & {claim.label for claim in self.paper.claims}

    def make(self, directory: Path, progress: Callable[..., None]) -> Written:
        """Measure, judge, draw, write; what is measured is kept in `directory`."""
        cache, subjects = Cache(directory, progress), self.subjects
        experiments = self.paper.experiments
        with threads(1):  # as in `measure_together`, so that any number of processes gives the same
            results = [
                result
                for each in experiments
                for result in run(each, subjects, self.options, cache, progress)
            ]
        paths, command, provenance = self.given.paths, self.command, self.provenance
        return write_paper(
            self.directory,
            self.paper,
            results,
            paths,
            command,
            {name: value for name, value in provenance.items() if name != "command"},
            self.formats,
            self.whole,
        )


@dataclass(frozen=True)
class Part:
    """What one process measures at a time: an experiment on one group of checkpoints."""

    paper: str
    experiment: str
    group: Sequence[Subject]
    options: Any
    directory: Path
    """Where what is measured is kept."""

    @property
    def name(self) -> str:
        """What is measured: "hope: vaf: language/hope"."""
        return (
            f"{self.paper}: {self.experiment}: {', '.join(subject.name for subject in self.group)}"
        ).removesuffix(": ")

    @cached_property
    def cost(self) -> int:
        """Number of models that it loads: those of all seeds that have weights."""
        return sum(len(seeds_of(subject)) for subject in self.group if subject.has_weights)

    def measure(self, experiment: Experiment) -> None:
        """Measure what is not kept yet."""
        cache = Cache(self.directory)
        if experiment.measure(self.group, self.options, cache) is not None:
            reasons_against(experiment, self.group, self.options, cache)


def measure_together(
    builds: Sequence[Build], directory: Path, jobs: int, progress: Callable[[int, int, str], None]
) -> None:
    """Measure for all `builds` in `jobs` processes, or in those that were launched together: a free
    one takes the next experiment on the next group of checkpoints, the largest groups first.

    One process does nothing here.

    What is measured is kept in `directory`, where `Build.make` finds it. `progress` is called with
    models measured, models in all, and the name of a part that is next: parts differ in cost about
    as their numbers of models do. Raises KeyboardInterrupt where it is interrupted.
    """
    experiments = {
        (build.name, experiment.name): experiment
        for build in builds
        for experiment in build.paper.experiments
    }
    parts = [
        Part(build.name, experiment.name, group, build.options, directory)
        for build in builds
        for subjects in [build.subjects]
        for experiment in build.paper.experiments
        for group in experiment.needs.groups(subjects)
    ]
    parts.sort(key=lambda part: part.cost, reverse=True)
    costs = [part.cost for part in parts]

    def told(done: int, total: int = len(parts)) -> None:
        progress(sum(costs[:done]), sum(costs), parts[min(done, total - 1)].name)

    def measure(part: Part) -> None:
        part.measure(experiments[part.paper, part.experiment])

    if processes.count() > 1:
        processes.share_work(parts, measure, told)
    elif min(jobs, len(parts)) > 1:
        told(0)
        side_by_side(parts, _measure_beside, jobs, told)


def _measure_beside(part: Part) -> None:
    """Measure in a process of its own, which finds the experiment by its name."""
    end_when_asked()
    with threads(1):
        part.measure(
            next(each for each in paper(part.paper).experiments if each.name == part.experiment)
        )


def fitting_jobs(builds: Sequence[Build]) -> int:
    """How many processes measure unless the user says it: one per core, as far as each has memory
    for the largest of the checkpoints; one where an accelerator computes.
    """
    if any(build.options.device != "cpu" for build in builds):
        return 1
    paths = [path for build in builds for path in build.given.paths.values()]
    largest = max(
        (file.stat().st_size for path in paths for file in Path(path).glob("*.safetensors")),
        default=0,
    )
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, int(min(cores, machine_memory() / (LIBRARIES + COPIES * largest))))


def stated_options(
    papers: Mapping[str, Paper],
    stated: Iterable[tuple[str, str]],
    fields: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The options of every paper, by its name: its defaults, changed by `fields` (by paper),
    changed by what a user stated as text.

    Raises InputError for what no paper has, for a value of another type, and for values that
    options refuse together.
    """
    values = {name: dict(fields.get(name, {})) for name in papers}
    types = {
        name: get_type_hints(paper.options, include_extras=True) for name, paper in papers.items()
    }
    for key, text in stated:
        named, dot, option = key.rpartition(".")
        if dot and named not in papers:
            raise InputError(
                f"{key}={text}: {named!r} is none of the papers asked for, {', '.join(papers)}"
            )
        meant = [name for name in papers if option in types[name] and (not dot or name == named)]
        if not meant:
            there = sorted(
                {option for name in ([named] if dot else papers) for option in types[name]}
            )
            raise InputError(f"there is no option {key!r}; there are {', '.join(there)}")
        for name in meant:
            values[name][option] = value_of(text, types[name][option], key)
    return {name: paper.options(**values[name]) for name, paper in papers.items()}


def with_experiments(papers: Mapping[str, Paper], wanted: Sequence[str]) -> dict[str, Paper]:
    """The papers with only the experiments `wanted`, all where none is named; without papers that
    have none of them.

    Raises InputError for an experiment that no paper has.
    """
    known = sorted(
        {experiment.name for paper in papers.values() for experiment in paper.experiments}
    )
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise InputError(
            f"there is no experiment {unknown[0]!r}; those of {', '.join(papers)} are "
            f"{', '.join(known)}"
        )
    chosen = {
        name: tuple(each for each in paper.experiments if not wanted or each.name in wanted)
        for name, paper in papers.items()
    }
    return {
        name: dataclasses.replace(papers[name], experiments=own)
        for name, own in chosen.items()
        if own
    }


def with_items(papers: Mapping[str, Paper], wanted: Sequence[str]) -> Mapping[str, Paper]:
    """Keep what makes some figures and tables again.

    Args:
        papers: The papers, by name.
        wanted: Names of figures and tables: "3", "figure 3a", "table 1"; empty for all.

    Returns:
        The papers with only these experiments and figures; without papers that have none of them.

    Raises:
        InputError: No paper has an item of that name, or it is not made here.
    """
    if not wanted:
        return papers
    require_items({name: own.items for name, own in papers.items()}, wanted)
    chosen = {}
    for name, whole in papers.items():
        drawn = tuple(item for item in whole.items if any(map(item.is_named, wanted)))
        names = {item.experiment for item in drawn}
        if own := tuple(each for each in whole.experiments if each.name in names):
            chosen[name] = dataclasses.replace(whole, experiments=own, drawn=drawn)
    return chosen
