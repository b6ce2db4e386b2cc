"""Tables of angle 0 that cost no arithmetic.

    x * 1 = x        x * 0 = 0        x + 0 = x        x - 0 = x

A stock module that is given these tables leaves its queries and keys as they are. It rotates by
products and sums over all heads; with these tables each returns its other operand, or a 0 that
takes no memory. Every other operation sees an ordinary tensor of ones or zeros.

A module also swaps halves before it uses a table: `skip_rotation` skips the whole function if it
returned its queries and keys unchanged before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_PRODUCTS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_DIFFERENCES = {torch.sub, Tensor.sub, Tensor.__sub__}
_SHAPED = {
    Tensor.__getitem__,
    Tensor.chunk,
    Tensor.expand,
    Tensor.float,
    Tensor.reshape,
    Tensor.squeeze,
    Tensor.to,
    Tensor.transpose,
    Tensor.type,
    Tensor.type_as,
    Tensor.unsqueeze,
    Tensor.view,
    torch.chunk,
    torch.unsqueeze,
}
"""Functions that return ones for ones, and zeros for zeros."""
_ROTATE = "apply_rotary_pos_emb"
"""The function by which families of transformers rotate queries and keys."""
_SKIPS = "repo_interp_skips"


class IdentityTable(Tensor):
    """A table of ones, or of zeros, that drops out of products and sums."""

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the result of `function` without arithmetic if it is known."""
        with torch._C.DisableTorchFunctionSubclass():
            if len(arguments) == 2 and not keywords:
                found = _without_arithmetic(function, *arguments)
                if found is not None:
                    return found
            result = function(*arguments, **(keywords or {}))
            if function not in _SHAPED or not isinstance(arguments[0], cls):
                return result
            if isinstance(result, tuple | list):
                return tuple(part.as_subclass(cls) for part in result)
            return result.as_subclass(cls)


class Ones(IdentityTable):
    """Cosines of angle 0, or complex ones."""


class Zeros(IdentityTable):
    """Sines of angle 0, and products with them: zeros."""


def _without_arithmetic(function: Any, first: Any, second: Any) -> Tensor | None:
    """Return a product with ones or zeros, or a sum with zeros.

    None for another operation, and if the other operand's shape or type is not the result's.
    """
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return None
    table, other = (second, first) if isinstance(second, IdentityTable) else (first, second)
    dtype = torch.result_type(first, second)
    kept = other.dtype == dtype and _fits(table.shape, other.shape)
    if function in _PRODUCTS:
        if isinstance(table, Zeros) and kept:
            zero = torch.zeros((), dtype=dtype, device=other.device)
            return zero.expand(other.shape).as_subclass(Zeros)
        neutral = isinstance(table, Ones)
    else:
        neutral = isinstance(table, Zeros) and (
            function in _SUMS or (function in _DIFFERENCES and table is second)
        )
    return other if neutral and kept else None


def _fits(table: torch.Size, other: torch.Size) -> bool:
    """Whether a table takes the shape of the other operand."""
    return len(table) <= len(other) and all(
        size in (1, wanted) for size, wanted in zip(table[::-1], other[::-1], strict=False)
    )


def first_table(tables: Any) -> Any:
    """Return the first of a decoder's tables.

    Args:
        tables: Cosines and sines, complex numbers, or None.

    Returns:
        Cosines, complex numbers, or None.
    """
    return tables[0] if isinstance(tables, tuple | list) else tables


def identity_tables(tables: Any) -> Any:
    """Make tables that rotate nothing.

    Args:
        tables: Tables of the wanted form: cosines and sines, or complex numbers.

    Returns:
        Cosines 1 and sines 0, or complex ones.
    """
    plain = (
        torch.ones_like(tables)
        if isinstance(tables, Tensor)
        else (torch.ones_like(tables[0]), torch.zeros_like(tables[1]))
    )
    # Compiled code joins these products and sums with others, and knows no subclass.
    if torch.compiler.is_compiling():
        return plain
    if isinstance(plain, Tensor):
        return plain.as_subclass(Ones)
    return plain[0].as_subclass(Ones), plain[1].as_subclass(Zeros)


def skip_rotation(forward: Callable[..., Any]) -> None:
    """Let a family's modules skip their rotation if their tables are identity tables.

    Replaces the function that `forward` finds by its name, once per family and process. With any
    other tables the family's function runs.

    Args:
        forward: Function of an attention module's class.
    """
    names = inspect.unwrap(forward).__globals__
    rotate = names.get(_ROTATE)
    if rotate is not None and not hasattr(rotate, _SKIPS):
        names[_ROTATE] = _skipping(rotate)


def _skipping(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """`rotate`, skipped if it returned its queries and keys for such tensors before."""
    idle: dict[tuple[Any, ...], bool] = {}

    @functools.wraps(rotate)
    def turned(*given: Any, **keywords: Any) -> Any:
        tables = [type(part) for part in given[2:]]
        if keywords or tables != [Ones, Zeros] or torch.compiler.is_compiling():
            return rotate(*given, **keywords)
        # All that decides whether the function hands on its very arguments: some families reorder
        # or split them, or compute in another precision
        with torch._C.DisableTorchFunctionSubclass():
            forms = [(part.dtype, part.ndim, part.shape[-1]) for part in given]
            form = len(given[2]) in (1, len(given[0])), *forms
        if not idle.get(form):
            made = rotate(*given)
            idle[form] = all(one is other for one, other in zip(made, given, strict=False))
            return made
        return given[:2]

    setattr(turned, _SKIPS, True)
    return turned
