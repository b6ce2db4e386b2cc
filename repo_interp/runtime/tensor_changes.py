"""Count in-place changes of a tensor, for the keys of caches of derived values."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def changes_of(tensor: Tensor) -> int:
    """Count the changes of a tensor in place.

    Args:
        tensor: A tensor.

    Returns:
        Torch's count; 0 in inference mode, where torch does not count.
    """
    # Inference tensors have no counter, and asking one for it raises.
    return 0 if tensor.is_inference() else tensor._version
