"""What changes from step to step: learning rate, difficulty, and how far learned positions still follow the token index.

    learning rate   peak * t / warm_up   while t <= warm_up;   then   floor + (peak - floor) (1 + cos(pi u)) / 2
    progress        min(1, (t - 1) / (curriculum * steps))
    index share     max(0, 1 - (t - 1) / (index_share_until * steps))              (the released code's `pdrop`)

t = 1 .. steps is the step, u runs from 0 to 1 between warm-up and the last step, floor = final_share * peak.
Functions of the step alone, so that a resumed run needs nothing but its number.
"""

from __future__ import annotations

import math

from repo_interp.training.configuration import TrainingConfiguration


def learning_rate(configuration: TrainingConfiguration, step: int) -> float:
    """The learning rate of step `step`, counted from 1."""
    peak, warm_up = configuration.learning_rate, min(configuration.warm_up, configuration.steps)
    if step <= warm_up:
        return peak * step / warm_up
    done = (step - warm_up) / max(1, configuration.steps - warm_up)
    floor = configuration.final_share * peak
    return floor + (peak - floor) * (1.0 + math.cos(math.pi * done)) / 2.0


def progress(configuration: TrainingConfiguration, step: int) -> float:
    """How much of the task's full difficulty step `step` has: 0 the easiest, 1 all of it."""
    growing = configuration.curriculum * configuration.steps
    return 1.0 if growing == 0 else min(1.0, (step - 1) / growing)


def index_share(configuration: TrainingConfiguration, step: int) -> float:
    """Weight of the token index in learned positions at step `step`: 1 is plain RoPE, 0 the learned positions alone."""
    mixing = configuration.index_share_until * configuration.steps
    return 0.0 if mixing == 0 else max(0.0, 1.0 - (step - 1) / mixing)
