"""Statistics of one attention layer and one batch, of all measures.

    observe_layer(inputs, measures, batch, heads)     (measure, Statistics | Fault), ...

Measures share one pass over the heads (`precompute`). This module knows nothing about models and
single measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from repo_interp.analysis.batches import PaddedBatch
from repo_interp.analysis.faults import Fault
from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, Spans, select_heads
from repo_interp.measures.border import observe, precompute
from repo_interp.measures.statistics import Measure, Statistics


def observe_layer(
    inputs: AttentionInputs,
    measures: Sequence[Measure],
    batch: PaddedBatch,
    heads: Sequence[int] | None,
) -> Iterator[tuple[Measure, Statistics | Fault]]:
    """Observe one layer.

    Args:
        inputs: Attention inputs of all heads.
        measures: Measures to observe.
        batch: Prompts that the inputs belong to.
        heads: Heads to measure; None: all. A measure that names heads gets its named heads instead.

    Yields:
        Every measure with its statistics, or with the fault of a tensor that it reads; a measure
        that names no heads in this layer, or is about other schemes, is left out.

    Raises:
        InputError: The heads rotate by different frequencies.
    """
    spans = _on_device(batch.spans, inputs)
    measures = [measure for measure in measures if is_about(measure, inputs.scheme)]
    common = _select(inputs, heads)
    # Shared reductions must not read a broken tensor for a measure that stops anyway; measures
    # that name heads have separate inputs
    sound = [
        measure
        for measure in measures
        if measure.needs.heads is None and not _fault(measure, *common)
    ]
    precompute(sound, common[0], spans)
    for measure in measures:
        named = {**_on_device(batch.marks(measure), inputs), **spans}
        of_layer = measure.needs.heads
        if of_layer is None:
            yield measure, _observe(measure, *common, named, heads)
        elif inputs.layer in of_layer:
            chosen = of_layer[inputs.layer]
            yield measure, _observe(measure, *_select(inputs, chosen), named, chosen)


def _on_device(masks: Spans, inputs: AttentionInputs) -> Spans:
    return {name: mask.to(inputs.queries.device) for name, mask in masks.items()}


def is_about(measure: Measure, scheme: str) -> bool:
    """Return whether a measure takes layers of a scheme.

    Args:
        measure: Measure.
        scheme: Scheme of a layer.

    Returns:
        False where `Needs.schemes` has others.
    """
    return not measure.needs.schemes or scheme in measure.needs.schemes


def _select(
    inputs: AttentionInputs, heads: Sequence[int] | None
) -> tuple[AttentionInputs, Mapping[str, str]]:
    """Return the inputs of some heads, and the faults of their tensors."""
    selected = inputs if heads is None else select_heads(inputs, heads)
    # [head, 1, component] while `rescaled` lasts for some heads
    if getattr(selected.attention_scaling, "ndim", 0) == 3:
        raise InputError(
            f"single heads of layer {inputs.layer} are rescaled, and measures read one set of "
            "frequencies per layer; rescale the whole layer, or leave this layer out"
        )
    # Otherwise the faults are in heads that are not measured
    return selected, inputs.faults if heads is None or selected.faults else {}


def _fault(measure: Measure, inputs: AttentionInputs, broken: Mapping[str, str]) -> Fault | None:
    """The fault of the first tensor that `measure` reads and that is `broken`, or of positions."""
    if not inputs.one_position and not measure.needs.by_pair and measure.needs.tensors:
        several = "rotary pairs" if inputs.differ_by_pair else "query and key"
        return Fault(
            f"{measure.name} reads one position per token, and the {several} of a token have "
            f"different positions in layer {inputs.layer} ({inputs.scheme}); leave the measure "
            "or the layer out",
            finite=True,
        )
    if (
        inputs.hidden is not None
        and "keys" in measure.needs.tensors
        and not measure.needs.documents
    ):
        return Fault(
            f"{measure.name} takes queries to see all earlier keys in the window, and layer "
            f"{inputs.layer} hides some (it attends in chunks, or selects keys); leave the measure "
            "or the layer out, or give shorter prompts",
            finite=True,
        )
    reasons = (broken[name] for name in measure.needs.tensors if name in broken)
    return next(map(Fault, reasons), None)


def _observe(
    measure: Measure,
    inputs: AttentionInputs,
    broken: Mapping[str, str],
    spans: Spans,
    heads: Sequence[int] | None,
) -> Statistics | Fault:
    """Statistics with the numbers of `heads`, or the fault of a tensor."""
    if (fault := _fault(measure, inputs, broken)) is not None:
        return fault
    statistics = observe(measure, inputs, spans)
    # Inputs of some heads number them from 0; the labels get the numbers in the model back below
    if heads is None:
        return statistics
    numbers = {"head": np.asarray(heads)}
    return Statistics(
        **{
            name: replace(part, labels={**part.labels, **numbers})
            if "head" in part.labels
            else part
            for name, part in statistics.arrays.items()
        }
    )
