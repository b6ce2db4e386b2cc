"""Changes of a model inside a context, undone when it ends; contexts may end in any order.

    value = c_n(... c_2(c_1(built)))    c_1 ... c_n: changes of the contexts that last, in the
                                        order in which they were entered

Each hook is removed separately. For an attribute, the value as built is stored with the list of
active changes: a context that ends removes its change, and the other changes are applied again to
the value as built. Restoring the value from the start of the context would be wrong, since it may
include the change of another context.

While a context is active, its layers list it and cannot be copied
(`RepositionedAttention.interventions`): a copy would keep the changes forever. This module knows
nothing about the kind of change. `at_rest` keeps a model in evaluation mode inside its context, and
`called_at` calls a function at a hook site. A `ModelEdit` is a context that may be entered again,
and added to another: `with one + other:`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder
from repo_interp.models.precision import float32_by_default
from repo_interp.models.recomputed import Lasting, note_interventions
from repo_interp.models.rotation_numbers import CHANGED
from repo_interp.models.wrapped import eager

_ABSENT = object()
_ENTERING = threading.Lock()
_Given = ParamSpec("_Given")


class ModelEdit(ContextDecorator, AbstractContextManager[None, None]):
    """A change of a model's computation inside the context."""

    def __init__(self, *makers: Callable[[], AbstractContextManager[Any]]) -> None:
        """`makers`: each makes a context; all of them are entered, in order."""
        self._makers = makers
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        """Change the model."""
        # An error in a later part undoes the earlier ones
        with ExitStack() as stack:
            for make in self._makers:
                stack.enter_context(make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        """Undo the change that was entered last."""
        self._entered.pop().__exit__(*error)

    def __add__(self, other: object) -> ModelEdit:
        """Return the edit that enters this one, then the other."""
        if not isinstance(other, ModelEdit):
            return NotImplemented
        return ModelEdit(*self._makers, *other._makers)


def model_edit(function: Callable[_Given, Iterator[None]]) -> Callable[_Given, ModelEdit]:
    """Make a function that returns an edit, of a generator function that makes and undoes it.

    Args:
        function: Yields once, while the edit lasts.

    Returns:
        Function of the same arguments.
    """
    context, signature = contextmanager(function), inspect.signature(function)

    @wraps(function)
    def made(*arguments: _Given.args, **keywords: _Given.kwargs) -> ModelEdit:
        # A missing argument raises here, not when the edit is entered
        signature.bind(*arguments, **keywords)
        return ModelEdit(partial(context, *arguments, **keywords))

    return made


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
        lasting = Lasting()
        # Two threads that enter at once would both find no other.
        with _ENTERING:
            for attention in decoder.layers:
                if any(
                    getattr(other, "thread", lasting.thread) != lasting.thread
                    for other in attention.interventions
                ):
                    raise InputError(
                        "an intervention of another thread is active in this model; use one "
                        "thread, or a copy for each"
                    )
                undo.callback(_leave, attention, lasting)
                attention.interventions.append(lasting)
                note_interventions(attention)
        yield undo


def _leave(attention: RepositionedAttention, lasting: Lasting) -> None:
    attention.interventions.remove(lasting)
    note_interventions(attention)


@contextmanager
def at_rest(decoder: Decoder) -> Iterator[None]:
    """Keep a model in evaluation mode, without autocast, while the context lasts.

    So dropout changes no number, and numbers have the precision that the run states, for any
    default dtype of torch.

    Args:
        decoder: Decoder of the model.

    Yields:
        None.

    Raises:
        InputError: Weights are on "meta", and Accelerate does not fetch them from a disk.
    """
    owner: Any = decoder.owner
    require_weights(decoder)
    training = (
        [vars(module) for module in owner.modules() if module.training] if owner.training else []
    )
    # Compiled code would not see hooks that were added after it.
    with eager(), float32_by_default(), ExitStack() as exact:
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps")):
            exact.enter_context(torch.autocast(device, enabled=False))
        try:
            for module in training:
                module["training"] = False
            yield
        finally:
            for module in training:
                module["training"] = True


def require_weights(decoder: Decoder) -> None:
    """Refuse a model with weights on "meta".

    Args:
        decoder: Decoder of the model.

    Raises:
        InputError: Weights are on "meta", and nothing fetches them from elsewhere.
    """
    if decoder.device.type == "meta":
        raise InputError(
            "the weights of this model are on 'meta' and hold no numbers; load them first, "
            "as ri.load does"
        )


@contextmanager
def called_at(
    decoder: Decoder,
    site: str,
    act: Callable[[RepositionedAttention, Tensor], Tensor | None],
    layers: Collection[int] | None = None,
) -> Iterator[None]:
    """Call a function with the tensor at a hook site in every pass, while the context lasts.

    Args:
        decoder: Decoder of the model.
        site: Name of a field of `HookSites`.
        act: Called with the layer's attention and the tensor; the pass continues with its result,
            unless that is None.
        layers: Numbers of layers; None: all.

    Yields:
        None.
    """
    with ExitStack() as undo:
        for attention in decoder.layers if layers is None else decoder.attentions(layers):
            undo.callback(attention.sites.call(site, partial(act, attention)))
        yield


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
