"""The page over all papers: the outcome of every claim, from the files of the papers' pages.

    DIRECTORY/*/verdicts.csv, page.json -> DIRECTORY/README.md    one line per claim, on the zoo's models and on real ones
                                           DIRECTORY/claims.md    every part of every claim, and every number
    DIRECTORY/SUBJECT/DATA/*/verdicts.csv    a checkpoint next to those of the zoo, by its data

If a real model can decide a claim, its verdict takes precedence over that of a small model. The
papers list their claims, so claims without measurements appear too. The templates
`pages/gallery.md.jinja` and `pages/numbers.md.jinja` contain the words. This module knows no single
paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from position_papers import FORMATS
from position_papers.kit.experiment import Paper
from position_papers.kit.judge.claims import (
    FAILS,
    HOLDS,
    UNDECIDED,
    UNMEASURABLE,
    Claim,
    Kind,
    Reason,
    Verdict,
)
from position_papers.kit.judge.outcomes import (
    Deciding,
    Row,
    primary_rows,
    read_table,
    records,
    standing,
)
from position_papers.kit.judge.table import EVIDENCE
from position_papers.kit.pages import rendered
from position_papers.kit.paper_directory import (
    PAGE,
    VERDICTS,
    draw_again,
    read_page,
    write_verdicts,
)
from repo_interp.errors import InputError
from repo_interp.storage.files import write_text

HEADING = "# The papers' figures, made again"
REAL = {
    "SmolLM2-135M": "smollm2-135m",
    "Gemma 3 270M": "gemma3-270m",
    "RePo adapter": "smollm2-135m-repo",
}
"""Real models: the heading of each, and the name of its directory."""
TABLES, TABLES_HEADING = "claims.md", "# Every claim and every number"
Page = Mapping[str, Any]


def page_above(directory: Path) -> Path | None:
    """Return the directory two levels above `directory` if it has a page over all papers, else
    None.
    """
    above = directory.absolute().parents[1:2]
    return next((each for each in above if _is_ours(each / "README.md", HEADING)), None)


def _is_ours(page: Path, heading: str) -> bool:
    return page.is_file() and page.read_text(encoding="utf-8", errors="replace").startswith(heading)


def require_own(directory: Path) -> None:
    """Raise InputError if our page would replace another one, or `directory` is a file."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; wanted a directory for the figures")
    for name, heading in (("README.md", HEADING), (TABLES, TABLES_HEADING)):
        page = directory / name
        if page.exists() and not _is_ours(page, heading):
            raise InputError(f"{page} is another page; give --out a directory of its own")


def judge_again(
    directory: Path, made: Sequence[Path], papers: Sequence[Paper]
) -> dict[Path, list[str]]:
    """Judge stored evidence again, draw stored charts, and write verdicts and pages, without
    measuring.

    Args:
        directory: The directory of the page over all papers.
        made: Directories of papers. If one is directly below `directory`, pages of further
            checkpoints below it are judged too.
        papers: All papers.

    Returns:
        The judged directories, with the figures that could not be drawn, because their charts are
        not stored.
    """
    by_name = {paper.name: paper for paper in papers}
    beside = any(each.parent == directory for each in made)
    found = [file.parent for file in sorted(directory.glob(f"*/*/*/{EVIDENCE}")) if beside]
    chosen = [*made, *(each for each in found if each.name in by_name)]
    stay: dict[Path, list[str]] = {}
    for each in chosen:
        facts = read_page(each)
        formats = facts["provenance"].get("formats", FORMATS[0]).split(",")
        stay[each] = draw_again(each, facts, formats)
        write_verdicts(each, by_name[each.name], facts)
    return stay


def write_gallery(directory: Path, papers: Sequence[Paper]) -> Path:
    """Write the page over all `papers` and its tables into `directory`, and return the page.

    The same files give the same bytes.
    """
    pages = [_page(directory / paper.name, paper) for paper in papers]
    subjects, page = _subjects(directory, pages), directory / "README.md"
    write_text(
        directory / TABLES,
        rendered("numbers.md", heading=TABLES_HEADING, pages=pages, subjects=subjects),
    )
    written = rendered(
        "gallery.md",
        rows=headlines(directory, papers),
        pages=pages,
        subjects=subjects,
        heading=HEADING,
        tables=TABLES,
        real=REAL,
    )
    write_text(page, written)
    return page


