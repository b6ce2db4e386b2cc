"""The models that RePo's claims are about: the paper's, by scale, and ours, by name and by what they can be asked."""

from __future__ import annotations

from repo_interp.papers.kit.scale import Scale
from repo_interp.papers.kit.subjects import Subject

GPT2 = Scale(4)
"""Of text reversal; appendix C."""
OLMO = Scale(16, 2048, 4096, "50B tokens, continuing 4T")
"""OLMo-2 1B; sec. 4.1."""
KEYED = tuple(f"niah_keys/{name}" for name in ("repo", "rope", "nope", "repo_from_0", "repo_from_2", "repo_from_3"))
SMALL = tuple(f"niah/{name}" for name in ("repo", "rope", "nope", "r2n1", "n2r1", "repo_from_1", "repo_from_2", "repo_from_3"))
HAYSTACKS = (*KEYED, *SMALL)
"""Of our zoo, those that look for needles, first those of the task that needs positions."""
LEARNED = (*(name for name in HAYSTACKS if "/repo" in name), "language/repo")
"""Those with learned positions whose prompts are long."""
NO_HAYSTACK = "no checkpoints of one needle in a haystack with learned positions, RoPE and NoPE were given"
NO_LEARNED = "no checkpoint with learned positions that was trained on needles in a haystack or on text was given"


def finds_needles(subject: Subject) -> bool:
    """Whether a checkpoint can be asked for needles: those of our task, and those of no task of ours."""
    return subject.has_weights and subject.kind in ("niah_keys", "niah", "text")


def learns_long_positions(subject: Subject) -> bool:
    """Whether a checkpoint has learned positions and prompts of any length."""
    return bool(subject.learned) and subject.kind in ("niah_keys", "niah", "language", "text")
