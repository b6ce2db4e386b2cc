"""Put a layout of position schemes into a stock Hugging Face decoder.

A `RepositionedAttention` is attached to every stock attention module, which stays in place; only
parameters of schemes (f_phi: 2 d d_p + d_p P a layer) are new, drawn from normal(0,
initializer_range) as in the RePo paper, or with another deviation.

Learned absolute positions are vectors that are added to the token embeddings at the decoder's
input, so they are not part of an attention layer; the scheme of the layers is then "learned",
without rotation. The table is `model.position_table`. Token embeddings are looked up as usual (a
bridge's hook_embed fires), then the vectors are added.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from repo_interp.checkpoint_files.architectures import require_family
from repo_interp.checkpoint_files.options import require_useful, scheme_options
from repo_interp.entry_points import ATTENTIONS, find, names
from repo_interp.errors import InputError, quoted, warn
from repo_interp.models.attention import RepositionedAttention, cache_argument, remember_index
from repo_interp.models.attention_modules import attends, attention_modules
from repo_interp.models.decoder import Decoder, as_decoder, require_model
from repo_interp.models.lasting import require_weights
from repo_interp.models.offloading import stores_of
from repo_interp.models.precision import float32_by_default
from repo_interp.models.remembered import remember_scheme
from repo_interp.models.repositioned_config import repositioned
from repo_interp.models.rotation import (
    OF_TABLES,
    Rotation,
    depends_on_length,
    forget_length,
    rotaries,
)
from repo_interp.models.rotation_probe import Prober
from repo_interp.models.schemes import SchemeBuilder
from repo_interp.models.tables import TABLE, stock_table
from repo_interp.models.wrapped import unwrapped
from repo_interp.positions.assigners import IndexSharing
from repo_interp.positions.embedding import AbsoluteEmbedding
from repo_interp.positions.layouts import NO_ATTENTION, format_layout, parse_layout

logger = logging.getLogger(__name__)

_HANDLE = "_position_table_hook"
"""Attribute of a decoder with the handle of its table's hook, which is copied with the table.
"""


def reposition(
    model: PreTrainedModel, layout: str | Sequence[str], **options: str | float
) -> PreTrainedModel:
    """Give a model the position schemes of a layout, in place: the given model is changed.

    `copy.deepcopy(model)` keeps one as it is. A model that was repositioned before starts the new
    schemes afresh. A fresh "repo" starts as NoPE: its weights are drawn so small that the positions
    of a text spread over some .002 (in SmolLM2 .005), and no pair turns before it was trained. The model trains,
    generates, and keeps its weights' names; `added_parameters` counts the parameters of the schemes.

    Args:
        model: Model of Hugging Face, also inside torch.compile or a PeftModel.
        layout: Such as "repo@1/3", or a scheme for every layer, as `layout` returns them; see
            `positions.layouts`.
        **options: Choices within schemes (`SchemeOptions`), above all `assignment`: "kv_head",
            "head" or "layer", with one row of learned positions each.

    Returns:
        The model; of a wrapped one the model inside.

    Raises:
        InputError: The decoder, the layout or an option does not fit, or an option has no effect.
    """
    model = unwrapped(model)
    require_model(model)
    require_family(model.config)
    require_useful(_schemes(model, layout), scheme_options(options))
    with_layout(model, layout, **options)
    # Else a run would note it as an edit of a loaded model.
    remember_scheme(as_decoder(model))
    return model


def observable(model: nn.Module) -> nn.Module:
    """Return a model with hook sites, without a change to the given one.

    Args:
        model: Bridge, repositioned model, or stock model of Hugging Face.

    Returns:
        `model`; for a stock model, a copy of its modules that shares its tensors.

    Raises:
        InputError: `model` is no model, holds no numbers, or cannot be observed.
    """
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel) or as_decoder(model).repositioned:
        return model
    require_weights(as_decoder(model))
    # Only modules are copied: tensors are shared, so no memory is needed.
    parts = (*model.parameters(), *model.buffers(), *stores_of(model))
    shared = {id(part): part for part in parts}
    return with_layout(copy.deepcopy(model, shared), None)


@float32_by_default()
def with_layout(
    model: PreTrainedModel, layout: str | Sequence[str] | None, **options: str | float
) -> PreTrainedModel:
    """Give a model the schemes of a layout, in place, whether options have an effect or not.

    A stored configuration states every option, so unlike `reposition` this accepts idle ones.

    Args:
        model: Model of Hugging Face.
        layout: Layout; None: the schemes that its modules were measured to have.
        **options: Choices within schemes.

    Returns:
        `model`.

    Raises:
        InputError: The decoder or the layout does not fit.
    """
    if getattr(model.config, "text_config", None) is not None:
        require_family(model.config)
    schemes = () if layout is None else _schemes(model, layout)
    decoder = as_decoder(model)
    rotations = _rotations(decoder)  # first, because it refuses decoders
    builder = SchemeBuilder(model.config, scheme_options(options))
    adds_table = "learned" in schemes and stock_table(decoder.stack) is None
    learn_absolute_positions(decoder, builder.length if adds_table else None, builder.deviation)
    # Without rotation a decoder has no positions, or positions from its table.
    still = "nope" if stock_table(decoder.stack) is None else "learned"
    native = {
        stock.layer_idx: "rope" if rotation.rotates else getattr(stock, "native_scheme", still)
        for stock, rotation in rotations.items()
    }
    chosen = native if layout is None else dict(enumerate(schemes))
    if silent := [layer for layer in native if chosen[layer] == NO_ATTENTION]:
        raise InputError(
            f'the layout has "{NO_ATTENTION}", no attention, for layers '
            f"{', '.join(map(str, silent))}, which attend; name schemes for them"
        )
    schemes = tuple(
        chosen[layer] if layer in native else NO_ATTENTION
        for layer in range(model.config.num_hidden_layers)
    )
    if layout and still == "learned" and set(schemes) - {"learned", NO_ATTENTION}:
        raise InputError(
            f"{model.config.model_type!r} cannot be repositioned: its positions are "
            "learned vectors at its input"
        )
    for stock, rotation in rotations.items():
        parts = builder.build(schemes[stock.layer_idx], rotation, 2 * len(rotation.frequencies))
        # The family has other positions than rotary ones.
        if parts.frequencies is not None and not bool(rotation.frequencies.any()):
            raise InputError(
                f"no layer of {model.config.model_type} rotates, so {parts.name!r} has no "
                "frequencies to rotate by"
            )
        if parts.assigner is not None:
            for module in parts.assigner.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=builder.deviation)
            parts.assigner.train(stock.training)
        if parts.transform is not None:
            parts.transform.train(stock.training)
        RepositionedAttention(stock, parts, rotation)
    decoder.found.clear()  # schemes were attached to modules that may have been without
    _settle(decoder)
    _declare_shared(decoder)
    repositioned(model.config, schemes, builder.stated_options())
    added = added_parameters(model)
    share = 100 * added / max(1, sum(p.numel() for p in model.parameters()) - added)
    logger.info("layout %s adds %d parameters (%.2f %%)", format_layout(schemes), added, share)
    return model


def _rotations(decoder: Decoder) -> dict[Any, Rotation]:
    """The rotation of every attention module of the model's layers.

    A layer without rotation gets the frequencies of a layer with rotation.
    """
    model, stack = decoder.owner, decoder.stack
    # Weights on "meta" are fine, as for counting parameters; frequencies are measured.
    if decoder.device.type == "meta" and any(
        buffer.is_meta for rotary in rotaries(stack) for buffer in rotary.buffers()
    ):
        raise InputError(
            "the rotary frequencies of this model are on 'meta' and hold no numbers; load "
            "the model first, as ri.load does, or make it with real buffers"
        )
    # Importing the families that compute attention themselves takes a tenth of a second.
    if not any(attends(type(module)) for module in stack.modules()):
        for name in names(ATTENTIONS):
            find(ATTENTIONS, name)(stack)
    prober = Prober(stack)
    attending = list(attention_modules(stack))
    if sum(module in attending for block in decoder.blocks for module in block.modules()) > len(
        attending
    ):
        raise InputError(
            f"layers of this {model.config.model_type} share an attention module, which is "
            "not supported"
        )
    measured = {stock: prober.measured(stock) for stock in attending}
    # Its frequencies are needed if a layout makes such a layer rotate.
    turning = {
        len(rotation.frequencies): rotation
        for rotation in reversed(measured.values())
        if rotation.rotates
    }
    for stock, rotation in measured.items():
        like = turning.get(len(rotation.frequencies))
        if not rotation.rotates and like is not None:
            measured[stock] = replace(rotation, **{name: getattr(like, name) for name in OF_TABLES})
    for rotary in rotaries(stack):
        # A second layout on the same model must not add a second hook.
        if remember_index not in rotary._forward_hooks.values():
            rotary.register_forward_hook(remember_index, with_kwargs=True)
            if depends_on_length(rotary):
                rotary.register_forward_pre_hook(forget_length)
    differing = [stock.layer_idx for stock, rotation in measured.items() if rotation.differs]
    if differing:
        warn(
            f"layers {', '.join(map(str, differing))} of this {model.config.model_type} "
            "rotate differently from its configuration (it was scaled later, or lost its scaling "
            "in a loader): their actual rotation is measured; a saved copy follows the "
            "configuration"
        )
    return measured


def _schemes(model: PreTrainedModel, layout: Any) -> tuple[str, ...]:
    """Scheme of every layer of `model` in `layout`; InputError for a layout that does not fit."""
    if isinstance(layout, list | tuple) and all(isinstance(name, str) for name in layout):
        layout = ",".join(layout)
    if not isinstance(layout, str):
        raise InputError(
            'wanted a layout such as "repo@1/3", or a name for every layer with commas '
            f"between them; got {quoted(layout)}"
        )
    try:
        return parse_layout(layout, model.config.num_hidden_layers)
    except ValueError as error:
        raise InputError(str(error)) from None


def layout(model: nn.Module) -> tuple[str, ...]:
    """Return the position scheme of every layer.

    Args:
        model: Repositioned model or bridge.

    Returns:
        Schemes; "-" for a layer without attention.
    """
    return as_decoder(model).schemes


def added_parameters(model: nn.Module) -> int:
    """Count the parameters that position schemes added to the stock decoder.

    Args:
        model: Repositioned model or bridge.

    Returns:
        Number of parameters.
    """
    return sum(weight.numel() for weight in as_decoder(model).scheme_parameters)


def mix_with_index(decoder: Decoder, share: float) -> None:
    """Mix learned positions with the token index i: (1 - share) z + share i.

    Args:
        decoder: Decoder of the model.
        share: Share of the index: 1 is plain RoPE, 0 only learned positions (pdrop of the released
            code).

    Raises:
        ValueError: `share` lies outside of 0 to 1.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"a share lies between 0 and 1, not {share}")
    for assigner in decoder.assigners:
        if isinstance(assigner, IndexSharing):
            assigner.index_share = share