def headlines(directory: Path, papers: Sequence[Paper]) -> list[Page]:
    """Return a row per claim, without its parts: the verdicts on the small models ("toy") and on
    each of `REAL`, with the rows behind them.

    The overall verdict is that of the real models if these can be judged, else that of the toy.
    """
    found = []
    for paper in papers:
        deciding = {"toy": partial(primary_rows, _verdicts(directory / paper.name), paper)}
        for title, name in REAL.items():
            files = sorted(directory.glob(f"{name}/*/{paper.name}/{VERDICTS}"))
            table = [
                {**row, "asked": file.parts[-3]} for file in files for row in _verdicts(file.parent)
            ]
            deciding[title] = partial(_of_subject, table, name)
        found += [_headline(deciding, paper, claim) for claim in paper.claims if not claim.part]
    return found


def _headline(deciding: Mapping[str, Deciding], paper: Paper, claim: Claim) -> Page:
    columns = {
        title: {"verdict": standing(of, paper, claim), "rows": of(claim)}
        for title, of in deciding.items()
    }
    judged = [
        own
        for title in REAL
        if (own := columns[title]["verdict"]) is not None and own.outcome != UNMEASURABLE
    ]
    stands = _together(judged) if judged else columns["toy"]["verdict"]
    title = next((title for title in REAL if columns[title]["verdict"] in judged), "toy")
    rows = [row for title in (*REAL, "toy") for row in columns[title]["rows"]]
    measured = [
        row["measured"] for row in sorted(rows, key=lambda row: not row["ours"]) if row["measured"]
    ]
    return {
        "claim": claim,
        "paper": paper,
        "columns": columns,
        "verdict": stands,
        "real": bool(judged),
        "difference": _difference(stands, rows),
        "apart": [
            _apart([deciding[title], deciding["toy"]], paper, each)
            for each in paper.claims
            if each.id == claim.id and each.part in claim.apart
        ],
        "says": _said(columns, judged),
        "measured": next(iter(measured), ""),
    }


def _apart(deciding: Sequence[Deciding], paper: Paper, part: Claim) -> Page:
    """Return a part that is shown next to its claim, by the first checkpoints with measurements."""
    first = next((each for each in deciding if each(part)), deciding[-1])
    rows, verdict = first(part), standing(first, paper, part)
    return {
        "name": part.part,
        "verdict": verdict,
        "ours": next((row["ours"] for row in rows if row["ours"]), ""),
        "difference": _difference(verdict, rows),
    }


def _said(columns: Mapping[str, Page], judged: Sequence[Verdict]) -> list[str]:
    """Return the numbers in words: for every deciding real model, with titles if there are several;
    else for the toy.
    """
    titles = [title for title in REAL if columns[title]["verdict"] in judged] or ["toy"]
    said = {
        title: [
            reason.text
            for reason in getattr(columns[title]["verdict"], "reasons", ())
            if reason.kind == Kind.SAYS
        ][:1]
        for title in titles
    }
    known = {title: text for title, texts in said.items() for text in texts}
    if len(set(known.values())) < 2:
        return list(known.values())[:1]
    return [f"{title}, {text}" for title, text in known.items()]


def _difference(verdict: Verdict | None, rows: Sequence[Row]) -> str:
    """For an undecided claim, return the first difference in the notes of the row with its reason;
    else an empty text.
    """
    if verdict is None or verdict.outcome != UNDECIDED:
        return ""
    own = [
        row["reasons"]
        for row in rows
        if row["outcome"] == UNDECIDED and set(verdict.reasons[:1]) <= set(row["reasons"])
    ]
    notes = [each.text for reasons in own for each in reasons if each.kind == Kind.NOTE]
    return notes[0].partition(";")[0] if notes else ""


