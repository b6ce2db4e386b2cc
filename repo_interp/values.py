"""Values from outside: types and ranges stated once, and every refusal as one line.

    epsilon: Annotated[float, Interval(ge=0, le=1e6)] = 0.2      type and range of a field

Ranges use `annotated_types`, and pydantic checks them; this module writes the errors, for options.
No number is NaN or infinite. This module knows nothing about the meaning of values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Interval, MinLen

from repo_interp.errors import InputError, quoted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter

Count = Annotated[int, Interval(ge=1, le=1_000_000)]
"""How many of something, at least one."""
CountOrNone = Annotated[int, Interval(ge=0, le=1_000_000)]
"""How many of something; 0 has another meaning."""
Tokens = Annotated[int, Interval(ge=1, le=1 << 22)]
"""A number of tokens."""
TokensOrNone = Annotated[int, Interval(ge=0, le=1 << 22)]
"""A number of tokens, or of a token; 0 may have another meaning."""
Seed = Annotated[int, Interval(ge=0, lt=1 << 63)]
Share = Annotated[float, Interval(ge=0, le=1)]
Positive = Annotated[float, Interval(gt=0, le=1e9)]
Finite = Annotated[float, Interval(ge=-1e9, le=1e9)]
PositiveOrZero = Annotated[float, Interval(ge=0, le=1e9)]
_SHOWN = 80
"""Characters of a value in a message."""


def checked(value: Any, kind: Any, name: str) -> Any:
    """Hold a value to a type.

    Args:
        value: A whole number is taken for a float, a list for a tuple, numpy's numbers for
            Python's.
        kind: Type with its range.
        name: Name of the option, for the message.

    Returns:
        The value, converted.

    Raises:
        InputError: The value is of another type, out of range, or not finite.
    """
    from pydantic import ValidationError

    try:
        # Strict: True is no number and "3" is no 3, apart from what `_as_python` turns.
        return adapter(kind, strict=True).validate_python(_as_python(value))
    except ValidationError:
        raise InputError(f"{name} is {quoted(value)}; wanted {in_words(kind)}") from None


def check_fields(options: DataclassInstance, called: str = "") -> None:
    """Hold the fields of a dataclass to their types and ranges, in `__post_init__`.

    Args:
        options: The dataclass; converted values are set.
        called: Name that the user has for it.

    Raises:
        InputError: A field does not hold.
    """
    kinds = field_kinds(type(options))
    for field in dataclasses.fields(options):
        # Fields whose types are unknown here, such as those of another package, pass.
        if field.init and field.name in kinds:
            given = getattr(options, field.name)
            value = checked(
                given, kinds[field.name], f"{called}.{field.name}" if called else field.name
            )
            if value is not given:
                # Frozen dataclasses allow no assignment; this is how their __init__ assigns.
                object.__setattr__(options, field.name, value)


def in_words(kind: Any) -> str:
    """Describe a type and its range: "a whole number from 1 on", "a word or none".

    Args:
        kind: Type with its range.

    Returns:
        The words.
    """
    # Types with None are described without it first, so that "or none" is at the end.
    if may_be_none(kind):
        return f"{in_words(without_none(kind))} or none"
    fewest = (
        any(isinstance(part, MinLen) for part in get_args(kind)[1:])
        if _is_annotated(kind)
        else False
    )
    # Bounds belong to the annotation, the rest to the type inside.
    bounds, kind = _bounds(kind), bare_type(kind)
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
    """Cut the end of a long text.

    Args:
        text: The text.
        most: Characters that are kept.

    Returns:
        The text, with dots in place of the removed part.
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def format_ranges(numbers: Sequence[int]) -> str:
    """Format sorted whole numbers as ranges.

    Args:
        numbers: Whole numbers in ascending order.

    Returns:
        Text such as "0-3, 5".
    """
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def duration(seconds: float) -> str:
    """Write seconds for people: "40 s", "12 min", "1.6 h".

    Args:
        seconds: A duration.

    Returns:
        The text.
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@cache
def field_kinds(options: type) -> dict[str, Any]:
    """Return the types and ranges of the fields of a dataclass.

    Args:
        options: The class.

    Returns:
        Types by field; empty if names of types are unknown.
    """
    try:
        return get_type_hints(options, include_extras=True)
    # Names that are imported for type checkers only do not exist here.
    except NameError:
        return {}


def adapter(kind: Any, strict: bool) -> TypeAdapter:
    """Return pydantic's validator of a type.

    Args:
        kind: Type with its range.
        strict: Nothing is converted.

    Returns:
        The validator, cached.
    """
    try:
        return _cached_adapter(kind, strict)
    except TypeError:  # a type that cannot be hashed
        # __wrapped__ is the same function without its cache.
        return _cached_adapter.__wrapped__(kind, strict)


@cache
def _cached_adapter(kind: Any, strict: bool) -> TypeAdapter:
    from pydantic import ConfigDict, TypeAdapter

    # Arrays and other types that pydantic does not know are held to isinstance.
    return TypeAdapter(
        kind, config=ConfigDict(strict=strict, allow_inf_nan=False, arbitrary_types_allowed=True)
    )


def _as_python(value: Any) -> Any:
    """Lists as tuples, and numbers of numpy as Python's."""
    if isinstance(value, list | tuple):
        return tuple(map(_as_python, value))
    # Numbers of numpy, and arrays without axes
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _several(kind: Any) -> str:
    bounds, bare = _bounds(kind), bare_type(kind)
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
    # frexp gives 0.5 <= fraction < 1, so a power of 2 has its exponent plus 1.
    power = math.frexp(limit)[1] - 1
    if power > 30 and limit == 1 << power:
        return f"2^{power}"
    return f"{limit:,.0f}" if limit == int(limit) else f"{limit:g}"


def _is_annotated(kind: Any) -> bool:
    return get_origin(kind) is Annotated


def may_be_none(kind: Any) -> bool:
    """Tell whether a type allows None.

    Args:
        kind: Type with its range.

    Returns:
        Whether it is a union with None.
    """
    return get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)


def without_none(kind: Any) -> Any:
    """Return `int` for `int | None`, any other type as it is.

    Args:
        kind: Type with its range.

    Returns:
        The type without None.
    """
    if not may_be_none(kind):
        return kind
    # A union of one member is that member.
    return Union[tuple(member for member in get_args(kind) if member is not NoneType)]  # noqa: UP007


def bare_type(kind: Any) -> Any:
    """Return a type without None and without its range.

    Args:
        kind: Type with its range.

    Returns:
        The type.
    """
    kind = without_none(kind)
    return get_args(kind)[0] if _is_annotated(kind) else kind
