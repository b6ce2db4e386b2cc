"""Feed-forward parts in blocks of tokens, so that their wide arrays do not grow with the prompt.

    y_i = W_down (f(W_gate x_i) * W_up x_i)    of token i alone: a block of tokens needs three
                                               arrays of block x intermediate size

For a whole prompt, the three arrays are most of the memory of a forward pass: 64 MB each at 2,048
tokens of OLMo-2-1B. A module with a hook inside is computed whole, so that the hook gets all tokens
(hooks on its input and output always do). A module with weights on disk (Accelerate) is also
computed whole, since blocks would read the weights repeatedly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from repo_interp.models.decoder import Decoder
from repo_interp.models.lasting import patch_attribute
from repo_interp.runtime.memory import memory_for

_CELLS = 2**22
"""Most numbers of one array of intermediate size on a processor."""
_BYTES = 4
"""Bytes of a number."""


def block_of(intermediate: int, device: torch.device) -> int:
    """Return the number of tokens, of all prompts together, that make a block.

    Args:
        intermediate: Width of the part's arrays.
        device: Device of the part; `working_memory` limits the block on an accelerator.

    Returns:
        Tokens of a block, at least 1.
    """
    return max(1, memory_for(device, _BYTES * _CELLS) // (_BYTES * intermediate))


@contextmanager
def in_blocks(decoder: Decoder, tokens: int | None = None) -> Iterator[None]:
    """Run feed-forward parts in blocks of tokens inside a context.

    Args:
        decoder: Decoder of the model.
        tokens: Tokens of a pass, over all prompts; modules whose block has at least as many tokens
            are not changed. None: unknown.

    Yields:
        None.
    """
    with ExitStack() as stack:
        for layer in decoder.blocks:
            mlp = getattr(layer, "mlp", None)
            part = getattr(mlp, "_original_component", mlp)  # of a bridge
            size = getattr(part, "intermediate_size", None)
            if (
                isinstance(part, nn.Module)
                and isinstance(size, int)
                and (tokens is None or tokens > block_of(size, decoder.device))
                and _is_plain(part)
                and not _is_watched(part)
            ):
                patch_attribute(stack, part, "forward", partial(_by_blocks, size))
        yield


def _is_plain(part: nn.Module) -> bool:
    """Whether a part maps tokens one by one, by three matrices and an activation."""
    return all(
        hasattr(part, name) for name in ("gate_proj", "up_proj", "down_proj")
    ) and not hasattr(part, "experts")


def _is_watched(part: nn.Module) -> bool:
    """Whether a module within `part` has a hook, or fetches its weights from elsewhere."""
    within = (module for module in part.modules() if module is not part)
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or hasattr(module, "_hf_hook")
        for module in within
    )


def _by_blocks(intermediate: int, whole: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Apply `whole`, which maps tokens one by one, to a block of tokens at a time."""

    def forward(x: Tensor) -> Tensor:
        rows, block = x.reshape(-1, x.shape[-1]), block_of(intermediate, x.device)
        # Gradients keep all arrays anyway.
        if len(rows) <= block or torch.is_grad_enabled():
            return whole(x)
        out = torch.empty_like(rows)
        for start in range(0, len(rows), block):
            # Parts want [batch, token, width]; which prompt a token is from does not matter to
            # them.
            out[start : start + block] = whole(rows[None, start : start + block])[0]
        return out.reshape(x.shape)

    return forward
