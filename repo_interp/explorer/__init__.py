"""The explorer: change the positions of tokens in a model and see what follows, live; the library's side, the server and the widget.

    edits      one change of positions: where and what, as data that a page may send
    passes     forward passes under edits; what lies before the first edited layer is not computed again
    session    one prompt and its edits: `look`, `changed`, `continuation`, `suggest`, `as_python`
    messages   what a page may ask, checked, and the answers as JSON
    server     answers over HTTP on this machine, for `repo-interp explore`
    widget     answers in a notebook, for `ri.explore`

Stands above `analysis` and `plots` and below `cli`. The page in `page/` computes nothing: each number it shows is an answer of a session.
"""

from repo_interp.explorer.edits import Edit
from repo_interp.explorer.session import Session

__all__ = ["Edit", "Session"]
