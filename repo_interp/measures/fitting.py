"""Facts about an analysis for measures and experiments: layers, prompts, and their tokens.

    schemes     one per layer that is measured. A scheme of another package whose positions are
                the token index, or that has none, counts as "rope" where it rotates, else as "alibi"
    complete    all layers of the model, so that its predictions are those of the analysis

This module knows nothing about how an analysis is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xarray as xr

from repo_interp.positions.layouts import CONTEXTUAL, FIXED


class AnyPrompt(Protocol):
    """A prompt with the tokens that the model generated."""

    @property
    def generated(self) -> Sequence[int]:
        """Tokens that the model generated."""
        ...


@dataclass(frozen=True)
class Layers:
    """The kinds of positions in the measured layers."""

    schemes: tuple[str, ...] = ()
    """Schemes of the layers; empty: any."""
    complete: bool = True
    """Whether they are all layers of the model."""

    @property
    def fixed(self) -> bool:
        """Whether positions are the token index, or none, in all layers."""
        return bool(self.schemes) and set(self.schemes) <= set(FIXED)

    @property
    def learned(self) -> bool:
        """Whether some layer has positions that may follow the text."""
        return not self.schemes or bool(set(self.schemes) - {*FIXED, *CONTEXTUAL})

    @property
    def contextual(self) -> bool:
        """Whether some layer counts gates."""
        return bool(set(self.schemes) & set(CONTEXTUAL))


class PromptLabels(Protocol):
    """Tokens of the prompts of an analysis, as groups of a run show them."""

    def of_prompts(self, count: int | None = None) -> xr.Dataset:
        """Return tokens, spans and texts of the first `count` prompts; None: of all."""
        ...

    def of_next(self, group: xr.Dataset) -> xr.Dataset:
        """Return a group with the texts of its variable `next_token`."""
        ...
