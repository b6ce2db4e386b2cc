"""The models for RePo's claims: the scales of the paper's models, and the selection of ours by name
and by the tasks that they can do.

A checkpoint that was trained on a needle task gets prompts of that task. A checkpoint that reads
text gets prompts of RULER, encoded by its tokenizer: it was trained on none of our tasks, or is an
adapter of such a checkpoint that was trained on text.
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
"""The paper's model of text reversal (appendix C)."""
OLMO = Scale(16, 2048, 4096, "50B tokens, continuing 4T")
"""The paper's OLMo-2 1B (sec. 4.1)."""
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
"""The zoo's models of needle tasks, starting with the task that needs positions."""
LEARNED = ("niah_keys/repo", "niah/repo_from_1", "language/repo")
"""Models with learned positions as in the paper, and with long prompts."""
NO_HAYSTACK = (
    "no checkpoints of one needle in a haystack with learned positions, RoPE and NoPE were given"
)
NO_LEARNED = (
    "no checkpoint with learned positions that was trained on needles in a "
    "haystack or on text was given"
)


def finds_needles(subject: Subject) -> bool:
    """Whether a checkpoint can search for needles: it was trained on one of our needle tasks, or
    reads text.
    """
    return subject.has_weights and (subject.kind in ("niah_keys", "niah") or reads_text(subject))


def reads_text(subject: Subject) -> bool:
    """Whether a checkpoint can read questions in words (see the module).

    Raises InputError when the base of an adapter is missing.
    """
    if subject.kind != "language" or not subject.has_weights:
        return subject.kind == "text"
    base = _base(subject)
    return base is not None and trained_configuration(base.directory) is None


def longest_trained(subject: Subject) -> int:
    """The number of tokens of the longest prompts in the training of a checkpoint or, if it is an
    adapter, of its base.
    """
    base = _base(subject)
    return max(subject.training_length, 0 if base is None else training_length(base.config))


def _base(subject: Subject) -> Checkpoint | None:
    known = identify(subject.path)
    return None if known.base is None else read_base(known.directory, known.base, make_config)


def needles_of(subject: Subject) -> str:
    """The task whose prompts a checkpoint gets; "text" for RULER."""
    return "text" if reads_text(subject) else subject.kind


def needles(
    subject: Subject, length: int, count: int, seed: int, answer: str = "reference"
) -> list[Prompt]:
    """Make `count` needle prompts of `length` tokens for a checkpoint. `answer` is used for prompts
    of RULER, as in `tasks.niah`.
    """
    if reads_text(subject):
        return niah(subject.tokenizer, VARIANT, length, count, seed, answer=answer)
    return subject.prompts(length, count, seed)


def reversals(subject: Subject, words: int, count: int, seed: int) -> list[Prompt]:
    """Make `count` prompts to reverse `words` words; for a checkpoint that reads text, they are
    encoded by its tokenizer.
    """
    if reads_text(subject):
        return reversal_prompts(subject.tokenizer, words, count, seed)
    return subject.prompts(words, count, seed)


def reversal_of(subject: Subject) -> Reversal:
    """The reversal task on which a checkpoint was trained; the paper's for all others."""
    return subject.task if isinstance(subject.task, Reversal) else SIZES["paper"]


OF_PAPER = "RePo without a layer: from a third of the layers on, as in the paper."
"""Explanation in captions of the names of `called`."""


def called(subject: Subject) -> str:
    """The name of a checkpoint in a legend: `named_layout` of its layout."""
    return named_layout(subject.layout, len(subject.schemes))


def starting_layer(subject: Subject) -> int | None:
    """The first RePo layer, if all layers above are RePo and all layers below are RoPE; None for
    other layouts.
    """
    if "repo" not in subject.schemes:
        return None
    start = subject.schemes.index("repo")
    expected = ("rope",) * start + ("repo",) * (len(subject.schemes) - start)
    return start if subject.schemes == expected else None


def omits_positions(layout: str) -> bool:
    """Whether a layout in short form is NoPE in every layer, or from some layer on (nope@10), where
    other layouts learn positions.
    """
    return layout.partition("@")[0] == "nope"


def can_mirror(subject: Subject) -> bool:
    """Whether a checkpoint was trained to reverse text and learns positions in a layer above 0.
    Layer 0 does not see yet how the words are used.
    """
    return subject.kind == "reversal" and _learns_above(subject)


def can_be_asked_to_mirror(subject: Subject) -> bool:
    """Whether a checkpoint learns positions above layer 0, and was trained to reverse text or reads
    text.
    """
    return can_mirror(subject) or (_learns_above(subject) and reads_text(subject))


def _learns_above(subject: Subject) -> bool:
    return any(layer > 0 for layer in subject.learned)


OTHER_INPUTS = {"repo_attention", "repo_convolution", "repo_index"}
"""Schemes that the paper tested and did not adopt; only R10 is judged on them."""


def learns_long_positions(subject: Subject) -> bool:
    """Whether a checkpoint has the paper's learned positions and a task with prompts of any length.
    In needle models of the zoo with RePo above RoPE, RePo must start at a third of the layers.
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
    """Whether f_phi reads only the token's hidden state, as in the paper."""
    return bool(subject.learned) and OTHER_INPUTS.isdisjoint(subject.schemes)
