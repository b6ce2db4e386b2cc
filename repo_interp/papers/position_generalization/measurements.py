"""What the claims of Position Generalization are judged on: checkpoints on the text or task they were trained on, and random twins.

    language models    the task `language` in the checkpoint's own tokens: windows of the training length L for P1 to P6, of up to
                       `reach` L for P7; the same decoder with random weights is the control of the fits
    other tasks        P6 alone, with the task's score, on prompts as in training

What is measured is kept by the checkpoint's digest, the prompts' and the options that decide it. Knows nothing about claims and
figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache as remember
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from transformers import PreTrainedModel

from repo_interp.analysis.analyze import analyze
from repo_interp.errors import InputError
from repo_interp.experiments.extrapolation import allowed_methods, extrapolation
from repo_interp.experiments.lengths import cut
from repo_interp.experiments.perturbation import PAPER_KINDS, perturbation
from repo_interp.experiments.traces import output_traces
from repo_interp.measures.fake_distance import FakeDistance
from repo_interp.measures.maps import Maps
from repo_interp.measures.rotation import Rotation
from repo_interp.measures.three_axis import ThreeAxis
from repo_interp.models.checkpoints import Checkpoint, identify, load_model
from repo_interp.models.families import training_length
from repo_interp.models.load import load, load_fresh
from repo_interp.models.provenance import checkpoint_digest
from repo_interp.models.reposition import attentions
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.position_generalization.rules import OFFSET, TEXT
from repo_interp.tasks import Prompt, Task, digest, make_task
from repo_interp.training.provenance import trained_configuration, trained_task

_THREE_AXIS = ThreeAxis(axes="first_prompt", extras=("position", "shuffled", "held_out"))
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    sequences: int = 8
    """Of text of the training length, for the fits and the perturbations."""
    prompts: int = 100
    """Of other tasks, for the perturbations."""
    controls: int = 2
    """Twins with random weights."""
    draws: int = 3
    """Seeds of the judged perturbations: they give the spread."""
    gammas: tuple[float, ...] = (0.001, 0.01, 0.05, 0.1, 0.5)
    """Shares of the perturbations that are drawn."""
    l_maxes: tuple[int, ...] = (1, 5, 10, 100)
    longer: int = 64
    """Sequences for the extrapolation; half of them are the reference."""
    reach: int = 4
    """Longest length, in training lengths: a power of 2."""
    corpus: str = ""
    """A text file or folder; empty: what the checkpoint was trained on, else the standard library's sources."""
    batch_size: int = 8
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.sequences < 2 or self.prompts < 2 or self.controls < 1 or self.draws < 2 or self.longer < 8:
            raise InputError(
                "at least 2 sequences and prompts, 1 control, 2 draws and 8 longer sequences are needed for a verdict"
            )
        if self.reach < 2 or self.reach & (self.reach - 1):
            raise InputError(f"reach is a power of 2 from 2 on, not {self.reach}")


@dataclass(frozen=True)
class Measured:
    """One checkpoint."""

    name: str
    layout: tuple[str, ...]
    training_length: int
    task: str
    run: xr.DataTree
    """perturbation; of a language model three_axis, fake_distance, maps and rotation too, and extrapolation and output_traces where
    lengths can be extended."""
    controls: tuple[xr.DataTree, ...]
    """three_axis, fake_distance and rotation with random weights; of a language model alone."""
    judged: xr.Dataset
    """`log_perplexity`, `log_perplexity_rise`, `task_score` [kind, draw] at the judged points, and `plain`, `plain_score`."""
    continued: bool
    """Whether it went on from another checkpoint, as far as it says."""
    options: Options


def measure_checkpoint(name: str, path: str | os.PathLike[str], options: Options, progress: Progress, cache: Cache) -> Measured:
    """Everything about one checkpoint. Raises InputError where it cannot be read, has no tokenizer, or text is too short."""
    checkpoint = identify(path)
    trained = trained_task(path)
    measuring = _Measuring(name, path, checkpoint, options, progress, cache)
    if trained is None or trained.name == "language":
        return measuring.language(_text_task(checkpoint, trained, options, measuring.length))
    return measuring.other(trained)


