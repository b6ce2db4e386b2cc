"""Build one paper's page in its directory: measure what is not kept yet, judge, draw, write - and how long that takes.

    options       the paper's defaults, changed by NAME=VALUE for every paper that has it, PAPER.NAME=VALUE for one
    durations     what took how long, in a file beside what was measured, so that the next build is told of it before it starts

Interrupted builds are remembered as interrupted. Knows nothing about any paper, nor about terminals.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from position_papers.kit.cache import Cache
from position_papers.kit.claims import Verdict
from position_papers.kit.experiment import Experiment, Paper, run
from position_papers.kit.paper_directory import is_made_from, write_paper
from position_papers.kit.subjects import Given, Subject, file_digest
from position_papers.tasks.corpus import INSTALLED
from position_papers.tasks.installed import text_record
from repo_interp import processes
from repo_interp.errors import InputError
from repo_interp.files import write_text
from repo_interp.run import versions
from repo_interp.values import value_of


@dataclass(frozen=True)
class Build:
    """One paper, with everything that decides its figures."""

    paper: Paper
    given: Given
    options: Any
    command: str
    """What makes just this paper's figures again."""
    directory: Path

    @property
    def name(self) -> str:
        """The paper's name."""
        return self.paper.name

    @property
    def provenance(self) -> dict[str, str]:
        """Everything that decides the bytes of the figures."""
        digests = {f"checkpoint {name}": f"sha256 {digest}" for name, digest in self.given.digests.items()}
        files = {f"data {name}": f"sha256 {file_digest(file)}" for name, file in getattr(self.options, "data", ())}
        corpus = getattr(self.options, "corpus", "")
        texts = text_record(INSTALLED[corpus]) if corpus in INSTALLED else {}
        made_by = {"options": str(self.options), **versions()}
        return {"command": self.command, **digests, **files, **texts, **made_by}

    @property
    def is_up_to_date(self) -> bool:
        """Whether the directory holds the figures that `make` would write."""
        return is_made_from(self.directory, self.provenance)

    def previous_duration(self, durations: Durations) -> Duration | None:
        """How long the last build of the same experiments took on the same checkpoints with the same options; None where there was none."""
        return durations.get(self._key)

    def longest_other_duration(self, durations: Durations) -> Duration | None:
        """How long the longest build of this paper took, on any checkpoints with any options; None where there was none."""
        return durations.longest(f"{self.name} ")

    def estimate(self) -> float | None:
        """Seconds that a build takes at least when nothing is kept, from a timed part; None where no experiment can say."""
        subjects = self.given.subjects()
        costs = [
            experiment.cost(group, self.options)
            for experiment in self.paper.experiments
            if experiment.cost is not None
            for group in experiment.needs.groups(subjects)
        ]
        return sum(costs) if costs else None

    def make(self, directory: Path, progress: Callable[[str], None], durations: Durations) -> tuple[list[Verdict], list[Path]]:
        """Measure, judge, draw, write; what is measured is kept in `directory`. Returns the verdicts and the files."""
        cache, start, finished = Cache(directory), time.monotonic(), False
        try:
            subjects = self.given.subjects()
            results = [
                result
                for experiment in self.paper.experiments
                for result in run(experiment, subjects, self.options, cache, progress)
            ]
            files = write_paper(self.directory, self.paper.title, results, self.given.paths, self.command, self.provenance)
            finished = True
        finally:
            taken = time.monotonic() - start
            durations.put(self._key, Duration(max(taken, cache.seconds), finished))
        return [verdict for result in results for verdict in result.verdicts], files

    @property
    def _key(self) -> str:
        """What durations are kept by: the paper, its experiments, options and checkpoints."""
        digests = ",".join(f"{name}={digest[:12]}" for name, digest in sorted(self.given.digests.items()))
        names = ",".join(experiment.name for experiment in self.paper.experiments)
        return f"{self.name} {names} {self.options} {digests}"


def measure_together(builds: Sequence[Build], directory: Path, progress: Callable[[int, int], None]) -> None:
    """Measure for all `builds`, every experiment on every group of checkpoints in one of several processes; one process does nothing here.

    What is measured is kept in `directory`, where `Build.make` finds it. `progress` is called with parts measured and in all.
    """
    if processes.count() == 1:
        return
    parts = [
        (experiment, group, build.options)
        for build in builds
        for subjects in [build.given.subjects()]
        for experiment in build.paper.experiments
        for group in experiment.needs.groups(subjects)
    ]

    def measure(part: tuple[Experiment, Sequence[Subject], Any]) -> None:
        experiment, group, options = part
        experiment.measure(group, options, Cache(directory))

    processes.spread(parts, measure, progress)


