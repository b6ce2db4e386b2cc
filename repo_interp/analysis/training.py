"""Measure a model while it is trained, by a callback of transformers or in a loop.

    every k steps    attach -> analyze a few prompts -> detach -> OUT/step-K/run.nc, and a few
                     numbers for the log

The model is measured where it stands, without a copy. Afterwards every module, its configuration
and torch's random numbers are as they were, so that a training with the callback ends with the same
bits as one without. `compare OUT/step-*` reads the runs as a series.

Of several processes the first measures, and the others wait for it at their next exchange of
gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import xarray as xr
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import TrainerCallback
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from repo_interp.analysis.analyze import analyze
from repo_interp.analysis.coercion import Prompts, as_prompts
from repo_interp.analysis.defaults import resolve_measures
from repo_interp.errors import InputError, NotFinite, warn
from repo_interp.files import path_of, require_directory
from repo_interp.measures.statistics import Measure
from repo_interp.models.decoder import as_decoder, require_model
from repo_interp.models.load import require_parity
from repo_interp.models.reposition import with_layout
from repo_interp.models.wrapped import model_of
from repo_interp.plots.findings import findings
from repo_interp.positions.layouts import FIXED
from repo_interp.processes import alone
from repo_interp.run import require_run, write_run
from repo_interp.values import Count, CountOrNone, checked

_FUSED = ("eager", "sdpa")
"""Attention that takes weights of any precision; others need the half precision that a training
step casts to.
"""


class PositionsCallback(TrainerCallback):
    """Measure prompts on the model in training.

    Before the first step, every `every` steps, and after the last.

        Trainer(model, arguments, train_dataset=data, callbacks=[ri.PositionsCallback(every=200,
        prompts=prompts)])

    `prompts`: a handful, as `ri.analyze` takes them; texts are encoded by the Trainer's
    `processing_class`. Runs are written to `out`/step-K (None: positions/step-K in the Trainer's
    output directory), runs of an earlier training there are moved to `out`/earlier-N;
    `ri.training_scalars` of all go to `state.log_history` and to whatever the Trainer reports to.
    `measures` None: those that the command `analyze` chooses for the model. Prompts and measures
    that do not fit the model are refused before the first step. A later step whose numbers are not
    finite, or that finds no space in memory or on the disk, is left out with a warning, and the
    training goes on.
    """

    def __init__(
        self,
        every: int = 200,
        prompts: Prompts = (),
        out: str | PathLike[str] | None = None,
        measures: Sequence[str | Measure] | None = None,
    ) -> None:
        """Raises InputError for no number of steps, no path, and no prompts."""
        self.every = checked(every, Count, "every")
        if not isinstance(prompts, Iterable) and not hasattr(prompts, "tokens"):
            raise InputError(f"prompts are a {type(prompts).__name__}; wanted a few, prompts=[...]")
        self.prompts = (
            prompts
            if isinstance(prompts, str) or hasattr(prompts, "tokens")
            else list(cast(Any, prompts))
        )
        self.out = None if out is None else _directory(out)
        self.measures = measures if measures is None else resolve_measures(measures)
        self._reporters: list[Any] | None = None
        self._last: int | None = None
        if not self.prompts:
            raise InputError(
                "there are no prompts to measure; give PositionsCallback a few, prompts=[...]"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure the model as it comes.

        A training that begins puts runs of an earlier one aside. Raises InputError as
        `measure_step`.
        """
        if not state.is_world_process_zero:
            return
        self.out = self.out or Path(args.output_dir) / "positions"
        earlier = [file.parent for file in self.out.glob("step-*/run.nc")]
        if state.global_step == 0 and earlier:
            aside = next(
                place
                for number in count(1)
                if not (place := self.out / f"earlier-{number}").exists()
            )
            aside.mkdir()
            for run in earlier:
                run.rename(aside / run.name)
            warn(f"{self.out} holds runs of a training that began before; they are in {aside} now")
        tokenizer = given.get("processing_class")
        self.prompts = as_prompts(self.prompts, cast(Any, SimpleNamespace(tokenizer=tokenizer)))
        self._measure(args, state, control, given)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure every `every` steps."""
        if state.is_world_process_zero and state.global_step % self.every == 0:
            self._measure_if_possible(args, state, control, given)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure the model as it leaves."""
        if state.is_world_process_zero and state.global_step != self._last:
            self._measure_if_possible(args, state, control, given)

    def _measure_if_possible(
        self, args: Any, state: Any, control: Any, given: Mapping[str, Any]
    ) -> None:
        try:
            self._measure(args, state, control, given)
        except (NotFinite, OSError, MemoryError, torch.OutOfMemoryError) as error:
            warn(f"positions were not measured at step {state.global_step}: {error}")

    def _measure(self, args: Any, state: Any, control: Any, given: Mapping[str, Any]) -> None:
        self._last = state.global_step
        run = measure_step(given["model"], state.global_step, self.prompts, self.out, self.measures)
        scalars = training_scalars(run)
        state.log_history.append(
            {**scalars, "epoch": state.epoch or 0.0, "step": state.global_step}
        )
        if self._reporters is None:
            # The Trainer shows its callbacks neither itself nor the others: these are the reporters
            # of the same run a second time.
            self._reporters = [
                reporter() for reporter in get_reporting_integration_callbacks(args.report_to)
            ]
        for reporter in self._reporters:
            reporter.on_log(args, state, control, model=given["model"], logs=dict(scalars))


