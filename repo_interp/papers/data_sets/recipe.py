"""The data sets that cannot come with the package, as a paper of its own: `data_sets.table_rows` on the files that users give."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repo_interp.papers.data_sets import measurements as data_sets
from repo_interp.papers.data_sets.measurements import CLAIMS
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import UNMEASURED, Verdict
from repo_interp.papers.kit.result import Result
from repo_interp.tasks.data_sets import NAMES

__all__ = ["CLAIMS", "DATA", "FAST", "TITLE", "ZOO", "Options", "figures", "unmeasured"]

TITLE = "Data sets that cannot come with the package"
FAST: Mapping[str, Any] = {"questions": 20}
ZOO = ("language/repo", "language/rope")
DATA = tuple(NAMES)


@dataclass(frozen=True)
class Options(data_sets.Options):
    """How much is asked, and of which files."""

    data: tuple[tuple[str, str], ...] = ()
    """Names of data sets and where they are."""


def figures(
    checkpoints: Mapping[str, str | os.PathLike[str]], options: Options, progress: Callable[[str], None], cache: Cache
) -> list[Result]:
    """The table of scores. Raises InputError as `data_sets.table_rows` does."""
    return data_sets.table_rows(checkpoints, dict(options.data), options, progress, cache)


def unmeasured(results: Sequence[Result]) -> list[Verdict]:
    """A verdict "not measurable here" for each claim that the table says nothing about."""
    found = {verdict.claim.id for result in results for verdict in result.verdicts}
    return [Verdict(claim, "none", UNMEASURED, "", note="no data set was given") for claim in CLAIMS if claim.id not in found]
