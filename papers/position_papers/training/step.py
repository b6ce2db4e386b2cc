"""One step of training: sequences, learning rate, loss, and AdamW on the clipped gradient.

    loss            mean over targets t of -log p(token_t | tokens before t)
    gradient        g = mean over the sequences of a step of d loss / d weights;   g <- g min(1, clip / |g|)
    learning rate   peak * t / warm_up   while t <= warm_up;   then   floor + (peak - floor) (1 + cos(pi u)) / 2
    progress        min(1, (t - 1) / (curriculum * steps))
    index share     max(0, 1 - (t - 1) / (index_share_until * steps))              (the released code's `pdrop`)

t = 1 .. steps is the step, u runs from 0 to 1 between warm-up and the last step, floor =
final_share * peak. The schedules depend only on the number of the step, and the sequences on this
number and the seed, so a resumed run needs only the number. This module knows nothing about
directories.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from position_papers.training.configuration import TrainingConfiguration
from repo_interp.experiments.responses import MOST_LOGITS, Question, to_question
from repo_interp.models.decoder import as_decoder
from repo_interp.models.next_tokens import next_token_logits
from repo_interp.tasks import Task


def learning_rate(configuration: TrainingConfiguration, step: int) -> float:
    """Return the learning rate of step `step`, counted from 1."""
    peak, warm_up = configuration.learning_rate, min(configuration.warm_up, configuration.steps)
    if step <= warm_up:
        return peak * step / warm_up
    done = (step - warm_up) / max(1, configuration.steps - warm_up)
    floor = configuration.final_share * peak
    return floor + (peak - floor) * (1.0 + math.cos(math.pi * done)) / 2.0


def progress(configuration: TrainingConfiguration, step: int) -> float:
    """Return the difficulty of step `step`: 0 is the easiest, 1 the full difficulty of the task."""
    growing = configuration.curriculum * configuration.steps
    return 1.0 if growing == 0 else min(1.0, (step - 1) / growing)


def index_share(configuration: TrainingConfiguration, step: int) -> float:
    """Return the weight of the token index in learned positions at step `step`: 1 is plain RoPE, 0
    only the learned positions.
    """
    mixing = configuration.index_share_until * configuration.steps
    return 0.0 if mixing == 0 else max(0.0, 1.0 - (step - 1) / mixing)


def training_question(
    task: Task, configuration: TrainingConfiguration, number: int, difficulty: float
) -> Question:
    """Return batch `number` of a training run at a difficulty from 0 to 1; it is always the same."""
    generator = generator_for(configuration.seed, "train", number)
    return to_question(task.batch(generator, configuration.batch, difficulty), configuration.device)


def generator_for(seed: int, purpose: str, number: int) -> np.random.Generator:
    """Return a random generator that differs for every seed, purpose and number."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), number])


def make_optimizer(model: nn.Module, configuration: TrainingConfiguration) -> torch.optim.AdamW:
    """Make AdamW for all weights; vectors (norms, biases) do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [weight for weight in trained if weight.ndim >= 2],
            "weight_decay": configuration.weight_decay,
        },
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (configuration.beta_1, configuration.beta_2)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=configuration.learning_rate, betas=betas
    )


def add_gradient(
    model: PreTrainedModel, question: Question, count: int = 1, precision: str = "float32"
) -> list[Float[Tensor, ""]]:
    """Add the gradient of the mean cross-entropy of the targets to the gradient of the weights.

    At most `MOST_LOGITS` logits are in memory at a time: those of 16,384 targets and 49,152 words
    take 3.2 GB. Each part is differentiated to the last hidden states before the next one is
    computed; then one backward pass runs through the decoder.

    Args:
        model: Model to train.
        question: Sequences and targets.
        count: Number of questions of the step; the loss is divided by it.
        precision: That of products of matrices, "float32" or "bfloat16".

    Returns:
        The loss of every part of the targets, in nats; their sum is the loss of the question.
    """
    decoder = as_decoder(model)

    def mixed() -> torch.autocast:
        return torch.autocast(
            question.tokens.device.type, torch.bfloat16, enabled=precision == "bfloat16"
        )

    with mixed():
        states = decoder.stack(question.tokens, use_cache=False).last_hidden_state
    states = states[question.rows, question.columns]
    size = max(1, MOST_LOGITS // int(model.config.vocab_size))
    losses, gradients = [], []
    for part, targets in zip(states.split(size), question.targets.split(size), strict=True):
        leaf = part.detach().requires_grad_()
        with mixed():
            logits = next_token_logits(decoder, leaf)
        share = len(targets) / len(question.targets)
        loss = nn.functional.cross_entropy(logits, targets) * share / count
        del logits  # frees memory for the logits of the next part
        loss.backward()
        losses.append(loss.detach())
        gradients.append(leaf.grad)
    states.backward(torch.cat(gradients))
    return losses


@contextmanager
def executing(model: PreTrainedModel, execution: Literal["eager", "compiled"]) -> Iterator[None]:
    """Run the decoder "eager", or as code "compiled" at its first call for sequences of any length,
    inside a `with` block.
    """
    if execution == "eager":
        yield
        return
    decoder = model.model
    decoder.forward = torch.compile(decoder.forward, dynamic=True)
    try:
        yield
    finally:
        del decoder.forward


def take_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    questions: Sequence[Question],
    rate: float,
    clip: float,
    precision: str = "float32",
) -> float:
    """Update the weights once with the learning rate `rate`; return the mean loss before the
    update.

    `precision` is the precision of matrix products, "float32" or "bfloat16".
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    losses = [
        loss
        for question in questions
        for loss in add_gradient(model, question, len(questions), precision)
    ]
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    # Last, because reading a number waits for the accelerator
    return sum(loss.item() for loss in losses)
