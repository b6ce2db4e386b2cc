"""The page over all papers: what became of every claim, from the files that the papers' pages left.

    DIRECTORY/*/verdicts.csv, page.json -> DIRECTORY/README.md    one line per claim, on the zoo's models and on real ones
                                           DIRECTORY/claims.md    every part of every claim, and every number
    DIRECTORY/SUBJECT/DATA/*/verdicts.csv    a checkpoint beside those of the zoo, by what it was asked

Where a real model can decide on a claim, it does, whatever a small one says. The list of claims
comes with the papers, so that those that nobody measured yet are there too. The templates
`pages/gallery.md.jinja` and `pages/numbers.md.jinja` make the words. Knows no paper.
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
"""The real models: the heading of each, and the name of its directory."""
TABLES, TABLES_HEADING = "claims.md", "# Every claim and every number"
Page = Mapping[str, Any]


def page_above(directory: Path) -> Path | None:
    """The directory with the page that has a place for what stands in `directory`, two levels below
    it; None where there is none.
    """
    above = directory.absolute().parents[1:2]
    return next((each for each in above if _is_ours(each / "README.md", HEADING)), None)


def _is_ours(page: Path, heading: str) -> bool:
    return page.is_file() and page.read_text(encoding="utf-8", errors="replace").startswith(heading)


def require_own(directory: Path) -> None:
    """Raises InputError where a page would replace one that is not ours, or `directory` is a
    file.
    """
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; wanted a directory for the figures")
    for name, heading in (("README.md", HEADING), (TABLES, TABLES_HEADING)):
        page = directory / name
        if page.exists() and not _is_ours(page, heading):
            raise InputError(f"{page} is another page; give --out a directory of its own")


def judge_again(
    directory: Path, made: Sequence[Path], papers: Sequence[Paper]
) -> dict[Path, list[str]]:
    """Judge stored evidence again, draw stored charts, and write verdicts and pages.

    Nothing is measured.

    Args:
        directory: The directory of the page over all papers.
        made: Directories of papers. Where one stands right below `directory`, so do pages of
            checkpoints beside those of the zoo, which are judged too.
        papers: All papers.

    Returns:
        The directories that were judged, with the figures that were not drawn: no chart of theirs
        is stored.
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
    """Write the page over all `papers` in `directory` and its tables beside it; return the page.

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
    """A row for every claim, without its parts: the verdict on the small models ("toy") and on each
    of `REAL`, with the rows behind it.

    The verdict that stands is that of the real models where these can be judged, else the toy's.
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
    """A part that is told beside its claim, by the first checkpoints that it was measured on."""
    first = next((each for each in deciding if each(part)), deciding[-1])
    rows, verdict = first(part), standing(first, paper, part)
    return {
        "name": part.part,
        "verdict": verdict,
        "ours": next((row["ours"] for row in rows if row["ours"]), ""),
        "difference": _difference(verdict, rows),
    }


def _said(columns: Mapping[str, Page], judged: Sequence[Verdict]) -> list[str]:
    """What the numbers say in words: of every real model that decides, by its title where several
    do; else of the toy.
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
    """Of an undecided claim, the first difference that the row notes whose reason it has; else
    nothing.
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
    """The verdict of several models on one claim: what all say, else that it fails in some."""
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
    """What there is of a paper: its figures, and every claim with its rows, numbers and verdict."""
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
    """Every checkpoint that has pages of its own below `directory`, in the order of their names."""
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
    """Its pages in the papers' order; its claims with the verdicts by what it was asked, beside the
    zoo's; its commands and provenance.
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
    """Verdicts on a claim: on the checkpoint `name`, or on what stands in for it where nothing is
    said of it itself.
    """
    own = [row for row in rows if row["claim"] == claim.label]
    return [row for row in own if row["checkpoint"] == name] or [row for row in own if row["ours"]]


def _verdicts(directory: Path) -> list[Row]:
    file = directory / VERDICTS
    return records(read_table(file)) if file.is_file() else []


def _figures(directory: Path) -> list[dict[str, str]] | None:
    """Names and captions of the figures of a paper; None where they were not made yet."""
    return read_page(directory)["figures"] if (directory / PAGE).is_file() else None
