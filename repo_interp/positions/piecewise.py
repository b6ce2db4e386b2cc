"""A ReLU network of one input, evaluated as a piecewise-linear function.

    f(x) = sum_n v_n relu(w_n x + b_n)
         = x sum_{n active at x} v_n w_n  +  sum_{n active at x} v_n b_n

Unit n switches at its knot -b_n / w_n. Between two neighboring knots the set of active units is
fixed, so f has one slope and one intercept for each of the (units + 1) segments, looked up by x.
For inputs [row, key] this takes a few [row, key] arrays, and none with an axis of units; values and
gradients equal those of the network. FIRE and CoPE-MLP evaluate such networks at every pair of
tokens.

This module knows nothing about positions.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def relu_network(
    inputs: Float[Tensor, "... row key"],
    hidden_weight: Float[Tensor, "unit"],
    hidden_bias: Float[Tensor, "unit"],
    output_weight: Float[Tensor, "... row unit"],
) -> Float[Tensor, "... row key"]:
    """Evaluate f at every input; differentiable in all arguments, leading axes broadcast.

    At a knot the derivative is that of the segment below.

    Args:
        inputs: x [..., row, key].
        hidden_weight: w [unit].
        hidden_bias: b [unit].
        output_weight: v of every row [..., row, unit].

    Returns:
        Values f(x) [..., row, key].
    """
    # The choice of the segment has no gradient, since f is continuous at its knots.
    with torch.no_grad():
        # A unit without weight never switches.
        knots = torch.where(hidden_weight == 0, torch.inf, -hidden_bias / hidden_weight)
        knots, order = knots.sort()
        segments = torch.searchsorted(knots, inputs.detach().contiguous())
        # The argsort of the order is the rank of every unit's knot.
        active = _active_units(hidden_weight, hidden_bias, order.argsort()).to(inputs.dtype)
    # One slope and one intercept for every segment.
    slopes = (output_weight * hidden_weight) @ active
    intercepts = (output_weight * hidden_bias) @ active
    leading = torch.broadcast_shapes(slopes.shape[:-1], segments.shape[:-1])
    segments = segments.expand(*leading, -1)
    # gather does not broadcast, but expanded views copy nothing.
    slopes, intercepts = slopes.expand(*leading, -1), intercepts.expand(*leading, -1)
    return slopes.gather(-1, segments) * inputs + intercepts.gather(-1, segments)


def _active_units(
    weight: Float[Tensor, "unit"], bias: Float[Tensor, "unit"], rank: Tensor
) -> Float[Tensor, "unit segment"]:
    """Return the active units of every segment.

    Segment s is above the s lowest knots; `rank` is the rank of a unit's knot.
    """
    segment = torch.arange(len(weight) + 1, device=weight.device)
    above_knot = rank[:, None] < segment
    # w x + b > 0 holds above the knot if w > 0, below it if w < 0, and depends on b if w = 0.
    rising, falling = (weight > 0)[:, None], (weight < 0)[:, None]
    constant = ((weight == 0) & (bias > 0))[:, None]
    return (rising & above_knot) | (falling & ~above_knot) | constant
