"""LongBench (Bai et al. 2024): its English and code sets, from the published jsonl: one set per file, or a folder of them.

    {"input": question or "", "context": long text, "answers": [texts], "dataset": name, "all_classes": [texts] or null,
     "length": words, "language": "en", "_id": ...}

The metric and the number of new tokens are the benchmark's, set by set. The wording around context and input is ours; where the
benchmark's own `dataset2prompt.json` stands beside the data, in `config` or one folder up, it is that one: see the attribute `wording`.
Chinese sets need a Chinese word segmenter for their metrics and are refused. Where the answer is the number of a
paragraph, that paragraph is the `needle`.

Sets of LongBench-E (NAME_e: other rows of the same sources, some of them the same) are parts of their own: "longbench hotpotqa_e". Their
score is the mean over their rows, where the benchmark has one for each of three ranges of length.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.records import read_json
from repo_interp.tasks.data_sets.question import Question, add_marked
from repo_interp.tasks.data_sets.rows import WANTED, Row, files_of, read_rows
from repo_interp.tasks.prompt.text import MarkedText

PROMPTS = "dataset2prompt.json"
_QUESTION = "Read the {kind} and answer the question in a few words.\n\n{{context}}\n\nQuestion: {{input}}\nAnswer:"


@dataclass(frozen=True)
class Part:
    """One of the benchmark's sets: how it is asked and scored."""

    metric: str
    new_tokens: int
    wording: str
    """With {context}, and {input} where the set has one."""
    first_line: bool = False
    """Whether only the first line of an output counts."""


def _asked(kind: str, new_tokens: int) -> Part:
    return Part("F1", new_tokens, _QUESTION.format(kind=kind))


PARTS = {
    "narrativeqa": _asked("story", 128),
    "qasper": _asked("article", 128),
    "multifieldqa_en": _asked("text", 64),
    "hotpotqa": _asked("passages", 32),
    "2wikimqa": _asked("passages", 32),
    "musique": _asked("passages", 32),
    "gov_report": Part("ROUGE-L", 512, "Read the report and summarize it.\n\n{context}\n\nSummary:"),
    "qmsum": Part("ROUGE-L", 512, "Read the minutes of a meeting and answer.\n\n{context}\n\nQuery: {input}\nAnswer:"),
    "multi_news": Part("ROUGE-L", 512, "Read the news and summarize them.\n\n{context}\n\nSummary:"),
    "trec": Part("classification", 64, "Questions and their types.\n\n{context}\n{input}", True),
    "triviaqa": Part("F1", 32, "Passages, questions and answers.\n\n{context}\n\n{input}", True),
    "samsum": Part("ROUGE-L", 128, "Dialogues and their summaries.\n\n{context}\n\n{input}", True),
    "passage_count": Part("count", 32, "Some paragraphs stand here twice.\n\n{context}\n\nNumber of different paragraphs:"),
    "passage_retrieval_en": Part(
        "retrieval",
        32,
        "Find the paragraph that the abstract is of.\n\n{context}\n\nAbstract: {input}\n\nThe abstract is of Paragraph",
    ),
    "lcc": Part("edit similarity", 64, "{context}"),
    "repobench-p": Part("edit similarity", 64, "{context}{input}"),
}
EVEN = "_e"
"""Ending of the sets of LongBench-E, which has the same number of rows for each range of length."""
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")


def questions(path: str | Path) -> list[Question]:
    """Every row of the file or folder. Raises InputError, naming row and field, for anything that is not LongBench's."""
    asked = []
    for file in files_of(path):
        if file.name == PROMPTS:
            continue
        own = _own_wordings(file)
        evenly = file.stem.endswith(EVEN)
        asked += [_question(row, own, evenly) for row in read_rows(file)]
    return asked


def _question(row: Row, own: dict[str, str], evenly: bool) -> Question:
    """The question of a row; `evenly`: its file is one of LongBench-E, whether the row says so or not."""
    given = row.text("dataset")
    name = given.removesuffix(EVEN)
    if name in CHINESE:
        raise InputError(f"{row.place}, field 'dataset': the Chinese set {name!r} is not scored here; leave its file out")
    if name not in PARTS:
        raise InputError(
            f"{row.place}, field 'dataset': wanted one of {', '.join(PARTS)}, got {name!r}; give LongBench's own file"
        )
    part = PARTS[name]
    context, asked, answers = row.text("context"), row.any_text("input"), row.texts("answers")
    if not answers or not all(answers):
        raise InputError(f"{row.place}, field 'answers': wanted at least one text, none of them empty; drop the row")
    attributes = {"wording": "LongBench's" if name in own else "ours", "stops": ["\n"] if part.first_line else []}
    if part.metric == "classification":
        attributes["classes"] = row.texts("all_classes")
    evidence = _paragraph(context, answers[0]) if part.metric == "retrieval" else []
    text = _write(own.get(name, part.wording), context, asked, evidence)
    subset = f"longbench {name}{EVEN if evenly or given != name else ''}"
    return Question((text,), tuple(answers), subset, (part.metric,), part.new_tokens, attributes)


def _write(wording: str, context: str, asked: str, evidence: list[tuple[int, int]]) -> MarkedText:
    text, after = MarkedText(), False
    for literal, name, _, _ in string.Formatter().parse(wording):
        text.add(literal, *(("query",) if after else ()))
        if name == "context":
            add_marked(text, context, evidence)
            after = True
        elif name == "input":
            text.add(asked, "query.question")
    return text


def _paragraph(context: str, answer: str) -> list[tuple[int, int]]:
    """Where the paragraph stands that `answer` ("Paragraph 7") names; empty where it is not found."""
    number = re.search(r"\d+", answer)
    paragraph = number and re.search(rf"Paragraph {number.group()}:.*?(?=\s*Paragraph \d+:|\s*$)", context, re.DOTALL)
    return [paragraph.span()] if paragraph else []


def _own_wordings(file: Path) -> dict[str, str]:
    """The benchmark's wordings by set, where its file stands near; empty where it does not."""
    folder = file.resolve().parent
    places = [folder / PROMPTS, folder / "config" / PROMPTS, folder.parent / PROMPTS, folder.parent / "config" / PROMPTS]
    known = next((place for place in places if place.is_file()), None)
    if known is None:
        return {}
    row = Row(read_json(known, WANTED), str(known))
    wordings = {name: row.text(name) for name in row.values if name in PARTS}
    for name, wording in wordings.items():
        try:
            fields = {field for _, field, _, _ in string.Formatter().parse(wording) if field is not None}
        except ValueError as error:
            raise InputError(f"{known}, field {name!r}: {error}; mend the braces") from None
        if not {"context"} <= fields <= {"context", "input"}:
            raise InputError(
                f"{known}, field {name!r}: wanted {{context}}, and nothing but {{input}} beside it, got {sorted(fields)}"
            )
    return wordings
