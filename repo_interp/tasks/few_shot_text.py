"""Few-shot following on text, for any tokenizer (HoPE, sec. 4.1, app. C).

Examples are rows of GLUE that the user gives, or built-in sentences.

    Sentence: The brave candle is calm.
    Label: 1
                                               (5 examples, an empty line after every one)
    The grass is green. The sky is blue. ...   (meaningless sentences)

    Sentence: The icy harbor is grim.
    Label: 0

A prompt has as many meaningless sentences as fit: its tokens with the answer are at most `length`.
A file is a table with tabs and a header, like GLUE's SST-2 (sentence, label), QNLI (question,
sentence, label) and RTE (sentence1, sentence2, label); columns other than `label` and `index` are
text. Without a file, rows are sentences with kind (1) or grim (0) adjectives. The examples include
all labels of the table if there are enough shots.

Following (table 2): the output begins, after white space, with a label of the prompt's examples.
Spans: `examples` (`examples.1` ..., with `.label`), `padding`, `query`; the label is generated.
attributes: length, shots, labels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from repo_interp.errors import InputError
from repo_interp.storage.records import read_text
from repo_interp.tasks.haystacks import NOISE
from repo_interp.tasks.prompt import GENERATED, Prompt
from repo_interp.tasks.prompt.text import (
    MarkedText,
    count_tokens,
    encode,
    largest_size,
    prompt_from_text,
)
from repo_interp.tasks.vocabulary import NOUNS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KIND = (
    "brave calm gentle jolly lively noble warm joyful polite steady tender honest merry "
    "cheerful patient"
)
_GRIM = (
    "bitter lonely weary grim abrupt fierce dusty empty hollow rough jagged gloomy "
    "hostile cruel broken"
)
KIND, GRIM = _KIND.split(), _GRIM.split()


@dataclass(frozen=True)
class Row:
    """A labeled example: named texts and a label."""

    texts: tuple[tuple[str, str], ...]
    label: str


def read_rows(path: str | Path) -> list[Row]:
    """Read a table with tabs and a header that has `label`.

    Args:
        path: The file.

    Returns:
        Rows of the table.

    Raises:
        InputError: The file is not a table of this form; the message names the line.
    """
    path = Path(path)
    # Not csv: GLUE's files hold unbalanced quotation marks
    lines = read_text(path, "a table of labelled rows, a .tsv file like GLUE's").split("\n")
    table = [line.split("\t") for line in lines if line.strip()]
    header = [name.strip() for name in table[0]] if table else []
    # Both names occur in GLUE's tables and in copies.
    columns = [name for name in header if name not in ("label", "index", "idx")]
    if "label" not in header or not columns:
        raise InputError(
            f"{path}: wanted a header with `label` and columns of text, got {header}; name a "
            ".tsv file like GLUE's"
        )
    rows = []
    # Lines count from 1, and the first is the header
    for number, cells in enumerate(table[1:], start=2):
        if len(cells) != len(header):
            raise InputError(
                f"{path}, line {number}: wanted {len(header)} cells, got {len(cells)}; fix "
                "the table"
            )
        named = dict(zip(header, (cell.strip() for cell in cells), strict=True))
        if not all(named[name] for name in (*columns, "label")):
            raise InputError(
                f"{path}, line {number}: a text or the label is empty; fill it or drop the row"
            )
        rows.append(
            Row(tuple((name.capitalize(), named[name]) for name in columns), named["label"])
        )
    if len({row.label for row in rows}) < 2:
        raise InputError(
            f"{path}: wanted rows of at least two labels, got {len(rows)} rows; add rows"
        )
    return rows


def own_rows() -> list[Row]:
    """Make rows "The {adjective} {noun} is {adjective}." of kind (1) or grim (0) adjectives.

    Returns:
        Two rows per noun, noun by noun.
    """
    return [
        Row(
            (
                (
                    "Sentence",
                    f"The {words[index % len(words)]} {noun} is {words[(index + 7) % len(words)]}.",
                ),
            ),
            label,
        )
        for index, noun in enumerate(NOUNS)
        for label, words in (("1", KIND), ("0", GRIM))
    ]


def few_shot_prompts(
    tokenizer: PreTrainedTokenizerBase,
    rows: str | Path | None = None,
    length: int = 512,
    count: int = 20,
    shots: int = 5,
    seed: int = 0,
) -> list[Prompt]:
    """Make few-shot prompts with their answers.

    Args:
        tokenizer: Counts tokens and encodes the prompts.
        rows: File of a table; None: built-in sentences.
        length: Most tokens of a prompt with its answer.
        count: Number of prompts.
        shots: Examples of a prompt.
        seed: Seed; prompt i depends only on the seed and i.

    Returns:
        Prompts with spans.

    Raises:
        InputError: The table cannot be read or has too few rows, or the length is too short.
    """
    table = own_rows() if rows is None else read_rows(rows)
    if count < 1 or shots < 1:
        raise InputError(f"wanted at least one prompt and one shot, got {count} and {shots}")
    if len(table) <= shots:
        raise InputError(
            f"wanted more rows than the {shots} shots, got {len(table)}; add rows or take "
            "fewer shots"
        )
    # A tokenizer without offsets is refused before the search for prompts.
    encode("One word.", tokenizer)
    prompts = []
    for index in range(count):
        examples, asked = _draw(random.Random(f"{seed}/{index}"), table, shots)

        # Defaults bind the rows of this iteration; a closure would see the last rows of the loop.
        def tokens(size: int, examples: list[Row] = examples, asked: Row = asked) -> int:
            return count_tokens(_write(examples, asked, size).text, tokenizer)

        size = largest_size(tokens, length)
        if not size:
            raise InputError(
                f"{shots} examples take at least {tokens(1)} tokens with this tokenizer, got "
                f"a length of {length}"
            )
        text = _write(examples, asked, size)
        labels = sorted({row.label for row in examples})
        attributes = {
            "task": "few_shot",
            "length": length,
            "shots": shots,
            "labels": labels,
            "seed": seed,
            "index": index,
        }
        prompts.append(
            prompt_from_text(text.text, text.characters, tokenizer, [asked.label], attributes)
        )
    return prompts


def few_shot_questions(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Remove the answers from few-shot prompts, for a model to generate them.

    Args:
        prompts: Prompts of `few_shot_prompts`.
        tokenizer: Encodes the questions.

    Returns:
        Prompts without an answer; their attribute `new_tokens` suffices for the longest label.
    """
    questions = []
    for prompt in prompts:
        assert prompt.text is not None and prompt.characters is not None
        spans = dict(prompt.characters)
        ((start, _),) = spans.pop(GENERATED)
        room = max(count_tokens(f" {label}", tokenizer) for label in prompt.attributes["labels"])
        attributes = {**prompt.attributes, "new_tokens": room}
        questions.append(
            prompt_from_text(prompt.text[:start], spans, tokenizer, prompt.answers, attributes)
        )
    return questions


