"""The parts that each position scheme puts into an attention layer: its assigner, its frequencies, the logits it adds.

    scheme                      positions    rotation                        added to the logits
    rope                        index        theta_r                         -
    nope, learned               -            -                               - (learned: a vector a position at the model's input)
    repo, continuous, ...       learned      theta_r                         -
    hope, hope_ab1 .. ab3       index        theta_r of some components      -
    rope_high                   index        theta_r, components dropped     -          (HoPE table 3, "removed")
    alibi, kerple, fire         index        -                               a function of the distance
    cope, cope_alibi, cope_mlp  -            -                               a function of gated counts
    cope_rope                   index        theta_r                         as cope

Another package adds a scheme by an entry point of the group `repo_interp.schemes`: a function of (builder, rotation, d_head), the
arguments of `SchemeBuilder.build` after the name, that returns a layer's `SchemeParts`.

Knows the names of the layout language and the modules of `positions`; knows nothing about checkpoints or bridges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig

from repo_interp.entry_points import SCHEMES as SCHEME_GROUP
from repo_interp.entry_points import called, find
from repo_interp.errors import InputError
from repo_interp.models.attention import SchemeParts
from repo_interp.models.architectures import training_length
from repo_interp.models.rotation import Rotation
from repo_interp.positions import hope
from repo_interp.positions.assigners import LearnedPositions, LinearPositions, TokenIndex
from repo_interp.positions.biases import FIRE, ALiBi, KerpleLog
from repo_interp.positions.contextual import (
    ContextualPositions,
    FixedSlopes,
    GateSource,
    InterpolatedEmbedding,
    PositionMap,
    PositionMLP,
    SeparatelyGatedPositions,
)
from repo_interp.positions.layouts import CONTEXTUAL, SCHEMES
from repo_interp.positions.logits import PositionLogits
from repo_interp.values import PositiveOrZero, TokensOrNone, check_fields

Assignment = Literal["kv_head", "head", "layer"]
"""What has a row of learned positions of its own: each key-value head, each head, or the layer as a whole."""


@dataclass(frozen=True)
class SchemeOptions:
    """Choices within schemes, the same for all layers of a model; part of its configuration."""

    assignment: Assignment = "kv_head"
    gates: GateSource = "keys"
    """What CoPE's gates are made from."""
    map: Literal["layer", "model"] = "layer"
    """What has a map from CoPE's positions of its own: each layer, or the model as a whole."""
    p_max: TokensOrNone = 0
    """Whole positions of CoPE's map; 0: the training length."""
    scheme_deviation: PositiveOrZero = 0.0
    """Standard deviation of what the schemes learn, as it is drawn; 0: the configuration's initializer_range."""
    training_length: TokensOrNone = 0
    """L of HoPE, of FIRE's threshold and of the learned table, in tokens; 0: the configuration's."""

    def __post_init__(self) -> None:
        check_fields(self)


def scheme_options(stated: Mapping[str, Any]) -> SchemeOptions:
    """Options by name. Raises InputError for a name that is none."""
    known = [field.name for field in dataclasses.fields(SchemeOptions)]
    unknown = sorted(set(stated) - set(known))
    if unknown:
        raise InputError(f"schemes have no option {unknown[0]!r}; they have {', '.join(known)}")
    return SchemeOptions(**stated)


def options_of(schemes: Collection[str]) -> tuple[str, ...]:
    """The options that change something in a layout of `schemes`; all, where one of them is another package's."""
    if not set(schemes) <= set(SCHEMES):
        return tuple(_USED_BY)
    return tuple(name for name, used_by in _USED_BY.items() if set(schemes) & set(used_by))


def require_useful(schemes: Collection[str], options: SchemeOptions) -> None:
    """Raise InputError for an option that was set and changes nothing in a layout of `schemes`, naming those that do."""
    useful = options_of(schemes)
    for name in _USED_BY:
        if name not in useful and getattr(options, name) != getattr(SchemeOptions(), name):
            named = ", ".join(dict.fromkeys(schemes))
            raise InputError(f"{name} changes nothing in {named}, which has {', '.join(useful) or 'no options'}; leave it out")


