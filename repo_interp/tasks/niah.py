"""Needle in a haystack, compatible with RULER (Hsieh et al. 2024), for any tokenizer.

Eight variants, two dialects:

    A special magic number is hidden within the following text. Make sure to memorize it. I will
    quiz you about the number afterwards. [haystack, and in it] One of the special magic numbers for
    KEY is: VALUE. What is the special magic number for KEY mentioned in the provided text?
     The special magic number for KEY mentioned in the provided text is

plural ("Some special magic numbers are ...") if the answer has several values. The haystack is as
large as fits:

    tokens(prompt and answer prefix, with BOS) + 128 <= length

For every prompt a search finds the largest size: one more line (noise, needle haystacks) or word
(essay) would not fit. In an essay, the depths of needles are drawn without replacement from the
percentages round(linspace(0, 100, 40)), and a needle is before sentence int(sentences * depth /
100). In noise and needle haystacks, needles are before uniformly drawn lines. Dialects: "ruler"
writes the answer prefix after the question and a space. "repo" (the evaluation of RePo) writes it
after a newline, without the space, generates 50 tokens instead of 128, and counts the prefix as a
part of the output. RULER takes keys, values and sentence ends from libraries; we use lists and a
simple rule.

Spans: `needle` (whole sentences of the needles in the question; `needle.1`, `needle.1.key`,
`needle.1.value`, numbered in text order), `distractor` (other needles), `query` (question and
answer prefix, as in RePo's table 4; parts `query.question`, `query.key`, `query.prefix`); the
reference answer is appended as generated tokens. Prompt i depends on the seed and i, not on the
number of prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from repo_interp.errors import InputError, quoted
from repo_interp.tasks.essay import essay as essay_text
from repo_interp.tasks.haystacks import (
    HAYSTACKS,
    Haystack,
    NeedleQuestion,
    draw_question,
    join_names,
)
from repo_interp.tasks.prompt import GENERATED, Prompt
from repo_interp.tasks.prompt.text import (
    MarkedText,
    count_tokens,
    encode,
    largest_size,
    prompt_from_text,
)
from repo_interp.tasks.task import require_drawable
from repo_interp.values import Tokens, TokensOrNone, checked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESERVE = 128
"""Tokens that every prompt reserves for the answer."""


@dataclass(frozen=True)
class Variant:
    """One of RULER's tasks: haystack, types of keys and values, and their numbers."""

    haystack: str
    key_type: str
    value_type: str
    keys: int = 1
    values: int = 1
    queries: int = 1


VARIANTS = {
    "single_1": Variant("noise", "words", "numbers"),
    "single_2": Variant("essay", "words", "numbers"),
    "single_3": Variant("essay", "words", "uuids"),
    "multikey_1": Variant("essay", "words", "numbers", keys=4),
    "multikey_2": Variant("needle", "words", "numbers"),
    "multikey_3": Variant("needle", "uuids", "uuids"),
    "multivalue": Variant("essay", "words", "numbers", values=4),
    "multiquery": Variant("essay", "words", "numbers", keys=4, queries=4),
}


@dataclass(frozen=True)
class Dialect:
    """Format and scoring of prompts: text before the answer prefix, tokens, and scored text."""

    before_prefix: str
    new_tokens: int
    scored_from: str
    """Scored text: "output", or "prefix" for the answer prefix and the output."""


DIALECTS = {"ruler": Dialect(" ", 128, "output"), "repo": Dialect("\n", 50, "prefix")}


