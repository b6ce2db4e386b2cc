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
"""Of the short text, at most."""


def short_text(tokenizer: PreTrainedTokenizerBase, tokens: int = TOKENS) -> Prompt:
    """Make a prompt of the docstrings of the standard library, without spans.

    Args:
        tokenizer: Encodes the text.
        tokens: Most tokens of the prompt.

    Returns:
        The prompt.
    """
    # As many words as tokens are enough: a word has one token at least
    return truncate(prompt_from_text(" ".join(essay().words(tokens)), {}, tokenizer), tokens)


def truncate(prompt: Prompt, tokens: int) -> Prompt:
    """Cut a prompt without spans and generated tokens.

    Args:
        prompt: Prompt to cut.
        tokens: Tokens that remain.

    Returns:
        A prompt of the first `tokens` tokens.
    """
    by_token = ("tokens", "token_text", "position_ids")
    # The text stays whole, as it was encoded
    parts = {
        name: part[:tokens] for name in by_token if (part := getattr(prompt, name)) is not None
    }
    if (prompt.documents or 1) > 1:
        parts["documents"] = 1 + sum(jump < tokens for jump in prompt.jumps)
    return replace(prompt, **parts)
