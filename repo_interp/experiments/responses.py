"""Answers of a model at the targets of sequences, teacher-forced or greedily generated.

    forced       argmax p(. | reference tokens before t), and log p(token_t | ...), in one pass
    generated    argmax p(. | prompt, tokens generated so far), t by t, with a key-value cache

Both agree on the first wrong token and so on exact match; after it they may differ. Sequences are
padded on the right, where a causal model's answers cannot see it. This module knows nothing about
how answers are scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from repo_interp.errors import InputError, NotFinitePrediction
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.generation import continue_greedily
from repo_interp.models.lasting import at_rest
from repo_interp.models.next_tokens import next_token_logits
from repo_interp.models.padding import right_padding
from repo_interp.models.pass_limits import batch_limit
from repo_interp.models.side_by_side import BatchSize, batches, restore_order
from repo_interp.tasks import Batch, Prompt, Response, Task
from repo_interp.tasks.prompt import require_index
from repo_interp.tasks.task import Scoring

MOST_LOGITS = 1 << 24
"""Most logits that are computed at once: a third of a GB with their log-probabilities. A text model
has this many for a few hundred targets.
"""


@dataclass(frozen=True)
class Question:
    """Padded sequences, and their target tokens, sequence by sequence."""

    tokens: Int[Tensor, "sequence token"]
    rows: Int[Tensor, "target"]
    """The sequence of every target."""
    columns: Int[Tensor, "target"]
    """Index of the token before the target, which predicts it."""
    targets: Int[Tensor, "target"]
    """The token id at the target."""


def to_question(batch: Batch, device: torch.device | str = "cpu") -> Question:
    """Move a batch to a device.

    Args:
        batch: Padded sequences and their targets.
        device: Device of the tensors.

    Returns:
        The question as tensors, one entry per target.
    """
    tokens = torch.from_numpy(np.ascontiguousarray(batch.tokens, dtype=np.int64))
    # nonzero is in row-major order, so targets are sorted by sequence.
    rows, places = torch.from_numpy(np.ascontiguousarray(batch.targets)).nonzero(as_tuple=True)
    # The token before a target predicts it.
    return Question(*(part.to(device) for part in (tokens, rows, places - 1, tokens[rows, places])))


def tiled(question: Question, copies: int) -> Question:
    """Repeat all sequences of a question.

    Args:
        question: Sequences and targets.
        copies: Number of repetitions.

    Returns:
        The sequences and targets `copies` times, one after the other.
    """
    # Rows of a copy begin where the copy before it ends.
    rows = [question.rows + copy * len(question.tokens) for copy in range(copies)]
    return Question(
        question.tokens.repeat(copies, 1),
        torch.cat(rows),
        *(part.repeat(copies) for part in (question.columns, question.targets)),
    )


def target_logits(decoder: Decoder, question: Question) -> Float[Tensor, "target token_id"]:
    """Run the model and predict every target; logits at other tokens are never computed.

    Args:
        decoder: Decoder of the model.
        question: Sequences and targets.

    Returns:
        Logits, float32.
    """
    return logits_at(
        decoder, decoder.stack(question.tokens, use_cache=False).last_hidden_state, question
    )


def logits_at(
    decoder: Decoder, hidden: Float[Tensor, "sequence token d_model"], question: Question
) -> Float[Tensor, "target token_id"]:
    """Predict every target from last hidden states.

    Args:
        decoder: Decoder of the model.
        hidden: Last hidden states of the decoder.
        question: Sequences and targets.

    Returns:
        Logits, float32.
    """
    return next_token_logits(decoder, hidden[question.rows, question.columns])


def batches_by_length(
    decoder: Decoder, prompts: Sequence[Prompt], batch_size: BatchSize
) -> list[list[int]]:
    """Cut prompts into batches of similar length.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts.
        batch_size: Most prompts of a batch.

    Returns:
        Numbers of the prompts of every batch, shortest first.
    """
    lengths = [len(prompt.tokens) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lengths.__getitem__)
    return batches(order, lengths, batch_limit(decoder, batch_size))


@torch.inference_mode()
def forced_responses(
    model: PreTrainedModel, task: Scoring, prompts: Sequence[Prompt], batch_size: BatchSize = 32
) -> list[Response]:
    """Answer prompts teacher-forced.

    Args:
        model: Model that answers.
        task: Names the targets of a prompt.
        prompts: Prompts.
        batch_size: Prompts side by side.

    Returns:
        One response per prompt, with log-probabilities in nats.
    """
    decoder = as_decoder(model)
    cut, responses = batches_by_length(decoder, prompts, batch_size), []
    for chosen in cut:
        question = to_question(
            pad_prompts([prompts[number] for number in chosen], task), decoder.device
        )
        with (
            # Without dropout and autocast. Padding is stated, since there is no attention mask.
            at_rest(decoder),
            right_padding([len(prompts[number].tokens) for number in chosen]),
        ):
            hidden = decoder.stack(question.tokens, use_cache=False).last_hidden_state
        reference, likeliest = [], []
        # In parts, since a long text has a target at every token and the vocabulary is large
        for part in parts(question, max(1, MOST_LOGITS // int(model.config.vocab_size))):
            logits = logits_at(decoder, hidden, part)
            _require_finite(logits, [chosen[row] for row in part.rows.tolist()])
            # Float64, since perplexities sum thousands of them and effects subtract them
            log_probabilities = logits.double().log_softmax(-1)
            reference += log_probabilities.gather(-1, part.targets[:, None])[:, 0].tolist()
            likeliest += log_probabilities.argmax(-1).tolist()
        responses.append(to_responses(question, likeliest, reference))
    return restore_order(cut, responses)


def to_responses(
    question: Question, likeliest: Sequence[int], log_probabilities: Sequence[float]
) -> list[Response]:
    """Divide answers at all targets among the sequences.

    Args:
        question: Sequences and targets.
        likeliest: Most likely token id at every target.
        log_probabilities: Log-probability of every target, in nats.

    Returns:
        One response per sequence.
    """
    # Targets are sorted by sequence, so the targets of a sequence are between two ends.
    ends = question.rows.bincount(minlength=len(question.tokens)).cumsum(0).tolist()
    stretches = [slice(begin, end) for begin, end in pairwise([0, *ends])]
    return [Response(tuple(likeliest[some]), tuple(log_probabilities[some])) for some in stretches]


def parts(question: Question, size: int) -> Iterator[Question]:
    """Split a question by its targets.

    Args:
        question: Sequences and targets.
        size: Targets of a part.

    Returns:
        Questions about the same sequences.
    """
    targets = zip(
        *(part.split(size) for part in (question.rows, question.columns, question.targets)),
        strict=True,
    )
    return (Question(question.tokens, *part) for part in targets)


def _require_finite(logits: Float[Tensor, "target token_id"], numbers: Sequence[int]) -> None:
    """Raise NotFinitePrediction if logits are not finite; `numbers`: prompt of every target."""
    # A sum is not finite if any logit is not; the search runs only then.
    if bool(torch.isfinite(logits.sum())):
        return
    for number, is_finite in zip(numbers, torch.isfinite(logits).all(-1).tolist(), strict=True):
        if not is_finite:
            raise NotFinitePrediction(number)


def generated_responses(
    model: PreTrainedModel, task: Scoring, prompts: Sequence[Prompt], batch_size: BatchSize = 32
) -> list[Response]:
    """Answer prompts greedily, token by token.

    Args:
        model: Model that answers.
        task: Names the targets of a prompt.
        prompts: Prompts that end with their targets.
        batch_size: Prompts side by side.

    Returns:
        One response per prompt, without log-probabilities.

    Raises:
        InputError: Targets are not the last tokens of a prompt, so no answer can be generated.
    """
    starts = []
    for prompt in prompts:
        targets = task.targets(prompt)
        # Generation continues at one place, so targets in the middle of a prompt are impossible.
        if targets != tuple(range(len(prompt.tokens) - len(targets), len(prompt.tokens))):
            raise InputError(
                f"task {task.name} asks for tokens in the midst of its prompts, which cannot "
                "be generated; "
                "score it by the teacher-forced answers"
            )
        starts.append(targets[0])
    questions = [prompt.tokens[:start] for prompt, start in zip(prompts, starts, strict=True)]
    counts = [len(prompt.tokens) - start for prompt, start in zip(prompts, starts, strict=True)]
    return [
        Response(tokens)
        for tokens in continue_greedily(as_decoder(model), questions, counts, batch_size)
    ]


def prompts_of(task: Task, batch: Batch) -> list[Prompt]:
    """Read the sequences of a batch back as prompts without their padding.

    Args:
        task: Task of the batch.
        batch: Padded sequences; up to the last target, 0 is an ordinary token.

    Returns:
        One prompt per sequence.
    """
    ends = [
        # Padding is 0, which may also be a token: the last non-zero
        # token or target ends a sequence.
        np.flatnonzero((row != 0) | asked)[-1] + 1
        for row, asked in zip(batch.tokens, batch.targets, strict=True)
    ]
    return [task.describe(row[:end].tolist()) for row, end in zip(batch.tokens, ends, strict=True)]


def pad_prompts(prompts: Sequence[Prompt], task: Scoring) -> Batch:
    """Pad prompts on the right.

    Args:
        prompts: Prompts.
        task: Names the targets of a prompt.

    Returns:
        Token ids and targets of all prompts.

    Raises:
        InputError: A prompt has position ids.
    """
    # Padding does not change the token index in a causal model, but position ids would have to be
    # padded too.
    require_index(prompts)
    longest = max(len(prompt.tokens) for prompt in prompts)
    tokens = np.zeros((len(prompts), longest), dtype=np.int64)
    targets = np.zeros(tokens.shape, dtype=bool)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt.tokens)] = prompt.tokens
        targets[row, list(task.targets(prompt))] = True
    return Batch(tokens, targets)
