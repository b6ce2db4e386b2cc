"""Which tokens of a forward pass belong to its prompts, for code that takes a mean over a prompt's
tokens or draws among them.

A pass over prompts padded on the right needs no attention mask, since no token sees a later one; so
the pass itself does not say where its prompts end. Who runs it does, by `padding_known` around the
pass. A pass that is given an attention mask says it by that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.models.masks import visible

_VALID: ContextVar[Tensor | None] = ContextVar("valid", default=None)


@contextmanager
def padding_known(valid: Bool[Tensor, "prompt token"]) -> Iterator[None]:
    """While the context lasts, in passes over as many prompts and tokens what is not `valid` is
    padding.
    """
    before = _VALID.set(valid)
    try:
        yield
    finally:
        _VALID.reset(before)


def padded_on_the_right(lengths: Sequence[int]) -> AbstractContextManager[None]:
    """The same for prompts of `lengths` tokens, in the order in which they pass."""
    return padding_known(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


def valid_tokens(
    hidden_states: Float[Tensor, "prompt token d_model"], attention_mask: Tensor | None, start: int
) -> Bool[Tensor, "prompt token"] | None:
    """The tokens of this pass that are no padding, as far as that was said; None: all.

    `start`: tokens in the cache before them.

    `attention_mask`: the layer's, boolean or additive, over rows and keys: padding does not see
    itself.
    """
    prompts, tokens, _ = hidden_states.shape
    said = _VALID.get()
    if said is not None and said.shape == (prompts, tokens):
        return said.to(hidden_states.device)
    if attention_mask is None or attention_mask.ndim < 4:
        return None
    seen = visible(tokens, start + tokens, attention_mask, hidden_states.device)
    return torch.diagonal(seen[:, 0], start, 1, 2).expand(prompts, -1)
