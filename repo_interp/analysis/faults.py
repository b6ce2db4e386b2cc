"""Faults: NaN or infinity in a layer, in statistics or at the end of a pass.

They stop measures:

    tensors of a layer      `AttentionInputs.faults`: all measures that read a non-finite tensor
                            stop
    statistics              infinite, or NaN that the measure does not allow: this measure stops
    outputs of a pass       reported; earlier results stay

A measure that stopped has no group; the run says why (`stopped`). Without faults the only cost is
one norm per tensor, which is finite if all numbers are. This module knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.errors import InputError, NotFinite, Unfinished
from repo_interp.measures.statistics import Measure, Statistics
from repo_interp.models.precision import overflow_remedy

PASS = ""
"""Key of the fault of a whole pass, among measures; no measure has it as a name."""


@dataclass(frozen=True)
class Fault:
    """Why a measure or an experiment stopped."""

    reason: str
    concluding: bool = False
    """Whether `conclude` raised it: the statistics are of use once the measure is fixed."""
    finite: bool = False
    """Whether all numbers are finite, and the measure does not fit the layer."""


def require_some(names: Iterable[str], faults: Mapping[str, Fault], dtype: torch.dtype) -> None:
    """Refuse to go on when nothing is left to measure.

    Args:
        names: Requested measures and experiments.
        faults: Fault per measure or experiment that stopped, in order.
        dtype: Precision of the model.

    Raises:
        NotFinite: If all of `names` stopped; names the first.
        InputError: If all stopped, and the first does not fit a layer.
        Unfinished: If all stopped, and one while concluding.
    """
    names = list(names)
    if names and faults.keys() >= set(names):
        first, fault = next(iter(faults.items()))
        others = f", as {len(names) - 1} more" if len(names) > 1 else ""
        if any(fault.concluding for fault in faults.values()):
            raise Unfinished(f"{first} stopped{others}: {fault.reason}")
        if fault.finite:
            raise InputError(fault.reason)
        raise NotFinite(f"{first} stopped{others}: {fault.reason}{overflow_remedy(dtype)}")


def fault_in(statistics: Statistics, measure: Measure, without: bool, padded: bool) -> Fault | None:
    """Find the first non-finite number in the statistics of a layer and batch.

    Args:
        statistics: Statistics of one layer and batch.
        measure: Measure that observed them; its `needs` say which variables allow NaN or infinity.
        without: Whether the layer has no positions or rotates nothing.
        padded: Whether prompts of the batch differ in length.

    Returns:
        Fault with layer, head and prompt; None where all numbers are finite or allowed.
    """
    for part, arrays in statistics.arrays.items():
        for name, (axes, values) in arrays.values.items():
            if (
                values.dtype.kind != "f"
                or name in measure.needs.infinite
                # One sum is cheap, and finite only if all numbers are; where finite numbers
                # overflow it, the full test below decides
                or np.isfinite(values.sum())
            ):
                continue
            # A NaN in a sum would spoil the sum of all prompts, so sums may hold none
            # Padding has entries of tokens, chunks, ...; a number of a whole prompt has none
            beside = padded and not {"prompt", "layer", "head"}.issuperset(axes)
            allowed = without or (part != "sums" and (beside or name in measure.needs.nan))
            wrong = np.isinf(values) if allowed else ~np.isfinite(values)
            if wrong.any():
                return Fault(f"{name}{_place(axes, arrays.labels, wrong)} is NaN or infinite")
    return None


def fault_of_pass(
    hidden: Float[Tensor, "prompt token width"],
    valid: Bool[Tensor, "prompt token"],
    numbers: Iterable[int],
) -> Fault | None:
    """Find the first prompt of a pass with non-finite hidden states.

    Args:
        hidden: Last hidden states.
        valid: Mask of tokens that are not padding.
        numbers: Number of every prompt.

    Returns:
        Fault that names the prompt; None where all hidden states are finite.
    """
    if bool(
        torch.isfinite(
            # One number leaves the device; in float32, since squares of float16 overflow at 256
            torch.linalg.vector_norm(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
        )
    ):
        return None
    wrong = (~torch.isfinite(hidden).all(-1) & valid).any(-1).tolist()
    return next(
        (
            Fault(f"the pass of prompt {number} ended in NaN or infinity")
            for number, is_wrong in zip(numbers, wrong, strict=True)
            if is_wrong
        ),
        None,
    )


def _place(axes: tuple[str, ...], labels: Mapping[str, np.ndarray], wrong: np.ndarray) -> str:
    """Layer, head and prompt of the first wrong number."""
    first = dict(zip(axes, np.argwhere(wrong)[0].tolist(), strict=True))
    at = {
        axis: int(labels[axis][place])
        for axis, place in first.items()
        if axis in ("layer", "head", "prompt")
    }
    parts = [f"{axis} {at[axis]}" for axis in ("layer", "head") if axis in at]
    return (f" of {', '.join(parts)}" if parts else "") + (
        f" in prompt {at['prompt']}" if "prompt" in at else ""
    )
