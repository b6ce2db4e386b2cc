"""The commands that are killed and starved, small enough for seconds, and which of their files must be the same bytes each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OFFICIAL = Path(__file__).resolve().parents[1] / "tests" / "official"


@dataclass(frozen=True)
class Subject:
    """A command, and how it goes on after an interruption."""

    name: str
    words: tuple[str, ...]
    again: tuple[str, ...]
    """Added when it is given again."""
    left_out: Callable[[Path], bool] = lambda path: False
    """Files that hold clock times, or are no result."""


def hidden(path: Path) -> bool:
    """Whether a file, or a directory above it, is hidden: what is kept to go on from, and what a killed process leaves."""
    return any(part.startswith(".") for part in path.parts)


def subjects(directory: Path) -> tuple[Subject, ...]:
    """The four commands; their inputs are written to `directory`."""
    prompts = directory / "prompts.jsonl"
    lines = [{"tokens": list(range(5, 45 + 3 * n)), "spans": {"needle": [9, 10]}, "generated": [38, 39]} for n in range(6)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    checkpoint = str(OFFICIAL / "repo_mha")
    some = ("--measures", "positions,attention_mass", "--layers", "5", "--heads", "0,1")
    analyze = ("analyze", checkpoint, "--prompts", str(prompts), *some)
    figures = ("figures", "hope", "--no-zoo", "--fast", "--checkpoint", "copying/rope_scattered=copying/rope_scattered")
    train = ("train", "reversal", "--layers", "1", "--width", "16", "--heads", "2", "--steps", "60", "--log-every", "10")
    return (
        Subject("score", ("score", "reversal/repo", "--count", "8", "--out", "out"), ("--overwrite",), hidden),
        Subject(
            "train",
            (*train, "--score-prompts", "8", "--checkpoint-every", "20", "--out", "out"),
            ("--resume",),
            lambda path: hidden(path) or path.suffix in (".jsonl", ".pt"),  # clock times; gone at the end
        ),
        Subject("analyze", (*analyze, "--out", "out"), ("--overwrite",), hidden),
        Subject("figures", (*figures, "--out", "out"), ("--overwrite",), hidden),
    )
