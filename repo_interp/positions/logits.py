"""Base of all schemes that add to the attention logits, and their common arithmetic.

    S_ij = cap_logits(logit_scale * q_i . k_j) + B_ij    B_ij: position logits of a head

A row of B depends on the query of the row and the keys that it sees, never on other rows. Rows may
therefore be computed in blocks, or one by one with cached keys, and equal the rows of the full
computation. Sums and distances are in float32 (float64 for float64 input), also under autocast,
since bfloat16 would round positions.

This module knows nothing about models, the origin of masks, and single schemes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn


class PositionLogits(nn.Module, ABC):
    """Base of all schemes that add to the logits."""

    reads_content: ClassVar[bool | None] = None
    """Whether the logits depend on queries, keys or values; None: it is found out by trial."""

    @property
    def has_gates(self) -> bool:
        """Whether the scheme counts tokens by gates, as CoPE does."""
        return False

    @property
    def largest_position(self) -> float:
        """The count to which larger ones are clamped; infinite without a limit."""
        return math.inf

    def counted_by(
        self, keys: Tensor, values: Tensor | None, gate_keys: Tensor | None
    ) -> Float[Tensor, "batch kv_head key d_head"] | None:
        """Choose the vectors x_j of the gates sigmoid(logit_scale * q_i . x_j).

        Args:
            keys: Keys of the layer.
            values: Values of the layer, or None.
            gate_keys: Separate keys for gates, or None.

        Returns:
            One of them; None without gates.
        """
        return None

    def gate_keys(
        self, hidden_states: Float[Tensor, "batch token d_model"]
    ) -> Float[Tensor, "batch kv_head token d_head"] | None:
        """Compute additional keys from the attention layer's input; None if the scheme has none.

        A cache of keys holds these too, and `forward` gets those of all tokens.

        Args:
            hidden_states: [batch, token, d_model].

        Returns:
            Gate keys [batch, kv_head, token, d_head], or None.
        """
        return None

    @abstractmethod
    def forward(
        self,
        queries: Float[Tensor, "batch head row d_head"],
        keys: Float[Tensor, "batch kv_head key d_head"],
        query_index: Num[Tensor, "batch row"],
        key_index: Num[Tensor, "batch key"],
        visible: Bool[Tensor, "batch 1 row key"],
        logit_scale: float,
        values: Float[Tensor, "batch kv_head key d_head"] | None = None,
        gate_keys: Float[Tensor, "batch kv_head key d_head"] | None = None,
    ) -> Float[Tensor, "batch head row key"]:
        """Compute position logits of some rows and all keys, 0 where not visible.

        Args:
            queries: Queries before rotation.
            keys: Keys before rotation.
            query_index: Positions of the queries from the layer's assigner, after hooks, [batch, P,
                row], where P is 1, the number of key-value heads, or the number of heads. Without
                an assigner, indices of tokens among the valid tokens of their prompts [batch, row].
            key_index: Positions, or indices, of the keys.
            visible: Mask of the keys that a row may attend to.
            logit_scale: Factor of the dot products.
            values: Values of the layer, for schemes that read them.
            gate_keys: Results of `gate_keys` for all tokens so far.

        Returns:
            Logits to add to the scaled ones, float32 (float64 for float64 input) for any dtype of
            the model. The batch axis has length 1 if prompts do not differ.
        """


def exact(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32; float64 stays.

    Args:
        tensor: Any tensor.

    Returns:
        The tensor in float32 or float64.
    """
    # Not `float()`, which would reduce the precision of a model in float64
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Limit logits to the range from -cap to cap: cap tanh(logit / cap) (Gemma 2).

    Args:
        logits: Logits of any shape.
        cap: The largest size of a logit; None: no cap.

    Returns:
        Capped logits; small ones hardly change.
    """
    # In the order of Gemma 2's code, for the same rounding
    return logits if cap is None else torch.tanh(logits / cap) * cap


def full_precision(tensor: Tensor) -> torch.autocast:
    """Keep autocast from rounding products to bfloat16.

    Args:
        tensor: A tensor on the device of the computation.

    Returns:
        A context manager.
    """
    return torch.autocast(tensor.device.type, enabled=False)


def grouped_product(
    queries: Float[Tensor, "batch head row d_head"], keys: Float[Tensor, "batch kv_head key d_head"]
) -> Float[Tensor, "batch head row key"]:
    """Compute q_i . k_j with the key of the head's group, without copying keys.

    Args:
        queries: [batch, head, row, d_head].
        keys: [batch, kv_head, key, d_head]; consecutive heads share a key-value head.

    Returns:
        Products [batch, head, row, key].

    Raises:
        ValueError: The heads cannot share the keys evenly.
    """
    batch, heads, rows, width = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} keys evenly")
    # No reshape for one product, since it may copy queries with other strides.
    if heads == kv_heads:
        return queries @ keys.transpose(-1, -2)
    # Heads of a group become rows, so keys are not repeated in memory.
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads * rows, width)
    return (grouped @ keys.transpose(-1, -2)).view(batch, heads, rows, tokens)
