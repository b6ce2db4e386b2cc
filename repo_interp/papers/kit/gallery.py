"""The page over the figures of all papers: what became of every claim, and every figure, from the files that the papers' pages left.

    DIRECTORY/*/verdicts.csv, figures.csv -> DIRECTORY/README.md    pictures, and one line per claim
                                             DIRECTORY/claims.md    every claim and every number, as tables

The list of claims comes with the papers, so that those that nobody measured yet are there too. Every (claim, part) is a row of its own.
Knows no paper by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.files import write_text
from repo_interp.papers.kit.claims import FAILS, HOLDS, UNMEASURED, Claim, markdown_table
from repo_interp.papers.kit.experiment import Paper
from repo_interp.papers.kit.paper_directory import FIGURES, VERDICTS, read_rows

HEADING = "# The papers' figures, made again"
TABLES, TABLES_HEADING = "claims.md", "# Every claim and every number"
NOT_YET = "not measured yet"
EXTENSION = "none"
"""The paper's number of a claim that no paper makes: a question of ours to one of theirs."""
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
    "± is over what stands in parentheses: a standard deviation, where it says nothing else. n: sequences, prompts or seeds."
)


def require_own(directory: Path) -> None:
    """Raises InputError where a page would replace one that is not ours, or `directory` is a file."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; wanted a directory for the figures")
    for name, heading in (("README.md", HEADING), (TABLES, TABLES_HEADING)):
        page = directory / name
        if page.exists() and not page.read_text(encoding="utf-8", errors="replace").startswith(heading):
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
    parts += [f"Spreads, controls, scales and commands: [{TABLES}]({TABLES}).", *_lines(verdicts, papers), "## Figures"]
    for paper in papers:
        parts += _thumbnails(directory, paper)
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
    """By paper, a paragraph: which of its claims stand on their primary checkpoint, which do not, and which cannot be told, and why."""
    told = []
    for paper in papers:
        by_outcome: dict[str, list[str]] = {}
        for claim in paper.claims:
            own = [row for row in verdicts if row["claim"] == claim.label and row["paper_name"] == paper.name]
            if claim.paper_number == EXTENSION or not own:
                continue
            outcome = _primary(own, paper, claim)
            words = f"{claim.statement.rstrip('.')} ({claim.label})"
            if outcome == UNMEASURED:
                why = next((row["note"] for row in own if row["note"]), "")
                words += f" - {why.partition(': ')[0].partition('; ')[0]}" if why else ""
            by_outcome.setdefault(outcome, []).append(words)
        headings = {HOLDS: "Stands", FAILS: "Does not stand", UNMEASURED: "Cannot be told here"}
        sentences = [f"*{headings[outcome]}:* {'; '.join(by_outcome[outcome])}." for outcome in headings if outcome in by_outcome]
        if sentences:
            told.append(f"**{paper.title.partition(',')[0]}.** {' '.join(sentences)}")
    return told


def _lines(verdicts: Sequence[Mapping[str, str]], papers: Sequence[Paper]) -> list[str]:
    """By paper, one line per claim and part: what the paper says, what came of it, the quantity, ours by checkpoint, the paper's number."""
    lines = []
    for paper in papers:
        lines.append(f"### {paper.title}")
        told = []
        for claim in paper.claims:
            own = [row for row in verdicts if row["claim"] == claim.label and row["paper_name"] == paper.name]
            quantities: dict[str, list[str]] = {}
            for row in own:
                if row["ours"]:
                    quantities.setdefault(row["measured"], []).append(_number(row))
            ours = "; ".join(f"{measured}: {', '.join(numbers)}" for measured, numbers in quantities.items())
            result = _together(own).split(":")[0]
            told.append(
                f"- **{claim.label}** {claim.statement}. {result}{f' - {ours}' if ours else ''} (paper: {claim.paper_number})"
            )
        lines.append("\n".join(told))
    return lines


