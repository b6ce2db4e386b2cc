"""The page over the figures of all papers: what became of every claim, and every figure, from the files that the papers' pages left.

    DIRECTORY/*/verdicts.csv, figures.csv -> DIRECTORY/README.md

Knows the list of claims, so that those that nobody measured yet are there too; nothing about how any is measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.papers.catalogue import PAPERS, all_claims, base, paper
from repo_interp.papers.kit.claims import FAILS, HOLDS, UNMEASURED, Claim, markdown_table
from repo_interp.papers.kit.figure_directory import FIGURES, VERDICTS, read_rows

HEADING = "# The papers' figures, made again"
NOT_YET = "not measured yet"
CLAIM_COLUMNS = {
    "claim": "claim",
    "statement": "what the paper says",
    "paper": "paper's number",
    "ours": "ours",
    "verdict": "verdict",
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
    "control": "control",
    "scale": "how our scale differs",
}
_INTRODUCTION = (
    "Every figure and number below was made by the commands beside them; nothing is typed by hand. The models are small, and so is what "
    "they were trained on: a claim that does not hold here may hold at the paper's scale. The rules that judge were written in code before "
    "anything was measured; they stand on each paper's page, with notes on every verdict."
)
_SPREAD = (
    "± is over what stands in parentheses: a standard deviation, where it says nothing else. n: sequences, prompts or seeds."
)


def require_own(directory: Path) -> None:
    """Raises InputError where the page would replace one that is not ours, or `directory` is a file."""
    page = directory / "README.md"
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; wanted a directory for the figures")
    if page.exists() and not page.read_text(encoding="utf-8", errors="replace").startswith(HEADING):
        raise InputError(f"{page} is another page; give --out a directory of its own")


def write_gallery(directory: Path) -> Path:
    """Write the page over all papers in `directory`, whole or not at all, and return it. The same files give the same bytes."""
    claims = claim_rows(_verdicts(directory))
    numbers = number_rows(_verdicts(directory))
    parts = [HEADING, _INTRODUCTION, "## Claims", _tally(claims), markdown_table(claims, CLAIM_COLUMNS)]
    parts += ["## Numbers", _SPREAD, markdown_table(numbers, NUMBER_COLUMNS), "## Figures"]
    for name in PAPERS:
        parts += _thumbnails(directory, name)
    page = directory / "README.md"
    unfinished = page.with_name(".README.md.unfinished")
    unfinished.write_text("\n\n".join(parts) + "\n", encoding="utf-8", newline="\n")
    os.replace(unfinished, page)
    return page


def claim_rows(verdicts: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """One row a claim, in order: what was found about it on all checkpoints, with what gives the row."""
    rows = []
    for id, parts in all_claims().items():
        found = [row for row in verdicts if base(row["claim"]) == id]
        name, claim = _whole(parts)
        commands = dict.fromkeys(row["command"] for row in found) or {f"repo-interp figures {name}": None}
        rows.append(
            {
                "claim": f"[{id}]({found[0]['paper_name']}/README.md)" if found else id,
                "statement": f"{claim.statement} ({claim.source})",
                "paper": claim.paper_number,
                "ours": "<br>".join(_one(row, len(parts) > 1) for row in found if row["ours"]),
                "verdict": _together(found),
                "command": "<br>".join(f"`{command}`" for command in commands),
            }
        )
    return rows


def number_rows(verdicts: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """One row a verdict, in the claims' order; one that says so for a claim without any."""
    rows = []
    for id in all_claims():
        found = [row for row in verdicts if base(row["claim"]) == id]
        for row in found:
            spread = f"± {row['spread']} ({row['spread_over']})" if row["spread"] else ""
            rows.append({**row, "spread": spread, "measured": row["measured"] or row["note"]})
        if not found:
            rows.append(dict.fromkeys(NUMBER_COLUMNS, "") | {"claim": id, "verdict": NOT_YET})
    return rows


def _verdicts(directory: Path) -> list[dict[str, str]]:
    files = {name: directory / name / VERDICTS for name in PAPERS}
    return [{**row, "paper_name": name} for name, file in files.items() if file.is_file() for row in read_rows(file)]


def _whole(parts: Sequence[tuple[str, Claim]]) -> tuple[str, Claim]:
    """The claim itself among its parts; the first part where the paper judges only parts."""
    return next(((name, claim) for name, claim in parts if claim.id == base(claim.id)), parts[0])


def _one(row: Mapping[str, str], part: bool) -> str:
    named = (
        f"{row['claim'].removeprefix(base(row['claim'])).strip(' ()')}, " if part and row["claim"] != base(row["claim"]) else ""
    )
    spread = f" ± {row['spread']}" if row["spread"] else ""
    return f"{named}{row['checkpoint']}: {row['ours']}{spread}"


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


def _tally(rows: Sequence[Mapping[str, str]]) -> str:
    def count(*words: str) -> int:
        return sum(row["verdict"].startswith(words) for row in rows)

    parts = {
        "hold": count(f"**{HOLDS}"),
        "hold in part": count(f"{HOLDS} in"),
        "do not hold": count(FAILS),
        "are not measurable here": count(UNMEASURED),
        "are not measured yet": count(NOT_YET),
    }
    return f"Of {len(rows)} claims, " + ", ".join(f"{number} {words}" for words, number in parts.items() if number) + "."


def _thumbnails(directory: Path, name: str) -> list[str]:
    file = directory / name / FIGURES
    title = f"### [{paper(name).TITLE}]({name}/README.md)"
    if not file.is_file():
        return [title, f"Not made yet: `repo-interp figures {name}`."]
    lines = ["| figure | |", "|---|---|"]
    for row in read_rows(file):
        figure, caption = row["figure"], row["caption"].replace("|", "\\|").replace("\n", " ")
        image = f'<a href="{name}/README.md#{figure.lower()}"><img src="{name}/{figure}.png" width="320" alt="{figure}"></a>'
        lines.append(f"| {image} | **{figure}**<br>{caption} |")
    return [title, "\n".join(lines) if len(lines) > 2 else "No figure."]
