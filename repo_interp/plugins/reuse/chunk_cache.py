"""Turn, exchange or drop a chunk of keys in a cache, and compute the loss of the following tokens.

    turned key = R(delta_j) k_j       moves the position of token j by delta_j, exactly

Caches are those of transformers. A layer that rotates by the token index caches rotated keys, and
these are turned. Learned positions come from hidden states and do not depend on the offset, so
their keys stay, and so do keys of layers without positions. Values are never turned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from repo_interp.errors import InputError
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder
from repo_interp.positions.assigners import RememberingAssigner
from repo_interp.positions.layouts import NO_ATTENTION
from repo_interp.positions.rotary import rotate

Cached = dict[int, tuple[Tensor, Tensor]]
"""Keys and values by layer [1, kv_head, token, entry]."""


def require_movable(decoder: Decoder, tokens: int) -> None:
    """Refuse a model whose cached keys cannot be moved one by one.

    Args:
        decoder: Decoder of the model.
        tokens: Number of tokens of the longest prompt.

    Raises:
        InputError: A layer caches anything but one key per token, drops keys, or adds a function of
            the token index to its logits.
    """
    name = type(decoder.stack).__name__
    if NO_ATTENTION in decoder.schemes:
        raise InputError(f"{name} has layers without attention, whose state has no tokens to move")
    if decoder.length_matters:
        raise InputError(f"the frequencies of {name} depend on the length of a pass; not supported")
    for attention in decoder.layers:
        layer, window = attention.layer_idx, attention.rotation.window
        by_index = attention.position_logits is not None or attention.scheme == "learned"
        if by_index or isinstance(attention.assigner, RememberingAssigner):
            raise InputError(
                f"layer {layer} is {attention.scheme!r}, whose cached keys cannot be moved alone; "
                "wanted rotation, learned positions (repo) or none"
            )
        if window is not None and tokens > window:
            raise InputError(
                f"layer {layer} sees {window} tokens and forgets others; give prompts of at most "
                f"{window} tokens, not {tokens}"
            )


def cache_of(decoder: Decoder, tokens: Int[Tensor, "token"], start: int = 0) -> Cached:
    """Run tokens through a model and return the content of its cache.

    Args:
        decoder: Decoder of the model.
        tokens: Token ids.
        start: Position of the first token.

    Returns:
        Keys and values by layer.

    Raises:
        InputError: A layer that rotates caches no rotated keys.
    """
    cache = DynamicCache(config=decoder.owner.config)
    index = torch.arange(start, start + len(tokens), device=decoder.device)[None]
    ids = tokens[None].to(decoder.device)
    with torch.no_grad():
        decoder.stack(input_ids=ids, position_ids=index, past_key_values=cache, use_cache=True)
    layers: list[Any] = cache.layers
    found = {number: (one.keys, one.values) for number, one in enumerate(layers)}
    for attention in decoder.layers:
        keys = found.get(attention.layer_idx, (None, None))[0]
        if keys is None or (rotates_by_index(attention) and keys.shape[-1] != attention.d_head):
            raise InputError(
                f"layer {attention.layer_idx} caches no rotated keys of its own (latents, or those "
                "of an earlier layer), so they cannot be turned"
            )
    return found


def rotates_by_index(attention: RepositionedAttention) -> bool:
    """Return whether cached keys of a layer are rotated by the token index.

    Args:
        attention: The layer.

    Returns:
        True if they are.
    """
    return attention.scheme == "rope" and attention.frequencies is not None


def turned(
    decoder: Decoder,
    cached: Cached,
    first: int,
    by: Float[Tensor, "token"],
    heads: tuple[int, Sequence[int]] | None = None,
) -> Cached:
    """Move keys of consecutive tokens to other positions.

    Args:
        decoder: Decoder of the model.
        cached: A cache; it is not changed.
        first: Index of the first token to move.
        by: Shifts of the consecutive tokens from `first` on, in positions.
        heads: A layer and the key-value heads to move; None: all.

    Returns:
        A cache with moved keys.
    """
    result, some = dict(cached), slice(first, first + len(by))
    for attention in decoder.layers:
        if not rotates_by_index(attention) or (
            heads is not None and heads[0] != attention.layer_idx
        ):
            continue
        keys, values = cached[attention.layer_idx]
        head_rows = range(keys.shape[1]) if heads is None else heads[1]
        part = keys[:, list(head_rows), some]
        half_split = part if attention.order is None else part[..., attention.order]
        moved = rotate(half_split.float(), by.to(keys.device), attention.frequencies)
        keys = keys.clone()
        keys[:, list(head_rows), some] = attention.stock_order(moved).to(keys.dtype)
        result[attention.layer_idx] = keys, values
    return result


def placed(cached: Cached, part: Cached, first: int) -> Cached:
    """Replace keys and values from a token on by those of a chunk.

    Args:
        cached: A cache; it is not changed.
        part: Cache of the chunk alone.
        first: Index of the first token to replace.

    Returns:
        The cache with the chunk's keys and values.
    """
    result = {}
    for layer, old in cached.items():
        joined = tuple(
            torch.cat([whole[:, :, :first], new, whole[:, :, first + new.shape[2] :]], 2)
            for whole, new in zip(old, part[layer], strict=True)
        )
        result[layer] = joined[0], joined[1]
    return result


def without(cached: Cached, tokens: range) -> Cached:
    """Drop tokens from a cache.

    Args:
        cached: A cache; it is not changed.
        tokens: Consecutive tokens to drop.

    Returns:
        A shorter cache; the other tokens keep their positions.
    """
    return {
        layer: (
            torch.cat([keys[:, :, : tokens.start], keys[:, :, tokens.stop :]], 2),
            torch.cat([values[:, :, : tokens.start], values[:, :, tokens.stop :]], 2),
        )
        for layer, (keys, values) in cached.items()
    }


def losses_after(
    decoder: Decoder, caches: Sequence[Cached], tokens: Int[Tensor, "token"], start: int
) -> Float[Tensor, "cache"]:
    """Return the mean loss of the tokens that follow a cache.

    Args:
        decoder: Decoder of the model.
        caches: Caches of equal length.
        tokens: Token ids that follow; the first one has no loss.
        start: Position of the first one.

    Returns:
        Nats per token, by cache, float64.
    """
    cache: Any = DynamicCache(config=decoder.owner.config)
    for layer in caches[0]:
        cache.update(*(torch.cat([one[layer][k] for one in caches]) for k in (0, 1)), layer)
    index = torch.arange(start, start + len(tokens), device=decoder.device)[None]
    ids = tokens[None].to(decoder.device).expand(len(caches), -1)
    with torch.no_grad():
        logits = decoder.owner(
            input_ids=ids, position_ids=index.expand(len(caches), -1), past_key_values=cache
        ).logits
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(caches), -1).double().mean(1).cpu()
