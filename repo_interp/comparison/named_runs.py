"""Trees, run files and directories as runs by name.

Runs of one checkpoint that measure different things (an analysis and its scores) become one run. A
run has the name from the caller, else of its checkpoint if all checkpoints differ, else of its
directory. This module knows nothing about the comparison.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import xarray as xr

from repo_interp.errors import InputError
from repo_interp.positions.layouts import format_layout
from repo_interp.run import read_run
from repo_interp.storage.files import path_of

Run = xr.DataTree | str | os.PathLike[str]
"""A run in memory, a run file, or a directory with run.nc and, in folders score*, the runs of its
scores.
"""


def runs_by_name(runs: Sequence[tuple[str | None, Run]]) -> dict[str, xr.DataTree]:
    """Open runs and name them.

    Args:
        runs: Pairs of name and run; None: the name of the checkpoint. Pairs of one name and one
            checkpoint are one run.

    Returns:
        Runs by name.

    Raises:
        InputError: Runs of two checkpoints have the same given name.
    """
    return _named(_merged([(name, *opened) for name, run in runs for opened in _opened(run)]))


def training_steps(runs: Mapping[str, xr.DataTree]) -> list[int] | None:
    """Read the steps of a training from its runs.

    Args:
        runs: Runs by name. A run has the attribute `training_step`, or is of a saved step
            (steps/000100).

    Returns:
        The step of every run; None if the runs are not from one training with one layout.

    Raises:
        InputError: Two steps have the same weights.
    """
    steps = {name: _step(run) for name, run in runs.items()}
    found = [step for step in steps.values() if step is not None]
    # Steps only where every run has one, all differ, and the model is otherwise the same
    if (
        not len(found) == len(runs) == len(set(found))
        or len({layout_of(run) for run in runs.values()}) > 1
    ):
        return None
    by_digest: dict[str, str] = {}
    for name, run in runs.items():
        # The name replaces a missing digest.
        digest = str(run.attrs.get("checkpoint_digest", "")) or name
        if by_digest.setdefault(digest, name) != name:
            raise InputError(
                f"steps {steps[by_digest[digest]]} and {steps[name]} of a training have the "
                f"same weights ({digest[:8]}), so one of them "
                "is not of its step; leave one out"
            )
    return found


def _step(run: xr.DataTree) -> int | None:
    if isinstance(step := run.attrs.get("training_step"), int):
        return step
    # Saved steps are often folders by number, such as .../1000.
    named = re.search(r"(?:^|/)(\d+)$", str(run.attrs.get("checkpoint", "")))
    return None if named is None else int(named[1])


def layout_of(run: xr.DataTree) -> str:
    """Format the layout of a run's checkpoint.

    Args:
        run: A run.

    Returns:
        The layout in its short form.
    """
    layout = str(run.attrs.get("layout", ""))
    return format_layout(tuple(layout.split(","))) if "," in layout else layout


def _opened(run: Run) -> list[tuple[str, xr.DataTree]]:
    """Name of the directory and its run, and the same for the runs of its scores."""
    if isinstance(run, xr.DataTree):
        return [(run.name or "", run)]
    path = path_of(run, "a run.nc or its directory, beside runs")
    # abspath, so that "." has a name
    directory = path.absolute().parent.name if path.is_file() else Path(os.path.abspath(path)).name
    # Scores are in separate folders next to the analysis, and are of the same checkpoint.
    beside = sorted(path.glob("score*/run.nc")) if path.is_dir() else []
    return [(directory, read_run(file)) for file in (path, *beside)]


def _merged(
    opened: Sequence[tuple[str | None, str, xr.DataTree]],
) -> list[tuple[str | None, str, xr.DataTree]]:
    """Join runs of one checkpoint that complement one another, with names and directories."""
    merged: list[tuple[str | None, str, xr.DataTree]] = []
    for name, directory, run in opened:
        # The first that fits: a second analysis of the checkpoint stays a separate run.
        for place, (other_name, other_directory, other) in enumerate(merged):
            if (name is None or other_name is None or name == other_name) and _complements(
                run, other
            ):
                nodes = {**_nodes(other), **_nodes(run)}
                both = xr.DataTree.from_dict({f"/{node}": group for node, group in nodes.items()})
                # Attributes of the first run take precedence; the scores' fill the gaps.
                both.attrs = {**run.attrs, **other.attrs}
                merged[place] = (other_name or name, other_directory, both)
                break
        else:
            merged.append((name, directory, run))
    return merged


def _nodes(run: xr.DataTree) -> dict[str, xr.Dataset]:
    return {name: node.to_dataset() for name, node in run.children.items()}


def _complements(run: xr.DataTree, other: xr.DataTree) -> bool:
    """Whether both have different groups of one checkpoint, with equal options."""
    digest = run.attrs.get("checkpoint_digest")
    # An absent attribute contradicts nothing, as scores have no prompts; without
    # `changed` the model is as it was.
    agree = all(
        name not in run.attrs
        or name not in other.attrs
        or str(run.attrs[name]) == str(other.attrs[name])
        for name in ("prompts_digest", "dtype", "scaling")
    ) and run.attrs.get("changed", "") == other.attrs.get("changed", "")
    return (
        bool(digest)
        and digest == other.attrs.get("checkpoint_digest")
        and agree
        and not set(run.children) & set(other.children)
    )


def _named(runs: Sequence[tuple[str | None, str, xr.DataTree]]) -> dict[str, xr.DataTree]:
    """Runs by given name, else by checkpoint if these differ, else by directory."""
    given = [name for name, _, _ in runs if name is not None]
    twice = next((name for name in given if given.count(name) > 1), None)
    if twice is not None:
        raise InputError(
            f"the name {twice!r} was given to two runs that are not of one checkpoint; "
            "wanted a name for each"
        )
    checkpoints = [str(run.attrs.get("checkpoint") or directory) for _, directory, run in runs]
    # The name of a checkpoint is better than a folder's, if it distinguishes the runs.
    tell_apart = len(set(checkpoints)) == len(checkpoints) and all(checkpoints)
    by_name: dict[str, xr.DataTree] = {}
    for (name, directory, run), checkpoint in zip(runs, checkpoints, strict=True):
        wanted = name or (checkpoint if tell_apart else directory or checkpoint) or "run"
        unique, number = wanted, 1
        # Given names are kept free for the runs that they were given to.
        while unique in by_name or (name is None and unique in given):
            number += 1
            unique = f"{wanted}-{number}"
        by_name[unique] = run
    return by_name
