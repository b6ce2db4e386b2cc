"""Measurements that need several forward passes.

Experiments combine models, tasks and measures. This package prints nothing.

    analyze(..., experiments=[repo_interp.experiments.Effects(kinds=("frozen",))])

The classes of our experiments are names of this module, imported at their first use, as are
`Experiment`, `Plan` and `Grid` for experiments of other packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from repo_interp.entry_points import EXPERIMENTS, OWN

# From the table of entry points, so that a new experiment is named in one place
_CLASSES = {
    place.rpartition(":")[2]: place.rpartition(":")[0] for place in OWN[EXPERIMENTS].values()
}
# Not entry points, since they are the interface and not experiments.
_CLASSES["Experiment"] = _CLASSES["Plan"] = "repo_interp.experiments.experiment"
_CLASSES["Grid"] = "repo_interp.experiments.grid"


# An experiment loads torch when it is imported, and this package must not.
def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_CLASSES[name]), name)


def __dir__() -> list[str]:
    return sorted(_CLASSES)