def stated_options(
    papers: Mapping[str, Paper], stated: Iterable[tuple[str, str]], fields: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The options of every paper, by its name: its defaults, changed by `fields` (by paper), changed by what a user stated as text.

    Raises InputError for what no paper has, for a value of another type, and for values that options refuse together.
    """
    values = {name: dict(fields.get(name, {})) for name in papers}
    types = {name: get_type_hints(paper.options, include_extras=True) for name, paper in papers.items()}
    known = {name: [field.name for field in dataclasses.fields(paper.options)] for name, paper in papers.items()}
    for key, text in stated:
        named, dot, option = key.rpartition(".")
        if dot and named not in papers:
            raise InputError(f"{key}={text}: {named!r} is none of the papers asked for, {', '.join(papers)}")
        meant = [name for name in papers if option in known[name] and (not dot or name == named)]
        if not meant:
            there = sorted({option for name in ([named] if dot else papers) for option in known[name]})
            raise InputError(f"there is no option {key!r}; there are {', '.join(there)}")
        for name in meant:
            values[name][option] = value_of(text, types[name][option], key)
    return {name: paper.options(**values[name]) for name, paper in papers.items()}


def with_experiments(papers: Mapping[str, Paper], wanted: Sequence[str]) -> dict[str, Paper]:
    """The papers with only the experiments `wanted`, all where none is named; without papers that have none of them.

    Raises InputError for an experiment that no paper has.
    """
    known = sorted({experiment.name for paper in papers.values() for experiment in paper.experiments})
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise InputError(f"there is no experiment {unknown[0]!r}; those of {', '.join(papers)} are {', '.join(known)}")
    chosen = {
        name: tuple(each for each in paper.experiments if not wanted or each.name in wanted) for name, paper in papers.items()
    }
    return {name: dataclasses.replace(papers[name], experiments=own) for name, own in chosen.items() if own}


def with_data(papers: Mapping[str, Paper], options: Mapping[str, Any], data: Mapping[str, str]) -> dict[str, Any]:
    """The options with the users' files (name of a data set -> path) of those papers that take some.

    Raises InputError for a data set that none takes, and for a file that is not there.
    """
    known = sorted({name for paper in papers.values() for name in paper.data_sets})
    for name, file in data.items():
        if name not in known:
            wanted = f"these take {', '.join(known)}" if known else f"{', '.join(papers)} take none"
            raise InputError(f"no figures are made from a data set {name!r}; {wanted}")
        if not Path(file).exists():
            raise InputError(f"there is no file {file} for the data set {name}")
    return {
        name: dataclasses.replace(options[name], data=tuple(item for item in data.items() if item[0] in paper.data_sets))
        if paper.data_sets
        else options[name]
        for name, paper in papers.items()
    }


@dataclass(frozen=True)
class Duration:
    """How long one earlier build took."""

    seconds: float
    finished: bool
    """False where it was interrupted."""


class Durations:
    """How long earlier builds took, remembered in a file."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Remember durations in `directory`."""
        self._file = Path(directory) / "durations.json"

    def get(self, key: str) -> Duration | None:
        """The duration kept under `key`; None where there is none."""
        known = self._read().get(key)
        return None if known is None else Duration(float(known[0]), bool(known[1]))

    def longest(self, beginning: str) -> Duration | None:
        """The longest duration of a finished build whose key starts with `beginning`; None where there is none."""
        known = [float(seconds) for key, (seconds, finished) in self._read().items() if finished and key.startswith(beginning)]
        return Duration(max(known), True) if known else None

    def put(self, key: str, duration: Duration) -> None:
        """Keep `duration` under `key`, unless it was interrupted and that of a finished build is there."""
        known = self._read()
        if not duration.finished and known.get(key, (0, False))[1]:
            return
        known[key] = (round(duration.seconds, 1), duration.finished)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._file, json.dumps(known, indent=1, sort_keys=True))

    def _read(self) -> dict[str, tuple[float, bool]]:
        try:
            return json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
