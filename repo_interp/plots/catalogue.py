"""Which view shows a group of a run: ours in the order of the page, then those of other packages.

All are entry points (`entry_points.VIEWS`) under the name of their group. Another package gives a `View`, or a plain function of a run that
yields (name, figure) pairs; such a function becomes a view whose other fields have their defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xarray as xr

from repo_interp.entry_points import VIEWS, find, names
from repo_interp.errors import InputError
from repo_interp.plots.view import View


def views_of(run: xr.DataTree) -> list[View]:
    """A view of every group of `run` that has one. Raises InputError where that of another package cannot be imported."""
    found = (view_of(name) for name in names(VIEWS) if name in run.children)
    return [view for view in found if view is not None]


def view_of(group: str) -> View | None:
    """The view that shows `group`; None where there is none.

    Raises InputError where that of another package cannot be imported, or is neither a `View` nor a function.
    """
    given = find(VIEWS, group)
    if given is None or isinstance(given, View):
        return given
    if not callable(given):
        raise InputError(
            f"the view of {group!r} is a {type(given).__name__}; wanted a View, or a function of a run that gives figures"
        )
    return View(group, group.replace("_", " ").capitalize(), _variables(group), given)


def _variables(group: str) -> Callable[[xr.DataTree], str]:
    """A sentence that names the variables of `group`."""

    def lead(run: xr.DataTree) -> str:
        shown: list[Any] = [array.attrs.get("long_name", name) for name, array in run[group].data_vars.items()]
        return f"A measure of another package: {'; '.join(map(str, shown))}."

    return lead
