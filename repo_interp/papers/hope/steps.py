"""VAF of every component over the saved steps of a training run (claim H3), measured, or read from a small file that was measured once.

    RUN/steps/000100, 000200, ...      saved by `repo-interp train --checkpoint-every`: too large to ship
    RUN/steps.nc                       what was measured on them, by `repo-interp steps RUN`: vaf [step, repeat, component], and bands

Knows nothing about claims and figures.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import xarray as xr

from repo_interp.errors import InputError
from repo_interp.experiments.training_steps import over_steps, saved_steps
from repo_interp.measures.labels import described
from repo_interp.models.checkpoints import identify
from repo_interp.models.families import training_length
from repo_interp.papers.hope.lots import Sampling, bands, lots
from repo_interp.papers.hope.rules import curve_vaf

FILE = "steps.nc"
_ENGINE = "h5netcdf"


def mean_curve_vaf(curves: xr.DataArray) -> xr.DataArray:
    """VAF, in %, of each component's mean curve, of `curves` [..., component, distance] by everything else that they have."""
    return xr.apply_ufunc(
        curve_vaf, curves, input_core_dims=[["component", "distance"]], output_core_dims=[["component"]], vectorize=True
    )


def measure_steps(directory: str | os.PathLike[str], length: int, sampling: Sampling) -> xr.Dataset:
    """`vaf` [step, repeat, component] on random sequences of `length` tokens at every saved step, and the bands.

    How many sequences there are at each step is `vaf`'s attribute `sequences`. Raises InputError where no step was kept.
    """
    found = saved_steps(directory)
    if not found:
        raise InputError(f"{directory} kept no steps of its training; train with --checkpoint-every")

    def of_step(bridge) -> xr.Dataset:
        measured = lots(bridge, length, length, sampling.step_sequences, sampling)
        shares = mean_curve_vaf(measured["component_by_distance"].mean("layer"))
        return bands(measured).assign(vaf=shares.transpose("repeat", "component"))

    steps = over_steps(found, of_step, sampling.device)
    vaf = described(steps["vaf"], "variance of the mean logit by distance that a component accounts for", "%")
    return steps.isel(step=0, drop=True).assign(vaf=vaf.assign_attrs(sequences=sampling.step_sequences))


def write_steps(directory: str | os.PathLike[str], sampling: Sampling) -> Path:
    """Measure the saved steps of the training run in `directory` and keep what was found beside its checkpoint, as steps.nc.

    Returns the file. The same run and sampling give the same bytes. Raises InputError where there is no run with saved steps.
    """
    checkpoint = identify(directory)
    if set(checkpoint.layout) != {"rope"}:
        raise InputError(
            f"{directory} rotates by the token index in some layers only ({', '.join(sorted(set(checkpoint.layout)))})"
        )
    measured = measure_steps(directory, training_length(checkpoint.config), sampling)
    stated = {
        field.name: getattr(sampling, field.name) for field in fields(sampling) if field.name not in ("sequences", "controls")
    }
    file = Path(directory) / FILE
    unfinished = file.with_name(f".{FILE}.unfinished")
    kept = {name: array.astype("int8") for name, array in measured.items() if array.dtype == bool}
    try:
        made = {"made_with": "repo-interp steps", **stated}
        measured.drop_attrs(deep=False).assign(kept).assign_attrs(made).to_netcdf(unfinished, engine=_ENGINE)
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    return file


def read_steps(directory: str | os.PathLike[str]) -> xr.Dataset | None:
    """What `write_steps` kept in `directory`; None where it kept nothing. Raises InputError for a file that is something else."""
    file = Path(directory) / FILE
    if not file.is_file():
        return None
    try:
        with xr.open_dataset(file, engine=_ENGINE) as stored:
            found = stored.load()
        if found["vaf"].dims != ("step", "repeat", "component"):
            raise KeyError("vaf")
        return found.assign({name: found[name].astype(bool) for name in ("activated", "low_frequency")})
    except (OSError, ValueError, KeyError):
        raise InputError(f"{file} is not what `repo-interp steps` writes; delete it, or write it again") from None
