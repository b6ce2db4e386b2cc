"""One computation for all layers of a pass, where their numbers are few.

    f(x_1), ..., f(x_n)   as   f(X),   X = stack(x_1, ..., x_n) along a new first axis, `layer`

On an accelerator, launching an operator takes as long for one layer as for all. There a call waits
until a result is read, and then runs together with the waiting calls of the same function. On a
processor it runs at once, while its numbers are in the cache.

This module knows nothing about the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from repo_interp.runtime.memory import memory_for

Results = Mapping[str, Tensor]
"""By name."""


class Call:
    """A call that waits for those of other layers."""

    def __init__(
        self,
        function: Callable[..., Results],
        tensors: dict[str, Tensor],
        shared: Sequence[Any],
        temporaries: int,
    ) -> None:
        self.function, self.shared, self.tensors = function, shared, tensors
        self.bytes = temporaries * sum(tensor.nbytes for tensor in tensors.values())
        self.results: Results = {}
        self.place = 0
        """Of the layer, in `results`."""

    def __getitem__(self, name: str) -> Later:
        """Return a result, which is computed later."""
        return Later(self, name)

    @property
    def kind(self) -> Hashable:
        """Key that is equal for calls that run together."""
        plain = (bool, int, float, str, type(None))
        return (
            self.function,
            # By identity: tensors have no single truth value, and the call keeps what it refers to
            *(one if isinstance(one, plain) else id(one) for one in self.shared),
            *((name, one.shape, one.dtype, one.device) for name, one in self.tensors.items()),
        )


class Later(NamedTuple):
    """A result of a call that waits."""

    call: Call
    name: str


def jointly(
    function: Callable[..., Results],
    tensors: Mapping[str, Tensor],
    shared: Sequence[Any],
    temporaries: int = 32,
) -> Mapping[str, np.ndarray] | Call:
    """Call a function that computes with all layers as with one.

    Args:
        function: Function of the tensors, stacked along a first axis `layer`, whose results have
            that axis too: the same object for all layers.
        tensors: Tensors of one layer by parameter, which nobody may change afterwards.
        shared: Its first arguments; layers that share them are computed together.
        temporaries: Memory that the function needs, as a multiple of the bytes of its tensors.

    Returns:
        Results by name, for `labels.arrays`: without the axis `layer`, or of a call that waits.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        with torch.no_grad():
            found = function(*shared, **{name: tensor[None] for name, tensor in tensors.items()})
        # A view of numpy takes a tenth of the time of one of torch
        return {name: result.numpy()[0] for name, result in found.items()}
    waiting = {name: tensor.detach() for name, tensor in tensors.items() if tensor.requires_grad}
    return Call(function, {**tensors, **waiting}, shared, temporaries)


@torch.no_grad()
def make(calls: Iterable[Call]) -> None:
    """Run waiting calls: those of one kind together, as many as fit into memory.

    Args:
        calls: Calls, which store their results.
    """
    kinds: dict[Hashable, list[Call]] = {}
    for call in dict.fromkeys(calls):
        if not call.results:
            kinds.setdefault(call.kind, []).append(call)
    for waiting in kinds.values():
        first = waiting[0]
        device = next(iter(first.tensors.values())).device
        at_once = max(1, memory_for(device, 0) // max(1, first.bytes))
        for start in range(0, len(waiting), at_once):
            some = waiting[start : start + at_once]
            stacked = {
                name: torch.stack([call.tensors[name] for call in some]) for name in first.tensors
            }
            found = first.function(*first.shared, **stacked)
            for place, call in enumerate(some):
                call.results, call.place = found, place
        for call in waiting:
            call.tensors.clear()
