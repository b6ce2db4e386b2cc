"""Values of options that several commands share. Each function raises argparse's own error for what it cannot read."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any

from repo_interp.values import Count, Seed, Tokens

_LARGEST = 65_535
"""Largest number in a list of numbers: of layers, of heads, of seeds."""


def number_list(text: str) -> tuple[int, ...]:
    """The numbers in "0,3", "5-15" or "0-2,7", each once and in the order given."""
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?", part)
        if found is None:
            raise argparse.ArgumentTypeError(f"wanted numbers or ranges such as 0,3 or 5-15, not {text[:80]!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise argparse.ArgumentTypeError(f"the range {part.strip()} runs backwards")
        if last > _LARGEST:
            raise argparse.ArgumentTypeError(f"wanted numbers up to {_LARGEST:,}, not {last}")
        numbers.extend(range(first, last + 1))
    return tuple(dict.fromkeys(numbers))


def name_list(text: str) -> tuple[str, ...]:
    """The names in a text with commas between them, each once."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise argparse.ArgumentTypeError("wanted names with commas between them")
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise argparse.ArgumentTypeError(f"{twice[0]!r} stands twice; name it once")
    return names


def _reader(kind: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        from repo_interp.errors import InputError
        from repo_interp.values import in_words, shortened, value_of

        try:
            return value_of(text, kind, "")
        except InputError:
            raise argparse.ArgumentTypeError(f"wanted {in_words(kind)}, not {shortened(repr(text))}") from None

    return read


count = _reader(Count)
"""The number of something in a text: of prompts, of sequences of a pass, of processes."""
tokens = _reader(Tokens)
"""The number of tokens in a text."""
seed = _reader(Seed)
"""The seed in a text."""


SETTING = "[OWNER.]NAME=VALUE"
"""How every `--set` is written: OWNER is what has the option - a measure, an experiment, a task, a paper - and may be left out."""


def setting(text: str) -> tuple[str, str]:
    """NAME=VALUE or OWNER.NAME=VALUE: what stands on both sides, as text; what the option is for knows the value's type."""
    name, equals, value = text.partition("=")
    if not (name.strip(".") == name and name and equals and value):
        raise argparse.ArgumentTypeError(f"wanted {SETTING}, such as longest=20 or patterns.epsilon=0.5, not {text[:80]!r}")
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
    """Declare `--device`, `--dtype` and `--positions-dtype`."""
    parser.add_argument("--device", default="cpu", help="where the model runs: cpu, cuda, cuda:1, mps (default: cpu)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float64", "bfloat16", "float16"),
        help="precision of the model; below float32 learned positions are rounded, too, unless --positions-dtype is wider (default: "
        "float32)",
    )
    parser.add_argument(
        "--positions-dtype",
        choices=("float32",),
        help="precision of learned positions and of the maps that they come from (default: that of the model)",
    )
