"""Format of the scores of single prompts in records.

    "0110..."        a digit per prompt, if prompts are right or wrong
    [0.875, ...]     numbers with four decimals: shares of a prompt, nats
    left out         all prompts have the same score, the mean

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float


def stated(scores: Mapping[str, Float[np.ndarray, " prompt"]]) -> dict[str, str | list[float]]:
    """Convert scores to the format of a record.

    Args:
        scores: Scores of the prompts of each test set.

    Returns:
        Scores by test set, for test sets in which prompts differ.
    """
    return {
        name: "".join(f"{value:.0f}" for value in values)
        if np.isin(values, (0, 1)).all()
        else [int(value) if value in (0, 1) else round(float(value), 4) for value in values]
        for name, values in scores.items()
        if np.ptp(values) > 0
    }


def read(record: Mapping[str, Any]) -> dict[str, Float[np.ndarray, " prompt"]]:
    """Read scores from a record.

    Args:
        record: "test_sets", "prompts" and "by_prompt" as in scores.json.

    Returns:
        Scores of the prompts of each answered test set; empty for a record with only means.
    """
    if "by_prompt" not in record:
        return {}
    stored: Mapping[str, str | list[float]] = record["by_prompt"]
    return {
        name: np.array([float(value) for value in stored[name]])
        if name in stored
        else np.full(int(record["prompts"]), float(mean))
        for name, mean in record["test_sets"].items()
        if mean is not None
    }
