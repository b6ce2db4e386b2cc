"""Four papers on token positions, by name, in the order of the page over all papers.

Each paper is an object `PAPER` (`kit.experiment.Paper`), which is imported when it is needed. It
has figures and claims as data, verdicts by rules that were fixed before the measurement, and
drawings.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from repo_interp.errors import InputError

if TYPE_CHECKING:
    from position_papers.kit.experiment import Paper

PAPERS = ("repo", "hope", "cope", "position-generalization")
ALL = "all"
FORMATS = ("png", "svg", "pdf", "nc")
"""Formats of figures."""


def require_papers(names: Iterable[str]) -> None:
    """Raise InputError for the first of `names` that is not a paper. Imports no paper."""
    for name in names:
        if name not in PAPERS:
            raise InputError(
                f"there are no figures of {name!r}; there are those of {', '.join(PAPERS)}, "
                f"and {ALL}"
            )


def paper(name: str) -> Paper:
    """Return the paper `name`. Raises InputError with a list of the papers."""
    require_papers([name])
    return import_module(f"position_papers.{name.replace('-', '_')}.paper").PAPER


def named(names: Iterable[str]) -> dict[str, Paper]:
    """Return the papers that a user names, each once, in our order; all papers for no name, or
    "all".

    Raises InputError as `paper` does.
    """
    wanted = list(names) or [ALL]
    asked = {name: paper(name) for name in wanted if name != ALL}
    return {name: paper(name) for name in PAPERS if ALL in wanted or name in asked}
