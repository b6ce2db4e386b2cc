"""Rotation of queries and keys by real-valued positions (RoPE; RePo eq. 3 and 7).

    (x_r, x_r') -> (x_r cos(theta_r z) - x_r' sin(theta_r z),
                    x_r' cos(theta_r z) + x_r sin(theta_r z))

x_r and x_r' are dimensions r and r + d_head/2 of a head (half-split pairs, component r = 0 is the
fastest), theta_r is the frequency of the component in radians per position, and z is the position
of the token: its index for RoPE, the output of f_phi for RePo. A token may also have a position z_r
for every pair. Cosines and sines are scaled by `attention_scaling` (YaRN's), so logits are scaled
by its square. If only a part of a head rotates, the scaling is 1 for the other pairs.

Tables have d_head/2 columns, never d_head. This module knows nothing about models and the
assignment of positions.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

_SHORT, _FEW, _SHARED = 32, 1 << 18, 8
"""Limits for whole tables in `turn`: largest width and number of features, and least number of
features that share an entry of a table.
"""


def rotate(
    features: Float[Tensor, "... token d_head"],
    positions: Float[Tensor, "... token"],
    frequencies: Float[Tensor, "component"],
    attention_scaling: float | Float[Tensor, "*any component"] = 1.0,
) -> Float[Tensor, "... token d_head"]:
    """Rotate features by positions; leading axes broadcast, and positions get gradients.

    Angles are computed in float32 (float64 for float64 features), as the released models do;
    cosines and sines are then cast to the features' dtype.

    Args:
        features: Queries or keys [..., token, d_head], half-split.
        positions: [..., token].
        frequencies: Radians per position [component].
        attention_scaling: Factor of cosines and sines, a number or one per component.

    Returns:
        Rotated features, in their dtype.
    """
    cosines, sines = rotation_tables(
        positions, frequencies, attention_scaling, dtype=features.dtype
    )
    return turn(features, cosines, sines)


def turn(
    features: Float[Tensor, "... token d_head"],
    cosines: Float[Tensor, "... token component"],
    sines: Float[Tensor, "... token component"],
) -> Float[Tensor, "... token d_head"]:
    """Rotate half-split pairs by angles given as half tables.

    Args:
        features: Queries or keys [..., token, d_head].
        cosines: [..., token, component].
        sines: [..., token, component].

    Returns:
        Rotated features.
    """
    # Llama's order; attention converts interleaved pairs (GPT-J) before the call.
    first, second = features.chunk(2, dim=-1)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat(
            (first * cosines - second * sines, second * cosines + first * sines), dim=-1
        )
    # Computes the sums in one tensor, since temporary tensors would take most of the time.
    leading = np.broadcast_shapes(features.shape[:-1], cosines.shape[:-1])
    dtype = torch.result_type(features, cosines)
    turned = torch.empty((*leading, features.shape[-1]), dtype=dtype, device=features.device)
    alike = turned.shape == features.shape and dtype == features.dtype == cosines.dtype
    few = _SHARED * cosines.numel() <= features.numel() <= _FEW
    if alike and few and features.shape[-1] <= _SHORT and features.device.type == "cpu":
        # Halves of short rows are slow. x cos + y (-sin) gives the same bits.
        swapped = features.roll(features.shape[-1] // 2, -1).mul_(torch.cat((-sines, sines), -1))
        return torch.mul(features, torch.cat((cosines, cosines), -1), out=turned).add_(swapped)
    x, y = turned.chunk(2, dim=-1)
    torch.mul(first, cosines, out=x).sub_(second * sines)
    torch.mul(second, cosines, out=y).add_(first * sines)
    return turned


def rotation_tables(
    positions: Float[Tensor, "... token"],
    frequencies: Float[Tensor, "component"],
    attention_scaling: float | Float[Tensor, "*any component"],
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "... token component"], Float[Tensor, "... token component"]]:
    """Compute cosines and sines of theta_r z, times `attention_scaling`.

    Args:
        positions: [..., token].
        frequencies: Radians per position [component].
        attention_scaling: A number, or one per component.
        dtype: Precision of the tables; angles are computed in float32 or float64.

    Returns:
        Cosines and sines [..., token, component].
    """
    return pair_tables(positions[..., None], frequencies, attention_scaling, dtype)


def pair_tables(
    positions: Float[Tensor, "... token any"],
    frequencies: Float[Tensor, "component"],
    attention_scaling: float | Float[Tensor, "*any component"],
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "... token component"], Float[Tensor, "... token component"]]:
    """Compute cosines and sines of theta_r z_r, times `attention_scaling`.

    Args:
        positions: [..., token, component], or [..., token, 1] if all pairs share a position.
        frequencies: Radians per position [component], or [row, 1, component] by head. If positions
            have another number of rows, heads share the rows of the smaller number.
        attention_scaling: A number, or one per component.
        dtype: Precision of the tables; angles are computed in float32 or float64.

    Returns:
        Cosines and sines [..., token, component].
    """
    # Half precision would round angles at long positions by whole turns.
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    of_rows = frequencies.ndim == 3 and positions.ndim == 4
    if of_rows and 1 < len(frequencies) < positions.shape[1]:
        frequencies = expand_heads(frequencies[None], positions.shape[1])
    angles = positions.to(exact) * frequencies.to(device=positions.device, dtype=exact)
    tables = angles.cos(), angles.sin()
    # The scaling applies to cosines and sines, not to angles.
    if isinstance(attention_scaling, Tensor):
        tables = tuple(table * attention_scaling.to(angles) for table in tables)
    elif attention_scaling != 1:
        tables = tuple(table * attention_scaling for table in tables)
    cosines, sines = tables
    return cosines.to(dtype), sines.to(dtype)


def by_pair(
    positions: Float[Tensor, "batch any token *component"],
) -> Float[Tensor, "batch any token any"]:
    """Add an axis of pairs to the positions of a layer, for `pair_tables`.

    Args:
        positions: One per token [batch, any, token], or one per token and pair
            [batch, any, token, component].

    Returns:
        Positions [batch, any, token, 1] or [batch, any, token, component].
    """
    # An axis of length 1 broadcasts against the frequencies.
    return positions if positions.ndim == 4 else positions[..., None]


def expand_heads(per_head: Tensor, heads: int) -> Tensor:
    """Repeat axis 1 so that it has one entry per query head.

    Args:
        per_head: Tensor whose axis 1 has length 1 or the number of key-value heads or heads;
            consecutive heads share a key-value head.
        heads: Number of query heads.

    Returns:
        The tensor with axis 1 of size `heads`.

    Raises:
        ValueError: The heads cannot share the entries evenly.
    """
    present = per_head.shape[1]
    if heads % present:
        raise ValueError(f"{heads} heads cannot share {present} entries evenly")
    # repeat_interleave, not repeat, since consecutive heads share a key-value head
    return per_head if present == heads else per_head.repeat_interleave(heads // present, dim=1)


def keep_components(
    features: Float[Tensor, "... d_head"], kept: Bool[Tensor, "component"]
) -> Float[Tensor, "... d_head"]:
    """Take components out of the dot product: set both their halves to 0.

    One of queries and keys is enough. `logit_scale` stays 1/sqrt(d_head) of the full head.

    Args:
        features: Queries or keys [..., d_head].
        kept: Components that stay [component].

    Returns:
        Features of the same shape.

    Raises:
        ValueError: `features` are not twice as wide as `kept`.
    """
    if features.shape[-1] != 2 * len(kept):
        raise ValueError(
            f"{len(kept)} components need features of width {2 * len(kept)}; got "
            f"{features.shape[-1]}"
        )
    # Half-split: component r is dimensions r and r + d_head / 2
    return features * torch.cat((kept, kept)).to(features.dtype)
