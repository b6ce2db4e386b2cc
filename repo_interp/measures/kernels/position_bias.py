"""What a scheme adds to the logits, by distance: the position part of ALiBi, KERPLE, FIRE, CoPE.

    sum_i b_{i, i-t} / logit_scale   over seen pairs, b_ij the position logit

Divided by the logit's scale it is in the unit of q . k, so that it can be added to what queries and keys give.
The position part is asked for a few query rows at a time: O(n^2) work - nothing is known about it - but no n x n array.

Knows nothing about which scheme it is.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.over_heads import MEMORY


def position_bias_sums(
    inputs: AttentionInputs, tokens: Bool[Tensor, "prompt token"], memory: int = MEMORY
) -> Float[Tensor, "head distance"]:
    """Sum over prompts and seen pairs of `tokens` of the position logits, in units of q . k; 0 where there are none."""
    prompts, length = tokens.shape
    device = tokens.device
    sums = torch.zeros(inputs.heads, length, dtype=torch.float64, device=device)
    position_logits = inputs.position_logits
    if position_logits is None:
        return sums
    distance = torch.arange(length, device=device)
    at_once = max(1, memory // (24 * prompts * inputs.heads * length))
    for rows in torch.arange(length, device=device).split(at_once):
        key = rows[:, None] - distance
        seen = (key >= 0) & tokens[:, rows, None] & tokens[:, key.clamp(min=0)]
        if inputs.window is not None:
            seen &= distance < inputs.window
        added = position_logits(rows)
        by_distance = added.gather(-1, key.clamp(min=0).expand(*added.shape[:2], -1, -1))
        sums += by_distance.masked_fill(~seen[:, None], 0).sum((0, 2), dtype=torch.float64)
    return sums / inputs.logit_scale
