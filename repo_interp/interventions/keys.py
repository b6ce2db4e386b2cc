"""Exchange or move keys alone, inside a `with` block; queries and values stay.

    exchanged_keys    k_j <- k_order(j)        features change places; values and positions stay
    moved_keys        z_j <- z_j + shift_j(z)  for keys only; the query keeps its position

A rotated key is turned again by theta_r shift_j, which is exact because rotations add up. Schemes
that add a function of the distance get the moved position of the key. Layers without positions
(NoPE) or with contextual ones (CoPE) have nothing to move. A learned absolute position is an
embedding, so the whole token (query, key and value) gets the vector of another position at the
model's input.

Keys can be exchanged in whole prompts, padded on the right, without cached keys. They can be moved
with a cache too, if it begins inside the context; a shift gets the positions of all keys so far.
This module knows nothing about the choice of orders, shifts and prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.errors import InputError, quoted
from repo_interp.interventions.replacing import finite_positions
from repo_interp.models.attention import RepositionedAttention, require_one_position
from repo_interp.models.cached import positions_of_keys
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import called_at, intervention, model_edit
from repo_interp.models.tables import change_index, position_table
from repo_interp.positions.biases import PositionBias
from repo_interp.positions.rotary import by_pair, expand_heads, pair_tables, turn

Shift = Callable[[Float[Tensor, "batch any token"]], Float[Tensor, "batch any token"]]
"""Function from positions of keys to their shifts, in positions; axes of length 1 broadcast.
"""
KEY_INDEX = 3
"""Index of `key_index` in the arguments of PositionLogits."""


@model_edit
def exchanged_keys(
    model: nn.Module, orders: Mapping[int, Int[Tensor, "batch token"]]
) -> Iterator[None]:
    """Exchange keys between tokens, before any norm and rotation, inside a `with` block.

    Quantities that a scheme computes from keys, such as CoPE's gates, change with them.

    Args:
        model: Repositioned model or bridge.
        orders: By layer, the token [prompt, token] whose key each token gets.

    Yields:
        None.

    Raises:
        InputError: The model lacks a layer, or an order is not a table of token indices or has
            another shape.
    """
    decoder = as_decoder(model)
    _require_by_layer(orders, "orders", "tokens [prompt, token] as whole numbers from 0", _is_order)

    def exchange(attention: RepositionedAttention, keys: Tensor) -> Tensor:
        order = orders[attention.layer_idx]
        if (len(keys), keys.shape[2]) != tuple(order.shape):
            raise InputError(
                f"an order of {tuple(order.shape)} prompts and tokens came to keys of "
                f"{(len(keys), keys.shape[2])}"
            )
        # [prompt, kv_head, token, d_head]: all heads of a layer exchange keys alike
        return keys.gather(2, order.to(keys.device)[:, None, :, None].expand_as(keys))

    with intervention(decoder), called_at(decoder, "keys", exchange, orders):
        yield


@model_edit
def moved_keys(model: nn.Module, shifts: Mapping[int, Shift]) -> Iterator[None]:
    """Move keys to the positions `z + shifts[layer](z)` inside a `with` block.

    With learned absolute positions the shift of layer 0 applies to the whole model; the moved index
    is rounded, and clipped to the table.

    Args:
        model: Repositioned model or bridge.
        shifts: By layer, a function from positions of keys to the shifts to add.

    Yields:
        None.

    Raises:
        InputError: The model lacks a layer, or a shift is not a function or has another shape; or,
            in the pass, the cache began outside the context.
    """
    decoder = as_decoder(model)
    _require_by_layer(shifts, "shifts", "functions of positions", callable)

    def turn_further(attention: RepositionedAttention, keys: Tensor) -> Tensor:
        if attention.frequencies is None:
            return keys
        positions = positions_of_keys(attention, keys)
        assert positions is not None
        require_one_position(attention, positions)
        shifted = _shift_of(shifts[attention.layer_idx], positions.detach())
        shifted = expand_heads(shifted, keys.shape[1])
        # 1.0, because the first rotation has scaled the keys already
        tables = pair_tables(by_pair(shifted), attention.frequencies_of_keys(), 1.0, keys.dtype)
        return turn(keys, *tables)

    with intervention(decoder) as undo, called_at(decoder, "rotated_keys", turn_further, shifts):
        for attention in decoder.attentions(shifts):
            shift = shifts[attention.layer_idx]
            if isinstance(attention.position_logits, PositionBias):
                undo.callback(
                    attention.position_logits.register_forward_pre_hook(_shift_index(shift)).remove
                )
            if attention.scheme == "learned" and attention.layer_idx == 0:
                undo.callback(
                    change_index(position_table(decoder.stack), _shifted_by(shift)).remove
                )
        yield


def has_keys_to_move(attention: RepositionedAttention) -> bool:
    """Return whether `moved_keys` has an effect in a layer; it has none in NoPE and plain CoPE.

    Args:
        attention: A layer.

    Returns:
        True if the logits depend on positions of keys.
    """
    by_distance = attention.frequencies is not None or isinstance(
        attention.position_logits, PositionBias
    )
    return by_distance or (attention.scheme == "learned" and attention.layer_idx == 0)


def _require_by_layer(given: Any, name: str, wanted: str, fits: Callable[[Any], bool]) -> None:
    if not isinstance(given, Mapping) or not all(fits(value) for value in given.values()):
        raise InputError(f"{name} are {wanted}, by layer; got {quoted(given)}")


def _is_order(given: Any) -> bool:
    whole = (
        isinstance(given, Tensor)
        and given.dtype == torch.int64
        and given.ndim == 2
        and given.numel() > 0
    )
    return whole and 0 <= int(given.min()) <= int(given.max()) < given.shape[1]


def _shift_of(shift: Shift, positions: Tensor) -> Tensor:
    """Return the shifts of keys by `shift` for their `positions`.

    Raises InputError if they are not finite numbers or have another shape.
    """
    shifts = finite_positions(shift(positions), positions, "the shifts of keys")
    # Positions may be shared by prompts or heads.
    pairs = zip(shifts.shape[::-1], positions.shape[::-1], strict=False)
    if shifts.ndim > positions.ndim or any(
        here != there and 1 not in (here, there) for here, there in pairs
    ):
        raise InputError(
            f"the shifts of keys are {list(shifts.shape)}; wanted an array that broadcasts to "
            f"{list(positions.shape)}"
        )
    return shifts


def _shift_index(shift: Shift) -> Callable:
    def hook(module: nn.Module, arguments: tuple) -> tuple:
        index = arguments[KEY_INDEX]
        # [prompt, 1 or head, key], as a Shift expects
        index = (index if index.ndim == 3 else index[:, None]).to(torch.float32)
        return (
            *arguments[:KEY_INDEX],
            index + _shift_of(shift, index),
            *arguments[KEY_INDEX + 1 :],
        )

    return hook


def _shifted_by(shift: Shift) -> Callable[[Tensor], Tensor]:
    # A Shift expects an axis of heads, which the index of the whole model lacks.
    return lambda index: index + _shift_of(shift, index[:, None].to(torch.float32))[:, 0]
