"""Build one paper's page in its directory: measure what is missing, judge, draw, write.

    options       the paper's defaults, changed by NAME=VALUE for every paper with this option, or PAPER.NAME=VALUE for one

This module knows nothing about single papers and terminals.
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
"""Memory of a measuring process: bytes in addition to the model, and the memory of the model as a
multiple of its stored weights.
"""


@dataclass(frozen=True)
class Build:
    """One paper, with everything that determines its figures."""

    paper: Paper
    given: Given
    options: Any
    command: str
    """Command that makes only this paper's figures again."""
    directory: Path
    formats: tuple[str, ...] = FORMATS[:1]
    """Formats of every figure."""
    whole: tuple[Paper, str] | None = None
    """If only a part of a paper is made: the whole paper and its command. Other parts then stay."""

    @property
    def name(self) -> str:
        """The paper's name."""
        return self.paper.name

    @property
    def subjects(self) -> list[Subject]:
        """The checkpoints. Language models read the text from the options, if there is one."""
        return self.given.subjects(getattr(self.options, "corpus", ""))

    @property
    def provenance(self) -> dict[str, str]:
        """Everything that determines the bytes of the figures."""
        digests = {
            f"checkpoint {name}": f"sha256 {digest}" for name, digest in self.given.digests.items()
        }
        texts = text_record(getattr(self.options, "corpus", ""))
        formats = {"formats": ",".join(self.formats)} if self.formats != FORMATS[:1] else {}
        known = {"command": self.command, **digests, **texts, **formats}
        return {**known, "options": str(self.options), **versions()}

    @property
    def changes(self) -> list[str] | None:
        """Return the parts of the provenance that changed since the same command made the
        directory; None if another command made it, or it has no evidence to judge.
        """
        before, now = provenance_of(self.directory, self.command), self.provenance
        if before is None:
            return None
        return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))

    @property
    def is_free(self) -> bool:
        """Whether the directory has no page, or a page without rows of this paper's claims."""
        if self.whole is None:
            return not self.directory.is_dir()
        return not claims_in(self.directory) & {claim.label for claim in self.paper.claims}

    def make(self, directory: Path, progress: Callable[..., None]) -> Written:
        """Measure, judge, draw and write; measurements are kept in `directory`."""
        cache, subjects = Cache(directory, progress), self.subjects
        experiments = self.paper.experiments
        with threads(
            1
        ):  # as in `measure_together`, so that results do not depend on the number of processes
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
    """A unit of work for one process: an experiment on one group of checkpoints."""

    paper: str
    experiment: str
    group: Sequence[Subject]
    options: Any
    directory: Path
    """Directory of measurements."""

    @property
    def name(self) -> str:
        """Name of the measurement: "hope: vaf: language/hope"."""
        return (
            f"{self.paper}: {self.experiment}: {', '.join(subject.name for subject in self.group)}"
        ).removesuffix(": ")

    @cached_property
    def cost(self) -> int:
        """Number of models to load: one per seed with weights."""
        return sum(len(seeds_of(subject)) for subject in self.group if subject.has_weights)

    def measure(self, experiment: Experiment) -> None:
        """Measure unless the result is kept already."""
        cache = Cache(self.directory)
        if experiment.measure(self.group, self.options, cache) is not None:
            reasons_against(experiment, self.group, self.options, cache)


def measure_together(
    builds: Sequence[Build], directory: Path, jobs: int, progress: Callable[[int, int, str], None]
) -> None:
    """Measure for all `builds` in `jobs` processes, or in all launched processes. A free process
    takes the next experiment on a group of checkpoints, the largest groups first.

    A single process does nothing here.

    Measurements are kept in `directory`, where `Build.make` finds them. `progress` is called with
    the number of measured models, the number of all models, and the name of the next part; the cost
    of a part is about proportional to its number of models. Raises KeyboardInterrupt when
    interrupted.
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
    """Measure in a separate process, which finds the experiment by its name."""
    end_when_asked()
    with threads(1):
        part.measure(
            next(each for each in paper(part.paper).experiments if each.name == part.experiment)
        )


def fitting_jobs(builds: Sequence[Build]) -> int:
    """Return the default number of processes: one per core, as long as each has memory for the
    largest checkpoint; one with an accelerator.
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
    """Return the options of every paper by name: its defaults, changed by `fields` (by paper), then
    by the texts of a user.

    Raises InputError for an option that no paper has, for a value of another type, and for values
    that exclude each other.
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
    """Return the papers with only the experiments `wanted` (empty: all), without papers that have
    none of these.

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
    """Keep only the parts of papers that reproduce some figures and tables.

    Args:
        papers: The papers, by name.
        wanted: Names of figures and tables: "3", "figure 3a", "table 1"; empty for all.

    Returns:
        The papers with only these experiments and figures, without papers that have none of these.

    Raises:
        InputError: No paper has an item of that name, or the item is not reproduced.
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
