"""The pages as jinja2 templates: one per kind of page, and the words that they share
(`words.jinja`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from position_papers.kit.judge.claims import Kind, Verdict

LACKING = (Kind.LACKS, Kind.PART)


def rendered(page: str, **context: Any) -> str:
    """The page from the template of that name: "paper.md", "gallery.md", "numbers.md"."""
    return _templates().get_template(f"{page}.jinja").render(**context).rstrip() + "\n"


@cache
def _templates() -> Environment:
    """The templates, each of which is compiled once."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, trim_blocks=True, undefined=StrictUndefined)
    environment.tests["lacking"] = _is_lacking
    environment.filters["in_order"] = _in_order
    return environment


def _is_lacking(verdict: Verdict) -> bool:
    """Whether something that has to hold too does not."""
    return any(reason.kind in LACKING for reason in verdict.reasons)


def _in_order(
    rows: Iterable[Mapping[str, Any]], column: str
) -> list[tuple[Any, list[Mapping[str, Any]]]]:
    """The rows with the same value in `column` together, in the order in which values first stand;
    `groupby` of jinja2 sorts.
    """
    together: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        together.setdefault(row[column], []).append(row)
    return list(together.items())
