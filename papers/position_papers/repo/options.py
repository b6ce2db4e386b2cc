"""How much is measured of RePo's experiments."""

from __future__ import annotations

from dataclasses import dataclass

from position_papers.kit import ScoreOptions
from repo_interp.errors import InputError
from repo_interp.values import Count, Seed


@dataclass(frozen=True)
class Options:
    """How much is measured.

    Raises InputError for what allows no spread, or no comparison with random weights.
    """

    prompts: Count = 64
    """Per length, for positions and attention."""
    control_prompts: Count = 64
    """At most so many for random weights and for lengths that no claim is judged at: only their
    means are compared.
    """
    score_prompts: Count = 100
    """Per test set that is scored."""
    controls: Count = 10
    """Random-weight controls: 95 % of ten are exceeded by what is above all of them."""
    example_words: Count = 11
    """Length of the text whose positions are drawn (fig. 6)."""
    efficiency_layers: Count = 8
    efficiency_width: Count = 512
    efficiency_heads: Count = 8
    efficiency_context: Count = 256
    """Tokens of the prompt before the first timed one."""
    efficiency_tokens: Count = 32
    """Tokens generated in each timed round."""
    efficiency_rounds: Count = 15
    """Rounds of both schemes, in turns."""
    corpus: str = ""
    """A text file, a folder of them, or pinned-prose or pinned-code, that language models read
    instead of what they were trained on.
    """
    batch_size: Count = 16
    seed: Seed = 0
    device: str = "cpu"

    @property
    def of_scores(self) -> ScoreOptions:
        """Options of scoring a task."""
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
