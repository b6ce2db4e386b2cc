"""Attention inputs -> labeled statistics. Pure; knows no model, no task and no plot.

    repo_interp.measures.Components(first_token=1)
            a measure with parameters, for `analyze(..., measures=[...])`

The classes of our measures are names of this module, imported at their first use;
`dir(measures)` lists them.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

from repo_interp.entry_points import MEASURES, OWN

_CLASSES = {place.rpartition(":")[2]: place.rpartition(":")[0] for place in OWN[MEASURES].values()}


def __getattr__(name: str) -> Any:
    if name == "NextTokens":
        # The name in 0.1; a later version drops it.
        warnings.warn("NextTokens is now Predictions", DeprecationWarning, stacklevel=2)
        name = "Predictions"
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_CLASSES[name]), name)


def __dir__() -> list[str]:
    return sorted(_CLASSES)
