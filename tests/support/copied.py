"""Parts of prompts: what stands at some places, and answers that are copied from their sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from repo_interp.tasks import Prompt


def picked(sequence: Sequence[Any], places: Iterable[int]) -> list[Any]:
    """What stands at these places."""
    return [sequence[place] for place in places]


def assert_copied(prompt: Prompt) -> None:
    """Every generated token is that of its source."""
    source = picked(prompt.tokens, prompt.attributes["source"])
    assert source == picked(prompt.tokens, prompt.generated)
