"""Changes of positions for experiments on effects: edits of a batch of prompts.

Each kind is a class of `interventions.edits` with the new positions in `become`. An edit applies to
the tokens of a prompt: padding does not change, and no mean or range includes it. This module knows
nothing about effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.interventions.position_edit import KINDS as EDITS
from repo_interp.interventions.position_edit import PositionEdit
from repo_interp.interventions.positions import positions_of
from repo_interp.interventions.replacing import token_table
from repo_interp.models.decoder import Decoder
from repo_interp.positions.assigners import TokenIndex
from repo_interp.positions.rotary import expand_heads
from repo_interp.tasks import Prompt

KINDS: dict[str, type[PositionEdit]] = {name: kind for name, kind in EDITS.items() if kind.become}
if TYPE_CHECKING:
    PositionChange = str
else:
    PositionChange = Literal[tuple(KINDS)]


@dataclass(frozen=True)
class Strength:
    """Strengths of the changes of positions."""

    scale: float = 0.5
    step: float = 1.0
    shift: float = 0.5
    span: str = ""
    """Span whose tokens are shifted; "": the needle, else the first span of a prompt."""
    seed: int = 0


@dataclass(frozen=True)
class EditedPrompts:
    """A batch of prompts, padded on the right, for which edits are made."""

    decoder: Decoder
    prompts: Sequence[Prompt]
    """All prompts of the experiment."""
    numbers: Sequence[int]
    """Numbers of the prompts in the batch."""
    strength: Strength

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each prompt."""
        return [len(self.prompts[number].tokens) for number in self.numbers]

    @cached_property
    def index(self) -> Int[Tensor, "prompt token"]:
        """The token index, including padding, which no edit changes."""
        return torch.arange(max(self.lengths)).repeat(len(self.lengths), 1)

    def edit(self, kind: str) -> PositionEdit:
        """Make the edit of one kind.

        Args:
            kind: One of `KINDS`.

        Returns:
            The edit, for the tokens of each prompt.

        Raises:
            InputError: A prompt does not have the parts that the kind needs.
        """
        tokens = token_table([range(length) for length in self.lengths])
        return replace(KINDS[kind].of_prompts(self), tokens=tokens)

    def require(self, kinds: Sequence[str]) -> None:
        """Check that the prompts have all parts that the kinds of changes need.

        Args:
            kinds: Kinds of changes.

        Raises:
            InputError: A prompt lacks the span or any span, or no other prompt is long enough to
                transplant from.
        """
        for number in self.numbers:
            for kind in kinds:
                if needs := KINDS[kind].needs:
                    getattr(self, needs)(number)

    def span(self, number: int) -> tuple[int, ...]:
        """Return the tokens that are shifted.

        Args:
            number: Index of the prompt.

        Returns:
            Tokens of the span, at least one.

        Raises:
            InputError: The prompt lacks the span.
        """
        spans, name = self.prompts[number].spans, self.strength.span
        # An answer depends on the needle; other prompts have their first span.
        chosen = name or ("needle" if "needle" in spans else next(iter(spans), ""))
        if not spans.get(chosen):
            named = repr(name) if name else "at all"
            raise InputError(
                f"prompt {number} has no span {named}, whose tokens are shifted; mark it, or "
                "leave the kind out"
            )
        return tuple(spans[chosen])

    def segments(self, number: int) -> list[int]:
        """Return the starts of segments: a segment starts at every span and at the token after it.

        Args:
            number: Index of the prompt.

        Returns:
            The first token of every segment.

        Raises:
            InputError: The prompt has no spans.
        """
        spans = self.prompts[number].spans
        if not spans:
            raise InputError(
                f"prompt {number} has no spans, which are its segments; mark some, or leave the "
                "kind out"
            )
        return [end for span in spans.values() if span for end in (min(span), max(span) + 1)] or [0]

    def partner(self, number: int) -> int:
        """Return the prompt that provides the positions for a prompt.

        The partner is the next other prompt, in cyclic order, with at least as many tokens.

        Args:
            number: Index of the prompt that is changed.

        Returns:
            Index of the partner.

        Raises:
            InputError: No other prompt has as many tokens.
        """
        prompts, tokens = self.prompts, self.prompts[number].tokens
        for other in (*range(number + 1, len(prompts)), *range(number)):
            # A prompt with the same tokens has the same positions, so it would change nothing.
            if len(prompts[other].tokens) >= len(tokens) and prompts[other].tokens != tokens:
                return other
        raise InputError(
            f"no other prompt has as many tokens as prompt {number}, to transplant positions "
            "from; leave the kind out"
        )

    def positions_of_partners(self) -> dict[int, Tensor]:
        """Record the positions of partners.

        Returns:
            By layer, positions of the partners' first tokens [prompt, head, token].

        Raises:
            InputError: A prompt has no partner.
        """
        rows = torch.zeros_like(self.index)
        for row, number, length in zip(rows, self.numbers, self.lengths, strict=True):
            # Causal: first tokens have the positions that they have in the whole prompt.
            row[:length] = torch.tensor(self.prompts[self.partner(number)].tokens[:length])
        return {
            # One row per head, since edits choose heads while layers may share rows.
            layer: expand_heads(positions, self.decoder.by_layer[layer].heads)
            for layer, positions in positions_of(self.decoder.module, rows).items()
        }


def default_kinds(decoder: Decoder) -> tuple[str, ...]:
    """Return the default kinds of changes for a model.

    Args:
        decoder: Decoder of the model.

    Returns:
        "frozen" and "permuted"; before them "linearised" if a layer learns positions.
    """
    # If all layers use the index, linearizing changes nothing and would cost passes.
    learned = not all(isinstance(assigner, TokenIndex) for assigner in decoder.assigners)
    return ("linearised", "frozen", "permuted") if learned else ("frozen", "permuted")