def niah(
    tokenizer: PreTrainedTokenizerBase,
    variant: str = "multikey_1",
    length: int = 4096,
    count: int = 20,
    seed: int = 0,
    dialect: str = "ruler",
    essay: str | Path | None = None,
    depth: float | None = None,
    answer: str = "reference",
    reserve: int = RESERVE,
    progress: Callable[[int, int], None] | None = None,
) -> list[Prompt]:
    """Make needle-in-a-haystack prompts.

    Args:
        tokenizer: Counts tokens and encodes the prompts.
        variant: One of `VARIANTS`.
        length: Most tokens of a prompt, including `reserve`.
        count: Number of prompts.
        seed: Seed; prompt i depends only on the seed and i.
        dialect: One of `DIALECTS`.
        essay: Text file for essay haystacks; None: the docstrings of the standard library.
        depth: Percent of the haystack before the needle (0-100), for variants with one needle in
            the question; None: drawn.
        answer: "reference" appends the reference answer as generated tokens, "none" ends with the
            answer prefix.
        reserve: Tokens reserved for the answer, RULER's 128 by default; 0: the prompt without its
            reference answer has up to `length` tokens.
        progress: Called with the number of finished prompts and of all prompts.

    Returns:
        Prompts with spans.

    Raises:
        InputError: A name is unknown, the length is too short for the variant, the tokenizer has no
            offsets, or a file cannot be read.
    """
    chosen = one_of("variant", variant, VARIANTS)
    spoken = one_of("dialect", dialect, DIALECTS)
    one_of("answer", answer, {"reference": None, "none": None})
    require_drawable(count, seed)
    length = checked(length, Tokens, "length")
    reserve = checked(reserve, TokensOrNone, "reserve")
    if depth is not None:
        require_depth(depth, variant)
    # A tokenizer without offsets is refused before the search for a size.
    encode("One word.", tokenizer)
    text = essay_text(essay) if chosen.haystack == "essay" else None
    prompts = []
    for index in range(count):
        # A text seeds Random by its SHA-512, which is equal in every process, unlike a hash.
        rng = random.Random(f"{variant}/{seed}/{index}")
        question = draw_question(
            rng, chosen.key_type, chosen.value_type, chosen.keys, chosen.values, chosen.queries
        )
        # A seed, not a generator, since the haystack is written again for every tested size.
        haystack = HAYSTACKS[chosen.haystack](question, rng.randrange(2**32), depth, text)
        size = _fitting_size(question, haystack, variant, spoken, length, reserve, tokenizer)
        marked, depths = _write(question, haystack, size, spoken)
        if answer == "reference":
            # The space belongs to the answer, since most tokenizers join it to the first word.
            marked.add(" " + join_names(question.references), GENERATED)
        attributes = {
            "task": "niah",
            "variant": variant,
            "dialect": dialect,
            "length": length,
            "seed": seed,
            "index": index,
            "depth": depths[0] if len(depths) == 1 else None,
            "depths": depths,
            "haystack_size": size,
            # Kept for scoring, since RePo's dialect counts the prefix as a part of the output.
            "prefix": _prefix(question, spoken),
            "new_tokens": spoken.new_tokens,
        }
        prompts.append(
            prompt_from_text(
                marked.text, marked.characters, tokenizer, question.references, attributes
            )
        )
        if progress is not None:
            progress(len(prompts), count)
    return prompts


def niah_scores(outputs: Sequence[str], prompts: Sequence[Prompt]) -> Float[np.ndarray, " prompt"]:
    """Score answers by the dialect of their prompts, ignoring case.

    Args:
        outputs: Generated texts without the prompts.
        prompts: Prompts of this task.

    Returns:
        100 x the share of reference values in an output [prompt].

    Raises:
        InputError: Prompts are not of this task, or numbers differ.
    """
    if len(outputs) != len(prompts):
        raise InputError(
            f"wanted one output per prompt, got {len(outputs)} for {len(prompts)} prompts"
        )
    scores = []
    for output, prompt in zip(outputs, prompts, strict=True):
        if not prompt.answers or not {"dialect", "prefix"} <= prompt.attributes.keys():
            raise InputError(
                "wanted prompts of the needle-in-a-haystack task with answers, dialect and prefix"
            )
        dialect = one_of("dialect", str(prompt.attributes["dialect"]), DIALECTS)
        counted = (prompt.attributes["prefix"] if dialect.scored_from == "prefix" else "") + output
        # RULER's metric `string_match_all`: a reference counts anywhere, in upper or lower case.
        present = [reference.lower() in counted.lower() for reference in prompt.answers]
        scores.append(100.0 * sum(present) / len(present))
    return np.array(scores)


