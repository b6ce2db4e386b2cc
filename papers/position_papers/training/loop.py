"""A training run from its first step, or from the end of an interrupted session, to the finished
checkpoint.

A run is a function of its configuration: on one machine the same configuration gives the same
model.safetensors, in one session or in several. This module knows nothing about terminals.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import position_papers.training.processes as side
import position_papers.training.prompt_scores as prompt_scores
from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.folder import Moment, TrainingFolder, load_state, save_state
from position_papers.training.preparation import Prepared, prepare, reproducible, test_prompts
from position_papers.training.step import (
    executing,
    generator_for,
    index_share,
    learning_rate,
    progress,
    take_step,
    training_question,
)
from position_papers.training.trained import require_begun
from repo_interp.checkpoint_files.stored import stored_digest
from repo_interp.cli.scheme_files import read_scheme_files
from repo_interp.errors import InputError, Unfinished
from repo_interp.experiments.responses import forced_responses, prompts_of
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import mix_with_index
from repo_interp.models.side_by_side import SideBySide
from repo_interp.plugins.adapters.adapter_training import round_trained
from repo_interp.runtime import processes
from repo_interp.runtime.failures import is_out_of_memory

SCORED = SideBySide(prompts=32, tokens=32_768)
"""Number of prompts that are scored together. For 24 prompts of 8,192 tokens, attention without a
fused kernel makes 54 GiB of scores in float32.
"""
Run = tuple[TrainingConfiguration, Path]
"""The configuration of a training run, and its directory."""


@dataclass(frozen=True)
class Record:
    """A line of the log."""

    step: int
    loss: float
    """Mean cross-entropy of the targets since the last record, nats."""
    learning_rate: float
    progress: float
    """Share of the task's full difficulty."""
    seconds: float
    """Time spent so far, in all sessions."""
    score: float | None = None
    """Mean score (the task's metric) on fresh sequences of full difficulty, at steps with scores.
    """


def train(
    prepared: Prepared,
    folder: TrainingFolder,
    stop: Callable[[], bool] = lambda: False,
    save_seconds: float = 15.0,
    scoring: Callable[[int, int], object] = lambda done, total: None,
) -> Iterator[Record]:
    """Train from the state of `folder`, or from the beginning, to the end, and yield every record
    of the log.

    `stop` is called after every step, and after every batch of prompts of the final scores. If it
    returns True, the state is saved and the run stops, to continue later. The state is also saved
    every `save_seconds`. `scoring` is called with the number of answered prompts and of all
    prompts. At the end the folder has the finished checkpoint. Raises InputError if another run was
    begun in the folder, and Unfinished if there is not enough memory for the final scores or they
    are refused; the weights are then kept without scores.
    """
    configuration, model = prepared.configuration, prepared.model
    require_begun(folder.directory, configuration)
    if folder.is_finished:
        return  # another process finished it before this one locked the folder
    with (
        reproducible(configuration),
        executing(model, configuration.execution),
        _saying_what_is_kept(folder),
    ):
        moment = load_state(folder.state, model, prepared.optimizer, configuration.steps)
        folder.cut_log(moment.log_size)
        saved = time.monotonic()
        start = saved - moment.seconds  # counts the time of earlier sessions
        while moment.step < configuration.steps:
            step = moment.step + 1
            moment.losses.append(_step(prepared, step))
            moment.step, moment.seconds = step, time.monotonic() - start
            if step == configuration.steps:  # kept even if scoring fails
                folder.keep_unscored(prepared.write)
            if (
                _due(step, configuration.log_every)
                or _due(step, configuration.score_every)
                or step == configuration.steps
            ):
                record = _record(prepared, moment)
                folder.append(asdict(record))
                moment.losses.clear()
                yield record
            if _due(step, configuration.checkpoint_every):
                folder.keep(step, prepared.write)
            stopping = stop() or step == configuration.steps
            if stopping or time.monotonic() - saved >= save_seconds:
                moment.log_size = folder.log_size()
                save_state(folder.state, model, prepared.optimizer, moment)
                saved = time.monotonic()
            if stopping:
                break
        if moment.step == configuration.steps:
            model.eval()
            if prepared.base is not None:
                round_trained(model)  # scores are for the stored weights
            # Repeated, since a run that resumes at its last step may find half of the files moved.
            folder.keep_unscored(prepared.write)

            def answered(done: int, total: int) -> None:
                scoring(done, total)
                if stop():
                    raise _Stopped

            try:
                with _scoring(configuration):
                    scores = final_scores(prepared, answered)
            except _Stopped:
                return

            stated = {**scores, "weights": stored_digest(folder.unscored)}
            folder.finish(json.dumps(stated, indent=1) + "\n")


