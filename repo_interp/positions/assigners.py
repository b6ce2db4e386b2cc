"""How a token gets its position.

    index      z_i = i                                    (RoPE)
    learned    z_i = (silu(h_i Wg) * (h_i Wc)) Wz         (RePo eq. 4-6, app. A)
    indexed    z_i = f_phi([h_i, i])                      (RePo, footnote 2)
    linear     z_i = h_i W                                (the released `continuous` modes)

h_i is the input of the attention layer; Wg, Wc: d_model -> d_model // 8 (`gate_map`,
`content_map`), Wz: d_model // 8 -> P (`final_map`); no biases. P is how many rows of positions the
layer has: one per key-value head, one per head, or one for the whole layer - a key has one
position, so heads that share a key share its position, unless keys are repeated for them.

While a RoPE model learns to reposition, z may be mixed with the index: z <- (1 - p) z + p i
(`index_share` p; the released code's `pdrop`).

Knows nothing about how positions enter attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.positions.logits import full_precision


class TokenIndex(nn.Module):
    """The token's index, the same for all heads: P = 1."""

    def forward(
        self, hidden_states: Float[Tensor, "batch token d_model"], index: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch one token"]:
        """Positions as float32: exact up to 2^24 whatever the model's dtype."""
        # float16 holds whole numbers up to 2,048 alone.
        return index.expand(hidden_states.shape[0], -1)[:, None].to(torch.float32)


class MixedAssigner(nn.Module, ABC):
    """Base of assigners that mix in the index i: (1 - index_share) z + index_share i."""

    index_share: float = 0.0

    @abstractmethod
    def assign(self, hidden_states: Tensor) -> Float[Tensor, "batch token any"]:
        """Positions of every token, one column per row of positions."""

    def forward(
        self, hidden_states: Float[Tensor, "batch token d_model"], index: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch any token"]:
        """Positions in the dtype of the maps, which may be wider than that of the hidden states.

        Under autocast too: bfloat16 would round them.
        """
        # Maps may be kept in float32 in a model of half precision.
        maps = next(self.parameters(), hidden_states)
        with full_precision(hidden_states):
            positions = self.assign(hidden_states.to(maps.dtype)).transpose(1, 2)
        if self.index_share == 0.0:
            return positions
        return (1.0 - self.index_share) * positions + self.index_share * index[:, None].to(
            positions.dtype
        )


class LearnedPositions(MixedAssigner):
    """RePo's f_phi: a gated representation of the position, then one linear map per row."""

    def __init__(self, d_model: int, rows: int, representation: int | None = None) -> None:
        """`rows` is P.

        `representation` is d_p, the width in between; d_model // 8 as in the paper unless given.
        """
        super().__init__()
        self.representation = d_model // 8 if representation is None else representation
        self.gate_map = nn.Linear(d_model, self.representation, bias=False)
        self.content_map = nn.Linear(d_model, self.representation, bias=False)
        self.final_map = nn.Linear(self.representation, rows, bias=False)

    def assign(
        self, hidden_states: Float[Tensor, "batch token d_model"]
    ) -> Float[Tensor, "batch token any"]:
        """Positions of every token, one column per row of positions."""
        gated = nn.functional.silu(self.gate_map(hidden_states)) * self.content_map(hidden_states)
        return self.final_map(gated)


class IndexedPositions(LearnedPositions):
    """RePo's f_phi with the token index as one more input, which training may lean on alone."""

    def __init__(self, d_model: int, rows: int) -> None:
        """`rows` is P; the width in between stays d_model // 8."""
        super().__init__(d_model + 1, rows, d_model // 8)

    def forward(
        self, hidden_states: Float[Tensor, "batch token d_model"], index: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch any token"]:
        """Positions of every token."""
        # bfloat16 would round the index
        hidden_states = hidden_states.to(self.gate_map.weight.dtype)
        indices = index.expand(hidden_states.shape[0], -1)[..., None].to(hidden_states.dtype)
        return super().forward(torch.cat([hidden_states, indices], dim=-1), index)


class LinearPositions(MixedAssigner):
    """A linear map of the hidden state to one row (`continuous`) or several (multihead)."""

    def __init__(self, d_model: int, rows: int) -> None:
        """`rows` is P: 1, or the number of key-value heads."""
        super().__init__()
        self.dynamic_map = nn.Linear(d_model, rows, bias=False)

    def assign(
        self, hidden_states: Float[Tensor, "batch token d_model"]
    ) -> Float[Tensor, "batch token any"]:
        """Positions of every token, one column per row of positions."""
        return self.dynamic_map(hidden_states)
