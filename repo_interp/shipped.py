"""Names and directories of the checkpoints that come with the package: TASK/SCHEME, such as "niah/repo". Loads nothing."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from repo_interp.errors import InputError

DIRECTORY = Path(__file__).parent / "zoo"


def zoo_names() -> tuple[str, ...]:
    """The name of every checkpoint that is there, sorted."""
    return tuple(sorted(str(file.parent.relative_to(DIRECTORY).as_posix()) for file in DIRECTORY.glob("*/*/config.json")))


def zoo_path(name: str) -> Path:
    """The directory of checkpoint `name`. Raises InputError when the package has none of that name."""
    names = zoo_names()
    if name in names:
        return DIRECTORY / name
    close = get_close_matches(name, names, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    same_task = [known for known in names if known.split("/")[0] == name.split("/")[0]]
    raise InputError(f"no checkpoint {name!r} comes with the package; {meant}these do: {', '.join(same_task or names) or 'none'}")


def means_zoo(name: str) -> bool:
    """Whether `name` is TASK/SOMETHING with a task of the zoo: such a name is never looked for elsewhere, where anyone could own it."""
    return name.count("/") == 1 and name.split("/")[0] in {known.split("/")[0] for known in zoo_names()}
