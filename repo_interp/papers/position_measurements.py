"""What the claims of Position Generalization are judged on: a language checkpoint on held-out text, and its twins with random weights.

Text: the task `language` with the checkpoint's own tokenizer, windows of the training length L; for P7 windows of up to `reach` L.
Knows nothing about claims and figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from transformers import PreTrainedModel

from repo_interp.analysis import analyze
from repo_interp.errors import InputError
from repo_interp.experiments.extrapolation import METHODS, cut, extrapolation
from repo_interp.experiments.perturbation import PAPER_KINDS, perturbation
from repo_interp.experiments.traces import output_traces
from repo_interp.measures.fake_distance import FakeDistance
from repo_interp.measures.maps import Maps
from repo_interp.measures.rotation import Rotation
from repo_interp.measures.statistics import Measure
from repo_interp.measures.three_axis import ThreeAxis
from repo_interp.models.checkpoints import identify, load_model
from repo_interp.models.fresh import load_fresh
from repo_interp.models.load import load
from repo_interp.models.provenance import length_trained
from repo_interp.models.reposition import attentions, layout
from repo_interp.papers.position_rules import OFFSET, TEXT
from repo_interp.positions.biases import PositionBias
from repo_interp.tasks import Task, make_task

_THREE_AXIS = ThreeAxis(axes="first_prompt", extras=("position", "shuffled", "held_out"))


@dataclass(frozen=True)
class Sampling:
    """How much is measured."""

    sequences: int = 8
    """Of the training length, for the fits and the perturbations."""
    controls: int = 2
    """Twins with random weights."""
    draws: int = 3
    """Seeds of the judged perturbations: they give the spread."""
    longer: int = 64
    """Sequences for the extrapolation; half of them are the reference."""
    reach: int = 4
    """Longest length, in training lengths: a power of 2."""
    corpus: str = ""
    """A text file or folder; empty: the standard library's sources."""
    batch_size: int = 8
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.sequences < 2 or self.controls < 1 or self.draws < 2 or self.longer < 8:
            raise InputError("at least 2 sequences, 1 control, 2 draws and 8 longer sequences are needed for a verdict")
        if self.reach < 2 or self.reach & (self.reach - 1):
            raise InputError(f"reach is a power of 2 from 2 on, not {self.reach}")


@dataclass(frozen=True)
class Measured:
    """One checkpoint."""

    name: str
    layout: tuple[str, ...]
    training_length: int
    run: xr.DataTree
    """three_axis, fake_distance, maps, rotation, perturbation; extrapolation and output_traces where lengths can be extended."""
    controls: tuple[xr.DataTree, ...]
    """three_axis, fake_distance and rotation with random weights."""
    judged: xr.Dataset
    """`log_perplexity`, `log_perplexity_rise` [kind, draw] at the judged points, and `plain`."""
    sampling: Sampling


def measure_checkpoint(name: str, path: str | os.PathLike[str], sampling: Sampling, progress: Callable[[str], None]) -> Measured:
    """Everything about one checkpoint. Raises InputError where it cannot be read, has no tokenizer, or text is too short."""
    checkpoint = identify(path)
    tokenizer = Path(checkpoint.directory) / "tokenizer.json"
    if not tokenizer.is_file():
        raise InputError(f"{path} has no tokenizer.json; language checkpoints are judged with their own tokenizer")
    bridge = load(path, sampling.device)
    length = length_trained(bridge)
    task = make_task(
        "language", corpus=sampling.corpus, tokenizer_file=str(tokenizer), length=length, longest_test=length * sampling.reach
    )
    prompts = task.prompts(sampling.sequences, sampling.seed, str(length))
    measures: list[Measure] = [_THREE_AXIS, FakeDistance(), Rotation(length)]  # pyright: ignore[reportAssignmentType]
    progress(f"{name}: fits")
    run = analyze(bridge, prompts, [*measures, Maps()])  # pyright: ignore[reportArgumentType]
    progress(f"{name}: random weights")
    controls = tuple(analyze(load_fresh(path, seed, sampling.device), prompts, measures) for seed in range(sampling.controls))
    model = load_model(checkpoint, sampling.device)
    progress(f"{name}: perturbations")
    shares, reaches = (0.001, 0.01, 0.05, 0.1, 0.5), (1, 5, 10, 100)
    disturbed = perturbation(
        model, task, prompts, gammas=shares, l_maxes=reaches, seed=sampling.seed, batch_size=sampling.batch_size
    )
    run["perturbation"] = xr.DataTree(disturbed)
    judged = _judged(model, task, prompts, sampling)
    if all(scheme != "learned" for scheme in layout(model)):
        progress(f"{name}: longer prompts")
        lengths = [length << power for power in range(sampling.reach.bit_length())]
        longer = task.prompts(sampling.longer, sampling.seed, str(lengths[-1]))
        by_length = cut(task, longer, lengths)
        group = extrapolation(model, task, by_length, length, _methods(model), batch_size=sampling.batch_size)
        run["extrapolation"] = xr.DataTree(group)
        if "lm_infinite" in group["method"].values:
            layer = len(list(attentions(model))) // 2
            run["output_traces"] = xr.DataTree(output_traces(model, prompts, longer[0], length, layer))
    return Measured(name, layout(model), length, run, controls, judged, sampling)


def _judged(model: PreTrainedModel, task: Task, prompts, sampling: Sampling) -> xr.Dataset:
    points = {"text_order": TEXT, "feature_order": TEXT, "position_offset": OFFSET}
    values = {name: np.zeros((len(PAPER_KINDS), sampling.draws)) for name in ("log_perplexity", "log_perplexity_rise")}
    plain = 0.0
    for row, kind in enumerate(PAPER_KINDS):
        gamma, l_max = points[kind]
        for draw in range(sampling.draws):
            found = perturbation(
                model, task, prompts, (kind,), (gamma,), (l_max,), seed=sampling.seed + 1 + draw, batch_size=sampling.batch_size
            ).squeeze(("kind", "l_max"))
            plain = float(found["log_perplexity"].sel(gamma=0.0))
            for name, array in values.items():
                array[row, draw] = float(found[name].sel(gamma=gamma))
    texts = {"log_perplexity": "log perplexity", "log_perplexity_rise": "rise over the targets that no move touched"}
    variables: dict[str, Any] = {
        name: (("kind", "draw"), values[name], {"long_name": text, "units": "nat"}) for name, text in texts.items()
    }
    variables["plain"] = ((), plain, {"long_name": "log perplexity without perturbation", "units": "nat"})
    return xr.Dataset(variables, coords={"kind": list(PAPER_KINDS), "draw": range(sampling.draws)})


def _methods(model: PreTrainedModel) -> tuple[str, ...]:
    """The methods that this model's positions allow."""
    layers = list(attentions(model))
    rotates = any(layer.frequencies is not None for layer in layers)
    added = [layer.position_logits for layer in layers if layer.position_logits is not None]
    by_distance = [isinstance(one, PositionBias) for one in added]
    allowed = {
        "plain": True,
        "lm_infinite": all(by_distance),
        "interpolation": rotates or any(by_distance),
        "yarn": rotates,
    }
    return tuple(method for method in METHODS if allowed[method])
