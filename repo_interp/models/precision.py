"""The precision of tensors that name none, while modules are built and measured: float32.

A process may have another default, such as bfloat16 in training and serving. Copies of a float32
module, or tables of frequencies, would then be made and measured in bfloat16. Explicit precisions,
and the precision of a model's weights, do not change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LASTING: list[torch.dtype] = []
"""The default of the process, then one entry per nested context."""
_CHANGING = threading.Lock()


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Make float32 torch's default, of all threads; contexts end in any order.

    Yields:
        None.
    """
    with _CHANGING:
        _LASTING.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        with _CHANGING:
            found = _LASTING.pop()
            if not _LASTING:
                torch.set_default_dtype(found)


def overflow_remedy(dtype: torch.dtype) -> str:
    """Suggest a remedy for NaN and infinity in a precision with maximum 65,504.

    Args:
        dtype: Precision of the model.

    Returns:
        The end of a message; empty for precisions with the range of float32.
    """
    return "; load it in float32, since float16 ends at 65,504" if dtype == torch.float16 else ""
