"""Check versions of libraries against the ranges in pyproject.toml.

    require("transformers", "torch")      at the head of the part that needs them

A version that is too old or too new gives a one-line error when the library is used, not a
traceback. Ranges contain tested versions (docs/trust.md). This module imports none of the
libraries.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from repo_interp.errors import InputError


def require(*names: str) -> None:
    """Require libraries in versions that work.

    Args:
        *names: Names of distributions.

    Raises:
        InputError: A library is missing, or its version is outside the range of pyproject.toml.
    """
    from packaging.requirements import Requirement

    try:
        stated = [Requirement(line) for line in requires("repo-interp") or ()]
    except PackageNotFoundError:  # our files without our package: nothing is stated
        return
    # Requirements with a marker belong to an extra and are not checked.
    ranges = {one.name: one.specifier for one in stated if one.marker is None}
    for name in names:
        try:
            found = version(name)
        except PackageNotFoundError:
            raise InputError(
                f"{name} is not installed; pip install '{name}{ranges[name]}'"
            ) from None
        # Prereleases of an allowed version are accepted; by default `contains` rejects them.
        if not ranges[name].contains(found, prereleases=True):
            raise InputError(
                f"{name} {found} is installed, and repo_interp works with {ranges[name]}; "
                f"pip install '{name}{ranges[name]}'"
            )
