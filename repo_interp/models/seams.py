"""The points inside attention where a listener may look at a tensor or exchange it.

Without a bridge every seam is the identity; the bridge puts TransformerLens' HookPoints there. Scores and patterns are made one by
one only while somebody listens to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn


@dataclass
class Seams:
    """One module a seam; each is called with the tensor named and its result goes on."""

    queries: nn.Module = field(default_factory=nn.Identity)
    """After any QK-norm, before rotation, in the layout in which the norm works."""
    keys: nn.Module = field(default_factory=nn.Identity)
    positions: nn.Module = field(default_factory=nn.Identity)
    """[batch, P, token], P in {1, key-value heads, heads}."""
    cosines: nn.Module = field(default_factory=nn.Identity)
    """[batch, P, token, d_head/2]."""
    sines: nn.Module = field(default_factory=nn.Identity)
    rotated_queries: nn.Module = field(default_factory=nn.Identity)
    """[batch, head, token, d_head]."""
    rotated_keys: nn.Module = field(default_factory=nn.Identity)
    position_logits: nn.Module = field(default_factory=nn.Identity)
    """[batch, head, query, key]: what the scheme adds to the logits."""
    scores: nn.Module = field(default_factory=nn.Identity)
    """[batch, head, query, key], before the softmax, masked."""
    pattern: nn.Module = field(default_factory=nn.Identity)
    """[batch, head, query, key], after the softmax."""

    @property
    def maps_are_watched(self) -> bool:
        """Whether somebody listens to scores or pattern, so that they must be made."""
        return any(seam._forward_hooks or seam._backward_hooks for seam in (self.scores, self.pattern))
