"""A ReLU network of one number, evaluated as the piecewise-linear function that it is.

    f(x) = sum_n v_n relu(w_n x + b_n)
         = x sum_{n active at x} v_n w_n  +  sum_{n active at x} v_n b_n

Unit n switches at its knot -b_n / w_n. Between two neighbouring knots the set of active units is
fixed, so f needs one slope and one intercept per segment: (units + 1) of them, looked up by x. A
map of x that is [row, key] then costs a few [row, key] arrays, never one with an axis of units;
values and gradients are those of the network. FIRE and CoPE-MLP evaluate such networks at every
pair of tokens.

Knows nothing about positions.
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

    At a knot the derivative of the segment below is taken.

    Args:
        inputs: x [..., row, key].
        hidden_weight: w [unit].
        hidden_bias: b [unit].
        output_weight: v of every row [..., row, unit].

    Returns:
        f(x) [..., row, key].
    """
    # Which segment an input lies in has no gradient: f is continuous at its knots
    with torch.no_grad():
        # A unit without weight never switches.
        knots = torch.where(hidden_weight == 0, torch.inf, -hidden_bias / hidden_weight)
        knots, order = knots.sort()
        segments = torch.searchsorted(knots, inputs.detach().contiguous())
        # argsort of the order is the rank of every unit's knot
        active = _active_units(hidden_weight, hidden_bias, order.argsort()).to(inputs.dtype)
    # One slope and one intercept for every segment.
    slopes = (output_weight * hidden_weight) @ active
    intercepts = (output_weight * hidden_bias) @ active
    leading = torch.broadcast_shapes(slopes.shape[:-1], segments.shape[:-1])
    segments = segments.expand(*leading, -1)
    # gather does not broadcast; expanded views copy nothing
    slopes, intercepts = slopes.expand(*leading, -1), intercepts.expand(*leading, -1)
    return slopes.gather(-1, segments) * inputs + intercepts.gather(-1, segments)


def _active_units(
    weight: Float[Tensor, "unit"], bias: Float[Tensor, "unit"], rank: Tensor
) -> Float[Tensor, "unit segment"]:
    """Which units are active where.

    Segment s lies above the s lowest knots; `rank`: a unit's place.
    """
    segment = torch.arange(len(weight) + 1, device=weight.device)
    above_knot = rank[:, None] < segment
    # w x + b > 0 holds above the knot for w > 0, below it for w < 0, and by b alone for w = 0
    rising, falling = (weight > 0)[:, None], (weight < 0)[:, None]
    constant = ((weight == 0) & (bias > 0))[:, None]
    return (rising & above_knot) | (falling & ~above_knot) | constant