@contextmanager
def _saying_what_is_kept(folder: TrainingFolder) -> Iterator[None]:
    """Extend errors of users or of memory by the place of the weights without a score."""
    try:
        yield
    except Exception as error:
        why = "out of memory" if is_out_of_memory(error) else error
        if not folder.kept or not isinstance(why, InputError | str):
            raise
        raise Unfinished(f"the scores could not be made ({why}): {folder.kept}") from error


class _Stopped(Exception):
    """A request to stop during the final scores; the state is saved, so the next call makes them."""


def final_scores(prepared: Prepared, answered: Callable[[int, int], object]) -> dict:
    """Return the mean score of every test set on prompts that are not in training, and the scores
    of its prompts; None if prompts are too long for the model.

    `answered` is called after every batch with the number of answered prompts and of all prompts.
    """
    task, count = prepared.task, prepared.configuration.score_prompts
    total, done = count * len(task.test_sets), 0
    by_prompt: dict[str, np.ndarray] = {}

    def after_batch(module: nn.Module, given: Any, output: Any) -> None:
        nonlocal done
        done += len(output.last_hidden_state)
        answered(done, total)

    decoder: Any = prepared.model.model
    with decoder.register_forward_hook(after_batch):
        for number, test_set in enumerate(task.test_sets, start=1):
            if prompts := test_prompts(prepared, test_set, count):
                by_prompt[test_set] = task.score(
                    forced_responses(prepared.model, task, prompts, SCORED), prompts
                )
            done = number * count
    return {
        "metric": task.metric,
        "prompts": count,
        "steps": prepared.configuration.steps,
        "test_sets": {
            name: float(np.mean(by_prompt[name])) if name in by_prompt else None
            for name in task.test_sets
        },
        "by_prompt": prompt_scores.stated(by_prompt),
    }


def _step(prepared: Prepared, step: int) -> float:
    configuration = prepared.configuration
    first, difficulty = (step - 1) * configuration.accumulation, progress(configuration, step)
    questions = [
        training_question(prepared.task, configuration, first + part, difficulty)
        for part in range(configuration.accumulation)
    ]
    mix_with_index(as_decoder(prepared.model), index_share(configuration, step))
    rate = learning_rate(configuration, step)
    return take_step(
        prepared.model,
        prepared.optimizer,
        questions,
        rate,
        configuration.clip,
        configuration.precision,
    )


def _record(prepared: Prepared, moment: Moment) -> Record:
    configuration, step = prepared.configuration, moment.step
    return Record(
        step=step,
        loss=float(np.mean(moment.losses)),
        learning_rate=learning_rate(configuration, step),
        progress=progress(configuration, step),
        seconds=round(moment.seconds, 1),
        score=_score(prepared)
        if _due(step, configuration.score_every) or step == configuration.steps
        else None,
    )


def _score(prepared: Prepared) -> float:
    task, model, configuration = prepared.task, prepared.model, prepared.configuration
    prompts = prompts_of(
        task, task.batch(generator_for(configuration.seed, "score", 0), configuration.score_prompts)
    )
    model.eval()
    with _scoring(configuration):
        score = task.score(forced_responses(model, task, prompts, SCORED), prompts)
    model.train()
    return float(np.mean(score))


def _scoring(configuration: TrainingConfiguration) -> AbstractContextManager[Any]:
    """Return a context without compilation, so that scores are those of the ordinary checkpoint."""
    return (
        torch.compiler.set_stance("force_eager")
        if configuration.execution == "compiled"
        else nullcontext()
    )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def train_side_by_side(
    runs: Sequence[Run],
    jobs: int,
    watch: Callable[[], None],
    every: float = 0.5,
    scheme_files: Sequence[str] = (),
) -> bool:
    """Train all `runs`, `jobs` at a time, by `side_by_side`.

    `scheme_files` has every FILE.py:FUNCTION of the command line, which each process runs. Returns
    whether all runs were finished.

    If several processes were launched together, each takes the next run in turn.
    """

    work = partial(_train_one, tuple(scheme_files))

    def train_alone(run: Run) -> None:
        side.side_by_side([run], work, 1, lambda done: watch(), every)

    try:
        if processes.count() > 1:
            processes.share_work(runs, train_alone)
        else:
            side.side_by_side(runs, work, jobs, lambda done: watch(), every)
    except KeyboardInterrupt:
        return False
    return True


def _train_one(scheme_files: Sequence[str], run: Run) -> None:
    """Train in this process until the end, or until a request to stop."""
    read_scheme_files(scheme_files)
    configuration, directory = run
    folder, prepared = TrainingFolder(directory), prepare(configuration)
    with folder.claimed():
        for _ in train(prepared, folder, stop=lambda: side.asked_to_stop()):
            pass
