"""`TokenPairs`: queries and keys of one layer in one pass, for functions of pairs of tokens.

Tokens are counted by their index in the prompt, for any padding and any number of cached tokens.
Keys of padding on the left have an index of 0 or below; no query sees them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.layer_pass import Content


@dataclass(frozen=True)
class TokenPairs:
    """Some queries and some keys of one layer in one pass; axes of length 1 broadcast."""

    layer: int
    query: Int[Tensor, "any 1 row 1"]
    """Index of the query's token in its prompt."""
    key: Int[Tensor, "any 1 1 key"]
    """Index of the key's token in its prompt."""
    queries: Float[Tensor, "prompt head row d_head"]
    """Queries before rotation, in half-split order."""
    keys: Float[Tensor, "prompt kv_head key d_head"]
    """Keys before rotation, in half-split order, including cached keys."""
    values: Float[Tensor, "prompt kv_head key d_value"]

    @property
    def distance(self) -> Int[Tensor, "any 1 row key"]:
        """Number of tokens from the key to the query; negative if the key is later."""
        return self.query - self.key

    def part(self, rows: slice, keys: Tensor | slice = slice(None)) -> TokenPairs:
        """Return the pairs of some queries and keys.

        Args:
            rows: Indices of queries in the pass.
            keys: Indices of keys.

        Returns:
            Pairs of these queries and keys.
        """
        return TokenPairs(
            self.layer,
            self.query[:, :, rows],
            self.key[..., keys],
            self.queries[:, :, rows],
            self.keys[:, :, keys],
            self.values[:, :, keys],
        )


def token_pairs(attention: RepositionedAttention, content: Content) -> TokenPairs:
    """Return all pairs of a pass.

    Args:
        attention: Attention of the layer.
        content: Queries of this pass, and all keys and values.

    Returns:
        The pairs.
    """
    now, count = attention.active_pass, content.keys.shape[2]
    key = now.index if now.index.shape[-1] == count else now.counted_index(count)
    return TokenPairs(
        attention.layer_idx,
        now.index[:, None, :, None],
        key[:, None, None],
        content.queries,
        content.keys,
        content.values,
    )


def chosen_rows(heads: int, chosen: frozenset[int], device: torch.device) -> Tensor | None:
    """Make a mask of chosen heads of a layer.

    Args:
        heads: Number of heads of the layer.
        chosen: Indices of the chosen heads.
        device: Device of the mask.

    Returns:
        The mask [head, 1, 1]; None if all heads are chosen.
    """
    if len(chosen) == heads:
        return None
    mask = torch.zeros(heads, 1, 1, dtype=torch.bool)
    mask[sorted(chosen)] = True
    return mask.to(device)
