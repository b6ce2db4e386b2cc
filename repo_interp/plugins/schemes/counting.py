"""Schemes that count tokens by gates and add a function of the counts to the logits (CoPE).

    cope             learned vectors, interpolated                 (CoPE eq. 5-8)
    cope_alibi       a slope per head                              (CoPE eq. 10)
    cope_mlp         a small network                               (CoPE app. C)
    cope_relative    as cope, and a learned vector per distance    (CoPE table 5)
    cope_rope        as cope, beside RoPE

Each is a function of a builder, a layer's rotation and the width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from repo_interp.errors import InputError
from repo_interp.models.rotation import Rotation
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.models.schemes import SchemeBuilder
from repo_interp.positions.assigners import TokenIndex
from repo_interp.positions.contextual import (
    ContextualPositions,
    FixedSlopes,
    InterpolatedEmbedding,
    LearnedSlopes,
    PositionMap,
    PositionMLP,
    SeparatelyGatedPositions,
)

Map = Callable[[SchemeBuilder, Rotation, int], PositionMap]


def _embedding(builder: SchemeBuilder, rotation: Rotation, d_head: int) -> PositionMap:
    positions = builder.options.p_max or builder.length
    if positions < 2:
        raise InputError(
            "CoPE interpolates between whole positions and needs at least 2; got p_max "
            f"= {positions}"
        )
    return InterpolatedEmbedding(positions, d_head)


def _slopes(builder: SchemeBuilder, rotation: Rotation, d_head: int) -> PositionMap:
    options, heads = builder.options, rotation.heads
    if options.slopes == "learned":
        return LearnedSlopes(heads)
    return FixedSlopes(heads, options.first_slope or None, options.slope_ratio or None)


def _network(builder: SchemeBuilder, rotation: Rotation, d_head: int) -> PositionMap:
    return PositionMLP(d_head)


def _counting(
    scheme: str,
    counted: Map,
    builder: SchemeBuilder,
    rotation: Rotation,
    d_head: int,
    relative: Map | None = None,
) -> SchemeParts:
    """`counted` makes the map of counts, `relative` that of distances."""
    options, position_map = builder.options, counted(builder, rotation, d_head)
    relative_map = None if relative is None else relative(builder, rotation, d_head)
    # CoPE may learn one map for all layers.
    if options.map == "model":
        position_map = builder.shared(scheme, position_map)
    if options.gates == "separate_keys":
        width, kv_heads = builder.config.hidden_size, rotation.kv_heads
        added = SeparatelyGatedPositions(
            position_map, width, kv_heads, d_head, builder.deviation, relative_map
        )
    else:
        added = ContextualPositions(position_map, options.gates, relative_map)
    return SchemeParts("", None, None, position_logits=added)


def _rotating(builder: SchemeBuilder, rotation: Rotation, d_head: int) -> SchemeParts:
    return replace(
        _counting("cope_rope", _embedding, builder, rotation, d_head),
        assigner=TokenIndex(),
        frequencies=rotation.frequencies,
        attention_scaling=rotation.attention_scaling,
    )


cope = partial(_counting, "cope", _embedding)
cope_alibi = partial(_counting, "cope_alibi", _slopes)
cope_mlp = partial(_counting, "cope_mlp", _network)
cope_relative = partial(_counting, "cope_relative", _embedding, relative=_embedding)
cope_rope = _rotating
