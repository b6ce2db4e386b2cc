"""What a card measures: a column for every task, and budgets of columns and seeds.

    like training      test sets `inside`: a task is learned where every seed scores `learned`
    unlike training    mean score over the test sets `beyond`, which are longer, shorter or made
                       otherwise: what schemes are compared by

On reversal, flip_flop and selective_copy every scheme that has records ends at .99 or more like
training, so that a score there compares nothing. Budgets differ in tasks and seeds, never in steps:
with a third of them reversal ranks schemes the other way round. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from position_papers.training.configuration import TrainingConfiguration, joined, replaced
from position_papers.training.plan import PLAN, recipe
from repo_interp.errors import InputError

LEARNED = 0.95
"""Score like training from which a run has learned a task."""


@dataclass(frozen=True)
class Column:
    """A task and the test sets that schemes are compared on."""

    task: str
    inside: tuple[str, ...]
    """Test sets as long as training and made as it is."""
    beyond: tuple[str, ...]
    learned: float | None = LEARNED
    """Least score `inside` of a run that has learned; None: the metric has no such score."""
    start: str = ""
    """TASK/NAME of the zoo that is trained first and continued, with the same seed."""
    seeds: tuple[int, ...] = ()
    """Seeds in the place of 0, 1, 2, where a start ships with others."""
    fields: Mapping[str, Any] | None = None
    """Fields of the training; None: the task's recipe."""

    def configuration(self, scheme: str, seed: int, **more: Any) -> TrainingConfiguration:
        """How a scheme is trained on the task.

        Args:
            scheme: Layout.
            seed: Seed of weights and data.
            **more: Further fields, over those of the recipe.

        Returns:
            The configuration; what is scored meanwhile is left out, which changes no weight.
        """
        stated = recipe(self.task, bool(self.start)) if self.fields is None else dict(self.fields)
        own = {"scheme": scheme, "seed": seed, "score_every": 0}
        return replaced(TrainingConfiguration(task=self.task), joined(joined(stated, own), more))

    def seed(self, number: int) -> int:
        """The seed in the place of `number`."""
        return self.seeds[number] if number < len(self.seeds) else number


COLUMNS: Mapping[str, Column] = {
    column.task: column
    for column in (
        Column("reversal", ("20",), ("22", "24", "26")),
        Column("flip_flop", ("in_distribution",), ("sparse", "dense", "long_in_distribution")),
        Column("selective_copy", ("in_distribution",), ("dense", "sparse")),
        Column("counting", ("in_distribution",), ("longer", "shorter")),
        Column("copying", ("4",), ("6", "8", "10", "12", "14", "16")),
        Column("language", ("256",), ("512", "1024"), learned=None),
        # The seeds of its start whose weights ship
        Column("niah_keys", ("128",), ("256", "512"), LEARNED, "niah_keys/pretrained", (9, 10, 11)),
    )
}
"""By task, the cheapest first."""


@dataclass(frozen=True)
class Budget:
    """Which columns are filled, with which seeds."""

    tasks: tuple[str, ...]
    seeds: tuple[int, ...]


BUDGETS: Mapping[str, Budget] = {
    "quick": Budget(("reversal", "flip_flop", "selective_copy"), (0,)),
    "standard": Budget(tuple(COLUMNS), (0, 1, 2)),
}


def columns_of(tasks: Sequence[str]) -> tuple[Column, ...]:
    """Look columns up.

    Args:
        tasks: Names of tasks.

    Returns:
        Their columns, in the order given.

    Raises:
        InputError: A task has no column.
    """
    for task in tasks:
        if task not in COLUMNS:
            raise InputError(f"no card has a task {task!r:.80}; there are {', '.join(COLUMNS)}")
    return tuple(COLUMNS[task] for task in tasks)


def plain_layout(task: str, scheme: str) -> str:
    """The layout by which the zoo has a scheme on a task.

    Args:
        task: A task.
        scheme: Name of a scheme, or of a period of two.

    Returns:
        The planned layout; of a scheme that is not planned there, its name, or that of RePo's kin
        as RePo has it.
    """
    planned = {each.name: each.scheme for each in PLAN}
    if f"{task}/{scheme}" in planned:
        return planned[f"{task}/{scheme}"]
    # RePo alone on its own tasks; on others its layers begin at a third, as in its paper
    start = planned.get(f"{task}/repo", "repo@1/3").partition("@")[2] if task != "reversal" else ""
    return f"{scheme}@{start}" if start and scheme.startswith("repo") else scheme
