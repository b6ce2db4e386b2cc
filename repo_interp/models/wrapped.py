"""The model inside wrappers of PyTorch and peft, where both compute the same."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from repo_interp.errors import InputError

_BESIDE = ("XLORA", "POLY")
"""Kinds of adapters that compute outside of the adapted modules too."""

_LASTING: list[Any] = []
"""The stance of torch.compile, then one mark per context without compiled code."""
_CHANGING = threading.Lock()


def unwrapped(model: Any) -> Any:
    """Return the model or bridge inside `torch.compile` and a PeftModel.

    Args:
        model: Any object; one that is no such wrapper is returned unchanged.

    Returns:
        The module inside; its adapter, if any, stays active.

    Raises:
        InputError: A PeftModel adds computations outside of its modules, such as learned prompts.
    """
    while isinstance(model, nn.Module):
        # Not `hasattr`: wrappers and bridges look up missing attributes in the model inside.
        parts = vars(model).get("_modules", {})
        if "_orig_mod" in parts:
            model = parts["_orig_mod"]
        elif hasattr(type(model), "get_base_model"):
            model = _with_adapter(model)
        else:
            break
    return model


def model_of(model: Any) -> Any:
    """Return the Hugging Face model inside a bridge or a wrapper.

    Args:
        model: Bridge, wrapper, or model of Hugging Face.

    Returns:
        The model of Hugging Face.
    """
    inside = unwrapped(model)
    return getattr(inside, "original_model", inside)


@contextmanager
def eager() -> Iterator[None]:
    """Keep compiled code, which sees no later hooks, from running; contexts end in any order.

    Yields:
        None.
    """
    # Without dynamo nothing was compiled, and importing it takes seconds.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _CHANGING:
        if not _LASTING:
            # A stance restores the one before it, so nested ones would have to end in order. Here
            # the first context sets it, and the last that ends restores it.
            _LASTING.append(torch.compiler.set_stance("force_eager"))
        _LASTING.append(mark := object())
    try:
        yield
    finally:
        with _CHANGING:
            _LASTING.remove(mark)
            if len(_LASTING) == 1:
                _LASTING.pop().__exit__(None, None, None)


def _with_adapter(model: Any) -> nn.Module:
    # peft is optional, but installed where there is a PeftModel.
    from peft.tuners.tuners_utils import BaseTuner

    kind = str(getattr(model.active_peft_config, "peft_type", "")).rpartition(".")[2]
    if not isinstance(model.base_model, BaseTuner) or kind in _BESIDE:
        raise InputError(
            f"this {type(model).__name__} has an adapter of the kind {kind}, which computes "
            "beside the modules of its model; "
            "get_base_model() gives the model without it"
        )
    return model.get_base_model()
