"""Long calls into other languages, which an interruption ends at once.

    encoded = interruptible(lambda: tokenizer(text))

Python handles Ctrl-C only between two Python instructions, so a call of seconds runs in a separate
thread while the main thread waits. After an interruption the call ends with the process:
`abandoned` says that the process must not wait for it. This module knows nothing about the calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
_NAME = "repo_interp: interruptible"


def interruptible(call: Callable[[], Result]) -> Result:
    """Make a call that frees Python's lock, and wait for it.

    Args:
        call: Function without arguments.

    Returns:
        Its result.

    Raises:
        BaseException: The error of `call`, or an interruption; `call` then continues in the
        background.
    """
    results: list[Result] = []
    failures: list[BaseException] = []

    def make() -> None:
        try:
            results.append(call())
        except BaseException as error:
            failures.append(error)

    # A daemon: the process does not wait for it at its end
    thread = threading.Thread(target=make, name=_NAME, daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def abandoned() -> bool:
    """Return whether an abandoned call is still running.

    Returns:
        Whether one runs. Valid only if no other thread makes such calls.
    """
    return any(thread.name == _NAME for thread in threading.enumerate())
