"""The papers whose figures can be made again, by name, and their claims, in order.

A paper is a module with

    TITLE       what its page is called
    Options     a frozen dataclass of how much is measured; every field has a default, `seed` and `device` among them
    FAST        fields of Options for a quick look
    ZOO         names of the checkpoints that it takes where none are given
    CLAIMS      every claim that it judges; a claim in several parts has several, "H4" and "H4 (wording)"
    figures(checkpoints, options, progress, cache)      a list of `result.Result`
    unmeasured(results)                                 verdicts on what nothing was found about

and, where it has them,

    seconds(checkpoints, options)       how long that will take at least, from a timed part of it
    DATA        names of the data sets that users may give as files; Options then has `data`, a tuple of (name, file)
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from types import ModuleType

from repo_interp.errors import InputError
from repo_interp.papers.kit.claims import Claim

PAPERS = {
    "repo": "repo_interp.papers.repo.recipe",
    "hope": "repo_interp.papers.hope.recipe",
    "cope": "repo_interp.papers.cope.recipe",
    "position-generalization": "repo_interp.papers.position_generalization.recipe",
    "data-sets": "repo_interp.papers.data_sets.recipe",
}
ALL = "all"
CLAIM_IDS = tuple(
    f"{letter}{number}" for letter, count in (("R", 9), ("H", 7), ("C", 6), ("P", 7)) for number in range(1, count + 1)
)
"""Every claim that is judged, in the order of the table."""


def paper(name: str) -> ModuleType:
    """The module of paper `name`. Raises InputError naming those there are."""
    if name not in PAPERS:
        raise InputError(f"there are no figures of {name!r}; there are those of {', '.join(PAPERS)}, and {ALL}")
    return import_module(PAPERS[name])


def named(names: Iterable[str]) -> dict[str, ModuleType]:
    """The papers that a user names, each once, in our order; all of them for none, or "all". Raises InputError as `paper` does."""
    wanted = list(names) or [ALL]
    modules = {name: paper(name) for name in wanted if name != ALL}
    return {name: paper(name) for name in PAPERS if ALL in wanted or name in modules}


def all_claims() -> dict[str, list[tuple[str, Claim]]]:
    """By id, in order: the claims of that id, parts of it included, each with the paper that judges it."""
    found: dict[str, list[tuple[str, Claim]]] = {id: [] for id in CLAIM_IDS}
    for name in PAPERS:
        for claim in paper(name).CLAIMS:
            found[base(claim.id)].append((name, claim))
    return found


def base(claim: str) -> str:
    """The id of the claim that `claim` is, or is a part of: "H4 (wording)" -> "H4"."""
    return claim.split()[0]
