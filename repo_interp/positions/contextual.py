"""Contextual position encoding, CoPE (Golovneva et al. 2024, eq. 3-10, listing 1, app. C and D).

    g_ij = sigmoid(logit_scale * q_i . x_j)  where query i sees key j, else 0     (eq. 3)
    p_ij = sum_{t = j .. i} g_it                                                  (eq. 4)
    B_ij = the position logit that a map makes of p = p_ij and query q = q_i:

    embedding   (1 - w) z[floor p] + w z[floor p + 1],  w = p - floor p,
                z[n] = q . e[n] with a learned e[n] for n = 0 .. p_max - 1        (eq. 5, 7, 8)
    MLP         q . e[p],  e[p] = W2 relu(W1 p / u + b1) + b2                     (CoPE-MLP,
                                                                                  app. C)
    slopes      m_h p, fixed, or learned from 0 on                                (CoPE-ALiBi,
                                                                                  eq. 10)
    relative    the embedding's, plus q . r[i - j + 1]                            (table 5,
                                                                                  CoPE + relative)

x_j is the key ("keys"), a key W_g h_j made for the gates alone ("separate_keys"), or the value
("values"). The gates are those of listing 1 and of the released code: of the scaled logits, after
masking. p_ij counts j itself; token order is causal order, so neither later keys nor padding are
counted. With all gates at 1 ("open"), p_ij = i - j + 1: a relative position embedding, the paper's
rival in tables 2 and 5, with one vector for all p from p_max - 1 on.

Positions are clamped to the map's `maximum`: p_max - 1 for a table of p_max vectors, as listing 1
and the released code do. A map is shared by all heads of a layer, and by layers that are given the
same one. The table and the MLP's output start at zero (listing 1, app. C).

CoPE + RoPE is a layer that rotates and adds this. Queries and keys that come in here are not
rotated: the product of a rotated query with e[p] would depend on where the prompt starts.
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
    """Compute the gates g_ij, from 0 to 1: how much row i counts token j.

    Args:
        queries: [batch, head, row, d_head], unrotated.
        counted_by: The x_j [batch, kv_head, key, d_head]; None: all gates are open.
        visible: Which keys a row may attend to [batch, 1, row, key].
        logit_scale: Factor of the dot products.

    Returns:
        Gates [batch, head, row, key]; 0 where not visible.
    """
    if counted_by is None:
        # All gates 1 where visible: positions are then counts of tokens, the same in all heads
        return visible.to(exact(queries).dtype).expand(*queries.shape[:2], -1, -1)
    # In place: the map is the largest array of a layer.
    logits = grouped_product(exact(queries), exact(counted_by)).mul_(logit_scale)
    # sigmoid(-inf) is 0: masked before, as in listing 1
    return logits.masked_fill_(~visible, -math.inf).sigmoid()


def contextual_positions(
    gates: Float[Tensor, "... row key"], maximum: float = math.inf
) -> Float[Tensor, "... row key"]:
    """Add gates up to positions p_ij, the count of row i from key j on.

    Args:
        gates: [..., row, key].
        maximum: Larger positions are clamped to it.

    Returns:
        Positions [..., row, key], in tokens; at key 0 all that a row counts.
    """
    # Sums run from a key to the query, so from the end.
    counted = gates.flip(-1).cumsum(-1).flip(-1)
    return counted if maximum == math.inf else counted.clamp(max=maximum)


class PositionMap(nn.Module, ABC):
    """Base of the maps from queries and contextual positions to position logits."""

    @property
    def maximum(self) -> float:
        """The largest position; larger ones are clamped to it. Infinite without a limit."""
        return math.inf

    @abstractmethod
    def forward(
        self,
        queries: Float[Tensor, "batch head row d_head"],
        positions: Float[Tensor, "batch head row key"],
    ) -> Float[Tensor, "batch head row key"]:
        """Position logits of positions from 0 to `maximum`, in float32 (float64 for float64)."""


class InterpolatedEmbedding(PositionMap):
    """q . e[p] with a learned vector per whole position, interpolated between them."""

    def __init__(self, p_max: int, d_head: int) -> None:
        """`p_max` vectors of width `d_head`, for positions 0 .. p_max - 1."""
        super().__init__()
        if p_max < 2:
            raise ValueError(f"interpolation needs at least 2 whole positions; got p_max = {p_max}")
        # Zeros: training starts from a layer without positions
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
        """Position logits.

        The products q . e[n] are made once per row, [row, p_max], and looked up.
        """
        queries = exact(queries)
        # a row counts no more tokens than there are keys
        reachable = self.weight[: positions.shape[-1] + 1]
        # [batch, head, row, p]: q . e[n] for all whole positions in reach
        whole = queries @ reachable.to(queries.dtype).transpose(0, 1)
        # The last vector has no next one; there w = 0.
        rise = nn.functional.pad(whole.diff(dim=-1), (0, 1))
        # Gradients pass through w, not through the floor.
        below = positions.detach().floor()
        # (1 - w) z[n] + w z[n + 1] as z[n] + w (z[n + 1] - z[n]): one operator, two gathers
        index = below.long()
        return torch.addcmul(whole.gather(-1, index), positions - below, rise.gather(-1, index))


class PositionMLP(PositionMap):
    """q . e[p] with e a network of one hidden ReLU layer: any position has a vector."""

    def __init__(self, d_head: int, width: int = 64, unit: float = 64.0) -> None:
        """`width`: the hidden layer's N.

        `unit`: how many positions are 1 for the network (our choice).
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
        """Position logits; q . W2 is made once per row, so that no [row, key, N] array is."""
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
        # q . (W2 h + b2) = (q W2) . h + q . b2: every row has a network of its own output weights
        row_weight, row_bias = queries @ output_weight, queries @ output_bias
        return (
            # In units: a network of one input trains on numbers near 1, not on thousands
            relu_network(positions / self.unit, hidden_weight, hidden_bias, row_weight)
            + row_bias[..., None]
        )


