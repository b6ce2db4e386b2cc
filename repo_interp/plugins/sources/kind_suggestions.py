"""Edits of all heads of one kind, for the explorer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from repo_interp.analysis.analyze import analyze
from repo_interp.explorer.session import Session
from repo_interp.explorer.session_edits import Edit
from repo_interp.models.lasting import at_rest
from repo_interp.plots.marks.arrays import heads_where
from repo_interp.plots.marks.finding import heads_named
from repo_interp.plugins.sources.names import NAMES

MOVES: tuple[Any, ...] = ("linearised", "frozen")
"""Kinds of edits that are tried."""


def kinds(session: Session, progress: Callable[[int, int], None]) -> list[tuple[Edit, float]]:
    """Try edits of all heads of one kind (`position_sources`), with any effect.

    Args:
        session: Model, prompt and answer.
        progress: Not called, since every edit takes only one pass.

    Returns:
        Edits with their effects in nats.
    """
    with at_rest(session.decoder):
        sources = analyze(session.bridge, [session.prompt], ("position_sources",))[
            "position_sources"
        ].to_dataset()
    clean, tried = session.log_probability(()), []
    for name in NAMES:
        found = tuple(heads_where(sources["kind"] == name))
        for move in MOVES if found else ():
            named = f"{heads_named(found, 3)} ({name})"
            edit = Edit(kind=move, heads=found, named=named)
            tried.append((edit, session.log_probability((edit,)) - clean))
    return tried
