"""Which tokens of a forward pass are padding, for means over a prompt and draws among its tokens.

A pass over prompts padded on the right needs no attention mask, since no token sees a later one.
Then the pass does not know where prompts end, so its caller states it by `known_padding`. With an
attention mask, the mask states it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.models.masks import visible

# A context variable, so that passes in different threads do not share it.
_VALID: ContextVar[Tensor | None] = ContextVar("valid", default=None)


@contextmanager
def known_padding(valid: Bool[Tensor, "prompt token"]) -> Iterator[None]:
    """State the padding of passes over as many prompts and tokens, while the context lasts.

    Args:
        valid: Tokens that are no padding [prompt, token].

    Yields:
        None.
    """
    before = _VALID.set(valid)
    try:
        yield
    finally:
        _VALID.reset(before)


def right_padding(lengths: Sequence[int]) -> AbstractContextManager[None]:
    """State that prompts are padded on the right, while the context lasts.

    Args:
        lengths: Tokens of the prompts, in the order in which they pass.

    Returns:
        A context manager.
    """
    return known_padding(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


def valid_tokens(
    hidden_states: Float[Tensor, "prompt token d_model"], attention_mask: Tensor | None, start: int
) -> Bool[Tensor, "prompt token"] | None:
    """Return the mask of tokens that are no padding, if it is known.

    Args:
        hidden_states: [prompt, token, d_model].
        attention_mask: Of the layer, boolean or additive, over rows and keys: padding does not see
            itself.
        start: Tokens in the cache before this pass.

    Returns:
        [prompt, token]; None: all.
    """
    prompts, tokens, _ = hidden_states.shape
    mask = _VALID.get()
    # The stated padding does not belong to a pass of another shape.
    if mask is not None and mask.shape == (prompts, tokens):
        return mask.to(hidden_states.device)
    # Only a mask of pairs shows the tokens that see themselves.
    if attention_mask is None or attention_mask.ndim < 4:
        return None
    seen = visible(tokens, start + tokens, attention_mask, hidden_states.device)
    # Token t of this pass is key start + t, or one of the last keys if a window dropped others.
    # A mask may have one row for all prompts.
    first = min(start, seen.shape[-1] - tokens)
    return torch.diagonal(seen[:, 0], first, 1, 2).expand(prompts, -1)
