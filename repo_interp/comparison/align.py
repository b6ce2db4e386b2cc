"""Runs of several checkpoints, or of several steps of one training, as one tree with an axis `run`.

    comparison[measure][variable] [run, ...] = the variable of every run, at the labels that any run has

Where a run lacks one there is NaN, or -1 for whole numbers.

Layers, heads, tokens, distances and spans are aligned by their labels, never by their places. What runs are called, and which are one,
stands in `named_runs`; the attribute `notes` has one line for everything that cannot be compared or was measured differently.

    root       checkpoint, layout, checkpoint_digest, prompts_digest, dtype (run); training_step (run) for steps of one training
    a measure  every variable that two runs or more have, with `run` first; scheme (run, layer)

Knows run files; knows nothing about models, and not what a measure means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.comparison.named_runs import Run, layout_of, runs_by_name, training_steps
from repo_interp.comparison.notes import as_text, names_by, on_parameters, on_prompts, on_prompts_of_sets, on_runs, on_shapes
from repo_interp.errors import InputError
from repo_interp.run import versions

_DESCRIBED = ("checkpoint", "layout", "checkpoint_digest", "prompts_digest", "dtype")
_MUST_AGREE = {"maps": "block_size"}
"""Per group, the variable that sets what its axes count: where it differs, equal labels mean different things."""


def compare(runs: Sequence[Run] | Mapping[str, Run]) -> xr.DataTree:
    """`runs` as one tree: one node per measure, every variable with the axis `run` first (see the module).

    A mapping names the runs; otherwise their checkpoints do. Steps of one training are put in order. Raises InputError for fewer than
    two runs, for names that are given twice, and when no measure is common to two runs.
    """
    if isinstance(runs, str) or not isinstance(runs, Iterable):
        raise InputError(f"several runs were wanted, as a list or by name; got a {type(runs).__name__}")
    return compare_named(list(runs.items()) if isinstance(runs, Mapping) else [(None, run) for run in runs])


def compare_named(runs: Sequence[tuple[str | None, Run]]) -> xr.DataTree:
    """`compare` for pairs of name and run; None: the checkpoint names it. Pairs of one name and one checkpoint are one run."""
    by_name = runs_by_name(runs)
    if len(by_name) < 2:
        raise InputError(f"two runs or more were wanted to compare, of different checkpoints; got {', '.join(by_name) or 'none'}")
    steps = training_steps(list(by_name.values()))
    if steps is not None:
        order = sorted(zip(steps, by_name, strict=True))
        steps, by_name = [step for step, _ in order], {name: by_name[name] for _, name in order}
    lines = [*on_prompts(by_name), *on_runs(by_name)]
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
            shapes += on_shapes(groups, joined)
    lines += [
        f"{', '.join(alone)}: only {name} has {'it' if len(alone) == 1 else 'them'}; not compared"
        for name, alone in single.items()
    ]
    if not measures:
        has = "; ".join(f"{name} has {', '.join(run.children) or 'none'}" for name, run in by_name.items())
        raise InputError(f"these runs have no measure in common ({has}); analyse them with the same --measures")
    main_spans = {str(run.attrs.get("main_span", "")) for run in by_name.values()}
    tree = xr.DataTree.from_dict({"/": _root(by_name, steps), **{f"/{name}": joined for name, joined in measures.items()}})
    tree.attrs = {
        "runs": "steps of one training" if steps is not None else "checkpoints",
        "same_prompts": "no" if len(names_by(by_name, "prompts_digest")) > 1 else "yes",
        "main_span": main_spans.pop() if len(main_spans) == 1 else "",
        "notes": "\n".join([*lines, *dict.fromkeys(shapes)]),
        **{f"version_{name}": number for name, number in versions().items()},
    }
    return tree


def _root(runs: Mapping[str, xr.DataTree], steps: Sequence[int] | None) -> xr.Dataset:
    described = {name: [str(run.attrs.get(name, "")) for run in runs.values()] for name in _DESCRIBED}
    described["layout"] = [layout_of(run) for run in runs.values()]
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
    lines = [*on_parameters(measure, groups), *on_prompts_of_sets(measure, groups)]
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
        if all(as_text(group.attrs.get(name)) == as_text(value) for group in others)
    }


def _first_other(values: Mapping[str, Any]) -> str:
    """The first run whose value differs from the first run's."""
    first = next(iter(values.values()))
    return next(name for name, value in values.items() if value != first)
