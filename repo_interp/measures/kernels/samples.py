"""Representative queries and keys of a prompt, independent of the batch.

This module knows nothing about their use.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.seen_pairs import on_host, once


def places_of(valid: Bool[Tensor, "prompt token"]) -> list[list[int]]:
    """List the valid tokens of every prompt.

    Args:
        valid: Which tokens are no padding.

    Returns:
        Indices in order, by prompt; waits for the device once per mask.
    """

    def listed() -> list[list[int]]:
        return [np.flatnonzero(tokens).tolist() for tokens in on_host(valid)]

    return once("places", listed, valid)


def first_tokens(inputs: AttentionInputs) -> Int[Tensor, "prompt token"]:
    """Return the first token that every token's document has.

    Args:
        inputs: A layer and a batch, whose prompts may be several documents.

    Returns:
        Token numbers [prompt, token]; values at padding are meaningless.
    """
    valid, documents = inputs.valid, inputs.documents
    if documents is None:
        return valid.to(torch.int8).argmax(-1, keepdim=True).expand_as(valid)
    last = valid.shape[1] - 1
    index = torch.arange(last + 1, device=valid.device).where(valid, last)
    # Documents of all prompts by number
    number = documents.unique(return_inverse=True)[1]
    least = torch.full((len(valid), int(number.max()) + 1), last, device=valid.device)
    return least.scatter_reduce(1, number, index, "amin").gather(1, number)


def middles(count: int, most: int) -> list[int]:
    """Return the middles of equal parts of 0 .. `count` - 1; all where these are few.

    Args:
        count: Numbers there are.
        most: Most parts.

    Returns:
        Distinct numbers in order.
    """
    if count <= most:
        return list(range(count))
    return [(2 * part + 1) * count // (2 * most) for part in range(most)]


def spread_places(places: list[int], count: int, start: float) -> list[int]:
    """Choose tokens at equal steps.

    Args:
        places: Valid tokens of a prompt, in order.
        count: Most tokens.
        start: Share of the prompt that comes before the first chosen token, from 0 to 1.

    Returns:
        Distinct tokens in order, the last one among them, the first one not unless it is alone.
    """
    last = len(places) - 1
    # Not the first token: a query that sees only itself is not informative
    first = min(max(1, int(start * len(places))), last)
    steps = np.unique(np.linspace(first, last, count if count > 1 else 2).round().astype(int))
    # linspace(first, last, 1) would return `first`, so the last of two steps is used instead
    return [places[step] for step in steps[-count:]]


def draw_keys(
    seen: Bool[Tensor, "row key"], count: int, generator: torch.Generator
) -> Int[Tensor, "row any"]:
    """Draw keys that rows see.

    Args:
        seen: Which keys a row sees; at least one.
        count: Keys per row, drawn with replacement.
        generator: Source of chance, on the processor.

    Returns:
        Indices of keys.
    """
    # On the processor, so that draws do not depend on the device of the model
    drawn = torch.rand(len(seen), count, generator=generator, dtype=torch.float64, device="cpu")
    weights = seen.to(torch.float64)
    # Keys of a row are numbered from 1 in order
    wanted = (drawn.to(seen.device) * weights.sum(-1, keepdim=True)).floor() + 1
    return torch.searchsorted(weights.cumsum(-1), wanted)
