"""Runs of several checkpoints, or of several steps of one training, as one tree with an axis `run`.

    comparison[measure][variable] [run, ...] = the variable of every run, at the labels that any run has

Where a run lacks one there is NaN, or -1 for whole numbers.

Layers, heads, tokens, distances and spans are aligned by their labels, never by their places. Runs of one checkpoint that measure
different things - an analysis and its scores - are one run. The attribute `notes` has one line for everything that cannot be compared or
was measured differently.

    root       checkpoint, layout, checkpoint_digest, prompts_digest, dtype (run); training_step (run) for steps of one training
    a measure  every variable that two runs or more have, with `run` first; scheme (run, layer)

Knows run files; knows nothing about models, and not what a measure means.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.positions.layouts import format_layout
from repo_interp.run import read_run, versions

Run = xr.DataTree | str | os.PathLike[str]
"""A run in memory, its run file, or the directory that holds run.nc - and, in folders score*, those of its scores."""

_DESCRIBED = ("checkpoint", "layout", "checkpoint_digest", "prompts_digest", "dtype")
_MUST_AGREE = {"maps": "block_size"}
"""Per group, the variable that sets what its axes count: where it differs, equal labels mean different things."""
_DIGITS = 8
"""Characters of a digest that a note shows."""


def compare(runs: Sequence[Run] | Mapping[str, Run]) -> xr.DataTree:
    """`runs` as one tree: one node per measure, every variable with the axis `run` first (see the module).

    A mapping names the runs; otherwise their checkpoints do. Steps of one training are put in order. Raises InputError for fewer than
    two runs, for names that are given twice, and when no measure is common to two runs.
    """
    return compare_named(list(runs.items()) if isinstance(runs, Mapping) else [(None, run) for run in runs])


def compare_named(runs: Sequence[tuple[str | None, Run]]) -> xr.DataTree:
    """`compare` for pairs of name and run; None: the checkpoint names it. Pairs of one name and one checkpoint are one run."""
    by_name = _named(_merged([(name, *opened) for name, run in runs for opened in _opened(run)]))
    if len(by_name) < 2:
        raise InputError(f"two runs or more were wanted to compare, of different checkpoints; got {', '.join(by_name) or 'none'}")
    steps = _training_steps(list(by_name.values()))
    if steps is not None:
        order = sorted(zip(steps, by_name, strict=True))
        steps, by_name = [step for step, _ in order], {name: by_name[name] for _, name in order}
    lines = [*_prompt_notes(by_name), *_root_notes(by_name)]
    shapes: list[str] = []
    measures: dict[str, xr.Dataset] = {}
    single: dict[str, list[str]] = {}
    for measure in dict.fromkeys(name for run in by_name.values() for name in run.children):
        groups = {name: run[measure].to_dataset() for name, run in by_name.items() if measure in run.children}
        missing = [name for name in by_name if name not in groups]
        if len(groups) < 2:
            single.setdefault(next(iter(groups)), []).append(measure)
            continue
        if missing:
            lines.append(f"{measure}: {', '.join(missing)} {'have' if len(missing) > 1 else 'has'} none")
        joined, of_measure = _joined(measure, groups, list(by_name))
        lines += of_measure
        if joined.data_vars:
            measures[measure] = joined
            shapes += _shape_notes(groups, joined)
    lines += [
        f"{', '.join(alone)}: only {name} has {'it' if len(alone) == 1 else 'them'}; not compared"
        for name, alone in single.items()
    ]
    if not measures:
        has = "; ".join(f"{name} has {', '.join(run.children) or 'none'}" for name, run in by_name.items())
        raise InputError(f"these runs have no measure in common ({has}); analyse them with the same --measures")
    tree = xr.DataTree.from_dict({"/": _root(by_name, steps), **{f"/{name}": joined for name, joined in measures.items()}})
    tree.attrs = {
        "runs": "steps of one training" if steps is not None else "checkpoints",
        "same_prompts": "no" if len(_runs_by(by_name, "prompts_digest")) > 1 else "yes",
        "main_span": next(iter(spans))
        if len(spans := {str(run.attrs.get("main_span", "")) for run in by_name.values()}) == 1
        else "",
        "notes": "\n".join([*lines, *dict.fromkeys(shapes)]),
        **{f"version_{name}": number for name, number in versions().items()},
    }
    return tree


def notes(comparison: xr.DataTree) -> list[str]:
    """One line for everything that cannot be compared or was measured differently."""
    return [line for line in str(comparison.attrs.get("notes", "")).split("\n") if line]


def _opened(run: Run) -> list[tuple[str, xr.DataTree]]:
    """The name of the directory and the run in it, and the same for those of its scores beside it."""
    if isinstance(run, xr.DataTree):
        return [(run.name or "", run)]
    path = Path(run)
    directory = path.absolute().parent.name if path.is_file() else Path(os.path.abspath(path)).name
    beside = sorted(path.glob("score*/run.nc")) if path.is_dir() else []
    return [(directory, read_run(file)) for file in (path, *beside)]


def _merged(opened: Sequence[tuple[str | None, str, xr.DataTree]]) -> list[tuple[str | None, str, xr.DataTree]]:
    """Runs with their given name and that of their directory; those of one checkpoint that complement each other are one run."""
    merged: list[tuple[str | None, str, xr.DataTree]] = []
    for name, directory, run in opened:
        for place, (other_name, other_directory, other) in enumerate(merged):
            if (name is None or other_name is None or name == other_name) and _complements(run, other):
                nodes = {**_nodes(other), **_nodes(run)}
                both = xr.DataTree.from_dict({f"/{node}": group for node, group in nodes.items()})
                both.attrs = {**run.attrs, **other.attrs}
                merged[place] = (other_name or name, other_directory, both)
                break
        else:
            merged.append((name, directory, run))
    return merged


def _nodes(run: xr.DataTree) -> dict[str, xr.Dataset]:
    return {name: node.to_dataset() for name, node in run.children.items()}


def _complements(run: xr.DataTree, other: xr.DataTree) -> bool:
    """Whether both measure different things of one checkpoint, in the same way."""
    digest = run.attrs.get("checkpoint_digest")
    agree = all(
        name not in run.attrs or name not in other.attrs or str(run.attrs[name]) == str(other.attrs[name])
        for name in ("prompts_digest", "dtype", "scaling")
    )
    return (
        bool(digest) and digest == other.attrs.get("checkpoint_digest") and agree and not set(run.children) & set(other.children)
    )


def _named(runs: Sequence[tuple[str | None, str, xr.DataTree]]) -> dict[str, xr.DataTree]:
    """Runs by name: the given one, else the checkpoint's where that tells them apart, else the directory's."""
    given = [name for name, _, _ in runs if name is not None]
    twice = next((name for name in given if given.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"the name {twice!r} was given to two runs that are not of one checkpoint; wanted a name for each")
    checkpoints = [str(run.attrs.get("checkpoint") or directory) for _, directory, run in runs]
    tell_apart = len(set(checkpoints)) == len(checkpoints) and all(checkpoints)
    by_name: dict[str, xr.DataTree] = {}
    for (name, directory, run), checkpoint in zip(runs, checkpoints, strict=True):
        wanted = name or (checkpoint if tell_apart else directory or checkpoint) or "run"
        unique, number = wanted, 1
        while unique in by_name or (name is None and unique in given):
            number += 1
            unique = f"{wanted}-{number}"
        by_name[unique] = run
    return by_name


def _training_steps(runs: Sequence[xr.DataTree]) -> list[int] | None:
    """The step of every run, where they are the saved steps (steps/000100, ...) of checkpoints of one layout; None otherwise."""
    names = [re.search(r"(?:^|/)(\d+)$", str(run.attrs.get("checkpoint", ""))) for run in runs]
    layouts = {_layout(run) for run in runs}
    steps = [int(name[1]) for name in names if name is not None]
    return steps if len(steps) == len(runs) == len(set(steps)) and len(layouts) == 1 else None


def _layout(run: xr.DataTree) -> str:
    layout = str(run.attrs.get("layout", ""))
    return format_layout(tuple(layout.split(","))) if "," in layout else layout


def _root(runs: Mapping[str, xr.DataTree], steps: Sequence[int] | None) -> xr.Dataset:
    described = {name: [str(run.attrs.get(name, "")) for run in runs.values()] for name in _DESCRIBED}
    described["layout"] = [_layout(run) for run in runs.values()]
    root = xr.Dataset(
        {
            name: ("run", values, {"long_name": f"{name.replace('_', ' ')} of each run", "units": "1"})
            for name, values in described.items()
        },
        coords={"run": list(runs)},
    )
    if steps is not None:
        root["training_step"] = ("run", list(steps), {"long_name": "step of the training", "units": "steps"})
    return root


def _joined(measure: str, groups: Mapping[str, xr.Dataset], names: Sequence[str]) -> tuple[xr.Dataset, list[str]]:
    """The variables that two of `groups` or more have, along `run` with all of `names`; and notes on them."""
    lines = [*_parameter_notes(measure, groups), *_prompts_of_sets_notes(measure, groups)]
    binding = _MUST_AGREE.get(measure)
    if binding is not None and len({float(group[binding]) for group in groups.values() if binding in group}) > 1:
        return xr.Dataset(), [*lines, f"{measure}: {binding} differs, so that labels do not mean the same; not compared"]
    variables: dict[str, xr.DataArray] = {}
    for variable in dict.fromkeys(name for group in groups.values() for name in group.data_vars):
        arrays = {name: group[variable] for name, group in groups.items() if variable in group}
        axes = {name: frozenset(array.dims) for name, array in arrays.items()}
        units = {name: str(array.attrs.get("units", "")) for name, array in arrays.items()}
        if len(arrays) < 2:
            lines.append(f"{measure}: only {next(iter(arrays))} has {variable}")
        elif len(set(axes.values())) > 1:
            lines.append(f"{measure}: {variable} has other axes in {_first_other(axes)}; not compared")
        elif len(set(units.values())) > 1:
            lines.append(f"{measure}: {variable} has other units in {_first_other(units)}; not compared")
        else:
            variables[str(variable)] = _along_run(arrays, names).assign_attrs(next(iter(arrays.values())).attrs)
    joined = xr.Dataset(variables)
    alone: dict[str, list[str]] = {}
    for variable, array in joined.data_vars.items():
        having = [name for name in groups if array.dtype.kind == "f" and np.isfinite(array.sel(run=name).values).any()]
        if len(having) == 1:
            alone.setdefault(having[0], []).append(str(variable))
    lines += [f"{measure}: only {name} has a value of {', '.join(of_one)}" for name, of_one in alone.items()]
    if "layer" in joined.dims:
        schemes = {name: _schemes(group) for name, group in groups.items() if "scheme" in group.coords}
        labels = joined["layer"].values.tolist()
        kinds = [[schemes.get(name, {}).get(layer, "") for layer in labels] for name in names]
        joined = joined.assign_coords(scheme=(("run", "layer"), np.array(kinds, dtype=str)))
    if "frequency" in joined and not _same_frequencies(joined["frequency"]):
        lines.append(f"{measure}: a component's number is not the same frequency in every run")
    return joined.assign_attrs(_common(groups)), lines


def _along_run(arrays: Mapping[str, xr.DataArray], names: Sequence[str]) -> xr.DataArray:
    """`arrays` by their run's name as one with the axis `run`, at all labels of any of them; empty where a run has none."""
    dims = next(iter(arrays.values())).dims
    plain = [_plain(array).transpose(*dims) for array in arrays.values()]
    labels = {dim: _labels([array[dim].values for array in plain]) for dim in dims}
    text = any(array.dtype.kind in "OUS" for array in plain)
    if text:
        plain = [array.astype(object) for array in plain]
    empty: Any = "" if text else -1 if all(array.dtype.kind in "iu" for array in plain) else np.nan
    shaped = [array.reindex(labels, fill_value=empty) for array in plain]
    joined = xr.concat(shaped, dim="run", coords="minimal", compat="override", join="override")
    joined = joined.assign_coords(run=list(arrays))
    return joined if list(arrays) == list(names) else joined.reindex(run=list(names), fill_value=empty)


