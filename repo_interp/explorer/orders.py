"""Order of the positions of one prompt by distance, head by head.

    order(d) = 2 share(z_{i+d} > z_i) - 1 over i      1: the later token always has the higher position
                                                      of two, -1: the lower one, 0: no order

Distances d are powers of two that fit three times into the prompt (`measures.kernels.order`). Heads
whose positions are the token index are left out, because their order is always 1.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int

from repo_interp.measures.kernels.order import DOUBLING, FEWEST, order_by_distance
from repo_interp.measures.kernels.rounding import equal_within


def orders(
    positions: Float[np.ndarray, "layer head token"],
) -> tuple[Int[np.ndarray, " distance"], Float[np.ndarray, "layer head distance"]]:
    """Compute the order by distance of every head.

    Args:
        positions: Positions of the tokens; NaN in layers without any.

    Returns:
        Distances in tokens, and orders; NaN for heads without positions and with the token index.
        There is no distance if no head has positions other than the token index.
    """
    *shape, count = positions.shape
    distances = DOUBLING[count >= FEWEST * DOUBLING]
    rows, places = np.unique(positions.reshape(-1, count), axis=0, return_inverse=True)
    own = np.isfinite(rows).all(1) & (rows != np.arange(count)).any(1)
    if not own.any():
        distances = distances[:0]
    found = np.full((len(rows), len(distances)), np.nan)
    if len(distances):
        values = torch.from_numpy(np.ascontiguousarray(rows[own], dtype=np.float64))
        present = torch.ones(count, dtype=torch.bool)
        found[own] = order_by_distance(values, present, distances, equal_within(values)).numpy()
    return distances, found[places.ravel()].reshape(*shape, len(distances))
