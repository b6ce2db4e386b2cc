"""What a training run will cost, found by rehearsing some of its steps: forward and backward, without changing a weight.

    seconds = steps * mean over rehearsed steps of their time

Rehearsed are steps spread over the run, because a curriculum makes later ones longer. Scores and checkpoints are not counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from repo_interp.models.reposition import added_parameters
from repo_interp.training import schedule
from repo_interp.training.batches import training_question
from repo_interp.training.loop import Prepared, reproducible
from repo_interp.training.optimisation import target_loss


@dataclass(frozen=True)
class Cost:
    """Of a run as a whole, whatever part of it is done already."""

    parameters: int
    position_parameters: int
    steps: int
    seconds_a_step: float


def estimate_cost(prepared: Prepared, samples: int = 4) -> Cost:
    """Rehearse `samples` steps. Takes about their time; leaves the model as it was."""
    configuration, model = prepared.configuration, prepared.model
    steps = np.linspace(1, configuration.steps, 2 * samples + 1).round().astype(int)[1::2]
    seconds = []
    with reproducible(configuration):
        for step in (steps[-1], *steps):  # the first of a process is slower
            start = time.monotonic()
            for part in range(configuration.accumulation):
                question = training_question(
                    prepared.task,
                    configuration.seed,
                    part,
                    configuration.batch,
                    schedule.progress(configuration, int(step)),
                    configuration.device,
                )
                target_loss(model, question).backward()
            seconds.append(time.monotonic() - start)
    model.zero_grad(set_to_none=True)
    return Cost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        position_parameters=added_parameters(model),
        steps=configuration.steps,
        seconds_a_step=float(np.mean(seconds[1:])),
    )
