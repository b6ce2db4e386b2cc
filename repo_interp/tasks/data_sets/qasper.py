"""Qasper (Dasigi et al. 2021): questions on papers, from the released JSON; scored by F1, best over the annotators' answers.

    {paper id: {"title": .., "abstract": .., "full_text": [{"section_name": .., "paragraphs": [..]}, ..],
                "qas": [{"question": .., "question_id": .., "answers": [{"answer": A}, ..]}, ..]}}
    A = {"unanswerable": bool, "extractive_spans": [..], "yes_no": bool or null, "free_form_answer": .., "evidence": [..]}

An answer is "Unanswerable", the spans with commas, the free text, or "Yes" or "No", the first of these that there is. Evidence that stands
in the text is the `needle`; evidence in tables and figures ("FLOAT SELECTED: ...") does not, and is left out. The prompt is ours; an answer
ends at its first line break.
"""

from __future__ import annotations

from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.records import read_json, typed
from repo_interp.tasks.data_sets.question import Question, add_marked
from repo_interp.tasks.data_sets.rows import WANTED, Row, files_of
from repo_interp.tasks.prompt.text import MarkedText

NEW_TOKENS = 128
_INTRODUCTION = (
    "Read the article and answer the question in a few words: with Yes or No where it asks for that, with Unanswerable where the article "
    "does not tell.\n\n"
)


def questions(path: str | Path) -> list[Question]:
    """Every question of the file. Raises InputError, naming paper, question and field, for anything that is not Qasper's."""
    asked = []
    for file in files_of(path):
        if file.suffix != ".json":
            raise InputError(
                f"{file}: wanted Qasper as it is released, such as qasper-dev-v0.3.json; rows of other copies are not read"
            )
        papers = read_json(file, WANTED)
        if not isinstance(papers, dict) or not papers:
            raise InputError(f"{file}: wanted an object of papers by their id, as Qasper is released; name its json")
        for name, value in papers.items():
            paper = typed(value, dict, f"{file}, row {name!r}")
            asked += _of_paper(Row(paper, f"{file}, row {name!r}"))
    return asked


def _of_paper(paper: Row) -> list[Question]:
    parts = [paper.text("title"), paper.any_text("abstract") if paper.has("abstract") else ""]
    for section in paper.objects("full_text"):
        parts.append(section.any_text("section_name") if section.has("section_name") else "")
        parts += section.texts("paragraphs")
    article = "\n".join(part for part in parts if part.strip())
    return [_question(asked, article) for asked in paper.objects("qas")]


def _question(asked: Row, article: str) -> Question:
    given = [annotation.object("answer") for annotation in asked.objects("answers")]
    if not given:
        raise InputError(
            f"{asked.place}, field 'answers': wanted at least one answer; name a file with answers, such as the dev set"
        )
    answers = [_answer(annotation) for annotation in given]
    places = {piece: article.find(piece) for annotation in given for piece in annotation.texts("evidence") if piece.strip()}
    evidence = [(start, start + len(piece)) for piece, start in places.items() if start >= 0]
    text = MarkedText()
    text.add(_INTRODUCTION)
    add_marked(text, article, evidence)
    text.add("\n\nQuestion: ", "query")
    text.add(asked.text("question"), "query.question")
    text.add("\nAnswer:", "query")
    return Question((text,), tuple(dict.fromkeys(answers)), "qasper", ("F1",), NEW_TOKENS, {"stops": ["\n"]})


def _answer(annotation: Row) -> str:
    if annotation.values.get("unanswerable"):
        return "Unanswerable"
    spans = annotation.texts("extractive_spans")
    if spans:
        return ", ".join(spans)
    if annotation.any_text("free_form_answer").strip():
        return annotation.text("free_form_answer")
    if not isinstance(annotation.values.get("yes_no"), bool):
        raise InputError(f"{annotation.place}, field 'yes_no': wanted true or false where there is no other answer; mend the row")
    return "Yes" if annotation.values["yes_no"] else "No"
