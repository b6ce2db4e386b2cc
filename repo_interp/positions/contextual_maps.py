"""How a contextual position p becomes a position logit of query q (CoPE, Golovneva et al. 2024).

    embedding   (1 - w) z[floor p] + w z[floor p + 1],  w = p - floor p,              (eq. 5, 7, 8)
                z[n] = q . e[n] with a learned vector e[n] for n = 0 .. p_max - 1
    MLP         q . e[p],  e[p] = W2 relu(W1 p / u + b1) + b2                         (CoPE-MLP, app. C)
    slopes      m_h p, fixed or learned                                               (CoPE-ALiBi, eq. 10)

Whoever computes positions clamps them to `maximum`: p_max - 1 for a table of p_max vectors, as listing 1 and
the released code do. A map is shared by all heads that it is called for. The table, the MLP's output and
learned slopes start at zero (listing 1, app. C).

Knows nothing about gates.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.positions.biases import geometric_slopes
from repo_interp.positions.logits import exact
from repo_interp.positions.piecewise import relu_network


class PositionMap(nn.Module):
    """Base of the maps from queries and contextual positions to position logits."""

    @property
    def maximum(self) -> float:
        """Larger positions are taken for this one; infinite where every position is its own."""
        return math.inf

    def forward(
        self, queries: Float[Tensor, "batch head row d_head"], positions: Float[Tensor, "batch head row key"]
    ) -> Float[Tensor, "batch head row key"]:
        """Position logits of positions from 0 to `maximum`, in float32 (float64 for float64 input)."""
        raise NotImplementedError(f"{type(self).__name__} does not say how positions become logits")


class InterpolatedEmbedding(PositionMap):
    """q . e[p] with a learned vector a whole position, interpolated between them."""

    def __init__(self, p_max: int, d_head: int) -> None:
        """`p_max` vectors of width `d_head`, for positions 0 .. p_max - 1."""
        super().__init__()
        if p_max < 2:
            raise ValueError(f"interpolation needs at least 2 whole positions; got p_max = {p_max}")
        self.weight = nn.Parameter(torch.zeros(p_max, d_head))

    @property
    def maximum(self) -> float:
        """The largest position that has a vector."""
        return float(self.weight.shape[0] - 1)

    def forward(
        self, queries: Float[Tensor, "batch head row d_head"], positions: Float[Tensor, "batch head row key"]
    ) -> Float[Tensor, "batch head row key"]:
        """Position logits. The products q . e[n] are made once a row, [row, p_max], and looked up."""
        queries = exact(queries)
        reachable = self.weight[: positions.shape[-1] + 1]  # a row counts no more tokens than there are keys
        whole = queries @ reachable.to(queries.dtype).transpose(0, 1)
        rise = nn.functional.pad(whole.diff(dim=-1), (0, 1))
        below = positions.detach().floor()
        index = below.long()
        return torch.addcmul(whole.gather(-1, index), positions - below, rise.gather(-1, index))


class PositionMLP(PositionMap):
    """q . e[p] with e a network of one hidden ReLU layer: any position has a vector."""

    def __init__(self, d_head: int, width: int = 64, unit: float = 64.0) -> None:
        """`width`: the hidden layer's N. `unit`: how many positions are 1 for the network (our choice)."""
        super().__init__()
        self.unit = unit
        self.hidden = nn.Linear(1, width)
        self.output = nn.Linear(width, d_head)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(
        self, queries: Float[Tensor, "batch head row d_head"], positions: Float[Tensor, "batch head row key"]
    ) -> Float[Tensor, "batch head row key"]:
        """Position logits; q . W2 is made once a row, so that no [row, key, N] array is."""
        queries = exact(queries)
        hidden_weight, hidden_bias, output_weight, output_bias = (
            parameter.to(queries.dtype)
            for parameter in (
                self.hidden.weight[:, 0],
                self.hidden.bias,
                self.output.weight,
                self.output.bias,
            )
        )
        row_weight, row_bias = queries @ output_weight, queries @ output_bias
        return relu_network(positions / self.unit, hidden_weight, hidden_bias, row_weight) + row_bias[..., None]


class FixedSlopes(PositionMap):
    """m_h p with slopes fixed before training; nothing to learn.

    Eq. 10 is printed with + m p and positive slopes, which would prefer the farthest token. ALiBi, which it
    follows, subtracts: the default is ALiBi's slopes with a minus sign. The printed sign, or the paper's own
    sets of slopes such as 1, 1/4, 1/16, 1/64, are a matter of `first` and `ratio`.
    """

    def __init__(self, heads: int, first: float | None = None, ratio: float | None = None) -> None:
        """Slopes first, first * ratio, ... logits a position; -2^(-8/heads) and 2^(-8/heads) if not given."""
        super().__init__()
        self.heads, self.ratio = heads, ratio
        self.first = -math.exp2(-8.0 / heads) if first is None else first

    def forward(
        self, queries: Float[Tensor, "batch head row d_head"], positions: Float[Tensor, "batch head row key"]
    ) -> Float[Tensor, "batch head row key"]:
        """Position logits; the queries are not used."""
        slopes = geometric_slopes(self.heads, self.first, self.ratio, positions.device)
        return slopes[:, None, None] * positions


class LearnedSlopes(PositionMap):
    """m_h p with one learned slope a head, 0 at the start."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.zeros(heads))

    def forward(
        self, queries: Float[Tensor, "batch head row d_head"], positions: Float[Tensor, "batch head row key"]
    ) -> Float[Tensor, "batch head row key"]:
        """Position logits; the queries are not used."""
        return exact(self.slopes)[:, None, None] * positions
