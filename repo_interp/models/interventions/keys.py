"""Exchange or move keys alone, while a context lasts; queries and values stay.

    exchanged_keys    k_j <- k_order(j)        features change places; values and positions stay
    moved_keys        z_j <- z_j + shift_j(z)  for keys alone; the query keeps its own position

A rotated key is turned by theta_r shift_j once more, which is exact: rotations add up. Schemes that add a function of the distance
are given the moved position of the key. Layers without positions (NoPE) and contextual ones (CoPE) have nothing to move; a learned
absolute position is an embedding, so its token - query, key and value - gets another position's vector, at the model's input.

Whole prompts only, padded on the right, without cached keys. Knows nothing about how orders, shifts and prompts are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.interventions.lasting import lasting
from repo_interp.models.interventions.replacing import finite_positions
from repo_interp.models.reposition import attentions_of, decoder_of
from repo_interp.models.tables import change_index, table_of
from repo_interp.positions.biases import PositionBias
from repo_interp.positions.rotary import expand_heads, rotation_tables, turn

Shift = Callable[[Float[Tensor, "batch any token"]], Float[Tensor, "batch any token"]]
"""What is added to the positions of keys, in positions, given those positions; axes of 1 broadcast."""
KEY_INDEX = 3
"""Place of `key_index` among the arguments of PositionLogits."""


@contextmanager
def exchanged_keys(model: nn.Module, orders: Mapping[int, Int[Tensor, "batch token"]]) -> Iterator[None]:
    """In the layers named by `orders`, the key at token j is that of token orders[layer][prompt, j], before any norm and rotation.

    What a scheme reads of keys (CoPE's gates) changes with them. Raises InputError for a layer that the model lacks.
    """
    with lasting(model) as hooks:
        for attention in attentions_of(model, orders):
            order = orders[attention.layer_idx]
            _attach(hooks, attention.sites.keys.register_forward_hook(_exchange(order)))
        yield


@contextmanager
def moved_keys(model: nn.Module, shifts: Mapping[int, Shift]) -> Iterator[None]:
    """In the layers named by `shifts`, keys stand at z + shifts[layer](z). Raises InputError for a layer that the model lacks.

    With learned absolute positions the shift of layer 0 acts, once for the whole model; an index is rounded, and kept in the table.
    """
    with lasting(model) as hooks:
        for attention in attentions_of(model, shifts):
            shift = shifts[attention.layer_idx]
            if attention.frequencies is not None:
                _turn_keys(hooks, attention, shift)
            if isinstance(attention.position_logits, PositionBias):
                _attach(hooks, attention.position_logits.register_forward_pre_hook(_shift_index(shift)))
            if attention.scheme == "learned" and attention.layer_idx == 0:
                _attach(hooks, change_index(table_of(decoder_of(model)), _shifted_by(shift)))
        yield


def has_keys_to_move(attention: RepositionedAttention) -> bool:
    """Whether `moved_keys` changes anything where this layer is named: not in NoPE, nor with CoPE's positions alone."""
    by_distance = attention.frequencies is not None or isinstance(attention.position_logits, PositionBias)
    return by_distance or (attention.scheme == "learned" and attention.layer_idx == 0)


def _exchange(order: Int[Tensor, "batch token"]) -> Callable:
    def hook(module: nn.Module, arguments: tuple, keys: Tensor) -> Tensor:
        if (len(keys), keys.shape[2]) != tuple(order.shape):
            raise InputError(f"an order of {tuple(order.shape)} prompts and tokens came to keys of {(len(keys), keys.shape[2])}")
        return keys.gather(2, order.to(keys.device)[:, None, :, None].expand_as(keys))

    return hook


def _turn_keys(hooks: ExitStack, attention: RepositionedAttention, shift: Shift) -> None:
    assigned: list[Tensor] = []

    def remember(module: nn.Module, arguments: tuple, positions: Tensor) -> None:
        assigned[:] = [positions]

    def turn_further(module: nn.Module, arguments: tuple, keys: Tensor) -> Tensor:
        assert attention.frequencies is not None
        shifted = _shift_of(shift, assigned.pop().detach())
        cosines, sines = rotation_tables(shifted, attention.frequencies, 1.0, keys.dtype)
        return turn(keys, expand_heads(cosines, keys.shape[1]), expand_heads(sines, keys.shape[1]))

    _attach(hooks, attention.sites.positions.register_forward_hook(remember))
    _attach(hooks, attention.sites.rotated_keys.register_forward_hook(turn_further))


def _shift_of(shift: Shift, positions: Tensor) -> Tensor:
    """What `shift` adds to `positions` of keys. Raises InputError where that is not finite, or no numbers."""
    return finite_positions(shift(positions), positions, "the shifts of keys")


def _shift_index(shift: Shift) -> Callable:
    def hook(module: nn.Module, arguments: tuple) -> tuple:
        index = arguments[KEY_INDEX]
        index = (index if index.ndim == 3 else index[:, None]).to(torch.float32)
        return (*arguments[:KEY_INDEX], index + _shift_of(shift, index), *arguments[KEY_INDEX + 1 :])

    return hook


def _shifted_by(shift: Shift) -> Callable[[Tensor], Tensor]:
    return lambda index: index + _shift_of(shift, index[:, None].to(torch.float32))[:, 0]


def _attach(hooks: ExitStack, handle: Any) -> None:
    hooks.callback(handle.remove)
