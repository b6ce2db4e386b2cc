"""Names of checkpoints: a path, a hub id, or one of the package, such as niah/repo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DEFAULT = "reversal/repo"
"""The checkpoint that is analyzed when none is named."""


def find_checkpoint(name: str) -> str:
    """Return the path or hub id that a name means.

    A directory of that name precedes a checkpoint of the zoo.

    Args:
        name: Path, hub id, or name of a checkpoint of the package.

    Returns:
        Path or hub id.
    """
    from repo_interp.checkpoint_files.shipped import means_zoo, zoo_path

    # A folder of the user takes precedence over a name of the package.
    if means_zoo(name) and not Path(name).exists():
        return str(zoo_path(name))
    return name


def find_readable(name: str) -> str:
    """Find a checkpoint as `find_checkpoint` does, and check its configuration; imports no torch.

    Args:
        name: As of `find_checkpoint`; the files of a hub id are downloaded.

    Returns:
        Path or hub id.

    Raises:
        InputError: There is no checkpoint.
    """
    from repo_interp.checkpoint_files.directories import directory_of
    from repo_interp.checkpoint_files.readers import reader_for
    from repo_interp.checkpoint_files.stated import stated

    path = find_checkpoint(name)
    # Without conversion, which would write all weights
    if (reader := reader_for(path)) is not None:
        reader.outline(Path(path))
    else:
        stated(directory_of(path, {}))
    return path


def configure(raw: dict[str, Any], source: str) -> Any:
    """Read a plain decoder without torch, others by their class in transformers.

    Args:
        raw: Keys of config.json.
        source: The file, for messages.

    Returns:
        A configuration.
    """
    from repo_interp.checkpoint_files.stated import PLAIN, light_config

    # Without torch where possible: inspect then takes half a second.
    if raw["model_type"] in PLAIN:
        return light_config(raw, source)
    from repo_interp.models.configuration import make_config

    return make_config(raw, source)


def stem(name: str) -> str:
    """Return the name of a directory of results: "niah/repo" -> "niah-repo".

    Args:
        name: Checkpoint as the user named it.

    Returns:
        Name without slashes.
    """
    parts = [part for part in name.strip("./").split("/") if part not in ("", "..", ".")]
    # Three parts for a seed, since "seed-1" does not identify the checkpoint.
    return "-".join(parts[-3:] if parts[-1:] and parts[-1].startswith("seed-") else parts[-2:])
