"""A cache whose chunk of keys is turned, exchanged or left out; and the loss of what follows.

    turned key = R(delta_j) k_j       of token j: moves its position by delta_j, exactly

Caches are those of transformers. A layer that rotates by the token index keeps rotated keys, which
are turned here. Positions that are learned from hidden states travel inside the keys and are no
index: there, and in layers without positions, nothing is turned. Values never turn.
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
        tokens: Of the longest prompt.

    Raises:
        InputError: A layer keeps something else than keys by token, forgets some, or adds to its
            logits by the index.
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
    """Run tokens through a model and return what its cache holds.

    Args:
        decoder: Decoder of the model.
        tokens: Token ids.
        start: Position of the first one.

    Returns:
        Keys and values by layer.

    Raises:
        InputError: A layer that rotates keeps no rotated keys of its own.
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
    """Tell whether cached keys of a layer are rotated by the token index.

    Args:
        attention: The layer.

    Returns:
        Whether they are.
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
        cached: A cache, which stays as it is.
        first: Number of the first token.
        by: Positions by which tokens from `first` on are moved.
        heads: A layer and its key-value heads that are moved; None: all.

    Returns:
        The cache with other keys.
    """
    result, some = dict(cached), slice(first, first + len(by))
    for attention in decoder.layers:
        if not rotates_by_index(attention) or (
            heads is not None and heads[0] != attention.layer_idx
        ):
            continue
        keys, values = cached[attention.layer_idx]
        which = range(keys.shape[1]) if heads is None else heads[1]
        part = keys[:, list(which), some]
        half_split = part if attention.order is None else part[..., attention.order]
        moved = rotate(half_split.float(), by.to(keys.device), attention.frequencies)
        keys = keys.clone()
        keys[:, list(which), some] = attention.stock_order(moved).to(keys.dtype)
        result[attention.layer_idx] = keys, values
    return result


def placed(cached: Cached, part: Cached, first: int) -> Cached:
    """Put keys and values of a chunk into the place of others.

    Args:
        cached: A cache, which stays as it is.
        part: That of the chunk alone.
        first: Number of the first token.

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
    """Leave tokens out.

    Args:
        cached: A cache, which stays as it is.
        tokens: Consecutive tokens.

    Returns:
        A shorter cache; others keep their positions.
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
        caches: Caches of as many tokens.
        tokens: Token ids that follow; the first one is not predicted here.
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
