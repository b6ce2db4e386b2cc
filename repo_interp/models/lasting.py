"""Changes that a context makes in a model, taken back when it ends, in whatever order contexts end.

    value = c_n(... c_2(c_1(built)))    c_1 ... c_n: changes of the contexts that last, in the
                                        order in which they were entered

A hook is removed alone. Of an attribute the value as built is kept beside the changes that last: a
context that ends removes its change, and the others are applied to that value anew. To put back the
value that a context found would not do: it may hold another's change.

While a context lasts its layers list it, and refuse to be copied
(`RepositionedAttention.interventions`): a copy would keep its changes for good. Knows nothing about
the kind of change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from repo_interp.errors import InputError
from repo_interp.models.attention import CHANGED
from repo_interp.models.decoder import Decoder
from repo_interp.models.wrapped import eager

_ABSENT = object()
_ENTERING = threading.Lock()


@contextmanager
def intervention(decoder: Decoder) -> Iterator[ExitStack]:
    """Enter an intervention in all layers of a model.

    Args:
        decoder: Decoder of the model.

    Yields:
        A stack for callbacks that undo the changes when the context ends.

    Raises:
        InputError: An intervention of another thread lasts in the model.
    """
    with ExitStack() as undo:
        undo.enter_context(eager())
        vars(undo)["thread"] = here = threading.get_ident()
        # Two threads that enter at once would both find no other.
        with _ENTERING:
            for attention in decoder.layers:
                if any(getattr(other, "thread", here) != here for other in attention.interventions):
                    raise InputError(
                        "an intervention of another thread lasts in this model; use one "
                        "thread, or a copy for each"
                    )
                attention.interventions.append(undo)
                undo.callback(attention.interventions.remove, undo)
        yield undo


def patch_attribute(undo: ExitStack, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Change an attribute or method until a stack of callbacks unwinds.

    Args:
        undo: Takes the callback that removes the change.
        owner: Object whose attribute is changed.
        name: Name of the attribute.
        change: Maps the attribute's value, or method, to the new one.
    """
    attributes = vars(owner)
    _, changes = attributes.setdefault(CHANGED, {}).setdefault(
        name, (attributes.get(name, _ABSENT), [])
    )
    changes.append(change)
    undo.callback(_remove_change, owner, name, change)
    _apply_changes(owner, name)


def _remove_change(owner: nn.Module, name: str, change: Callable[[Any], Any]) -> None:
    vars(owner)[CHANGED][name][1].remove(change)
    _apply_changes(owner, name)


def _apply_changes(owner: nn.Module, name: str) -> None:
    """Set the attribute to its built value with the changes that last; as before without any."""
    attributes = vars(owner)
    built, changes = attributes[CHANGED][name]
    if built is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = built
    # Always from the built value: contexts may end in any order.
    value = getattr(owner, name)
    for change in changes:
        value = change(value)
    setattr(owner, name, value)  # also when it is as built: a block of a bridge counts its settings
    if not changes:
        del attributes[CHANGED][name]
        if built is _ABSENT:
            del attributes[name]
