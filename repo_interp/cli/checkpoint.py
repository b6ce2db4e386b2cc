"""A checkpoint as users name it: a path, a hub id, or one that comes with the package, such as
niah/repo.
"""

from __future__ import annotations

from pathlib import Path

DEFAULT = "niah/repo"
"""The checkpoint that is analysed when none is named."""


def find(name: str) -> str:
    """The path or hub id that `name` means.

    A directory of that name goes before a checkpoint of the zoo.
    """
    from repo_interp.shipped import means_zoo, zoo_path

    if means_zoo(name) and not Path(name).exists():
        return str(zoo_path(name))
    return name


def stem(name: str) -> str:
    """The name of a directory of results on the checkpoint `name`: "niah/repo" -> "niah-repo"."""
    parts = [part for part in name.strip("./").split("/") if part not in ("", "..", ".")]
    return "-".join(parts[-3:] if parts[-1:] and parts[-1].startswith("seed-") else parts[-2:])
