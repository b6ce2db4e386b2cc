"""Which checkpoints HoPE's analysis of attention is made on (sec. 3): all with weights, but those that were trained to copy.

Knows nothing about what is measured.
"""

from __future__ import annotations

from repo_interp.papers.kit.experiment import Needs, each
from repo_interp.papers.kit.scores import of_tasks
from repo_interp.papers.kit.subjects import Subject


def is_analysed(subject: Subject) -> bool:
    """Whether the attention of a checkpoint is looked at: those trained to copy are there for their scores."""
    return subject.has_weights and not of_tasks("copying")(subject)


def has_rope_alone(subject: Subject) -> bool:
    """Whether a checkpoint that is looked at has RoPE in every layer."""
    return is_analysed(subject) and set(subject.schemes) == {"rope"}


NEEDS_ROPE = Needs(each(has_rope_alone), "no checkpoint with RoPE in every layer was given", ("language/rope",), "rope")