def _plain(array: xr.DataArray) -> xr.DataArray:
    """`array` with a label at every place and no other coordinates."""
    array = array.reset_coords(drop=True)
    return array.assign_coords({dim: np.arange(array.sizes[dim]) for dim in array.dims if dim not in array.coords})


def _labels(of_runs: Sequence[np.ndarray]) -> np.ndarray:
    """All labels of an axis: numbers in order, names as they first come."""
    if all(np.issubdtype(labels.dtype, np.number) for labels in of_runs):
        first = of_runs[0]
        return first if all(np.array_equal(first, other) for other in of_runs) else np.unique(np.concatenate(of_runs))
    return np.array(list(dict.fromkeys(str(label) for labels in of_runs for label in labels)))


def _schemes(group: xr.Dataset) -> dict[int, str]:
    return dict(zip(group["layer"].values.tolist(), map(str, group["scheme"].values), strict=True))


def _same_frequencies(frequency: xr.DataArray) -> bool:
    """Whether all runs rotate a component of a layer, where they rotate it, at the same frequency."""
    values = frequency.transpose("run", ...).values
    rotated = np.where(values > 0, values, np.nan)
    low = np.fmin.reduce(rotated, axis=0)
    high = np.fmax.reduce(rotated, axis=0)
    return bool(np.all((high - low)[np.isfinite(high)] <= 1e-6 * high[np.isfinite(high)]))


