"""The models that RePo's claims are about: the paper's, by scale, and ours, by name and by what they can be asked."""

from __future__ import annotations

from repo_interp.papers.kit.scale import Scale
from repo_interp.papers.kit.subjects import Subject

GPT2 = Scale(4)
"""Of text reversal; appendix C."""
OLMO = Scale(16, 2048, 4096, "50B tokens, continuing 4T")
"""OLMo-2 1B; sec. 4.1."""
STARTS = ("repo_from_1", "repo_from_2", "repo_from_3")
_COMPARED = ("repo", "rope", "nope", *STARTS)
HAYSTACKS = (*(f"{task}/{name}" for task in ("niah_keys", "niah") for name in _COMPARED), "niah/r2n1", "niah/n2r1")
"""Of our zoo, those that look for needles, first those of the task that needs positions."""
LEARNED = (*(f"{task}/{name}" for task in ("niah_keys", "niah") for name in ("repo", *STARTS)), "language/repo")
"""Those with learned positions whose prompts are long."""
NO_HAYSTACK = "no checkpoints of one needle in a haystack with learned positions, RoPE and NoPE were given"
NO_LEARNED = "no checkpoint with learned positions that was trained on needles in a haystack or on text was given"


def finds_needles(subject: Subject) -> bool:
    """Whether a checkpoint can be asked for needles: those of our task, and those of no task of ours."""
    return subject.has_weights and subject.kind in ("niah_keys", "niah", "text")


def learns_long_positions(subject: Subject) -> bool:
    """Whether a checkpoint has learned positions and prompts of any length."""
    return bool(subject.learned) and subject.kind in ("niah_keys", "niah", "language", "text")
