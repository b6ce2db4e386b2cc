"""The explorer: change the positions of tokens in a model and see the effect, live.

The side of the library, the server and the widget.

    session_edits   one change of positions as data that a page may send
    passes          forward passes under edits; layers before the first edited one are not computed
                    again
    session         one prompt and its edits: `look`, `changed`, `continuation`, `suggest`
                    of head_scores (with orders), token_row, continuation and python_cell
    steps           long work, one step at a time
    messages        requests of a page, checked
    explored        the answers as JSON, of head_map_json, row_files, explored_run and same_texts
    server          answers over HTTP on this machine, for `repo-interp explore`
    widget          answers in a notebook, for `ri.explore`

The package is above `analysis` and `plots` and below `cli`. The page in `page/` computes nothing:
every number on it is an answer of a session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repo_interp.explorer.session import Session
from repo_interp.explorer.session_edits import Edit

if TYPE_CHECKING:
    from repo_interp.explorer.widget import ExplorerWidget

__all__ = ["Edit", "Session", "explore"]


def explore(bridge: Any, prompts: Any, against: Any = None) -> ExplorerWidget:
    """Show the explorer of a model in a notebook.

        ri.explore(bridge, ri.prompt("The first man on the moon was Neil Armstrong.", bridge,
        generated=-2))

    Args:
        bridge: Bridge, as `ri.load` returns it.
        prompts: One or several, in any form that `ri.analyze` takes.
        against: Another bridge, to compare over the same texts.

    Returns:
        The widget.

    Raises:
        InputError: The prompts are none, a bridge cannot read them, or anywidget is missing.
    """
    from repo_interp.explorer.explored import Explored
    from repo_interp.explorer.same_texts import over_the_same_texts
    from repo_interp.explorer.widget import ExplorerWidget

    explored = Explored(bridge, prompts)
    return ExplorerWidget(explored if against is None else over_the_same_texts(explored, against))
