"""A checkpoint beside those of the zoo, as a section of the page over all figures: what became of the claims on it, by what it was asked.

    DIRECTORY/SUBJECT/DATA/PAPER/verdicts.csv, figures.csv, provenance.json     SUBJECT: smollm2-135m      DATA: prose, code, random-tokens

Each PAPER is a directory as `paper_directory` writes it, made with DIRECTORY/SUBJECT/DATA as its place. Knows no subject by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from position_papers.kit.claims import UNMEASURED, Claim, markdown_table
from position_papers.kit.experiment import Paper
from position_papers.kit.outcomes import (
    EXTENSION,
    HEADINGS,
    Standing,
    Told,
    paragraph,
    primary_rows,
    reason,
    standing,
    together,
    with_spread,
)
from position_papers.kit.paper_directory import FIGURES, PROVENANCE, VERDICTS, read_rows

Row = Mapping[str, str]
_DEPENDS = "Depends on what it reads"


@dataclass(frozen=True)
class OwnSubject:
    """What was found on one checkpoint."""

    name: str
    pages: Mapping[str, Mapping[str, Sequence[Row]]]
    """Verdicts by what it was asked and by paper."""

    def rows(self, data: str, paper: Paper, claim: Claim) -> list[Row]:
        """Verdicts on a claim: on this checkpoint, or on what stands in for it where nothing is said of it itself."""
        own = [row for row in self.pages[data].get(paper.name, ()) if row["claim"] == claim.label]
        return [row for row in own if row["checkpoint"] == self.name] or [row for row in own if row["ours"]]


def own_subjects(directory: Path, papers: Sequence[Paper]) -> list[OwnSubject]:
    """Every checkpoint that has pages of its own below `directory`, in the order of their names."""
    names = {paper.name for paper in papers}
    found: dict[str, dict[str, dict[str, Sequence[Row]]]] = {}
    for file in sorted(directory.glob(f"*/*/*/{VERDICTS}")):
        subject, data, paper = file.relative_to(directory).parts[:3]
        if paper in names and subject not in names:
            found.setdefault(subject, {}).setdefault(data, {})[paper] = read_rows(file)
    return [OwnSubject(name, pages) for name, pages in found.items()]


def section(subject: OwnSubject, directory: Path, verdicts: Sequence[Row], papers: Sequence[Paper]) -> list[str]:
    """Its heading; a paragraph in words; a table of its verdicts beside those of the zoo, `verdicts`; its figures."""
    there = [paper for paper in papers if any(paper.name in pages for pages in subject.pages.values())]
    pages = [
        f"[{paper.title.partition(',')[0]}, {data}]({subject.name}/{data}/{paper.name}/README.md)"
        for paper in there
        for data in subject.pages
        if paper.name in subject.pages[data]
    ]
    parts = [
        f"## {subject.name}",
        f"A model beside those of the zoo. How much was measured stands on its pages: {'; '.join(pages)}.",
    ]
    parts += in_words(subject, there)
    columns = {
        "claim": "claim",
        "statement": "what the paper says",
        "paper": "paper's number",
        **{data: data for data in subject.pages},
    }
    columns["zoo"] = "zoo's primary"
    claims = [(paper, claim) for paper in there for claim in paper.claims if _outcomes(subject, paper, claim)]
    parts.append(markdown_table([_row(subject, paper, claim, verdicts) for paper, claim in claims], columns))
    parts += _provenance(directory / subject.name)
    for paper in there:
        for data in subject.pages:
            if paper.name in subject.pages[data]:
                parts += thumbnails(directory, paper, f"{subject.name}/{data}/", f"{paper.title.partition(',')[0]}, {data}")
    return parts


def in_words(subject: OwnSubject, papers: Sequence[Paper]) -> list[str]:
    """By paper, a list: which claims stand on the subject, which do not, which cannot be told, and which depend on the data."""
    parts = []
    for paper in papers:
        told = []
        asked = [data for data, of_data in subject.pages.items() if paper.name in of_data]
        for claim in (claim for claim in paper.claims if claim.paper_number != EXTENSION):
            outcomes = _outcomes(subject, paper, claim)
            judged = {data: outcome for data, outcome in outcomes.items() if outcome.outcome != UNMEASURED}
            outcomes = judged or outcomes  # windows that are too short for a claim on one page may be long enough on another
            where = f", on {next(iter(outcomes))} alone" if len(outcomes) == 1 < len(asked) else ""
            if len({outcome.outcome for outcome in outcomes.values()}) > 1:
                where = "".join(f", {data}: {outcome.outcome}" for data, outcome in outcomes.items())
                told.append(Told(claim, _DEPENDS, "", where))
            elif outcomes:
                outcome = next(iter(outcomes.values()))
                told.append(Told(claim, HEADINGS[outcome.outcome], outcome.why, where))
        parts += paragraph(paper, told, (*HEADINGS.values(), _DEPENDS))
    return parts


def thumbnails(directory: Path, paper: Paper, below: str = "", title: str = "") -> list[str]:
    """The figures of a paper with their captions, from its directory `below` that of the page; how to make them where there are none."""
    place = f"{below}{paper.name}"
    file = directory / place / FIGURES
    heading = f"### [{title or paper.title}]({place}/README.md)"
    if not file.is_file():
        return [heading, f"Not made yet: `repo-interp figures {paper.name}`."]
    lines = ["| figure | |", "|---|---|"]
    for row in read_rows(file):
        figure, caption = row["figure"], row["caption"].replace("|", "\\|").replace("\n", " ")
        page = f"{place}/README.md#{figure.lower()}"
        image = f'<a href="{page}"><img src="{place}/{figure}.png" width="320" alt="{figure}"></a>'
        lines.append(f"| {image} | **{figure}**<br>{caption} |")
    return [heading, "\n".join(lines) if len(lines) > 2 else "No figure."]


def _outcomes(subject: OwnSubject, paper: Paper, claim: Claim) -> dict[str, Standing]:
    """What became of a claim, by data; nothing of what was not asked or has no checkpoint."""
    return {
        data: standing(lambda each, data=data: subject.rows(data, paper, each), paper, claim)
        for data in subject.pages
        if subject.rows(data, paper, claim)
    }


def _row(subject: OwnSubject, paper: Paper, claim: Claim, verdicts: Sequence[Row]) -> dict[str, str]:
    zoo = [row for row in verdicts if row["paper_name"] == paper.name]
    row = {"claim": claim.label, "statement": f"{claim.statement} ({claim.source})", "paper": claim.paper_number}
    row["zoo"] = standing(lambda each: primary_rows(zoo, paper, each), paper, claim).outcome
    for data in subject.pages:
        own = subject.rows(data, paper, claim)
        numbers = [with_spread(row) for row in own if row["ours"]]
        why = reason(own) if not numbers else ""
        row[data] = ": ".join(filter(None, (together(own).partition(":")[0], why, "; ".join(numbers)))) if own else ""
    return row


def _provenance(directory: Path) -> list[str]:
    """The commands, each once, and what is the same of all pages: digests of weights, versions."""
    known = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(directory.glob(f"*/*/{PROVENANCE}"))]
    if not known:
        return []
    equal = {name: value for name, value in known[0].items() if all(each.get(name) == value for each in known)}
    commands = "\n".join(dict.fromkeys(each["command"] for each in known))
    return [
        f"Made by\n\n```\n{commands}\n```",
        "; ".join(f"{name} {value}" for name, value in equal.items() if name != "command") + ".",
    ]
