"""Values from outside: types and ranges stated once, text as values, and every refusal as one line.

    epsilon: Annotated[float, Interval(ge=0, le=1e6)] = 0.2      a field says its type and range; text and Python are held to them alike
    "0.1,0.2" as tuple[float, ...] -> (0.1, 0.2)        95 seconds -> "2 min"        NaN -> None

Ranges are those of `annotated_types`, and pydantic checks them; what it finds wrong is said here,
for options as for files. No number is NaN or infinite. Knows nothing about what the values mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Interval, MinLen

from repo_interp.errors import InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter

Options = TypeVar("Options", bound="DataclassInstance")

Count = Annotated[int, Interval(ge=1, le=1_000_000)]
"""How many of something, at least one."""
CountOrNone = Annotated[int, Interval(ge=0, le=1_000_000)]
"""How many of something; 0 has a meaning of its own."""
Tokens = Annotated[int, Interval(ge=1, le=1 << 22)]
"""A number of tokens."""
TokensOrNone = Annotated[int, Interval(ge=0, le=1 << 22)]
"""A number of tokens, or of a token; 0 may have a meaning of its own."""
Seed = Annotated[int, Interval(ge=0, lt=1 << 63)]
Share = Annotated[float, Interval(ge=0, le=1)]
Positive = Annotated[float, Interval(gt=0, le=1e9)]
Finite = Annotated[float, Interval(ge=-1e9, le=1e9)]
PositiveOrZero = Annotated[float, Interval(ge=0, le=1e9)]
_SHOWN = 80
"""Characters of a value in a message."""


def value_of(text: str, kind: Any, name: str) -> Any:
    """`text` as a value of the type `kind`; items of a tuple stand between commas, "none" is None
    where `kind` allows it.

    Raises InputError that names `name` and the wanted type and range.
    """
    from pydantic import ValidationError

    if _may_be_none(kind) and text.strip().lower() == "none":
        return None
    is_tuple = get_origin(_bare(kind)) is tuple
    parsed = (
        tuple(part.strip() for part in text.split(",") if part.strip())
        if is_tuple
        else text.strip()
    )
    try:
        return adapter(_without_none(kind), strict=False).validate_python(parsed)
    except ValidationError:
        raise InputError(f"{name}={shortened(text)}: wanted {in_words(kind)}") from None


def checked(value: Any, kind: Any, name: str) -> Any:
    """`value` as a value of the type `kind`; a whole number is taken for a float, a list for a
    tuple, numpy's numbers for Python's.

    Raises InputError that names `name`, the wanted type and range, for a value of another type, out
    of range, or not finite.
    """
    from pydantic import ValidationError

    try:
        return adapter(kind, strict=True).validate_python(_as_python(value))
    except ValidationError:
        raise InputError(f"{name} is {shortened(repr(value))}; wanted {in_words(kind)}") from None


def check_fields(options: DataclassInstance, called: str = "") -> None:
    """Hold every field of a dataclass to the type and range that it states; what is wanted of all
    is `__post_init__`.

    `called` is what the user calls `options`. Raises InputError for the first field that does not
    hold.
    """
    kinds = _kinds(type(options))
    for field in dataclasses.fields(options):
        if field.init and field.name in kinds:
            given = getattr(options, field.name)
            value = checked(
                given, kinds[field.name], f"{called}.{field.name}" if called else field.name
            )
            if value is not given:
                object.__setattr__(options, field.name, value)


def field_value(
    options: Any, name: str, text: str, called: str, fixed: Collection[str] = ()
) -> Any:
    """`text` as a value of the type of the field `name` of the dataclass `options`.

    `called` is what the user calls `options`; fields in `fixed` cannot be set. Raises InputError
    for a field that it lacks and for a text of another type.
    """
    fields = dataclasses.fields(options) if dataclasses.is_dataclass(options) else ()
    known = [field.name for field in fields if field.init and field.name not in fixed]
    if name not in known:
        raise InputError(
            f"{called} has no option {shortened(repr(name))}; it has {', '.join(known) or 'none'}"
        )
    return value_of(
        text,
        _kinds(options if isinstance(options, type) else type(options))[name],
        f"{called}.{name}",
    )


def with_field(
    options: Options, name: str, text: str, called: str, fixed: Collection[str] = ()
) -> Options:
    """`options`, a dataclass, with its field `name` set to what `text` says, as `field_value` reads
    it.

    Raises InputError as `field_value`, and for a value that `options` refuses.
    """
    value = field_value(options, name, text, called, fixed)
    try:
        return dataclasses.replace(options, **{name: value})
    except ValueError as error:
        raise InputError(f"{called}.{name}={shortened(text)}: {error}") from None


def in_words(kind: Any) -> str:
    """A type and its range as people say them: "a whole number from 1 on", "numbers with commas
    between them", "a word or none".
    """
    if _may_be_none(kind):
        return f"{in_words(_without_none(kind))} or none"
    fewest = (
        any(isinstance(part, MinLen) for part in get_args(kind)[1:])
        if _is_annotated(kind)
        else False
    )
    bounds, kind = _bounds(kind), _bare(kind)
    if get_origin(kind) is tuple:
        return (
            _several(get_args(kind)[0])
            + " with commas between them"
            + (", at least one" if fewest else "")
        )
    if get_origin(kind) is Mapping:
        return "a table of numbers and words"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    return plain.get(kind, str(kind)) + bounds


def shortened(text: str, most: int = _SHOWN) -> str:
    """`text`, its end left out where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def duration(seconds: float) -> str:
    """Seconds as people say them: "40 s", "12 min", "1.6 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def json_number(value: float, digits: int = 6) -> float | None:
    """`value` with as many significant digits, as JSON takes it; None for NaN and infinities."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


