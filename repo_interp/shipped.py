"""Names and directories of the checkpoints that come with the package. Loads nothing.

TASK/NAME           such as "niah/repo", of seed 0
TASK/NAME/seed-N    the same training with another seed, where its weights ship
MODEL/NAME          an adapter on top of the fetched model MODEL, such as "smollm2-135m/repo"
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from repo_interp.errors import InputError

DIRECTORY = Path(__file__).parent / "zoo"
ADAPTERS = Path(__file__).parent / "adapters"


def zoo_names() -> tuple[str, ...]:
    """The name of every whole checkpoint that is there, of seed 0, sorted."""
    return _names(DIRECTORY)


def shipped_names() -> tuple[str, ...]:
    """Those names, and then those of the adapters, sorted."""
    return zoo_names() + _names(ADAPTERS)


def zoo_path(name: str) -> Path:
    """The directory of checkpoint or adapter `name`. Raises InputError when the package has none of that name."""
    if not isinstance(name, str):
        raise InputError(f"a checkpoint of the package has a name such as niah/repo; got {name!r}")
    names = shipped_names()
    if name in names:
        return (DIRECTORY if (DIRECTORY / name).is_dir() else ADAPTERS) / name
    of_seed_0, _, last = name.rpartition("/")
    if of_seed_0 in names:
        seeds = zoo_seeds(of_seed_0)
        if last in {f"seed-{seed}" for seed in seeds[1:]}:
            return DIRECTORY / name
        others = f"{of_seed_0}/seed-N for N of {', '.join(map(str, seeds[1:]))}" if seeds[1:] else "no other seed"
        raise InputError(f"no checkpoint {name!r} comes with the package; these do: {of_seed_0} (seed 0), and {others}")
    close = get_close_matches(name, names, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    same_task = [known for known in names if known.split("/")[0] == name.split("/")[0]]
    raise InputError(f"no checkpoint {name!r} comes with the package; {meant}these do: {', '.join(same_task or names) or 'none'}")


def zoo_seeds(name: str) -> tuple[int, ...]:
    """Seeds whose weights ship of the checkpoint `name` of the zoo, ascending; 0 is the first."""
    others = (int(file.parent.name.removeprefix("seed-")) for file in (DIRECTORY / name).glob("seed-*/config.json"))
    return (0, *sorted(others))


def means_zoo(name: str) -> bool:
    """Whether `name` is TASK/SOMETHING with a task of the zoo, or MODEL/SOMETHING with a model that has adapters: such a name is never
    looked for elsewhere, where anyone could own it.
    """
    return name.count("/") in (1, 2) and name.split("/")[0] in {known.split("/")[0] for known in shipped_names()}


def _names(directory: Path) -> tuple[str, ...]:
    return tuple(sorted(str(file.parent.relative_to(directory).as_posix()) for file in directory.glob("*/*/config.json")))
