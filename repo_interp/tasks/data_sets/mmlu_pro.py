"""MMLU-Pro (Wang et al. 2024): questions with up to ten options, answered after thinking aloud; scored by accuracy.

    {"question_id": .., "question": .., "options": [texts], "answer": "C", "answer_index": 2, "category": .., "cot_content": ..}

in jsonl, json or parquet: the test file, or a folder with test and validation. Rows with `cot_content` (a worked solution; those of
validation) are the examples, up to five of the same category, as many as fit; the others are asked. Options "N/A" are left out, as in the
benchmark's own script. An output ends where it begins another question. Questions and examples are written as that script does, the one
sentence before them is ours.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.tasks.data_sets.question import Question
from repo_interp.tasks.data_sets.rows import Row, files_of, read_rows
from repo_interp.tasks.prompt.text import MarkedText

SHOTS = 5
NEW_TOKENS = 2048
_THINK = "Answer: Let's think step by step."


def questions(path: str | Path) -> list[Question]:
    """Every row without a worked solution. Raises InputError, naming row and field, for anything that is not MMLU-Pro's."""
    rows = [row for file in files_of(path) for row in read_rows(file)]
    examples: dict[str, list[Row]] = {}
    asked = []
    for row in rows:
        if row.has("cot_content") and row.any_text("cot_content").strip():
            examples.setdefault(row.text("category"), []).append(row)
        else:
            asked.append(row)
    if not asked:
        raise InputError(
            f"{path}: every row has a worked solution (cot_content), so none is asked; name the test file, or a folder with both"
        )
    written = {category: [_example(row) for row in known[:SHOTS]] for category, known in examples.items()}
    return [_question(row, written.get(row.text("category"), [])) for row in asked]


def _question(row: Row, examples: Sequence[tuple[str, str]]) -> Question:
    letter, asked = _letter(row), _asked(row)
    wordings = tuple(_write(row.text("category"), examples[:shots], asked) for shots in range(len(examples), -1, -1))
    attributes = {"letter": letter, "category": row.text("category"), "stops": ["Question:"]}
    return Question(wordings, (f"The answer is ({letter}).",), "mmlu_pro", ("accuracy",), NEW_TOKENS, attributes)


def _write(category: str, examples: Sequence[tuple[str, str]], asked: str) -> MarkedText:
    text = MarkedText()
    text.add(
        f'Questions about {category}. Think step by step and end with "The answer is (X)", X being the letter of an option.\n\n'
    )
    for number, (question, solution) in enumerate(examples, start=1):
        text.add(question, f"examples.{number}")
        text.add(solution, f"examples.{number}.answer")
        text.add("\n\n")
    text.add(asked, "query.question")
    text.add(_THINK, "query")
    return text


def _example(row: Row) -> tuple[str, str]:
    solution = row.text("cot_content").strip().removeprefix("A: Let's think step by step.").strip()
    return _asked(row), f"{_THINK} {solution}"


def _asked(row: Row) -> str:
    options = "".join(f"{letter}. {option}\n" for letter, option in zip(string.ascii_uppercase, _options(row), strict=False))
    return f"Question:\n{row.text('question')}\nOptions:\n{options}"


def _letter(row: Row) -> str:
    letter, options = row.text("answer"), _options(row)
    known = string.ascii_uppercase[: len(options)]
    if len(letter) != 1 or letter not in known:
        raise InputError(
            f"{row.place}, field 'answer': wanted the letter of one of {len(options)} options, got {letter!r}; mend the row"
        )
    return letter


def _options(row: Row) -> list[str]:
    options = [option for option in row.texts("options") if option != "N/A"]
    if len(options) < 2:
        raise InputError(f"{row.place}, field 'options': wanted at least two options, got {len(options)}; mend the row")
    return options
