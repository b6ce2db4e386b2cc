"""What a measure keeps of one layer and one batch, and how two such keepings merge exactly.

    merge(observe(A), observe(B)) = observe(A and B)

`sums` add; `per_prompt` concatenate along `prompt`. So many prompts, long prompts, several processes and an interrupted run that
goes on are the same thing. Axes that grow with the prompt (`token`, `distance`, `chunk`) are aligned by their coordinate: absent
entries of a sum count 0, absent entries of a per-prompt array are NaN (-1 for integers).

Knows nothing about what is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import xarray as xr

from repo_interp.inputs import AttentionInputs, Spans


@dataclass(frozen=True)
class Statistics:
    """Labelled arrays of a part of the work. Every variable has the axis `layer` with its coordinate."""

    per_prompt: xr.Dataset = field(default_factory=xr.Dataset)
    """Variables with the axis `prompt` (and its coordinate): one entry a prompt, never added."""
    sums: xr.Dataset = field(default_factory=xr.Dataset)
    """Variables without the axis `prompt`: float64 sums and counts over prompts."""


class Measure(Protocol):
    """One way of reducing attention inputs to small labelled arrays.

    One that has the attribute `segment_kinds` ("lines", "sentences", ...) finds among its spans `separator` and, for every kind,
    `segments.K` (tokens inside) and `segments.K.starts` (first tokens), from the prompt's spans or its text.
    """

    name: str
    """The group of the run file."""

    required_spans: tuple[str, ...]
    """Spans without which a prompt cannot be measured; asked for before the first forward pass."""

    @property
    def parameters(self) -> Mapping[str, str | int | float]:
        """Every choice made, recorded in the group's attributes."""
        ...

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Statistics of one layer and one batch."""
        ...

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group of the run file, with `units` and `long_name` on every variable, from the merged statistics."""
        ...


def merge(parts: Sequence[Statistics]) -> Statistics:
    """Merge statistics of disjoint (layer, prompt) parts. Exact; the order of `parts` does not matter.

    Raises ValueError when two parts hold the same prompt of the same layer.
    """
    if not parts:
        return Statistics()
    return Statistics(
        per_prompt=_by_layer([part.per_prompt for part in parts if part.per_prompt.data_vars], _concatenate_prompts),
        sums=_by_layer([part.sums for part in parts if part.sums.data_vars], _add),
    )


def _by_layer(datasets: Sequence[xr.Dataset], combine) -> xr.Dataset:
    layers: dict[int, list[xr.Dataset]] = {}
    for dataset in datasets:
        for layer in dataset.layer.values:
            layers.setdefault(int(layer), []).append(dataset.sel(layer=[layer]))
    if not layers:
        return xr.Dataset()
    return _concatenate([combine(layers[layer]) for layer in sorted(layers)], "layer")


def _concatenate_prompts(datasets: list[xr.Dataset]) -> xr.Dataset:
    prompts = np.concatenate([dataset.prompt.values for dataset in datasets])
    if len(np.unique(prompts)) != len(prompts):
        raise ValueError(f"the same prompt was observed twice: {sorted(prompts.tolist())}")
    return _concatenate(datasets, "prompt").sortby("prompt")


def _add(datasets: list[xr.Dataset]) -> xr.Dataset:
    if len(datasets) == 1:
        return datasets[0]
    aligned = xr.align(*datasets, join="outer", fill_value=0.0)  # pyright: ignore[reportCallIssue, reportArgumentType]
    total = aligned[0].copy(deep=True)
    for dataset in aligned[1:]:
        total = total + dataset
    return total


def _concatenate(datasets: Iterable[xr.Dataset], axis: str) -> xr.Dataset:
    datasets = list(datasets)
    if len(datasets) == 1:
        return datasets[0]
    names = datasets[0].data_vars
    absent = {name: -1 if np.issubdtype(datasets[0][name].dtype, np.integer) else np.nan for name in names}
    return xr.concat(
        datasets,
        dim=axis,
        join="outer",
        fill_value=absent,
        coords="minimal",
        compat="override",
        data_vars="all",
    )
