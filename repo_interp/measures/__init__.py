"""Attention inputs -> labelled statistics. Pure; knows no model, no task and no plot.

    repo_interp.measures.Components(first_token=1)
            a measure with parameters, for `analyze(..., measures=[...])`

The classes of our measures are names of this module, imported when they are first asked for;
`dir(measures)` lists them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from repo_interp.entry_points import MEASURES, OWN

_CLASSES = {place.rpartition(":")[2]: place.rpartition(":")[0] for place in OWN[MEASURES].values()}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_CLASSES[name]), name)


def __dir__() -> list[str]:
    return sorted(_CLASSES)
