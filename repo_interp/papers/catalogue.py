"""The papers whose figures can be made again, by name.

A paper is a module with `Options`, a dataclass of what may be chosen; `figures(checkpoints, options, progress)`, a list of
`result.Result`; and `unmeasured(results)`, verdicts on what nothing was found about.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from repo_interp.errors import InputError

PAPERS = {
    "hope": "repo_interp.papers.hope",
    "position_generalization": "repo_interp.papers.position_generalization",
}


def paper(name: str) -> ModuleType:
    """The module of paper `name`. Raises InputError naming those there are."""
    if name not in PAPERS:
        raise InputError(f"there are no figures of {name!r}; there are those of {', '.join(PAPERS)}")
    return import_module(PAPERS[name])