def _common(groups: Mapping[str, xr.Dataset]) -> dict[str, Any]:
    """The attributes that all of `groups` share."""
    first, *others = groups.values()
    return {
        name: value
        for name, value in first.attrs.items()
        if all(_text(group.attrs.get(name)) == _text(value) for group in others)
    }


def _first_other(values: Mapping[str, Any]) -> str:
    """The first run whose value differs from the first run's."""
    first = next(iter(values.values()))
    return next(name for name, value in values.items() if value != first)


def _prompt_notes(runs: Mapping[str, xr.DataTree]) -> list[str]:
    """A line where the runs saw different prompts."""
    digests = _runs_by(runs, "prompts_digest")
    if len(digests) < 2:
        return []
    short = _listed({digest[:_DIGITS]: names for digest, names in digests.items()})
    return [f"the prompts differ ({short}): only what is averaged over prompts is compared, and differences may be the prompts'"]


def _root_notes(runs: Mapping[str, xr.DataTree]) -> list[str]:
    """A line each where precision, training length or scaling differ."""
    named = {"dtype": "the precision", "training_length": "the training length", "scaling": "the scaling"}
    by_value = {name: _runs_by(runs, attribute) for attribute, name in named.items()}
    return [f"{name} differs: {_listed(values)}" for name, values in by_value.items() if len(values) > 1]


