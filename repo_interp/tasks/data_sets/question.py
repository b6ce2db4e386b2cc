"""A question of a data set: what is asked, where in the text, the answers and how they are scored - and the prompt it becomes.

    prompt = instruction, context, query          tokens(prompt) + new tokens <= length,      new tokens = min(wanted, length / 2)

Longer prompts lose their middle, as LongBench does it: with b tokens of room the first ceil(b / 2) and the last floor(b / 2) stay.
(LongBench turns what stays into text and that into tokens again, which may join the two tokens at the cut; here they stay as they are.)
A question may be worded with fewer examples; the longest wording that fits is taken before anything is cut.

Spans: `context`, `needle` (the evidence, where the data set tells; `needle.1`, ... in the order of the text), `query` with
`query.question`, `examples`; those that lost all their tokens are gone, and so are the needles of a question where one is so short that
the tokenizer gives it no token of its own. attributes: see `prompt_of`. Knows nothing about files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from repo_interp.errors import InputError
from repo_interp.tasks.prompt import GENERATED, Prompt
from repo_interp.tasks.prompt.text import MarkedText, count_tokens, prompt_from_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEEDLE = "needle"
ANSWERS = ("none", "reference")
"""What follows the query: nothing, or the first of the answers as generated tokens."""


@dataclass(frozen=True)
class Question:
    """One question, not yet tokens."""

    wordings: tuple[MarkedText, ...]
    """The same question from most to fewest examples; mostly one."""
    answers: tuple[str, ...]
    subset: str
    """What scores are put together by: the data set, or a part of it that has a number of its own."""
    metrics: tuple[str, ...]
    """Names in `metrics.METRICS`."""
    new_tokens: int
    """How many tokens an answer may have."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values."""


def prompt_of(question: Question, tokenizer: PreTrainedTokenizerBase, length: int, answer: str = "none") -> Prompt:
    """The prompt of at most `length` tokens with those of its answer.

    attributes: `subset`, `metrics`, `new_tokens`, `dropped_tokens` (cut out of the middle), and the question's own. Raises InputError
    for an unknown `answer` and where nothing fits.
    """
    if answer not in ANSWERS:
        raise InputError(f"wanted an answer, one of {', '.join(ANSWERS)}; got {answer!r}")
    if length < 8:
        raise InputError(f"wanted prompts of at least 8 tokens, got a length of {length}")
    new_tokens = min(question.new_tokens, length // 2)
    room = length - new_tokens
    wording = next(
        (fitting for fitting in question.wordings if count_tokens(fitting.text, tokenizer) <= room), question.wordings[-1]
    )
    text, characters = wording.text, wording.characters
    if answer == "reference":
        spoken = f" {question.answers[0]}"
        characters = {**characters, GENERATED: ((len(text), len(text) + len(spoken)),)}
        text += spoken
    attributes = {"subset": question.subset, "metrics": list(question.metrics), "new_tokens": new_tokens, **question.attributes}
    try:
        whole = prompt_from_text(text, characters, tokenizer, question.answers, attributes)
    except InputError:
        others = {name: ranges for name, ranges in characters.items() if name.partition(".")[0] != NEEDLE}
        if others == characters:
            raise
        whole = prompt_from_text(text, others, tokenizer, question.answers, attributes)
    return without_middle(whole, room, new_tokens)


def without_middle(prompt: Prompt, room: int, answer_room: int | None = None) -> Prompt:
    """`prompt` with at most `room` tokens before what is generated: the middle of longer ones is cut out.

    `answer_room`: generated tokens that stay (None: all). A prompt that fits comes as it is; one that is cut has no text any more,
    only tokens. Its attribute `dropped_tokens` says how many were cut. Raises InputError for no room.
    """
    if room < 2:
        raise InputError(f"wanted room for at least 2 tokens, got {room}")
    generated = prompt.generated[:answer_room]
    asked = len(prompt.tokens) - len(prompt.generated)
    if asked <= room and len(generated) == len(prompt.generated):
        return dataclasses.replace(prompt, attributes={**prompt.attributes, "dropped_tokens": 0})
    staying = list(range(asked)) if asked <= room else [*range(room - room // 2), *range(asked - room // 2, asked)]
    staying += list(generated)
    place = {index: new for new, index in enumerate(staying)}
    spans = {name: tuple(place[index] for index in indices if index in place) for name, indices in prompt.spans.items()}
    return dataclasses.replace(
        prompt,
        tokens=tuple(prompt.tokens[index] for index in staying),
        spans={name: indices for name, indices in spans.items() if indices},
        generated=tuple(place[index] for index in generated),
        token_text=None if prompt.token_text is None else tuple(prompt.token_text[index] for index in staying),
        text=None,
        characters=None,
        attributes={**prompt.attributes, "dropped_tokens": max(0, asked - room)},
    )


def add_marked(text: MarkedText, piece: str, evidence: list[tuple[int, int]], whole: str = "context") -> None:
    """Write `piece` as span `whole`, but for the half-open character ranges `evidence`, which become `needle.1`, ... in their order.

    Ranges that touch or overlap are one. None: all of it is `whole`.
    """
    joined: list[tuple[int, int]] = []
    for start, end in sorted(evidence):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    before = 0
    for number, (start, end) in enumerate(joined, start=1):
        text.add(piece[before:start], whole)
        text.add(piece[start:end], f"{NEEDLE}.{number}")
        before = end
    text.add(piece[before:], whole)
