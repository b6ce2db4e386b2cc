"""What other installed packages add: measures, schemes, tasks and figures, as entry points of their metadata.

    [project.entry-points."repo_interp.measures"]     name = "package.module:object"

`added_names` reads metadata alone; `added` imports the one object that was asked for, so a package that nobody asks for costs
nothing and breaks nothing. Names of our own are never looked up here: they cannot be replaced. Knows nothing about what the
objects are.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from repo_interp.errors import InputError


def added_names(group: str) -> tuple[str, ...]:
    """Names that other packages give in `group`, such as "repo_interp.measures", sorted. Imports none of them."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def added(group: str, name: str) -> Any:
    """The object that another package gives as `name`; None where none does.

    Raises InputError, in one line, when it cannot be imported, or when two packages give the same name.
    """
    found = list(entry_points(group=group, name=name))
    if not found:
        return None
    what = f"the {group.rpartition('.')[2].removesuffix('s')} {name!r}"
    if len(found) > 1:
        packages = " and ".join(sorted(package_of(point) for point in found))
        raise InputError(f"{what} is given by {packages}; uninstall one of them")
    try:
        return found[0].load()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(
            f"{what} of the package {package_of(found[0])} ({found[0].value}) cannot be imported: {reason}; mend or uninstall it"
        ) from None


def package_of(point: EntryPoint) -> str:
    """Name of the package that gives an entry point."""
    return "unknown" if point.dist is None else point.dist.name