@cache
def _kinds(options: type) -> dict[str, Any]:
    """Types and ranges of the fields of a dataclass; none where its module does not say where the
    names of its types come from.
    """
    try:
        return get_type_hints(options, include_extras=True)
    except NameError:
        return {}


def adapter(kind: Any, strict: bool) -> TypeAdapter:
    """What pydantic checks a value of the type `kind` with; `strict`: nothing is converted."""
    try:
        return _cached_adapter(kind, strict)
    except TypeError:  # a type that cannot be hashed
        return _cached_adapter.__wrapped__(kind, strict)


@cache
def _cached_adapter(kind: Any, strict: bool) -> TypeAdapter:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(
        kind, config=ConfigDict(strict=strict, allow_inf_nan=False, arbitrary_types_allowed=True)
    )


def _as_python(value: Any) -> Any:
    """Lists as tuples, and numbers of numpy as Python's."""
    if isinstance(value, list | tuple):
        return tuple(map(_as_python, value))
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _several(kind: Any) -> str:
    bounds, bare = _bounds(kind), _bare(kind)
    if get_origin(bare) is Literal:
        return f"some of {', '.join(map(str, get_args(bare)))}"
    return {int: "whole numbers", float: "numbers"}.get(bare, "words") + bounds


def _bounds(kind: Any) -> str:
    """The range of an annotated type, in words that follow its name."""
    limits = (
        next((part for part in get_args(kind)[1:] if isinstance(part, Interval)), None)
        if _is_annotated(kind)
        else None
    )
    if limits is None:
        return ""
    if limits.ge is not None and limits.le is not None:
        return f" from {_written(limits.ge)} to {_written(limits.le)}"
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    stated = [
        f"{word} {_written(getattr(limits, end))}"
        for end, word in words.items()
        if getattr(limits, end) is not None
    ]
    return f" {' and '.join(stated)}"


def _written(limit: Any) -> str:
    """A large power of 2 as such, other numbers with commas."""
    power = math.frexp(limit)[1] - 1
    if power > 30 and limit == 1 << power:
        return f"2^{power}"
    return f"{limit:,.0f}" if limit == int(limit) else f"{limit:g}"


def _is_annotated(kind: Any) -> bool:
    return get_origin(kind) is Annotated


def _may_be_none(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)


def _without_none(kind: Any) -> Any:
    """`int | None` -> `int`; any other type as it is."""
    if not _may_be_none(kind):
        return kind
    return Union[tuple(member for member in get_args(kind) if member is not NoneType)]  # noqa: UP007


def _bare(kind: Any) -> Any:
    """A type without None and without its range."""
    kind = _without_none(kind)
    return get_args(kind)[0] if _is_annotated(kind) else kind
