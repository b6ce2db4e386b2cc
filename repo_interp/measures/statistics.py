"""A measure, and its sufficient statistics of one layer and batch, with an exact merge.

    merge(observe(A), observe(B)) = observe(A and B)

`sums` add; `per_prompt` concatenate along `prompt`; `first_prompt` comes from the one batch that holds prompt number 0. So many
prompts, long prompts, several processes and an interrupted run that goes on are the same thing. Axes that grow with the prompt
(`token`, `distance`, `chunk`) are aligned by their coordinate: absent entries of a sum count 0, absent entries of a per-prompt array
are NaN (-1 for integers).

Knows nothing about what is measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.inputs import TENSORS, AttentionInputs, Predictions, Spans
from repo_interp.measures.kernels.heads import Reduction
from repo_interp.values import check_fields


@dataclass(frozen=True)
class Statistics:
    """Labelled arrays of some layers and prompts. Every variable has the axis `layer` with its coordinate; or, of predictions, none has."""

    per_prompt: xr.Dataset = field(default_factory=xr.Dataset)
    """Variables with the axis `prompt` (and its coordinate): one entry per prompt, never added."""
    sums: xr.Dataset = field(default_factory=xr.Dataset)
    """Variables without the axis `prompt`: float64 sums and counts over prompts."""
    first_prompt: xr.Dataset = field(default_factory=xr.Dataset)
    """Variables without the axis `prompt`, of prompt number 0 alone; empty where the prompts are others."""


class Measure(ABC):
    """One way of reducing attention inputs to small labelled arrays: a frozen dataclass whose fields are its parameters.

    A field states its type and range (`Annotated[float, Interval(gt=0)]`, see `values`); an object with another value is refused.
    What a measure needs beside the attention inputs it declares: spans, kinds of segments, the training length. An object of another
    package need not inherit from this class: `as_measure` takes `name`, `required_spans`, `parameters`, `observe` and `conclude`.
    """

    name: str
    """The group of the run file; a field too, so that two of one class stand side by side."""

    def __post_init__(self) -> None:
        """Raises InputError for a field that is not of the type and range that it states."""
        check_fields(self, self.name)  # pyright: ignore[reportArgumentType]

    @property
    def required_spans(self) -> tuple[str, ...]:
        """Spans without which a prompt cannot be measured; asked for before the first forward pass."""
        return ()

    @property
    def segment_kinds(self) -> tuple[str, ...]:
        """Kinds of segments ("lines", "sentences", ...) that `observe` finds among its spans, from the prompt's spans or its text.

        For every kind K there are `segments.K` (tokens inside) and `segments.K.starts` (first tokens), and `separator` besides.
        """
        return ()

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Values of the fields by name, as the group's attributes record them."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "name"}  # pyright: ignore[reportArgumentType]
        return {name: "not given" if value is None else value for name, value in values.items()}

    @property
    def fewest_tokens(self) -> int:
        """Tokens that a prompt needs; asked for before the first forward pass."""
        return 1

    @property
    def schemes(self) -> tuple[str, ...]:
        """Schemes of layers that it says something about; empty: any."""
        return ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Which tensors of the attention inputs are measured: where one of them is not finite, this measure stops."""
        return TENSORS

    @property
    def may_be_nan(self) -> tuple[str, ...]:
        """Statistics per prompt in which NaN stands for what is not there, or not defined.

        Others may be NaN at padding, and in layers without positions or rotation; where they are elsewhere, the measure stops.
        """
        return ()

    @property
    def may_be_infinite(self) -> tuple[str, ...]:
        """Statistics in which infinity is a value like any other, such as a bound that a scheme does not set."""
        return ()

    def for_training_length(self, tokens: int) -> Measure:
        """The measure for a checkpoint that was trained on prompts of `tokens` tokens; itself where that changes nothing."""
        return self

    @property
    def reads_predictions(self) -> bool:
        """Whether `observe_predictions` is to be called; the forward pass then goes through all layers."""
        return False

    @property
    def growth(self) -> float:
        """The power of a prompt's tokens that its time grows by at most, once a prompt is long; for the estimate of costs."""
        return 2.0

    def reductions(self, inputs: AttentionInputs, spans: Spans) -> Sequence[Reduction]:
        """What `observe` will ask of the heads of a layer (`heads.reduced`): made for all measures in one pass over the heads."""
        return ()

    @abstractmethod
    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Statistics of one layer and one batch."""

    def observe_predictions(self, predictions: Predictions, spans: Spans) -> Statistics:
        """Statistics, without the axis `layer`, of what the model expects after the tokens of one batch."""
        return Statistics()

    @abstractmethod
    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """The group of the run file, with `units` and `long_name` on every variable, from the merged statistics."""


PARTS = ("name", "required_spans", "parameters", "observe", "conclude")
"""What an object needs to be taken for a measure."""


def as_measure(candidate: Any) -> Measure:
    """`candidate` itself where it is a `Measure`, else a measure that consists of its `PARTS` and declares nothing more."""
    return candidate if isinstance(candidate, Measure) else _MeasureOfParts(candidate)


class _MeasureOfParts(Measure):
    def __init__(self, parts: Any) -> None:
        self._parts = parts
        self.name = parts.name

    @property
    def required_spans(self) -> tuple[str, ...]:
        return tuple(self._parts.required_spans)

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self._parts.parameters

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        return self._parts.observe(inputs, spans)

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        return self._parts.conclude(statistics)


def merge(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of all of `parts`, which hold disjoint (layer, prompt) pairs. Exact; their order does not matter.

    Raises ValueError when two parts hold the same prompt of the same layer.
    """
    if not parts:
        return Statistics()
    return Statistics(
        per_prompt=_by_layer([part.per_prompt for part in parts if part.per_prompt.data_vars], _concatenate_prompts),
        sums=_by_layer([part.sums for part in parts if part.sums.data_vars], _add),
        first_prompt=_by_layer([part.first_prompt for part in parts if part.first_prompt.data_vars], _only),
    )


def _by_layer(datasets: Sequence[xr.Dataset], combine) -> xr.Dataset:
    if datasets and not any("layer" in dataset.dims for dataset in datasets):
        return combine(list(datasets))
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


def _only(datasets: list[xr.Dataset]) -> xr.Dataset:
    if len(datasets) > 1:
        raise ValueError("the first prompt was observed twice")
    return datasets[0]


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
