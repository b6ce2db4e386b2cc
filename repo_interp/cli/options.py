"""Values of options that several commands share. Each function raises argparse's own error for what it cannot read."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any


def number_list(text: str) -> tuple[int, ...]:
    """The numbers in "0,3", "5-15" or "0-2,7", each once and in the order given."""
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
    """The names in a text with commas between them."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise argparse.ArgumentTypeError("wanted names with commas between them")
    return names


def positive(text: str) -> int:
    """The whole number above zero in `text`."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number above zero, not {text!r}")
    return int(text)


def positive_or_zero(text: str) -> int:
    """The whole number, zero or above, in `text`."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"wanted a whole number, zero or above, not {text!r}")
    return int(text)


SETTING = "[OWNER.]NAME=VALUE"
"""How every `--set` is written: OWNER is what has the option - a measure, an experiment, a task, a paper - and may be left out."""


def setting(text: str) -> tuple[str, str]:
    """NAME=VALUE or OWNER.NAME=VALUE: what stands on both sides, as text; what the option is for knows the value's type."""
    name, equals, value = text.partition("=")
    if not (name.strip(".") == name and name and equals and value):
        raise argparse.ArgumentTypeError(f"wanted {SETTING}, such as longest=20 or patterns.epsilon=0.5, not {text!r}")
    return name, value


def add_settings(parser: argparse.ArgumentParser, dest: str, meaning: str) -> None:
    """Declare `--set`, of which `meaning` says what can be set here."""
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar=SETTING,
        dest=dest,
        help=f"{meaning}; may be repeated",
    )


def of_owner(texts: Iterable[tuple[str, str]], owner: str) -> list[tuple[str, str]]:
    """Settings without the name of their only `owner`. Raises InputError for those of another."""
    from repo_interp.errors import InputError

    settings = []
    for name, text in texts:
        named, dot, option = name.rpartition(".")
        if dot and named != owner:
            raise InputError(f"--set {name}={text}: there is no {named!r} here; wanted {owner}.{option} or {option}")
        settings.append((option, text))
    return settings


def typed(texts: Iterable[tuple[str, str]] | None, owner: Any, called: str) -> dict[str, Any]:
    """The values of named texts, read as the types of the fields of the dataclass `owner`, which the user calls `called`."""
    from repo_interp.values import field_value

    return {name: field_value(owner, name, text, called) for name, text in texts or ()}


def add_device(parser: argparse.ArgumentParser) -> None:
    """Declare `--device` and `--dtype`."""
    parser.add_argument("--device", default="cpu", help="where the model runs: cpu, cuda, cuda:1, mps (default: cpu)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float64", "bfloat16", "float16"),
        help="precision of the model; below float32 positions themselves are rounded (default: float32)",
    )
