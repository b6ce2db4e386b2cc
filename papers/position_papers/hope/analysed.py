"""Which checkpoints HoPE's analysis of attention is made on (sec. 3): all with weights, but those that were trained to copy.

Knows nothing about what is measured, nor about experiments and rules: what is measured depends on the code here, not on theirs.
"""

from __future__ import annotations

from position_papers.kit.subjects import Subject


def is_analysed(subject: Subject) -> bool:
    """Whether the attention of a checkpoint is looked at: those trained to copy are there for their scores."""
    copies = subject.configuration is not None and subject.configuration.task == "copying"
    return subject.has_weights and not copies


def has_rope_alone(subject: Subject) -> bool:
    """Whether a checkpoint that is looked at has RoPE in every layer."""
    return is_analysed(subject) and set(subject.schemes) == {"rope"}
