"""Labels for what kernels return: coordinates, long names and units, so that a run file explains itself.

Knows nothing about what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from repo_interp.inputs import AttentionInputs


def of_layer(inputs: AttentionInputs, axes: Sequence[str], values: Tensor | np.ndarray, **coordinates: Any) -> xr.DataArray:
    """`values` of one layer with their `axes`, among them `layer` (length 1) and, where named, `prompt`, `head` and `token`.

    `values` come without the axis `layer`, which is put where `axes` has it; other coordinates are given by name.
    """
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    array = np.expand_dims(array, list(axes).index("layer"))
    known = {
        "layer": [inputs.layer],
        "prompt": inputs.prompts.tolist(),
        "head": np.arange(inputs.heads),
        "token": np.arange(inputs.valid.shape[1]),
    }
    coords = {axis: coordinates.get(axis, known.get(axis)) for axis in axes}
    return xr.DataArray(array, dims=list(axes), coords={axis: label for axis, label in coords.items() if label is not None})


def described(array: xr.DataArray, long_name: str, units: str) -> xr.DataArray:
    """`array` with its long name and units as attributes."""
    return array.assign_attrs(long_name=long_name, units=units)


def parameter_attributes(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as attributes of a group: numbers and texts as they are, sequences as lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in parameters.items()}


def masked_to_nan(values: Tensor, valid: Tensor) -> Tensor:
    """`values` [prompt, ..., token] with NaN where a token is padding."""
    mask = valid.reshape(valid.shape[0], *([1] * (values.dim() - 2)), valid.shape[1])
    return torch.where(mask, values, torch.full_like(values, float("nan")))
