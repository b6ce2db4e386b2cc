"""docs/trust.md, from what is kept of each part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trust.outcome import kept

PAGE = Path("docs/trust.md")
HEAD = """# What was tried to break it

Written by `make trust` (`python -m trust`), from trust/results/; `python -m trust PART ...` runs parts again and leaves the other rows as
they were. A part that never ran stands as *not run*.

| part | what is tried | tried | held | | |
|---|---|---|---|---|---|
"""
MEANING = {
    "catalogue": "every bad input is one line and exit code 2; wrong answers of the past, beside Hugging Face's logits",
    "fuzz": "layouts, prompts, config.json, runs, flags: a value or a refusal, and what is written is read back",
    "kills": "SIGKILL at random moments; given again: the bytes of an undisturbed run, nothing half-written",
    "processes": "several processes on one command: the bytes of one, and of an undisturbed run where one of them is killed",
    "disk": "2 MB, nearly full: one line, and what stood there stands",
    "mutants": "mutants of positions/ and measures/ that the tests notice; at least 85 %",
    "coverage": "lines and branches of positions/ and measures/ that these tests reach",
    "versions": "official checkpoints and Hugging Face's logits with other libraries; of PyTorch the one CPU build that the index has",
}
"""Every part, in the order of the table."""


def write(parts: Sequence[str]) -> None:
    """Write the page from what is kept of `parts`."""
    lines, notes = [], []
    versions = ""
    for part in parts:
        outcome = kept(part)
        if outcome is None:
            lines.append(f"| {part} | {MEANING[part]} | | | *not run* | |")
            continue
        for number, row in enumerate(outcome.rows):
            verdict = "**held**" if row.tried and row.held >= outcome.needed * row.tried else "**did not hold**"
            share = f"{row.held:,} ({row.held / row.tried:.1%})" if row.tried and row.held != row.tried else f"{row.held:,}"
            first = f"{part} | {MEANING[part]}" if number == 0 else " | "
            lines.append(f"| {first} | {row.tried:,} | {share} | {row.what}{': ' if row.note else ''}{row.note} | {verdict} |")
        if not outcome.rows:
            lines.append(f"| {part} | {MEANING[part]} | | | *not run* | |")
        notes += [f"\n## {part}\n", *(f"- {_cell(detail)}" for detail in outcome.details)] if outcome.details else []
        versions = ", ".join(f"{name} {number}" for name, number in outcome.versions.items())
    tail = f"\nWith {versions}.\n" if any(kept(part) for part in parts) else ""
    PAGE.write_text(HEAD + "\n".join(lines) + "\n" + tail + "\n".join(notes) + "\n", encoding="utf-8")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