@dataclass(frozen=True)
class _Measuring:
    name: str
    path: str | os.PathLike[str]
    checkpoint: Checkpoint
    options: Options
    progress: Progress
    cache: Cache

    @property
    def length(self) -> int:
        return training_length(self.checkpoint.config)

    def language(self, task: Task) -> Measured:
        options, length = self.options, self.length
        prompts = task.prompts(options.sequences, options.seed, str(length))
        groups = self._fits(prompts, None)
        controls = tuple(xr.DataTree.from_dict(self._fits(prompts, seed)) for seed in range(options.controls))
        model = remember(lambda: load_model(self.checkpoint, options.device))
        groups |= self._perturbed(model, task, prompts)
        if all(scheme != "learned" for scheme in self.checkpoint.layout):
            groups |= self._longer(model, task, prompts)
        return self._measured(task, groups, controls, self._judged(model, task, prompts))

    def other(self, task: Task) -> Measured:
        prompts = task.prompts(self.options.prompts, self.options.seed)
        model = remember(lambda: load_model(self.checkpoint, self.options.device))
        return self._measured(task, self._perturbed(model, task, prompts), (), self._judged(model, task, prompts))

    def _measured(self, task: Task, groups: Mapping[str, xr.Dataset], controls: tuple[xr.DataTree, ...], judged: xr.Dataset):
        run = xr.DataTree.from_dict(dict(groups))
        stated = trained_configuration(self.path)
        continued = stated is not None and bool(stated.continue_from)
        return Measured(self.name, self.checkpoint.layout, self.length, task.name, run, controls, judged, continued, self.options)

    def _kept(
        self, recipe: str, prompts: list[Prompt], what: str, measure: Callable[[], xr.Dataset], **depends: Any
    ) -> xr.Dataset:
        def measure_and_say() -> xr.Dataset:
            self.progress(f"{self.name}: {what}")
            return measure()

        stated = {name: repr(value) if isinstance(value, tuple) else value for name, value in depends.items()}
        known = {"checkpoint": checkpoint_digest(self.checkpoint.directory), "prompts": digest(prompts)}
        return self.cache.dataset(f"position_{recipe}", known | stated | {"device": self.options.device}, measure_and_say)

    def _fits(self, prompts: list[Prompt], seed: int | None) -> dict[str, xr.Dataset]:
        """Groups of the fits on trained weights, or on those of a random `seed`: one analysis for all that are not kept."""
        measures: tuple[Any, ...] = (_THREE_AXIS, FakeDistance(), Rotation(self.length))
        measures = (*measures, Maps()) if seed is None else measures

        @remember
        def measured() -> xr.DataTree:
            device = self.options.device
            bridge = load(self.path, device) if seed is None else load_fresh(self.path, seed, device)
            return analyze(bridge, prompts, measures)

        what = "fits" if seed is None else "random weights"
        names = [measure.name for measure in measures]
        return {
            name: self._kept(name, prompts, what, lambda name=name: measured()[name].to_dataset(), weights=str(seed))
            for name in names
        }

    def _perturbed(self, model: Callable[[], PreTrainedModel], task: Task, prompts: list[Prompt]) -> dict[str, xr.Dataset]:
        options = self.options
        grid = {"gammas": options.gammas, "l_maxes": options.l_maxes, "seed": options.seed}

        def measure() -> xr.Dataset:
            return perturbation(model(), task, prompts, batch_size=options.batch_size, **grid)

        return {"perturbation": self._kept("perturbation", prompts, "perturbations", measure, task=task.name, **grid)}

    def _judged(self, model: Callable[[], PreTrainedModel], task: Task, prompts: list[Prompt]) -> xr.Dataset:
        stated = {"task": task.name, "draws": self.options.draws, "seed": self.options.seed}
        points = {"text": TEXT, "offset": OFFSET}
        return self._kept(
            "judged", prompts, "judged perturbations", lambda: _judged(model(), task, prompts, self.options), **stated, **points
        )

    def _longer(self, model: Callable[[], PreTrainedModel], task: Task, prompts: list[Prompt]) -> dict[str, xr.Dataset]:
        options, length = self.options, self.length
        lengths = [length << power for power in range(options.reach.bit_length())]
        longer = task.prompts(options.longer, options.seed, str(lengths[-1]))

        def extrapolated() -> xr.Dataset:
            by_length = cut(task, longer, lengths)
            return extrapolation(model(), task, by_length, length, allowed_methods(model()), batch_size=options.batch_size)

        def traced() -> xr.Dataset:
            return output_traces(model(), prompts, longer[0], length, len(list(attentions(model()))) // 2)

        groups = {"extrapolation": self._kept("extrapolation", longer, "longer prompts", extrapolated, lengths=tuple(lengths))}
        if "lm_infinite" in groups["extrapolation"]["method"].values:
            groups["output_traces"] = self._kept("output_traces", [*prompts, longer[0]], "sliding windows", traced)
        return groups


def _text_task(checkpoint: Checkpoint, trained: Task | None, options: Options, length: int) -> Task:
    tokenizer = Path(checkpoint.directory) / "tokenizer.json"
    if not tokenizer.is_file():
        raise InputError(
            f"{checkpoint.directory} has no tokenizer.json; language checkpoints are judged with their own tokenizer"
        )
    corpus = options.corpus or (str(trained.options()["corpus"]) if trained is not None else "")
    longest = length * options.reach
    return make_task("language", corpus=corpus, tokenizer_file=str(tokenizer), length=length, longest_test=longest)


def _judged(model: PreTrainedModel, task: Task, prompts: list[Prompt], options: Options) -> xr.Dataset:
    points = {"text_order": TEXT, "feature_order": TEXT, "position_offset": OFFSET}
    texts = {
        "log_perplexity": "log perplexity",
        "log_perplexity_rise": "rise over the targets that no move touched",
        "task_score": task.metric,
    }
    values = {name: np.zeros((len(PAPER_KINDS), options.draws)) for name in texts}
    plain = {"log_perplexity": 0.0, "task_score": 0.0}
    for row, kind in enumerate(PAPER_KINDS):
        gamma, l_max = points[kind]
        for draw in range(options.draws):
            seed = options.seed + 1 + draw
            found = perturbation(model, task, prompts, (kind,), (gamma,), (l_max,), seed=seed, batch_size=options.batch_size)
            found = found.squeeze(("kind", "l_max"))
            plain = {name: float(found[name].sel(gamma=0.0)) for name in plain}
            for name, array in values.items():
                array[row, draw] = float(found[name].sel(gamma=gamma))
    units = {
        "log_perplexity": "nat",
        "log_perplexity_rise": "nat",
        "task_score": "nat" if task.metric == "log perplexity" else "1",
    }
    variables: dict[str, Any] = {
        name: (("kind", "draw"), values[name], {"long_name": text, "units": units[name]}) for name, text in texts.items()
    }
    for name, of in (("plain", "log_perplexity"), ("plain_score", "task_score")):
        variables[name] = ((), plain[of], {"long_name": f"{texts[of]} without perturbation", "units": units[of]})
    coords = {"kind": list(PAPER_KINDS), "draw": range(options.draws)}
    return xr.Dataset(variables, coords, {"metric": task.metric, "prompts": len(prompts)})
