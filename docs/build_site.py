"""Builds the documentation as a site in build/site: `make site`, or `python docs/build_site.py`.

README.md, docs/*.md and the READMEs of plug-ins    pages; every file of the repository that they link to, and so on, is copied too
ri.*                       a page for the package and for each of its public modules, from __all__ and the docstrings
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STAGED = ROOT / "build" / "site_pages"
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)
QUIET = {"NO_MKDOCS_2_WARNING": "1"}
"""No advertisement of another program in the output."""
MODULES = ("tasks", "measures", "experiments", "interventions", "plots", "explorer")
"""The public modules of the package, in the order of its docstring."""
GROUPS = {
    "Open a model": ("repo_interp.models",),
    "Prompts": ("repo_interp.tasks", "repo_interp.analysis.coercion"),
    "Change a model": ("repo_interp.interventions",),
    "Score": ("repo_interp.analysis.score", "repo_interp.plugins.results.failing_cell"),
    "During training": (
        "repo_interp.plugins.training.training",
        "repo_interp.plugins.training.measured_step",
        "repo_interp.plugins.training.scalars",
    ),
    "Runs": (
        "repo_interp.run",
        "repo_interp.comparison",
        "repo_interp.plots",
        "repo_interp.explorer",
        "repo_interp.plugins.head_tables.head_numbers",
    ),
    "Measure": ("repo_interp.analysis", "repo_interp.measures"),
    "Errors": ("repo_interp.errors",),
    "More": ("repo_interp",),
}
"""Sections of the page of `ri.*`: a name belongs to the first whose module it is from."""


def linked(page: Path) -> Iterator[Path]:
    """The files of the repository that a page links to; of a directory its README."""
    for target in filter(
        None, (inline or below for inline, below in LINK.findall(page.read_text(encoding="utf-8")))
    ):
        there = (page.parent / target.partition("#")[0]).resolve()
        there = there / "README.md" if there.is_dir() else there
        if "://" not in target and there.is_file() and there.is_relative_to(ROOT):
            yield there


def reachable() -> list[Path]:
    """README.md, the pages of docs/, and all that they lead to."""
    waiting, found = (
        [
            ROOT / "README.md",
            ROOT / "SECURITY.md",
            *sorted((ROOT / "docs").glob("*.md")),
            *sorted((ROOT / "repo_interp" / "plugins").glob("*/README.md")),
        ],
        [],
    )
    while waiting:
        file = waiting.pop(0)
        if file not in found:
            found.append(file)
            waiting += linked(file) if file.suffix == ".md" else ()
    return found


def api_pages() -> Iterator[tuple[str, str]]:
    """The name and the text of every page of the reference."""
    package = importlib.import_module("repo_interp")
    groups: dict[str, list[str]] = defaultdict(list)
    for name, there in _public(package):
        groups[
            next(
                title
                for title, places in GROUPS.items()
                if f"{there}.".startswith(tuple(f"{p}." for p in places))
            )
        ] += [_directive(f"ri.{name}", there)]
    lines = ["# ri.*", "", "`import repo_interp as ri`", ""]
    lines += [
        line for title in GROUPS if groups[title] for line in (f"## {title}", "", *groups[title])
    ]
    yield "api/index.md", "\n".join(lines)
    for short in MODULES:
        module = importlib.import_module(f"repo_interp.{short}")
        text = inspect.cleandoc(module.__doc__ or "").partition("\n")[0]
        entries = [
            _directive(f"ri.{short}.{name}", there) + _call(getattr(module, name))
            for name, there in _public(module)
        ]
        yield f"api/{short}.md", "\n".join([f"# ri.{short}", "", text, "", *entries])


def _public(module: ModuleType) -> Iterator[tuple[str, str]]:
    """The classes and functions that a module offers, each with the place of its definition."""
    for name in sorted(getattr(module, "__all__", None) or dir(module), key=str.lower):
        value = getattr(module, name)
        if not name.startswith("_") and inspect.isroutine(value) | inspect.isclass(value):
            yield name, f"{value.__module__}.{value.__qualname__}"


def _directive(shown: str, place: str) -> str:
    return f"::: {place}\n    options:\n      heading: {shown}\n      toc_label: {shown}\n"


def _call(function: Any) -> str:
    """How an edit of positions is called: its entry shows the class that the function is made from."""
    if not inspect.isclass(getattr(function, "__wrapped__", None)):
        return ""
    signature = inspect.signature(function)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    call = signature.replace(parameters=plain, return_annotation=signature.empty)
    return (
        "      members: false\n      show_signature: false\n\n"
        f"```python\n{function.__name__}{call}\n```\n\n"
        "`model`, `heads`, `layer` and `tokens` are those of `ri.interventions.replaced`. Returns a "
        "context manager.\n"
    )


def stage() -> None:
    """Put everything that the site is made of into `STAGED`."""
    shutil.rmtree(STAGED, ignore_errors=True)
    for file in reachable():
        place = STAGED / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    for name, text in api_pages():
        page = STAGED / "docs" / name
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    stage()
    sys.exit(
        subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=ROOT, env=os.environ | QUIET
        ).returncode
    )