def _shape_notes(groups: Mapping[str, xr.Dataset], joined: xr.Dataset) -> list[str]:
    """A line for every axis of `joined` that has different sizes in `groups`."""
    sizes = {axis: {name: group.sizes[axis] for name, group in groups.items() if axis in group.sizes} for axis in joined.dims}
    return [
        f"{axis}: {', '.join(f'{count:,} in {name}' for name, count in counts.items())}; what a run lacks is left empty"
        for axis, counts in sizes.items()
        if len(set(counts.values())) > 1
    ]


def _prompts_of_sets_notes(measure: str, groups: Mapping[str, xr.Dataset]) -> list[str]:
    """A line where runs of scores were asked different prompts of test sets that they share."""
    differing = _sets_of_other_prompts(groups)
    named = f"the prompts of {', '.join(differing)} differ" if differing else ""
    return [f"{measure}: {named}, so that differences may be the prompts'"] if differing else []


def _sets_of_other_prompts(groups: Mapping[str, xr.Dataset]) -> list[str]:
    """The test sets that two of `groups` asked with different prompts."""
    known: dict[str, set[str]] = {}
    for group in groups.values():
        if "prompts_digest" in group:
            for test_set, digest in zip(group["test_set"].values, group["prompts_digest"].values, strict=True):
                known.setdefault(str(test_set), set()).add(str(digest))
    return [test_set for test_set, digests in known.items() if len(digests) > 1]


def _parameter_notes(measure: str, groups: Mapping[str, xr.Dataset]) -> list[str]:
    """A line for every parameter of a measure that differs between its `groups`.

    Options of a task say how its prompts came about: where these are the same, so that their digests agree, none of them is named.
    """
    same = all("prompts_digest" in group for group in groups.values()) and not _sets_of_other_prompts(groups)
    lines = []
    parameters = dict.fromkeys(name for group in groups.values() for name in group.attrs)
    for parameter in [name for name in parameters if not (same and str(name).startswith("task_"))]:
        values: dict[str, list[str]] = {}
        for run, group in groups.items():
            values.setdefault(_text(group.attrs.get(parameter, "not stated")), []).append(run)
        if len(values) > 1:
            lines.append(f"{measure}: {parameter} differs, {_listed(values)}")
    return lines


def _runs_by(runs: Mapping[str, xr.DataTree], attribute: str) -> dict[str, list[str]]:
    """The names of the runs by their value of `attribute`; runs without it are left out."""
    by_value: dict[str, list[str]] = {}
    for name, run in runs.items():
        if attribute in run.attrs:
            by_value.setdefault(str(run.attrs[attribute]), []).append(name)
    return by_value


def _listed(values: Mapping[str, Sequence[str]]) -> str:
    """Values with the runs that have them: "0.2 for rope, nope; 0.5 for repo"."""
    return "; ".join(f"{value} for {', '.join(names)}" for value, names in values.items())


def _text(parameter: Any) -> str:
    """A parameter as text, as a list where it has several values."""
    if isinstance(parameter, list | tuple | np.ndarray):
        return ",".join(map(str, np.atleast_1d(parameter).tolist()))
    return str(parameter)
