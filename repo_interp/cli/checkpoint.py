"""Names of checkpoints: a path, a hub id, or one of the package, such as niah/repo."""

from __future__ import annotations

from pathlib import Path

DEFAULT = "niah/repo"
"""The checkpoint that is analysed when none is named."""


def find(name: str) -> str:
    """Return the path or hub id that a name means.

    A directory of that name precedes a checkpoint of the zoo.

    Args:
        name: Path, hub id, or name of a checkpoint that comes with the package.

    Returns:
        Path or hub id.
    """
    from repo_interp.shipped import means_zoo, zoo_path

    # A folder of the user goes before a name of the package.
    if means_zoo(name) and not Path(name).exists():
        return str(zoo_path(name))
    return name


def stem(name: str) -> str:
    """Return the name of a directory of results: "niah/repo" -> "niah-repo".

    Args:
        name: Checkpoint as the user named it.

    Returns:
        Name without slashes.
    """
    parts = [part for part in name.strip("./").split("/") if part not in ("", "..", ".")]
    # Of a seed three parts, as seed-1 alone says nothing about the checkpoint.
    return "-".join(parts[-3:] if parts[-1:] and parts[-1].startswith("seed-") else parts[-2:])
