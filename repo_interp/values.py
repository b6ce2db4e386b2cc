"""Values as text and text as values: what a user writes becomes a value of the wanted type, and numbers become what people and JSON read.

    "0.1,0.2" as tuple[float, ...] -> (0.1, 0.2)        95 seconds -> "2 min"        NaN -> None

Knows nothing about what the values mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from repo_interp.errors import InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


def value_of(text: str, kind: Any, name: str) -> Any:
    """`text` as a value of the type `kind`; items of a tuple stand between commas, "none" is None where `kind` allows it.

    Raises InputError that names `name`, the wanted type and the reason.
    """
    from pydantic import TypeAdapter, ValidationError

    if _may_be_none(kind) and text.strip().lower() == "none":
        return None
    is_tuple = get_origin(_without_none(kind)) is tuple
    parsed = tuple(part.strip() for part in text.split(",") if part.strip()) if is_tuple else text.strip()
    try:
        return TypeAdapter(_without_none(kind)).validate_python(parsed)
    except ValidationError as error:
        raise InputError(f"{name}={text}: wanted {in_words(kind)} ({error.errors()[0]['msg']})") from None


def checked(value: Any, kind: Any, name: str) -> Any:
    """`value` as a value of the type `kind`; a whole number is taken for a float, nothing else is converted.

    Raises InputError that names `name` and the type, for a value of another type and for a number that is not finite.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        raise InputError(f"{name} is {value!r}; wanted {in_words(kind)}") from None


def field_value(options: Any, name: str, text: str, called: str, fixed: Collection[str] = ()) -> Any:
    """`text` as a value of the type of the field `name` of the dataclass `options`.

    `called` is what the user calls `options`; fields in `fixed` cannot be set. Raises InputError for a field that it lacks and for a text
    of another type.
    """
    fields = dataclasses.fields(options) if dataclasses.is_dataclass(options) else ()
    known = [field.name for field in fields if field.init and field.name not in fixed]
    if name not in known:
        raise InputError(f"{called} has no option {name!r}; it has {', '.join(known) or 'none'}")
    kinds = get_type_hints(options if isinstance(options, type) else type(options))
    return value_of(text, kinds[name], f"{called}.{name}")


def with_field(options: Options, name: str, text: str, called: str, fixed: Collection[str] = ()) -> Options:
    """`options`, a dataclass, with its field `name` set to what `text` says, as `field_value` reads it.

    Raises InputError as `field_value`, and for a value that `options` refuses.
    """
    value = field_value(options, name, text, called, fixed)
    try:
        return dataclasses.replace(options, **{name: value})
    except ValueError as error:
        raise InputError(f"{called}.{name}={text}: {error}") from None


def in_words(kind: Any) -> str:
    """A type as people say it: "a whole number", "numbers with commas between them", "a word or none"."""
    if _may_be_none(kind):
        return f"{in_words(_without_none(kind))} or none"
    if get_origin(kind) is tuple:
        return {int: "whole numbers", float: "numbers"}.get(get_args(kind)[0], "words") + " with commas between them"
    if get_origin(kind) is Mapping:
        return "a table of numbers and words"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    return plain.get(kind, str(kind))


def duration(seconds: float) -> str:
    """Seconds as people say them: "40 s", "12 min", "1.6 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def json_number(value: float, digits: int = 6) -> float | None:
    """`value` with as many significant digits, as JSON takes it; None for NaN and infinities."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _may_be_none(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)


def _without_none(kind: Any) -> Any:
    """`int | None` -> `int`; any other type as it is."""
    if not _may_be_none(kind):
        return kind
    return Union[tuple(member for member in get_args(kind) if member is not NoneType)]  # noqa: UP007
