"""Work that an analysis gives to an accelerator, counted on an emulated one without timing.

    operators    operators that torch dispatches, about 25 microseconds of the host each
    launches     operators that compute or copy on the card: views and empty tensors launch nothing
    waits        operators after which the host has a number, or a size, from the card
    uploads      copies from the host to the card

A count is for one more layer: the difference of models with two layers and with one, after their
tables by length and by shape were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from emulated_card import CARD, OnCard, emulated_card
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.shapes import SHAPES, bridged, model_of, prompt_of
from repo_interp.models import attention

KINDS = ("operators", "launches", "waits", "uploads")
_SIZED = {
    *("nonzero", "is_nonzero", "masked_select", "bincount", "equal", "_local_scalar_dense"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
"""Operators whose result the host must wait for, by its value or its size."""
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
"""Operators other than views that make or pass on a tensor without writing it."""
_ADDRESSES = {"_reshape_alias", "_unsafe_view", "resize_", "set_"}


class Launches(TorchDispatchMode):
    """Counts the work of the card inside a context, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple = (), keywords: Any = None
    ) -> Any:
        """Run `operator`."""
        keywords = keywords or {}
        found = operator(*arguments, **keywords)
        self.counts.update(_kinds(operator, arguments, keywords, found))
        return found


def _kinds(operator: Any, arguments: tuple, keywords: dict, found: Any) -> Iterator[str]:
    name = operator._schema.name.removeprefix("aten::")
    given = [one for one in tree_leaves((arguments, keywords)) if isinstance(one, Tensor)]
    there = any(isinstance(one, OnCard) for one in given)
    result = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
    arrived = any(isinstance(one, OnCard) for one in result)
    yield "operators"
    if not (there or arrived):
        return
    moved = not there or not arrived or not all(isinstance(one, OnCard) for one in given)
    copies = name in ("_to_copy", "copy_", "to")
    if not (operator.is_view or name in _FREE | _ADDRESSES or name == "_local_scalar_dense"):
        yield "launches"
    masks = name.startswith("index") and any(
        isinstance(at, Tensor) and at.dtype == torch.bool for at in tree_leaves(arguments[1:2])
    )
    if name in _SIZED or masks or (copies and there and not arrived):
        yield "waits"
    # An index of the host is copied to the card of the tensor that it chooses from
    if arrived and moved and (copies or name.startswith(("index", "_index"))):
        yield "uploads"


@contextmanager
def _plain_tables() -> Iterator[None]:
    """Identity tables are a subclass of Tensor, and so are tensors of the emulated card."""
    kept, attention.identity_tables = attention.identity_tables, lambda tables: tables
    try:
        yield
    finally:
        attention.identity_tables = kept


Call = Callable[[], object]


def counted(call: Call) -> Counter[str]:
    """The work of `call` on the card by kind, in its second run."""
    call()
    with Launches() as seen:
        call()
    return seen.counts


def of_one_layer(
    subject: str, tokens: int, calls: Callable[[Any, Any, Call], dict[str, Call]]
) -> Iterator[tuple[str, Counter[str], Counter[str]]]:
    """The work of calls on the card for one more layer, and outside of their layers.

    Args:
        subject: A shape by name.
        tokens: Tokens of the prompt.
        calls: Given a model, its prompt and its own forward pass, the calls by name.

    Yields:
        Names, counts of a layer, and counts of the rest of a call.
    """
    with _plain_tables(), emulated_card(), torch.no_grad():
        one, two = (calls(*_model(subject, tokens, layers)) for layers in (1, 2))
        for name, call in one.items():
            first, both = counted(call), counted(two[name])
            layer, rest = both.copy(), first.copy()
            layer.subtract(first)
            rest.subtract(layer)
            yield name, layer, rest


def _model(subject: str, tokens: int, layers: int) -> tuple[Any, Any, Call]:
    """A model of some layers on the card, its prompt, and its own forward pass."""
    config, layout = deepcopy(SHAPES[subject])
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * layers
    prompt, stock = prompt_of(tokens, config.vocab_size), model_of(config)
    made, own_pass = bridged(stock.to(CARD), layout, prompt)  # pyright: ignore[reportArgumentType]
    return made, prompt, own_pass
