"""Contextual position encoding, CoPE (Golovneva et al. 2024, eq. 3-10, listing 1, app. C and D).

    g_ij = sigmoid(logit_scale * q_i . x_j)  if query i sees key j, else 0        (eq. 3)
    p_ij = sum_{t = j .. i} g_it                                                  (eq. 4)
    B_ij = position logit, a function of p = p_ij and the query q = q_i:

    embedding   (1 - w) z[floor p] + w z[floor p + 1],  w = p - floor p,
                z[n] = q . e[n] with a learned e[n] for n = 0 .. p_max - 1        (eq. 5, 7, 8)
    MLP         q . e[p],  e[p] = W2 relu(W1 p / u + b1) + b2                     (CoPE-MLP,
                                                                                  app. C)
    slopes      m_h p, fixed, or learned from 0 on                                (CoPE-ALiBi,
                                                                                  eq. 10)
    relative    the embedding's, plus q . r[i - j + 1]                            (table 5,
                                                                                  CoPE + relative)

x_j is the key ("keys"), a separate key W_g h_j for the gates ("separate_keys"), or the value
("values"). As in listing 1 and the released code, gates are computed from the scaled logits after
masking. p_ij includes the gate of j. Later keys and padding are not counted. If all gates are 1
("open"), p_ij = i - j + 1: this is a relative position embedding, the paper's baseline in tables 2
and 5, with one vector for all p from p_max - 1 on.

Positions are clamped to the map's `maximum`, which is p_max - 1 for a table of p_max vectors, as in
listing 1 and the released code. All heads of a layer share a map, and several layers may share it.
The table and the MLP's output start at zero (listing 1, app. C).

A layer with CoPE + RoPE rotates and adds these logits. The queries and keys in this module are not
rotated: the product of a rotated query and e[p] would depend on the start of the prompt.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, get_args

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn

from repo_interp.positions.biases import geometric_slopes
from repo_interp.positions.layouts import GateSource
from repo_interp.positions.logits import PositionLogits, exact, full_precision, grouped_product
from repo_interp.positions.piecewise import relu_network


def gates(
    queries: Float[Tensor, "batch head row d_head"],
    counted_by: Float[Tensor, "batch kv_head key d_head"] | None,
    visible: Bool[Tensor, "batch 1 row key"],
    logit_scale: float,
) -> Float[Tensor, "batch head row key"]:
    """Compute the gates g_ij from 0 to 1, with which row i counts token j.

    Args:
        queries: Unrotated queries [batch, head, row, d_head].
        counted_by: The x_j [batch, kv_head, key, d_head]; None: all gates are open.
        visible: Mask of the keys that a row may attend to [batch, 1, row, key].
        logit_scale: Factor of the dot products.

    Returns:
        Gates [batch, head, row, key]; 0 where not visible.
    """
    if counted_by is None:
        # With gates of 1, positions are counts of tokens, the same in all heads.
        return visible.to(exact(queries).dtype).expand(*queries.shape[:2], -1, -1)
    # In place: the map is the largest array of a layer.
    logits = grouped_product(exact(queries), exact(counted_by)).mul_(logit_scale)
    # Masked before the sigmoid, as in listing 1; sigmoid(-inf) is 0.
    return logits.masked_fill_(~visible, -math.inf).sigmoid()


def contextual_positions(
    gates: Float[Tensor, "... row key"], maximum: float = math.inf
) -> Float[Tensor, "... row key"]:
    """Sum gates to positions p_ij, the count of row i from key j on.

    Args:
        gates: Gates [..., row, key].
        maximum: Largest position; larger ones are clamped.

    Returns:
        Positions [..., row, key], in tokens; the entry of key 0 is the total count of a row.
    """
    # Sums run from a key to the query, so they are cumulative from the end.
    counted = gates.flip(-1).cumsum(-1).flip(-1)
    return counted if maximum == math.inf else counted.clamp(max=maximum)


class PositionMap(nn.Module, ABC):
    """Base of maps from queries and contextual positions to position logits."""

    @property
    def maximum(self) -> float:
        """The largest position, to which larger ones are clamped; infinite without a limit."""
        return math.inf

    @abstractmethod
    def forward(
        self,
        queries: Float[Tensor, "batch head row d_head"],
        positions: Float[Tensor, "batch head row key"],
    ) -> Float[Tensor, "batch head row key"]:
        """Return logits of positions from 0 to `maximum`, in float32 (float64 for float64)."""


class InterpolatedEmbedding(PositionMap):
    """q . e[p] with a learned vector per whole position, and interpolation between them."""

    def __init__(self, p_max: int, d_head: int) -> None:
        """Make `p_max` vectors of width `d_head`, for positions 0 .. p_max - 1."""
        super().__init__()
        if p_max < 2:
            raise ValueError(f"interpolation needs at least 2 whole positions; got p_max = {p_max}")
        # Zeros, so that training starts from a layer without positions
        self.weight = nn.Parameter(torch.zeros(p_max, d_head))

    @property
    def maximum(self) -> float:
        """The largest position that has a vector."""
        return float(self.weight.shape[0] - 1)

    def forward(
        self,
        queries: Float[Tensor, "batch head row d_head"],
        positions: Float[Tensor, "batch head row key"],
    ) -> Float[Tensor, "batch head row key"]:
        """Return position logits.

        The products q . e[n] are computed once per row, [row, p_max], and looked up.
        """
        queries = exact(queries)
        # A row cannot count more tokens than there are keys.
        reachable = self.weight[: positions.shape[-1] + 1]
        # [batch, head, row, p]: q . e[n] for all reachable whole positions
        whole = queries @ reachable.to(queries.dtype).transpose(0, 1)
        # The last vector has no next one, but w = 0 there.
        rise = nn.functional.pad(whole.diff(dim=-1), (0, 1))
        # Gradients pass through w, not through the floor.
        below = positions.detach().floor()
        # (1 - w) z[n] + w z[n + 1] as z[n] + w (z[n + 1] - z[n]): one operator, two gathers
        index = below.long()
        return torch.addcmul(whole.gather(-1, index), positions - below, rise.gather(-1, index))


class PositionMLP(PositionMap):
    """q . e[p], where e is a network with one hidden ReLU layer, defined for any position."""

    def __init__(self, d_head: int, width: int = 64, unit: float = 64.0) -> None:
        """Make a network with `width` hidden units.

        `unit` is the number of positions that is 1 for the network (our choice).
        """
        super().__init__()
        self.unit = unit
        self.hidden = nn.Linear(1, width)
        self.output = nn.Linear(width, d_head)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(
        self,
        queries: Float[Tensor, "batch head row d_head"],
        positions: Float[Tensor, "batch head row key"],
    ) -> Float[Tensor, "batch head row key"]:
        """Return position logits; q . W2 is computed once per row, without a [row, key, N] array."""
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
        # q . (W2 h + b2) = (q W2) . h + q . b2: a network with separate output weights per row
        row_weight, row_bias = queries @ output_weight, queries @ output_bias
        return (
            # In units, since a network trains well on inputs near 1, not on thousands.
            relu_network(positions / self.unit, hidden_weight, hidden_bias, row_weight)
            + row_bias[..., None]
        )


class FixedSlopes(PositionMap):
    """m_h p with fixed slopes and no parameters.

    Eq. 10 has + m p and positive slopes, which would prefer the farthest token. ALiBi, on which it
    is based, subtracts, so the default is ALiBi's slopes with a minus sign. `first` and `ratio` can
    give the printed sign, or the paper's sets of slopes such as 1, 1/4, 1/16, 1/64.
    """

    def __init__(self, heads: int, first: float | None = None, ratio: float | None = None) -> None:
        """Set slopes first, first * ratio, ... in logits per position.

        Args:
            heads: Query heads of the layer.
            first: The first slope; None: -2^(-8 / heads).
            ratio: Ratio of successive slopes; None: 2^(-8 / heads).
        """
        super().__init__()
        self.heads, self.ratio = heads, ratio
        # Negative, so that logits fall with the count, as ALiBi's fall with distance
        self.first = -math.exp2(-8.0 / heads) if first is None else first

    def forward(
        self,
        queries: Float[Tensor, "batch head row d_head"],
        positions: Float[Tensor, "batch head row key"],
    ) -> Float[Tensor, "batch head row key"]:
        """Position logits; the queries are not used."""
        slopes = geometric_slopes(self.heads, self.first, self.ratio, positions.device)
        return slopes[:, None, None] * positions


class LearnedSlopes(PositionMap):
    """m_h p with learned slopes per head and layer, which start at 0."""

    def __init__(self, heads: int) -> None:
        """Make slopes for the query heads of the layer."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))

    def forward(
        self,
        queries: Float[Tensor, "batch head row d_head"],
        positions: Float[Tensor, "batch head row key"],
    ) -> Float[Tensor, "batch head row key"]:
        """Position logits; the queries are not used."""
        return self.weight.to(positions.dtype)[:, None, None] * positions


