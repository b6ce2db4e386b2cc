"""Notes of a comparison: one line for everything that cannot be compared or was measured differently.

Knows how runs say what they were measured with; nothing about how they are joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

_DIGITS = 8
"""Characters of a digest that a note shows."""


def notes(comparison: xr.DataTree) -> list[str]:
    """One line for everything that cannot be compared or was measured differently."""
    return [line for line in str(comparison.attrs.get("notes", "")).split("\n") if line]


def on_prompts(runs: Mapping[str, xr.DataTree]) -> list[str]:
    """A line where the runs saw different prompts."""
    digests = names_by(runs, "prompts_digest")
    if len(digests) < 2:
        return []
    short = _listed({digest[:_DIGITS]: names for digest, names in digests.items()})
    return [f"the prompts differ ({short}): only what is averaged over prompts is compared, and differences may be the prompts'"]


def on_runs(runs: Mapping[str, xr.DataTree]) -> list[str]:
    """A line each where precision, training length or scaling differ, and for every run of a model that was changed."""
    named = {"dtype": "the precision", "training_length": "the training length", "scaling": "the scaling"}
    by_value = {name: names_by(runs, attribute) for attribute, name in named.items()}
    changed = [f"{name} is of a changed model: {run.attrs['changed']}" for name, run in runs.items() if run.attrs.get("changed")]
    return [f"{name} differs: {_listed(values)}" for name, values in by_value.items() if len(values) > 1] + changed


def on_shapes(groups: Mapping[str, xr.Dataset], joined: xr.Dataset) -> list[str]:
    """A line for every axis of `joined` that has different sizes in `groups`."""
    sizes = {axis: {name: group.sizes[axis] for name, group in groups.items() if axis in group.sizes} for axis in joined.dims}
    return [
        f"{axis}: {', '.join(f'{count:,} in {name}' for name, count in counts.items())}; what a run lacks is left empty"
        for axis, counts in sizes.items()
        if len(set(counts.values())) > 1
    ]


def on_prompts_of_sets(measure: str, groups: Mapping[str, xr.Dataset]) -> list[str]:
    """A line where runs of scores were asked different prompts of test sets that they share."""
    differing = _sets_of_other_prompts(groups)
    named = f"the prompts of {', '.join(differing)} differ" if differing else ""
    return [f"{measure}: {named}, so that differences may be the prompts'"] if differing else []


def on_parameters(measure: str, groups: Mapping[str, xr.Dataset]) -> list[str]:
    """A line for every parameter of a measure that differs between its `groups`.

    Options of a task say how its prompts came about: where these are the same, so that their digests agree, none of them is named.
    """
    same = all("prompts_digest" in group for group in groups.values()) and not _sets_of_other_prompts(groups)
    lines = []
    parameters = dict.fromkeys(name for group in groups.values() for name in group.attrs)
    for parameter in [name for name in parameters if not (same and str(name).startswith("task_"))]:
        values: dict[str, list[str]] = {}
        for run, group in groups.items():
            values.setdefault(as_text(group.attrs.get(parameter, "not stated")), []).append(run)
        if len(values) > 1:
            lines.append(f"{measure}: {parameter} differs, {_listed(values)}")
    return lines


def names_by(runs: Mapping[str, xr.DataTree], attribute: str) -> dict[str, list[str]]:
    """The names of the runs by their value of `attribute`; runs without it are left out."""
    by_value: dict[str, list[str]] = {}
    for name, run in runs.items():
        if attribute in run.attrs:
            by_value.setdefault(str(run.attrs[attribute]), []).append(name)
    return by_value


def as_text(parameter: Any) -> str:
    """A parameter as text, as a list where it has several values."""
    if isinstance(parameter, list | tuple | np.ndarray):
        return ",".join(map(str, np.atleast_1d(parameter).tolist()))
    return str(parameter)


def _sets_of_other_prompts(groups: Mapping[str, xr.Dataset]) -> list[str]:
    """The test sets that two of `groups` asked with different prompts."""
    known: dict[str, set[str]] = {}
    for group in groups.values():
        if "prompts_digest" in group:
            for test_set, digest in zip(group["test_set"].values, group["prompts_digest"].values, strict=True):
                known.setdefault(str(test_set), set()).add(str(digest))
    return [test_set for test_set, digests in known.items() if len(digests) > 1]


def _listed(values: Mapping[str, Sequence[str]]) -> str:
    """Values with the runs that have them: "0.2 for rope, nope; 0.5 for repo"."""
    return "; ".join(f"{value} for {', '.join(names)}" for value, names in values.items())
