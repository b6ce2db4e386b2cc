"""Facts from the launcher: number of processes, rank of this process, and its machine.

`accelerate launch`, `torchrun` and others set environment variables. `processes` connects the
processes.
"""

from __future__ import annotations

import os
import socket

from repo_interp.errors import InputError, one_line


def launched() -> int:
    """Return the number of processes that were launched together.

    The number is in the environment variables of the launcher.

    Returns:
        The number; 1 without a launcher.

    Raises:
        InputError: The variables hold no valid number.
    """
    # Every launcher sets RANK; without it there is one process.
    if not os.environ.get("RANK"):
        return 1
    size = number_of_launcher("WORLD_SIZE", 1, 1_000_000)
    if size > 1:
        number_of_launcher("RANK", 0, size - 1)
    return size


def local_count() -> int:
    """Return the number of processes of this command on this machine.

    Returns:
        The number, including this process.
    """
    # Several processes may share the memory and devices of a machine.
    return number_of_launcher("LOCAL_WORLD_SIZE", 1, 1_000_000) if launched() > 1 else 1


def is_first() -> bool:
    """Return whether this is the process that prints and writes.

    Returns:
        True for the process of rank 0, and without a launcher.
    """
    return launched() == 1 or int(os.environ["RANK"]) == 0


def machine() -> str:
    """Return a name of this machine that fits into the name of a file.

    Returns:
        Up to 40 letters, digits and dashes.
    """
    return "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())[:40]


def number_of_launcher(name: str, least: int, most: int) -> int:
    """Read a number that a launcher leaves in the environment.

    Args:
        name: Name of the variable.
        least: Smallest number; also the default without the variable.
        most: Largest number.

    Returns:
        The number.

    Raises:
        InputError: The text is not a number, or is out of range.
    """
    text = os.environ.get(name) or str(least)
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
        raise InputError(
            f"{name}={one_line(text, 40)} in the environment; wanted a whole number from "
            f"{least} to {most:,}, as accelerate launch and "
            "torchrun set it"
        )
    return int(text)
