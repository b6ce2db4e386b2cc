"""Long calls into other languages, which an interruption ends at once.

    encoded = interruptible(lambda: tokenizer(text))

Python hears Ctrl-C between two of its own steps, so a call of seconds is made in a thread of its
own while the main thread waits. What is left of such a call ends with the process: `abandoned`
says that the process must not wait for it. Knows nothing about the calls.
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
        BaseException: The error of `call`, or an interruption, after which it goes on unseen.
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
    """Tell whether a call goes on whose result nobody waits for.

    Returns:
        Whether one runs; asked where no other thread makes such calls.
    """
    return any(thread.name == _NAME for thread in threading.enumerate())
