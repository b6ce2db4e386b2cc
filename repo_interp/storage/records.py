"""External JSON, validated by a pydantic model: configurations, indices of weights, prompts.

    validate(read_json(file, "an index"), Index, str(file))

A model defines every type and range; `complaint` turns pydantic's first error into one line.
This module knows nothing about the meaning of files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from repo_interp.errors import InputError
from repo_interp.storage.files import regular
from repo_interp.values import shortened

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound="BaseModel")
# Deep enough for any configuration, and shallow enough for recursive readers
_DEEPEST = 64
"""Levels of nested lists and objects that JSON may have."""


def parse_json(text: str, source: str = "") -> Any:
    """Parse JSON strictly.

    Args:
        text: The text.
        source: Beginning of messages.

    Returns:
        The value.

    Raises:
        InputError: The text is no JSON, has a key twice, NaN, infinities or half a character,
            or is nested too deep.
    """
    before = f"{source}: " if source else ""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # json silently keeps the last of two equal keys.
        named = dict(pairs)
        if len(named) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(
                f'{before}the key "{shortened(twice)}" occurs twice in one object; keep one'
            )
        return named

    # NaN and Infinity are no JSON, and Python reads them.
    def constant(name: str) -> NoReturn:
        raise InputError(f"{before}{name} is no JSON; give a finite number")

    try:
        value = json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except InputError:
        raise
    # Deep nesting exhausts Python's stack before its depth can be counted below.
    except RecursionError:
        value = _TOO_DEEP
    except ValueError as error:
        where = (
            f" at line {error.lineno}, column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else ""
        )
        reason = (
            error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(";")[0]
        )
        raise InputError(f"{before}broken JSON ({reason}{where}); fix it") from None
    # json reads half of a surrogate pair, which no file can be written with later.
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InputError(
                f"{before}a text contains half of a surrogate pair; write whole characters"
            ) from None
        except RecursionError:
            value = _TOO_DEEP
    level, depth = [value], 0
    # Level by level rather than by recursion, which deep values would exhaust
    while level and depth <= _DEEPEST:
        level = [part for parent in level for part in _parts(parent)]
        depth += 1
    if value is _TOO_DEEP or level:
        raise InputError(
            f"{before}lists and objects are nested more than {_DEEPEST} levels deep; wanted fewer"
        )
    return value


def read_json(file: Path, wanted: str) -> Any:
    """Read a file of JSON.

    Args:
        file: The file.
        wanted: The wanted file in words, for messages.

    Returns:
        The value.

    Raises:
        InputError: The file cannot be read, or is no JSON.
    """
    return parse_json(read_text(file, wanted), str(file))


def read_text(file: Path, wanted: str) -> str:
    """Read a file of UTF-8.

    Args:
        file: The file.
        wanted: The wanted file in words, for messages.

    Returns:
        The text.

    Raises:
        InputError: The file cannot be read, or is no text.
    """
    try:
        # utf-8-sig: editors of Windows begin files with a mark.
        return regular(file).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"there is no file {file}; wanted {wanted}") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; wanted {wanted}") from None
    except ValueError as error:
        reason = (
            f"byte {error.start} is not UTF-8"
            if isinstance(error, UnicodeDecodeError)
            else str(error)
        )
        raise InputError(f"{file} is no text: {reason}; wanted {wanted}") from None


def require_no_code(directory: Path) -> None:
    """Refuse a checkpoint with configurations that name code or files of this machine.

    transformers would ask whether to run classes that a configuration names, or run a stock class
    in their place. Tokenizers read vocabularies from any file that their configuration names.

    Args:
        directory: Directory of a checkpoint.

    Raises:
        InputError: A configuration of the model, tokenizer or processor names code or a file.
    """
    # Also configurations of tokenizers and processors, which transformers reads by itself
    files = [*directory.glob("*config*.json"), *directory.glob("special_tokens_map.json")]
    for file in sorted(file for file in files if file.is_file()):
        try:
            stated = json.loads(file.read_bytes())
        # Only the names that a file states are looked for here.
        except (OSError, ValueError, RecursionError):
            continue  # whoever needs the file refuses it
        if (named := next(_files_named(stated), None)) is not None:
            raise InputError(
                f"{file} names a file of this machine, {abbreviate(named)}, and a checkpoint does "
                "not choose what is read; remove it"
            )
        if isinstance(stated, dict) and "auto_map" in stated:
            raise InputError(
                f"{file} names code of its own (auto_map), and no code of a checkpoint is "
                "ever run; "
                "wanted a model and a tokenizer that transformers has itself"
            )


def _files_named(value: Any, key: str = "") -> Iterator[str]:
    """Texts in a value that are names of files here, except for a key that nothing reads."""
    # An existing file, so that ordinary words pass
    if isinstance(value, str) and key != "special_tokens_map_file" and os.path.isfile(value):
        yield value
    for name, part in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from _files_named(part, str(name))


def validate(value: Any, model: type[Model], source: str = "") -> Model:
    """Hold a value of JSON to a pydantic model.

    Args:
        value: The value.
        model: The model.
        source: Beginning of the message.

    Returns:
        An instance of the model.

    Raises:
        InputError: The value does not fit; the message names the first wrong place.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{source}: {complaint(error)}" if source else complaint(error)) from None


_UNION = ("constrained-", "list[", "function-")
"""How pydantic names the members of a union, which are no places in a file."""


def complaint(error: ValidationError) -> str:
    """Write pydantic's first error on one line.

    Args:
        error: The error.

    Returns:
        Place, wanted value, and the value that came.
    """
    # Unknown and missing keys first: other errors often follow from a misspelt key.
    first = min(
        error.errors(include_url=False),
        key=lambda found: found["type"] not in ("extra_forbidden", "missing"),
    )
    # Members of a union are among the places like keys.
    named = [part for part in first["loc"] if isinstance(part, int) or not part.startswith(_UNION)]
    # Items count from 1 in messages, as people do.
    place = "".join(
        f", item {part + 1}" if isinstance(part, int) else f" {json.dumps(part)}" for part in named
    ).lstrip(", ")
    if first["type"] == "extra_forbidden":
        return f"unknown key {shortened(place)}; leave it out"
    if first["type"] == "missing":
        return f"there is no {place}; add it"
    before = f"{shortened(place)}: " if place else ""
    if "error" in (context := first.get("ctx", {})):  # raised by a validator of ours
        return f"{before}{context['error']}"
    # The name of our class does not help the author of the file.
    wanted = re.sub(r"^\w+ should (be|have) | or instance of \w+$", "", first["msg"])
    # The value is repeated, since the file may be long
    return f"{before}wanted {wanted}, got {abbreviate(first['input'])}"


def abbreviate(value: Any) -> str:
    """Write a value of JSON as a short text.

    Args:
        value: The value.

    Returns:
        The text.
    """
    try:
        return shortened(json.dumps(value, ensure_ascii=True, default=str), 40)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"


_TOO_DEEP = object()


def _parts(value: Any) -> Iterator[Any]:
    """The lists and objects directly inside `value`."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (part for part in inside if isinstance(part, list | dict))
