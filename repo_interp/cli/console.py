"""The terminal: a rich console to which no text of a user can give commands.

    console.print(f"[bold]{plain(path)}[/bold]")

Brackets of a path are printed as they are; control characters, escape sequences and bytes that are no text stand as \\x1b and the like.
"""

from __future__ import annotations

from typing import Any

import rich.console
from rich.markup import escape
from rich.text import Text

from repo_interp.errors import one_line
from repo_interp.processes import is_first


class Console(rich.console.Console):
    """A console that shows control characters instead of sending them on. Of several processes the first alone prints."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"quiet": not is_first(), **options})

    def on_broken_pipe(self) -> None:
        """Raises it again: what a reader who is gone means is for the command to say."""
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """`text` with its markup, line by line, without control characters."""
        lines = ("".join(c if c.isprintable() else one_line(c) or " " for c in line) for line in text.split("\n"))
        return super().render_str("\n".join(lines), **options)


def plain(text: object) -> str:
    """`text` of a user to be put between markup: its brackets are no markup."""
    return escape(one_line(text, 1000))
