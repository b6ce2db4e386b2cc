"""Convert text of a command line to values of options.

    "0.1,0.2" as tuple[float, ...] -> (0.1, 0.2)        "3-5" as tuple[int, ...] -> (3, 4, 5)

`values` has the types and their ranges. This module knows nothing about the meaning of options.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import (
    TYPE_CHECKING,
    Any,
    TypeVar,
    get_args,
    get_origin,
)

from repo_interp.errors import InputError, quoted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

from repo_interp.values import (
    adapter,
    bare_type,
    field_kinds,
    in_words,
    may_be_none,
    shortened,
    without_none,
)

Options = TypeVar("Options", bound="DataclassInstance")


def value_of(text: str, kind: Any, name: str) -> Any:
    """Convert text to a value of a type.

    Args:
        text: The text. Commas separate items of a tuple, "3-7" stands for the whole numbers from 3
            to 7, and "none" for None if `kind` allows it.
        kind: Type with its range.
        name: Name of the option, for the message.

    Returns:
        The value.

    Raises:
        InputError: The text does not fit the type, or is out of range.
    """
    from pydantic import ValidationError

    # Before the type is checked: "none" would pass as a word.
    if may_be_none(kind) and text.strip().lower() == "none":
        return None
    is_tuple = get_origin(bare_type(kind)) is tuple
    parsed = (
        _items(text, bare_type(get_args(bare_type(kind))[0]) is int) if is_tuple else text.strip()
    )
    try:
        # Not strict: "3" becomes 3, as text of a command line needs.
        return adapter(without_none(kind), strict=False).validate_python(parsed)
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
            items += numbers or [part]  # a descending range is refused later, as text
        else:
            items.append(part)
    return tuple(items)


def field_value(
    options: Any, name: str, text: str, called: str, fixed: Collection[str] = ()
) -> Any:
    """Convert text to a value of a field.

    Args:
        options: A dataclass, or an instance.
        name: Name of the field.
        text: The text.
        called: Name of `options` in messages.
        fixed: Fields that cannot be set.

    Returns:
        The value.

    Raises:
        InputError: The field does not exist, or the text does not fit its type.
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
        field_kinds(options if isinstance(options, type) else type(options))[name],
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
        called: Name of `options` in messages.
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
