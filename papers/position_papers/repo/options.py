"""The amount of measurement in RePo's experiments."""

from __future__ import annotations

from dataclasses import dataclass

from position_papers.kit import ScoreOptions
from repo_interp.errors import InputError
from repo_interp.values import Count, Seed


@dataclass(frozen=True)
class Options:
    """The amount of measurement.

    Raises InputError if a number allows no spread, or no comparison with random weights.
    """

    prompts: Count = 64
    """Prompts per length, for positions and attention."""
    control_prompts: Count = 64
    """Largest number of prompts for random weights and for lengths without a judged claim, since
    only their means are compared.
    """
    score_prompts: Count = 100
    """Prompts per scored test set."""
    controls: Count = 10
    """Number of random-weight controls: a value above all ten is above 95 % of them."""
    example_words: Count = 11
    """Number of words of the text whose positions are drawn (fig. 6)."""
    efficiency_layers: Count = 8
    efficiency_width: Count = 512
    efficiency_heads: Count = 8
    efficiency_context: Count = 256
    """Number of prompt tokens before the first timed token."""
    efficiency_tokens: Count = 32
    """Number of tokens generated in each timed round."""
    efficiency_rounds: Count = 15
    """Number of rounds for each of the two schemes, which alternate."""
    corpus: str = ""
    """A text file, a folder of text files, `pinned-prose` or `pinned-code`, which language models
    read instead of the text of their training.
    """
    batch_size: Count = 16
    seed: Seed = 0
    device: str = "cpu"

    @property
    def of_scores(self) -> ScoreOptions:
        """The options for scoring a task."""
        return ScoreOptions(
            self.score_prompts, batch_size=self.batch_size, seed=self.seed, device=self.device
        )

    def __post_init__(self) -> None:
        for name in ("prompts", "control_prompts", "score_prompts", "efficiency_rounds"):
            if getattr(self, name) < 2:
                raise InputError(f"{name} is {getattr(self, name)}; a spread needs at least 2")
        if self.controls < 1:
            raise InputError(
                f"controls is {self.controls}; wanted at least one twin with random weights"
            )