class SchemeBuilder:
    """Makes the parts of one model's layers, and what its layers share."""

    def __init__(self, config: PretrainedConfig, options: SchemeOptions) -> None:
        """For decoders of `config`."""
        self.config = config
        self.options = options
        self.length = options.training_length or training_length(config)
        self.deviation: float = options.scheme_deviation or config.initializer_range
        """Of what a layer's parts learn, as it is drawn."""
        self._maps: dict[str, PositionMap] = {}

    def stated(self) -> dict[str, Any]:
        """The options as the configuration is to state them: a deviation only where it is not the configuration's."""
        stated = dataclasses.asdict(self.options)
        if self.deviation == self.config.initializer_range:
            del stated["scheme_deviation"]
        return stated

    def build(self, scheme: str, rotation: Rotation, d_head: int) -> SchemeParts:
        """The parts of `scheme` for one layer, freshly made but for what the model's layers share."""
        if scheme not in SCHEMES:
            return self._from_another_package(scheme, rotation, d_head)
        if scheme in _UNPOSITIONED:
            return SchemeParts(scheme, assigner=None, frequencies=None)
        if scheme in _ADDITIVE:
            return SchemeParts(
                scheme,
                TokenIndex(),
                frequencies=None,
                position_logits=_ADDITIVE[scheme](rotation.heads, self.length),
            )
        if scheme in CONTEXTUAL:
            rotated = scheme == "cope_rope"
            return SchemeParts(
                scheme,
                TokenIndex() if rotated else None,
                rotation.frequencies if rotated else None,
                rotation.attention_scaling if rotated else 1.0,
                position_logits=self._contextual(scheme, d_head, rotation),
            )
        frequencies, components = rotation.frequencies, None
        try:
            if scheme in _FREQUENCIES:
                frequencies = carried(_FREQUENCIES[scheme](rotation.unscaled, self.length), rotation)
            if scheme == "rope_high":
                components = hope.high_components(rotation.unscaled, self.length)
        except ValueError as error:
            raise InputError(str(error)) from None
        return SchemeParts(scheme, self._assigner(scheme, rotation), frequencies, rotation.attention_scaling, components)

    def _from_another_package(self, scheme: str, rotation: Rotation, d_head: int) -> SchemeParts:
        build = find(SCHEME_GROUP, scheme)
        if build is None:
            raise InputError(f"no installed package gives the scheme {scheme!r}; install the one that does")
        parts = build(self, rotation, d_head) if callable(build) else build
        if not isinstance(parts, SchemeParts):
            raise InputError(
                f"{called(SCHEME_GROUP, scheme)} gave {type(parts).__name__}; wanted a function that gives SchemeParts"
            )
        return dataclasses.replace(parts, name=scheme)

    def _assigner(self, scheme: str, rotation: Rotation) -> nn.Module:
        width = self.config.hidden_size
        rows = {"kv_head": rotation.kv_heads, "head": rotation.heads, "layer": 1}[self.options.assignment]
        if scheme == "repo":
            return LearnedPositions(width, rows)
        if scheme == "multihead_continuous":
            return LinearPositions(width, rows)
        return LinearPositions(width, 1) if scheme == "continuous" else TokenIndex()

    def _contextual(self, scheme: str, d_head: int, rotation: Rotation) -> PositionLogits:
        if self.options.map == "model":
            position_map = self._maps.setdefault(scheme, self._position_map(scheme, d_head, rotation.heads))
        else:
            position_map = self._position_map(scheme, d_head, rotation.heads)
        if self.options.gates == "separate_keys":
            return SeparatelyGatedPositions(position_map, self.config.hidden_size, rotation.kv_heads, d_head, self.deviation)
        return ContextualPositions(position_map, self.options.gates)

    def _position_map(self, scheme: str, d_head: int, heads: int) -> PositionMap:
        if scheme == "cope_alibi":
            return FixedSlopes(heads)
        if scheme == "cope_mlp":
            return PositionMLP(d_head)
        positions = self.options.p_max or self.length
        if positions < 2:
            raise InputError(f"CoPE interpolates between whole positions and needs at least 2; got p_max = {positions}")
        return InterpolatedEmbedding(positions, d_head)


def carried(chosen: Float[Tensor, "component"], rotation: Rotation) -> Float[Tensor, "component"]:
    """The scaled frequencies of components that were chosen by their unscaled ones; 0 stays 0.

    Which components turn how far is decided by the frequencies of training, before position interpolation or YaRN.
    """
    source = (chosen[:, None] == rotation.unscaled).to(torch.int8).argmax(1)
    return rotation.frequencies[source].where(chosen != 0, 0.0)


_UNPOSITIONED = ("nope", "learned")
_ADDITIVE: dict[str, Callable[[int, int], PositionLogits]] = {
    "alibi": lambda heads, length: ALiBi(heads),
    "kerple": lambda heads, length: KerpleLog(heads),
    "fire": lambda heads, length: FIRE(heads, threshold=float(length)),
}
_FREQUENCIES = {
    "hope": hope.hope_frequencies,
    "hope_ab1": hope.without_activated,
    "hope_ab2": hope.without_low,
    "hope_ab3": hope.only_high,
}
_USED_BY: dict[str, tuple[str, ...]] = {
    "assignment": ("repo", "multihead_continuous"),
    "gates": CONTEXTUAL,
    "map": CONTEXTUAL,
    "p_max": ("cope", "cope_rope"),
    "training_length": ("learned", "fire", "cope", "cope_rope", "rope_high", *_FREQUENCIES),
}
"""Which schemes an option changes. `scheme_deviation` is part of every training's record, whatever the scheme, so it is not among these."""
