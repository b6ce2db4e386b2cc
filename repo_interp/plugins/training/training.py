"""Measure a model during training, by a callback of transformers or in a loop.

    every k steps    attach -> analyze a few prompts -> detach -> OUT/step-K/run.nc, and a few
                     numbers for the log
    evaluation       attach -> a pass of the Trainer's evaluation -> detach, for each pass; then the
                     same file and numbers

The model is measured in place, without a copy. Afterwards all modules, the configuration and
torch's random state are restored, so that a training with the callback gives the same bits as a
training without. `compare OUT/step-*` reads the runs as a series.

With several processes the first one measures, and the others wait for it at their next exchange of
gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import xarray as xr
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from repo_interp.analysis.analyze import Results, execute
from repo_interp.analysis.batches import PaddedBatch, make_batch
from repo_interp.analysis.coercion import Prompts, as_prompts
from repo_interp.analysis.defaults import choose, resolve_measures
from repo_interp.analysis.job import Job, results_of
from repo_interp.errors import InputError, warn
from repo_interp.measures.border import as_measure
from repo_interp.measures.statistics import Measure
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import patch_attribute
from repo_interp.models.offloading import device_of
from repo_interp.plugins.training.measured_step import (
    finished_run,
    inner_model,
    measure_step,
    run_directory,
    undisturbed,
    with_hook_sites,
)
from repo_interp.plugins.training.scalars import training_scalars
from repo_interp.tasks.prompt import Prompt
from repo_interp.values import Count, checked

_OWNERS = "_repo_interp_positions"
"""Attribute of a Trainer's state with the callbacks by the directory of their runs."""


