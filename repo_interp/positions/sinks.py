"""Sinks: a share of every row of attention that moves no value.

    weights = softmax([logits, s])[..., :-1]        s: the sink's logit, by head or by row

A row of weights then sums to less than 1 (gpt-oss, null attention, stick-breaking).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def with_sinks(
    logits: Float[Tensor, "... head row key"], sinks: Float[Tensor, "*any"] | None
) -> Float[Tensor, "... head row any"]:
    """Append the column of the sink to logits.

    Args:
        logits: Logits [..., head, row, key].
        sinks: Logit of the sink by head, or by prompt, head and row; None: there is none.

    Returns:
        Logits with one more column, or as they are.
    """
    if sinks is None:
        return logits
    # The sink is a logit without a key: one more column.
    column = sinks.to(logits)[..., None]
    column = column if sinks.ndim > 1 else column[:, None]
    return torch.cat([logits, column.expand(*logits.shape[:-1], 1)], dim=-1)


def join_sinks(sinks: Float[Tensor, "head"] | None, rest: Tensor) -> Tensor:
    """Join sinks with logits of rows into one logit of all that moves no value.

    Args:
        sinks: By head; None: there is none.
        rest: By prompt, head and row.

    Returns:
        Logits [prompt, head, row].
    """
    return rest if sinks is None else torch.logaddexp(rest, sinks.to(rest)[:, None])


def weights_of(
    logits: Float[Tensor, "... head row key"], sinks: Float[Tensor, "*any"] | None
) -> Float[Tensor, "... head row key"]:
    """Compute attention weights of logits.

    Args:
        logits: Logits [..., head, row, key].
        sinks: Logit of the sink by head, or by prompt, head and row; None: there is none.

    Returns:
        Weights in the shape of `logits`; with sinks, rows sum to less than 1.
    """
    # Without the sink's column, so a row may sum to less than 1.
    return torch.softmax(with_sinks(logits, sinks), dim=-1)[..., : logits.shape[-1]]
