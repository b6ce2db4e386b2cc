"""Estimate the cost of the trainings of a card on this machine, in seconds.

    seconds = steps left * median over `STEPS` steps at full difficulty

Measured on a temporary model. The first steps of a curriculum are shorter than the others, so this
is an upper estimate. Scoring takes a few per cent in addition.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from position_papers.card.trials import Training
from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.preparation import prepare, reproducible
from position_papers.training.step import take_step, training_question

STEPS = 5


def seconds_of_a_step(configuration: TrainingConfiguration) -> float:
    """Time training steps at full difficulty.

    Args:
        configuration: Configuration of a run.

    Returns:
        The median of `STEPS` steps, in seconds, after one uncounted step.
    """
    prepared, times = prepare(configuration), []
    with reproducible(configuration):
        for number in range(STEPS + 1):
            question = training_question(prepared.task, configuration, number, 1.0)
            begun = time.perf_counter()
            take_step(
                *(prepared.model, prepared.optimizer, [question] * configuration.accumulation),
                *(0.0, configuration.clip, configuration.precision),
            )
            times.append(time.perf_counter() - begun)
    return float(np.median(times[1:]))


def costs(trainings: Sequence[Training]) -> dict[str, float]:
    """Estimate the remaining time of trainings.

    Args:
        trainings: Trainings of a card.

    Returns:
        Seconds by task, for tasks with remaining steps.
    """
    found: dict[str, float] = {}
    timed: dict[tuple[str, str], float] = {}
    for training in trainings:
        if not training.steps_left:
            continue
        configuration = training.configuration
        kind = (training.column.task, configuration.scheme)
        if kind not in timed:
            # A missing start cannot be continued; a step of the start costs about the same.
            alike = next(t.configuration for t in trainings if t.column is training.column)
            origin = configuration.continue_from
            waits = origin and not (Path(origin) / "config.json").is_file()
            timed[kind] = seconds_of_a_step(alike if waits else configuration)
        seconds = training.steps_left * timed[kind]
        found[training.column.task] = found.get(training.column.task, 0.0) + seconds
    return found
