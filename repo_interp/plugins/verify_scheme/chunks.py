"""Whether chunks of prompts, with a cache and behind padding on the left, attend as whole prompts.

    difference = max | S_ij - S'_ij |    S: logits of a layer, in one call for each prompt;
                                         S': in calls of chunks, for prompts of two lengths

Layers get the same hidden states, queries, keys and values in both, so that no rounding of one
layer reaches the next. Each of the two logits may be off by the rounding of one layer
(`half_precision`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from repo_interp.plugins.verify_scheme.half_precision import compare_with_float64, run_in_precision
from repo_interp.plugins.verify_scheme.traced_passes import TOLERANCE, first_place, trace

_PADDING = 5
_CHUNKS = (20, 1, 1, 17, 1, 8, 1, 15)
"""Tokens of each call."""
_FAR = 384
"""Position of the first token: bfloat16 has no odd numbers there."""


def compare_chunks(model: PreTrainedModel, tokens: Tensor) -> tuple[float, list[str]]:
    """Compare prompts in chunks with prompts as a whole, in float32 and bfloat16.

    Args:
        model: Repositioned model in float32 with eager attention.
        tokens: Token ids [1, token].

    Returns:
        The largest difference of logits in float32, and at most one finding.
    """
    tokens = tokens[:, : sum(_CHUNKS)]
    prompts = tokens, tokens.flip(1)[:, _PADDING:]
    differences = []
    for dtype in (torch.float32, torch.bfloat16):
        difference, said = _compared(model, dtype, prompts)
        differences.append(difference)
        if said:
            return difference, [said]
    return differences[0], []


def _compared(
    model: PreTrainedModel, dtype: torch.dtype, prompts: tuple[Tensor, Tensor]
) -> tuple[float, str]:
    run, start, alone = run_in_precision(model, dtype, prompts, _FAR)
    batch = torch.cat([prompts[0], F.pad(prompts[1], (_PADDING, 0))])
    valid = torch.ones_like(batch)
    valid[1, :_PADDING] = 0
    # As in `generate`: the index counts tokens that are not padding.
    index = (valid.cumsum(1) - 1).clamp_min(0) + start

    def given(begin: int, place: int, name: str, made: Tensor) -> Tensor:
        rows = slice(begin, begin + made.shape[1])
        known = [traces[place].tensors[name][0] for traces in alone]
        known[1] = F.pad(known[1], (0, 0, _PADDING, 0))
        return torch.where(valid[:, rows, None] > 0, torch.stack(known)[:, rows], made)

    cache, begin, rows = DynamicCache(), 0, [[] for _ in alone[0]]
    for size in _CHUNKS:
        end = begin + size
        traces = trace(
            run,
            batch[:, begin:end],
            partial(given, begin),
            attention_mask=valid[:, :end],
            position_ids=index[:, begin:end],
            past_key_values=cache,
            use_cache=True,
        )
        for kept, each in zip(rows, traces, strict=True):
            kept.append(F.pad(each.tensors["scores"], (0, batch.shape[1] - end)))
        begin = end
    worst, finding = 0.0, ""
    for place, kept in enumerate(rows):
        scores = torch.cat(kept, 2)
        for row, traces in enumerate(alone):
            padding = row * _PADDING
            found = scores[row : row + 1, :, padding:, padding:]
            errors = (found.double() - traces[place].tensors["scores"].double()).abs()
            *_, logits = compare_with_float64(traces[place], torch.finfo(dtype).eps / 2)
            differs = ~(errors <= 2 * logits.allowed + TOLERANCE)
            seen = torch.ones(errors.shape[-2:], dtype=torch.bool).tril()
            worst = max(worst, float(errors.masked_fill(~seen, 0).max()))
            if not finding and bool((differs & seen).any()):
                finding = (
                    f"chunks: {batch.shape[1]} tokens in calls of up to {max(_CHUNKS)}, with a "
                    "cache and behind padding, have other logits of attention than in one call in "
                    f"{str(dtype).removeprefix('torch.')}, first in layer "
                    f"{traces[place].layer.layer_idx} at {first_place(differs & seen)}"
                )
    return worst, f"{finding}; the largest difference is {worst:.2g}" if finding else ""
