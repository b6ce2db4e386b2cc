"""Values from outside: types and ranges stated once, text as values, and every refusal as one line.

    epsilon: Annotated[float, Interval(ge=0, le=1e6)] = 0.2      type and range of a field
    "0.1,0.2" as tuple[float, ...] -> (0.1, 0.2)        95 seconds -> "2 min"        NaN -> None

Ranges use `annotated_types`, and pydantic checks them; this module writes the errors, for options.
No number is NaN or infinite. This module knows nothing about the meaning of values.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import groupby
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

from repo_interp.errors import InputError, quoted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter

Options = TypeVar("Options", bound="DataclassInstance")

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


def value_of(text: str, kind: Any, name: str) -> Any:
    """Convert text to a value of a type.

    Args:
        text: Items of a tuple are separated by commas, and "3-7" are the whole numbers from 3 to 7;
            "none" is None if `kind` allows it.
        kind: Type with its range.
        name: Name of the option, for the message.

    Returns:
        The value.

    Raises:
        InputError: The text is of another type, or out of range.
    """
    from pydantic import ValidationError

    # Before the type is checked: "none" would pass as a word.
    if _may_be_none(kind) and text.strip().lower() == "none":
        return None
    is_tuple = get_origin(_bare(kind)) is tuple
    parsed = _items(text, _bare(get_args(_bare(kind))[0]) is int) if is_tuple else text.strip()
    try:
        # Not strict: "3" becomes 3, as text of a command line needs.
        return adapter(_without_none(kind), strict=False).validate_python(parsed)
    except ValidationError:
        raise InputError(f"{name}={shortened(text)}: wanted {in_words(kind)}") from None


def _items(text: str, whole: bool) -> tuple[str | int, ...]:
    """The items between commas; a range of whole numbers is expanded."""
    items: list[str | int] = []
    for part in filter(None, map(str.strip, text.split(","))):
        first, dash, last = part.partition("-")
        bounds = (first.strip(), last.strip())
        # Short numbers only, so that a range cannot become a list of billions
        if whole and dash and all(re.fullmatch("[0-9]{1,5}", bound) for bound in bounds):
            numbers = range(int(bounds[0]), int(bounds[1]) + 1)
            items += numbers or [part]  # a range that runs backwards is refused as it is
        else:
            items.append(part)
    return tuple(items)


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
    kinds = _kinds(type(options))
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


def field_value(
    options: Any, name: str, text: str, called: str, fixed: Collection[str] = ()
) -> Any:
    """Convert text to a value of a field.

    Args:
        options: A dataclass, or an instance.
        name: Name of the field.
        text: The text.
        called: Name that the user has for `options`.
        fixed: Fields that cannot be set.

    Returns:
        The value.

    Raises:
        InputError: There is no such field, or the text is of another type.
    """
    fields = dataclasses.fields(options) if dataclasses.is_dataclass(options) else ()
    known = [field.name for field in fields if field.init and field.name not in fixed]
    if name not in known:
        raise InputError(
            f"{called} has no option {quoted(name)}; it has {', '.join(known) or 'none'}"
        )
    return value_of(
        text,
        # A class, or one of its instances
        _kinds(options if isinstance(options, type) else type(options))[name],
        f"{called}.{name}",
    )


def with_field(
    options: Options, name: str, text: str, called: str, fixed: Collection[str] = ()
) -> Options:
    """Replace a field of a dataclass by text.

    Args:
        options: The dataclass.
        name: Name of the field.
        text: The text.
        called: Name that the user has for `options`.
        fixed: Fields that cannot be set.

    Returns:
        A new dataclass.

    Raises:
        InputError: As `field_value`, or `options` refuses the value.
    """
    value = field_value(options, name, text, called, fixed)
    try:
        # replace runs __post_init__, which may refuse the value.
        return dataclasses.replace(options, **{name: value})
    except ValueError as error:
        raise InputError(f"{called}.{name}={shortened(text)}: {error}") from None


def in_words(kind: Any) -> str:
    """Describe a type and its range: "a whole number from 1 on", "a word or none".

    Args:
        kind: Type with its range.

    Returns:
        The words.
    """
    # Types with None are described without it first, so that "or none" is at the end.
    if _may_be_none(kind):
        return f"{in_words(_without_none(kind))} or none"
    fewest = (
        any(isinstance(part, MinLen) for part in get_args(kind)[1:])
        if _is_annotated(kind)
        else False
    )
    # Bounds belong to the annotation, the rest to the type inside.
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
    """Cut the end of a long text.

    Args:
        text: The text.
        most: Characters that are kept.

    Returns:
        The text, with dots where it was cut.
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


def json_number(value: float, digits: int = 6) -> float | None:
    """Round a number for JSON.

    Args:
        value: The number.
        digits: Significant digits.

    Returns:
        The number; None for NaN and infinities.
    """
    # Rounded for size: a page holds thousands of such numbers.
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def as_json(value: Any) -> Any:
    """Return a value as JSON has it.

    Args:
        value: Mappings, lists and arrays of numbers and texts.

    Returns:
        Dictionaries and lists of Python's numbers; None for NaN and infinities.
    """
    # JSON has no NaN, and `JSON.parse` in a browser refuses Python's spelling of it.
    if getattr(getattr(value, "dtype", None), "kind", "") == "f":
        # Here, since `--help` loads this module
        import numpy as np

        finite: Any = np.isfinite(value)
        if finite.all():
            return value.tolist()
        numbers = value.astype(object)
        numbers[~finite] = None
        return numbers.tolist()
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {str(name): as_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def _kinds(options: type) -> dict[str, Any]:
    """Types and ranges of the fields of a dataclass; empty where names of types are unknown."""
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
    # frexp gives 0.5 <= fraction < 1, so a power of 2 has its exponent plus 1.
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
    # A union of one member is that member.
    return Union[tuple(member for member in get_args(kind) if member is not NoneType)]  # noqa: UP007


def _bare(kind: Any) -> Any:
    """A type without None and without its range."""
    kind = _without_none(kind)
    return get_args(kind)[0] if _is_annotated(kind) else kind