def measure_step(
    model: nn.Module,
    step: int,
    prompts: Prompts,
    out: str | PathLike[str] | None = None,
    measures: Sequence[str | Measure] | None = None,
) -> xr.DataTree:
    """Measure prompts on a model after a step of its training.

        for step, batch in enumerate(batches):
            ...
            if step % 200 == 0:
                run = ri.measure_step(model, step, prompts, out="runs/mine")

    The model may be in training mode, under autocast or hold gradients; all stays as it is. A peft
    model is measured with its adapter, one in DistributedDataParallel or torch.compile without the
    wrapper.

    Args:
        model: Hugging Face decoder, stock or repositioned.
        step: Number of finished training steps.
        prompts: Token ids or Prompts; the model has no tokenizer.
        out: Directory; the run is written to `out`/step-K/run.nc. None: nothing is written.
        measures: Names and objects; None: those that the command `analyze` chooses for the model.

    Returns:
        The run.

    Raises:
        InputError: As `analyze`; or `reposition` refuses the decoder, or its weights are spread
            over processes (FSDP, ZeRO-3).
        NotFinite: All measures stopped.
    """
    step = checked(step, CountOrNone, "step")
    inner = (
        model
        if not isinstance(model, nn.Module)
        else extract_model_from_parallel(model, keep_torch_compile=False)
    )
    require_model(inner)
    inner = cast(Any, model_of(inner))
    _require_whole(inner)
    kind = inner.device.type
    devices = sorted(
        {part.device.index or 0 for part in inner.parameters() if part.device.type == kind}
    )
    forked: dict[str, Any] = (
        {"devices": devices, "device_type": kind} if kind != "cpu" else {"devices": []}
    )
    given = as_prompts(prompts, inner)
    with (
        torch.random.fork_rng(**forked),
        torch.autocast(kind, enabled=False),
        torch.no_grad(),
        alone(),
        as_before(inner),
    ):
        inner.eval()
        if not as_decoder(inner).repositioned:
            with_layout(inner, None)
        if inner.config._attn_implementation not in _FUSED:
            inner.config._attn_implementation = "sdpa"
        require_parity(inner)
        run = analyze(inner, given, measures, experiments=())
    name = Path(getattr(inner.config, "name_or_path", "") or "").name
    run.attrs |= {
        "training_step": step,
        "checkpoint": f"{name}/step-{step}" if name else f"step-{step}",
    }
    if out is not None:
        directory = _directory(out) / f"step-{step}"
        directory.mkdir(parents=True, exist_ok=True)
        write_run(run, directory / "run.nc")
    return run


def training_scalars(run: xr.DataTree) -> dict[str, float]:
    """Return a few numbers of a run for the log of a training.

        positions_range           of learned positions, mean over prompts and heads
        positions_hybrid_share    of chunks, mean over heads with learned positions
        positions_NAME_mass       attention from generated tokens to the prompts' main span:
                                  mean over prompts, of the head with most
        positions_findings        number of findings (`ri.findings`)

    Args:
        run: Run of `measure_step` or `analyze`.

    Returns:
        Numbers by name, those that the groups of the run allow.
    """
    require_run(run)
    found: dict[str, float] = {}
    for name, group, variable, chosen in (
        ("range", "positions", "position_range", {}),
        ("hybrid_share", "patterns", "pattern_share", {"pattern": "hybrid"}),
    ):
        if group in run.children:
            values = run[group].to_dataset()[variable].sel(chosen)
            learned = ~values["scheme"].isin(FIXED)
            found |= {name: float(values.isel(layer=learned).mean())} if learned.any() else {}
    span = str(run.attrs.get("main_span", ""))
    if span and "attention_mass" in run.children:
        found[f"{span}_mass"] = float(
            run["attention_mass"].to_dataset()["mass"].sel(span=span).mean("prompt").max()
        )
    found["findings"] = float(len(findings(run)))
    return {f"positions_{name}": value for name, value in found.items()}


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Restore the modules and the configuration of a model after the context.

    Every module has the attributes, children, buffers and hooks that it had before. Tensors are not
    copied: their values must stay as they are inside.

    Args:
        model: Model with a configuration.

    Yields:
        Nothing.
    """
    owners: list[Any] = [*model.modules(), model.config]
    kinds = type(model.config)
    before = [
        (
            owner,
            dict(vars(owner)),
            [(table, dict(table)) for table in vars(owner).values() if isinstance(table, dict)],
        )
        for owner in owners
    ]
    try:
        yield
    finally:
        # `vars` lacks the class: `reposition` exchanged it on the object that the user's
        # model holds.
        model.config.__class__ = kinds  # pyright: ignore[reportAttributeAccessIssue]
        for owner, attributes, tables in before:
            for table, content in [(vars(owner), attributes), *tables]:
                for name in [name for name in table if name not in content]:
                    del table[name]
                table.update(content)


def _directory(given: str | PathLike[str]) -> Path:
    directory = path_of(given, "a directory for the runs of a training")
    require_directory(directory)
    return directory


def _require_whole(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0 or hasattr(parameter, "device_mesh"):
            raise InputError(
                f"{name} is spread over processes (FSDP, ZeRO-3), and the first process "
                "alone measures; save checkpoints and analyze these"
            )
