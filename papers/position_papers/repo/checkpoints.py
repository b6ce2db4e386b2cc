"""The models that RePo's claims are about: the paper's, by scale, and ours, by name and by what
they can be asked.

A checkpoint of a task of needles is asked for needles of that task; one that reads text - trained
on no task of ours, or on text as an adapter on top of such a one - for RULER's, in its own tokens.
"""

from __future__ import annotations

from position_papers.kit import VARIANT, Scale, Subject, named_layout
from position_papers.training.trained import trained_configuration
from repo_interp.checkpoint_files.architectures import training_length
from repo_interp.checkpoint_files.stated import Checkpoint, read_base
from repo_interp.models.configuration import identify, make_config
from repo_interp.tasks import Prompt, niah
from repo_interp.tasks.reversal import SIZES, Reversal, reversal_prompts

GPT2 = Scale(4)
"""Of text reversal; appendix C."""
OLMO = Scale(16, 2048, 4096, "50B tokens, continuing 4T")
"""OLMo-2 1B; sec. 4.1."""
KEYED = tuple(
    f"niah_keys/{name}"
    for name in ("repo", "rope", "nope", "repo_from_0", "repo_from_2", "repo_from_3")
)
SMALL = tuple(
    f"niah/{name}"
    for name in (
        "repo",
        "rope",
        "nope",
        "r2n1",
        "n2r1",
        "repo_from_1",
        "repo_from_2",
        "repo_from_3",
    )
)
HAYSTACKS = (*KEYED, *SMALL)
"""Of our zoo, those that look for needles, first those of the task that needs positions."""
LEARNED = ("niah_keys/repo", "niah/repo_from_1", "language/repo")
"""Those with learned positions as the paper's models have them, whose prompts are long."""
NO_HAYSTACK = (
    "no checkpoints of one needle in a haystack with learned positions, RoPE and NoPE were given"
)
NO_LEARNED = (
    "no checkpoint with learned positions that was trained on needles in a "
    "haystack or on text was given"
)


def finds_needles(subject: Subject) -> bool:
    """Whether a checkpoint can be asked for needles: those of our tasks of needles, and those that
    read text.
    """
    return subject.has_weights and (subject.kind in ("niah_keys", "niah") or reads_text(subject))


def reads_text(subject: Subject) -> bool:
    """Whether questions in words can be put to a checkpoint: see above.

    Raises InputError where the base of an adapter is not there.
    """
    if subject.kind != "language" or not subject.has_weights:
        return subject.kind == "text"
    base = _base(subject)
    return base is not None and trained_configuration(base.directory) is None


def longest_trained(subject: Subject) -> int:
    """The tokens of the longest prompts that a checkpoint was trained on, or the one that it stands
    on as an adapter.
    """
    base = _base(subject)
    return max(subject.training_length, 0 if base is None else training_length(base.config))


def _base(subject: Subject) -> Checkpoint | None:
    known = identify(subject.path)
    return None if known.base is None else read_base(known.directory, known.base, make_config)


def needles_of(subject: Subject) -> str:
    """The task whose needles a checkpoint is asked for; "text" for RULER's."""
    return "text" if reads_text(subject) else subject.kind


def needles(
    subject: Subject, length: int, count: int, seed: int, answer: str = "reference"
) -> list[Prompt]:
    """`count` prompts of `length` that ask a checkpoint for needles; `answer` of RULER's as in
    `tasks.niah`.
    """
    if reads_text(subject):
        return niah(subject.tokenizer, VARIANT, length, count, seed, answer=answer)
    return subject.prompts(length, count, seed)


def reversals(subject: Subject, words: int, count: int, seed: int) -> list[Prompt]:
    """`count` texts of `words` words that a checkpoint is asked to reverse, in its own tokens where
    it reads text.
    """
    if reads_text(subject):
        return reversal_prompts(subject.tokenizer, words, count, seed)
    return subject.prompts(words, count, seed)


def reversal_of(subject: Subject) -> Reversal:
    """Text reversal as a checkpoint was trained on it; of one that was not, the paper's."""
    return subject.task if isinstance(subject.task, Reversal) else SIZES["paper"]


OF_PAPER = "RePo without a layer: from a third of the layers on, as in the paper."
"""What captions say of such legends."""


def called(subject: Subject) -> str:
    """What a legend calls a checkpoint: `named_layout` of its own."""
    return named_layout(subject.layout, len(subject.schemes))


def starting_layer(subject: Subject) -> int | None:
    """The layer from which all layers are RePo, those below RoPE; None for other layouts."""
    if "repo" not in subject.schemes:
        return None
    start = subject.schemes.index("repo")
    expected = ("rope",) * start + ("repo",) * (len(subject.schemes) - start)
    return start if subject.schemes == expected else None


def omits_positions(layout: str) -> bool:
    """Whether a layout, in short, is NoPE: in every layer, or - nope@10 - in those from one on, as
    where others learn theirs.
    """
    return layout.partition("@")[0] == "nope"


def can_mirror(subject: Subject) -> bool:
    """Whether a checkpoint reverses text with learned positions in a layer other than 0, which does
    not see what the words are for yet.
    """
    return subject.kind == "reversal" and _learns_above(subject)


def can_be_asked_to_mirror(subject: Subject) -> bool:
    """The same of one that was trained to reverse text, or reads text and can be asked to."""
    return can_mirror(subject) or (_learns_above(subject) and reads_text(subject))


def _learns_above(subject: Subject) -> bool:
    return any(layer > 0 for layer in subject.learned)


OTHER_INPUTS = {"repo_attention", "repo_convolution", "repo_index"}
"""Schemes that the paper tried and did not adopt; only R10 is judged on them."""


def learns_long_positions(subject: Subject) -> bool:
    """Whether a checkpoint has the paper's learned positions, from a third of the layers on where
    it is of our zoo, and prompts of any length.
    """
    start = starting_layer(subject)
    is_like_the_paper = (
        start is None or start == len(subject.schemes) // 3 or subject.name not in HAYSTACKS
    )
    return (
        learns_from_hidden_states(subject)
        and subject.kind in ("niah_keys", "niah", "language", "text")
        and is_like_the_paper
    )


def learns_from_hidden_states(subject: Subject) -> bool:
    """Whether f_phi sees the token's hidden state alone, as the paper's does."""
    return bool(subject.learned) and OTHER_INPUTS.isdisjoint(subject.schemes)
