"""Scores of single prompts as records have them.

    "0110..."        a digit for each prompt, where each is right or wrong
    [0.875, ...]     numbers with four decimals: shares of a prompt, nats
    left out         all prompts score the same, which the mean says

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float


def stated(scores: Mapping[str, Float[np.ndarray, " prompt"]]) -> dict[str, str | list[float]]:
    """Write scores as a record has them.

    Args:
        scores: Scores of the prompts of each test set.

    Returns:
        By test set, those alone whose prompts differ.
    """
    return {
        name: "".join(f"{value:.0f}" for value in values)
        if np.isin(values, (0, 1)).all()
        else [int(value) if value in (0, 1) else round(float(value), 4) for value in values]
        for name, values in scores.items()
        if np.ptp(values) > 0
    }


def read(record: Mapping[str, Any]) -> dict[str, Float[np.ndarray, " prompt"]]:
    """Read them back.

    Args:
        record: "test_sets", "prompts" and "by_prompt" as scores.json has them.

    Returns:
        Scores of the prompts of each test set that was answered; none of a record of means alone.
    """
    if "by_prompt" not in record:
        return {}
    told: Mapping[str, str | list[float]] = record["by_prompt"]
    return {
        name: np.array([float(value) for value in told[name]])
        if name in told
        else np.full(int(record["prompts"]), float(mean))
        for name, mean in record["test_sets"].items()
        if mean is not None
    }
