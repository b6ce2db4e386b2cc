"""What figures call checkpoints: one name per layout, whether it is read from weights or from the record of training.

    "repo@1/3" of 4 layers -> "repo@1"

Not in `scores`, since measurements depend on the code there: a new name would measure everything again. Knows nothing about claims.
"""

from __future__ import annotations

from position_papers.kit.scores import Scored
from repo_interp.positions.layouts import format_layout, parse_layout


def in_layers(scored: Scored) -> str:
    """The layout of a checkpoint; a start that training.toml gives as a share of the layers becomes the number of the layer."""
    share = scored.layout.partition("@")[2]
    return format_layout(parse_layout(scored.layout, scored.configuration.layers)) if "/" in share else scored.layout
