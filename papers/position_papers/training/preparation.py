"""Prepare a training run: task, model and optimizer.

A fresh model is a pre-norm Llama: RMSNorm, SwiGLU, no biases, untied embeddings. Its weights, other
than those of the scheme, depend only on the seed and the sizes, so models with the same seed start
equally for all schemes. A continued checkpoint keeps its weights; parameters of its new schemes are
initialized.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from position_papers.training.configuration import TrainingConfiguration
from position_papers.training.processes import threads
from position_papers.training.step import make_optimizer
from position_papers.training.trained import configured_task
from repo_interp.analysis.trained_task import in_tokens_of
from repo_interp.checkpoint_files.fields import Base
from repo_interp.errors import InputError, one_line
from repo_interp.models.checkpoints import (
    device_named,
    identify,
    load_model,
    load_tokenizer,
)
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import with_layout
from repo_interp.models.saving import save
from repo_interp.plugins.adapters.adapter_training import attach, save_adapter
from repo_interp.plugins.adapters.adapters import base_reference
from repo_interp.tasks import Prompt, Task
from repo_interp.tasks.vocabulary import PAD


@dataclass(frozen=True)
class Prepared:
    """Task, model and optimizer of a run."""

    configuration: TrainingConfiguration
    task: Task
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    base: Base | None = None
    """Base of the trained adapter; None: the whole model is trained."""

    def write(self, directory: Path) -> None:
        """Write the current model: only the adapter if one is trained, else a whole checkpoint."""
        if self.base is None:
            save(self.model, directory, self.tokenizer)
        else:
            save_adapter(self.model, directory, self.base)


def prepare(configuration: TrainingConfiguration) -> Prepared:
    """Make task, model and optimizer of a run.

    Raises InputError for a configuration that cannot be trained, before anything is written.
    """
    device_named(configuration.device)
    if configuration.execution == "compiled":
        _require_compiler()
    task, base = configured_task(configuration), None
    if configuration.continue_from:
        task = in_tokens_of(task, identify(configuration.continue_from).directory)
        model, tokenizer = _continued_model(configuration)
        _require_same_words(task, tokenizer, configuration.continue_from)
        model.config.max_position_embeddings = max(
            model.config.max_position_embeddings, task.training_length
        )
    else:
        tokenizer = task.tokenizer()
        model = _fresh_model(configuration, task.vocabulary_size, task.training_length)
    if configuration.adapter:
        base = base_reference(identify(configuration.continue_from), configuration.continue_from)
        attach(model, configuration.adapter, configuration.adapter_from)
        # The base was trained on longer texts, but not with these positions.
        model.config.max_position_embeddings = task.training_length
    if configuration.precision == "bfloat16" and configuration.device == "cpu":
        # With products in bfloat16 this takes 43 ms forward and backward at 512 tokens, and the
        # fused kernel 68 ms.
        model.set_attn_implementation("eager")
    model.train()
    return Prepared(
        configuration, task, model, tokenizer, make_optimizer(model, configuration), base
    )


def _require_compiler() -> None:
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        how = "install one, name yours in CXX, or train eager"
        raise InputError(
            f"execution compiled needs a C++ compiler, and there is no {compiler} here; {how}"
        )


def test_prompts(prepared: Prepared, test_set: str, count: int) -> list[Prompt]:
    """Return `count` prompts of a test set, which are not in training; none if they are too long
    for the model.
    """
    prompts = prepared.task.prompts(count, prepared.configuration.seed, test_set)
    longest = as_decoder(prepared.model).longest_prompt
    return (
        []
        if longest is not None and max(len(prompt.tokens) for prompt in prompts) > longest
        else prompts
    )


@contextmanager
def reproducible(configuration: TrainingConfiguration) -> Iterator[None]:
    """Use deterministic algorithms, if the configuration states it, inside a `with` block;
    restore torch's settings afterwards.

    Raises InputError if the device lacks such an algorithm.
    """
    memory: Any = torch.utils.deterministic  # its attribute is a property
    strict, filled = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    if configuration.is_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(configuration.is_deterministic)
    memory.fill_uninitialized_memory = False  # takes time, and changes no sum
    try:
        with threads(configuration.threads):
            yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise InputError(
            f"scheme {configuration.scheme} cannot be trained on {configuration.device} with "
            f"deterministic algorithms ({one_line(error, 80)}); give --no-deterministic"
        ) from None
    finally:
        torch.use_deterministic_algorithms(strict)
        memory.fill_uninitialized_memory = filled


def _fresh_model(
    configuration: TrainingConfiguration, vocabulary: int, longest: int
) -> PreTrainedModel:
    """Make a decoder with random weights for `vocabulary` tokens, with `longest` tokens as its
    stated training length.
    """
    width = configuration.width
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=configuration.feed_forward_width,
        num_hidden_layers=configuration.layers,
        num_attention_heads=configuration.heads,
        num_key_value_heads=configuration.key_value_heads,
        max_position_embeddings=longest,
        initializer_range=configuration.initial_deviation,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    torch.manual_seed(configuration.seed)
    return _with_layout(LlamaForCausalLM(config), configuration)


def _continued_model(
    configuration: TrainingConfiguration,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the checkpoint `continue_from` with the layout of `configuration`, and its tokenizer."""
    checkpoint = identify(configuration.continue_from)
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise InputError(
            f"{configuration.continue_from} has no tokenizer, so the task cannot be put into "
            "its tokens"
        )
    model = load_model(checkpoint)
    torch.manual_seed(configuration.seed)
    return _with_layout(model, configuration), tokenizer


def _with_layout(model: PreTrainedModel, configuration: TrainingConfiguration) -> PreTrainedModel:
    with_layout(
        model,
        configuration.scheme,
        scheme_deviation=configuration.scheme_deviation,
        **configuration.scheme_options,
    )
    return model.to(torch.device(configuration.device))  # type: ignore[arg-type]


def _require_same_words(task: Task, tokenizer: PreTrainedTokenizerBase, checkpoint: str) -> None:
    wanted, present = task.tokenizer().get_vocab(), tokenizer.get_vocab()
    if wanted != present:
        other = (
            f"another vocabulary ({len(present)} tokens) than task {task.name} with "
            f"these options ({len(wanted)})"
        )
        raise InputError(
            f"{checkpoint} has {other}; give a checkpoint of that task, or its options"
        )
