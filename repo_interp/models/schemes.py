"""`SchemeBuilder` gives schemes the sizes, options and shared parts of a model.

    parts = find("repo_interp.schemes", name)(builder, rotation, d_head)         for every layer

Schemes are entry points of the group `repo_interp.schemes`, both ours (`plugins.schemes`) and those
of other packages. This module knows no scheme, and nothing about checkpoints or bridges.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from torch import nn
from transformers import PretrainedConfig

from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.checkpoint_files.options import SchemeOptions
from repo_interp.models.rotation import Rotation
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.models.scheme_registry import named_parts

Part = TypeVar("Part", bound=nn.Module)


class SchemeBuilder:
    """Builds the parts of a model's layers, and parts that layers share."""

    def __init__(self, config: PretrainedConfig, options: SchemeOptions) -> None:
        """Read sizes from `config`, and choices from `options`."""
        self.config = config
        self.options = options
        self.length = options.training_length or training_length(config)
        self.deviation: float = options.scheme_deviation or _initial_deviation(config)
        """Standard deviation of the linear maps of a scheme as drawn."""
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self._shared: dict[str, nn.Module] = {}

    def stated_options(self) -> dict[str, Any]:
        """Return the options for the configuration.

        Returns:
            Options by name; a deviation only if it differs from the configuration's.
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
        return named_parts(self, scheme, rotation, d_head)

    def position_rows(self, rotation: Rotation) -> int:
        """Return how many rows of positions the option `assignment` gives a layer.

        Args:
            rotation: How the layer rotates.

        Returns:
            One, or one for each head or key-value head.
        """
        rows = {"kv_head": rotation.kv_heads, "head": rotation.heads, "layer": 1}
        return rows[self.options.assignment]

    def shared(self, name: str, part: Part) -> Part:
        """Return the part that the layers of this model share under a name.

        Args:
            name: Name of the part.
            part: The part of the first layer that asks; later ones are dropped.

        Returns:
            The first layer's part.
        """
        return self._shared.setdefault(name, part)  # pyright: ignore[reportReturnType]


def _initial_deviation(config: PretrainedConfig) -> float:
    """Standard deviation of a decoder's weights as drawn."""
    return getattr(config, "initializer_range", None) or getattr(config, "init_std", 0.02)
