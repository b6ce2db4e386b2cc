"""A measurement repeated over the saved steps of a training run: `repo-interp train --checkpoint-every` keeps them in steps/.

    directory/steps/000100, 000200, ...        and the finished checkpoint itself, when its last step is not among them

Knows nothing about what is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import xarray as xr

from position_papers.training.trained import trained_configuration
from repo_interp.models.load import load


def saved_steps(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """The checkpoints of a training run by their step, ascending; empty where none was kept."""
    directory = Path(directory)
    checkpoints = {
        int(path.name): path for path in directory.glob("steps/*") if path.name.isdecimal() and (path / "config.json").is_file()
    }
    configuration = trained_configuration(directory) if checkpoints else None
    if configuration is not None and (directory / "config.json").is_file():
        checkpoints.setdefault(configuration.steps, directory)
    return dict(sorted(checkpoints.items()))


def over_steps(steps: dict[int, Path], measure: Callable[[object], xr.Dataset], device: str = "cpu") -> xr.Dataset:
    """The results of `measure` on the checkpoint of every step, along the axis `step` (changes of the weights)."""
    measured: Iterable[xr.Dataset] = [measure(load(path, device)) for path in steps.values()]
    axis = xr.IndexVariable("step", list(steps), {"units": "steps", "long_name": "training step"})
    return xr.concat(measured, dim=axis, data_vars="all", coords="minimal", compat="override", join="exact")
