"""Base of all schemes that add to the attention logits, and arithmetic that they share.

    S_ij = cap_logits(logit_scale * q_i . k_j) + B_ij    B_ij: position logits, of every head

A row of B depends on that row's query and on the keys it sees, never on other rows: so rows may be
asked in blocks, or one by one against cached keys, and equal the rows of the full computation. Sums
and distances are made in float32 (float64 for float64 input), under autocast too: bfloat16 would
round positions.

Knows nothing about models, masks' origin, or which scheme it is.
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
        """Make further keys from the attention layer's input; None where the scheme has none.

        They belong to tokens as keys do: a cache of keys holds these too, and all go to `forward`.

        Args:
            hidden_states: [batch, token, d_model].

        Returns:
            [batch, kv_head, token, d_head], or None.
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
        """Compute position logits of some rows against all keys, 0 where not visible.

        Args:
            queries: Before any rotation.
            keys: Before any rotation.
            query_index: Positions as the layer's assigner gave them and hooks left them [batch, P,
                row], with P one of 1, the key-value heads, the heads; without an assigner tokens'
                numbers among the valid tokens of their prompts [batch, row].
            key_index: The same of the keys.
            visible: Which keys a row may attend to.
            logit_scale: Factor of the dot products.
            values: Values of the layer, where a scheme reads them.
            gate_keys: All results of `gate_keys` so far.

        Returns:
            Logits to add to the scaled ones, float32 (float64 for float64 input) whatever the
            model's dtype. Batch axes of 1 broadcast; the batch axis is 1 where prompts do not
            differ.
        """


def exact(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32; float64 stays.

    Args:
        tensor: Any tensor.

    Returns:
        float32 or float64.
    """
    # Not `float()`, which would narrow a model that is measured in float64
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Keep logits between -cap and cap: cap tanh(logit / cap) (Gemma 2).

    Args:
        logits: Any shape.
        cap: The largest size of a logit; None: no cap.

    Returns:
        Capped logits, nearly unchanged where small.
    """
    # In the order of Gemma 2's code, so that rounding is the model's
    return logits if cap is None else torch.tanh(logits / cap) * cap


def full_precision(tensor: Tensor) -> torch.autocast:
    """Keep autocast from rounding products to bfloat16.

    Args:
        tensor: A tensor on the device in question.

    Returns:
        A context manager.
    """
    return torch.autocast(tensor.device.type, enabled=False)


def grouped_product(
    queries: Float[Tensor, "batch head row d_head"], keys: Float[Tensor, "batch kv_head key d_head"]
) -> Float[Tensor, "batch head row key"]:
    """Compute q_i . k_j with the key of the head's group, without a copy of keys.

    Args:
        queries: [batch, head, row, d_head].
        keys: [batch, kv_head, key, d_head]; consecutive heads share a key-value head.

    Returns:
        [batch, head, row, key].

    Raises:
        ValueError: The heads cannot share the keys evenly.
    """
    batch, heads, rows, width = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} keys evenly")
    # One product without a reshape, which may copy queries of other strides
    if heads == kv_heads:
        return queries @ keys.transpose(-1, -2)
    # Heads of a group become rows, so that no key is repeated in memory.
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads * rows, width)
    return (grouped @ keys.transpose(-1, -2)).view(batch, heads, rows, tokens)
