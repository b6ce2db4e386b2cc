"""Audit of rotation: compare the measured angle of rotary pairs by distance with the stated angle.

A model whose rotation differs from its configuration writes plausible short texts, and fails on
long ones. The audit measures the angle on the attention modules (`layer_rotation`), at distances of
powers of two and their neighbors, up to the longest length. It compares the angles with
transformers' rope functions, and the pairs with a new module of the same class.

Frequencies that depend on the length of a pass (dynamic NTK, longrope) are those of a pass one token
longer than the longest distance. With a dtype, the model also reads one text at several
offsets (`offsets`). `UNSEEN` names the parts that are not compared. This module knows none of the
schemes of `repo_interp`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM

from repo_interp.checkpoint_files.architectures import (
    native_layout,
    require_family,
    training_length,
)
from repo_interp.errors import InputError, quoted, warn
from repo_interp.models.checkpoints import load_model, open_checkpoint
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import require_weights
from repo_interp.models.load import open_model
from repo_interp.models.precision import float32_by_default
from repo_interp.models.rotation import rotaries
from repo_interp.models.wrapped import model_of
from repo_interp.plugins.verify.axis_tables import axis_findings, file_rotations, lines_by_axis
from repo_interp.plugins.verify.dumped_tables import SUFFIXES, read_tables
from repo_interp.plugins.verify.layer_rotation import (
    TOLERANCE,
    LayerRotation,
    MeasuredRotation,
    StatedRotation,
    compare_rotations,
    measured_rotation,
    rotating_modules,
    stated_rotation,
    tested_distances,
)
from repo_interp.plugins.verify.offsets import at_offsets
from repo_interp.plugins.verify.rotation_faults import (
    Findings,
    RotationFinding,
    exchanged_pairs,
    faults,
    format_pairs,
    lines_by_fault,
)
from repo_interp.plugins.verify.second_model import differences
from repo_interp.positions.layouts import LEARNED
from repo_interp.storage.files import path_of

UNSEEN = (
    "values, what attention writes, feed-forward parts, norms between layers, embeddings and masks"
)
"""Parts that no audit compares."""


def audit(
    model: Any, other: Any = None, dtype: torch.dtype = torch.float32, longest: int | None = None
) -> xr.Dataset:
    """Compare the rotation of a stock model with its configuration, and with another model.

    Args:
        model: Model of Hugging Face, on any device.
        other: A second model of the same family; None: only the first is audited.
        dtype: Precision of the tables of the rotary module.
        longest: The last distance, in tokens; None: twice the training length.

    Returns:
        `error [layer, component, distance]` (largest of the heads, radians); `largest_error` and
        `first_distance [layer, head, component]` (-1 where the error stays below the tolerance);
        `frequency [layer, component]`. The attribute `findings` has one line for every fault;
        `not_compared` names the parts that were not compared.

    Raises:
        InputError: `longest` is out of range, the model has no observable attention, or the models
            differ in family or layers.
    """
    config = model.config
    longest = 2 * training_length(config) if longest is None else longest
    # Tables are made from positions in float32, which holds whole numbers exactly up to 2^24.
    if not isinstance(longest, int) or not 1 <= longest <= 1 << 24:
        raise InputError(
            f"the longest distance is {quoted(longest)}; wanted a whole number from 1 to {1 << 24}"
        )
    deltas = tested_distances(longest)
    modules = rotating_modules(model)
    if not modules:
        raise InputError(
            f"this {config.model_type} has no attention module with a measurable rotation"
        )
    layers = {
        layer: compare_rotations(
            stated_rotation(model, stock, source, longest + 1),
            measured_rotation(stock, source, deltas, dtype),
            deltas,
            TOLERANCE[dtype],
        )
        for layer, (stock, source) in modules.items()
    }
    found = [faults(layers, deltas), exchanged_pairs(config, layers, deltas)]
    if other is not None:
        found.append(differences(model, other, modules, layers, deltas, dtype))
    unseen = UNSEEN if other is not None else f"keys, queries before rotation, {UNSEEN}"
    lines = [line for findings in found for line in lines_by_fault(findings)]
    lines += lines_by_axis(axis_findings(model, layers))
    return _table(model, layers, deltas, dtype, unseen, lines)


def audit_tables(model: Any, path: Path) -> xr.Dataset:
    """Compare rotation in a file of another runtime with a model's configuration.

    Args:
        model: Model of Hugging Face, on any device.
        path: File of tables or vectors, see `dumped_tables`.

    Returns:
        As `audit`, at the positions of the file, for every layer that rotates. If positions are by
        axis, the axis `distance` holds tokens.

    Raises:
        InputError: The file cannot be read, or has only position 0.
    """
    angles, lengths, positions, dtype, adjacent = read_tables(path)
    if positions.ndim == 2:
        layers, mistakes, alike = file_rotations(model, angles, lengths, positions, dtype)
        slow = [f"neighboring positions in {name} (alike in {dtype})" for name in alike]
        unseen = ", ".join([*slow, "order of pairs in a head", UNSEEN]).replace("torch.", "")
        lines = list(lines_by_axis(mistakes))
        return _table(model, layers, range(positions.shape[1]), dtype, unseen, lines)
    # Ascending, as `first_distance` needs; a repeated position is read once, at its first place.
    deltas, places = np.unique(positions.numpy(), return_index=True)
    deltas, places = deltas[deltas > 0].tolist(), places[deltas > 0]
    if not deltas:
        raise InputError(f"{path} contains only position 0, where nothing rotates")
    allowed = TOLERANCE.get(dtype, 1e-3)
    still = (angles[:, places].abs() < allowed).all(1)

    def seen(wanted: StatedRotation) -> MeasuredRotation:
        # Leaves out pairs that neither turn nor should turn, as in a partial rotation.
        spare = bool(still[len(wanted.frequencies) :].all())
        some = slice(len(wanted.frequencies) if spare else None)
        # A table does not say which entries of a head form a pair.
        pairs = tuple((pair, pair) for pair in range(len(angles[some])))
        return MeasuredRotation(pairs, angles[None, some, places], lengths[None, some, places])

    stated = {
        layer: stated_rotation(model, stock, source, deltas[-1] + 1)
        for layer, (stock, source) in rotating_modules(model).items()
    }
    layers = {
        layer: compare_rotations(wanted, seen(wanted), deltas, allowed)
        for layer, wanted in stated.items()
        if len(wanted.frequencies)
    }
    if not layers:
        raise InputError(f"no layer of this {model.config.model_type} rotates")
    found: list[Findings] = [faults(layers, deltas)]
    if adjacent is None:
        unseen = f"order of pairs in a head, {UNSEEN}"
    else:
        unseen = UNSEEN
        found.append(_other_order(model, list(layers), adjacent, 2 * len(angles)))
    lines = [line for findings in found for line in lines_by_fault(findings)]
    return _table(model, layers, deltas, dtype, unseen, lines)


def _other_order(model: Any, layers: Sequence[int], adjacent: bool, width: int) -> Findings:
    """Report vectors turned in adjacent pairs although the model turns halves, or the reverse."""
    modules, found = rotating_modules(model), {}
    for layer in layers:
        pairs = measured_rotation(*modules[layer], [1], torch.float32).pairs
        # If only a part of a head turns, a file does not say which entries.
        if 2 * len(pairs) == width > 2 and adjacent != (pairs[0][1] - pairs[0][0] == 1):
            half = width // 2
            step, apart = (2, 1) if adjacent else (1, half)
            others = [(step * pair, step * pair + apart) for pair in range(half)]
            measured = f"{format_pairs(others)} (right only for weights that are permuted so)"
            expected = f"entries {format_pairs(pairs)} as pairs"
            found[layer] = [RotationFinding((), expected, measured, 1)]
    return found


def _table(
    model: Any,
    layers: Mapping[int, LayerRotation],
    deltas: Sequence[int],
    dtype: torch.dtype,
    not_compared: str,
    findings: Sequence[str],
) -> xr.Dataset:
    heads, components = (
        max(1, *(layer.errors.shape[axis] for layer in layers.values())) for axis in (0, 1)
    )
    shape = (len(layers), heads, components)
    largest, first = np.full(shape, np.nan), np.full(shape, -1, dtype=np.int64)
    by_distance = np.full((len(layers), components, len(deltas)), np.nan)
    frequency = np.full((len(layers), components), np.nan)
    for row, layer in enumerate(layers.values()):
        error, off = layer.errors.numpy(), layer.wrong.numpy()
        heads_of, pairs, _ = error.shape
        largest[row, :heads_of, :pairs] = error.max(-1, initial=0.0)
        first[row, :heads_of, :pairs] = np.where(
            off.any(-1), np.asarray(deltas)[off.argmax(-1)], -1
        )
        by_distance[row, :pairs] = error.max(0)
        frequency[row, : len(layer.stated.frequencies)] = layer.stated.frequencies
    by_component, by_head = ("layer", "component"), ("layer", "head", "component")
    variables = {
        "error": (
            (*by_component, "distance"),
            by_distance,
            "error of the angle, largest of the heads",
            "rad",
        ),
        "largest_error": (by_head, largest, "largest error of the angle", "rad"),
        "first_distance": (by_head, first, "first distance with an error", "token"),
        "frequency": (by_component, frequency, "expected frequency", "rad"),
    }
    return xr.Dataset(
        {
            name: (axes, values, {"long_name": long, "units": units})
            for name, (axes, values, long, units) in variables.items()
        },
        coords={
            "layer": list(layers),
            "head": range(heads),
            "component": range(components),
            "distance": list(deltas),
        },
        attrs={
            "not_compared": not_compared,
            "model_type": model.config.model_type,
            "device": str(_device(model)),
            "dtype": str(dtype).removeprefix("torch."),
            "longest": deltas[-1],
            "findings": "\n".join(findings),
        },
    )


def _device(model: Any) -> torch.device:
    """Device on which the model computes its tables."""
    buffers = (buffer.device for rotary in rotaries(model) for buffer in rotary.buffers())
    return next(buffers, torch.device("cpu"))


@float32_by_default()
def verify(
    model: str | os.PathLike[str] | nn.Module,
    other: str | os.PathLike[str] | nn.Module | None = None,
    dtype: str | None = None,
    longest: int | None = None,
) -> xr.DataTree:
    """Compare a model's rotation with its configuration, and optionally with another model.

    Angles do not depend on weights, so without `other` and `dtype` no weights are read. See
    `audit`.

    Args:
        model: Model of Hugging Face or bridge, also inside torch.compile or a PeftModel; path, hub
            id, name of the zoo or GGUF file.
        other: A second model, in any of these forms; or a file of another runtime (.npz or
            .safetensors) with rotation tables, or with queries before and after rotation (see
            `dumped_tables`); None: nothing else.
        dtype: Precision of the tables, and of the model that reads one text at several offsets
            (`at_offsets`); None: tables in float32, and no text.
        longest: The last distance, in tokens; None: twice the training length.

    Returns:
        The dataset of `audit`, and in the group `offsets` the dataset of `at_offsets`. The
        attribute `findings` has one line per fault of both; `device` and `dtype` are those of the
        tables.

    Raises:
        InputError: `dtype` is unknown, or a checkpoint cannot be opened.
    """
    names = {str(known).removeprefix("torch."): known for known in TOLERANCE}
    if dtype is not None and dtype not in names:
        raise InputError(f"dtype {quoted(dtype)} is unknown; wanted one of {', '.join(names)}")
    if isinstance(other, str | os.PathLike) and os.fspath(other).endswith(SUFFIXES):
        return xr.DataTree(audit_tables(_open(model, weights=False), Path(other)))
    opened = _open(model, weights=other is not None)
    audited = audit(
        opened,
        None if other is None else _open(other, weights=True),
        names[dtype or "float32"],
        longest,
    )
    if dtype is None:
        return xr.DataTree(audited)
    is_module = isinstance(model, nn.Module)
    ran = at_offsets(opened if is_module else open_model(model, dtype=dtype), names[dtype])
    findings = [audited.attrs["findings"], ran.attrs["findings"]]
    audited.attrs["findings"] = "\n".join(filter(None, findings))
    return xr.DataTree(audited, {"offsets": xr.DataTree(ran)})


def _open(model: Any, weights: bool) -> Any:
    if isinstance(model, nn.Module):
        owner = model_of(model)
        if getattr(owner.config, "text_config", None) is not None:
            require_family(owner.config)  # its message names the part that can be opened
        # Only options of rotation matter.
        if any(buffer.is_meta for buffer in owner.buffers()):
            require_weights(as_decoder(owner))
        return owner
    checkpoint = open_checkpoint(path_of(model, "a checkpoint or a model"))
    config = checkpoint.config
    others = sorted(
        {
            ours
            for ours, native in zip(checkpoint.layout, native_layout(config), strict=True)
            if ours not in (native, *LEARNED)
        }
    )
    if others:
        warn(
            f"layers of {model} are {', '.join(others)}; only the rotation of the underlying "
            f"{config.model_type} is audited"
        )
    if weights:
        return load_model(model)
    # Angles do not depend on weights.
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config)
