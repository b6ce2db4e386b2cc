"""What each task is trained with unless other fields are given: hyper-parameters that reached full score in pilot runs.

They are the same for every position scheme, so that schemes can be compared. A continued run has a recipe of its own: the task is at
full difficulty from the start. Knows nothing about how training is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FRESH: Mapping[str, Mapping[str, Any]] = {
    "reversal": {
        "scheme_options": {"assignment": "layer"},  # f_phi is shared by the heads of a layer, as in the paper's experiment
        "steps": 2500,
        "batch": 64,
        "learning_rate": 2e-3,
        "curriculum": 0.4,
    },
    "niah": {
        "steps": 1000,
        "batch": 8,
        "learning_rate": 2e-3,
        "curriculum": 0.6,
        "initial_deviation": 0.1,  # with 0.02 it is not learned
        "scheme_deviation": 0.113,  # the paper's 0.02 at d = 2048 gives gates the same spread: 0.02 sqrt(2048 / 64)
    },
    # At 64 tokens, so that there is little to search: two words of a key are told from one late, after 1,800 steps.
    "niah_keys": {
        "task_options": {"length": 64, "longest_test": 256},
        "heads": 2,
        "steps": 6000,
        "batch": 32,
        "learning_rate": 2e-3,
        "scheme_deviation": 0.113,
        "score_every": 500,
    },
    "flip_flop": {"steps": 1200, "batch": 32, "learning_rate": 2e-3, "score_every": 400},
    "selective_copy": {
        "heads": 2,
        "steps": 2000,
        "batch": 32,
        "learning_rate": 2e-3,
        "curriculum": 0.5,
        "score_every": 500,
    },
    "counting": {"heads": 2, "steps": 1500, "batch": 32, "learning_rate": 2e-3, "curriculum": 0.5, "score_every": 500},
    "copying": {
        # Four heads of width 16 do not learn it in 2500 steps, two of 32 do; longer contexts and growing ones are learned far slower.
        "task_options": {"symbols": 64, "sequences": 4, "test_from": 4, "test_to": 16, "test_step": 2},
        "heads": 2,
        "steps": 2500,
        "batch": 32,
        "learning_rate": 2e-3,
        "log_every": 50,
        "score_every": 500,
    },
    # Heads of width 32, so that one rotary component has its half-turn within the training length: pi/L < theta_7 < 2 pi/L at L = 256.
    "language": {"heads": 2, "steps": 1500, "batch": 16, "learning_rate": 2e-3, "score_every": 500},
}
"""From random weights."""

CONTINUED: Mapping[str, Mapping[str, Any]] = {
    "niah": {"steps": 1200, "batch": 8, "learning_rate": 2e-3, "scheme_deviation": 0.113},
    "niah_keys": {
        "steps": 1200,
        "batch": 16,
        "learning_rate": 2e-3,
        "curriculum": 0.5,
        "scheme_deviation": 0.113,
        "score_every": 400,
    },
    # With 0.02 at width 64 positions stay within 0.2 of each other, in effect NoPE; 500 steps leave all schemes behind RoPE.
    "language": {"steps": 1500, "batch": 16, "learning_rate": 1e-3, "scheme_deviation": 0.113},
}
"""From a checkpoint."""


def recipe(task: str, continued: bool) -> dict[str, Any]:
    """Fields of a training configuration for `task`; none for a task without a recipe."""
    return dict((CONTINUED if continued else FRESH).get(task, {}))
