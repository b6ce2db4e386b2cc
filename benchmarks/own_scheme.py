"""A position scheme of a file, as users write one: RoPE whose frequencies every head learns.

repo-interp train reversal --scheme benchmarks/own_scheme.py:build
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from repo_interp.models.attention import SchemeParts


class HeadFrequencies(nn.Module):
    """Phases of every head's own frequencies."""

    def __init__(self, heads: int, frequencies: Tensor):
        super().__init__()
        self.log = nn.Parameter(frequencies.log().repeat(heads, 1))

    def forward(self, hidden_states: Tensor, index: Tensor) -> Tensor:
        """Return phases [prompt, head, token, pair] in radians."""
        return index[:, None, :, None].to(self.log.dtype) * self.log.exp()[None, :, None]


def build(builder: Any, rotation: Any, d_head: int) -> SchemeParts:
    """Build the scheme of a layer."""
    phases = HeadFrequencies(rotation.kv_heads, rotation.frequencies)
    return SchemeParts("own_scheme", phases, torch.ones(d_head // 2))
