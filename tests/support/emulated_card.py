"""An emulated GPU: its tensors say "cuda:0", and each holds a tensor of the processor, on which its
operators run.

Like CUDA, it refuses an operator over tensors of two devices and `numpy()` of a tensor on the GPU.
It shows nothing about time, memory or rounding, and runs neither compiled code nor other
subclasses of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CARD = torch.device("cuda", 0)
_COPIES = ("aten._to_copy.default", "aten.copy_.default")
_INDEXING = ("aten.index", "aten._index", "aten._unsafe_index")


class OnCard(Tensor):
    """A tensor on the emulated GPU. To torch's C++ it is on "meta", where tensors have no numbers."""

    held: Tensor
    device = property(lambda self: CARD)
    is_cuda = property(lambda self: True)
    is_meta = is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, held: Tensor) -> OnCard:
        with torch.inference_mode(False):  # inference tensors allow no views outside of it
            made = Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                held.stride(),
                held.storage_offset(),
                dtype=held.dtype,
                device="meta",
                requires_grad=held.requires_grad,
            )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None) -> Any:
        return _computed(operator, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        # In C++ numbers and lists would become tensors on "meta", without their numbers
        if function in (Tensor.__setitem__, Tensor.__getitem__):
            args = args[0], _index(args[1]), *(_of_number(value, args[0]) for value in args[2:])
        elif function in (Tensor.where, torch.where):
            chosen = args[1:] if function is torch.where else args[::2]
            like = next(given for given in chosen if isinstance(given, Tensor))
            args = tuple(_of_number(given, like) for given in args)
        elif function is Tensor.to:  # C++ would copy it, as it looks like one on "meta"
            given = [*args[1:], *(kwargs or {}).values()]
            if not any(isinstance(one, torch.dtype | Tensor) for one in given) and CARD in given:
                return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data, dtype=None, device=CARD, **kwargs) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device, **kwargs)


class _Card(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None) -> Any:
        return _computed(operator, args, kwargs or {})


@contextmanager
def emulated_card() -> Iterator[torch.device]:
    """Make "cuda:0" available while the context lasts."""
    as_tensor = torch.as_tensor
    lifted = torch._C._only_lift_cpu_tensors()

    def on_card(data, dtype=None, device=None) -> Tensor:
        if not isinstance(data, OnCard):
            return as_tensor(data, dtype=dtype, device=device)
        return data.to(device or CARD, dtype or data.dtype)

    cuda = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "mem_get_info": lambda device=None: (2**33, 2**34),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "get_rng_state": lambda device=None: torch.zeros(1),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed_all": lambda seed: None,
    }
    with pytest.MonkeyPatch.context() as patch, _Card():
        for name, function in cuda.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch, "as_tensor", on_card)
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield CARD
        finally:
            torch._C._set_only_lift_cpu_tensors(lifted)


def _computed(operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the processor; its result is on the GPU if an argument is, or if asked for."""
    tensors = [given for given in tree_leaves((args, kwargs)) if isinstance(given, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, OnCard)]
    kind = torch.device(kwargs.get("device") or "cpu").type
    if not there and kind not in ("cuda", "meta"):
        return operator(*args, **kwargs)
    name = str(operator)
    if there and name not in _COPIES:
        others = [tensor for tensor in tensors if not isinstance(tensor, OnCard) and tensor.ndim]
        # CUDA takes indices of the processor, for a tensor on the GPU
        if others and not (name.startswith(_INDEXING) and isinstance(args[0], OnCard)):
            raise RuntimeError(f"two devices, cuda:0 and {others[0].device}, in {name}")
    given_args, given_kwargs = tree_map(_held, (args, kwargs))
    found = operator(*given_args, **given_kwargs)
    if name == "aten.copy_.default":
        return args[0]
    if there and kwargs.get("device") is not None and kind == "cpu":
        return found
    known = {
        id(tensor.held): tensor for tensor in there
    }  # operators in place return their argument

    def on_card(made: Any) -> Any:
        if not isinstance(made, Tensor):
            return made
        return known[id(made)] if id(made) in known else OnCard(made.resolve_conj())

    return tree_map(on_card, found)


def _held(given: Any) -> Any:
    if isinstance(given, OnCard):
        return given.held
    if isinstance(given, Tensor) and given.is_meta:
        raise NotImplementedError(
            f"C++ made a tensor on meta, of shape {tuple(given.shape)}: the emulated GPU lacks a case"
        )
    on_card = isinstance(given, torch.device) and given.type in ("cuda", "meta")
    return torch.device("cpu") if on_card else given


def _index(given: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(map(_index, given))
    return torch.tensor(list(given)) if isinstance(given, list | range | np.ndarray) else given


def _of_number(given: Any, like: Tensor) -> Any:
    return given if isinstance(given, Tensor) else OnCard(torch.tensor(given, dtype=like.dtype))


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Attention by its formula: torch would choose a kernel for "meta"."""
    shared = query.shape[-3] // key.shape[-3]
    key, value = (side.repeat_interleave(shared, -3) for side in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=CARD).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value
