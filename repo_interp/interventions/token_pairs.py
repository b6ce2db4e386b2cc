"""`TokenPairs`: queries and keys of one layer in one pass, for functions of pairs of tokens.

Tokens are counted as attention counts them: by their number in the prompt, whatever the padding and
however many the cache holds. Keys of padding on the left have numbers below 0, or 0; no query sees
them.
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
    """Some queries and some keys of one layer in one pass; axes of 1 broadcast."""

    layer: int
    query: Int[Tensor, "any 1 row 1"]
    """Number of the query's token in its prompt."""
    key: Int[Tensor, "any 1 1 key"]
    """Number of the key's token in its prompt."""
    queries: Float[Tensor, "prompt head row d_head"]
    """Before rotation, in half-split order."""
    keys: Float[Tensor, "prompt kv_head key d_head"]
    """Before rotation, in half-split order, cached ones too."""
    values: Float[Tensor, "prompt kv_head key d_value"]

    @property
    def distance(self) -> Int[Tensor, "any 1 row key"]:
        """How many tokens the key stands before the query; below 0: after it."""
        return self.query - self.key

    def part(self, rows: slice, keys: Tensor | slice = slice(None)) -> TokenPairs:
        """Return the pairs of some queries and keys.

        Args:
            rows: Places of queries in the pass.
            keys: Places of keys.

        Returns:
            Their pairs.
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
        attention: The layer whose pass this is.
        content: Its queries of this pass, and all keys and values.

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
    """Mark heads of a layer.

    Args:
        heads: Number of its heads.
        chosen: Numbers of those that are marked.
        device: Where the mask is wanted.

    Returns:
        The mask [head, 1, 1]; None where all are marked.
    """
    if len(chosen) == heads:
        return None
    mask = torch.zeros(heads, 1, 1, dtype=torch.bool)
    mask[sorted(chosen)] = True
    return mask.to(device)