class PositionsCallback(TrainerCallback):
    """Callback of transformers' Trainer that measures positions during training.

        Trainer(model, arguments, train_dataset=data, callbacks=[ri.PositionsCallback(every=200,
        prompts=prompts)])

    With prompts, the callback measures before the first step, every `every` steps, and after the
    last step. Without prompts, it measures within the passes of each evaluation of the Trainer, and
    adds no passes. `ri.training_scalars` of every run go to `state.log_history` and to the
    Trainer's reporters.

    Args:
        every: Steps between two measurements of prompts.
        prompts: A few prompts in any form of `ri.analyze`; the Trainer's `processing_class` encodes
            texts.
        out: Directory of the runs step-K; None: positions in the Trainer's output directory. Runs
            of an earlier training in it, or after the step at which a training resumes, are moved
            to earlier-N.
        measures: Names and objects; None: the defaults of the command `analyze` for the model.
        evaluated: Without prompts, number of rows of an evaluation to measure, from the first
            batch on, in the precision of the evaluation. Rows must be padded on the right. Of
            several evaluation sets, the first is measured.

    Raises:
        InputError: Before the first step, if prompts or measures do not fit the model, or another
            callback has the same `out`. Later failures (numbers that are not finite, no memory or
            disk space, rows padded on the left) become warnings, and the training continues.
    """

    def __init__(
        self,
        every: int = 200,
        prompts: Prompts = (),
        out: str | PathLike[str] | None = None,
        measures: Sequence[str | Measure] | None = None,
        evaluated: int = 32,
    ) -> None:
        """Check the arguments."""
        self.every = checked(every, Count, "every")
        if not isinstance(prompts, Iterable) and not hasattr(prompts, "tokens"):
            raise InputError(f"prompts are a {type(prompts).__name__}; wanted a few, prompts=[...]")
        self.prompts = (
            prompts
            if isinstance(prompts, str) or hasattr(prompts, "tokens")
            else list(cast(Any, prompts))
        )
        self.out = None if out is None else run_directory(out)
        # Refused here: a wrong name must not come up after hours of training
        self.measures = measures if measures is None else resolve_measures(measures)
        self._reporters: list[Any] | None = None
        self._last: int | None = None
        self.evaluated = checked(evaluated, Count, "evaluated")
        self._evaluation: _Evaluation | None = None
        self._entries: list[dict[str, Any]] = []

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Raise InputError if another callback has the same `out`, or this one is listed twice."""
        self._claim(args, state, twice=self in vars(state).get(_OWNERS, {}).values())

    def _claim(self, args: Any, state: Any, twice: bool = False) -> Path:
        """Claim the directory of the runs for this callback in a training, and return it."""
        out = self.out or Path(args.output_dir) / "positions"
        # Callbacks get neither the Trainer nor the other callbacks, but all get one state
        owners = vars(state).setdefault(_OWNERS, {})
        if twice or owners.setdefault(out.resolve(), self) is not self:
            raise InputError(
                f"two PositionsCallbacks write their runs to {out}; give each its own, "
                "PositionsCallback(out=...)"
            )
        return out

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure the initial model.

        Moves runs of an earlier training aside. Raises InputError as `measure_step`.
        """
        if not state.is_world_process_zero:
            return
        self.out, self._entries = self._claim(args, state), []
        begun = state.global_step
        # A resumed training repeats the steps after its checkpoint, so runs of these steps are old.
        earlier = [
            run
            for run in (file.parent for file in self.out.glob("step-*/run.nc"))
            if begun == 0 or _number_of(run) > begun
        ]
        if earlier:
            aside = next(
                place
                for number in count(1)
                if not (place := self.out / f"earlier-{number}").exists()
            )
            aside.mkdir()
            for run in earlier:
                run.rename(aside / run.name)
            after = f" after step {begun}" if begun else ""
            warn(
                f"{self.out} holds runs{after} of a training that began before; they are in "
                f"{aside} now"
            )
        if not self.prompts:
            self._begin_evaluation(args, given["model"])
            return
        tokenizer = given.get("processing_class")
        # as_prompts needs only the tokenizer of a model, and the Trainer has it separately
        self.prompts = as_prompts(self.prompts, tokenizer)
        # Prompts and measures that do not fit the model should stop the training here
        self._measure(args, state, control, given["model"], required=True)

    def _begin_evaluation(self, args: Any, model: nn.Module) -> None:
        """Observe evaluations from now on; InputError if that is impossible."""
        reading = [m.name for m in self.measures or () if as_measure(m).needs.predictions]
        trainer = _running_trainer()
        for holds, reason in (
            (
                trainer is None or (args.eval_strategy == "no" and not args.eval_on_start),
                "the Trainer evaluates nothing",
            ),
            (args.torch_compile or args.n_gpu > 1, "torch.compile and DataParallel hide passes"),
            (reading, f"{', '.join(reading)} needs a pass over prompts"),
        ):
            if holds:
                raise InputError(
                    f"there are no prompts to measure, and {reason}; give PositionsCallback a "
                    "few, prompts=[...]"
                )
        if self._evaluation is not None:
            self._evaluation.end()
        self._evaluation = _Evaluation(trainer, inner_model(model), self.measures, self.evaluated)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure prompts every `every` steps."""
        if self.prompts and state.is_world_process_zero and state.global_step % self.every == 0:
            self._measure(args, state, control, given["model"])

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Keep the observations of the last pass: it belonged to the evaluation."""
        if self._evaluation is not None:
            self._evaluation.keep()

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure the evaluation that ends."""
        if self._evaluation is not None:
            # Only the first of several evaluation sets is measured: the others end at the same step
            if state.global_step != self._last:
                self._measure(args, state, control, given["model"])
            self._evaluation.forget()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure the final model."""
        if self._evaluation is not None:
            self._evaluation.end()
        elif state.is_world_process_zero and state.global_step != self._last:
            self._measure(args, state, control, given["model"])

    def _measure(
        self, args: Any, state: Any, control: Any, model: nn.Module, required: bool = False
    ) -> None:
        """Measure, write and report; a failure becomes a warning unless `required`."""
        step = self._last = state.global_step
        try:
            run = (
                measure_step(model, step, self.prompts, self.out, self.measures)
                if self._evaluation is None
                else finished_run(
                    self._evaluation.conclude(), self._evaluation.model, step, self.out
                )
            )
            scalars = training_scalars(run)
            # The log of a resumed Trainer already has the first step; entries of others stay.
            owners = vars(state).get(_OWNERS, {}).values()
            ours = [entry for owner in owners for entry in owner._entries]
            state.log_history[:] = [
                entry
                for entry in state.log_history
                if entry.get("step") != step
                or not scalars.keys() <= entry.keys()
                or any(entry is other for other in ours)
            ]
            self._entries.append({**scalars, "epoch": state.epoch or 0.0, "step": step})
            state.log_history.append(self._entries[-1])
            if self._reporters is None:
                # A callback gets neither the Trainer nor other callbacks, so the reporters are made
                # a second time.
                self._reporters = [
                    reporter() for reporter in get_reporting_integration_callbacks(args.report_to)
                ]
            for reporter in self._reporters:
                reporter.on_log(args, state, control, model=model, logs=dict(scalars))
        except (InputError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            if required:
                raise
            warn(f"positions were not measured at step {step}: {error}")


def _running_trainer() -> Any:
    """Return the Trainer that runs this callback, which gets no reference to it, or None."""
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def _number_of(run: Path) -> int:
    """Step of a directory step-K; -1 for other names."""
    number = run.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


class _Evaluation:
    """Rows of an evaluation, measured within the passes over them."""

    def __init__(
        self, trainer: Any, model: Any, measures: Sequence[str | Measure] | None, most: int
    ) -> None:
        self.model, self.measures, self.most = model, measures, most
        self._pass: tuple[ExitStack, Any, Any] | None = None
        self.forget()
        self._lasting = ExitStack()
        # Hooks from on_train_begin to on_train_end would stay if the training raises: callbacks are
        # not called at such an end
        patch_attribute(
            self._lasting, trainer, "evaluation_loop", lambda loop: partial(self._observed, loop)
        )

    def end(self) -> None:
        """Observe no further evaluation."""
        self._lasting.close()

    def _observed(self, loop: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Run an evaluation with hooks in the model, and always remove them."""
        with ExitStack() as hooks:
            for handle in (
                self.model.register_forward_pre_hook(self._before, with_kwargs=True),
                # Hooks of two callbacks nest, like their changes of the model
                self.model.register_forward_hook(self._after, prepend=True, always_call=True),
            ):
                hooks.callback(handle.remove)
            hooks.callback(self._leave)
            return loop(*given, **options)

    def _leave(self) -> None:
        """Undo changes of the model by an unfinished pass, if there is one."""
        if self._pass is not None:
            self._pass[0].close()
            self._pass = None

    def forget(self) -> None:
        """Begin the next evaluation."""
        self.prompts: list[Prompt] = []
        self.observed: list[tuple[PaddedBatch, Results]] = []
        self._pending: tuple[list[Prompt], PaddedBatch, Results] | InputError | None = None
        self._refused: InputError | None = None

    def keep(self) -> None:
        """Keep the last pass. Passes without a following evaluation step are not kept."""
        pending, self._pending = self._pending, None
        if isinstance(pending, InputError):
            self._refused = pending
        elif pending is not None:
            self.prompts += pending[0]
            self.observed.append(pending[1:])

    def conclude(self) -> xr.DataTree:
        """Return the run of the kept rows."""
        if self._refused is not None:
            raise self._refused
        with undisturbed(self.model), with_hook_sites(self.model):
            job = self._job(self.prompts)
            job.observed = self.observed
            return execute(job)

    def _job(self, prompts: list[Prompt]) -> _ObservedJob:
        # The default measures of named layers do not include predictions.
        measures, _ = choose(as_decoder(self.model), prompts, self.measures, [], (), None)
        source = "the Trainer's evaluation"
        return _ObservedJob(self.model, prompts, measures, experiments=(), prompts_from=source)

    def _before(self, model: Any, arguments: tuple, keywords: dict[str, Any]) -> None:
        self._pending = None
        if model.training or self._refused is not None or len(self.prompts) >= self.most:
            return
        try:
            with ExitStack() as stack:
                with undisturbed(model):
                    prompts, width = _rows(keywords)
                    stack.enter_context(with_hook_sites(model))
                    job, begun = self._job(prompts), len(self.prompts)
                numbers, device = range(len(prompts)), device_of(model)
                batch = make_batch(prompts, numbers, width, device, job.structure)
                batch = replace(batch, numbers=tuple(begun + number for number in numbers))
                found = stack.enter_context(job.observation(batch))
                self._pass = stack.pop_all(), (prompts, batch), found
        except InputError as error:
            self._pending = error

    def _after(self, model: Any, arguments: tuple, output: Any) -> None:
        if self._pass is not None:
            _, batch, found = self._pass
            self._leave()
            self._pending = (*batch, results_of(*found)) if output is not None else None


class _ObservedJob(Job):
    """A job with batches that were observed before."""

    observed: Sequence[tuple[PaddedBatch, Results]] = ()

    @property
    def batches(self) -> list[PaddedBatch]:
        return [batch for batch, _ in self.observed]

    def observe(self, batch: PaddedBatch, *given: Any, **further: Any) -> Any:
        # By identity, since a comparison of batches would compare tensors
        return next(results for other, results in self.observed if other is batch)


def _rows(keywords: Mapping[str, Any]) -> tuple[list[Prompt], int]:
    """Rows of a Trainer's batch as prompts, and the number of tokens of a row with padding."""
    tokens, mask, ids = (
        keywords.get(name) for name in ("input_ids", "attention_mask", "position_ids")
    )
    if tokens is None or (mask is not None and mask.shape != tokens.shape):
        raise InputError("wanted batches of input_ids and attention_mask, both [row, token]")
    valid = torch.ones_like(tokens) if mask is None else mask.long()
    # A mask of padding on the right never rises from 0 to 1
    if bool((valid.diff() > 0).any()):
        raise InputError("rows are padded on the left; set the tokenizer's padding_side to 'right'")
    if ids is not None and ids.ndim == 3:  # mRoPE: time, height and width
        if len(ids) == 4:  # after the index in the text, which separates documents
            index, ids = ids[0], ids[1:]
            if bool(((index != torch.arange(tokens.shape[1]).to(index)) & (valid > 0)).any()):
                raise InputError("position ids of four axes pack documents; leave rows unpacked")
        ids = ids.permute(1, 2, 0)
    places = (
        [None] * len(tokens) if ids is None else ids.expand(*tokens.shape, *ids.shape[2:]).tolist()
    )
    rows = [
        Prompt(
            tuple(row[:count]),
            position_ids=None if place is None else place[:count],
            documents=None if place is None else 1,
        )
        for row, place, count in zip(tokens.tolist(), places, valid.sum(1).tolist(), strict=True)
    ]
    # Without a mask transformers reads every jump of position ids as the start of a document
    apart = rows if mask is not None else [replace(r, documents=1 + len(r.jumps)) for r in rows]
    return apart, tokens.shape[1]