def niah_score(outputs: Sequence[str], prompts: Sequence[Prompt]) -> float:
    """Average `niah_scores`.

    Args:
        outputs: Generated texts without the prompts.
        prompts: Prompts of this task.

    Returns:
        The score of the task, 0 to 100.
    """
    return float(niah_scores(outputs, prompts).mean())


def one_of(option: str, name: str, known: dict):
    """Look up a name.

    Args:
        option: Name of the option, for the message.
        name: Name to look up.
        known: Values by name.

    Returns:
        The value of `name`.

    Raises:
        InputError: The name is unknown; the message lists the names.
    """
    if not isinstance(name, str) or name not in known:
        raise InputError(f"wanted one of {', '.join(known)} as the {option}, got {quoted(name)}")
    return known[name]


def require_depth(depth: float, variant: str) -> None:
    """Refuse a depth that is invalid for a variant.

    Args:
        depth: Percent of the haystack before the needle.
        variant: One of `VARIANTS`.

    Raises:
        InputError: `depth` is not a percentage, or the question is about several needles.
    """
    # Booleans are numbers in Python.
    if isinstance(depth, bool) or not isinstance(depth, int | float) or not 0 <= depth <= 100:
        raise InputError(f"wanted a depth of 0 to 100 percent, got {depth}")
    if VARIANTS[variant].values * VARIANTS[variant].queries > 1:
        raise InputError(
            f"{variant} asks for several needles, which have no one depth; leave the depth out"
        )


def _fitting_size(
    question: NeedleQuestion,
    haystack: Haystack,
    variant: str,
    dialect: Dialect,
    length: int,
    reserve: int,
    tokenizer: PreTrainedTokenizerBase,
) -> int:
    """Find the largest size for which the prompt and the reserve have at most `length` tokens."""

    def tokens(size: int) -> int:
        # The whole text is tokenized, since tokens at the seams depend on adjacent text.
        return count_tokens(_write(question, haystack, size, dialect)[0].text, tokenizer)

    size = largest_size(tokens, length - reserve)
    if not size:
        raise InputError(
            f"a {variant} prompt takes at least {tokens(1) + reserve} tokens with this tokenizer, "
            f"{reserve} of them for the answer; got a length of {length}, ask for more"
        )
    return size


def _prefix(question: NeedleQuestion, dialect: Dialect) -> str:
    asked = f"special magic {question.asked_type} for {question.asked}"
    be = "is" if question.singular else "are"
    return f"{dialect.before_prefix}The {asked} mentioned in the provided text {be}"


def _write(
    question: NeedleQuestion, haystack: Haystack, size: int, dialect: Dialect
) -> tuple[MarkedText, list[float]]:
    """Write the prompt up to the answer prefix; return it and the depths of needles, in order."""
    text = MarkedText()
    kind = question.asked_type
    opening = (
        f"A special magic {kind} is" if question.singular else f"Some special magic {kind} are"
    )
    # RULER's exact wording, since scores of models depend on it
    text.add(f"{opening} hidden within the following text. Make sure to memorize it. ")
    text.add(f"I will quiz you about the {kind} afterwards.\n")
    depths = haystack.write(text, size)
    text.add("\n")
    asking = "What is the" if question.singular else "What are all the"
    text.add(f"{asking} special magic {kind} for ", "query.question")
    text.add(question.asked, "query.question", "query.key")
    text.add(" mentioned in the provided text?", "query.question")
    text.add(_prefix(question, dialect), "query.prefix")
    return text, depths
