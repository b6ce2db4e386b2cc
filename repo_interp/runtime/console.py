r"""The terminal: a rich console to which no text of a user can give commands.

    console.print(bold(path, "  the page to look at"))

Texts contain no markup, so that brackets and colons of a name are printed unchanged. Control
characters, escape sequences and bytes that are not text are printed as escapes such as \x1b.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rich.console
from rich.text import Text

from repo_interp.errors import one_line
from repo_interp.runtime.launcher import is_first


class Console(rich.console.Console):
    """A console that shows control characters instead of sending them.

    With several processes only the first one prints.
    """

    def __init__(self, **options: Any) -> None:
        # Only the first process prints. Without markup and emoji, brackets and colons of a path are
        # unchanged; without highlighting, numbers have the same color as other text.
        super().__init__(
            **{
                "quiet": not is_first(),
                "markup": False,
                "emoji": False,
                "highlight": False,
                **options,
            }
        )

    def on_broken_pipe(self) -> None:
        """Raise the error again, so that the command handles a closed pipe."""
        # rich would end the program here, deep inside the caller.
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Render text line by line, without control characters.

        Args:
            text: The text.
            **options: Options of rich.

        Returns:
            The text to show.
        """
        # Line by line, since a line break is not a printable character either
        return super().render_str("\n".join(_visible(line) for line in text.split("\n")), **options)


def on_one_line(text: object) -> str:
    """Write text of a user on one line.

    Args:
        text: Anything with a text.

    Returns:
        One printable line.
    """
    return one_line(text, 1000)


def bold(text: object, rest: str = "") -> Text:
    """Write text of a user on one line, in bold.

    Args:
        text: Anything with a text.
        rest: Text after it, not in bold.

    Returns:
        The text with styles.
    """
    return Text.assemble((on_one_line(text), "bold"), _visible(rest))


def span_of(numbers: Sequence[int]) -> str:
    """Write neighboring numbers as text: "4", or "4-9".

    Args:
        numbers: Ascending numbers without gaps.

    Returns:
        The text.
    """
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _visible(line: str) -> str:
    # one_line drops white space such as a tab, which becomes a space.
    return "".join(c if c.isprintable() else one_line(c) or " " for c in line)
