"""Position schemes of Python files that a command line names: FILE.py:FUNCTION.

    FUNCTION(builder, rotation, d_head) -> SchemeParts

The scheme gets the name of the function, or of the file if the function is called `build`. In a
layout the text replaces a name: t5.py:build@1/3. This is the only code of the package that runs a
file of the user, and only commands call it: no checkpoint and no record of a training names code. A
file is a single source; checkpoints store its SHA-256. Other modules that it imports must be
installed.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from repo_interp.errors import InputError, one_line
from repo_interp.storage.files import regular

_SHOWN = "FILE.py:FUNCTION"
_ARGUMENTS = "builder, rotation, d_head"


def add_scheme_files(parser: argparse.ArgumentParser) -> None:
    """Declare `--scheme` of a command that opens a checkpoint.

    Args:
        parser: Parser of the command.
    """
    parser.add_argument(
        "--scheme",
        action="append",
        default=[],
        metavar=_SHOWN,
        help="a function of a Python file, which is run, that defines a position scheme of the "
        "checkpoint",
    )


def read_scheme_files(given: Sequence[str]) -> str | None:
    """Run the files that `--scheme` names, and register their schemes.

    Args:
        given: Texts FILE.py:FUNCTION.

    Returns:
        The functions with the SHA-256 of their sources, for the recorded options; None without any.

    Raises:
        InputError: A text names no file and function, or they cannot be used.
    """
    for text in given:
        if not _is_file(text) or "@" in text.rpartition(":")[2]:
            raise InputError(f"--scheme {text!r:.80}: wanted {_SHOWN}, such as t5.py:build")
    if not given:
        return None
    from repo_interp.checkpoint_files.options import functions_of

    named = functions_of(layout_of_files(",".join(given))[0].split(","))
    return ", ".join(f"{name} ({it['function']}, {it['sha256']})" for name, it in named.items())


def layout_of_files(layout: str) -> tuple[str, tuple[str, ...]]:
    """Run the files that a layout names, and register their schemes.

    Args:
        layout: A layout; FILE.py:FUNCTION may replace names.

    Returns:
        The layout with only names, and every FILE.py:FUNCTION in it.

    Raises:
        InputError: A file or a function cannot be used, or two have one name.
    """
    parts, found = layout.split(","), {}
    for place, part in enumerate(parts):
        if not _is_file(part):
            continue
        file, _, rest = part.strip().rpartition(":")
        function, at, start = rest.partition("@")
        if not file:
            raise InputError(f"{part.strip()!r:.80} names no function; give {_SHOWN}")
        name = Path(file).stem if function == "build" else function
        if found.setdefault(name, (file, function)) != (file, function):
            raise InputError(
                f"two schemes would be called {name!r}; give one of the functions another name"
            )
        parts[place] = f"{name}{at}{start}"
    for name, (file, function) in found.items():
        _register(name, Path(file), function)
    return ",".join(parts), tuple(f"{file}:{function}" for file, function in found.values())


def _is_file(part: str) -> bool:
    """Whether a part of a layout names a file, with a function or without."""
    return re.search(r"\.py(:|@|$)", part.strip()) is not None


def reference_of_file(text: str) -> Callable[..., Any]:
    """Run the file of a slow formula that a scheme is held against.

    Args:
        text: FILE.py:FUNCTION.

    Returns:
        The function of queries, keys, positions and, if it takes one more argument, the layer.

    Raises:
        InputError: The file or the function cannot be used.
    """
    file, _, function = text.rpartition(":")
    return _function(Path(file), function, "queries, keys, positions", "layer")[0]


def _register(name: str, file: Path, function: str) -> None:
    """Give the function of a file a name in layouts."""
    build, digest = _function(file, function, _ARGUMENTS)
    from repo_interp.models.scheme_registry import register_function

    # The digest of the text that ran, even if the file has changed since
    register_function(name, cast("Any", build), {"function": function, "sha256": digest})


def _function(
    file: Path, function: str, wanted: str, more: str = ""
) -> tuple[Callable[..., Any], str]:
    """A function of a file, which takes the arguments wanted or `more` too, and its digest."""
    module, digest = _module(file)
    found = getattr(module, function, None)
    if not callable(found):
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise InputError(
            f"{file} has no function {function!r:.80}; it has {', '.join(own) or 'none'}"
        )
    try:
        signature = inspect.signature(found)
        given = wanted.split(", ")
        given += [more] if more and len(signature.parameters) > len(given) else []
        signature.bind(*given)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{file}: {function} cannot be called with ({wanted}): {one_line(error, 120)}"
        ) from None
    return found, digest


def _module(file: Path) -> tuple[ModuleType, str]:
    """Run a file of the user as a module that no other import finds, with its digest."""
    try:
        content = regular(file).read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no file {file}; wanted {_SHOWN}") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror or error})") from None
    # By content, so that the edited file is another module
    digest = hashlib.sha256(content).hexdigest()
    module = ModuleType(f"scheme_{file.stem}_{digest[:12]}".replace(".", "_"))
    module.__file__ = str(file.resolve())
    # dataclasses look for their module
    sys.modules[module.__name__] = module
    try:
        exec(compile(content, module.__file__, "exec"), vars(module))
    # sys.exit in a file must not end the command without a word.
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise InputError(
            f"{file} cannot be run: {one_line(f'{type(error).__name__}: {error}', 200)}; fix it"
        ) from None
    return module, digest
