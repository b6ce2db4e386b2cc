"""Which tokens of a prompt are perturbed, and how: a share gamma of them, within distance l_max.

    transposed    disjoint pairs (j, j') with 1 <= |j - j'| <= l_max change places, until round(gamma n / 2) pairs have
    offset        round(gamma n) tokens are moved by a whole number from -l_max .. l_max without 0

The order in which tokens are drawn does not depend on gamma, so the tokens of a smaller share are among those of a larger one.
Where no free partner is within reach a token is passed over: near gamma = 1 a few tokens stay. Knows nothing about models.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int


def transposed(
    generator: np.random.Generator, movable: Int[np.ndarray, " token"], count: int, gamma: float, l_max: int
) -> Int[np.ndarray, " token"]:
    """An order of `count` tokens: token j becomes token order[j]. Only tokens of `movable` change places, in pairs."""
    order = np.arange(count)
    free = np.zeros(count, dtype=bool)
    free[movable] = True
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
            free[token] = True
            continue
        other = near[int(chance * len(near))]
        free[other] = False
        order[token], order[other] = other, token
        wanted -= 1
    return order


def offset(
    generator: np.random.Generator, movable: Int[np.ndarray, " token"], count: int, gamma: float, l_max: int
) -> Int[np.ndarray, " token"]:
    """By how much each of `count` tokens is moved, 0 for most; only tokens of `movable` are."""
    chosen = generator.permutation(movable)[: round(gamma * len(movable))]
    sizes = generator.integers(1, l_max + 1, len(movable))
    signs = generator.choice((-1, 1), len(movable))
    moves = np.zeros(count, dtype=np.int64)
    moves[chosen] = (sizes * signs)[: len(chosen)]
    return moves
