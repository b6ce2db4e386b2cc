"""A checkpoint as users name it: a path, a hub id, or one that comes with the package, such as niah/repo."""

from __future__ import annotations

from pathlib import Path

DEFAULT = "niah/repo"
"""The checkpoint that is analysed when none is named."""


def find(name: str) -> str:
    """The path or hub id that `name` means. A directory of that name goes before a checkpoint of the zoo."""
    from repo_interp.shipped import zoo_names, zoo_path

    if name in zoo_names() and not Path(name).exists():
        return str(zoo_path(name))
    return name


def stem(name: str) -> str:
    """The name of a directory of results on the checkpoint `name`: "niah/repo" -> "niah-repo"."""
    return "-".join(part for part in name.strip("./").split("/")[-2:] if part not in ("", "..", "."))
