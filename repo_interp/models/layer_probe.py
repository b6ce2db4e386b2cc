"""Properties of an attention layer, found with a few tokens of random content and no model pass.

    differs_by_pair      its assigner gives every rotary pair of a token a position
    logits_by_content    the logits that it adds depend on contents at the same positions, or its
                         transform depends on positions
    sample               attention inputs, for which measures state their gaps

A scheme is thus characterized by its parts and not by its name. This module knows no scheme.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from repo_interp.inputs import AttentionInputs
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.layer_pass import Content
from repo_interp.positions.assigners import MixedAssigner, RememberingAssigner, TokenIndex
from repo_interp.positions.logits import PositionLogits

TOKENS = 8
_SAME = 1e-5
"""Largest difference due to rounding, relative to the largest number."""
_NONE = torch.empty(0, 0, 0, 1)
"""Placeholder for tensors without prompts, and for positions by rotary pair."""
_ONE = _NONE[..., 0]
"""Placeholder for one position per token."""


@dataclass(frozen=True)
class Drawn:
    """Random content of one prompt of `TOKENS` tokens."""

    hidden: Float[Tensor, "1 token d_model"]
    queries: Float[Tensor, "1 head token d_head"]
    keys: Float[Tensor, "1 kv_head token d_head"]
    values: Float[Tensor, "1 kv_head token d_head"]

    @property
    def index(self) -> Int[Tensor, "1 token"]:
        """The token index."""
        return torch.arange(TOKENS, device=self.hidden.device)[None]

    @property
    def seen(self) -> Bool[Tensor, "1 1 row key"]:
        """The keys that a row sees: the same token and all earlier ones."""
        return torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device=self.hidden.device).tril()

    def positions(self, assigner: nn.Module | None) -> Tensor | None:
        """Assign positions.

        Args:
            assigner: Assigner of the layer; None: it has none.

        Returns:
            Positions of queries [1, any, token], or [1, any, token, component]; None without an
            assigner.
        """
        if assigner is None:
            return None
        found = self.assigned(assigner)
        return found[0] if isinstance(found, tuple) else found

    def assigned(self, assigner: nn.Module) -> Any:
        """Return the result of an assigner: positions, or a pair of positions of queries and keys.

        Args:
            assigner: Assigner of the layer.

        Returns:
            Positions.
        """
        if isinstance(assigner, RememberingAssigner):
            return assigner(self.hidden, self.index, None, self.seen)[0]
        return assigner(self.hidden, self.index)

    def added(self, scheme: PositionLogits, positions: Tensor | None) -> Tensor:
        """Compute the logits that a scheme adds.

        Args:
            scheme: Adds to the logits.
            positions: Positions of all tokens; None: the index.

        Returns:
            Logits [1, head, row, key].
        """
        places = self.index if positions is None else positions
        content = Content(self.queries, self.keys, self.values, scheme.gate_keys(self.hidden))
        return content.added(scheme, slice(None), places, places, self.seen, 1.0)


def draw_content(attention: RepositionedAttention, seed: int = 0) -> Drawn:
    """Draw reproducible random content for a layer.

    Args:
        attention: The layer, which determines sizes, device and precision.
        seed: Seed of the numbers.

    Returns:
        Content of one prompt.
    """
    known = (weight for weight in attention.module.parameters() if weight.is_floating_point())
    like = next((weight for weight in known if not weight.is_meta), torch.zeros(1))
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(1, *shape, generator=generator, device="cpu")
        return drawn.to(device=like.device, dtype=like.dtype)

    heads, kv_heads, width = attention.heads, attention.kv_heads, attention.d_head
    return Drawn(
        draw(TOKENS, attention.config.hidden_size),
        draw(heads, TOKENS, width),
        draw(kv_heads, TOKENS, width),
        draw(kv_heads, TOKENS, width),
    )


@torch.no_grad()
def differs_by_pair(attention: RepositionedAttention) -> bool:
    """Return whether positions of a token differ by rotary pair.

    Args:
        attention: A layer.

    Returns:
        Whether it does.
    """
    # Assigners with these bases have one position per token.
    if isinstance(attention.assigner, TokenIndex | MixedAssigner | None):
        return False
    positions = draw_content(attention).positions(attention.assigner)
    return positions is not None and positions.ndim == 4


@torch.no_grad()
def keys_apart(attention: RepositionedAttention) -> bool:
    """Return whether the assigner gives a token other positions as a key than as a query.

    Args:
        attention: A layer.

    Returns:
        Whether it does.
    """
    assigner = attention.assigner
    if assigner is None or isinstance(assigner, TokenIndex | MixedAssigner):
        return False
    return isinstance(draw_content(attention).assigned(assigner), tuple)


@torch.no_grad()
def logits_by_content(attention: RepositionedAttention) -> bool:
    """Return whether logits depend on contents and positions other than through the rotation.

    Args:
        attention: A layer.

    Returns:
        Whether two random contents at the same positions get different added logits, or the
        transform maps one content at two positions to different vectors.
    """
    if attention.transform is not None and attention.assigner is not None:
        drawn = draw_content(attention)
        positions = drawn.positions(attention.assigner)
        assert positions is not None
        here, there = (
            torch.cat(attention.transform(drawn.queries, drawn.keys, z), 1)
            for z in (positions, 1 + 2 * positions)
        )
        if differ(here, there):
            return True
    scheme = attention.position_logits
    if scheme is None or scheme.reads_content is not None:
        return scheme is not None and bool(scheme.reads_content)
    one, other = (draw_content(attention, seed) for seed in (0, 1))
    positions = one.positions(attention.assigner)
    found, expected = one.added(scheme, positions), other.added(scheme, positions)
    return differ(found, expected)


def differ(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ by more than rounding.

    Args:
        one: Any numbers.
        other: Numbers of the same shape.

    Returns:
        Whether some differ by more than 1e-5 of the largest.
    """
    size = torch.maximum(one.abs().max(), other.abs().max())
    return bool((one - other).abs().max() > _SAME * size)


def sample(attention: RepositionedAttention, by_axis: bool = False) -> AttentionInputs:
    """Make attention inputs that describe a layer: tensors are present or None, without values.

    Args:
        attention: A layer.
        by_axis: Whether tokens belong to an image, with positions by axis.

    Returns:
        The inputs of no prompt.
    """
    assigner, scheme = attention.assigner, attention.position_logits
    by_axis = by_axis and attention.rotation.axes is not None and isinstance(assigner, TokenIndex)
    of_pairs = by_axis or differs_by_pair(attention)
    gated = scheme is not None and scheme.has_gates
    return AttentionInputs(
        layer=attention.layer_idx,
        scheme=attention.scheme,
        queries=_NONE,
        keys=_NONE,
        positions=None if assigner is None else _NONE if of_pairs else _ONE,
        by_axis=by_axis,
        frequencies=attention.frequencies,
        attention_scaling=attention.attention_scaling,
        logit_scale=1.0,
        valid=_NONE,
        prompts=_NONE,
        learned=attention.learned,
        position_logits=None if scheme is None else lambda rows: _NONE,
        gate_features=_NONE if gated else None,
        reads_content=lambda: logits_by_content(attention),
        key_positions=_ONE if keys_apart(attention) else None,
    )
