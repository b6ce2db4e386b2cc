"""Limits of the prompts and tokens in one forward pass.

    bytes of a pass = tokens * itemsize * (8 d_model + 4 d_feed_forward)
                      of a layer: residual stream, queries, keys, values, feed-forward part
    batch "auto"    = as many prompts as have, with their padding,
                      min(WORTHWHILE, SHARE * memory / (2 * bytes of a token)) tokens

On a processor, memory is the machine's total memory divided by the processes that share it, not the
free memory: so a repeated command makes the same batches. On an accelerator it is the free memory,
since others may use the device, and tokens are rounded down to a power of two, so that similar free
memory gives the same batches. The factor 2 leaves memory for measures. This module knows only the
lengths of prompts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from repo_interp.models.decoder import Decoder
from repo_interp.models.side_by_side import WORTHWHILE, BatchSize, SideBySide, limit
from repo_interp.runtime import processes
from repo_interp.runtime.memory import free_memory, machine_memory

_SHARE = 0.25
"""Share of the memory for one pass."""


def batch_limit(decoder: Decoder, size: BatchSize | Literal["auto"]) -> SideBySide:
    """Return the limits of one forward pass.

    Args:
        decoder: Decoder of the model.
        size: Prompts or tokens; "auto": as many tokens as are worthwhile and fit into memory.

    Returns:
        The limit; for prompts of equal length if the length of a pass or padding affects results.
    """
    if size != "auto":
        return _alike(decoder, limit(size))
    device = decoder.device
    fitting = int(_SHARE * _present(device) / (2 * bytes_per_token(decoder)))
    if device.type != "cpu":  # about as much is free the next time: it is cut alike
        fitting = 1 << max(0, fitting.bit_length() - 1)
    most = WORTHWHILE.get(device.type, WORTHWHILE["cpu"])
    return _alike(decoder, SideBySide(tokens=max(1, min(most, fitting))))


def _alike(decoder: Decoder, limits: SideBySide) -> SideBySide:
    """Limits for prompts of equal length, where others would change the result.

    That is where frequencies depend on the length of the pass, or padding changes the result of a
    stock module: DeepSeek's sparse attention selects other keys, Llama 4 scales queries by their
    row.
    """
    counts_padding = any(
        getattr(attention.module, "indexer", None) is not None
        or getattr(attention.module, "attn_temperature_tuning", False)
        for attention in decoder.layers
    )
    return replace(limits, padding=0) if counts_padding or decoder.length_matters else limits


def _present(device: torch.device) -> float:
    """Return free bytes of an accelerator, or this process's share of a processor's memory.

    On an accelerator, memory that torch holds in reserve is free.
    """
    if device.type == "cuda":
        return free_memory(device)
    return machine_memory() / processes.local_count()


def bytes_per_token(decoder: Decoder) -> int:
    """Return the bytes of memory per token in the forward pass of one layer.

    Args:
        decoder: Decoder of the model.

    Returns:
        Bytes.
    """
    width = 8 * decoder.config.hidden_size + 4 * decoder.intermediate_size
    return decoder.dtype.itemsize * width
