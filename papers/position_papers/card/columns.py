"""Measurements of a card: a column for every task, and budgets of columns and seeds.

    like training      test sets `inside`: a task is learned if every seed scores `learned`
    unlike training    mean score over the test sets `beyond`, which are longer, shorter or
                       different; schemes are compared by this score

On reversal, flip_flop and selective_copy every scheme with records scores .99 or more like
training, so this score does not distinguish schemes. Budgets differ in tasks and seeds, never in
steps: with a third of the steps, reversal ranks schemes in the opposite order. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from position_papers.training.configuration import TrainingConfiguration, joined, replaced
from position_papers.training.plan import PLAN, recipe
from repo_interp.errors import InputError

LEARNED = 0.95
"""Least score like training of a run that has learned a task."""


@dataclass(frozen=True)
class Column:
    """A task and the test sets for comparing schemes."""

    task: str
    inside: tuple[str, ...]
    """Test sets with the length and distribution of training."""
    beyond: tuple[str, ...]
    learned: float | None = LEARNED
    """Least score `inside` of a run that has learned; None: the metric has no such threshold."""
    start: str = ""
    """TASK/NAME of the zoo that is trained first, with the same seed, and then continued."""
    seeds: tuple[int, ...] = ()
    """Seeds instead of 0, 1, 2, if the start ships with others."""
    fields: Mapping[str, Any] | None = None
    """Fields of the training; None: the task's recipe."""

    def configuration(self, scheme: str, seed: int, **more: Any) -> TrainingConfiguration:
        """Return the configuration to train a scheme on the task.

        Args:
            scheme: Layout.
            seed: Seed of weights and data.
            **more: Further fields, over those of the recipe.

        Returns:
            The configuration, without scores during training, which do not change weights.
        """
        stated = recipe(self.task, bool(self.start)) if self.fields is None else dict(self.fields)
        own = {"scheme": scheme, "seed": seed, "score_every": 0}
        return replaced(TrainingConfiguration(task=self.task), joined(joined(stated, own), more))

    def seed(self, number: int) -> int:
        """Return the seed for `number`."""
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
        # Seeds of the start with weights in the package
        Column("niah_keys", ("128",), ("256", "512"), LEARNED, "niah_keys/pretrained", (9, 10, 11)),
    )
}
"""By task, the cheapest first."""


@dataclass(frozen=True)
class Budget:
    """The columns and seeds of a card."""

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
        The columns in the given order.

    Raises:
        InputError: A task has no column.
    """
    for task in tasks:
        if task not in COLUMNS:
            raise InputError(f"no card has a task {task!r:.80}; there are {', '.join(COLUMNS)}")
    return tuple(COLUMNS[task] for task in tasks)


def plain_layout(task: str, scheme: str) -> str:
    """Return the layout of a scheme on a task in the zoo.

    Args:
        task: A task.
        scheme: Name of a scheme, or of a period of two.

    Returns:
        The planned layout. Without one, the name of the scheme, or, for variants of RePo, the
        layout of RePo with their name.
    """
    planned = {each.name: each.scheme for each in PLAN}
    if f"{task}/{scheme}" in planned:
        return planned[f"{task}/{scheme}"]
    # On RePo's tasks all layers are RePo; on others they begin at a third, as in its paper.
    start = planned.get(f"{task}/repo", "repo@1/3").partition("@")[2] if task != "reversal" else ""
    return f"{scheme}@{start}" if start and scheme.startswith("repo") else scheme
