"""Weights that are stored on another device than the computing one, by the hooks of Accelerate.

    cpu_offload, disk_offload, dispatch_model, a device map     a module's parameters are on "meta"
                                                                between passes; its hook holds the
                                                                values and the computing device

This module recognizes hooks by their attributes, and knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from repo_interp.errors import InputError


def is_offloaded(model: nn.Module) -> bool:
    """Return whether some weights of a model are offloaded.

    Args:
        model: Any module.

    Returns:
        True if a module of it has such a hook.
    """
    return any(True for module in model.modules() for _ in _hooks(module))


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model begins to compute.

    Args:
        model: Any module with parameters.

    Returns:
        The device of the first parameter, or the device to which a hook moves it.
    """
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    hooks = (hook for module in model.modules() for hook in _hooks(module))
    return next((torch.device(hook.execution_device) for hook in hooks), device)


def parameter_value(model: nn.Module, name: str, parameter: Tensor) -> Tensor:
    """Return the value of a parameter, also of an offloaded one.

    Args:
        model: Module that has it.
        name: Its name there.
        parameter: The parameter.

    Returns:
        `parameter`, or the value that a hook holds for it.

    Raises:
        InputError: It is on "meta", and no hook holds its value.
    """
    if not parameter.is_meta:
        return parameter
    parts = name.split(".")
    # From its module upwards: a hook may hold the weights of all modules below
    for depth in range(len(parts) - 1, -1, -1):
        for hook in _hooks(model.get_submodule(".".join(parts[:depth]))):
            try:
                return hook.weights_map[".".join(parts[depth:])]
            except KeyError:
                continue
    raise InputError(
        f"{name} of this model is on 'meta' and holds no numbers; load it first, as ri.load does"
    )


def stores_of(model: nn.Module) -> list[Any]:
    """List the stores of a model's offloaded weights.

    Args:
        model: Any module.

    Returns:
        Maps of values by name, one per hook.
    """
    return [hook.weights_map for module in model.modules() for hook in _hooks(module)]


def _hooks(module: nn.Module) -> Iterator[Any]:
    """The hooks of a module that bring its weights for a pass."""
    hook = vars(module).get("_hf_hook")
    # One that was added to another is in a sequence with it
    for each in getattr(hook, "hooks", (hook,)):
        if getattr(each, "offload", None) is True:
            yield each
