"""H3: the VAF of the activated components falls during training (HoPE fig. 3b); measured on saved
steps, or read from a small file.

RUN/steps/000100, 000200, ...      saved by `repo-interp train --checkpoint-every`: too large to ship; and the finished checkpoint itself,
                                   when its last step is not among them
RUN/steps.nc                       what was measured on them, by `repo-interp train steps RUN`: vaf [step, repeat, component], and bands

fall = mean of the first third of the steps - mean of the last third, of the activated components'
mean VAF
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy.stats import spearmanr

from position_papers.hope import replicates
from position_papers.hope.component_figures import vaf_over_training
from position_papers.hope.mean_curves import mean_curve_vaf
from position_papers.hope.replicates import NEEDS_ROPE, Sampling, bands
from position_papers.hope.wording import OVER_REPLICATES, capped, named_bands
from position_papers.kit import (
    All,
    AtLeast,
    AtMost,
    Cache,
    Claim,
    Difference,
    Drawing,
    Evidence,
    Experiment,
    Significant,
    Subject,
    Where,
    evidence,
    joined,
)
from position_papers.kit.paper_directory import plain
from position_papers.training.trained import trained_configuration
from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.checkpoint_files.checkpoint_digest import checkpoint_digest
from repo_interp.errors import InputError
from repo_interp.measures.labels import with_attrs
from repo_interp.models.checkpoints import identify
from repo_interp.models.load import load
from repo_interp.run import read_netcdf, write_netcdf

FILE = "steps.nc"
FEWEST = 4
"""Steps that a course over training needs."""
CORRELATION = "the rank correlation of their mean VAF with the step"
FALL = "its fall from the first to the last third of the steps"
STEPS, ENOUGH = "the number of steps trained", 25_000
"""Half of the paper's 50,000, below which the course is one of the start of training alone."""

H3 = Claim(
    "H3",
    "the VAF of the activated components falls during training",
    "HoPE fig. 3b",
    "figure",
    Where(AtLeast(STEPS, ENOUGH), All(AtMost(CORRELATION, -0.5), Significant(FALL, 3))),
)
_VAF = "variance of the mean logit by distance that a component accounts for"


# ---- the saved steps of a run --------------------------------------------------------------------


