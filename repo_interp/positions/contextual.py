"""Contextual position encoding, CoPE (Golovneva et al. 2024, eq. 3-10, listing 1, app. C and D).

    g_ij = sigmoid(logit_scale * q_i . x_j)  where query i sees key j, else 0                   (eq. 3)
    p_ij = sum_{t = j .. i} g_it                                                                (eq. 4)
    B_ij = q_i . e[p_ij], or a slope times p_ij: a map of contextual_maps.py                    (eq. 5-10)

x_j is the key ("keys"), a key W_g h_j made for the gates alone ("separate_keys"), or the value ("values").
The gates are those of listing 1 and of the released code: of the scaled logits, after masking. p_ij counts j
itself; token order is causal order, so neither later keys nor padding are counted. With all gates at 1,
p_ij = i - j + 1 and this is a relative position embedding.

CoPE + RoPE is a layer that rotates and adds this. Queries and keys that come in here are not rotated: the
product of a rotated query with e[p] would depend on where the prompt starts.

Knows nothing about how a map is shared between layers: give two layers the same one.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from jaxtyping import Bool, Float, Num
from torch import Tensor, nn

from repo_interp.positions.contextual_maps import PositionMap
from repo_interp.positions.logits import PositionLogits, exact, full_precision, grouped_product

GateSource = Literal["keys", "separate_keys", "values"]
"""What a query is held against to decide which tokens it counts."""


def gates(
    queries: Float[Tensor, "batch head row d_head"],
    counted_by: Float[Tensor, "batch kv_head key d_head"],
    visible: Bool[Tensor, "batch 1 row key"],
    logit_scale: float,
) -> Float[Tensor, "batch head row key"]:
    """g_ij, from 0 to 1: how much row i counts token j; 0 where not visible. `counted_by`: the x_j."""
    logits = grouped_product(exact(queries), exact(counted_by)).mul_(logit_scale)
    return logits.masked_fill_(~visible, -math.inf).sigmoid()


def contextual_positions(gates: Float[Tensor, "... row key"], maximum: float = math.inf) -> Float[Tensor, "... row key"]:
    """p_ij, what row i counts from key j on, in tokens, at most `maximum`. At key 0: all it counts."""
    counted = gates.flip(-1).cumsum(-1).flip(-1)
    return counted if maximum == math.inf else counted.clamp(max=maximum)


class ContextualPositions(PositionLogits):
    """CoPE: gates, the positions they add up to, and a map from positions to logits."""

    def __init__(self, position_map: PositionMap, gate_source: GateSource = "keys") -> None:
        """`position_map` is shared by the layer's heads, and by all layers that are given the same object."""
        super().__init__()
        if gate_source not in get_args(GateSource):
            raise ValueError(f"unknown gate source {gate_source!r}; known are {', '.join(get_args(GateSource))}")
        self.position_map = position_map
        self.gate_source: GateSource = gate_source

    def counted_by(
        self, keys: Tensor, values: Tensor | None, gate_keys: Tensor | None
    ) -> Float[Tensor, "batch kv_head key d_head"]:
        """The x_j that this layer's gates look at. ValueError where they were not given."""
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
        """Position logits of some rows against all keys, 0 where not visible. The indices are not used."""
        with full_precision(queries):
            counted = gates(queries, self.counted_by(keys, values, gate_keys), visible, logit_scale)
            positions = contextual_positions(counted, self.position_map.maximum)
            return self.position_map(queries, positions).masked_fill_(~visible, 0.0)


class SeparatelyGatedPositions(ContextualPositions):
    """CoPE whose gates have keys of their own, x_j = W_g h_j without bias ("sep-keys")."""

    def __init__(
        self,
        position_map: PositionMap,
        d_model: int,
        kv_heads: int,
        d_head: int,
        initial_deviation: float = 0.02,
    ) -> None:
        """W_g makes one gate key a key-value head; it starts normal with `initial_deviation`."""
        super().__init__(position_map, "separate_keys")
        self.kv_heads = kv_heads
        self.gate_projection = nn.Linear(d_model, kv_heads * d_head, bias=False)
        nn.init.normal_(self.gate_projection.weight, std=initial_deviation)

    def gate_keys(self, hidden_states: Float[Tensor, "batch token d_model"]) -> Float[Tensor, "batch kv_head token d_head"]:
        """The gate keys of every token, to be cached like keys."""
        return self.gate_projection(hidden_states).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
