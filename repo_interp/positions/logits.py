"""What all schemes that add to the attention logits have in common.

    S_ij = soft_capped(logit_scale * q_i . k_j) + B_ij        B_ij: the position logits, of every head

A row of B depends on that row's query and on the keys it sees, never on other rows: so rows may be
asked in blocks, or one by one against cached keys, and equal the rows of the full computation. Sums
and distances are made in float32 (float64 for float64 input), under autocast too: bfloat16 would
round positions.

Knows nothing about models, masks' origin, or which scheme it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn


class PositionLogits(nn.Module, ABC):
    """Base of all schemes that add to the logits."""

    def gate_keys(
        self, hidden_states: Float[Tensor, "batch token d_model"]
    ) -> Float[Tensor, "batch kv_head token d_head"] | None:
        """Further keys that the scheme makes from the attention layer's input; None where it makes
        none.

        They belong to tokens as keys do: who caches keys caches these too, and hands all to
        `forward`.
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
        """Position logits of some rows against all keys, to add to the scaled logits; 0 where not
        visible.

        `queries`, `keys`: before any rotation. `query_index`, `key_index`: the positions that the
        layer's assigner gave, as hooks left them, [batch, P, row] with P one of 1, the key-value
        heads, the heads; without an assigner each token's number among the valid tokens of its
        prompt, [batch, row]. `visible`: which keys a row may attend to. Batch axes of 1 broadcast.
        Returns float32 (float64 for float64 input) whatever the model's dtype; its batch axis is 1
        where nothing it depends on differs between prompts.
        """


def exact(tensor: Tensor) -> Tensor:
    """`tensor` as float32; float64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """`logits` between -cap and cap, nearly as they are where small: cap tanh(logit / cap) (Gemma
    2); None: as they are.
    """
    return logits if cap is None else torch.tanh(logits / cap) * cap


def full_precision(tensor: Tensor) -> torch.autocast:
    """A context in which autocast does not round products on the tensor's device to bfloat16."""
    return torch.autocast(tensor.device.type, enabled=False)


def grouped_product(
    queries: Float[Tensor, "batch head row d_head"], keys: Float[Tensor, "batch kv_head key d_head"]
) -> Float[Tensor, "batch head row key"]:
    """q_i . k_j with the key of the head's group: consecutive heads share a key-value head.

    Copies no key.
    """
    batch, heads, rows, width = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} keys evenly")
    if heads == kv_heads:
        return queries @ keys.transpose(-1, -2)
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads * rows, width)
    return (grouped @ keys.transpose(-1, -2)).view(batch, heads, rows, tokens)
