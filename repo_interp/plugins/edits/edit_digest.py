"""A digest of an edit: the code of its functions and all values that it holds.

Two edits with the same digest compute the same, unless their functions read different globals,
which the digest does not cover. `try_edits` therefore reuses the results of an interrupted call
only for the same edits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

_DEEPEST = 12
"""Largest depth of nested objects that the digest covers."""


def edit_digest(edit: Any) -> str:
    """Return a digest of an edit.

    Args:
        edit: Context manager, function that makes one, or several.

    Returns:
        SHA-256, in hexadecimal.
    """
    return hashlib.sha256("\n".join(_parts(edit, 0)).encode()).hexdigest()


def _parts(value: Any, depth: int) -> Iterable[str]:
    yield type(value).__qualname__
    if depth > _DEEPEST or isinstance(value, nn.Module):  # the store's key has the model's digest
        return
    inside: Iterable[Any] = ()
    if isinstance(value, Tensor):
        value = value.detach().cpu().float().numpy() if value.is_floating_point() else value.cpu()
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    elif isinstance(value, partial):
        inside = value.func, value.args, value.keywords
    elif isinstance(value, MethodType):
        inside = value.__func__, value.__self__
    elif isinstance(value, FunctionType):
        yield f"{value.__module__}.{value.__qualname__}"
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        inside = value.__code__, value.__defaults__, value.__kwdefaults__, held
    elif isinstance(value, CodeType):
        yield value.co_code.hex()
        inside = value.co_consts, value.co_names
    elif isinstance(value, Mapping):
        inside = [item for pair in value.items() for item in pair]
    elif isinstance(value, frozenset | set):
        inside = sorted(value, key=repr)
    elif isinstance(value, list | tuple):
        inside = value
    elif value is None or isinstance(value, str | bytes | int | float | complex | type(...)):
        yield repr(value)
    elif isinstance(value, type):
        yield f"{value.__module__}.{value.__qualname__}"
    else:
        inside = vars(value) if hasattr(value, "__dict__") else repr(value), ()
    for item in inside:
        yield from _parts(item, depth + 1)
