"""The laboratory: four papers on token positions, by name, in the order of the page over all of
them.

Each is an object `PAPER` (`kit.experiment.Paper`) that is imported when it is needed: each figure
or claim as data, a verdict by a rule that was there before the data, and a drawing.
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
"""What figures are written in."""


def require_papers(names: Iterable[str]) -> None:
    """Raise InputError for the first of `names` that is no paper. Imports none."""
    for name in names:
        if name not in PAPERS:
            raise InputError(
                f"there are no figures of {name!r}; there are those of {', '.join(PAPERS)}, "
                f"and {ALL}"
            )


def paper(name: str) -> Paper:
    """The paper `name`. Raises InputError naming those there are."""
    require_papers([name])
    return import_module(f"position_papers.{name.replace('-', '_')}.paper").PAPER


def named(names: Iterable[str]) -> dict[str, Paper]:
    """The papers that a user names, each once, in our order; all of them for none, or "all".

    Raises InputError as `paper` does.
    """
    wanted = list(names) or [ALL]
    asked = {name: paper(name) for name in wanted if name != ALL}
    return {name: paper(name) for name in PAPERS if ALL in wanted or name in asked}
