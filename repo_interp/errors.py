"""Errors that a user can fix, and warnings.

An error is one line - wanted, given, remedy -; the command line prints it and exits 2.

    InputError        input that a user can correct: a checkpoint, a prompts file, an option
      Taken           a directory of other results, of other files or of another process
      Unfinished      work that stopped for a reason that can be fixed; the same call continues it
      NotFinite       numbers that became NaN or infinite, with their layer, head and prompt
    Note              a warning that affects results; the command line prints it and continues

Any other error is a bug of this package or of another one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Literal

_LONGEST = 1000
"""Characters of a line."""
_PASSED_OVER = (__name__.partition(".")[0], "contextlib")
"""Packages that are not the user's code: ours, and contextlib, which ends our contexts."""


class InputError(ValueError):
    """Input that a user can correct, such as an option, a checkpoint or a file of prompts.

    The message is one printable line, whatever text it quotes.
    """

    def __init__(self, message: str) -> None:
        # Messages quote files and options, which may hold line breaks and escape sequences.
        super().__init__(one_line(message, _LONGEST))


class Note(UserWarning):
    """A warning that a user must know although nothing is refused, on one printable line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, _LONGEST))


@contextmanager
def shown_as(
    kind: type[Note], show: Callable[[str], object], action: Literal["always", "error"] = "always"
) -> Iterator[None]:
    """Hand warnings of a kind to a function inside a `with` block; others are shown as before.

    Args:
        kind: Class of the warnings.
        show: Receives the message.
        action: "error" raises the warnings instead.

    Yields:
        Nothing.
    """

    def show_warning(
        message: Warning | str, category: type[Warning], *place: Any, **more: Any
    ) -> None:
        if issubclass(category, kind):
            show(str(message))
        else:
            others(message, category, *place, **more)

    # catch_warnings restores showwarning as well as the filters.
    with warnings.catch_warnings():
        # always: the default shows a warning once per line, and notes differ by text.
        warnings.simplefilter(action, kind)
        others, warnings.showwarning = warnings.showwarning, show_warning
        yield


def warn(message: str, kind: type[Note] = Note) -> None:
    """Warn at the line that called the package.

    Args:
        message: The text of the warning.
        kind: Class of the warning.
    """
    # stacklevel counts frames from this one, and our depth differs by call.
    frame, calls = sys._getframe(1), 2
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER
    ):
        # Skip all of our frames, so that the warning names the user's line.
        frame, calls = frame.f_back, calls + 1
    warnings.warn(kind(message), stacklevel=calls)


class Taken(InputError):
    """The directory belongs to other results, to other files or to another process."""


class Unfinished(InputError):
    """Work stopped for a reason that a user can fix; the same call then continues."""


class NotFinite(InputError):
    """Numbers that are NaN or infinite, where finite ones were to be measured."""


class NotFinitePrediction(NotFinite):
    """The predictions of a model for a prompt are NaN or infinite."""

    def __init__(self, prompt: int, among: str = "") -> None:
        """Make the error of a prompt; `among` names the set of numbered prompts."""
        super().__init__(
            f"the model's predictions for prompt {prompt}{f' of {among}' if among else ''} "
            "are NaN or infinite"
        )
        self.prompt = prompt


@contextmanager
def renumber_prompts(numbers: Sequence[int], among: str = "") -> Iterator[None]:
    """Name prompts by other numbers in errors of predictions inside a `with` block.

    Args:
        numbers: Number by place among the prompts that a function was given.
        among: The prompts that are numbered, in words.

    Yields:
        Nothing.

    Raises:
        NotFinitePrediction: As inside the context, with the other number.
    """
    try:
        yield
    except NotFinitePrediction as found:
        # Only the numbers change; without `from None` the inner number would be shown as well.
        raise NotFinitePrediction(numbers[found.prompt], among) from None


@contextmanager
def as_input_errors(message: str, longest: int = 300) -> Iterator[None]:
    """Turn every error into an InputError inside a `with` block.

    Args:
        message: Beginning of the message.
        longest: Characters of the error that are kept.

    Yields:
        Nothing.

    Raises:
        InputError: As inside the context, or for any other error there.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # The message names the file; the library's traceback does not.
        raise InputError(f"{message}: {one_line(error, longest)}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Ask whether the known name that is nearest to an unknown one was meant.

    Args:
        name: Unknown name.
        known: Known names.

    Returns:
        "did you mean X? "; empty if none is near.
    """
    # 0.75 matches typing errors, not every name of the same length.
    close = get_close_matches(name, tuple(known), n=1, cutoff=0.75)
    return f"did you mean {close[0]}? " if close else ""


def one_line(text: object, longest: int = 300) -> str:
    """Write text on one line without control characters.

    Args:
        text: An error, a name, a path; an error without text is called by its type.
        longest: Characters that are kept; the middle of a longer line is left out.

    Returns:
        The line.
    """
    # Some exceptions have no text; their type is used instead.
    words = " ".join(str(text).split()) or (
        type(text).__name__ if isinstance(text, BaseException) else ""
    )
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    # The end is kept: it contains remedies, and the cause in errors of libraries.
    end = min(100, (longest - 3) // 2)
    return line if len(line) <= longest else f"{line[: longest - 3 - end]}...{line[-end:]}"


def quoted(value: object, longest: int = 80) -> str:
    """Describe a given value that is wrong, for a message.

    Args:
        value: Any object, such as a number, or a model instead of prompts.
        longest: Characters of a text or number that are kept.

    Returns:
        The `repr` of the value; "a TYPE" if that is longer or has several lines.
    """
    if isinstance(value, str | bytes | int | float):
        return one_line(repr(value), longest)
    text = repr(value)
    kind = type(value).__name__
    article = "an" if kind[0] in "AEIOUaeiou" else "a"
    return text if len(text) <= longest and "\n" not in text else f"{article} {kind}"
