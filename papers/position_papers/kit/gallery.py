"""The page over the figures of all papers: what became of every claim, and every figure, from the files that the papers' pages left.

    DIRECTORY/*/verdicts.csv, figures.csv -> DIRECTORY/README.md    pictures, and one line per claim
                                             DIRECTORY/claims.md    every claim and every number, as tables
    DIRECTORY/SUBJECT/DATA/*/verdicts.csv    a checkpoint beside those, in a section of its own (`own_subjects`)

The list of claims comes with the papers, so that those that nobody measured yet are there too. Every (claim, part) is a row of its own.
Knows no paper by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from position_papers.kit.claims import FAILS, HOLDS, UNMEASURED, Claim, markdown_table
from position_papers.kit.experiment import Paper
from position_papers.kit.outcomes import (
    AS_WORDED,
    EXTENSION,
    HEADINGS,
    IN_PART,
    NOT_YET,
    Told,
    in_one_paragraph,
    number,
    paragraph,
    primary_rows,
    remark_on_cause,
    standing,
    together,
    with_spread,
)
from position_papers.kit.own_subjects import own_subjects, section, thumbnails
from position_papers.kit.paper_directory import FIGURES, VERDICTS, read_rows
from repo_interp.errors import InputError
from repo_interp.files import write_text

HEADING = "# The papers' figures, made again"
TABLES, TABLES_HEADING = "claims.md", "# Every claim and every number"
CLAIM_COLUMNS = {
    "claim": "claim",
    "statement": "what the paper says",
    "paper": "paper's number",
    "ours": "ours",
    "verdict": "verdict",
    "written": "rule written",
    "command": "command",
}
NUMBER_COLUMNS = {
    "claim": "claim",
    "checkpoint": "checkpoint",
    "verdict": "verdict",
    "ours": "ours",
    "measured": "of what",
    "spread": "spread",
    "n": "n",
    "seeds": "seeds",
    "control": "control",
    "scale": "how our scale differs",
}
_INTRODUCTION = (
    "Every figure and number below was made by the commands beside them; nothing is typed by hand. The models are small, and so is what "
    "they were trained on: a claim that does not hold here may hold at the paper's scale. The rules that judge stand in code, and their "
    "words, on each paper's page, are made from it. A rule was written blind, before anything was measured, or after results were seen: "
    "each row says which."
)
_SPREAD = (
    "± is over what stands in parentheses: a standard deviation, where it says nothing else. n: sequences, prompts or seeds. Rows of one "
    "seed spread over its prompts; what the same comes to over seeds stands in the row of every seed."
)


def page_above(directory: Path) -> Path | None:
    """The directory with the page that has a place for what stands in `directory`, two levels below it; None where there is none."""
    above = directory.absolute().parents[1:2]
    return next((each for each in above if _is_ours(each / "README.md", HEADING)), None)


def _is_ours(page: Path, heading: str) -> bool:
    return page.is_file() and page.read_text(encoding="utf-8", errors="replace").startswith(heading)


def require_own(directory: Path) -> None:
    """Raises InputError where a page would replace one that is not ours, or `directory` is a file."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; wanted a directory for the figures")
    for name, heading in (("README.md", HEADING), (TABLES, TABLES_HEADING)):
        page = directory / name
        if page.exists() and not _is_ours(page, heading):
            raise InputError(f"{page} is another page; give --out a directory of its own")


def write_gallery(directory: Path, papers: Sequence[Paper]) -> Path:
    """Write the page over all `papers` in `directory` and its tables beside it; return the page. The same files give the same bytes."""
    verdicts = _verdicts(directory, papers)
    claims = claim_rows(verdicts, papers)
    tables = [TABLES_HEADING, _INTRODUCTION, "## Claims", tally(claims), markdown_table(claims, CLAIM_COLUMNS)]
    tables += ["## Numbers", _SPREAD, markdown_table(number_rows(verdicts, papers), NUMBER_COLUMNS)]
    write_text(directory / TABLES, "\n\n".join(tables) + "\n")
    parts = [
        HEADING,
        _INTRODUCTION,
        *_pictures(directory, papers),
        "## In short",
        *in_short(verdicts, papers),
        "## Claims",
        tally(claims),
    ]
    parts[-2:-2] = [part for subject in own_subjects(directory, papers) for part in section(subject, directory, verdicts, papers)]
    parts += [f"Spreads, controls, scales and commands: [{TABLES}]({TABLES}).", *_lines(verdicts, papers), "## Figures"]
    for paper in papers:
        parts += thumbnails(directory, paper)
    page = directory / "README.md"
    write_text(page, "\n\n".join(parts) + "\n")
    return page


def _pictures(directory: Path, papers: Sequence[Paper]) -> list[str]:
    """The first figure of every paper that has one."""
    pictures = []
    for paper in papers:
        file = directory / paper.name / FIGURES
        figure = next((row["figure"] for row in read_rows(file)), None) if file.is_file() else None
        if figure is not None:
            pictures.append(
                f'<a href="{paper.name}/README.md"><img src="{paper.name}/{figure}.png" width="440" alt="{paper.title}"></a>'
            )
    return ["\n".join(pictures)] if pictures else []


def in_short(verdicts: Sequence[Mapping[str, str]], papers: Sequence[Paper]) -> list[str]:
    """In one paragraph, then with their parts by paper as a list: which claims stand on their primary checkpoint, which in part or as
    worded alone, which do not, and which cannot be told, and why.
    """
    of_papers = [(paper, _told(verdicts, paper)) for paper in papers]
    whole = in_one_paragraph([each for _, told in of_papers for each in told])
    by_paper = [part for paper, told in of_papers for part in paragraph(paper, told, tuple(HEADINGS.values()))]
    return [*([f"{whole} By paper, with the parts:"] if whole else []), *by_paper]


