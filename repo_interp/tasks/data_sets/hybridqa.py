"""HybridQA (Chen et al. 2020): questions on a table and the passages that its cells link to; scored by exact match, and F1.

    dev.json        [{"question_id", "question", "table_id", "answer-text", "answer-node": [[cell, [row, column], link, kind]]}]
    beside it       WikiTables-WithLinks/tables_tok/TABLE_ID.json     {"title", "section_title", "header": [[name, links]],
                                                                     "data": [[[cell, links], ...], ...]}
                    WikiTables-WithLinks/request_tok/TABLE_ID.json    {link: passage}
    or, inside      "table": {"title", "header": [names], "data": [{"value", "urls": [{"url", "summary"}]}]}, "answer_text"
    the rows        (cells row by row, as the copy on Hugging Face has it)

The table is written one line per row, cells with bars between them, then every linked passage once. Answer nodes, which only traced files
have, make the `needle`: the cell where kind is "table", the passage where it is "passage". The prompt is ours; an answer ends at its first
line break.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from repo_interp.errors import InputError
from repo_interp.records import read_json, typed
from repo_interp.tasks.data_sets.question import Question, add_marked
from repo_interp.tasks.data_sets.rows import Row, files_of, read_rows
from repo_interp.tasks.prompt.text import MarkedText

NEW_TOKENS = 32
TABLES, LINKS, PASSAGES = "WikiTables-WithLinks", "tables_tok", "request_tok"
_INTRODUCTION = "Read the table and the passages and answer the question in a few words.\n\n"


@dataclass(frozen=True)
class Table:
    """A table with its passages, as text, and where its parts stand in that."""

    text: str
    cells: dict[tuple[int, int], tuple[int, int]]
    """Half-open character range by row and column, from 0; with the space before, which tokenizers join to a word."""
    passages: dict[str, tuple[int, int]]
    """By link."""


def questions(path: str | Path) -> list[Question]:
    """Every row of the file. Raises InputError, naming row and field, for anything that is not HybridQA's, and for a missing table."""
    asked = []
    for file in files_of(path):
        read = cache(lambda name, file=file: _stored(file, name))
        for row in read_rows(file):
            answer = row.text("answer_text" if row.has("answer_text") else "answer-text")
            table = _inside(row.object("table")) if row.has("table") else read(_table_id(row))
            asked.append(_question(row, table, answer))
    return asked


def _question(row: Row, table: Table, answer: str) -> Question:
    text = MarkedText()
    text.add(_INTRODUCTION)
    add_marked(text, table.text, _evidence(row, table))
    text.add("\nQuestion: ", "query")
    text.add(row.text("question"), "query.question")
    text.add("\nAnswer:", "query")
    attributes: dict[str, Any] = {"stops": ["\n"]} | ({"where": row.text("where")} if row.has("where") else {})
    return Question((text,), (answer,), "hybridqa", ("exact match", "F1 (HybridQA)"), NEW_TOKENS, attributes)


def _evidence(row: Row, table: Table) -> list[tuple[int, int]]:
    places = []
    for number, node in enumerate(row.items("answer-node") if row.has("answer-node") else (), start=1):
        try:
            _, (line, column), link, kind = node
            place = table.passages.get(link) if kind == "passage" else table.cells.get((line, column))
        except (TypeError, ValueError):
            raise InputError(
                f"{row.place}, field 'answer-node', item {number}: wanted [cell, [row, column], link, kind], got {node!r:.60}"
            ) from None
        if place is not None and place[0] < place[1]:
            places.append(place)
    return places


def _table_id(row: Row) -> str:
    value = row.values.get("table_id")
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else row.text("table_id")


def _stored(file: Path, name: str) -> Table:
    """A table of WikiTables-WithLinks near `file`."""
    folders = [near / name for near in (file.resolve().parent, file.resolve().parent.parent) for name in (TABLES, ".")]
    folder = next((near for near in folders if (near / LINKS).is_dir()), None)
    if folder is None:
        raise InputError(f"{file}: its tables are not there; put the folder {TABLES} ({LINKS}, {PASSAGES}) beside it")
    place = folder / LINKS / f"{name}.json"
    if not place.is_file():
        raise InputError(
            f"{file}, field 'table_id': there is no table {name!r} in {folder / LINKS}; get the tables of the same release"
        )
    row = _object(place)
    header = [_cell(cell, row, "header")[0] for cell in row.items("header")]
    lines = [[_cell(cell, row, "data") for cell in line] for line in row.lists("data")]
    linked = folder / PASSAGES / f"{name}.json"
    if not linked.is_file() and any(links for line in lines for _, links in line):
        raise InputError(
            f"{place}: the passages that its cells link to are not there; put {PASSAGES}/{linked.name} of the same release beside {LINKS}"
        )
    passages = _object(linked) if linked.is_file() else Row({}, str(linked))
    title = [row.text("title"), row.any_text("section_title") if row.has("section_title") else ""]
    return _write(title, header, lines, {link: passages.any_text(link) for link in passages.values})


def _inside(row: Row) -> Table:
    """A table that stands in its question's row."""
    header = row.texts("header")
    cells, passages = [], {}
    for cell in row.objects("data"):
        links = cell.objects("urls") if cell.has("urls") else []
        passages |= {link.text("url"): link.any_text("summary") for link in links}
        cells.append((cell.any_text("value"), [link.text("url") for link in links]))
    if not header or len(cells) % len(header):
        raise InputError(
            f"{row.place}, field 'data': wanted rows of {len(header)} cells as the header has, got {len(cells)} cells"
        )
    lines = [cells[start : start + len(header)] for start in range(0, len(cells), len(header))]
    title = [row.text("title"), row.any_text("section_title") if row.has("section_title") else ""]
    return _write(title, header, lines, passages)


def _write(
    title: Sequence[str], header: Sequence[str], lines: Sequence[Sequence[tuple[str, list[str]]]], passages: dict[str, str]
) -> Table:
    text = ", ".join(part for part in title if part) + "\n" + " | ".join(header) + "\n"
    cells, places = {}, {}
    for line, row in enumerate(lines):
        for column, (value, _) in enumerate(row):
            text += " |" if column else ""
            cell = f" {value}" if column else value
            cells[line, column] = (len(text), len(text) + len(cell))
            text += cell
        text += "\n"
    text += "\n"
    for link in dict.fromkeys(link for row in lines for _, links in row for link in links):
        if passages.get(link):
            places[link] = (len(text), len(text) + len(passages[link]))
            text += passages[link] + "\n"
    return Table(text, cells, places)


def _object(file: Path) -> Row:
    return Row(typed(read_json(file, f"a table of {TABLES}"), dict, str(file)), str(file))


def _cell(cell: Any, row: Row, field: str) -> tuple[str, list[str]]:
    if isinstance(cell, list) and len(cell) == 2 and isinstance(cell[0], str) and isinstance(cell[1], list):
        return cell[0], [str(link) for link in cell[1]]
    raise InputError(f"{row.place}, field {field!r}: wanted cells [text, [links]], got {cell!r:.40}; get the tables of {TABLES}")