class FixedSlopes(PositionMap):
    """m_h p with slopes fixed before training; nothing to learn.

    Eq. 10 is printed with + m p and positive slopes, which would prefer the farthest token. ALiBi,
    which it follows, subtracts: the default is ALiBi's slopes with a minus sign. The printed sign,
    or the paper's sets of slopes such as 1, 1/4, 1/16, 1/64, are a matter of `first` and `ratio`.
    """

    def __init__(self, heads: int, first: float | None = None, ratio: float | None = None) -> None:
        """Set slopes first, first * ratio, ... in logits per position.

        Args:
            heads: Query heads of the layer.
            first: The first slope; None: -2^(-8 / heads).
            ratio: Ratio of neighbouring slopes; None: 2^(-8 / heads).
        """
        super().__init__()
        self.heads, self.ratio = heads, ratio
        # Minus: logits fall with the count, as ALiBi's do with distance
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
    """m_h p with slopes that are learned, per head and layer, from 0 on."""

    def __init__(self, heads: int) -> None:
        """`heads`: the layer's query heads."""
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
    """CoPE: gates, the positions they add up to, and a map from positions to logits."""

    reads_content: ClassVar = True

    def __init__(
        self,
        position_map: PositionMap,
        gate_source: GateSource = "keys",
        relative_map: PositionMap | None = None,
    ) -> None:
        """Combine gates with a map of positions.

        Args:
            position_map: Shared by the layer's heads, and by all layers that are given it.
            gate_source: Tensor that a query is held against.
            relative_map: Of the count of all tokens, added (CoPE + relative); None: nothing.

        Raises:
            ValueError: The gate source is unknown.
        """
        super().__init__()
        if gate_source not in get_args(GateSource):
            raise ValueError(
                f"unknown gate source {gate_source!r}; known are {', '.join(get_args(GateSource))}"
            )
        # A module that layers share is registered in each of them, and counted once by torch
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
        """Choose the x_j that the gates of this layer look at.

        Args:
            keys: Keys of the layer.
            values: Values of the layer, or None.
            gate_keys: Separate keys for gates, or None.

        Returns:
            One of them; None where all gates are open.

        Raises:
            ValueError: The wanted one was not given.
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
        """Position logits of some rows against all keys, 0 where not visible.

        The indices are not used.
        """
        with full_precision(queries):
            counted = gates(queries, self.counted_by(keys, values, gate_keys), visible, logit_scale)
            positions = contextual_positions(counted, self.position_map.maximum)
            logits = self.position_map(queries, positions)
            if self.relative_map is not None:
                # Open gates count all tokens: p_ij = i - j + 1, the relative position
                counted = gates(queries, None, visible, logit_scale)
                positions = contextual_positions(counted, self.relative_map.maximum)
                logits = logits + self.relative_map(queries, positions)
            # In place: the logits were made here. 0 rather than -inf, since attention masks them
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
        """W_g makes one gate key per key-value head; it starts normal with `initial_deviation`."""
        super().__init__(position_map, "separate_keys", relative_map)
        self.kv_heads = kv_heads
        self.gate_projection = nn.Linear(d_model, kv_heads * d_head, bias=False)
        # As transformers draws its linear maps (initializer_range)
        nn.init.normal_(self.gate_projection.weight, std=initial_deviation)

    def gate_keys(
        self, hidden_states: Float[Tensor, "batch token d_model"]
    ) -> Float[Tensor, "batch kv_head token d_head"]:
        """The gate keys of every token, to be cached like keys."""
        return (
            self.gate_projection(hidden_states).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        )
