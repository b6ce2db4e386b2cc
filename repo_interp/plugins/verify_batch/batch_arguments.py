"""Arguments of the call that trains a model, from the batch of a collator.

    batch -> arguments of model(**batch), tensors on the model's device, without those of the loss

Invalid arguments are refused before a pass: tokens outside of the vocabulary, names that look
misspelled, positions beyond the table, unreadable padding. This module knows nothing about
documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import TransformersKwargs

from repo_interp.errors import InputError, nearest, one_line, warn
from repo_interp.models.attention import CACHES
from repo_interp.models.decoder import Decoder
from repo_interp.models.tables import position_table, positions_in
from repo_interp.values import shortened

PLACING = ("attention_mask", "position_ids", "seq_idx")
"""Arguments with one entry per token that give its place."""
_KEYWORDS = TransformersKwargs.__annotations__
"""Arguments that models pass on to their attention functions."""
_LEFT_OUT = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "return_dict")
"""Arguments of the loss and of the output, which do not change logits."""


def call_arguments(decoder: Decoder, batch: Any) -> dict[str, Any]:
    """Return the arguments of a call, without arguments of the loss, on the model's device.

    `use_cache` is False if a training step makes no cache: with gradient checkpointing, or if the
    model is in evaluation mode and the batch does not state `use_cache`.

    Args:
        decoder: Decoder of the model.
        batch: Arguments by name: tensors, arrays or lists.

    Returns:
        Arguments by name, `input_ids` [row, token] among them.

    Raises:
        InputError: The batch is not a mapping, or the model cannot take one of its arguments.
    """
    if not isinstance(batch, Mapping):
        raise InputError(
            f"a batch is {type(batch).__name__}; wanted arguments by name, such as "
            "{'input_ids': tokens}"
        )
    owner = decoder.owner
    if owner.get_output_embeddings() is None:
        raise InputError(
            f"{type(owner).__name__} predicts no next token; give the model that is trained to"
        )
    # Collators leave their tensors on the processor. Accelerate moves them where it offloads weights.
    device = None if decoder.device.type == "meta" else decoder.device
    given = {
        name: _tensors(name, value, device)
        for name, value in dict(batch).items()
        if value is not None and name not in _LEFT_OUT
    }
    unknown = _unknown_names(owner, given)
    if cache := next((name for name in CACHES if name in given), None):
        raise InputError(f"a batch for training has no {cache}; leave it out")
    tokens = given.get("input_ids")
    if tokens is None:
        raise InputError("a batch has no input_ids [row, token]; give what your collator returns")
    if not _holds_whole_numbers(tokens) or tokens.is_floating_point() or tokens.ndim != 2:
        raise InputError(f"input_ids are {_outline(tokens)}; wanted whole numbers [row, token]")
    if not tokens.numel():
        raise InputError(f"input_ids are {list(tokens.shape)}: the batch has no token")
    given["input_ids"] = tokens = tokens.long()
    last = int(owner.get_input_embeddings().weight.shape[0]) - 1
    if bool((wrong := (tokens < 0) | (tokens > last)).any()):
        row, token = wrong.nonzero()[0].tolist()
        raise InputError(
            f"input_ids hold {int(tokens[row, token])} at token {token} of row {row}; the model has "
            f"tokens 0 to {last}, and ignored tokens (-100) belong in labels"
        )
    for name, value in given.items():
        is_content = isinstance(value, Tensor) and name not in {*unknown, *PLACING, *_KEYWORDS}
        if is_content and value.shape[1:] != tokens.shape[1:]:
            raise InputError(f"documents with {name} cannot be run alone; leave it out")
    checkpoints = any(
        module.training and getattr(module, "gradient_checkpointing", False)
        for module in owner.modules()
        # Whether the model makes a cache is not up to the layers.
        if not isinstance(module, GradientCheckpointingLayer)
    )
    if checkpoints or ("use_cache" not in given and not owner.training):
        given["use_cache"] = False
    for name in unknown:
        warn(f"{type(owner).__name__} names no argument {name!r} and may pass over it")
    return given


def _tensors(name: Any, value: Any, device: torch.device | None) -> Any:
    """Convert arrays and lists to tensors, also inside a dict of masks (as in transformers)."""
    if isinstance(value, Mapping):
        return {part: _tensors(name, tensor, device) for part, tensor in value.items()}
    if not isinstance(value, Tensor | np.ndarray | list | tuple):
        return value
    try:
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} cannot become a tensor: {one_line(error, 120)}; wanted rows of one length"
        ) from None


def _unknown_names(owner: Any, given: Mapping[str, Any]) -> list[Any]:
    """Names that are not parameters of the model; InputError for one that looks misspelled."""
    known = {*inspect.signature(owner.forward).parameters, *_KEYWORDS}
    unknown = [name for name in given if name not in known]
    for name in unknown:
        meant = nearest(str(name), known)
        if meant or not isinstance(name, str):
            raise InputError(
                f"{type(owner).__name__} has no argument {shortened(repr(name))}; "
                f"{meant}wanted names such as input_ids and position_ids"
            )
    return unknown


def unpadded(mask: Any, tokens: Int[Tensor, "row token"]) -> Bool[Tensor, "row token"]:
    """Return which tokens are not padding: marked by a mask, or visible to themselves.

    Args:
        mask: Mask of tokens, or of pairs (query, key), a dict of masks, or None.
        tokens: Token ids of the batch [row, token].

    Returns:
        True for tokens that are not padding [row, token].

    Raises:
        InputError: The mask has another shape, holds NaN, or hides all tokens.
    """
    if isinstance(mask, Mapping):
        mask = next((part for part in mask.values() if isinstance(part, Tensor)), None)
    if not isinstance(mask, Tensor):  # none, or blocks of flex attention
        return torch.ones_like(tokens, dtype=torch.bool)
    if bool(mask.isnan().any()):
        raise InputError("attention_mask holds NaN; wanted 1 for tokens and 0 for padding")
    valid = mask != 0
    if mask.ndim == 4:
        # Collators hide keys in additive masks by various numbers: -inf, -1e9, the lowest number.
        hidden = min(float(mask.min()), -200.0) / 2
        seen = mask > hidden if mask.is_floating_point() else valid
        valid = torch.diagonal(seen[:, 0], 0, 1, 2)
    if valid.ndim != 2 or not fits(valid, tokens):
        raise InputError(
            f"attention_mask is {list(mask.shape)} where input_ids are {list(tokens.shape)}"
        )
    if not bool(valid.any()):
        raise InputError("attention_mask hides every token of the batch")
    return valid.expand(tokens.shape)


def require_positions(decoder: Decoder, positions: Any, valid: Tensor) -> None:
    """Refuse position ids that a model cannot take.

    Args:
        decoder: Decoder of the model.
        positions: Position ids of a batch; None: the model counts.
        valid: Tokens that are not padding [row, token].

    Raises:
        InputError: Position ids are not whole numbers, have another shape, or exceed the table of
            the model.
    """
    table, last = position_table(decoder.stack), int(valid.sum(1).max()) - 1
    if positions is not None:
        if not _holds_whole_numbers(positions):
            raise InputError(f"position_ids are {_outline(positions)}; wanted whole numbers")
        if positions.ndim not in (2, 3) or not fits(positions, valid):
            raise InputError(
                f"position_ids are {list(positions.shape)} where input_ids are {list(valid.shape)}"
            )
        last = int(positions.max())
    if table is not None and last >= positions_in(table):
        raise InputError(
            f"the batch has position {last}; the model has positions 0 to {positions_in(table) - 1}"
        )


def fits(part: Tensor, tokens: Tensor) -> bool:
    """Return whether the last axes of an argument fit a batch; one row may serve all rows.

    Args:
        part: Argument of a call.
        tokens: Token ids of the batch [row, token].

    Returns:
        True if they fit.
    """
    return (
        part.ndim >= 2 and part.shape[-1] == tokens.shape[1] and part.shape[-2] in (1, len(tokens))
    )


def _holds_whole_numbers(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype != torch.bool
        and not value.is_complex()
        and bool((value == value.round()).all())
    )


def _outline(value: Any) -> str:
    """Precision and shape of a tensor; other values unchanged."""
    if not isinstance(value, Tensor):
        return shortened(repr(value))
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
