"""Schemes that rotate by positions which are learned from the hidden state.

    repo                                          f_phi                    (RePo eq. 4-6)
    repo_index, repo_attention, repo_convolution  f_phi with other inputs  (RePo footnote 2, sec. 3.2)
    continuous, multihead_continuous              one linear map           (the released modes)

Each is a function of a builder, a layer's rotation and the width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from repo_interp.models.rotation import Rotation
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.models.schemes import SchemeBuilder
from repo_interp.positions.learned_assigners import (
    AttendedPositions,
    ConvolvedPositions,
    IndexedPositions,
    LearnedPositions,
    LinearPositions,
)


def _rotating(
    assigner: Callable[[int, int], nn.Module],
    builder: SchemeBuilder,
    rotation: Rotation,
    d_head: int,
    rows: int = 0,
) -> SchemeParts:
    """`rows`: rows of positions; 0: by the option `assignment`."""
    made = assigner(builder.config.hidden_size, rows or builder.position_rows(rotation))
    return SchemeParts("", made, rotation.frequencies, rotation.attention_scaling, learned=True)


repo = partial(_rotating, LearnedPositions)
repo_index = partial(_rotating, IndexedPositions)
repo_attention = partial(_rotating, AttendedPositions)
repo_convolution = partial(_rotating, ConvolvedPositions)
multihead_continuous = partial(_rotating, LinearPositions)
# One row for all heads tells it from multihead_continuous.
continuous = partial(_rotating, LinearPositions, rows=1)
