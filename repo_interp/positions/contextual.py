"""Contextual position encoding, CoPE (Golovneva et al. 2024, eq. 3-10, listing 1, app. C and D).

    g_ij = sigmoid(logit_scale * q_i . x_j)  where query i sees key j, else 0                   (eq. 3)
    p_ij = sum_{t = j .. i} g_it                                                               (eq. 4)
    B_ij = q_i . e[p_ij], or a slope times p_ij: the map, see contextual_maps.py               (eq. 5-10)

x_j is the key ("keys"), a key made only for gates from the layer's input ("separate_keys"; W_g without bias), or the value ("values").
The gates are those of listing 1 and the released code: of the scaled logits, after masking. p_ij counts j itself; token order is
causal order, so later keys that a row does not see count nothing, nor does padding. With all gates 1, p_ij = i - j + 1.

CoPE + RoPE is a layer that rotates and adds this. Queries and keys given here are the un-rotated ones: q_i . e[p] would otherwise
depend on where the prompt starts.

Knows nothing about how the map is shared between layers: give two layers the same one.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn

from repo_interp.positions.logits import PositionLogits, exact, grouped_product

GateSource = Literal["keys", "separate_keys", "values"]
"""What a query is held against to decide which tokens it counts."""


def gates(
    queries: Float[Tensor, "batch head row d_head"],
    gate_keys: Float[Tensor, "batch kv_head key d_head"],
    visible: Bool[Tensor, "batch 1 row key"],
    logit_scale: float,
) -> Float[Tensor, "batch head row key"]:
    """g_ij, how much row i counts key j: from 0 to 1, 0 where not visible. `gate_keys` are the x_j above."""
    logits = grouped_product(exact(queries), exact(gate_keys)) * logit_scale
    return exact(logits).sigmoid().masked_fill(~visible, 0.0)


def contextual_positions(
    gates: Float[Tensor, "... row key"], maximum: float = float("inf")
) -> Float[Tensor, "... row key"]:
    """p_ij: what row i counts from key j on, in counted tokens, never above `maximum`. At the first key: all that the row counts."""
    counted = gates.flip(-1).cumsum(-1).flip(-1)
    return counted if maximum == float("inf") else counted.clamp(max=maximum)


class PositionMap(Protocol):
    """How a contextual position becomes a logit: from queries and positions, [batch, head, row, key]."""

    @property
    def maximum(self) -> float:
        """p_max: larger positions are taken for this one."""
        ...

    def __call__(
        self, queries: Float[Tensor, "batch head row d_head"], positions: Float[Tensor, "batch head row key"]
    ) -> Float[Tensor, "batch head row key"]: ...


class ContextualPositions(PositionLogits):
    """CoPE: gates, the positions they add up to, and a map from positions to logits."""

    def __init__(
        self,
        position_map: nn.Module,
        gate_source: GateSource = "keys",
        d_model: int | None = None,
        kv_heads: int | None = None,
        d_head: int | None = None,
        initial_deviation: float = 0.02,
    ) -> None:
        """`position_map`: one of contextual_maps.py, shared by the layer's heads; the same object in several layers is shared by them.

        Separate keys need `d_model`, `kv_heads` and `d_head`; their projection starts normal with `initial_deviation`.
        """
        super().__init__()
        if gate_source not in get_args(GateSource):
            raise ValueError(
                f"unknown gate source {gate_source!r}; known are {', '.join(get_args(GateSource))}"
            )
        self.gate_source: GateSource = gate_source
        self.position_map = position_map
        self.gate_projection: nn.Linear | None = None
        if gate_source == "separate_keys":
            if d_model is None or kv_heads is None or d_head is None:
                raise ValueError("separate gate keys need d_model, kv_heads and d_head")
            self.kv_heads = kv_heads
            self.gate_projection = nn.Linear(d_model, kv_heads * d_head, bias=False)
            nn.init.normal_(self.gate_projection.weight, std=initial_deviation)

    def gate_keys(
        self, hidden_states: Float[Tensor, "batch token d_model"]
    ) -> Float[Tensor, "batch kv_head token d_head"] | None:
        """Separate gate keys of every token, to be cached like keys; None where gates come from keys or values."""
        if self.gate_projection is None:
            return None
        return self.gate_projection(hidden_states).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)

    def gates(
        self,
        queries: Float[Tensor, "batch head row d_head"],
        keys: Float[Tensor, "batch kv_head key d_head"],
        visible: Bool[Tensor, "batch 1 row key"],
        logit_scale: float,
        values: Float[Tensor, "batch kv_head key d_head"] | None = None,
        gate_keys: Float[Tensor, "batch kv_head key d_head"] | None = None,
    ) -> Float[Tensor, "batch head row key"]:
        """g_ij from whatever this layer's gates look at. ValueError where that was not given."""
        sources: dict[GateSource, Tensor | None] = {
            "keys": keys,
            "separate_keys": gate_keys,
            "values": values,
        }
        source = sources[self.gate_source]
        if source is None:
            raise ValueError(f"gates from {self.gate_source} were wanted, but none were given")
        if source.shape[-1] != queries.shape[-1]:
            raise ValueError(
                f"gates from {self.gate_source} need the queries' width {queries.shape[-1]}; got {source.shape[-1]}"
            )
        return gates(queries, source, visible, logit_scale)

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
        """Position logits of some rows against all keys, 0 where not visible; see PositionLogits. The indices are not used."""
        counted = self.gates(queries, keys, visible, logit_scale, values, gate_keys)
        positions = contextual_positions(counted, self.position_map.maximum)
        return exact(self.position_map(queries, positions)).masked_fill(~visible, 0.0)
