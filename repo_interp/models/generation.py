"""Greedy continuations of many prompts at once, with a key-value cache.

Prompts of different lengths are padded on the left. The index of a token is its number among valid
tokens, so that the continuation of a prompt does not depend on other prompts. This module knows
nothing about tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from repo_interp.errors import NotFinitePrediction
from repo_interp.models.attention import cache_argument
from repo_interp.models.decoder import Decoder
from repo_interp.models.lasting import at_rest
from repo_interp.models.pass_limits import batch_limit
from repo_interp.models.side_by_side import BatchSize, batches


def end_tokens(decoder: Decoder) -> list[int]:
    """Return the tokens with which a model ends a text.

    Args:
        decoder: Decoder of the model.

    Returns:
        The EOS tokens of the generation settings, else of the configuration.
    """
    owner = decoder.owner
    ends = getattr(owner.generation_config, "eos_token_id", None)
    ends = getattr(owner.config, "eos_token_id", None) if ends is None else ends
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


@torch.inference_mode()
def continue_greedily(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    batch_size: BatchSize = 32,
) -> list[tuple[int, ...]]:
    """Return the most probable next tokens of prompts.

    Prompts of similar length share a forward pass, in any order.

    Args:
        decoder: Decoder of the model.
        prompts: Token ids.
        counts: How many tokens to add to every prompt.
        batch_size: Prompts or tokens of a pass.

    Returns:
        Added tokens, in the order of the prompts.

    Raises:
        ValueError: `counts` and `prompts` differ in length.
        NotFinitePrediction: Logits are NaN or infinite.
    """
    if len(prompts) != len(counts):
        raise ValueError(
            f"one count per prompt was wanted; got {len(counts)} for {len(prompts)} prompts"
        )
    # Prompts of similar length share a pass, so that little is padded.
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), counts[number]))
    continuations: dict[int, tuple[int, ...]] = {}
    size = batch_limit(decoder, batch_size)
    # Without padding, all prompts of a pass have one length
    ahead = counts if size.padding else [max(counts, default=0)] * len(counts)
    for chosen in batches(
        order, [len(prompt) + count for prompt, count in zip(prompts, ahead, strict=True)], size
    ):
        wanted = [counts[number] for number in chosen]
        with at_rest(decoder):
            made = _continue_batch(
                decoder, [prompts[number] for number in chosen], max(wanted), chosen
            )
        continuations.update(
            (number, tuple(row[:count]))
            for number, row, count in zip(chosen, made.tolist(), wanted, strict=True)
        )
    return [continuations[number] for number in range(len(prompts))]


def _continue_batch(
    decoder: Decoder, prompts: Sequence[Sequence[int]], count: int, numbers: Sequence[int]
) -> Tensor:
    """Added tokens [prompt, count]; `numbers` of the prompts are for errors."""
    device = decoder.device
    tokens, valid = pad_left(prompts, device)
    continued = torch.empty(len(prompts), count, dtype=torch.long, device=device)
    stock = decoder.owner
    of_cache = cache_argument(stock.forward)
    # MiniMax takes no other cache than one that it makes.
    cache = DynamicCache(config=stock.config) if stock._supports_default_dynamic_cache() else None
    padded = not bool(valid.all())
    # Padding counts as -1, which a learned table could not look up.
    index = (valid.cumsum(1) - 1).clamp(min=0)
    for step in range(count):
        output = stock(
            tokens,
            attention_mask=valid.long() if padded else None,
            position_ids=index,
            **{of_cache: cache},
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output[of_cache] if cache is None else cache
        logits = output.logits[:, -1]
        # The sum needs one transfer; single rows are checked only after a fault.
        if not bool(torch.isfinite(logits.sum())) and not bool(torch.isfinite(logits).all()):
            row = int((~torch.isfinite(logits).all(-1)).nonzero()[0])
            raise NotFinitePrediction(numbers[row])
        tokens = logits.argmax(-1, keepdim=True)
        continued[:, step] = tokens[:, 0]
        # The mask also covers cached keys; only the new token passes.
        valid = torch.cat((valid, torch.ones_like(valid[:, :1])), dim=1)
        index = index[:, -1:] + 1
    return continued


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Pad prompts on the left.

    Args:
        prompts: Token ids.
        device: Device of the results.

    Returns:
        Tokens [prompt, token], 0 where padded, and the mask of tokens that are no padding.
    """
    rows = [torch.as_tensor(prompt, dtype=torch.long) for prompt in prompts]
    tokens, valid = (
        pad_sequence(some, batch_first=True, padding_side="left").to(device)
        for some in (rows, [torch.ones_like(row, dtype=torch.bool) for row in rows])
    )
    return tokens, valid
