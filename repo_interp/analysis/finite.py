"""What became NaN or infinite, where, and which measures that stops.

    tensors of a layer      `AttentionInputs.faults`: every measure that reads the one that is not finite stops
    statistics              infinite, or NaN where a measure does not say that NaN stands for what is not there: that measure stops
    outputs of a pass       named; what was measured before stays

A measure that stopped gives no group; the run says why (`stopped`). One norm per tensor is all that
this costs where all is well: it is finite where every number is. Knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.errors import NotFinite, Unfinished
from repo_interp.measures.statistics import Measure, Statistics


@dataclass
class Faults:
    """What was not finite in an analysis."""

    stopped: dict[str, str] = field(default_factory=dict)
    """By measure or experiment, the first place that was not finite."""
    outputs: list[str] = field(default_factory=list)
    """Passes that ended in numbers that are not finite."""
    unconcluded: set[str] = field(default_factory=set)
    """Those that stopped when all was observed, for an error of theirs: what was observed is of use
    once that is mended.
    """

    def stop(self, name: str, why: str) -> None:
        """Remember that `name` stopped, unless it has before."""
        self.stopped.setdefault(name, why)

    def add(self, later: Faults) -> None:
        """Remember those of a later pass, observed apart, as if it had been observed after this."""
        if not self.stopped:
            self.outputs += later.outputs
        for name, why in later.stopped.items():
            self.stop(name, why)

    def require_none(self) -> None:
        """Raise NotFinite, naming the first, where a measure stopped or a pass did not end in
        numbers.
        """
        self.require_some(list(self.stopped)[:1])
        for fault in self.outputs:
            raise NotFinite(fault)

    def require_some(self, names: Iterable[str]) -> None:
        """Raise NotFinite, naming the first, where all of `names` stopped; Unfinished where it was
        not numbers that stopped one.
        """
        names = list(names)
        if names and self.stopped.keys() >= set(names):
            first, why = next(iter(self.stopped.items()))
            others = f", as {len(names) - 1} more" if len(names) > 1 else ""
            if self.unconcluded:
                raise Unfinished(f"{first} stopped{others}: {why}")
            raise NotFinite(
                f"{first} stopped{others}: {why}; if the checkpoint runs in float16, load it "
                "in float32"
            )

    @property
    def attributes(self) -> dict[str, str]:
        """What a run says of it: nothing, or lines of text."""
        return (
            {"stopped": "\n".join(f"{name}: {why}" for name, why in self.stopped.items())}
            if self.stopped
            else {}
        )


def fault_in(statistics: Statistics, measure: Measure, without: bool, padded: bool) -> str | None:
    """Where the statistics of one layer and batch are not finite; None where they are, or where NaN
    stands for what is not there.

    `without`: the layer has no positions or rotates nothing; `padded`: not all prompts are as long
    as the longest.
    """
    for part, arrays in statistics.arrays.items():
        for name, (axes, values) in arrays.values.items():
            if (
                values.dtype.kind != "f"
                or name in measure.needs.infinite
                or np.isfinite(values.sum())
            ):
                continue
            allowed = without or (part != "sums" and (padded or name in measure.needs.nan))
            wrong = np.isinf(values) if allowed else ~np.isfinite(values)
            if wrong.any():
                return f"{name}{_place(axes, arrays.labels, wrong)} is NaN or infinite"
    return None


def fault_of_outputs(
    hidden: Float[Tensor, "prompt token width"],
    valid: Bool[Tensor, "prompt token"],
    numbers: Iterable[int],
) -> str | None:
    """Which prompt of a pass ended in hidden states that are not finite; None where none did."""
    if bool(
        torch.isfinite(
            torch.linalg.vector_norm(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
        )
    ):
        return None
    wrong = (~torch.isfinite(hidden).all(-1) & valid).any(-1).tolist()
    return next(
        (
            f"the pass of prompt {number} ended in NaN or infinity"
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
