"""Find the scheme of the card in a directory. Imports no torch."""

from __future__ import annotations

import tomllib
from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.storage.files import is_left_behind, regular, require_directory

STATED = "card.toml"
"""File that names the scheme, and its versions in the order in which they were begun."""


def stated_versions(directory: Path) -> list[str]:
    """Read the versions of its scheme from a card.

    Args:
        directory: Directory of the card.

    Returns:
        Folders of the versions, in the order in which they were begun; empty if the card has none.
    """
    try:
        known = tomllib.loads((directory / STATED).read_text(encoding="utf-8"))["versions"]
    except (OSError, ValueError, KeyError):
        return []
    return [str(name) for name in known] if isinstance(known, list) else []


def require_card_of(directory: Path, layout: str) -> None:
    """Refuse a directory that is not for the card of a scheme; reads only names.

    Args:
        directory: The directory, which may be missing.
        layout: The scheme.

    Raises:
        InputError: The directory has the card of another scheme, or other content.
    """
    require_directory(directory)
    stated = directory / STATED
    if not stated.exists():
        others = directory.iterdir() if directory.is_dir() else ()
        if any(not is_left_behind(path.name) for path in others):
            raise InputError(f"{directory} exists and holds no card; give another --out")
        return
    try:
        known = tomllib.loads(regular(stated).read_text(encoding="utf-8"))["scheme"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{stated} does not say whose card it is: {error!r:.80}") from None
    if known != layout:
        raise InputError(
            f"{directory} has the card of {known!r:.80}, not of {layout!r}; give another --out"
        )
