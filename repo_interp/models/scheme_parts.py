"""The parts that a position scheme puts into a layer; any may be absent.

    z = assigner(h)                    positions, or none
    q, k = transform(q, k, z)          per head, or none
    S = ... + position_logits(q, k, z, ...)
    out = softmax([S, remainder(q, k, z, ...)]) v

and the frequencies to rotate by. `attention` puts them together.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor, nn

from repo_interp.positions.logits import PositionLogits


@dataclass(frozen=True)
class SchemeParts:
    """The parts that a position scheme puts into a layer."""

    name: str
    assigner: nn.Module | None
    """Returns positions, or a pair of positions of tokens as queries and as keys; None if the
    scheme has none.
    """
    frequencies: Float[Tensor, "*row component"] | None
    """Rotation frequencies in radians per position, for all heads or one row for each head or
    key-value head; None if nothing is rotated. Learned if they are an `nn.Parameter`, as
    `attention_scaling` may be.
    """
    attention_scaling: float | Float[Tensor, "component"] = 1.0
    """Factor of queries and keys by rotation: one number, or one per pair."""
    components: Bool[Tensor, "component"] | None = None
    """Rotary components that take part in the dot product; None: all."""
    position_logits: PositionLogits | None = None
    """Module that adds to the logits; None if the scheme adds nothing."""
    learned: bool = False
    """Whether the assigner learns positions, one number per token and row: findings, figures and
    experiments on learned positions are about such layers.
    """
    transform: nn.Module | None = None
    """Maps queries [batch, head, token, d_head], keys [batch, kv_head, token, d_head] and positions
    of some tokens to new queries and keys, token by token; None: they stay unchanged. Everything
    after it, including hooks and measures, uses the new ones.
    """
    remainder: nn.Module | None = None
    """Returns, from the arguments of `PositionLogits.forward`, a logit for each row [batch, head,
    row] that takes part in the softmax and moves no value; None: only keys take part.
    """


PARTS = ("assigner", "transform", "position_logits", "remainder")
"""Parts of a scheme that are modules: children of the stock module under these names, so that they
are trained, moved and saved with it.
"""