def following(outputs: Sequence[str], prompts: Sequence[Prompt]) -> Float[np.ndarray, " prompt"]:
    """Score answers of few-shot prompts.

    Args:
        outputs: Generated texts.
        prompts: Their prompts.

    Returns:
        1 if the output begins with a label of the examples, else 0.

    Raises:
        InputError: The numbers of outputs and prompts differ.
    """
    if len(outputs) != len(prompts):
        raise InputError(
            f"wanted one output per prompt, got {len(outputs)} for {len(prompts)} prompts"
        )
    pairs = zip(outputs, prompts, strict=True)
    return np.array(
        [
            # Any label of the examples counts: the score is about following, not about correctness
            float(output.lstrip().startswith(tuple(prompt.attributes["labels"])))
            for output, prompt in pairs
        ]
    )


def _draw(rng: random.Random, table: list[Row], shots: int) -> tuple[list[Row], Row]:
    """Draw shuffled examples with as many labels as fit, and a question with one of them."""
    labels = sorted({row.label for row in table})
    # With fewer shots than labels, another choice of labels is shown each time
    rng.shuffle(labels)
    first = [rng.choice([row for row in table if row.label == label]) for label in labels[:shots]]
    others = [row for row in table if row not in first]
    examples = first + rng.sample(others, shots - len(first))
    shown = {row.label for row in examples}
    asked = rng.choice(
        # If a small table has no other row with these labels, an example is the question.
        [row for row in table if row.label in shown and row not in examples] or examples
    )
    rng.shuffle(examples)
    return examples, asked


def _write(examples: list[Row], asked: Row, size: int) -> MarkedText:
    # Sentence by sentence, so that the size fits to within a few tokens
    sentences = [f"{sentence}." for sentence in NOISE.rstrip(".").split(". ")]
    text = MarkedText()
    for number, row in enumerate(examples, start=1):
        text.add(_question(row), f"examples.{number}")
        text.add(f" {row.label}", f"examples.{number}.label")
        text.add("\n\n")
    text.add(" ".join(sentences[index % len(sentences)] for index in range(size)), "padding")
    text.add("\n\n")
    text.add(_question(asked), "query")
    text.add(f" {asked.label}", GENERATED)
    return text


def _question(row: Row) -> str:
    return "".join(f"{name}: {text}\n" for name, text in row.texts) + "Label:"
