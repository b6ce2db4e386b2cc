"""What a training run starts with: task, model and optimiser; and what the run will cost, found by rehearsing some of its steps.

A fresh model is a pre-norm Llama: RMSNorm, SwiGLU, no biases, untied embeddings. Its own weights depend on the seed and the sizes alone,
never on the scheme, so twins with the same seed start alike. A continued checkpoint keeps its weights; what its new schemes learn starts
afresh.

    seconds = steps * mean over rehearsed steps of their time

Rehearsed are forward and backward passes of steps spread over the run, because a curriculum makes later ones longer; no weight changes.
Scores and checkpoints are not counted, nor what compiling takes and saves: steps are rehearsed eager.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from repo_interp.errors import InputError
from repo_interp.models.adapters import as_base, attach, save_adapter
from repo_interp.models.checkpoints import identify, load_model, load_tokenizer, save
from repo_interp.models.fields import Base
from repo_interp.models.reposition import added_parameters, reposition
from repo_interp.tasks import Task
from repo_interp.tasks.vocabulary import PAD
from repo_interp.training.configuration import TrainingConfiguration
from repo_interp.training.step import make_optimizer, progress, target_loss, training_question
from repo_interp.training.trained import configured_task, in_tokens_of


@dataclass(frozen=True)
class Prepared:
    """What a run starts with."""

    configuration: TrainingConfiguration
    task: Task
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    base: Base | None = None
    """What is trained stands on it as an adapter; None: the model is trained as a whole."""

    def write(self, directory: Path) -> None:
        """Write the model as it is now: an adapter alone where one is trained, else a whole checkpoint."""
        if self.base is None:
            save(self.model, directory, self.tokenizer)
        else:
            save_adapter(self.model, directory, self.base)


@dataclass(frozen=True)
class Cost:
    """Cost of a run as a whole, whatever part of it is done already."""

    parameters: int
    position_parameters: int
    steps: int
    seconds_per_step: float


def prepare(configuration: TrainingConfiguration) -> Prepared:
    """Task, model and optimiser of a run. Raises InputError for whatever cannot be trained; nothing was written then."""
    if configuration.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was wanted, but this machine offers none to torch; give --device cpu")
    if configuration.execution == "compiled":
        _require_compiler()
    task, base = configured_task(configuration), None
    if configuration.continue_from:
        task = in_tokens_of(task, identify(configuration.continue_from).directory)
        model, tokenizer = _continued_model(configuration)
        _require_same_words(task, tokenizer, configuration.continue_from)
        model.config.max_position_embeddings = max(model.config.max_position_embeddings, task.training_length)
    else:
        tokenizer = task.tokenizer()
        model = _fresh_model(configuration, task.vocabulary_size, task.training_length)
    if configuration.adapter:
        base = as_base(identify(configuration.continue_from), configuration.continue_from)
        attach(model, configuration.adapter, configuration.adapter_from)
        model.config.max_position_embeddings = task.training_length  # the base saw longer texts, but not with these positions
    if configuration.precision == "bfloat16" and configuration.device == "cpu":
        model.set_attn_implementation(
            "eager"
        )  # products in bfloat16: 43 ms forward and backward at 512 tokens, the fused kernel 68
    model.train()
    return Prepared(configuration, task, model, tokenizer, make_optimizer(model, configuration), base)


def _require_compiler() -> None:
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise InputError(
            f"execution compiled needs a C++ compiler, and there is no {compiler} here; install one, name yours in CXX, or train eager"
        )


def estimate_cost(prepared: Prepared, samples: int = 4) -> Cost:
    """Size of the model and time per step, found by rehearsing `samples` steps. Leaves the model as it was."""
    configuration, model = prepared.configuration, prepared.model
    steps = np.linspace(1, configuration.steps, 2 * samples + 1).round().astype(int)[1::2]
    seconds = []
    with reproducible(configuration):
        for step in (steps[-1], *steps):  # the first of a process is slower
            start = time.monotonic()
            for part in range(configuration.accumulation):
                question = training_question(prepared.task, configuration, part, progress(configuration, int(step)))
                target_loss(model, question, configuration.precision).backward()
            seconds.append(time.monotonic() - start)
    model.zero_grad(set_to_none=True)
    return Cost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        position_parameters=added_parameters(model),
        steps=configuration.steps,
        seconds_per_step=float(np.mean(seconds[1:])),
    )


@contextmanager
def reproducible(configuration: TrainingConfiguration) -> Iterator[None]:
    """While this lasts, the same sums are made in the same order every time; torch's settings come back afterwards."""
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


def _fresh_model(configuration: TrainingConfiguration, vocabulary: int, longest: int) -> PreTrainedModel:
    """A decoder with random weights for `vocabulary` tokens; it names `longest` as its training length, in tokens."""
    width = configuration.width
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=configuration.feed_forward or -(-8 * width // (3 * 16)) * 16,
        num_hidden_layers=configuration.layers,
        num_attention_heads=configuration.heads,
        num_key_value_heads=configuration.kv_heads or configuration.heads,
        max_position_embeddings=longest,
        initializer_range=configuration.initial_deviation,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    torch.manual_seed(configuration.seed)
    return _with_layout(LlamaForCausalLM(config), configuration)


def _continued_model(configuration: TrainingConfiguration) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The checkpoint `continue_from` with the layout of `configuration`, and its tokenizer."""
    checkpoint = identify(configuration.continue_from)
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise InputError(f"{configuration.continue_from} has no tokenizer, so the task cannot be put into its tokens")
    model = load_model(checkpoint)
    torch.manual_seed(configuration.seed)
    return _with_layout(model, configuration), tokenizer


def _with_layout(model: PreTrainedModel, configuration: TrainingConfiguration) -> PreTrainedModel:
    reposition(model, configuration.scheme, scheme_deviation=configuration.scheme_deviation, **configuration.scheme_options)
    return model.to(torch.device(configuration.device))  # type: ignore[arg-type]


def _require_same_words(task: Task, tokenizer: PreTrainedTokenizerBase, checkpoint: str) -> None:
    wanted, present = task.tokenizer().get_vocab(), tokenizer.get_vocab()
    if wanted != present:
        raise InputError(
            f"{checkpoint} has another vocabulary ({len(present)} tokens) than task {task.name} with these options ({len(wanted)}); "
            "give a checkpoint of that task, or its options"
        )
