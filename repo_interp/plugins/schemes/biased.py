"""Schemes that add a function of the distance to the logits, and do not rotate.

    alibi, kerple, fire                   of the distance of token indices
    repo_alibi, repo_kerple, repo_fire    of the distance of learned positions

Each is a function of a builder, a layer's rotation and the width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from repo_interp.models.rotation import Rotation
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.models.schemes import SchemeBuilder
from repo_interp.positions.assigners import TokenIndex
from repo_interp.positions.biases import FIRE, ALiBi, KerpleLog, PositionBias
from repo_interp.positions.learned_assigners import LearnedPositions

Bias = Callable[[SchemeBuilder, Rotation], PositionBias]


def _slopes(builder: SchemeBuilder, rotation: Rotation) -> PositionBias:
    return ALiBi(rotation.heads, slopes=rotation.slopes)


def _logarithm(builder: SchemeBuilder, rotation: Rotation) -> PositionBias:
    return KerpleLog(rotation.heads)


def _network(builder: SchemeBuilder, rotation: Rotation) -> PositionBias:
    return FIRE(rotation.heads, threshold=float(builder.length))


def _by_index(bias: Bias, builder: SchemeBuilder, rotation: Rotation, d_head: int) -> SchemeParts:
    return SchemeParts("", TokenIndex(), None, position_logits=bias(builder, rotation))


def _by_learned(bias: Bias, builder: SchemeBuilder, rotation: Rotation, d_head: int) -> SchemeParts:
    added = bias(builder, rotation)
    # After the bias: the order of what is drawn decides the weights of a seed
    assigner = LearnedPositions(builder.config.hidden_size, builder.position_rows(rotation))
    return SchemeParts("", assigner, None, position_logits=added, learned=True)


alibi, repo_alibi = partial(_by_index, _slopes), partial(_by_learned, _slopes)
kerple, repo_kerple = partial(_by_index, _logarithm), partial(_by_learned, _logarithm)
fire, repo_fire = partial(_by_index, _network), partial(_by_learned, _network)
