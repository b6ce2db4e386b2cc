"""Two models over the same texts, in the tokens of each.

This module knows nothing about messages and pages.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from repo_interp.errors import InputError
from repo_interp.explorer.explored import Explored
from repo_interp.models.decoder import as_decoder
from repo_interp.tasks import Prompt, prompt_from_text


def over_the_same_texts(explored: Explored, bridge: nn.Module, name: str = "") -> Explored:
    """Compare an explored model with another one over the same texts.

    The tokens are the same where both have one vocabulary.

    Args:
        explored: Model and prompts.
        bridge: The other model.
        name: Name for `ri.load`.

    Returns:
        Both models, with the prompts of each.

    Raises:
        InputError: The two have neither tokens nor texts in common.
    """
    first, second = explored.decoder, as_decoder(bridge)
    reads, other = first.tokenizer, second.tokenizer
    if (reads is None) != (other is None) or (
        reads is None and first.vocabulary_size != second.vocabulary_size
    ):
        raise InputError(
            "the two checkpoints have no tokens and no texts in common; compare those of one "
            "tokenizer, or two that read text"
        )
    prompts = explored.prompts
    # With one vocabulary the tokens are compared one to one, and need no way through text
    if reads is not None and other is not None and reads.get_vocab() != other.get_vocab():
        prompts = [_in_other_tokens(prompt, reads, other) for prompt in prompts]
    others = (*explored.others, Explored(bridge, prompts, name))
    return Explored(explored.bridge, explored.prompts, explored.name, explored.run, others)


def _in_other_tokens(prompt: Prompt, reads: Any, other: Any) -> Prompt:
    """`prompt` with the tokens of another tokenizer, with spans where it was made from text."""
    if prompt.text is None or prompt.characters is None:
        return prompt_from_text(reads.decode(prompt.tokens, skip_special_tokens=True), {}, other)
    return prompt_from_text(prompt.text, prompt.characters, other)
