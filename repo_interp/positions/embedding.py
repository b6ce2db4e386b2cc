"""Learned absolute positions: one vector per position, added to the token embedding at the input.

    h_i <- h_i + e[i],  i = 0 .. length - 1     (baseline of CoPE and HoPE; starts normal, 0.02,
                                                as GPT-2's)

There is no vector beyond the table: a longer prompt is an error, never given another position's
vector. Knows nothing about attention.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class AbsoluteEmbedding(nn.Module):
    """The table e and its addition."""

    def __init__(self, length: int, d_model: int, initial_deviation: float = 0.02) -> None:
        """Draw a table from normal(0, initial_deviation).

        Args:
            length: Positions, as many as the longest prompt has tokens.
            d_model: Width of the vectors.
            initial_deviation: Standard deviation of the vectors as drawn.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, d_model))
        nn.init.normal_(self.weight, std=initial_deviation)

    def forward(
        self, embeddings: Float[Tensor, "batch token d_model"], index: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch token d_model"]:
        """Token embeddings with their position's vector added, in the embeddings' dtype.

        `index`: the token's number among the valid tokens of its prompt; below 0 it marks padding,
        to which nothing is added. A batch axis of 1 broadcasts. ValueError for an index beyond the
        table.
        """
        length = self.weight.shape[0]
        # Checked here: on CUDA an index beyond the table is an assertion of the device
        last = int(index.max()) if index.numel() else -1
        if last >= length:
            raise ValueError(
                f"a prompt reaches position {last}, but the learned table has {length}, 0 to "
                f"{length - 1}; "
                "use shorter prompts, or train with a longer table"
            )
        # Padding looks up any vector, which is then set to 0.
        vectors = nn.functional.embedding(index.clamp(min=0), self.weight).masked_fill(
            index[..., None] < 0, 0.0
        )
        return embeddings + vectors.to(embeddings.dtype)
