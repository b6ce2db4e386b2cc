"""Find the self-attention modules of a stock decoder.

They call transformers' attention functions (`ALL_ATTENTION_FUNCTIONS`) in their forward pass, and
have the number of a layer.

Knows no scheme and no rotation.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

from repo_interp.errors import InputError


def attention_modules(model: nn.Module) -> Iterator[Any]:
    """Find the stock self-attention modules of a decoder.

    Args:
        model: Model of Hugging Face.

    Yields:
        Modules that have a layer's number and call transformers' attention functions.

    Raises:
        InputError: There is none, some cannot be observed, or one runs more than once in a pass.
    """
    name, named = type(model).__name__, dict(model.named_modules())
    attending = [module for module in named.values() if attends(type(module))]
    # Towers for images and sound do not number layers, or see later patches; if nothing else
    # attends, the model is an encoder.
    attending = [
        module
        for module in attending
        if hasattr(module, "layer_idx") and getattr(module, "is_causal", True)
    ] or attending
    found = [
        module
        for module in attending
        if isinstance(number := getattr(module, "layer_idx", None), int) and number >= 0
    ]
    # Names of cross-attention in BART's and BERT's relatives.
    if any(path.endswith(("encoder_attn", "crossattention")) for path in named):
        raise InputError(f"{name} attends to an encoder; only decoders are supported")
    if not attending:
        others = [
            type(module).__name__
            for module in named.values()
            if type(module).__name__.lower().endswith("attention")
        ]
        reason = (
            f"{others[0]} does not call the attention functions of transformers"
            if others
            else "no layer has attention"
        )
        raise InputError(f"{name} cannot be observed: {reason}")
    # Results are stored by the layer's number, so two modules must not have the same number.
    if len({module.layer_idx for module in found}) < len(attending):
        raise InputError(
            f"{name} runs an attention module more than once in a pass, which is not supported"
        )
    yield from found


# By class, of which a model has many modules.
@cache
def attends(kind: type) -> bool:
    """Tell whether modules of a class call transformers' attention functions.

    Args:
        kind: Class of modules.

    Returns:
        Whether their forward pass names `ALL_ATTENTION_FUNCTIONS`.
    """
    if getattr(kind, "calls_interface", False):
        return True
    codes = [
        # Decorators of transformers hide the function, whose names are looked for.
        getattr(getattr(forward, "__wrapped__", forward), "__code__", None)
        for forward in forward_functions(kind)
    ]
    return any("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes if code is not None)


def forward_functions(kind: type) -> list[Any]:
    """List the forward functions of a class of modules and of those that it inherits from.

    Args:
        kind: Class of modules.

    Returns:
        Functions, the class' own first.
    """
    return [
        vars(base)["forward"]
        for base in kind.__mro__
        if "forward" in vars(base) and base is not nn.Module
    ]
