"""Functions of position schemes that no package gives, as checkpoints state them.

    position_layout.functions     {SCHEME: {"function": NAME, "sha256": DIGEST}}

DIGEST is of the source that the function stands in: of its file, or of its own text where that is a
notebook's or the main program's. A checkpoint states it and names no code: whoever opens one names
the function. Loads no torch.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from repo_interp.entry_points import SCHEMES as SCHEME_GROUP
from repo_interp.errors import InputError
from repo_interp.installed_points import installed_points
from repo_interp.records import abbreviate

Functions = dict[str, dict[str, str]]
"""Name and digest of the function of a scheme, by scheme."""


def source_of(function: Callable[..., Any]) -> dict[str, str]:
    """Describe a function by its name and the SHA-256 of its source.

    Args:
        function: Any function.

    Returns:
        `function` and `sha256`; nothing where the source cannot be read.
    """
    try:
        file = Path(inspect.getsourcefile(function) or "")
        # A program does more than to define its scheme, so its other lines do not count.
        whole = function.__module__ != "__main__" and file.is_file()
        source = file.read_bytes() if whole else inspect.getsource(function).encode()
    except (OSError, TypeError, AttributeError):
        return {}
    return {
        "function": getattr(function, "__qualname__", function.__class__.__name__),
        "sha256": hashlib.sha256(source).hexdigest(),
    }


def functions_of(schemes: Collection[str]) -> Functions:
    """Describe the functions that schemes have in this process.

    Args:
        schemes: Names of schemes.

    Returns:
        Those of registered schemes with a source, sorted by name.
    """
    sources = {
        point.name: dict(point.source)
        for point in installed_points(SCHEME_GROUP)
        if getattr(point, "source", None)
    }
    return {name: sources[name] for name in sorted(set(schemes) & sources.keys())}


def read_functions(stated: Any, schemes: Collection[str], source: str) -> Functions:
    """Read `position_layout.functions`.

    Args:
        stated: The value.
        schemes: Names of the schemes of the layout.
        source: The file, for errors.

    Returns:
        The functions that are stated.

    Raises:
        InputError: The value is no such table.
    """
    fits = isinstance(stated, Mapping) and all(
        name in schemes
        and isinstance(of_one, Mapping)
        and of_one.keys() == {"function", "sha256"}
        and isinstance(of_one["function"], str)
        and re.fullmatch("[0-9a-f]{64}", str(of_one["sha256"]))
        for name, of_one in stated.items()
    )
    if not fits:
        raise InputError(
            f"{source} has functions {abbreviate(stated)}; wanted function and sha256 of schemes "
            "of the layout"
        )
    return {name: dict(of_one) for name, of_one in stated.items()}


def other_functions(stated: Functions) -> str:
    """Compare functions that a checkpoint or a training states with those of this process.

    Args:
        stated: As `read_functions` gives them.

    Returns:
        Schemes whose function is another one now, with both; "" where there is none.
    """
    present = functions_of(stated)
    return "; ".join(
        f"{name!r} was {in_words(known)}, and is {in_words(present.get(name))} now"
        for name, known in stated.items()
        if present.get(name) != known
    )


def in_words(function: Mapping[str, str] | None) -> str:
    """Describe a function in a few words.

    Args:
        function: Name and digest; None: no source is known.

    Returns:
        The words.
    """
    if function is None:
        return "of no source that is known"
    return f"{function['function']} of a source with SHA-256 {function['sha256'][:12]}..."
