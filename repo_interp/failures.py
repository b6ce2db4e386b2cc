"""What fails without costing the rest: the figures of one group, a table of another package.

    for name, figure in until_failure(lambda: draw(run), "the figures of 'gates'", failures): ...
    with noted(failures, "the page"): ...

A failure becomes one line in a list that the caller shows; where there is no list, it is raised.
Also `sys.exit`, called by somebody else's code, is such a failure; an interruption by the user is
none. Knows nothing about what fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from repo_interp.errors import one_line

Item = TypeVar("Item")


def until_failure(
    make: Callable[[], Iterable[Item]], what: str, failures: list[str] | None
) -> Iterator[Item]:
    """The items that `make` gives, up to the first that cannot be made; a line in `failures` then
    says that `what` failed, and why.
    """
    try:
        yield from make()
    except (Exception, SystemExit) as error:
        if failures is None:
            raise
        failures.append(_line(what, error))


@contextmanager
def noted(failures: list[str] | None, what: str) -> Iterator[None]:
    """A context whose failure becomes a line in `failures`.

    OSError passes through: what cannot be written is the caller's to say.
    """
    try:
        yield
    except OSError:
        raise
    except (Exception, SystemExit) as error:
        if failures is None:
            raise
        failures.append(_line(what, error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory was lacking: Python's, numpy's, or that of torch on any
    device.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in ("DefaultCPUAllocator", "not enough memory")
    )


def _line(what: str, error: BaseException) -> str:
    return f"{what}: {one_line(f'{type(error).__name__}: {error}')}"