def claim_rows(verdicts: Sequence[Mapping[str, str]], papers: Sequence[Paper]) -> list[dict[str, str]]:
    """One row per claim and part, in order of the papers: what came out on all checkpoints, with what gives the row."""
    rows = []
    for paper, claim in ((each, claim) for each in papers for claim in each.claims):
        own = [row for row in verdicts if row["claim"] == claim.label and row["paper_name"] == paper.name]
        commands = dict.fromkeys(row["command"] for row in own) or {f"repo-interp figures {paper.name}": None}
        rows.append(
            {
                "claim": f"[{claim.label}]({paper.name}/README.md)" if own else claim.label,
                "statement": f"{claim.statement} ({claim.source})",
                "paper": claim.paper_number,
                "ours": "<br>".join(_number(row) for row in own if row["ours"]),
                "verdict": _together(own),
                "primary": _primary(own, paper, claim),
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
            spread = f"± {row['spread']} ({row['spread_over']})" if row["spread"] else ""
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


def _number(row: Mapping[str, str]) -> str:
    spread = f" ± {row['spread']}" if row["spread"] else ""
    return f"{row['checkpoint']}: {row['ours']}{spread}"


def _together(rows: Sequence[Mapping[str, str]]) -> str:
    """What the verdicts of one claim come to."""
    if not rows:
        return NOT_YET
    judged = [row["verdict"] for row in rows if row["verdict"] != UNMEASURED]
    if not judged:
        notes = dict.fromkeys(row["note"] for row in rows if row["note"])
        return f"{UNMEASURED}: {'; '.join(notes)}" if notes else UNMEASURED
    held = judged.count(HOLDS)
    if held == len(judged):
        return f"**{HOLDS}**" + (f" ({held} of {held})" if held > 1 else "")
    return f"{HOLDS} in {held} of {len(judged)}" if held else FAILS


def _primary(rows: Sequence[Mapping[str, str]], paper: Paper, claim: Claim) -> str:
    """The verdict on the checkpoint that the claim is about first of all: of those its experiment names, the first that has a row."""
    names = [name for experiment in paper.experiments if claim in experiment.claims for name in experiment.needs.zoo]
    by_checkpoint = {row["checkpoint"]: row["verdict"] for row in reversed(rows)}
    known = [by_checkpoint[name] for name in (*names, *reversed(by_checkpoint)) if name in by_checkpoint]
    return next((verdict for verdict in known if verdict != UNMEASURED), UNMEASURED if known else NOT_YET)


def tally(rows: Sequence[Mapping[str, str]]) -> str:
    """How many claims came out how on their primary checkpoint, from `claim_rows`: the papers', then our own extensions of them."""
    words = {
        HOLDS: "hold",
        FAILS: "do not hold",
        UNMEASURED: "are not measurable here",
        NOT_YET: "are not measured yet",
    }
    sentences = []
    for ours, what in (("", "claims of the papers"), (EXTENSION, "further ones of ours")):
        verdicts = [row["primary"] for row in rows if row["ours alone"] == ours]
        counts = ", ".join(f"{verdicts.count(verdict)} {told}" for verdict, told in words.items() if verdict in verdicts)
        if verdicts:
            sentences.append(f"Of {len(verdicts)} {what}, parts counted apart and each on its primary checkpoint, {counts}.")
    return " ".join(sentences)


def _thumbnails(directory: Path, paper: Paper) -> list[str]:
    file = directory / paper.name / FIGURES
    title = f"### [{paper.title}]({paper.name}/README.md)"
    if not file.is_file():
        return [title, f"Not made yet: `repo-interp figures {paper.name}`."]
    lines = ["| figure | |", "|---|---|"]
    for row in read_rows(file):
        figure, caption = row["figure"], row["caption"].replace("|", "\\|").replace("\n", " ")
        page = f"{paper.name}/README.md#{figure.lower()}"
        image = f'<a href="{page}"><img src="{paper.name}/{figure}.png" width="320" alt="{figure}"></a>'
        lines.append(f"| {image} | **{figure}**<br>{caption} |")
    return [title, "\n".join(lines) if len(lines) > 2 else "No figure."]
