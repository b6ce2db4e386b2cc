"""What is said of runs that stand side by side: whatever was measured differently, in a line each.

Knows run files; knows nothing about how runs are joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

_DIGITS = 8
"""Of a digest, as it is shown."""


def stated(runs: Mapping[str, xr.DataTree], attribute: str) -> dict[str, list[str]]:
    """Runs by what they state as `attribute`; those that state nothing are left out."""
    found: dict[str, list[str]] = {}
    for name, run in runs.items():
        if attribute in run.attrs:
            found.setdefault(str(run.attrs[attribute]), []).append(name)
    return found


def listed(values: Mapping[str, Sequence[str]]) -> str:
    """Values with the runs that have them: "0.2 for rope, nope; 0.5 for repo"."""
    return "; ".join(f"{value} for {', '.join(names)}" for value, names in values.items())


def prompt_notes(runs: Mapping[str, xr.DataTree]) -> list[str]:
    """Whether the runs saw other prompts."""
    digests = stated(runs, "prompts_digest")
    if len(digests) < 2:
        return []
    short = listed({digest[:_DIGITS]: names for digest, names in digests.items()})
    return [f"the prompts differ ({short}): only what is averaged over prompts is compared, and differences may be the prompts'"]


def root_notes(runs: Mapping[str, xr.DataTree]) -> list[str]:
    """Whether precision, training length or scaling differ."""
    return [
        f"{what} differs: {listed(values)}"
        for attribute, what in (
            ("dtype", "the precision"),
            ("training_length", "the training length"),
            ("scaling", "the scaling"),
        )
        for values in (stated(runs, attribute),)
        if len(values) > 1
    ]


def shape_notes(groups: Mapping[str, xr.Dataset], joined: xr.Dataset) -> list[str]:
    """Axes along which a measure's `groups` have other sizes than in the whole, `joined`."""
    sizes = {axis: {name: one.sizes[axis] for name, one in groups.items() if axis in one.sizes} for axis in joined.dims}
    return [
        f"{axis}: {', '.join(f'{count:,} in {name}' for name, count in counts.items())}; what a run lacks is left empty"
        for axis, counts in sizes.items()
        if len(set(counts.values())) > 1
    ]


def parameter_notes(measure: str, groups: Mapping[str, xr.Dataset]) -> list[str]:
    """Parameters of a measure that differ between its `groups`."""
    said = []
    for name in dict.fromkeys(name for one in groups.values() for name in one.attrs):
        values: dict[str, list[str]] = {}
        for run, one in groups.items():
            values.setdefault(shown(one.attrs.get(name, "not stated")), []).append(run)
        if len(values) > 1:
            said.append(f"{measure}: {name} differs, {listed(values)}")
    return said


def shown(value: Any) -> str:
    """A parameter as text."""
    return ",".join(map(str, np.atleast_1d(value).tolist())) if isinstance(value, list | tuple | np.ndarray) else str(value)
