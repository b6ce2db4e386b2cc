"""Assigners give tokens their positions: the base classes, and the token index.

    index      z_i = i                                    (RoPE)
    mixed      z_i = (1 - p) z_i + p i                    p: `index_share`, the released code's `pdrop`

While a RoPE model learns to reposition, p falls from 1 to 0. An assigner gives P rows of
positions: one per key-value head, one per head, or one for the whole layer - a key has one
position, so heads that share a key share its position, unless keys are repeated for them.
Assigners that learn positions are in `learned_assigners`. This module knows nothing about the use
of positions in attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from repo_interp.positions.logits import exact, full_precision


class TokenIndex(nn.Module):
    """The token's index, the same for all heads: P = 1."""

    def forward(
        self, hidden_states: Float[Tensor, "batch token d_model"], index: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch one token"]:
        """Positions as float32, which is exact up to 2^24, for any dtype of the model."""
        # float16 is exact only up to 2,048.
        # [batch, 1, token]: one row of positions serves all heads
        return index.expand(hidden_states.shape[0], -1)[:, None].to(torch.float32)


class IndexSharing(nn.Module, ABC):
    """Base of assigners that mix in the index i: (1 - index_share) z + index_share i."""

    index_share: float = 0.0

    def mixed(
        self, positions: Float[Tensor, "batch any token *pair"], index: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch any token *pair"]:
        """Mix the index into positions.

        Args:
            positions: [batch, any, token], or [batch, any, token, component].
            index: [batch, token].

        Returns:
            Positions in their dtype.
        """
        # Without a share, no operator is added and no value is rounded.
        if self.index_share == 0.0:
            return positions
        # All rows, and all pairs, share one index.
        places = index[:, None] if positions.ndim == 3 else index[:, None, :, None]
        share = self.index_share
        return (1.0 - share) * positions + share * places.to(positions.dtype)


class MixedAssigner(IndexSharing):
    """Base of assigners that see one token at a time and mix in the index."""

    @abstractmethod
    def assign(self, hidden_states: Tensor) -> Float[Tensor, "batch token any"]:
        """Positions of every token, one column per row of positions."""

    def forward(
        self, hidden_states: Float[Tensor, "batch token d_model"], index: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch any token"]:
        """Return positions in the dtype of the maps, which may be wider than the hidden states.

        This holds under autocast too, since bfloat16 would round positions.
        """
        # Maps may be kept in float32 in a model of half precision.
        # An assigner without parameters computes in the dtype of the hidden states.
        maps = next(self.parameters(), hidden_states)
        with full_precision(hidden_states):
            # [batch, token, P] to [batch, P, token], like the axes of keys
            positions = self.assign(hidden_states.to(maps.dtype)).transpose(1, 2)
        return self.mixed(positions, index)


class RememberingAssigner(IndexSharing):
    """Base of assigners that see earlier tokens through a memory of every token.

    The memory of a token is cached with its key, so that generation equals the full pass.
    """

    features: int
    """Number of remembered features per token."""

    @abstractmethod
    def remember(
        self,
        hidden_states: Float[Tensor, "batch token d_model"],
        past: Float[Tensor, "batch earlier feature"] | None,
    ) -> Float[Tensor, "batch token feature"]:
        """Compute the memory of new tokens.

        Args:
            hidden_states: Hidden states of the new tokens, in the dtype of the maps.
            past: Memory of the cached tokens; the last entry is that of the previous token.

        Returns:
            Memory [batch, token, feature].
        """

    @abstractmethod
    def recall(
        self,
        memory: Float[Tensor, "batch key feature"],
        seen: Bool[Tensor, "any 1 token key"],
    ) -> Any:
        """Assign positions to the last tokens.

        Args:
            memory: Memory of the cached tokens, then of the new tokens.
            seen: Mask of the tokens that each new token sees, including itself.

        Returns:
            Positions [batch, P, token], or [batch, P, token, component] by rotary pair; or two such
            tensors, for tokens as queries and as keys.
        """

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the memory: float32, or float64 if the maps are in float64."""
        return exact(next(self.parameters())).dtype

    def forward(
        self,
        hidden_states: Float[Tensor, "batch token d_model"],
        index: Int[Tensor, "batch token"],
        past: Float[Tensor, "batch earlier feature"] | None,
        seen: Bool[Tensor, "any 1 token key"],
    ) -> tuple[Tensor | tuple[Tensor, ...], Tensor]:
        """Return positions of the new tokens, and their memory."""
        with full_precision(hidden_states):
            maps = next(self.parameters())
            # Cached in float32, since rounding to half precision would make generation differ from
            # a full pass.
            new = exact(self.remember(hidden_states.to(maps.dtype), past))
            memory = new if past is None else torch.cat([past, new], dim=1)
            recalled = self.recall(memory, seen)
            if isinstance(recalled, tuple):
                return tuple(self.mixed(positions, index) for positions in recalled), new
            return self.mixed(recalled, index), new
