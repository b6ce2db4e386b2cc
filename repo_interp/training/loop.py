"""A training run, from its first step to the finished checkpoint - or from wherever an earlier session of it was cut off.

    prepare      configuration -> task, model, optimiser
    train        steps, records, checkpoints, state; then the finished checkpoint and its scores

A run is a function of its configuration: on one machine the same configuration gives the same model.safetensors, in one session or in
several, however these ended. Knows nothing about terminals.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from repo_interp.errors import InputError
from repo_interp.models.checkpoints import identify, save
from repo_interp.models.reposition import longest_prompt, mix_with_index
from repo_interp.tasks import Task
from repo_interp.tasks.vocabulary import PAD
from repo_interp.training import schedule
from repo_interp.training.batches import generator_for, training_question
from repo_interp.training.configuration import TrainingConfiguration
from repo_interp.training.construction import continued_model, fresh_model
from repo_interp.training.folder import TrainingFolder, replace_file
from repo_interp.training.optimisation import make_optimizer, take_step
from repo_interp.training.provenance import in_tokens_of, stated_task
from repo_interp.training.responses import forced_responses, prompts_of
from repo_interp.training.state import Moment, load_state, save_state


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
    """Mean score (the task's metric) on fresh sequences of full difficulty, where it was asked for at this step."""


@dataclass(frozen=True)
class Prepared:
    """What a run starts with."""

    configuration: TrainingConfiguration
    task: Task
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer


def prepare(configuration: TrainingConfiguration) -> Prepared:
    """Make task, model and optimiser. Raises InputError for whatever cannot be trained; nothing was written then."""
    if configuration.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was wanted, but this machine offers none to torch; give --device cpu")
    task = stated_task(configuration)
    if configuration.continue_from:
        task = in_tokens_of(task, identify(configuration.continue_from).directory)
        model, tokenizer = continued_model(configuration)
        _require_same_words(task, tokenizer, configuration.continue_from)
        model.config.max_position_embeddings = max(model.config.max_position_embeddings, task.training_length)
    else:
        tokenizer = task.tokenizer()
        model = fresh_model(configuration, task.vocabulary_size, task.training_length, PAD)
    model.train()
    return Prepared(configuration, task, model, tokenizer, make_optimizer(model, configuration))


def train(
    prepared: Prepared,
    folder: TrainingFolder,
    stop: Callable[[], bool] = lambda: False,
    save_seconds: float = 15.0,
) -> Iterator[Record]:
    """Train from where `folder` stands - its beginning, if it was just begun - to the end, yielding every record of the log.

    `stop` is asked after every step; when it says so, the state is saved and the run ends there, to go on later. The state is saved
    every `save_seconds` too. At the end the folder holds the finished checkpoint.
    """
    configuration, model = prepared.configuration, prepared.model
    with reproducible(configuration):
        moment = load_state(folder.state, model, prepared.optimizer)
        folder.cut_log(moment.log_size)
        clock = _Clock(moment.seconds)
        while moment.step < configuration.steps:
            step = moment.step + 1
            moment.losses.append(_step(prepared, step))
            moment.step, moment.seconds = step, clock.seconds()
            if _due(step, configuration.log_every) or _due(step, configuration.score_every) or step == configuration.steps:
                record = _record(prepared, moment)
                folder.append(asdict(record))
                moment.losses.clear()
                yield record
            if _due(step, configuration.checkpoint_every):
                folder.keep(step, lambda directory: save(model, directory, prepared.tokenizer))
            stopping = stop() or step == configuration.steps
            if stopping or clock.since_mark() >= save_seconds:
                moment.log_size = folder.log_size()
                save_state(folder.state, model, prepared.optimizer, moment)
                clock.mark()
            if stopping:
                break
        if moment.step == configuration.steps:
            model.eval()
            replace_file(folder.scores, json.dumps(final_scores(prepared), indent=1).encode() + b"\n")
            folder.finish(lambda directory: save(model, directory, prepared.tokenizer))


def final_scores(prepared: Prepared) -> dict:
    """The mean score of every test set, on prompts that training has not seen; None where they are longer than the model can take."""
    task, count, longest = prepared.task, prepared.configuration.score_prompts, longest_prompt(prepared.model)
    means: dict[str, float | None] = {}
    for test_set in task.test_sets:
        prompts = task.prompts(count, prepared.configuration.seed, test_set)
        if longest is not None and max(len(prompt.tokens) for prompt in prompts) > longest:
            means[test_set] = None
            continue
        means[test_set] = float(np.mean(task.score(forced_responses(prepared.model, task, prompts), prompts)))
    return {"metric": task.metric, "prompts": count, "steps": prepared.configuration.steps, "test_sets": means}


@contextmanager
def reproducible(configuration: TrainingConfiguration) -> Iterator[None]:
    """Let the same sums be made in the same order every time; how it was before comes back afterwards."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(configuration.threads)
    if configuration.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict)
        torch.set_num_threads(threads)


def _step(prepared: Prepared, step: int) -> float:
    configuration = prepared.configuration
    first, progress = (step - 1) * configuration.accumulation, schedule.progress(configuration, step)
    questions = [
        training_question(prepared.task, configuration.seed, first + part, configuration.batch, progress, configuration.device)
        for part in range(configuration.accumulation)
    ]
    mix_with_index(prepared.model, schedule.index_share(configuration, step))
    rate = schedule.learning_rate(configuration, step)
    return take_step(prepared.model, prepared.optimizer, questions, rate, configuration.clip)


def _record(prepared: Prepared, moment: Moment) -> Record:
    configuration, step = prepared.configuration, moment.step
    return Record(
        step=step,
        loss=float(np.mean(moment.losses)),
        learning_rate=schedule.learning_rate(configuration, step),
        progress=schedule.progress(configuration, step),
        seconds=round(moment.seconds, 1),
        score=_score(prepared) if _due(step, configuration.score_every) or step == configuration.steps else None,
    )


def _score(prepared: Prepared) -> float:
    task, model, configuration = prepared.task, prepared.model, prepared.configuration
    prompts = prompts_of(task, task.batch(generator_for(configuration.seed, "score", 0), configuration.score_prompts))
    model.eval()
    score = task.score(forced_responses(model, task, prompts), prompts)
    model.train()
    return float(np.mean(score))


def _require_same_words(task: Task, tokenizer: PreTrainedTokenizerBase, checkpoint: str) -> None:
    wanted, present = task.tokenizer().get_vocab(), tokenizer.get_vocab()
    if wanted != present:
        raise InputError(
            f"{checkpoint} has another vocabulary ({len(present)} tokens) than task {task.name} with these options ({len(wanted)}); "
            "give a checkpoint of that task, or its options"
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Clock:
    """Time spent in all sessions, and since the last mark."""

    def __init__(self, before: float) -> None:
        self.before = before
        self.start = self.marked = time.monotonic()

    def seconds(self) -> float:
        return self.before + time.monotonic() - self.start

    def mark(self) -> None:
        self.marked = time.monotonic()

    def since_mark(self) -> float:
        return time.monotonic() - self.marked
