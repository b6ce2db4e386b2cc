"""Runs of several checkpoints, or of several steps of one training, as one tree with an axis `run`.

    comparison[measure][variable] [run, ...] = the variable of every run, at the labels that any run
    has (an outer join)

If a run lacks a label, its value is NaN, -1 for integers, "" for texts.

Layers, heads, tokens, distances and spans are aligned by their labels, never by their places.
`named_runs` names the runs and decides which are one; the attribute `notes` has one line for
everything that cannot be compared or was measured differently.

    root       checkpoint, layout, checkpoint_digest, prompts_digest, dtype (run);
               training_step (run) for steps of one training; scores of the runs on the task
               (`performance`), and the attribute `performance`, a sentence about them
    a measure  every variable in at least two runs, with the axis `run` first; scheme (run, layer)

This module knows run files, and nothing about models and the meaning of a measure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.comparison.comparison_notes import (
    differing,
    on_measure,
    on_prompts,
    on_runs,
    on_shapes,
)
from repo_interp.comparison.named_runs import Run, layout_of, runs_by_name, training_steps
from repo_interp.comparison.performance import performance
from repo_interp.errors import InputError
from repo_interp.run import BLOCK_SIZE, DESCRIBED, versions


def compare(runs: Sequence[Run] | Mapping[str, Run]) -> xr.DataTree:
    """Join runs along an axis `run`.

    Args:
        runs: Runs, run files or directories, in a list or by name. In a list, runs are named by
            their checkpoints, with a number if a name repeats; steps of one training are sorted.

    Returns:
        One tree with one node per measure, every variable with the axis `run` first.

    Raises:
        InputError: There are fewer than two runs, two steps of a training have the same weights, or
            no measure is common to two runs.
    """
    # A text is iterable too, and its letters would be opened as runs.
    if isinstance(runs, str) or not isinstance(runs, Iterable):
        raise InputError(
            f"several runs were wanted, as a list or by name; got a {type(runs).__name__}"
        )
    return compare_named(
        list(runs.items()) if isinstance(runs, Mapping) else [(None, run) for run in runs]
    )


def compare_named(runs: Sequence[tuple[str | None, Run]]) -> xr.DataTree:
    """Join pairs of name and run as `compare` does.

    Args:
        runs: Pairs of name and run; None: the name of the checkpoint. Pairs of one name and one
            checkpoint are one run.

    Returns:
        The tree that `compare` returns.

    Raises:
        InputError: As `compare`.
    """
    by_name = runs_by_name(runs)
    if len(by_name) < 2:
        raise InputError(
            "two runs or more were wanted to compare, of different checkpoints; got "
            f"{', '.join(by_name) or 'none'}"
        )
    steps = training_steps(by_name)
    # Sorted by step, so that the axis `run` follows the training
    if steps is not None:
        order = sorted(zip(steps, by_name, strict=True))
        steps, by_name = [step for step, _ in order], {name: by_name[name] for _, name in order}
    # Lines about differences first, then lines about missing parts, group by group.
    lines = [*on_prompts(by_name), *on_runs(by_name)]
    shapes: list[str] = []
    measures: dict[str, xr.Dataset] = {}
    single: dict[str, list[str]] = {}
    for measure in dict.fromkeys(name for run in by_name.values() for name in run.children):
        groups = {
            name: run[measure].to_dataset()
            for name, run in by_name.items()
            if measure in run.children
        }
        missing = [name for name in by_name if name not in groups]
        # A group in only one run has nothing to compare with.
        if len(groups) < 2:
            single.setdefault(next(iter(groups)), []).append(measure)
            continue
        if missing:
            lines.append(
                f"{measure}: {', '.join(missing)} {'have' if len(missing) > 1 else 'has'} none"
            )
        comparable, of_measure = _comparable(measure, groups)
        lines += of_measure
        if comparable:
            measures[measure] = joined = _joined(groups, comparable, list(by_name))
            lines += _on_values(measure, joined)
            shapes += on_shapes(groups, joined)
    lines += [
        f"{', '.join(alone)}: only {name} has {'it' if len(alone) == 1 else 'them'}; not compared "
        "(analyze both with the same --measures and --experiments)"
        for name, alone in single.items()
    ]
    if not measures:
        has = "; ".join(
            f"{name} has {', '.join(run.children) or 'none'}" for name, run in by_name.items()
        )
        raise InputError(
            f"these runs have no measure in common ({has}); analyze them with the same --measures"
        )
    # The charts of a comparison need one main span; if runs differ, there is none.
    main_spans = {str(run.attrs.get("main_span", "")) for run in by_name.values()}
    same_prompts = not on_prompts(by_name)
    sentence, means = performance(measures, same_prompts)
    tree = xr.DataTree.from_dict(
        {
            "/": _root(by_name, steps).assign(means),
            **{f"/{name}": joined for name, joined in measures.items()},
        }
    )
    tree.attrs = {
        "runs": "steps of one training" if steps is not None else "checkpoints",
        "performance": sentence,
        "same_prompts": "yes" if same_prompts else "no",
        "main_span": main_spans.pop() if len(main_spans) == 1 else "",
        "notes": "\n".join([*lines, *dict.fromkeys(shapes)]),
        **{f"version_{name}": number for name, number in versions().items()},
    }
    return tree


def _root(runs: Mapping[str, xr.DataTree], steps: Sequence[int] | None) -> xr.Dataset:
    described = {
        name: [str(run.attrs.get(name, "")) for run in runs.values()] for name in DESCRIBED
    }
    described["layout"] = [layout_of(run) for run in runs.values()]
    root = xr.Dataset(
        {
            name: (
                "run",
                values,
                {"long_name": f"{name.replace('_', ' ')} of each run", "units": "1"},
            )
            for name, values in described.items()
        },
        coords={"run": list(runs)},
    )
    if steps is not None:
        root["training_step"] = (
            "run",
            list(steps),
            {"long_name": "step of the training", "units": "steps"},
        )
    return root


def _comparable(measure: str, groups: Mapping[str, xr.Dataset]) -> tuple[list[Hashable], list[str]]:
    """Variables that two of `groups` share with equal axes and units; a line for the others."""
    for name, group in groups.items():
        # Alignment is by label, so a repeated label would be ambiguous.
        if twice := [axis for axis, labels in group.indexes.items() if not labels.is_unique]:
            raise InputError(
                f"{measure} of {name} has a label of the axis {twice[0]!r} twice, so that it "
                "names nothing; analyze again"
            )
    lines = list(on_measure(measure, groups))
    if (
        len(
            {
                float(group[BLOCK_SIZE])
                for group in groups.values()
                if BLOCK_SIZE in group and not group[BLOCK_SIZE].ndim
            }
        )
        > 1
    ):
        return [], [
            *lines,
            f"{measure}: {BLOCK_SIZE} differs, so that labels do not mean the same; not compared",
        ]
    comparable: list[Hashable] = []
    alone: dict[str, list[str]] = {}
    # In the order of the runs, so that tables read as they do for one run
    for variable in dict.fromkeys(name for group in groups.values() for name in group.data_vars):
        arrays = {name: group[variable] for name, group in groups.items() if variable in group}
        first, *_ = arrays.values()
        # Units and axes of the first run are the reference.
        axes = [name for name, array in arrays.items() if _axes(array) != _axes(first)]
        units = [name for name, array in arrays.items() if _units(array) != _units(first)]
        if len(arrays) < 2:
            alone.setdefault(next(iter(arrays)), []).append(str(variable))
        elif axes or units:
            lines.append(
                f"{measure}: {variable} has other {'axes' if axes else 'units'} in "
                f"{(axes or units)[0]}; not compared"
            )
        else:
            comparable.append(variable)
    lines += [f"{measure}: only {name} has {', '.join(of_one)}" for name, of_one in alone.items()]
    return comparable, lines


def _axes(array: xr.DataArray) -> dict[Hashable, bool]:
    """The axes of a variable, and whether their labels are texts."""
    # numpy's kinds of texts: object, Unicode, bytes, and the variable strings of numpy 2
    return {axis: array[axis].dtype.kind in "OUST" for axis in array.dims}


def _units(array: xr.DataArray) -> tuple[Any, bool]:
    """The units of a variable, and whether it is of texts."""
    return array.attrs.get("units", ""), array.dtype.kind in "OUST"


def _joined(
    groups: Mapping[str, xr.Dataset], variables: Sequence[Hashable], names: Sequence[str]
) -> xr.Dataset:
    """`variables` of all `groups` along `run`, with all of `names` and the union of labels."""
    plain = [
        _labelled(group, [name for name in variables if name in group]) for group in groups.values()
    ]
    empty = {
        name: _empty([group[name] for group in plain if name in group])
        for name in [*variables, "scheme"]
    }
    # By label and without checks of equality: differences were noted,
    # and attributes are joined below.
    joined = xr.concat(
        plain,
        xr.Variable("run", list(groups)),
        data_vars="all",
        coords="minimal",
        compat="override",
        join="outer",
        fill_value=empty,
        combine_attrs="override",
    )
    # Spans and kinds have the order of the page, and the outer join sorts labels by alphabet.
    for dim in joined.dims:  # the join sorts names, which have a given order
        order = list(
            dict.fromkeys(
                label
                for group in plain
                if dim in group.dims
                for label in group[dim].values.tolist()
            )
        )
        if (
            dim != "run"
            and joined[dim].dtype.kind in "OUST"
            and joined[dim].values.tolist() != order
        ):
            joined = joined.sel({dim: order})
    # Runs without this group get empty values, so that every group has the same axis `run`.
    if list(groups) != list(names):
        joined = joined.reindex(run=list(names), fill_value=empty)
    # A variable until here, since concat would drop a coordinate that differs by run.
    joined = joined.set_coords("scheme") if "scheme" in joined else joined
    given = (group["scheme"].attrs.get("learned", "") for group in plain if "scheme" in group)
    if learned := {name for text in given for name in text.split(",") if name}:
        joined["scheme"].attrs["learned"] = ",".join(sorted(learned))
    stated = {
        name: {run: group.attrs.get(name) for run, group in groups.items()}
        for name in plain[0].attrs
    }
    # Only attributes that are equal in all runs; the notes have the others.
    joined.attrs = {
        name: plain[0].attrs[name] for name, of_runs in stated.items() if not differing(of_runs)
    }
    return joined[list(variables)]


def _labelled(group: xr.Dataset, variables: Sequence[Hashable]) -> xr.Dataset:
    """`variables` of `group` with labels everywhere, and the scheme of layers as a variable."""
    kept = group[list(variables)]
    scheme = (
        {"scheme": kept["scheme"].variable}
        if "scheme" in kept.coords and "layer" in kept.dims
        else {}
    )
    # Coordinates other than axes may differ by run, and concat would refuse them.
    kept = kept.reset_coords(drop=True)
    return kept.assign_coords(
        # Axes without labels are aligned by number, so they get numbers.
        {dim: np.arange(kept.sizes[dim]) for dim in kept.dims if dim not in kept.coords}
    ).assign(scheme)


def _empty(arrays: Sequence[xr.DataArray]) -> Any:
    """The fill value of a variable for runs that lack it."""
    kinds = {array.dtype.kind for array in arrays}
    # NaN would turn whole numbers into floats, so these have -1.
    return "" if kinds & set("OUST") else -1 if kinds <= set("iu") else np.nan


def _on_values(measure: str, joined: xr.Dataset) -> list[str]:
    """Lines about values in only one run, and about components with different frequencies."""
    alone: dict[str, list[str]] = {}
    for variable, array in joined.data_vars.items():
        having = [
            str(run)
            for run in joined["run"].values
            # Only floats have NaN where nothing was measured.
            if array.dtype.kind == "f" and np.isfinite(array.sel(run=run)).any()
        ]
        if len(having) == 1:
            alone.setdefault(having[0], []).append(str(variable))
    lines = [
        f"{measure}: only {name} has a value of {', '.join(of_one)}"
        for name, of_one in alone.items()
    ]
    if "frequency" in joined:
        # Pairs that do not rotate have frequency 0 in every run.
        rotated = abs(joined["frequency"]).where(joined["frequency"] != 0)
        low, high = rotated.min("run"), rotated.max("run")
        # Relative, since frequencies span many orders of magnitude; float32 rounds at 1e-7.
        if bool((high - low > 1e-6 * high).any()):
            lines.append(f"{measure}: a component's number is not the same frequency in every run")
    return lines
