"""Frequencies and factor of a layer's rotation: as built, learned, or changed by interventions.

    number = c_n(... c_1(built))    built: a tensor of the scheme, or a parameter of the module as it
                                    is at this moment

A learned number is a parameter of the stock module, so that it is trained, moved and saved with the
module. Fixed numbers are not buffers, since `.to(bfloat16)` would round them, and with them angles
at position 4096. This module knows nothing about the computations with these numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from repo_interp.runtime.tensor_changes import changes_of

_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Count of changes and copy by device, per tensor."""
CHANGED = "_repo_interp_changed"
"""Attribute of a layer with, by attribute, the value as built and the active changes
(`lasting.patch_attribute`).
"""


class RotationNumber:
    """An attribute of a layer that may be a parameter in `module.rotation_parameters`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        learned = layer.module.rotation_parameters
        if learned is None or self.name not in learned:
            return vars(layer)[self.name]
        # Read again, because an optimizer, a loaded state or `.to()` may have changed the numbers.
        return with_changes(layer, self.name, _by_row(learned[self.name]))

    def __set__(self, layer: Any, value: Any) -> None:
        learned = isinstance(value, Tensor) and value.requires_grad
        # Learned numbers are read from the module, because a view of them could not be copied.
        vars(layer)[self.name] = None if learned else _by_row(value)


def _by_row(value: Any) -> Any:
    """Numbers of a scheme; numbers by head [row, component] become [row, 1, component]."""
    return value[:, None] if isinstance(value, Tensor) and value.ndim == 2 else value


def rows_of(frequencies: Any) -> int:
    """Count the rows of frequencies: one, or one per row of heads.

    Args:
        frequencies: [component] or [row, 1, component]; None: nothing is rotated.

    Returns:
        Number of rows; 1 if all heads share them.
    """
    return 1 if frequencies is None or frequencies.ndim < 3 else len(frequencies)


def of_heads(frequencies: Any, heads: int) -> Any:
    """Repeat frequencies of rows for the heads of a layer.

    Args:
        frequencies: [component] or [row, 1, component]; None: nothing is rotated.
        heads: Number of query heads.

    Returns:
        [component] or [head, 1, component], or None.
    """
    rows = rows_of(frequencies)
    return frequencies if rows in (1, heads) else frequencies.repeat_interleave(heads // rows, 0)


def with_changes(layer: Any, name: str, value: Any) -> Any:
    """Apply the changes of an attribute that last to a value.

    Args:
        layer: The attribute's owner.
        name: Name of the attribute.
        value: Its value without them.

    Returns:
        The value with them.
    """
    _, changes = vars(layer).get(CHANGED, {}).get(name, (None, ()))
    for change in changes:
        value = change(value)
    return value


def shared_copy(numbers: Tensor, device: torch.device) -> Tensor:
    """Move numbers of a rotation to a device.

    Args:
        numbers: Tensor that several layers may share.
        device: Device of the layers.

    Returns:
        The tensor, or one copy for all these layers, so that derived tensors are made once.
    """
    if numbers.device == device or numbers.requires_grad:
        return numbers.to(device)
    copies: Any = _copies.setdefault(numbers, {})
    changes = changes_of(numbers)
    if device not in copies or copies[device][0] != changes:
        copies[device] = changes, numbers.to(device)
    return copies[device][1]


def learned_numbers(**numbers: Any) -> nn.ParameterDict | None:
    """Collect the parameters among numbers of a rotation.

    Args:
        **numbers: Tensors, numbers or parameters by name.

    Returns:
        The parameters; None without any.
    """
    learned = {name: part for name, part in numbers.items() if isinstance(part, nn.Parameter)}
    return nn.ParameterDict(learned) if learned else None
