"""Moves of tokens, keys and positions: one point of the grid of `perturbation`.

Position Generalization, sec. 4.1:

    text_order           tokens of the prompt change places
    feature_order        keys change places in the chosen layers; values and positions stay
    position_offset      positions of keys move by up to l_max in the chosen layers
    feature_placement    keys exchange their positions; the causal mask stays (ours)

A share gamma of the tokens moves within l_max, drawn independently for every prompt and layer, the
same for all heads. The first token (<bos>) and generated tokens (the answer) never move. The moved
tokens and their distances are drawn so:

    transposed    round(gamma n / 2) disjoint pairs (j, j') with 1 <= |j - j'| <= l_max change
                  places
    offset        round(gamma n) tokens move by a whole number from -l_max .. l_max without 0

The order of drawing does not depend on gamma, so a larger share includes the tokens of a smaller
one. A token without a free partner within reach is skipped: near gamma = 1 a few tokens stay. With
learned positions an offset in positions is not an offset in tokens: `offset_unit="range"`
multiplies it by (range of a head's positions) / (tokens of the prompt - 1), which is 1 for the
token index.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from repo_interp.interventions import Shift, exchanged_keys, moved_keys
from repo_interp.models.decoder import Decoder
from repo_interp.tasks import Prompt

Kind = Literal["text_order", "feature_order", "position_offset", "feature_placement"]
OffsetUnit = Literal["positions", "range"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Disturbance:
    """One point of the grid."""

    kind: str
    gamma: float
    l_max: int
    layers: tuple[int, ...]
    offset_unit: str = "positions"
    seed: int = 0


def disturbed(
    decoder: Decoder, prompts: Sequence[Prompt], numbers: Sequence[int], point: Disturbance
) -> tuple[list[Prompt], AbstractContextManager[None], np.ndarray]:
    """Perturb prompts at one point of the grid.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts side by side.
        numbers: Numbers of the prompts in the experiment. The draws depend on them, the seed, the
            kind, the layer and l_max.
        point: Kind, share and reach of the moves.

    Returns:
        The prompts to run, the context to run them in, padded on the right, and whether a token
        moves [prompt, layer, token].
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    # All layers see the same tokens, so text has one order.
    layers = (0,) if point.kind == "text_order" else point.layers
    # A copy, since a broadcast array cannot be written to.
    orders = np.broadcast_to(np.arange(longest), (len(layers), len(prompts), longest)).copy()
    offsets = np.zeros_like(orders)
    draw, into = (offset, offsets) if point.kind == "position_offset" else (transposed, orders)
    for row, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
        count = len(prompt.tokens)
        # Moving <bos> would disturb the sink, and the answer is judged.
        stays = np.zeros(count, dtype=bool)
        stays[[0, *prompt.generated]] = True
        movable = np.flatnonzero(~stays)
        for place, layer in enumerate(layers):
            generator = np.random.default_rng(
                # Without gamma, so that larger shares include smaller ones; crc32, since hash()
                # differs by process.
                [point.seed, zlib.crc32(point.kind.encode()), number, layer, point.l_max]
            )
            into[place, row, :count] = draw(generator, movable, count, point.gamma, point.l_max)
    # [prompt, layer, token]
    moved = ((orders != np.arange(longest)) | (offsets != 0)).swapaxes(0, 1)
    if point.kind == "text_order":
        changed = [
            dataclasses.replace(
                prompt,
                tokens=tuple(prompt.tokens[place] for place in order[: len(prompt.tokens)]),
                # The texts are in the old order.
                token_text=None,
            )
            for prompt, order in zip(prompts, orders[0], strict=True)
        ]
        return changed, nullcontext(), moved
    device = decoder.device
    by_layer = dict(zip(layers, torch.from_numpy(into).to(device), strict=True))
    if point.kind == "feature_order":
        return list(prompts), exchanged_keys(decoder.module, by_layer), moved
    # An exchange is a shift too, since the distance differs by head.
    shift_of: Callable[[Tensor], Shift] = _exchange
    if point.kind == "position_offset":
        counts = torch.tensor([len(prompt.tokens) for prompt in prompts], device=device)
        shift_of = partial(_shift, counts=counts, unit=point.offset_unit)
    shifts = {layer: shift_of(moves) for layer, moves in by_layer.items()}
    return list(prompts), moved_keys(decoder.module, shifts), moved


def _exchange(order: Tensor) -> Shift:
    def shift(positions: Tensor) -> Tensor:
        # All prompts may share positions (the token index), but moves differ by prompt.
        positions = positions.expand(order.shape[0], -1, -1)
        return positions.gather(-1, order[:, None].expand_as(positions)) - positions

    return shift


def _shift(offsets: Tensor, counts: Tensor, unit: str) -> Shift:
    def shift(positions: Tensor) -> Tensor:
        moves = offsets[:, None].to(positions)
        if unit == "positions":
            return moves
        positions = positions.expand(offsets.shape[0], -1, -1)
        # Zeros of the padding would increase the range of a prompt.
        padding = torch.arange(offsets.shape[1], device=positions.device) >= counts[:, None, None]
        reach = positions.masked_fill(padding, -torch.inf).amax(-1) - positions.masked_fill(
            padding, torch.inf
        ).amin(-1)
        # range / (tokens - 1) is the mean step of a head: an offset of one token is one step.
        return moves * (reach / (counts[:, None] - 1).clamp(min=1))[..., None]

    return shift


def transposed(
    generator: np.random.Generator,
    movable: Int[np.ndarray, " token"],
    count: int,
    gamma: float,
    l_max: int,
) -> Int[np.ndarray, " token"]:
    """Draw disjoint pairs of tokens that change places.

    Args:
        generator: Source of randomness.
        movable: Tokens that may move.
        count: Tokens of the prompt.
        gamma: Share of the movable tokens that move.
        l_max: Largest distance of a move.

    Returns:
        An order of `count` tokens: token j becomes token order[j].
    """
    order = np.arange(count)
    free = np.zeros(count, dtype=bool)
    free[movable] = True
    # Drawn for all tokens, used or not, so that gamma does not change other draws.
    wanted, partners = round(gamma * len(movable) / 2), generator.random(len(movable))
    for token, chance in zip(generator.permutation(movable), partners, strict=True):
        if wanted == 0:
            break
        if not free[token]:
            continue
        free[token] = False
        first = max(0, token - l_max)
        near = first + np.flatnonzero(free[first : token + l_max + 1])
        if not len(near):
            # No free partner within reach, so the token stays free as a partner of later ones.
            free[token] = True
            continue
        # A uniform number selects one of any number of candidates.
        other = near[int(chance * len(near))]
        free[other] = False
        order[token], order[other] = other, token
        wanted -= 1
    return order


def offset(
    generator: np.random.Generator,
    movable: Int[np.ndarray, " token"],
    count: int,
    gamma: float,
    l_max: int,
) -> Int[np.ndarray, " token"]:
    """Draw offsets of tokens.

    Args:
        generator: Source of randomness.
        movable: Tokens that may move.
        count: Tokens of the prompt.
        gamma: Share of the movable tokens that move.
        l_max: Largest offset.

    Returns:
        The offset of every token, in tokens; 0 for most.
    """
    chosen = generator.permutation(movable)[: round(gamma * len(movable))]
    # For all tokens, so that a token's offset does not depend on the number of chosen tokens
    sizes = generator.integers(1, l_max + 1, len(movable))
    signs = generator.choice((-1, 1), len(movable))
    moves = np.zeros(count, dtype=np.int64)
    moves[chosen] = (sizes * signs)[: len(chosen)]
    return moves
