"""Option values that several commands read the same way. Each raises argparse's own error for what it cannot read."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any


def number_list(text: str) -> tuple[int, ...]:
    """Numbers and ranges with commas: "0,3", "5-15", "0-2,7"."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise argparse.ArgumentTypeError(f"wanted numbers or ranges such as 0,3 or 5-15, not {text!r}")
        end = int(last) if dash else int(first)
        if end < int(first):
            raise argparse.ArgumentTypeError(f"the range {part.strip()} runs backwards")
        numbers.extend(range(int(first), end + 1))
    return tuple(dict.fromkeys(numbers))


def name_list(text: str) -> tuple[str, ...]:
    """Names with commas."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise argparse.ArgumentTypeError("wanted names with commas between them")
    return names


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number above zero, not {text!r}")
    return int(text)


def positive_or_zero(text: str) -> int:
    """A whole number, zero or above."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"wanted a whole number, zero or above, not {text!r}")
    return int(text)


def option_text(text: str) -> tuple[str, str]:
    """NAME=VALUE, both as text: what the option is for knows the value's type."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"wanted NAME=VALUE such as longest=20, not {text!r}")
    return name, value


def typed(texts: Iterable[tuple[str, str]] | None, owner: Any, called: str) -> dict[str, Any]:
    """The values of named texts, read as the types of the fields of the dataclass `owner`, which the user calls `called`."""
    from repo_interp.values import field_value

    return {name: field_value(owner, name, text, called) for name, text in texts or ()}


def parameter(text: str) -> tuple[str, str, str]:
    """A parameter of a measure: "patterns.epsilon=0.5"."""
    target, equals, value = text.partition("=")
    measure, dot, name = target.partition(".")
    if not (equals and dot and measure and name and value):
        raise argparse.ArgumentTypeError(f"wanted MEASURE.NAME=VALUE, such as patterns.epsilon=0.5, not {text!r}")
    return measure, name, value


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device` and `--dtype`."""
    parser.add_argument("--device", default="cpu", help="where the model runs: cpu, cuda, cuda:1, mps (default: cpu)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float64", "bfloat16", "float16"),
        help="precision of the model; below float32 positions themselves are rounded (default: float32)",
    )