def _together(verdicts: Sequence[Verdict]) -> Verdict:
    """Join the verdicts of several models on one claim: the common one, else "fails in some"."""
    first = verdicts[0]
    if all(each.outcome == first.outcome for each in verdicts):
        return first
    held = sum(each.outcome == HOLDS for each in verdicts)
    outcome = FAILS if any(each.outcome == FAILS for each in verdicts) else UNDECIDED
    return replace(
        first,
        outcome=outcome,
        reasons=(Reason(Kind.PART, count=held, of=len(verdicts)),) if held else first.reasons,
    )


def _page(directory: Path, paper: Paper) -> Page:
    """Return the data of a paper: figures, and every claim with its rows, numbers and verdict."""
    rows = _verdicts(directory)
    return {
        "paper": paper,
        "figures": _figures(directory),
        "claims": [_claim(rows, paper, claim) for claim in paper.claims],
    }


def _claim(rows: Sequence[Row], paper: Paper, claim: Claim) -> Page:
    own = [row for row in rows if row["claim"] == claim.label]
    return {
        "claim": claim,
        "rows": own,
        "verdict": standing(partial(primary_rows, rows, paper), paper, claim),
    }


def _subjects(directory: Path, pages: Sequence[Page]) -> list[Page]:
    """Return every checkpoint with separate pages below `directory`, in the order of names."""
    papers = {page["paper"].name: page for page in pages}
    found: dict[str, list[tuple[str, str]]] = {}
    for file in sorted(directory.glob(f"*/*/*/{VERDICTS}")):
        subject, data, paper = file.relative_to(directory).parts[:3]
        if paper in papers and subject not in papers:
            found.setdefault(subject, []).append((data, paper))
    return [_subject(directory, name, places, papers) for name, places in found.items()]


def _subject(
    directory: Path, name: str, places: Sequence[tuple[str, str]], papers: Mapping[str, Page]
) -> Page:
    """Return a checkpoint's pages in the order of papers, its claims with verdicts by data and
    those of the zoo, and its commands and provenance.
    """
    asked = list(dict.fromkeys(data for data, _ in places))
    there = [
        page for page in papers.values() if any(page["paper"].name == paper for _, paper in places)
    ]
    pages, claims = [], []
    for page in there:
        paper: Paper = page["paper"]
        tables = {data: _verdicts(directory / name / data / paper.name) for data in asked}
        deciding = {data: partial(_of_subject, table, name) for data, table in tables.items()}
        for each in page["claims"]:
            found = [
                (standing(of, paper, each["claim"]), of(each["claim"])) for of in deciding.values()
            ]
            if any(rows for _, rows in found):
                claims.append({"claim": each["claim"], "found": found, "zoo": each["verdict"]})
        for data, _ in (place for place in places if place[1] == paper.name):
            place = f"{name}/{data}/{paper.name}"
            pages.append({"title": data, "place": place, "figures": _figures(directory / place)})
    known = [read_page(directory / page["place"])["provenance"] for page in pages]
    equal = {
        key: value
        for key, value in known[0].items()
        if key != "command" and all(each.get(key) == value for each in known)
    }
    commands = list(dict.fromkeys(each["command"] for each in known))
    return {
        "name": name,
        "asked": asked,
        "pages": pages,
        "claims": claims,
        "commands": commands,
        "provenance": equal,
    }


def _of_subject(rows: Sequence[Row], name: str, claim: Claim) -> list[Row]:
    """Return the verdicts on a claim for the checkpoint `name`, or for its substitute if it has
    none.
    """
    own = [row for row in rows if row["claim"] == claim.label]
    return [row for row in own if row["checkpoint"] == name] or [row for row in own if row["ours"]]


def _verdicts(directory: Path) -> list[Row]:
    file = directory / VERDICTS
    return records(read_table(file)) if file.is_file() else []


def _figures(directory: Path) -> list[dict[str, str]] | None:
    """Names and captions of the figures of a paper; None if they do not exist yet."""
    return read_page(directory)["figures"] if (directory / PAGE).is_file() else None