def _declare_shared(decoder: Decoder) -> None:
    """State which parameters layers share (a map of CoPE), else save_pretrained refuses them."""
    owners: dict[int, str] = {}
    for attention in decoder.layers:
        prefix = f"layers.{attention.layer_idx}."
        shared = {
            name: owner
            for name, parameter in attention.module.named_parameters()
            if (owner := owners.setdefault(id(parameter), prefix + name)) != prefix + name
        }
        attention.module._tied_weights_keys = shared  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def _settle(decoder: Decoder) -> None:
    """Move the parts of schemes to the device and dtype of the decoder."""
    # Loading replaces weights on "meta" in the requested dtype.
    reference: Tensor = decoder.owner.get_input_embeddings().weight  # pyright: ignore[reportAssignmentType]
    device = decoder.device if reference.is_meta else reference.device
    if device.type != "meta":
        for module in decoder.scheme_modules:
            # Learned frequencies keep the same precision as fixed ones.
            turning = isinstance(module, nn.ParameterDict)
            module.to(device=device, dtype=None if turning else reference.dtype)


def learn_absolute_positions(decoder: Decoder, length: int | None, deviation: float) -> None:
    """Give a model a new table of learned positions.

    Args:
        decoder: Decoder of the model.
        length: Number of positions; None: no table.
        deviation: Standard deviation of the vectors as drawn.
    """
    stack = decoder.stack
    if getattr(stack, TABLE, None) is not None:
        stack.__dict__.pop(_HANDLE).remove()
        delattr(stack, TABLE)
    if length is not None:
        setattr(
            stack, TABLE, AbsoluteEmbedding(length, decoder.owner.config.hidden_size, deviation)
        )
        stack.__dict__[_HANDLE] = stack.register_forward_pre_hook(_add_vectors, with_kwargs=True)


def _add_vectors(
    decoder: Any, arguments: tuple, keywords: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    # Positional arguments are allowed, and their order differs between versions.
    names = list(inspect.signature(decoder.forward).parameters)
    inputs = dict(zip(names, arguments, strict=False)) | keywords
    tokens, embeddings = inputs.get("input_ids"), inputs.get("inputs_embeds")
    if embeddings is None:
        embeddings = decoder.get_input_embeddings()(tokens)
    index = inputs.get("position_ids")
    if index is None:
        cache = inputs.get(cache_argument(decoder.forward))
        start = 0 if cache is None else cache.get_seq_length()
        index = torch.arange(start, start + embeddings.shape[1], device=embeddings.device)[None]
    try:
        with_positions = getattr(decoder, TABLE)(embeddings, index)
    except ValueError as error:
        raise InputError(str(error)) from None
    return (), inputs | {"input_ids": None, "inputs_embeds": with_positions}
