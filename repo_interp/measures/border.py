"""The border to measures, ours and other packages': what is checked of them, in one place.

    as_measure(object)                          an object with the `PARTS` of a measure becomes one
    require_declared(measure)                   its needs and parameters
    precompute(measures, inputs, spans)         the reductions that it asked for
    observe(measure, inputs, spans)             its statistics of a layer and a batch
    observe_predictions(measure, ...)           its statistics of next-token logits

A measure of ours that changes what it reads is an error. One of another package reads a copy.
Measures are called here and nowhere else in an analysis.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import xarray as xr
from torch import Tensor

from repo_interp.entry_points import MEASURES, OWN, called
from repo_interp.errors import InputError, quoted
from repo_interp.inputs import AttentionInputs, Predictions, Spans
from repo_interp.measures.kernels.heads import Reduction, reduced
from repo_interp.measures.statistics import Measure, Needs, Statistics

PARTS = ("name", "required_spans", "parameters", "observe", "conclude")
"""Attributes that make an object a measure."""
_AXES = {"per_prompt": ("prompt", "layer"), "sums": ("layer",), "first_prompt": ("layer",)}
"""Axes that variables of every part have, with their labels."""


def as_measure(candidate: Any) -> Measure:
    """Return an object as a `Measure`.

    Args:
        candidate: A `Measure`, or an object with its `PARTS`.

    Returns:
        `candidate`, or a measure made of its parts, with defaults for everything else.
    """
    return candidate if isinstance(candidate, Measure) else _MeasureOfParts(candidate)


class _MeasureOfParts(Measure):
    def __init__(self, parts: Any) -> None:
        self._parts = parts
        self.name = parts.name
        for part, kind, wanted in (
            ("required_spans", Iterable, "names"),
            ("parameters", Mapping, "values by name"),
        ):
            given = getattr(parts, part)
            if not isinstance(given, kind) or isinstance(given, str):
                raise InputError(
                    f"{called(MEASURES, self.name)} has a {type(given).__name__} as {part}; "
                    f"wanted {wanted}"
                )

    @property
    def needs(self) -> Needs:
        return Needs(spans=tuple(self._parts.required_spans))

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self._parts.parameters

    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        return self._parts.observe(inputs, spans)

    def conclude(self, statistics: Statistics) -> xr.Dataset:
        return self._parts.conclude(statistics)


def require_declared(measure: Measure) -> None:
    """Check the needs and the parameters of a measure.

    Args:
        measure: Measure to check.

    Raises:
        InputError: `needs` is no `Needs`, its spans are no names, or a file cannot hold a
            parameter.
    """
    needs, parameters = measure.needs, measure.parameters
    if not isinstance(needs, Needs):
        raise InputError(
            f"{called(MEASURES, measure.name)} needs a {type(needs).__name__}; wanted a "
            "record Needs"
        )
    spans = needs.spans
    if isinstance(spans, str) or not all(isinstance(name, str) for name in spans):
        raise InputError(
            f"{called(MEASURES, measure.name)} needs the spans {quoted(spans)}; wanted their names"
        )
    for name, value in parameters.items():
        # Booleans, whole numbers, floats and text
        if np.asarray(value).dtype.kind not in "biufU":
            raise InputError(
                f"{called(MEASURES, measure.name)} has a {type(value).__name__} as parameter "
                f"{name}; wanted numbers or words"
            )


def precompute(measures: Iterable[Measure], inputs: AttentionInputs, spans: Spans) -> None:
    """Compute the reductions of all measures in one pass over the heads of a layer.

    `inputs` keep the results.

    Args:
        measures: Measures that will observe the layer.
        inputs: The layer and a batch.
        spans: Masks of the spans of the batch.
    """
    asked: list[Reduction] = []
    for measure in measures:
        if type(measure).reductions is Measure.reductions:
            continue  # which asks for none
        # Around each measure, so that an error names the one that changed a tensor
        with _read_only(measure, inputs, spans):
            asked += measure.reductions(inputs, spans)
    if asked:
        reduced(inputs, asked)


def observe(measure: Measure, inputs: AttentionInputs, spans: Spans) -> Statistics:
    """Have a measure observe one layer of a batch.

    Args:
        measure: Measure.
        inputs: The layer and the batch.
        spans: Masks of the spans of the batch.

    Returns:
        Its statistics.

    Raises:
        InputError: It changes a tensor in place, or observes something other than `Statistics`
            with the axes of their parts.
    """
    # Torch does not count writes through numpy, or into tensors made of the inputs:
    # another package gets a copy.
    given = (inputs, spans) if measure.name in OWN[MEASURES] else copy.deepcopy((inputs, spans))
    with _read_only(measure, *given):
        observed = measure.observe(*given)
    return _require_statistics(observed, measure.name)


def observe_predictions(measure: Measure, predictions: Predictions, spans: Spans) -> Statistics:
    """Have a measure observe the predictions of a batch.

    Args:
        measure: Measure that needs predictions.
        predictions: Of the batch; their logits are computed on demand, so no measure gets a copy.
        spans: Masks of the spans of the batch.

    Returns:
        Its statistics.

    Raises:
        InputError: It changes a tensor in place.
    """
    with _read_only(measure, predictions, spans):
        return measure.observe_predictions(predictions, spans)


@contextmanager
def _read_only(
    measure: Measure, record: AttentionInputs | Predictions, spans: Spans
) -> Iterator[None]:
    """Raise InputError where a measure changes a tensor, which the model and other measures use."""
    # Only counts of changes: a copy of queries and keys would double the memory of a pass
    # Inference tensors have no counter
    seen = [
        (name, value, value._version)
        for name, value in (*vars(record).items(), *spans.items())
        if isinstance(value, Tensor) and not value.is_inference()
    ]
    yield
    for name, tensor, changes in seen:
        if tensor._version != changes:
            raise InputError(
                f"{called(MEASURES, measure.name)} changes {name} in place, which the model "
                "and other measures go on with; "
                "change a copy of it, as clone() gives one"
            )


def _require_statistics(given: Any, measure: str) -> Statistics:
    """Return `given`; raise InputError where it is no `Statistics`, or lacks an axis of its part."""
    if not isinstance(given, Statistics):
        raise InputError(
            f"{called(MEASURES, measure)} observes {type(given).__name__}; wanted Statistics"
        )
    for part, wanted in _AXES.items():
        arrays = given.arrays[part]
        for name, (axes, _) in arrays.given.items():
            # Found here, with the measure's name, rather than by a merge many batches later
            absent = [axis for axis in wanted if axis not in axes or axis not in arrays.labels]
            if absent:
                raise InputError(
                    f"{called(MEASURES, measure)} observes {name!r} in {part} with the axes "
                    f"{', '.join(axes) or 'none'}; wanted "
                    f"{absent[0]!r} among them, with its numbers, as "
                    "measures.labels.of_layer gives it"
                )
    return given
