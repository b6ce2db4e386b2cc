"""Runs side by side: what several checkpoints, or several steps of one training, were measured to do, along an axis `run`.

    comparison[measure][variable] [run, ...] = the variable of every run, at the labels that any run has; NaN where a run lacks one

Layers, heads, tokens, distances, spans are aligned by their labels, never by their places. Runs of one checkpoint that measure
different things - an analysis and its scores - are one run. What cannot be compared, and what was measured differently, is said, one
line each, in the attribute `notes`.

    root       checkpoint, layout, checkpoint_digest, prompts_digest, dtype (run); training_step (run) for steps of one training
    a measure  every variable that two runs or more have, with `run` first; scheme (run, layer)

Brings together run files; knows nothing about models, and not what a measure means.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.comparison.notes import parameter_notes, prompt_notes, root_notes, shape_notes, shown, stated
from repo_interp.errors import InputError
from repo_interp.positions.layouts import format_layout
from repo_interp.run import read_run, versions

Run = xr.DataTree | str | os.PathLike[str]
"""A run in memory, its run file, or the directory that holds run.nc - and, in folders score*, those of its scores."""

_DESCRIBED = ("checkpoint", "layout", "checkpoint_digest", "prompts_digest", "dtype")
_MUST_AGREE = {"maps": "block_size"}
"""Variables without axes that set what the axes of their group count: where they differ, labels do not mean the same."""


def compare(runs: Sequence[Run] | Mapping[str, Run]) -> xr.DataTree:
    """`runs` as one tree: a node a measure, every variable with the axis `run` first (see the module).

    A mapping names the runs; otherwise their checkpoints do. Steps of one training are put in order. Raises InputError for fewer than
    two runs, for names that are given twice, and when no measure is common to two runs.
    """
    given = runs.items() if isinstance(runs, Mapping) else [(None, run) for run in runs]
    return compare_named(list(given))


def compare_named(given: Sequence[tuple[str | None, Run]]) -> xr.DataTree:
    """`compare` for pairs of name and run; None: the checkpoint names it. Pairs of one name and one checkpoint are one run."""
    found = _named(_merged([(name, *part) for name, run in given for part in _opened(run)]))
    if len(found) < 2:
        raise InputError(f"two runs or more were wanted to compare, of different checkpoints; got {', '.join(found) or 'none'}")
    steps = _training_steps(list(found.values()))
    if steps is not None:
        order = sorted(zip(steps, found, strict=True))
        steps, found = [step for step, _ in order], {name: found[name] for _, name in order}
    notes = [*prompt_notes(found), *root_notes(found)]
    shapes: list[str] = []
    groups: dict[str, xr.Dataset] = {}
    for measure in dict.fromkeys(name for run in found.values() for name in run.children):
        having = {name: run[measure].to_dataset() for name, run in found.items() if measure in run.children}
        missing = [name for name in found if name not in having]
        if len(having) < 2:
            notes.append(f"{measure}: only {next(iter(having))} has it; not compared")
            continue
        if missing:
            notes.append(f"{measure}: {', '.join(missing)} {'have' if len(missing) > 1 else 'has'} none")
        joined, said = _joined(measure, having, list(found))
        notes += said
        if joined.data_vars:
            groups[measure] = joined
            shapes += shape_notes(having, joined)
    if not groups:
        has = "; ".join(f"{name} has {', '.join(run.children) or 'none'}" for name, run in found.items())
        raise InputError(f"these runs have no measure in common ({has}); analyse them with the same --measures")
    notes += dict.fromkeys(shapes)
    root = _root(found, steps)
    tree = xr.DataTree.from_dict({"/": root, **{f"/{name}": group for name, group in groups.items()}})
    tree.attrs = {
        "runs": "steps of one training" if steps is not None else "checkpoints",
        "same_prompts": "no" if len(stated(found, "prompts_digest")) > 1 else "yes",
        "notes": "\n".join(notes),
        **{f"version_{name}": number for name, number in versions().items()},
    }
    return tree


def notes(comparison: xr.DataTree) -> list[str]:
    """What cannot be compared, or was measured differently: one line each."""
    return [line for line in str(comparison.attrs.get("notes", "")).split("\n") if line]


def _opened(run: Run) -> list[tuple[str, xr.DataTree]]:
    """What a user calls the run, and the run; those of its scores beside it."""
    if isinstance(run, xr.DataTree):
        return [(run.name or "", run)]
    path = Path(run)
    called = path.resolve().parent.name if path.is_file() else path.resolve().name
    beside = sorted(path.glob("score*/run.nc")) if path.is_dir() else []
    return [(called, read_run(file)) for file in (path, *beside)]


def _merged(given: Sequence[tuple[str | None, str, xr.DataTree]]) -> list[tuple[str | None, str, xr.DataTree]]:
    """Runs of one checkpoint that measure different things on the same prompts put together."""
    found: list[tuple[str | None, str, xr.DataTree]] = []
    for name, called, run in given:
        for place, (other_name, other_called, other) in enumerate(found):
            if (name is None or other_name is None or name == other_name) and _complements(run, other):
                nodes = {**_nodes(other), **_nodes(run)}
                both = xr.DataTree.from_dict({f"/{node}": group for node, group in nodes.items()})
                both.attrs = {**run.attrs, **other.attrs}
                found[place] = (other_name or name, other_called, both)
                break
        else:
            found.append((name, called, run))
    return found


def _nodes(run: xr.DataTree) -> dict[str, xr.Dataset]:
    return {name: node.to_dataset() for name, node in run.children.items()}


def _complements(one: xr.DataTree, other: xr.DataTree) -> bool:
    digest = one.attrs.get("checkpoint_digest")
    agree = all(
        name not in one.attrs or name not in other.attrs or str(one.attrs[name]) == str(other.attrs[name])
        for name in ("prompts_digest", "dtype", "scaling")
    )
    return (
        bool(digest) and digest == other.attrs.get("checkpoint_digest") and agree and not set(one.children) & set(other.children)
    )


def _named(given: Sequence[tuple[str | None, str, xr.DataTree]]) -> dict[str, xr.DataTree]:
    """Runs by name: the given one, else the checkpoint's where that tells them apart, else the directory's."""
    chosen = [name for name, _, _ in given if name is not None]
    twice = next((name for name in chosen if chosen.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"the name {twice!r} was given to two runs that are not of one checkpoint; wanted a name for each")
    checkpoints = [str(run.attrs.get("checkpoint") or called) for _, called, run in given]
    tell_apart = len(set(checkpoints)) == len(checkpoints) and all(checkpoints)
    found: dict[str, xr.DataTree] = {}
    for (name, called, run), checkpoint in zip(given, checkpoints, strict=True):
        wanted = name or (checkpoint if tell_apart else called or checkpoint) or "run"
        unique, number = wanted, 1
        while unique in found or (name is None and unique in chosen):
            number += 1
            unique = f"{wanted}-{number}"
        found[unique] = run
    return found


def _training_steps(runs: Sequence[xr.DataTree]) -> list[int] | None:
    """The step of every run, where they are the saved steps (steps/000100, ...) of checkpoints of one layout; None otherwise."""
    names = [re.search(r"(?:^|/)(\d+)$", str(run.attrs.get("checkpoint", ""))) for run in runs]
    layouts = {_layout(run) for run in runs}
    steps = [int(name[1]) for name in names if name is not None]
    return steps if len(steps) == len(runs) == len(set(steps)) and len(layouts) == 1 else None


def _layout(run: xr.DataTree) -> str:
    stated = str(run.attrs.get("layout", ""))
    return format_layout(tuple(stated.split(","))) if "," in stated else stated


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
    """The variables that two of `groups` or more have, along `run`, and what has to be said."""
    said = parameter_notes(measure, groups)
    binding = _MUST_AGREE.get(measure)
    if binding is not None and len({float(one[binding]) for one in groups.values() if binding in one}) > 1:
        return xr.Dataset(), [*said, f"{measure}: {binding} differs, so that labels do not mean the same; not compared"]
    variables: dict[str, xr.DataArray] = {}
    for variable in dict.fromkeys(name for one in groups.values() for name in one.data_vars):
        arrays = {name: one[variable] for name, one in groups.items() if variable in one}
        first = next(iter(arrays.values()))
        if len(arrays) < 2:
            said.append(f"{measure}: only {next(iter(arrays))} has {variable}")
        elif len({frozenset(array.dims) for array in arrays.values()}) > 1:
            said.append(
                f"{measure}: {variable} has other axes in {_odd_one(arrays, lambda array: frozenset(array.dims))}; not compared"
            )
        elif len({str(array.attrs.get("units", "")) for array in arrays.values()}) > 1:
            said.append(f"{measure}: {variable} has other units in {_odd_one(arrays, _units)}; not compared")
        else:
            variables[str(variable)] = _along_run(arrays, names).assign_attrs(first.attrs)
    joined = xr.Dataset(variables)
    alone: dict[str, list[str]] = {}
    for variable, array in joined.data_vars.items():
        having = [name for name in groups if array.dtype.kind == "f" and np.isfinite(array.sel(run=name).values).any()]
        if len(having) == 1:
            alone.setdefault(having[0], []).append(str(variable))
    said += [f"{measure}: only {name} has a value of {', '.join(found)}" for name, found in alone.items()]
    if "layer" in joined.dims:
        schemes = {name: _schemes(one) for name, one in groups.items() if "scheme" in one.coords}
        labels = joined["layer"].values.tolist()
        kinds = [[schemes.get(name, {}).get(layer, "") for layer in labels] for name in names]
        joined = joined.assign_coords(scheme=(("run", "layer"), np.array(kinds, dtype=str)))
    if "frequency" in joined and not _same_frequencies(joined["frequency"]):
        said.append(f"{measure}: a component's number is not the same frequency in every run")
    return joined.assign_attrs(_common(groups)), said


def _along_run(arrays: Mapping[str, xr.DataArray], names: Sequence[str]) -> xr.DataArray:
    """`arrays` by their run's name as one with the axis `run`, at all labels of any of them; empty where a run has none."""
    dims = next(iter(arrays.values())).dims
    plain = [_plain(array).transpose(*dims) for array in arrays.values()]
    labels = {dim: _labels([array[dim].values for array in plain]) for dim in dims}
    same = len(plain) == len(names) and all(array.sizes[dim] == len(labels[dim]) for array in plain for dim in dims)
    text = any(array.dtype.kind in "OUS" for array in plain)
    if text:
        plain = [array.astype(object) for array in plain]
    elif not same:
        plain = [array if array.dtype.kind == "f" else array.astype(np.float64) for array in plain]
    empty: Any = "" if text else np.nan
    shaped = [array.reindex(labels, fill_value=empty) for array in plain]
    joined = xr.concat(shaped, dim="run", coords="minimal", compat="override", join="override")
    joined = joined.assign_coords(run=list(arrays))
    return joined if list(arrays) == list(names) else joined.reindex(run=list(names), fill_value=empty)


def _plain(array: xr.DataArray) -> xr.DataArray:
    """`array` with a label at every place and no other coordinates."""
    array = array.reset_coords(drop=True)
    return array.assign_coords({dim: np.arange(array.sizes[dim]) for dim in array.dims if dim not in array.coords})


def _labels(found: Sequence[np.ndarray]) -> np.ndarray:
    """All labels: numbers in order, names as they first come."""
    if all(np.issubdtype(labels.dtype, np.number) for labels in found):
        return found[0] if all(np.array_equal(found[0], other) for other in found) else np.unique(np.concatenate(found))
    return np.array(list(dict.fromkeys(str(label) for labels in found for label in labels)))


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
        name: value for name, value in first.attrs.items() if all(shown(one.attrs.get(name)) == shown(value) for one in others)
    }


def _odd_one(arrays: Mapping[str, xr.DataArray], key) -> str:
    """The first run whose array has another `key` than the first one's."""
    first = key(next(iter(arrays.values())))
    return next(name for name, array in arrays.items() if key(array) != first)


def _units(array: xr.DataArray) -> str:
    return str(array.attrs.get("units", ""))
