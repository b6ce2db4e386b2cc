"""What a context changes in a model, taken back when it ends, in whatever order contexts end.

    value = c_n(... c_2(c_1(built)))        c_1 ... c_n: the changes of the contexts that last, in the order in which they were entered

A hook is removed alone. Of an attribute the value as built is kept beside the changes that last: a
context that ends takes its own change out, and the others are applied to that value anew. To put
back what a context found would not do: it may have found another's change.

While a context lasts its layers list it, and refuse to be copied
(`RepositionedAttention.interventions`): a copy would keep its changes for good. Knows nothing about
what is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from repo_interp.errors import InputError
from repo_interp.models.attention import CHANGED
from repo_interp.models.decoder import as_decoder
from repo_interp.models.wrapped import eager

_ABSENT = object()
_ENTERING = threading.Lock()


@contextmanager
def lasting(model: nn.Module) -> Iterator[ExitStack]:
    """What is to be called when the context ends, on every layer of `model`, a repositioned model
    or bridge.
    """
    with ExitStack() as undo:
        undo.enter_context(eager())
        vars(undo)["thread"] = here = threading.get_ident()
        with _ENTERING:
            for attention in as_decoder(model).layers:
                if any(getattr(other, "thread", here) != here for other in attention.interventions):
                    raise InputError(
                        "an intervention of another thread lasts in this model; use one "
                        "thread, or a copy for each"
                    )
                attention.interventions.append(undo)
                undo.callback(attention.interventions.remove, undo)
        yield undo


def put(undo: ExitStack, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """`change` of the attribute `name` of `owner`, or of its method, in its place until undone."""
    attributes = vars(owner)
    _, changes = attributes.setdefault(CHANGED, {}).setdefault(
        name, (attributes.get(name, _ABSENT), [])
    )
    changes.append(change)
    undo.callback(_take_out, owner, name, change)
    _settle(owner, name)


def _take_out(owner: nn.Module, name: str, change: Callable[[Any], Any]) -> None:
    vars(owner)[CHANGED][name][1].remove(change)
    _settle(owner, name)


def _settle(owner: nn.Module, name: str) -> None:
    """Give the attribute its value as built with the changes that last; as it was where none
    does.
    """
    attributes = vars(owner)
    built, changes = attributes[CHANGED][name]
    if built is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = built
    value = getattr(owner, name)
    for change in changes:
        value = change(value)
    setattr(owner, name, value)  # also when it is as built: a block of a bridge counts what is set
    if not changes:
        del attributes[CHANGED][name]
        if built is _ABSENT:
            del attributes[name]
