"""How much is measured of CoPE's experiments."""

from __future__ import annotations

from dataclasses import dataclass

from position_papers.kit.scores import ScoreOptions
from repo_interp.errors import InputError
from repo_interp.values import Count


@dataclass(frozen=True)
class Options(ScoreOptions):
    """How much is measured: prompts to score, and texts whose gates are measured. Raises InputError for too few of them."""

    counting_count: Count = 2000
    """Prompts of every test set of counting."""
    gate_texts: Count = 32
    """Texts whose gates are measured."""
    controls: Count = 10
    """Twins with random weights of every checkpoint whose gates are measured."""
    draws: Count = 40
    """Random choices of separators, and shuffled segments, of each text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate_texts < 4:
            raise InputError(f"gate_texts is {self.gate_texts}; wanted at least 4, two to choose a head on and two to judge it")
        if self.counting_count < 2:
            raise InputError(f"counting_count is {self.counting_count}; wanted at least 2 prompts, for an error")
