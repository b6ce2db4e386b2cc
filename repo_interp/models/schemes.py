"""The parts of a position scheme in an attention layer: assigner, frequencies, added logits.

    scheme                      positions  rotation                     added to the logits
    rope                        index      theta_r                      -
    nope, learned               -          -                            - (learned: vectors at
                                                                        the model's input)
    repo, continuous, ...       learned    theta_r                      -
    hope, hope_ab1 .. ab3       index      theta_r of some components   -
    rope_high                   index      theta_r, some dropped        - (HoPE table 3,
                                                                        "removed")
    alibi, kerple, fire         index      -                            function of distance
    repo_alibi, repo_kerple,    learned    -                            the same, of the distance
    repo_fire                                                           of learned positions
    cope, cope_alibi, cope_mlp  -          -                            function of gated counts
    cope_relative               -          -                            as cope, and of distance
    cope_rope                   index      theta_r                      as cope

Another package adds a scheme by an entry point of the group `repo_interp.schemes`: a function of
(builder, rotation, d_head), the arguments of `SchemeBuilder.build` after the name, that returns a
layer's `SchemeParts`.

This module knows the names of the layout language and the modules of `positions`; knows nothing
about checkpoints or bridges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.checkpoint_files.options import SchemeOptions
from repo_interp.errors import InputError
from repo_interp.models.rotation import Rotation, of_chosen
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.models.scheme_registry import foreign_parts
from repo_interp.positions import hope
from repo_interp.positions.assigners import (
    AttendedPositions,
    ConvolvedPositions,
    IndexedPositions,
    LearnedPositions,
    LinearPositions,
    TokenIndex,
)
from repo_interp.positions.biases import FIRE, ALiBi, KerpleLog
from repo_interp.positions.contextual import (
    ContextualPositions,
    FixedSlopes,
    InterpolatedEmbedding,
    LearnedSlopes,
    PositionMap,
    PositionMLP,
    SeparatelyGatedPositions,
)
from repo_interp.positions.layouts import CONTEXTUAL, LEARNED, SCHEMES
from repo_interp.positions.logits import PositionLogits


class SchemeBuilder:
    """Builds the parts of a model's layers, and parts that layers share."""

    def __init__(self, config: PretrainedConfig, options: SchemeOptions) -> None:
        """For decoders of `config`."""
        self.config = config
        self.options = options
        self.length = options.training_length or training_length(config)
        self.deviation: float = options.scheme_deviation or _initial_deviation(config)
        """Standard deviation of the linear maps of a scheme as drawn."""
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self._maps: dict[str, PositionMap] = {}

    def stated_options(self) -> dict[str, Any]:
        """Return the options for the configuration.

        Returns:
            Options by name; a deviation only where it is not the configuration's.
        """
        stated = dataclasses.asdict(self.options)
        # Left out, since loading can find this value.
        if self.deviation == _initial_deviation(self.config):
            del stated["scheme_deviation"]
        return stated

    def build(self, scheme: str, rotation: Rotation, d_head: int) -> SchemeParts:
        """Build the parts of a scheme for one layer.

        Args:
            scheme: Name of the scheme.
            rotation: How the layer rotates.
            d_head: Width of a head.

        Returns:
            The parts; new, except parts that layers share.

        Raises:
            InputError: The scheme is unknown, or does not fit the frequencies.
        """
        if scheme not in SCHEMES:
            return foreign_parts(self, scheme, rotation, d_head)
        added = None
        if scheme in _ADDITIVE:
            added = _ADDITIVE[scheme](rotation, self.length)
        elif scheme in CONTEXTUAL:
            added = self._contextual(scheme, d_head, rotation)
        # Additive schemes do not rotate; CoPE with RoPE does both.
        if scheme in _WITHOUT_POSITIONS or (added is not None and scheme != "cope_rope"):
            assigner = self._assigner(scheme, rotation) if scheme in _ADDITIVE else None
            return SchemeParts(
                scheme, assigner, None, position_logits=added, learned=scheme in LEARNED
            )
        frequencies, components = rotation.frequencies, None
        try:
            if scheme in _FREQUENCIES:
                # Components are chosen by the frequencies of training, before their scaling.
                chosen = _FREQUENCIES[scheme](rotation.unscaled, self.length)
                frequencies = of_chosen(chosen, rotation.unscaled, rotation.frequencies)
            if scheme == "rope_high":
                components = hope.high_components(rotation.unscaled, self.length)
        # `positions` imports nothing of ours, so it raises plain errors.
        except ValueError as error:
            raise InputError(str(error)) from None
        return SchemeParts(
            scheme,
            self._assigner(scheme, rotation),
            frequencies,
            rotation.attention_scaling,
            components,
            added,
            scheme in LEARNED,
        )

    def _assigner(self, scheme: str, rotation: Rotation) -> nn.Module:
        width = self.config.hidden_size
        rows = {"kv_head": rotation.kv_heads, "head": rotation.heads, "layer": 1}[
            self.options.assignment
        ]
        if scheme not in LEARNED:
            return TokenIndex()
        # One row for all heads tells it from multihead_continuous.
        if scheme == "continuous":
            return LinearPositions(width, 1)
        assigners: dict[str, Any] = {
            "multihead_continuous": LinearPositions,
            "repo_index": IndexedPositions,
            "repo_attention": AttendedPositions,
            "repo_convolution": ConvolvedPositions,
        }
        return assigners.get(scheme, LearnedPositions)(width, rows)

    def _contextual(self, scheme: str, d_head: int, rotation: Rotation) -> PositionLogits:
        position_map = self._position_map(scheme, d_head, rotation.heads)
        relative_map = (
            self._position_map(scheme, d_head, rotation.heads)
            if scheme == "cope_relative"
            else None
        )
        # CoPE may learn one map for all layers.
        if self.options.map == "model":
            position_map = self._maps.setdefault(scheme, position_map)
        if self.options.gates == "separate_keys":
            width, kv_heads = self.config.hidden_size, rotation.kv_heads
            return SeparatelyGatedPositions(
                position_map, width, kv_heads, d_head, self.deviation, relative_map
            )
        return ContextualPositions(position_map, self.options.gates, relative_map)

    def _position_map(self, scheme: str, d_head: int, heads: int) -> PositionMap:
        if scheme == "cope_alibi":
            options = self.options
            return (
                LearnedSlopes(heads)
                if options.slopes == "learned"
                else FixedSlopes(heads, options.first_slope or None, options.slope_ratio or None)
            )
        if scheme == "cope_mlp":
            return PositionMLP(d_head)
        positions = self.options.p_max or self.length
        if positions < 2:
            raise InputError(
                "CoPE interpolates between whole positions and needs at least 2; got p_max "
                f"= {positions}"
            )
        return InterpolatedEmbedding(positions, d_head)


def _initial_deviation(config: PretrainedConfig) -> float:
    """Standard deviation of a decoder's weights as drawn."""
    return getattr(config, "initializer_range", None) or getattr(config, "init_std", 0.02)


_WITHOUT_POSITIONS = ("nope", "learned")
_ADDITIVE: dict[str, Callable[[Rotation, int], PositionLogits]] = {
    # RePo's variants have the same bias: they differ in the positions that it is given.
    **dict.fromkeys(
        ("alibi", "repo_alibi"), lambda layer, length: ALiBi(layer.heads, slopes=layer.slopes)
    ),
    **dict.fromkeys(("kerple", "repo_kerple"), lambda layer, length: KerpleLog(layer.heads)),
    **dict.fromkeys(
        ("fire", "repo_fire"), lambda layer, length: FIRE(layer.heads, threshold=float(length))
    ),
}
_FREQUENCIES = {
    "hope": hope.hope_frequencies,
    "hope_ab1": hope.without_activated,
    "hope_ab2": hope.without_low,
    "hope_ab3": hope.only_high,
}