def _told(verdicts: Sequence[Mapping[str, str]], paper: Paper) -> list[Told]:
    """The claims of `paper`, without our extensions of them, that anything is known of."""
    rows_of = primary_of(verdicts, paper)
    standings = {claim: standing(rows_of, paper, claim) for claim in paper.claims if claim.paper_number != EXTENSION}
    return [
        Told(claim, HEADINGS[own.outcome], own.why, remark_on_cause(rows_of, paper, claim) if own.outcome == HOLDS else "")
        for claim, own in standings.items()
        if own.outcome in HEADINGS
    ]


def primary_of(verdicts: Sequence[Mapping[str, str]], paper: Paper) -> Callable[[Claim], list[Mapping[str, str]]]:
    """The rows that decide on each claim of `paper`."""
    own = [row for row in verdicts if row["paper_name"] == paper.name]
    return lambda claim: primary_rows(own, paper, claim)


def _lines(verdicts: Sequence[Mapping[str, str]], papers: Sequence[Paper]) -> list[str]:
    """By paper, one line per claim and part: what the paper says, what came of it, the quantity, ours by checkpoint, the paper's number."""
    lines = []
    for paper in papers:
        lines.append(f"### {paper.title}")
        told, of_paper = [], [row for row in verdicts if row["paper_name"] == paper.name]
        for claim in paper.claims:
            own = [row for row in of_paper if row["claim"] == claim.label]
            quantities: dict[str, list[str]] = {}
            for row in own:
                if row["ours"]:
                    quantities.setdefault(row["measured"], []).append(number(row, claim, of_paper))
            ours = "; ".join(f"{measured}: {', '.join(numbers)}" for measured, numbers in quantities.items())
            result = together(own).split(":")[0]
            told.append(
                f"- **{claim.label}** {claim.statement}. {result}{f' - {ours}' if ours else ''} (paper: {claim.paper_number})"
            )
        lines.append("\n".join(told))
    return lines


def claim_rows(verdicts: Sequence[Mapping[str, str]], papers: Sequence[Paper]) -> list[dict[str, str]]:
    """One row per claim and part, in order of the papers: what came out on all checkpoints, with what gives the row."""
    rows = []
    for paper, claim in ((each, claim) for each in papers for claim in each.claims):
        of_paper = [row for row in verdicts if row["paper_name"] == paper.name]
        own = [row for row in of_paper if row["claim"] == claim.label]
        result = standing(primary_of(verdicts, paper), paper, claim)
        commands = dict.fromkeys(row["command"] for row in own) or {f"repo-interp figures {paper.name}": None}
        rows.append(
            {
                "claim": f"[{claim.label}]({paper.name}/README.md)" if own else claim.label,
                "statement": f"{claim.statement} ({claim.source})",
                "paper": claim.paper_number,
                "ours": "<br>".join(number(row, claim, of_paper) for row in own if row["ours"]),
                "verdict": together(own) + (f", but {result.why}" if result.outcome == AS_WORDED else ""),
                "primary": result.outcome,
                "ours alone": claim.paper_number if claim.paper_number == EXTENSION else "",
                "written": claim.written,
                "command": "<br>".join(f"`{command}`" for command in commands),
            }
        )
    return rows


def number_rows(verdicts: Sequence[Mapping[str, str]], papers: Sequence[Paper]) -> list[dict[str, str]]:
    """One row per verdict, in the claims' order; one that says so for a claim without any."""
    rows = []
    for paper, claim in ((each, claim) for each in papers for claim in each.claims):
        own = [row for row in verdicts if row["claim"] == claim.label and row["paper_name"] == paper.name]
        for row in own:
            spread = with_spread(row).removeprefix(row["ours"]).strip()
            rows.append({**row, "spread": spread, "measured": row["measured"] or row["note"]})
        if not own:
            rows.append(dict.fromkeys(NUMBER_COLUMNS, "") | {"claim": claim.label, "verdict": NOT_YET})
    return rows


def _verdicts(directory: Path, papers: Sequence[Paper]) -> list[dict[str, str]]:
    files = {paper.name: directory / paper.name / VERDICTS for paper in papers}
    written_before = dict.fromkeys(NUMBER_COLUMNS, "")  # by a version that lacked a column
    return [
        {**written_before, **row, "paper_name": name} for name, file in files.items() if file.is_file() for row in read_rows(file)
    ]


def tally(rows: Sequence[Mapping[str, str]]) -> str:
    """How many claims came out how on their primary checkpoint, from `claim_rows`: the papers', then our own extensions of them."""
    words = {
        HOLDS: ("holds", "hold"),
        IN_PART: ("holds in part", "hold in part"),
        AS_WORDED: ("holds as worded alone", "hold as worded alone"),
        FAILS: ("does not hold", "do not hold"),
        UNMEASURED: ("is not measurable here", "are not measurable here"),
        NOT_YET: ("is not measured yet", "are not measured yet"),
    }
    sentences = []
    for ours, what in (("", "claims of the papers"), (EXTENSION, "further ones of ours")):
        verdicts = [row["primary"] for row in rows if row["ours alone"] == ours]
        counts = {verdict: verdicts.count(verdict) for verdict in words if verdict in verdicts}
        told = ", ".join(f"{count} {words[verdict][count > 1]}" for verdict, count in counts.items())
        if verdicts:
            sentences.append(f"Of {len(verdicts)} {what}, parts counted apart and each on its primary checkpoint, {told}.")
    return " ".join(sentences)
