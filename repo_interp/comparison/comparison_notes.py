"""Notes of a comparison: a line per item that was measured differently or cannot be compared.

This module knows the attributes that describe a measurement, and nothing about how runs are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xarray as xr

_DIGITS = 8
"""Characters of a digest that a note shows."""
_OF_RUNS = {
    "dtype": "the precision",
    "training_length": "the training length",
    "scaling": "the scaling",
}


def notes(comparison: xr.DataTree) -> list[str]:
    """Read the notes of a comparison.

    Args:
        comparison: Tree that `compare` returns.

    Returns:
        One line for everything that cannot be compared or was measured differently.
    """
    return [line for line in str(comparison.attrs.get("notes", "")).split("\n") if line]


def on_prompts(runs: Mapping[str, xr.DataTree]) -> list[str]:
    """Note that runs saw different prompts.

    Args:
        runs: Runs by name.

    Returns:
        One line, or none.
    """
    difference = differing(
        # Eight characters are enough for a reader to distinguish digests.
        {name: str(digest)[:_DIGITS] for name, digest in _stated(runs, "prompts_digest").items()}
    )
    why = "only what is averaged over prompts is compared, and differences may be the prompts'"
    return [f"the prompts differ ({difference}): {why}"] if difference else []


def on_runs(runs: Mapping[str, xr.DataTree]) -> Iterator[str]:
    """Note where precision, training length or scaling differ, and which models were changed.

    Args:
        runs: Runs by name.

    Returns:
        One line per difference and per changed model.
    """
    # Only runs that state the attribute: files of another version may lack it.
    for attribute, named in _OF_RUNS.items():
        if said := differing(_stated(runs, attribute)):
            yield f"{named} differs: {said}"
    yield from (
        f"{name} is of a changed model: {changed}"
        for name, changed in _stated(runs, "changed").items()
        if changed
    )


def on_shapes(groups: Mapping[str, xr.Dataset], joined: xr.Dataset) -> Iterator[str]:
    """Note axes of different sizes.

    Args:
        groups: Groups of one measure by run.
        joined: The same groups joined.

    Returns:
        One line per axis of different sizes.
    """
    for axis in dict.fromkeys(dim for array in joined.data_vars.values() for dim in array.dims):
        # Of groups that have the axis at all; a variable may lack it in some runs.
        counts = {name: group.sizes[axis] for name, group in groups.items() if axis in group.sizes}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{count:,} in {name}" for name, count in counts.items())
            yield f"{axis}: {listed}; what a run lacks is left empty"


def on_measure(measure: str, groups: Mapping[str, xr.Dataset]) -> Iterator[str]:
    """Note parameters of a measure that differ, and test sets with different prompts.

    Options of a task determine its prompts. If the digests of prompts are equal, these options are
    not listed.

    Args:
        measure: Name of the measure.
        groups: Groups of the measure by run.

    Returns:
        One line per difference.
    """
    digests = [group["prompts_digest"] for group in groups.values() if "prompts_digest" in group]
    asked = [
        (str(name), str(digest))
        for by_set in digests
        for name, digest in zip(by_set["test_set"].values, by_set.values, strict=True)
    ]
    sets = [
        name
        for name in dict.fromkeys(name for name, _ in asked)
        if len({digest for of, digest in asked if of == name}) > 1
    ]
    # The prompts are known to be equal, from digests of every group.
    same = len(digests) == len(groups) and not sets
    for parameter in dict.fromkeys(name for group in groups.values() for name in group.attrs):
        difference = differing(
            {name: group.attrs.get(parameter, "not stated") for name, group in groups.items()}
        )
        # Other options of a task that gave the same prompts change nothing.
        if difference and not (same and str(parameter).startswith("task_")):
            yield f"{measure}: {parameter} differs, {difference}"
    if sets:
        yield (
            f"{measure}: the prompts of {', '.join(sets)} differ, so that differences may "
            "be the prompts'"
        )


def differing(values: Mapping[str, Any]) -> str:
    """Format values that differ: "0.2 for rope, nope; 0.5 for repo".

    Args:
        values: Values by run.

    Returns:
        Values with the runs that have them; "" if all are equal.
    """
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        # After reading a file, a number and a list of one number are the same.
        text = (
            ",".join(map(str, np.atleast_1d(value).tolist()))
            if isinstance(value, list | tuple | np.ndarray)
            else str(value)
        )
        names.setdefault(text, []).append(name)
    return (
        "; ".join(f"{text} for {', '.join(of)}" for text, of in names.items())
        if len(names) > 1
        else ""
    )


def _stated(runs: Mapping[str, xr.DataTree], attribute: str) -> dict[str, Any]:
    return {name: run.attrs[attribute] for name, run in runs.items() if attribute in run.attrs}
