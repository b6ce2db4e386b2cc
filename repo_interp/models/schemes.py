"""The parts that each position scheme puts into an attention layer: its assigner, its frequencies, the logits it adds.

Knows the names of the layout language and the modules of `positions`; knows nothing about checkpoints or bridges.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from repo_interp.errors import InputError
from repo_interp.models.attention import SchemeParts
from repo_interp.models.families import Rotation
from repo_interp.positions.assigners import LearnedPositions, LinearPositions, TokenIndex

ASSIGNMENTS = ("kv_head", "head", "layer")
"""What has a row of learned positions of its own: each key-value head, each head, or the layer as a whole."""


def scheme_parts(scheme: str, config: PretrainedConfig, rotation: Rotation, assignment: str) -> SchemeParts:
    """The modules of `scheme`, freshly made. `assignment` says what has a row of learned positions (schemes that learn one a head)."""
    rows = position_rows(config, assignment)
    assigners = {
        "rope": TokenIndex,
        "repo": lambda: LearnedPositions(config.hidden_size, rows),
        "continuous": lambda: LinearPositions(config.hidden_size, 1),
        "multihead_continuous": lambda: LinearPositions(config.hidden_size, rows),
    }
    if scheme == "nope":
        return SchemeParts(scheme, assigner=None, frequencies=None)
    return SchemeParts(scheme, assigners[scheme](), rotation.frequencies, rotation.attention_scaling)


def position_rows(config: PretrainedConfig, assignment: str) -> int:
    """How many rows of learned positions a layer has. Raises InputError for an unknown assignment."""
    if assignment not in ASSIGNMENTS:
        raise InputError(f"assignment {assignment!r} is unknown; wanted one of {', '.join(ASSIGNMENTS)}")
    return {"kv_head": config.num_key_value_heads, "head": config.num_attention_heads, "layer": 1}[assignment]
