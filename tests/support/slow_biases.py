"""What schemes add to a logit by its formula, one number at a time."""

from __future__ import annotations

import math

import torch

from repo_interp.positions.biases import FIRE, ALiBi, KerpleLog
from repo_interp.positions.logits import PositionLogits


@torch.no_grad()
def slow_bias(scheme: PositionLogits, head: int, query: float, key: float) -> float:
    """One number of B; `query` and `key` are positions, FIRE's threshold starts at 5."""
    distance = abs(query - key)
    if isinstance(scheme, ALiBi):
        return -(2.0 ** (-8.0 * (head + 1) / scheme.heads)) * distance
    if isinstance(scheme, KerpleLog):
        scale, rate = math.exp(scheme.log_scale[head]), math.exp(scheme.log_rate[head])
        return -scale * math.log(1.0 + rate * distance)
    assert isinstance(scheme, FIRE)
    curvature = abs(float(scheme.curvature))
    threshold = abs(float(scheme.threshold_factor) * 5.0)
    normaliser = math.log(curvature * max(query, threshold) + 1.0) + 1e-6
    progress = torch.tensor([math.log(curvature * distance + 1.0) / normaliser])
    return float(scheme.output(torch.relu(scheme.hidden(progress)))[head])
