"""One-line errors about missing parts of a run, instead of a library's error.

    with reading(run, "positions"): ...        KeyError "No variable named 'token_count'" becomes "positions/token_count is missing"

A run that an older version, another program or a user wrote may lack a variable, an axis or labels
that a view reads. The library's error remains the cause of the new one. Errors in views of other
packages pass unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import xarray as xr

from repo_interp.entry_points import OWN, VIEWS
from repo_interp.errors import InputError, one_line
from repo_interp.runtime.failures import is_out_of_memory

_NAMED = re.compile(
    # `group["x"]` and `group.x`; labels; an axis
    r"""No variable named ['"](\w+)|has no attribute '(\w+)'|^['"]+(\w+)['"]+$"""
    r"""|[Dd]imensions? [^\w\s]*(\w+)[^\w\s]* (?:do|does) not exist"""
    r"""|[^\w\s](\w+)[^\w\s] is not a valid dimension|or coordinates? [^\w\s]*(\w+)"""
)
"""Errors of xarray about a name that is not there."""


@contextmanager
def reading(run: xr.DataTree, group: str) -> Iterator[None]:
    """Raise a one-line error if a part of the run is missing that the context reads.

    Args:
        run: Tree of a run, a group per measure.
        group: Group of the view that reads the run.

    Yields:
        Nothing.

    Raises:
        InputError: The run lacks something.
    """
    try:
        yield
    except (InputError, OSError):
        raise
    except Exception as error:
        if group not in OWN[VIEWS] or is_out_of_memory(error):
            raise
        raise InputError(
            f"{_lacking(run, group, error)}; measure the run again with repo-interp analyze"
        ) from error


def _lacking(run: xr.DataTree, group: str, error: Exception) -> str:
    groups = {name: node.to_dataset() for name, node in run.children.items()}
    own = groups.pop(group, xr.Dataset())
    for place, read in {group: own, **groups}.items():
        twice = [axis for axis, labels in read.indexes.items() if not labels.is_unique]
        if twice and (place == group or re.search("unique|duplicate", str(error))):
            return f"{place} has a label of the axis {twice[0]!r} twice, so that it names nothing"
    found = _NAMED.search(str(error))
    if found is None:
        why = one_line(f"{type(error).__name__}: {error}", 120)
        return f"{group} of the run cannot be read ({why})"
    name = next(filter(None, found.groups()))
    # xarray lists the variables of the group; otherwise an axis without labels shows the place.
    present = {*re.findall(r"'(\w+)'", str(error)[found.end() :])}
    places = [
        place
        for place, read in {group: own, **groups}.items()
        if name not in read.variables
        and (present <= {*read.variables} if present else name in read.sizes)
    ]
    return f"{(places or [group])[0]}/{name} is missing in the run"
