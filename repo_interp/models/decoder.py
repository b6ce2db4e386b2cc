"""One object for every opened model: its layers, sizes, schemes, and origin.

    as_decoder(model)    the `Decoder` of a Hugging Face model or a bridge, also inside
                         torch.compile or peft; made once and then reused

Modules are looked up again only after a module above them was replaced. Attributes of layers are
never cached, since schemes and interventions change them. A model and the bridge around it have
separate `Decoder` objects with the same layers: some facts about a bridge, such as its initial
hooks, do not apply to the model inside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.errors import InputError, quoted
from repo_interp.models.attention import RepositionedAttention, scheme_of
from repo_interp.models.offloading import device_of
from repo_interp.models.rotation import depends_on_length, rotaries
from repo_interp.models.scheme_parts import PARTS
from repo_interp.models.tables import TABLE, position_table, positions_in
from repo_interp.models.wrapped import model_of, unwrapped
from repo_interp.positions.layouts import NO_ATTENTION

_DECODER = "_repo_interp_decoder"
"""Attribute of a model with its `Decoder`. Unlike an entry of a weak table it is copied with the
model, and saved by torch.save.
"""


@dataclass(frozen=True)
class Origin:
    """Origin of a loaded model."""

    name: str
    """Name of the directory or hub repository without its path. For a directory of our training the
    parent's name is included ("language/rope", "reversal-repo/seed-0"), since a scheme or a seed
    alone does not identify a model.
    """
    digest: str
    """SHA-256 over config.json and the weight files."""
    training_length: int
    """Longest prompts it was trained on, in tokens."""
    directory: Path
    """Directory of its files on this machine."""
    scaling: str = ""
    """Scaling of the rotation that was set at loading and differs from the configuration; empty
    without one.
    """
    remarks: str = ""
    """Parts that config.json does not specify, or has in addition to the decoder (`Checkpoint`)."""
    tokenizer_file: Path | None = None
    """Its tokenizer.json, if it has one; it may belong to an adapter's base, or be shared by
    checkpoints.
    """


@dataclass(eq=False, repr=False)
class Decoder:
    """Facts of an opened model."""

    module: Any
    """The bridge, or the model of Hugging Face."""
    origin: Origin | None = None
    """The checkpoint that it was loaded from; None for a model made in memory."""
    prepended: int | None = None
    """The BOS that the tokenizer prepends to a text; None without a prepended BOS or a tokenizer.
    """
    weights: Mapping[str, int] | None = None
    """Checksums of the loaded weights (`remembered`)."""
    hashed: tuple[Mapping[str, int], str] | None = None
    """Checksums of the weights at their last SHA-256, and the SHA-256 (`weights_digest`)."""
    rotations: Mapping[str, Any] | None = None
    """Rotations of the layers of a bridge when it was made (`remembered`)."""
    first_hook: int = 0
    """Number of the first hook after a bridge was made (`remembered`)."""
    found: dict[str, Any] = field(default_factory=dict)
    """Modules that were looked up, and the modules above them (`modules`)."""

    @property
    def owner(self) -> Any:
        """The model of Hugging Face, inside a bridge too."""
        return model_of(self.module)

    @property
    def stack(self) -> Any:
        """The model of Hugging Face without its unembedding."""
        owner = self.owner
        # Llama 4's base_model_prefix names another model
        return owner.base_model if owner.base_model is not owner else owner.model

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers of the model, with and without attention."""
        (found,) = self.modules("blocks", _find_blocks)
        return found  # pyright: ignore[reportReturnType]

    @property
    def repositioned(self) -> list[RepositionedAttention]:
        """As `layers`, but empty for a stock decoder."""
        found = [scheme_of(module) for module in self.modules("attentions", _find_attentions)]
        by_layer = {attention.layer_idx: attention for attention in found if attention is not None}
        return [by_layer[layer] for layer in sorted(by_layer)]

    @property
    def layers(self) -> list[RepositionedAttention]:
        """The attention of all layers with attention, in order; InputError for a stock decoder."""
        found = self.repositioned
        if not found:
            raise InputError(
                "this model was never repositioned; call repo_interp.reposition(model, "
                "layout) or load it with repo_interp.load"
            )
        return found

    @property
    def by_layer(self) -> dict[int, RepositionedAttention]:
        """`layers` by number of the layer."""
        return {attention.layer_idx: attention for attention in self.layers}

    @property
    def layer_count(self) -> int:
        """Number of layers with or without attention; double attention (LongCat) counts twice."""
        return max(len(self.blocks), 1 + self.layers[-1].layer_idx)

    @property
    def schemes(self) -> tuple[str, ...]:
        """The position scheme of every layer; "-" for a layer without attention."""
        schemes = {layer: attention.scheme for layer, attention in self.by_layer.items()}
        count = max(len(self.blocks), 1 + max(schemes))  # `layer_count`
        return tuple(schemes.get(layer, NO_ATTENTION) for layer in range(count))

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers, with and without attention, and number of query heads (`heads`)."""
        return self.layer_count, self.heads

    @property
    def learned_layers(self) -> list[int]:
        """The layers that learn positions."""
        return [layer for layer, attention in self.by_layer.items() if attention.learned]

    @property
    def learned_schemes(self) -> set[str]:
        """The schemes of the layers that learn positions."""
        return {attention.scheme for attention in self.layers if attention.learned}

    @property
    def positioned(self) -> dict[int, RepositionedAttention]:
        """The layers with a rotation or bias that depends on positions."""
        return {
            layer: attention
            for layer, attention in self.by_layer.items()
            if attention.uses_positions
        }

    @property
    def positioned_heads(self) -> list[tuple[int, int]]:
        """(layer, head) for all heads of `positioned`, in the order of the model."""
        return [
            (layer, head)
            for layer, attention in self.positioned.items()
            for head in range(attention.heads)
        ]

    @property
    def assigners(self) -> list[nn.Module]:
        """Modules that assign positions, one per layer that assigns positions."""
        return [attention.assigner for attention in self.layers if attention.assigner is not None]

    @property
    def positions_dtype(self) -> torch.dtype:
        """The precision of learned positions; without learned positions, of the weights."""
        learned = (weight for assigner in self.assigners for weight in assigner.parameters())
        return next(learned, self.weight).dtype

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt, the length of a learned table; None without a table."""
        table = position_table(self.stack)
        return None if table is None else positions_in(table)

    @property
    def length_matters(self) -> bool:
        """Whether frequencies depend on the longest prompt of a pass (dynamic NTK, longrope)."""
        found = self.modules("rotaries", lambda decoder: list(rotaries(decoder.stack)))
        return any(map(depends_on_length, found))

    @property
    def scheme_modules(self) -> list[nn.Module]:
        """Modules with parameters of position schemes, without duplicates."""
        parts = [getattr(self.stack, TABLE, None)]
        parts += [
            part
            for attention in self.layers
            for part in (
                *(getattr(attention.module, name) for name in PARTS),
                attention.module.rotation_parameters,
            )
        ]
        return [part for part in dict.fromkeys(parts) if part is not None]

    @property
    def scheme_parameters(self) -> set[nn.Parameter]:
        """Parameters of position schemes, without duplicates."""
        return {weight for module in self.scheme_modules for weight in module.parameters()}

    @property
    def assigner_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that assign positions, by all their names in the model."""
        assigning = {weight for assigner in self.assigners for weight in assigner.parameters()}
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: parameter for name, parameter in named if parameter in assigning}

    @property
    def rotation_parameters(self) -> set[str]:
        """Names of learned frequencies and factors of rotation in the model."""
        learned = {
            weight
            for attention in self.layers
            if attention.module.rotation_parameters is not None
            for weight in attention.module.rotation_parameters.parameters()
        }
        named = self.module.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if parameter in learned}

    @property
    def training_length(self) -> int:
        """Tokens of the longest prompts that the model was trained on."""
        return self.origin.training_length if self.origin else training_length(self.config)

    @property
    def config(self) -> Any:
        """The configuration of the decoder."""
        return self.layers[0].config

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return int(self.config.vocab_size)

    @property
    def heads(self) -> int:
        """Number of query heads of a layer; InputError if it differs by layer."""
        first, *others = sorted({attention.heads for attention in self.layers})
        if others:
            raise InputError(
                f"layers of this {self.config.model_type} have {first} to {others[-1]} heads; "
                "measures take that, experiments need as many in all layers"
            )
        return first

    @property
    def intermediate_size(self) -> int:
        """Width of the feed-forward part, the largest of all layers.

        Four times the width of the model if the configuration has no such value.
        """
        stated = getattr(self.config, "intermediate_size", None) or 4 * self.config.hidden_size
        return stated if isinstance(stated, int) else max(stated)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model; None without one.

        It is an attribute of the model, which TransformerLens reads and a user may set.
        """
        return getattr(self.module, "tokenizer", None)

    @property
    def weight(self) -> nn.Parameter:
        """The first parameter, whose precision and device represent all parameters."""
        return next(self.module.parameters())

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs."""
        return device_of(self.module)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        return self.weight.dtype

    def attentions(self, layers: Collection[int]) -> list[RepositionedAttention]:
        """Return the attention of some layers.

        Args:
            layers: Numbers of layers.

        Returns:
            Their attention, in the order of the model.

        Raises:
            InputError: The model lacks one of `layers`.
        """
        by_layer = self.by_layer
        for layer in layers:
            if layer not in by_layer:
                raise InputError(
                    f"layer {layer} was asked for; the model's are {_format_layers(by_layer)}"
                )
        return [by_layer[layer] for layer in sorted(layers)]

    def modules(self, name: str, find: Callable[[Any], list[nn.Module]]) -> list[nn.Module]:
        """Find modules of the decoder, cached while all modules above have the same children.

        Searching all modules of a bridge takes milliseconds, and an analysis would search at every
        step.

        Args:
            name: Key of the modules in the cache.
            find: Finds the modules of a decoder.

        Returns:
            The modules that `find` returned.
        """
        owner = self.owner
        # Cached with the model inside, so that a bridge around it does not search again.
        kept = as_decoder(owner).found
        found, above = kept.get(name, ([], []))
        if not found or any(
            tuple(module._modules.values()) != children for module, children in above
        ):
            found = find(self)
            above = [
                (module, tuple(module._modules.values())) for module in _above(owner, {*found})
            ]
            kept[name] = found, above
        return found


def _above(module: nn.Module, wanted: set[nn.Module]) -> list[nn.Module]:
    """The module and its descendants that contain a module of `wanted`."""
    children = list(module.children())
    found = [part for child in children for part in _above(child, wanted)]
    holds = found or any(child in wanted for child in children)
    return [module, *found] if holds and module not in wanted else found


def as_decoder(model: Any) -> Decoder:
    """Return the `Decoder` of a model.

    Args:
        model: A model of Hugging Face or a bridge, also inside `torch.compile` or a PeftModel.

    Returns:
        The one object for this model or bridge, made at the first call.

    Raises:
        InputError: `model` is no model, or its adapter computes outside the modules of the model.
    """
    require_model(model)
    module = unwrapped(model)
    known = vars(module).get(_DECODER) or Decoder(module)
    if known.module is not module:  # a shallow copy of a model
        known = replace(known, module=module, found={})
    # A bridge's __setattr__ would set it on the model inside.
    object.__setattr__(module, _DECODER, known)
    return known


def require_model(model: object) -> None:
    """Refuse an object that is no model of Hugging Face and no bridge.

    Args:
        model: Any object.

    Raises:
        InputError: `model` is no module, or has no configuration.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"a model or a bridge was wanted, as ri.load returns it; got {quoted(model)}"
        )
    if not hasattr(model_of(model), "config"):  # DataParallel, say
        raise InputError(
            "a model or a bridge was wanted, as ri.load returns it; got a "
            f"{type(model).__name__}: give the model inside, if it has one"
        )


def _format_layers(layers: Collection[int]) -> str:
    """Numbers of layers, for messages."""
    whole = list(layers) == list(range(len(layers)))
    return (
        f"0 to {len(layers) - 1}"
        if whole
        else f"{', '.join(map(str, layers))} (others have no attention)"
    )


def _find_attentions(decoder: Decoder) -> list[nn.Module]:
    return [module for module in decoder.owner.modules() if scheme_of(module) is not None]


def _find_blocks(decoder: Decoder) -> list[nn.Module]:
    lists = [module for module in decoder.stack.modules() if isinstance(module, nn.ModuleList)]
    # The outermost list of numbered layers: some families also have lists of norms or experts.
    numbered = (
        blocks for blocks in lists if any(hasattr(part, "layer_idx") for part in blocks.modules())
    )
    return [next(numbered)]
