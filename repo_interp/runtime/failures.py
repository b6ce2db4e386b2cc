"""Contained failures, such as the figures of one group or a table of another package.

    for name, figure in until_failure(lambda: draw(run), "the figures of 'gates'", failures): ...
    with record_failure(failures, "the page"): ...

A failure becomes one line in a list that the caller shows; without a list, the error is raised.
`sys.exit` in the code of another package is a failure too, but an interruption by the user is not.
This module knows nothing about the parts that fail.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from typing import TypeVar

from repo_interp.entry_points import OWN, kind_of, package_of
from repo_interp.errors import InputError, one_line
from repo_interp.installed_points import RegisteredPoint, installed_points

Item = TypeVar("Item")


def until_failure(
    make: Callable[[], Iterable[Item]], name: str, failures: list[str] | None
) -> Iterator[Item]:
    """Iterate over items up to the first that cannot be made.

    Args:
        make: Function that returns the items.
        name: Name of the items, for the line of a failure.
        failures: Receives the line; None: the error is raised.

    Yields:
        An item.
    """
    try:
        yield from make()
    # Items that were made before have been handed out already, and stay.
    except (Exception, SystemExit) as error:
        if failures is None:
            raise
        failures.append(_line(name, error))


@contextmanager
def record_failure(failures: list[str] | None, name: str) -> Iterator[None]:
    """Turn a failure inside the context into a line.

    OSError passes through, since the caller reports errors of the disk.

    Args:
        failures: Receives the line; None: the error is raised.
        name: Name of the result, for the line.

    Yields:
        Nothing.
    """
    try:
        yield
    # A full disk concerns everything that follows, not one figure.
    except OSError:
        raise
    except (Exception, SystemExit) as error:
        if failures is None:
            raise
        failures.append(_line(name, error))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that there was not enough memory.

    Args:
        error: An error of Python, numpy or torch on any device.

    Returns:
        True if it does.
    """
    # By name, since this module must not import torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # On a processor torch has no type for this error, so the text decides.
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in ("DefaultCPUAllocator", "not enough memory")
    )


def _line(name: str, error: BaseException) -> str:
    if isinstance(error, InputError):
        return f"{name}: {one_line(error)}"
    return f"{name}: {one_line(f'{type(error).__name__}: {error}')}"


def failure_of(error: BaseException) -> str | None:
    """Describe a failure in the code of another package.

    Args:
        error: An error with its traceback.

    Returns:
        Package, place and reason; None if no code of another package was called.
    """
    owners = {
        point.module.partition(".")[0]: _owner(group, point)
        for group in OWN
        for point in installed_points(group)
    }
    # Entry points may refer to our package; our bugs keep their traceback.
    of_ours = __name__.partition(".")[0]
    # From the innermost frame outwards: the deepest code of another package is at fault.
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in owners and package != of_ours:
            place = (
                f"{os.path.basename(frame.f_code.co_filename)}, line {line}, in "
                f"{frame.f_code.co_name}"
            )
            reason = one_line(f"{type(error).__name__}: {error}", 200)
            owner, remedy = owners[package]
            return f"code of the {owner} failed ({place}): {reason}; {remedy}"
    return None


def _owner(group: str, point: EntryPoint | RegisteredPoint) -> tuple[str, str]:
    """Return the owner of an entry point's code, and a remedy."""
    if isinstance(point, RegisteredPoint):
        return f"{kind_of(group)} {point.name!r}", "fix it"
    return f"package {package_of(point)}", "fix or uninstall it"
