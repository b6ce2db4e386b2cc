"""Plain texts as prompts, and one short text for a model that was trained on no built-in task.

The short text is the beginning of the standard library's docstrings (`essay`), the same on every
machine with the same Python.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from repo_interp.tasks.essay import essay
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.prompt.text import prompt_from_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = 512
"""Most tokens of the short text."""


def short_text(tokenizer: PreTrainedTokenizerBase, tokens: int = TOKENS) -> Prompt:
    """Make a prompt of the docstrings of the standard library, without spans.

    Args:
        tokenizer: Encodes the text.
        tokens: Most tokens of the prompt.

    Returns:
        The prompt.
    """
    # Every word has at least one token, so as many words as tokens suffice.
    return truncate(prompt_from_text(" ".join(essay().words(tokens)), {}, tokenizer), tokens)


def truncate(prompt: Prompt, tokens: int) -> Prompt:
    """Cut a prompt without spans and generated tokens.

    Args:
        prompt: Prompt to cut.
        tokens: Number of tokens to keep.

    Returns:
        A prompt of the first `tokens` tokens.
    """
    by_token = ("tokens", "token_text", "position_ids")
    # The text is not cut, since it is the text that was encoded.
    parts = {
        name: part[:tokens] for name in by_token if (part := getattr(prompt, name)) is not None
    }
    if (prompt.documents or 1) > 1:
        parts["documents"] = 1 + sum(jump < tokens for jump in prompt.jumps)
    return replace(prompt, **parts)
