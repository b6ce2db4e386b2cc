"""Values as JSON has them: numbers of Python, with None for NaN and infinities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def as_json(value: Any) -> Any:
    """Return a value as JSON has it.

    Args:
        value: Mappings, lists and arrays of numbers and texts.

    Returns:
        Dictionaries and lists of Python's numbers; None for NaN and infinities.
    """
    # JSON has no NaN, and `JSON.parse` in a browser refuses Python's spelling of it.
    if getattr(getattr(value, "dtype", None), "kind", "") == "f":
        # Here, since `--help` loads this module
        import numpy as np

        finite: Any = np.isfinite(value)
        if finite.all():
            return value.tolist()
        numbers = value.astype(object)
        numbers[~finite] = None
        return numbers.tolist()
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {str(name): as_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
