"""Errors that a user can mend: what was wanted, what came, what to do.

Each is one line; the command line prints it and exits 2.

    InputError        bad input from outside: a checkpoint, a prompts file, an option
      Taken             a directory that belongs to other results, to other files or to another process
      Unfinished        work that stopped for something that can be mended; what is done is kept, and the same call goes on
      NotFinite         numbers that became NaN or infinite on the way: which, in which layer, head and prompt
    Note              a warning: nothing is wrong, but results rest on it; the command line prints it and goes on

Whatever else is raised is a mistake of ours, or of another package.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

_LONGEST = 1000
"""Characters of a line."""
_PASSED_OVER = (__name__.partition(".")[0], "contextlib")
"""Where the code of a user is not: our own calls, and those that end a context of ours."""


class InputError(ValueError):
    """Bad input from outside.

    The message is one printable line, whatever the text that it quotes holds.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, _LONGEST))


class Note(UserWarning):
    """What a user must know although nothing is refused, on one printable line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, _LONGEST))


@contextmanager
def shown_as(
    kind: type[Note], show: Callable[[str], object], action: Literal["always", "error"] = "always"
) -> Iterator[None]:
    """While the context lasts, warnings of a `kind` are handed to `show`, or raised; others are
    shown as before.
    """

    def show_warning(
        message: Warning | str, category: type[Warning], *place: Any, **more: Any
    ) -> None:
        if issubclass(category, kind):
            show(str(message))
        else:
            others(message, category, *place, **more)

    with warnings.catch_warnings():
        warnings.simplefilter(action, kind)
        others, warnings.showwarning = warnings.showwarning, show_warning
        yield


def warn(message: str, kind: type[Note] = Note) -> None:
    """Warn of `message`, a Note of a `kind`, at the line that called the package."""
    frame, calls = sys._getframe(1), 2
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER
    ):
        frame, calls = frame.f_back, calls + 1
    warnings.warn(kind(message), stacklevel=calls)


class Taken(InputError):
    """The directory belongs to other results, to other files or to another process."""


class Unfinished(InputError):
    """Work stopped for something that can be mended: what is done is kept, and the same call goes
    on from there.
    """


class NotFinite(InputError):
    """Numbers that are NaN or infinite, where finite ones were to be measured."""


class NotFinitePrediction(NotFinite):
    """What a model predicts for a prompt is NaN or infinite."""

    def __init__(self, prompt: int, among: str = "") -> None:
        """`prompt`: its number; `among`: which prompts are numbered, where it does not go without
        saying.
        """
        super().__init__(
            f"the model's predictions for prompt {prompt}{f' of {among}' if among else ''} "
            "are NaN or infinite"
        )
        self.prompt = prompt


@contextmanager
def numbered(numbers: Sequence[int], among: str = "") -> Iterator[None]:
    """While the context lasts, prompts are called by `numbers` in place of their places among those
    that a function was given.
    """
    try:
        yield
    except NotFinitePrediction as found:
        raise NotFinitePrediction(numbers[found.prompt], among) from None


@contextmanager
def refused(said: str, longest: int = 300) -> Iterator[None]:
    """While the context lasts, any error becomes an InputError that begins with `said`; an
    InputError stays as it is.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{said}: {one_line(error, longest)}") from None


def one_line(text: object, longest: int = 300) -> str:
    """What `text` says - an error, a name, a path - on one line that a terminal can show: no line
    breaks, no control characters.

    The middle of a longer one is left out; an error that says nothing is called by its type.
    """
    words = " ".join(str(text).split()) or (
        type(text).__name__ if isinstance(text, BaseException) else ""
    )
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    return line if len(line) <= longest else f"{line[: longest - 103]}...{line[-100:]}"
