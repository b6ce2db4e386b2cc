"""Versions of the libraries that we stand on: the ranges of pyproject.toml, as the installed
package states them.

    require("transformers", "torch")      at the head of the part that needs them

What is too old or too new is one line where it is needed, not a traceback from somewhere inside.
Ranges are of versions that were seen to work (docs/trust.md). Imports none of the libraries.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from repo_interp.errors import InputError


def require(*names: str) -> None:
    """Raise InputError that names the first of the libraries `names` that is not there, or not of a
    version that works.
    """
    from packaging.requirements import Requirement

    try:
        stated = [Requirement(line) for line in requires("repo-interp") or ()]
    except PackageNotFoundError:  # our files without our package: nothing is stated
        return
    ranges = {one.name: one.specifier for one in stated if one.marker is None}
    for name in names:
        try:
            found = version(name)
        except PackageNotFoundError:
            raise InputError(
                f"{name} is not installed; pip install '{name}{ranges[name]}'"
            ) from None
        if not ranges[name].contains(found, prereleases=True):
            raise InputError(
                f"{name} {found} is installed, and repo_interp works with {ranges[name]}; "
                f"pip install '{name}{ranges[name]}'"
            )
