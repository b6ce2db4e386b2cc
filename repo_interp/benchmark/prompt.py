"""The prompt of every benchmark: random tokens with a needle, a query, and generated tokens at the end."""

from __future__ import annotations

import numpy as np

from repo_interp.tasks.prompt import Prompt

_MARKED = 32
"""Tokens of needle and query, and half of the generated ones; an eighth of a short prompt each."""


def prompt_of(tokens: int, vocabulary: int, number: int = 0) -> Prompt:
    """A prompt of `tokens` tokens below `vocabulary`; the same `number`, the same prompt."""
    drawn = np.random.default_rng([number, tokens]).integers(3, vocabulary, tokens)
    size = max(1, min(_MARKED, tokens // 8))
    end = tokens - 2 * size
    spans = {"needle": tuple(range(tokens // 3, tokens // 3 + size)), "query": tuple(range(end - size, end))}
    return Prompt(tokens=tuple(drawn.tolist()), spans=spans, generated=tuple(range(end, tokens)))
