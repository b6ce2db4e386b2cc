"""What fails without costing the rest: the figures of one group, a table of another package.

    for name, figure in until_failure(lambda: draw(run), "the figures of 'gates'", failures): ...
    with noted(failures, "the page"): ...

A failure becomes one line in a list that the caller shows. Also `sys.exit`, called by somebody else's code, is such a failure; an
interruption by the user is none. Knows nothing about what fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
_LONGEST = 300
"""Characters of a reason."""


def until_failure(make: Callable[[], Iterable[Item]], what: str, failures: list[str]) -> Iterator[Item]:
    """The items that `make` gives, up to the first that cannot be made; a line in `failures` then says that `what` failed, and why."""
    try:
        items = iter(make())
    except (Exception, SystemExit) as error:
        failures.append(line(what, error))
        return
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except (Exception, SystemExit) as error:
            failures.append(line(what, error))
            return
        yield item


@contextmanager
def noted(failures: list[str], what: str) -> Iterator[None]:
    """A context whose failure becomes a line in `failures`. OSError passes through: what cannot be written is the caller's to say."""
    try:
        yield
    except OSError:
        raise
    except (Exception, SystemExit) as error:
        failures.append(line(what, error))


def line(what: str, error: BaseException) -> str:
    """One line that says that `what` failed, and why."""
    return f"{what}: {' '.join(f'{type(error).__name__}: {error}'.split())[:_LONGEST]}"
