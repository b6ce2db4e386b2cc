"""Greedy tokens after a prompt, under edits that act only while a token is computed.

    x_{t+1} = argmax of the logits after x_0 ... x_t, with a cache of keys

This module knows nothing about sessions and pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache

from repo_interp.errors import NotFinitePrediction
from repo_interp.models.attention import cache_argument
from repo_interp.models.decoder import Decoder
from repo_interp.models.generation import end_tokens
from repo_interp.models.lasting import at_rest


def greedy_tokens(
    decoder: Decoder,
    given: Int[Tensor, "1 token"],
    count: int,
    contexts: Sequence[Callable[[], AbstractContextManager[None]]],
    check: Callable[[], None],
) -> Iterator[int]:
    """Generate greedy tokens one by one; close it to stop.

    Args:
        decoder: Decoder of the model.
        given: Tokens of the prompt.
        count: Most tokens.
        contexts: A function per edit that returns a context, which applies it.
        check: Called before every token; its exception ends the continuation.

    Yields:
        Tokens, up to one that ends a text.

    Raises:
        NotFinitePrediction: The logits are NaN or infinite.
    """
    model: Any = decoder.owner
    ends, argument = end_tokens(decoder), cache_argument(model.forward)
    # A fresh cache: one of an earlier pass would hold keys that were rotated without edits
    cache = DynamicCache(config=model.config)
    for _ in range(count):
        check()
        # Entered again for every token: in between the caller may use the model
        with torch.no_grad(), at_rest(decoder), ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            logits = model(given, **{argument: cache}, use_cache=True, logits_to_keep=1).logits[
                0, -1
            ]
        if not bool(logits.isfinite().all()):
            raise NotFinitePrediction(0)
        given = logits.argmax()[None, None]
        yield int(given)
        if int(given) in ends:
            return
