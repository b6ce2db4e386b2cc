"""Learned absolute positions: one vector per position, added to the token embedding at the input.

    h_i <- h_i + e[i],  i = 0 .. length - 1     (baseline of CoPE and HoPE; starts normal, 0.02,
                                                as GPT-2's)

The table has no vector beyond its length: a longer prompt is an error, and never gets the vector of
another position. This module knows nothing about attention.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class AbsoluteEmbedding(nn.Module):
    """The table e, which is added to token embeddings."""

    def __init__(self, length: int, d_model: int, initial_deviation: float = 0.02) -> None:
        """Draw a table from normal(0, initial_deviation).

        Args:
            length: Number of positions, the tokens of the longest prompt.
            d_model: Width of the vectors.
            initial_deviation: Standard deviation of the drawn vectors.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, d_model))
        nn.init.normal_(self.weight, std=initial_deviation)

    def forward(
        self, embeddings: Float[Tensor, "batch token d_model"], index: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch token d_model"]:
        """Add the vector of its position to every token embedding, in the embeddings' dtype.

        `index` is the index of a token among the valid tokens of its prompt; a negative index marks
        padding, which gets no vector. A batch axis of length 1 broadcasts. Raises ValueError for an
        index beyond the table.
        """
        length = self.weight.shape[0]
        # Checked here, since on CUDA an index beyond the table fails with a device assertion.
        last = int(index.max()) if index.numel() else -1
        if last >= length:
            raise ValueError(
                f"a prompt reaches position {last}, but the learned table has {length}, 0 to "
                f"{length - 1}; "
                "use shorter prompts, or train with a longer table"
            )
        # Padding looks up an arbitrary vector, which is then set to 0.
        vectors = nn.functional.embedding(index.clamp(min=0), self.weight).masked_fill(
            index[..., None] < 0, 0.0
        )
        return embeddings + vectors.to(embeddings.dtype)
