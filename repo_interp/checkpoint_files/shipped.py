"""Names and directories of the checkpoints that ship with this package and with others.

This module loads nothing.

TASK/NAME           such as "niah/repo", trained with seed 0
TASK/NAME/seed-N    the same training with another seed, if its weights ship
MODEL/NAME          an adapter on top of the fetched model MODEL, such as "smollm2-135m/repo"

Another package declares a directory of such checkpoints by an entry point of the group
`repo_interp.checkpoints`; our names have priority.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from repo_interp.entry_points import CHECKPOINTS, called, find, names
from repo_interp.errors import InputError, as_input_errors, nearest, quoted, warn

DIRECTORY = Path(__file__).parents[1] / "zoo"
"""The checkpoints of this package."""
RUNS = "runs.jsonl"
"""File in the directory TASK: one line per training run, the seeds of a checkpoint ascending."""
_ADAPTER = "adapter_config.json"
_SEED = re.compile(r"seed-\d+")


def shipped_directories() -> tuple[Path, ...]:
    """List the directories that hold checkpoints by name.

    Returns:
        Directories, ours first.
    """
    found = [DIRECTORY]
    for name in names(CHECKPOINTS):
        try:
            with as_input_errors(f"{called(CHECKPOINTS, name)} is no directory"):
                found.append(Path(find(CHECKPOINTS, name)))
        except InputError as error:
            # A broken package of checkpoints must not make ours unreachable.
            warn(f"checkpoints are left out: {error}")
    return tuple(found)


def training_record(directory: Path) -> dict[str, Any] | None:
    """Read the training settings of a checkpoint that ships.

    Args:
        directory: Directory of the checkpoint.

    Returns:
        Fields of a training.toml, from TASK/runs.jsonl; None if there are none.
    """
    directory = directory.resolve()
    # Seeds above 0 are one folder deeper.
    of_seed_0 = directory.parent if directory.name.startswith("seed-") else directory
    file = of_seed_0.parent / RUNS
    # Only inside folders that ship: a file next to a foreign checkpoint proves nothing.
    if not file.is_file() or not any(
        directory.is_relative_to(root.resolve()) for root in shipped_directories()
    ):
        return None
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    # by seed, the first of TASK/NAME itself
    of_name = (line for line in lines if line["name"] == of_seed_0.name)
    return next(
        (
            line["training"]
            for line in of_name
            if directory.name in (of_seed_0.name, f"seed-{line['seed']}")
        ),
        None,
    )


def zoo_names() -> tuple[str, ...]:
    """List the whole checkpoints that are installed.

    Returns:
        Names of those whose seed 0 is, sorted.
    """
    return tuple(name for is_adapter, name in _by_kind() if not is_adapter)


def shipped_names() -> tuple[str, ...]:
    """List the checkpoints that are installed.

    Returns:
        Names of whole checkpoints, then of adapters, sorted.
    """
    return tuple(dict.fromkeys(name for _, name in _by_kind()))


def zoo_path(name: str) -> Path:
    """Find a checkpoint or adapter by name.

    Args:
        name: Such as niah/repo or niah/repo/seed-1.

    Returns:
        Its directory.

    Raises:
        InputError: No installed package has one of that name.
    """
    if not isinstance(name, str):
        raise InputError(
            f"a checkpoint that ships has a name such as niah/repo; got {quoted(name)}"
        )
    known = shipped_names()
    if name in known:
        return _directory(name)
    of_seed_0, _, last = name.rpartition("/")
    if of_seed_0 not in known and _SEED.fullmatch(last) and (found := _installed(name)):
        return found[0]  # a checkpoint that others continue may ship without seed 0
    if of_seed_0 in known:
        seeds = zoo_seeds(of_seed_0)
        if last in {f"seed-{seed}" for seed in seeds[1:]}:
            return _directory(name)
        others = (
            f"{of_seed_0}/seed-N for N of {', '.join(map(str, seeds[1:]))}"
            if seeds[1:]
            else "no other seed"
        )
        raise InputError(
            f"no checkpoint {quoted(name)} is installed; these are: {of_seed_0} (seed 0), and {others}"
        )
    # Names of the same task, as the whole list is long
    same_task = [one for one in known if one.split("/")[0] == name.split("/")[0]]
    more = "" if names(CHECKPOINTS) else "; the package position-papers brings more"
    raise InputError(
        f"no checkpoint {quoted(name)} is installed; {nearest(name, known)}these are: "
        f"{', '.join(same_task or known) or 'none'}{more}"
    )


def zoo_seeds(name: str) -> tuple[int, ...]:
    """List the seeds of a checkpoint whose weights ship.

    Args:
        name: Name of seed 0.

    Returns:
        Seeds, ascending.
    """
    zoo_path(name)
    others = (
        file.parent.name
        for directory in shipped_directories()
        for file in (directory / name).glob("seed-*/config.json")
    )
    return (0, *sorted({int(other.removeprefix("seed-")) for other in others}))


def means_zoo(name: str) -> bool:
    """Tell whether a name is reserved for checkpoints that ship: it is never looked for elsewhere.

    Args:
        name: Name that a user gave.

    Returns:
        Whether its first part is a task of the zoo, or a model that has adapters.
    """
    # A name that begins with one of our tasks means the zoo, even if the zoo lacks it.
    return name.count("/") in (1, 2) and name.split("/")[0] in {
        known.split("/")[0] for known in shipped_names()
    }


def _directory(name: str) -> Path:
    return _installed(name)[0]


def _installed(name: str) -> list[Path]:
    """Directories that have a checkpoint; ours come before those of other packages."""
    places = [directory / name for directory in shipped_directories()]
    return [place for place in places if (place / "config.json").is_file()]


def _by_kind() -> list[tuple[bool, str]]:
    """Whether it is an adapter, and the name, of each checkpoint; sorted."""
    return sorted(
        {
            ((file.parent / _ADAPTER).is_file(), file.parent.relative_to(directory).as_posix())
            for directory in shipped_directories()
            for file in directory.glob("*/*/config.json")
        }
    )
