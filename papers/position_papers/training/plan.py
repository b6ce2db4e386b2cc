"""The plan of the zoo from plan.toml: every checkpoint with its training and seeds, and the recipe
of each task.

    runs/zoo/TASK/NAME        the training run of seed 0        runs/zoo/TASK/NAME/seed-N       the other seeds
    papers/zoo/TASK/NAME      weights in the package            papers/zoo/TASK/runs.jsonl      the records of all seeds

This module knows nothing about the training itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from position_papers.training.configuration import TrainingConfiguration, joined, replaced
from repo_interp.errors import InputError

RUNS = Path("runs") / "zoo"
"""Directory of training runs of the zoo, relative to the working directory."""
_STATED = tomllib.loads(Path(__file__).with_name("plan.toml").read_text(encoding="utf-8"))
ABOUT: Mapping[str, str] = {
    task: words.replace("\n", " ") for task, words in _STATED["about"].items()
}
"""Descriptions of tasks and of their numbers."""
FRESH: Mapping[str, Mapping[str, Any]] = _STATED["recipe"]
"""Default fields of trainings from random weights, by task."""
CONTINUED: Mapping[str, Mapping[str, Any]] = _STATED["continued"]
"""Default fields of trainings from a checkpoint, by task."""


def recipe(task: str, continued: bool) -> dict[str, Any]:
    """Return the fields of a training configuration for `task`; empty without a recipe."""
    return dict((CONTINUED if continued else FRESH).get(task, {}))


@dataclass(frozen=True)
class Planned:
    """One checkpoint of the zoo."""

    name: str
    """TASK/NAME, where NAME begins with the name of the scheme."""
    scheme: str
    seeds: tuple[int, ...] = (0,)
    continue_from: str = ""
    """Another planned checkpoint, with the same seed."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Differences from the task's recipe."""
    weights: tuple[int, ...] = (0,)
    """Seeds with weights in the package; the package has the records of all seeds."""

    @property
    def task(self) -> str:
        """The task of its training."""
        return self.name.split("/")[0]


@dataclass(frozen=True)
class PlannedRun:
    """One training run: a planned checkpoint with one seed."""

    planned: Planned
    seed: int
    directory: Path
    configuration: TrainingConfiguration

    @property
    def shipped(self) -> Path:
        """Its directory, relative to the zoo."""
        return _directory(Path(), self.planned.name, self.seed)


def planned_runs(plan: Iterable[Planned], runs: Path = RUNS, **changes: Any) -> list[PlannedRun]:
    """Return all runs of a plan, starts first, with `changes` of fields (None: as in the plan).

    Raises InputError for a plan with an unknown start, and for an unusable device.
    """
    changes = {name: value for name, value in changes.items() if value is not None}
    plan = list(plan)
    by_name = {planned.name: planned for planned in plan}

    def origins(planned: Planned) -> int:
        """Return the number of runs that must precede one of `planned`."""
        if not planned.continue_from:
            return 0
        if planned.continue_from not in by_name:
            raise InputError(
                f"{planned.name} continues {planned.continue_from}, which the plan lacks"
            )
        return 1 + origins(by_name[planned.continue_from])

    ordered = sorted(plan, key=origins)
    return [
        PlannedRun(
            planned,
            seed,
            _directory(runs, planned.name, seed),
            replaced(_configuration(planned, seed, runs), changes),
        )
        for planned in ordered
        for seed in planned.seeds
    ]


def chosen(plan: Iterable[Planned], names: Iterable[str]) -> tuple[Planned, ...]:
    """Return the part of a plan with names that begin with one of `names` (TASK or TASK/NAME), and
    its starts; the whole plan for no names.

    Raises InputError for a name without a match.
    """
    plan, wanted = tuple(plan), tuple(names)
    for name in wanted:
        if not any(_matches(planned.name, name) for planned in plan):
            tasks = ", ".join(dict.fromkeys(planned.task for planned in plan))
            known = f"give a task, one of {tasks}, or a TASK/NAME that `repo-interp zoo plan` lists"
            raise InputError(f"the zoo has no {name!r}; {known}")
    needed = {
        planned.name
        for planned in plan
        if not wanted or any(_matches(planned.name, name) for name in wanted)
    }
    while origins := {each.continue_from for each in plan if each.name in needed} - {"", *needed}:
        needed |= origins
    return tuple(planned for planned in plan if planned.name in needed)


def _matches(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(wanted.rstrip("/") + "/")


def _directory(runs: Path, name: str, seed: int) -> Path:
    return runs / name if seed == 0 else runs / name / f"seed-{seed}"


def _configuration(planned: Planned, seed: int, runs: Path) -> TrainingConfiguration:
    defaults = recipe(planned.task, continued=bool(planned.continue_from))
    fields = {**joined(defaults, planned.fields), "scheme": planned.scheme, "seed": seed}
    if planned.continue_from:
        fields["continue_from"] = _directory(runs, planned.continue_from, seed).as_posix()
    return replaced(TrainingConfiguration(task=planned.task), fields)


def _plan(*, ahead: bool) -> Iterator[Planned]:
    """Yield the checkpoints of plan.toml that are trained, or those that are not trained yet."""
    for group in _STATED["group"]:
        if group.get("ahead", False) is ahead:
            yield from _of_group(
                **{name: value for name, value in group.items() if name != "ahead"}
            )


def _of_group(
    task: str,
    layouts: Mapping[str, str],
    only: Mapping[str, Any] = MappingProxyType({}),
    suffix: str = "",
    **common: Any,
) -> Iterator[Planned]:
    for name, layout in layouts.items():
        stated = {"seeds": [0], "weights": [0], "fields": {}} | common | only.get(name, {})
        continued = f"{task}/{stated['continue_from']}" if "continue_from" in stated else ""
        fields = joined(common.get("fields", {}), stated["fields"])
        yield Planned(
            f"{task}/{name}{suffix}",
            layout,
            tuple(stated["seeds"]),
            continued,
            fields,
            tuple(stated["weights"]),
        )


PLAN: tuple[Planned, ...] = tuple(_plan(ahead=False))
"""Every checkpoint of the zoo."""
AHEAD: tuple[Planned, ...] = tuple(_plan(ahead=True))
"""Checkpoints that are planned and not trained yet, in the order of their importance.

`repo-interp zoo train NAME` trains them.
"""