class ContextualPositions(PositionLogits):
    """CoPE: gates, their sums as positions, and a map from positions to logits."""

    reads_content: ClassVar = True

    def __init__(
        self,
        position_map: PositionMap,
        gate_source: GateSource = "keys",
        relative_map: PositionMap | None = None,
    ) -> None:
        """Combine gates with a map of positions.

        Args:
            position_map: Map of positions, which the heads of the layer share; layers may share it.
            gate_source: Tensor that is multiplied with a query to give gates.
            relative_map: Map of the count of all tokens, whose logits are added (CoPE + relative);
                None: no such map.

        Raises:
            ValueError: The gate source is unknown.
        """
        super().__init__()
        if gate_source not in get_args(GateSource):
            raise ValueError(
                f"unknown gate source {gate_source!r}; known are {', '.join(get_args(GateSource))}"
            )
        # A module that layers share is registered in each layer; torch counts it once.
        self.position_map = position_map
        self.relative_map = relative_map
        self.gate_source: GateSource = gate_source

    @property
    def has_gates(self) -> bool:
        """Whether a tensor decides which tokens count; not where all gates are open."""
        return self.gate_source != "open"

    @property
    def largest_position(self) -> float:
        """The largest position of the map."""
        return self.position_map.maximum

    def counted_by(
        self, keys: Tensor, values: Tensor | None, gate_keys: Tensor | None
    ) -> Float[Tensor, "batch kv_head key d_head"] | None:
        """Choose the x_j for the gates of this layer.

        Args:
            keys: Keys of the layer.
            values: Values of the layer, or None.
            gate_keys: Separate keys for gates, or None.

        Returns:
            The chosen tensor; None if all gates are open.

        Raises:
            ValueError: The tensor that the layer needs is None.
        """
        if self.gate_source == "open":
            return None
        source = {"keys": keys, "separate_keys": gate_keys, "values": values}[self.gate_source]
        if source is None:
            raise ValueError(f"gates from {self.gate_source} were wanted, but none were given")
        return source

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
        """Return position logits of some rows and all keys, 0 where not visible.

        The indices are not used.
        """
        with full_precision(queries):
            counted = gates(queries, self.counted_by(keys, values, gate_keys), visible, logit_scale)
            positions = contextual_positions(counted, self.position_map.maximum)
            logits = self.position_map(queries, positions)
            if self.relative_map is not None:
                # Open gates count all tokens: p_ij = i - j + 1 is the relative position.
                counted = gates(queries, None, visible, logit_scale)
                positions = contextual_positions(counted, self.relative_map.maximum)
                logits = logits + self.relative_map(queries, positions)
            # In place, since the logits were created in this call. 0 rather than -inf, since
            # attention masks them.
            return logits.masked_fill_(~visible, 0.0)


class SeparatelyGatedPositions(ContextualPositions):
    """CoPE whose gates have separate keys, x_j = W_g h_j without bias ("sep-keys")."""

    def __init__(
        self,
        position_map: PositionMap,
        d_model: int,
        kv_heads: int,
        d_head: int,
        initial_deviation: float = 0.02,
        relative_map: PositionMap | None = None,
    ) -> None:
        """Make W_g, one gate key per key-value head, drawn from normal(0, `initial_deviation`)."""
        super().__init__(position_map, "separate_keys", relative_map)
        self.kv_heads = kv_heads
        self.gate_projection = nn.Linear(d_model, kv_heads * d_head, bias=False)
        # Like linear maps in transformers (initializer_range)
        nn.init.normal_(self.gate_projection.weight, std=initial_deviation)

    def gate_keys(
        self, hidden_states: Float[Tensor, "batch token d_model"]
    ) -> Float[Tensor, "batch kv_head token d_head"]:
        """Return the gate keys of every token, which are cached like keys."""
        return (
            self.gate_projection(hidden_states).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        )