def saved_steps(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """The checkpoints of a training run by their step, ascending; empty where none was kept."""
    directory = Path(directory)
    checkpoints = {
        int(path.name): path
        for path in directory.glob("steps/*")
        if path.name.isdecimal() and (path / "config.json").is_file()
    }
    configuration = trained_configuration(directory) if checkpoints else None
    if configuration is not None and (directory / "config.json").is_file():
        checkpoints.setdefault(configuration.steps, directory)
    return dict(sorted(checkpoints.items()))


def measure_steps(directory: str | os.PathLike[str], length: int, sampling: Sampling) -> xr.Dataset:
    """`vaf` [step, repeat, component] on random sequences of `length` tokens at every saved step,
    and the bands.

    How many sequences there are at each step is `vaf`'s attribute `sequences`. Raises InputError
    where no step was kept.
    """
    saved = saved_steps(directory)
    if not saved:
        raise InputError(
            f"{directory} kept no steps of its training; train with --checkpoint-every"
        )

    def of_step(checkpoint: Path) -> xr.Dataset:
        bridge = load(checkpoint, sampling.device)
        data = replicates.of_model(bridge, length, length, sampling.step_sequences, sampling)
        shares = mean_curve_vaf(data["component_by_distance"])
        return bands(data).assign(vaf=shares.transpose("repeat", "component"))

    steps = joined({step: of_step(place) for step, place in saved.items()}, "step")
    steps["step"].attrs.update(units="steps", long_name="training step")
    vaf = with_attrs(steps["vaf"], _VAF, "%").assign_attrs(sequences=sampling.step_sequences)
    return steps.isel(step=0, drop=True).assign(vaf=vaf)


def write_steps(directory: str | os.PathLike[str], sampling: Sampling) -> Path:
    """Measure the saved steps of the training run in `directory`, keep the result beside its
    checkpoint as steps.nc, and return the file.

    The same run and sampling give the same bytes. Raises InputError where there is no run with
    saved steps.
    """
    checkpoint = identify(directory)
    if set(checkpoint.layout) != {"rope"}:
        layouts = ", ".join(sorted(set(checkpoint.layout)))
        raise InputError(f"{directory} does not have RoPE in every layer; its layers are {layouts}")
    data = measure_steps(directory, training_length(checkpoint.config), sampling)
    unused = ("sequences", "repeated_sequences", "controls", "length")
    options = {name: value for name, value in vars(sampling).items() if name not in unused}
    attributes = {"made_with": "repo-interp train steps", **options}
    file = Path(directory) / FILE
    write_netcdf(plain(data.drop_attrs(deep=False)).assign_attrs(attributes), file)
    return file


def read_steps(directory: str | os.PathLike[str]) -> xr.Dataset | None:
    """What `write_steps` kept in `directory`; None where it kept nothing.

    Raises InputError for a file that is something else.
    """
    file = Path(directory) / FILE
    if not file.is_file():
        return None
    try:
        data = read_netcdf(file).to_dataset()
        if data["vaf"].dims != ("step", "repeat", "component"):
            raise KeyError("vaf")
        return data.assign(
            {name: data[name].astype(bool) for name in ("activated", "low_frequency")}
        )
    except (OSError, ValueError, KeyError):
        raise InputError(
            f"{file} is not what `repo-interp train steps` writes; delete it, or write it again"
        ) from None


# ---- the claim -----------------------------------------------------------------------------------


def fall(values: Float[np.ndarray, "step repeat"]) -> dict[str, Any]:
    """What the rule asks for, of a number that was measured in several replicates at every step:
    Spearman's correlation with the step, and the mean of the first third of the steps minus that of
    the last.

    Raises ValueError for fewer than four steps.
    """
    steps, repeats = values.shape
    if steps < FEWEST:
        raise ValueError(f"a course over training needs at least {FEWEST} steps, not {steps}")
    third = max(1, steps // 3)
    changes = values[-third:].mean(0) - values[:third].mean(0)
    error = float(changes.std(ddof=1) / np.sqrt(repeats)) if repeats > 1 else np.inf
    correlation = float(spearmanr(np.arange(steps), values.mean(1))[0])  # pyright: ignore[reportArgumentType]
    return {
        CORRELATION: correlation,
        FALL: Difference(-float(changes.mean()), error, "replicates", repeats - 1),
    }


def measure(subjects: Sequence[Subject], options: Sampling, cache: Cache) -> xr.Dataset | None:
    """`vaf` over the steps of the run; None where fewer than four were kept, or no component is
    activated.
    """
    (subject,) = subjects
    data, length = read_steps(subject.path), subject.training_length
    if data is None:
        saved = saved_steps(subject.path)
        if len(saved) < FEWEST:
            return None
        length = options.tokens_of(length)
        digests = ",".join(f"{step}:{checkpoint_digest(path)}" for step, path in saved.items())
        data = subject.measured(
            cache,
            _measure,
            options,
            length,
            steps=digests,
            length=length,
            repeats=options.repeats,
            step_sequences=options.step_sequences,
        )
    if data.sizes["step"] < FEWEST or not data["activated"].any():
        return None
    return data.assign_attrs(
        checkpoint=subject.name, length=length, training_length=subject.training_length
    )


def tabulate(data: xr.Dataset) -> Iterable[Evidence]:
    """Evidence on the run."""
    name, vaf = data.attrs["checkpoint"], data["vaf"].transpose("step", "repeat", "component")
    measured = (
        "change of the activated components' VAF from the first to the last third of "
        "steps, percentage points"
    )
    course = fall(vaf.values[..., data["activated"].values.astype(bool)].mean(-1))
    change, (first, *_, last) = -course[FALL].margin, vaf["step"].values
    note = (
        f"change {change:.3g} percentage points, rank correlation with the step "
        f"{course[CORRELATION]:.2f} over {vaf.sizes['step']} steps, {first} to {last}"
    )
    short = (
        ""
        if last >= ENOUGH
        else f"trained for {last:,} steps; judged from {ENOUGH:,} on, the paper's for 50,000"
    )
    yield evidence(
        H3,
        name,
        measured,
        {STEPS: float(last), **course},
        change,
        course[FALL].standard_error,
        f"{OVER_REPLICATES}, standard error",
        int(vaf.attrs["sequences"]),
        note=note,
        unmeasurable=capped(data) or (short and (short, note)),
    )


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Fig. 3b: VAF of every component over the saved steps of training."""
    name, band = data.attrs["checkpoint"], data.drop_vars("vaf").drop_attrs(deep=False)
    drawn = band.assign(vaf=with_attrs(data["vaf"].mean("repeat"), _VAF, "%"))
    caption = (
        f"VAF of every component of {name} over training, on {data['vaf'].attrs['sequences']} "
        f"sequences at each saved step (HoPE fig. 3b). {named_bands(band, data)}"
    )
    yield Drawing(f"vaf_over_training_{name}", partial(vaf_over_training, drawn), caption, drawn)


def _measure(subject: Subject, options: Sampling, length: int) -> xr.Dataset:
    return measure_steps(subject.path, length, options)


NO_STEPS = (
    "no steps of training were kept; train with --checkpoint-every, then repo-interp "
    "train steps RUN"
)
OVER_TRAINING = Experiment(
    "over_training", (H3,), replace(NEEDS_ROPE, otherwise=NO_STEPS), measure, tabulate, draw
)
