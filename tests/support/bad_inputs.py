"""The catalogue of bad inputs: data in bad_inputs/*.toml, each refused in the one line that stands
beside it.

Of what one mechanism checks - the type and range of an option, a parameter, a key - it holds one of
each kind for a command and a file; test_types_and_ranges.py tries all others.

A file is a kind of input. Its `command` is what is typed, unless a case has its own; every case is
one bad input:

    config = { hidden_size = 0 }      what is changed in config.json of a tiny checkpoint (dots lead inside; "<absent>", "<null>")
    files = { "a.jsonl" = "text" }    files that are written; also { text = "[", times = 9 }, { hex = "ff" }, { link = "target" },
                                      { directory = true }, { pipe = true }
    prompt = '{"tokens": [1]}'        the last line of prompts.jsonl
    set = "patterns.epsilon=nan"      put behind the command, as `flags` are: whatever is typed beside it
    line = "..."                      what is said, whole; N is the memory of the machine; <measures>,
                                      <experiments> and <shipped> are the names there are
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from places import OFFICIAL, SUPPORT

TINY = OFFICIAL / "repo_mha"


@dataclass(frozen=True)
class Case:
    """One bad input."""

    kind: str
    number: int
    command: tuple[str, ...]
    given: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"

    @property
    def line(self) -> str:
        """What is to be said."""
        from repo_interp.checkpoint_files.shipped import shipped_names
        from repo_interp.experiments.experiment_catalogue import experiment_names
        from repo_interp.measures.measure_catalogue import measure_names

        line = self.given.get("line", "")
        known = {
            "measures": measure_names,
            "experiments": experiment_names,
            "shipped": shipped_names,
        }
        for word, named in known.items():
            if f"<{word}>" in line:
                line = line.replace(f"<{word}>", ", ".join(named()))
        return line


def cases() -> list[Case]:
    """Every case, in the order of the files."""
    return list(_cases())


def _cases() -> Iterator[Case]:
    for file in sorted((SUPPORT / "bad_inputs").glob("*.toml")):
        kind = tomllib.loads(file.read_text(encoding="utf-8"))
        for number, given in enumerate(kind["cases"]):
            words = shlex.split(given.get("command", kind.get("command", "")))
            words += ["--set", given["set"]] if "set" in given else []
            words += [_expanded(word) for word in given.get("flags", ())]
            yield Case(file.stem, number, tuple(words), given)


def said(case: Case, directory: Path) -> str:
    """The one line that the command says in the empty `directory`.

    Raises AssertionError where the exit code is not 2, where more than a line is said, or something
    is left.
    """
    _write(case, directory)
    before = _listing(directory)
    out, err = io.StringIO(), io.StringIO()
    from repo_interp.cli import main

    with (
        contextlib.chdir(directory),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(list(case.command))
    # progress, on a slow machine
    text = re.sub(r"^.* so far\n", "", err.getvalue(), flags=re.MULTILINE)
    # a measure refuses what it finds in a prompt
    announced = bool(out.getvalue()) and case.given.get("announced", False)
    assert code == 2 and (announced or not out.getvalue()), (code, out.getvalue(), text)
    assert text.startswith("repo-interp") and text.endswith("\n") and text[:-1].isprintable(), text
    assert _listing(directory) == before, f"left behind: {_listing(directory) ^ before}"
    return re.sub(r"and there are [\d,]+; ask", "and there are N; ask", text[:-1])


def _write(case: Case, directory: Path) -> None:
    given = case.given
    if "config" in given or any(word == "checkpoint" for word in case.command):
        shutil.copytree(
            TINY,
            directory / "checkpoint",
            ignore=shutil.ignore_patterns("*.npz", "demo*", "spans.json", "expected*"),
        )
    if "config" in given:
        file = directory / "checkpoint" / "config.json"
        raw = json.loads(file.read_text())
        for path, value in given["config"].items():
            *parents, name = path.split(".")
            target = raw
            for parent in parents:
                if not isinstance(target.get(parent), dict):
                    target[parent] = {}
                target = target[parent]
            if value == "<absent>":
                target.pop(name, None)
            else:
                target[name] = None if value == "<null>" else value
        file.write_text(json.dumps(raw))
    if "prompt" in given:
        (directory / "prompts.jsonl").write_text(
            given["prompt"] + "\n", encoding="utf-8", newline="\n"
        )
    for name, content in given.get("files", {}).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8", newline="\n")
        elif "link" in content:
            path.unlink(missing_ok=True)
            path.symlink_to(content["link"])
        elif "absent" in content:
            path.unlink()
        elif "directory" in content:
            path.unlink(missing_ok=True)
            path.mkdir()
        elif "pipe" in content:
            path.unlink(missing_ok=True)
            os.mkfifo(path)
        elif "hex" in content:
            path.write_bytes(bytes.fromhex(content["hex"]))
        elif "copy" in content:
            shutil.copy(SUPPORT.parent / content["copy"], path)
        else:
            path.write_text(_expanded(content))


def _expanded(word: Any) -> str:
    """A word of a command: itself, `text` so many `times`, or bytes that are no text."""
    if isinstance(word, str):
        return word
    if "hex" in word:
        return os.fsdecode(bytes.fromhex(word["hex"]))
    return word.get("before", "") + word["text"] * word["times"] + word.get("after", "")


def _listing(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}
