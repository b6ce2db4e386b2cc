"""Find the token of a prompt that predicts the answer, and the two answers to compare.

    logit difference = logit(for) - logit(against)      at the last token, or before the answer

This module knows prompts and tokenizers, and nothing about passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from repo_interp.errors import InputError, quoted
from repo_interp.models.decoder import Decoder
from repo_interp.tasks import Prompt

Answer = str | int | Sequence[str | int] | Tensor | np.ndarray
"""A text of one token or the number of a token; or one for every prompt."""


def compared_tokens(
    decoder: Decoder, for_: Answer, against: Answer, count: int
) -> tuple[Int[Tensor, "prompt"], Int[Tensor, "prompt"]]:
    """Return the tokens of the two answers to every prompt.

    Args:
        decoder: Decoder of the model.
        for_: One token as a text or a number, for all prompts or for each.
        against: The other answer, in the same form.
        count: Number of prompts.

    Returns:
        Token ids of both answers [prompt], on the model's device.

    Raises:
        InputError: The number of answers is not the number of prompts, a text is not one token,
            the model lacks a token, or both answers to a prompt are the same.
    """
    found = []
    for name, given in (("for_", for_), ("against", against)):
        given = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
        several = isinstance(given, Sequence) and not isinstance(given, str)
        answers: Any = given if several else [given] * count
        if len(answers) != count:
            raise InputError(f"{name} has {len(answers)} answers, and there are {count} prompts")
        found.append([_token(decoder, one, name) for one in answers])
    for number, (right, wrong) in enumerate(zip(*found, strict=True)):
        if right == wrong:
            raise InputError(
                f"for_ and against are the same token in prompt {number}; their difference is 0"
            )
    right, wrong = (torch.tensor(tokens, device=decoder.device) for tokens in found)
    return right, wrong


def _token(decoder: Decoder, answer: Any, name: str) -> int:
    if isinstance(answer, str):
        if decoder.tokenizer is None:
            raise InputError(
                f"{name} is {quoted(answer)}, and the model has no tokenizer; give the token's number"
            )
        found = decoder.tokenizer.encode(answer, add_special_tokens=False)
        if len(found) != 1:
            raise InputError(
                f"{name} is {quoted(answer)}, which is {len(found)} tokens of this model; wanted "
                'is one, with the space before it: " Mary"'
            )
        return int(found[0])
    # True is a number too
    whole = isinstance(answer, int | np.integer) and not isinstance(answer, bool)
    if not whole or not 0 <= answer < decoder.vocabulary_size:
        raise InputError(
            f"{name} is {quoted(answer)}; wanted is a text of one token, or its number from 0 to "
            f"{decoder.vocabulary_size - 1}"
        )
    return int(answer)


def asked_tokens(prompts: Sequence[Prompt]) -> list[int]:
    """Return the index of the token before the answer, for every prompt.

    Args:
        prompts: The prompts.

    Returns:
        The index of the token before the first generated one, or of the last token if none is
        generated.

    Raises:
        InputError: A prompt begins with its answer.
    """
    rows = [
        (prompt.generated[0] if prompt.generated else len(prompt.tokens)) - 1 for prompt in prompts
    ]
    if -1 in rows:
        raise InputError(f"prompt {rows.index(-1)} begins with its answer, which no token predicts")
    return rows
