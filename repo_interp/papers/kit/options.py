"""How much a paper's figures measure, as users state it: NAME=VALUE for every paper that has it, PAPER.NAME=VALUE for one.

Knows nothing about any paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from repo_interp.errors import InputError


def stated_options(modules: Mapping[str, ModuleType], stated: Iterable[tuple[str, str]], ground: Mapping[str, Mapping[str, Any]]):
    """The options of every paper, by its name: its defaults, changed by `ground` (by paper), changed by what a user stated as text.

    Raises InputError for what no paper has, and for a value of another type.
    """
    values = {name: dict(ground.get(name, {})) for name in modules}
    fields = {name: {field.name: field for field in dataclasses.fields(module.Options)} for name, module in modules.items()}
    for key, text in stated:
        paper, dot, option = key.rpartition(".")
        meant = [name for name in modules if option in fields[name] and (not dot or name == paper)]
        if dot and paper not in modules:
            raise InputError(f"{key}={text}: {paper!r} is none of the papers asked for, {', '.join(modules)}")
        if not meant:
            known = sorted({option for name in ([paper] if dot else modules) for option in fields[name]})
            raise InputError(f"there is no option {key!r}; there are {', '.join(known)}")
        for name in meant:
            values[name][option] = _value(key, text, getattr(modules[name].Options(), option))
    return {name: module.Options(**values[name]) for name, module in modules.items()}


def with_data(modules: Mapping[str, ModuleType], options: Mapping[str, Any], data: Mapping[str, str]) -> dict[str, Any]:
    """The options with the users' files (name of a data set -> path) of those papers that take some: their `DATA` names them.

    Raises InputError for a data set that none takes, and for a file that is not there.
    """
    taken = {name: tuple(getattr(module, "DATA", ())) for name, module in modules.items()}
    known = sorted({one for names in taken.values() for one in names})
    for name, file in data.items():
        if name not in known:
            wanted = f"these take {', '.join(known)}" if known else f"{', '.join(modules)} take none"
            raise InputError(f"no figures are made from a data set {name!r}; {wanted}")
        if not Path(file).exists():
            raise InputError(f"there is no file {file} for the data set {name}")
    return {
        name: dataclasses.replace(options[name], data=tuple((one, file) for one, file in data.items() if one in taken[name]))
        if taken[name]
        else options[name]
        for name in modules
    }


def _value(key: str, text: str, default: Any) -> Any:
    """`text` as a value of the type of `default`; words or numbers with commas where that is a tuple."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, tuple):
            kind = type(default[0]) if default else str
            return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        return type(default)(text)
    except (ValueError, KeyError):
        kind = type(default[0]).__name__ + "s with commas" if isinstance(default, tuple) and default else type(default).__name__
        raise InputError(f"{key}={text}: wanted {kind}") from None
