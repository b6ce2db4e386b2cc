"""Feed-forward parts computed in blocks of tokens, so that their wide arrays do not grow with the
prompt.

    y_i = W_down (f(W_gate x_i) * W_up x_i)        of token i alone: a block of tokens needs three arrays of block x intermediate size

Whole, the three arrays of a prompt are most of what a forward pass holds: at 2,048 tokens of
OLMo-2-1B 64 MB each. A part with a hook within it is computed whole, so that the hook sees what it
would see anyway (those on its input and output see all tokens in either case); so is one whose
weights stay on a disk until they are needed (Accelerate), which would be read once per block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from repo_interp.memory import memory_for
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import put

_CELLS = 2**22
"""Numbers of one array of intermediate size at a time on a processor."""
_BYTES = 4
"""Of a number."""


def block_of(intermediate: int, device: torch.device) -> int:
    """Return how many tokens of all prompts together make a block, as `working_memory` has it on an
    accelerator.
    """
    return max(1, memory_for(device, _BYTES * _CELLS) // (_BYTES * intermediate))


@contextmanager
def in_blocks(model: nn.Module) -> Iterator[None]:
    """While the context lasts, feed-forward parts of a repositioned model or bridge work in blocks
    of tokens.
    """
    with ExitStack() as stack:
        for layer in as_decoder(model).blocks:
            mlp = getattr(layer, "mlp", None)
            part = getattr(mlp, "_original_component", mlp)  # of a bridge
            size = getattr(part, "intermediate_size", None)
            if (
                isinstance(part, nn.Module)
                and isinstance(size, int)
                and _is_plain(part)
                and not _is_watched(part)
            ):
                put(stack, part, "forward", partial(_by_blocks, size))
        yield


def _is_plain(part: nn.Module) -> bool:
    """Whether `part` maps each token by itself and returns one tensor: three matrices and an
    activation, no experts.
    """
    return all(
        hasattr(part, name) for name in ("gate_proj", "up_proj", "down_proj")
    ) and not hasattr(part, "experts")


def _is_watched(part: nn.Module) -> bool:
    """Whether a module within `part` has a hook: TransformerLens', torch's own, or one that fetches
    weights from elsewhere.
    """
    within = (module for module in part.modules() if module is not part)
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or hasattr(module, "_hf_hook")
        for module in within
    )


def _by_blocks(intermediate: int, whole: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`whole`, which maps each token by itself over `intermediate` numbers, applied to a block of
    tokens at a time.
    """

    def forward(x: Tensor) -> Tensor:
        rows, block = x.reshape(-1, x.shape[-1]), block_of(intermediate, x.device)
        if len(rows) <= block or torch.is_grad_enabled():
            return whole(x)
        out = torch.empty_like(rows)
        for start in range(0, len(rows), block):
            out[start : start + block] = whole(rows[None, start : start + block])[0]
        return out.reshape(x.shape)

    return forward
