"""The directory of a card: all trainings of all versions of one scheme.

    DIR/card.toml                                the scheme of the card, and its versions
    DIR/versions/SHA256/TASK/seed-N/             a training run of the version with this source
    DIR/starts/NAME/seed-N/                      checkpoints from which runs of a task continue
    DIR/{card.md, card.csv, differences.png}     the card of the last call

A version is identified by the first 12 digits of the SHA-256 of its source, or "packaged" if a
package contains the scheme. Runs of an edited function are therefore separate. The card states the
number of versions, and of versions whose scores were shown, because choosing one of ten versions by
its scores selects it on these test sets.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from position_papers.card.columns import Column
from position_papers.card.directory import STATED, require_card_of, stated_versions
from position_papers.card.records import Row, Run, as_run
from position_papers.card.starts import shipped_start
from position_papers.kit.scores import unequal_budgets
from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.folder import TrainingFolder, saved_step
from position_papers.training.plan import PLAN, chosen, planned_runs
from position_papers.training.trained import line_of, seed_of
from repo_interp.checkpoint_files.options import functions_of
from repo_interp.errors import InputError
from repo_interp.positions.layouts import named_schemes
from repo_interp.storage.files import write_text

PACKAGED = "packaged"
STARTS = "starts"


@dataclass(frozen=True)
class Training:
    """One training that a card needs."""

    column: Column
    seed: int
    directory: Path
    configuration: TrainingConfiguration

    @property
    def is_finished(self) -> bool:
        """Whether the training is finished."""
        return TrainingFolder(self.directory).is_finished

    @property
    def steps_left(self) -> int:
        """Number of steps that are not logged yet."""
        if self.is_finished:
            return 0
        done = TrainingFolder(self.directory).records()
        return self.configuration.steps - (done[-1]["step"] if done else 0)


@dataclass(frozen=True)
class Trials:
    """The trainings of one version of a scheme."""

    directory: Path
    layout: str
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the scheme."""
    starts: Path | None = None
    """Directory of starts that other schemes share; None: in the directory of the card."""

    @property
    def digest(self) -> str:
        """SHA-256 of the sources of its functions; "" if all are in packages."""
        found = functions_of(named_schemes(self.layout))
        digests = [function["sha256"] for function in found.values()]
        if len(digests) < 2:
            return "".join(digests)
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    @property
    def version(self) -> Path:
        """Directory of this version."""
        return self.directory / "versions" / (self.digest[:12] or PACKAGED)

    @property
    def versions(self) -> list[str]:
        """Folders of the versions in the directory, including this one, in the order in which they
        were begun.
        """
        begun: dict[str, float] = {}
        for path in self.directory.glob("versions/*/*/*/training.toml"):
            first = begun.get(path.parts[-4], math.inf)
            begun[path.parts[-4]] = min(first, path.stat().st_mtime)
        known = [name for name in stated_versions(self.directory) if name in begun]
        # Older cards do not list their versions.
        known += sorted(begun.keys() - set(known), key=lambda name: begun[name])
        return list(dict.fromkeys([*known, self.version.name]))

    @property
    def scored(self) -> int:
        """Number of versions whose scores were shown."""
        return len({path.parts[-4] for path in self.directory.glob("versions/*/*/*/config.json")})

    def stand(self, version: str, task: str = "*") -> list[str]:
        """Describe the progress of the runs of a version.

        Args:
            version: Folder of the version.
            task: A task; "*": all tasks.

        Returns:
            A line for each run, such as "reversal, seed 0 at step 275".
        """
        found = []
        for place in sorted((self.version.parent / version).glob(f"{task}/seed-*")):
            run = TrainingFolder(place)
            if run.is_begun:
                far = "finished" if run.is_finished else f"at step {saved_step(run.state):,}"
                found.append(f"{place.parent.name}, seed {seed_of(place)} {far}")
        return found

    def claim(self) -> None:
        """Make the directory, and record the scheme of the card.

        Raises:
            InputError: The directory has the card of another scheme, or other content.
        """
        require_card_of(self.directory, self.layout)
        self.directory.mkdir(parents=True, exist_ok=True)
        write_text(
            self.directory / STATED,
            f"scheme = {json.dumps(self.layout)}\nversions = {json.dumps(self.versions)}\n",
        )

    def trainings(self, columns: Sequence[Column], seeds: Sequence[int]) -> list[Training]:
        """Plan trainings.

        Args:
            columns: Tasks in order.
            seeds: Seeds of each task.

        Returns:
            The trainings, starts first. A start is not trained if the package has its weights and
            no training of it was begun here.
        """
        starts: dict[Path, Training] = {}
        own: list[Training] = []
        for column in columns:
            for number in seeds:
                seed = column.seed(number)
                directory = self.version / column.task / f"seed-{seed}"
                if any(training.directory == directory for training in own):
                    continue  # replaces a seed that was requested too
                more: dict[str, Any] = {"device": self.device, "scheme_options": self.options}
                if column.start:
                    start = self._start(column, seed)
                    shipped = shipped_start(column.start, seed)
                    if shipped and not TrainingFolder(start.directory).is_begun:
                        more["continue_from"] = shipped
                    else:
                        starts[start.directory] = start
                        more["continue_from"] = start.directory.as_posix()
                configuration = column.configuration(self.layout, seed, **more)
                own.append(Training(column, seed, directory, configuration))
        return [*starts.values(), *own]

    def _start(self, column: Column, seed: int) -> Training:
        runs = planned_runs(chosen(PLAN, [column.start]), device=self.device)
        planned = next((run for run in runs if run.seed == seed), None)
        if planned is None:
            known = ", ".join(str(run.seed) for run in runs)
            raise InputError(
                f"{column.task} goes on from {column.start}, which has no seed {seed}; "
                f"there are {known}"
            )
        starts = self.directory / STARTS if self.starts is None else self.starts
        directory = starts / column.start.replace("/", "-") / f"seed-{seed}"
        return Training(column, seed, directory, planned.configuration)

    def row(self, column: Column) -> Row | None:
        """Return the finished runs of this version on a task.

        Args:
            column: The column.

        Returns:
            Finished runs by seed; None without any.

        Raises:
            InputError: A run has another configuration than the column.
        """
        places = sorted((self.version / column.task).glob("seed-*"), key=lambda p: seed_of(p) or 0)
        runs: list[Run] = []
        for place in places:
            if not TrainingFolder(place).is_finished:
                continue
            run = as_run(line_of(place, self.layout))
            wanted = column.configuration(self.layout, run.recorded.seed)
            if column.start:  # the continued checkpoint differs by seed
                wanted = replace(wanted, continue_from=column.start)
            if other := unequal_budgets({"run": run.recorded.configuration, "card": wanted}):
                raise InputError(f"{place} was trained otherwise ({other}); give another --out")
            runs.append(run)
        return Row(self.layout, column, tuple(runs)) if runs else None
