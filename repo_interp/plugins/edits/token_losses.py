"""The loss of every token of prompts.

    loss_t = -log softmax(W h_(t-1))[token_t]        nats, in float32 as transformers computes it

h are last hidden states. The first token of a prompt, and of each of its documents, has none.
Prompts of similar length share a pass, padded on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import nn
from torch.nn.functional import cross_entropy

from repo_interp.analysis.batches import PaddedBatch, make_batches
from repo_interp.analysis.coercion import Prompts, as_prompts, require_known_tokens
from repo_interp.errors import InputError, NotFinitePrediction
from repo_interp.experiments.grid import stack_padded
from repo_interp.experiments.responses import MOST_LOGITS
from repo_interp.models.capture import decode
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.next_tokens import next_token_logits
from repo_interp.models.pass_limits import batch_limit
from repo_interp.models.side_by_side import BatchSize
from repo_interp.runtime.console import Console
from repo_interp.runtime.progress import steps
from repo_interp.storage.store import Progress
from repo_interp.tasks import Prompt

LONG_NAME = "-log p of the token after those before it"


@dataclass(frozen=True)
class PromptLosses:
    """Predictions of the tokens of one prompt."""

    loss: Float[np.ndarray, " token"]
    """NaN where a token is not predicted: the first one of a document."""
    likeliest: Bool[np.ndarray, " token"]
    """Whether the token is the likeliest one."""


def loss(
    model: nn.Module,
    prompts: Prompts,
    *,
    batch_size: BatchSize | Literal["auto"] = "auto",
    progress: Progress | None = None,
) -> xr.DataArray:
    """Return the loss of every token of prompts.

        ri.loss(model, text).mean("token")

    It equals the cross-entropy of transformers. Tokens without a loss are NaN, which the means of
    `xarray` skip.

    Args:
        model: Bridge or model.
        prompts: Prompts in any form that `analysis.coercion` takes.
        batch_size: Number of prompts per forward pass, its limits, or "auto": as many as are
            efficient and fit into memory.
        progress: Called with prompts done and in all; None: a bar on standard error.

    Returns:
        Loss [prompt, token] in nats: NaN at the first token of a prompt and of each of its
        documents, and for padding.

    Raises:
        InputError: There are no prompts, an object is not a prompt, or the model lacks a token.
        NotFinitePrediction: A loss is NaN or infinite.
    """
    decoder = as_decoder(model)
    prompt_list = checked_prompts(decoder, prompts)
    found: dict[int, np.ndarray] = {}
    with steps(Console(stderr=True)) as step:
        tell = partial(step, "predicting") if progress is None else progress
        for batch in prompt_batches(decoder, prompt_list, batch_size):
            losses = losses_of_batch(decoder, prompt_list, batch)
            found |= {n: one.loss for n, one in zip(batch.numbers, losses, strict=True)}
            tell(len(found), len(prompt_list))
    return xr.DataArray(
        stack_padded([found[number] for number in range(len(prompt_list))], np.nan, np.float32),
        dims=("prompt", "token"),
        name="loss",
        attrs={"long_name": LONG_NAME, "units": "nat"},
    )


def checked_prompts(decoder: Decoder, prompts: Prompts) -> list[Prompt]:
    """Return prompts as a list.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts in any form.

    Returns:
        The prompts.

    Raises:
        InputError: There are no prompts, an object is not a prompt, or the model lacks a token.
    """
    prompt_list = as_prompts(prompts, decoder.tokenizer)
    if not prompt_list:
        raise InputError("there are no prompts")
    require_known_tokens([prompt.tokens for prompt in prompt_list], decoder.vocabulary_size)
    return prompt_list


def prompt_batches(
    decoder: Decoder, prompts: Sequence[Prompt], batch_size: BatchSize | Literal["auto"]
) -> list[PaddedBatch]:
    """Cut prompts into batches, the longest first.

    Args:
        decoder: Decoder of the model.
        prompts: The prompts.
        batch_size: Number of prompts per forward pass, its limits, or "auto".

    Returns:
        The batches, on the model's device.
    """
    return make_batches(prompts, batch_limit(decoder, batch_size), decoder.device)


@torch.inference_mode()
def losses_of_batch(
    decoder: Decoder, prompts: Sequence[Prompt], batch: PaddedBatch
) -> list[PromptLosses]:
    """Return the losses of the prompts of a batch.

    Args:
        decoder: Decoder of the model.
        prompts: All prompts.
        batch: The prompts of one forward pass.

    Returns:
        Losses, in the order of the batch.

    Raises:
        NotFinitePrediction: A loss is NaN or infinite.
    """
    hidden = decode(
        decoder,
        batch.tokens,
        batch.valid,
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask,
    )
    at_once = max(1, MOST_LOGITS // decoder.vocabulary_size)
    found = []
    for row, number in enumerate(batch.numbers):
        prompt = prompts[number]
        count = len(prompt.tokens)
        losses, right = np.full(count, np.nan, np.float32), np.zeros(count, bool)
        for start in range(0, count, at_once):
            # The last row predicts nothing, but stays: transformers computes the same rows.
            logits = next_token_logits(decoder, hidden[row, start : min(count, start + at_once)])
            following = batch.tokens[row, start + 1 : min(count, start + at_once + 1)]
            logits = logits[: len(following)]
            some = slice(start + 1, start + 1 + len(following))
            losses[some] = cross_entropy(logits, following, reduction="none").cpu().numpy()
            right[some] = (logits.argmax(-1) == following).cpu().numpy()
        if not np.isfinite(losses[1:]).all():
            raise NotFinitePrediction(number)
        if prompt.document_count > 1:
            # The last token of a document does not predict the first one of the next
            losses[list(prompt.jumps)] = np.nan
            right[list(prompt.jumps)] = False
        found.append(PromptLosses(losses, right))
    return found
