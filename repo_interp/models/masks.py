"""Keys that a stock attention module hides, and logits that it adds, read off its call.

mask      of the decoder: causal, windows, padding; boolean, additive, or none (causal)
window    from the call, else from the configuration if the mask of this pass
          confirms it
others    a relative bias (Inkling), a mask made by the module (Doge), keys that a query
          selects (DeepSeek's sparse attention)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.errors import InputError

_KNOWN = (
    "s_aux",
    "indices",
    "position_bias",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "num_items_in_batch",
)
"""Tensors that stock modules give attention functions, which are used or change nothing here."""


@dataclass(frozen=True)
class CallMask:
    """The mask of one call, and logits that the module adds."""

    mask: Tensor | None
    bias: Float[Tensor, "any any row key"] | None = None
    """Added to the scaled logits."""
    hidden: Bool[Tensor, "any any row key"] | None = None
    """Earlier keys that are hidden, unless only a window hides them: padding, for example. There is
    a row per head if an intervention hides keys from some heads.
    """


def call_mask(
    module: Any,
    queries: Tensor,
    keys: int,
    attention_mask: Tensor | None,
    given: Tensor | None,
    keywords: dict[str, Any],
) -> CallMask:
    """Read the mask and added logits from the arguments of a call; used ones are removed.

    Args:
        module: Stock attention module.
        queries: [batch, head, row, d_head].
        keys: Number of keys.
        attention_mask: Mask that the module gives its attention function.
        given: Mask that the decoder gave the module.
        keywords: Further arguments of the attention function.

    Returns:
        The mask of the call.

    Raises:
        InputError: A tensor among `keywords` is not known.
    """
    for name, value in keywords.items():
        if isinstance(value, Tensor) and name not in _KNOWN:
            raise InputError(
                f"{type(module).__name__} gives attention {name!r}, which is not supported"
            )
    selected, bias = keywords.pop("indices", None), keywords.pop("position_bias", None)
    # A module that makes a mask from its input does not pass on the decoder's mask.
    replaced = attention_mask is not None and (
        given is None or attention_mask.data_ptr() != given.data_ptr()
    )
    chunk = chunk_of(module)
    # Fewer keys are all in the first chunk, so nothing more is hidden.
    chunked = chunk is not None and keys > chunk
    if selected is None and bias is None and not replaced and not chunked:
        return CallMask(attention_mask)
    rows, device = queries.shape[2], queries.device
    seen = visible(rows, keys, attention_mask, device)
    if replaced and attention_mask is not None and attention_mask.dtype != torch.bool:
        # At visible keys an additive mask holds logits. At hidden keys it is the lowest
        # number, which would overflow in a sum.
        within = attention_mask[..., :keys].masked_fill(~seen, 0.0)
        bias = within if bias is None else bias + within
    # Sparse attention gives numbers of keys; measures need a mask.
    if selected is not None:
        chosen = torch.zeros(len(queries), 1, rows, keys, dtype=torch.bool, device=device)
        # Every row may list keys after it, where fewer are visible than are to be selected.
        seen = seen & chosen.scatter(-1, selected.long()[:, None], True)
    return CallMask(
        seen,
        bias,
        # Later keys are hidden from every row; only earlier ones need saying.
        visible(rows, keys, None, device) & ~seen
        if selected is not None or replaced or chunked
        else None,
    )


def chunk_of(module: Any) -> int | None:
    """Return the length of the chunks in which a layer attends (Llama 4).

    Args:
        module: Stock attention module.

    Returns:
        Tokens of a chunk (queries see only keys of their chunk); None without chunks.
    """
    kinds = getattr(module.config, "layer_types", None)
    chunked = kinds and kinds[module.layer_idx] == "chunked_attention"
    return module.config.attention_chunk_size if chunked else None


def window_of(
    config: Any, keywords: dict[str, Any], attention_mask: Tensor | None, keys: int
) -> int | None:
    """Return the number of keys that a query sees.

    Args:
        config: Configuration of the module.
        keywords: Arguments of the attention function.
        attention_mask: Mask of the pass, or None.
        keys: Number of keys.

    Returns:
        The window; None: all earlier keys.
    """
    if "sliding_window" in keywords:
        return keywords["sliding_window"]
    window = getattr(config, "sliding_window", None)
    # With no more keys than the window, the mask cannot show whether it is applied.
    if window is None or attention_mask is None or keys <= window:
        return None
    # Some families state a window and do not apply it: the mask decides.
    last = visible(1, keys, attention_mask[..., -1:, :], attention_mask.device)
    return None if bool(last[..., : keys - window].any()) else window


def visible(
    rows: int, keys: int, attention_mask: Tensor | None, device: torch.device
) -> Bool[Tensor, "batch 1 row key"]:
    """Return which keys the last tokens may see.

    Args:
        rows: Number of queries, the last tokens.
        keys: Number of keys.
        attention_mask: Boolean or additive; None: causal.
        device: Device of the result.

    Returns:
        [batch, 1, row, key]; the batch axis is 1 without a mask.
    """
    if attention_mask is None:
        # Row 0 is token keys - rows, so the diagonal moves by the cached keys.
        return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)[None, None]
    attention_mask = attention_mask[..., :keys]
    return (
        attention_mask
        if attention_mask.dtype == torch.bool
        # Hidden is the lowest number, or -inf; half of it leaves room for logits that a mask adds.
        else attention_mask > torch.finfo(attention_mask.dtype).min / 2
    )


def apply_mask(
    scores: Float[Tensor, "batch head row key"], attention_mask: Tensor | None
) -> Tensor:
    """Set scores of hidden keys to the lowest finite value.

    Args:
        scores: [batch, head, row, key].
        attention_mask: Boolean or additive; None: causal.

    Returns:
        Masked scores.
    """
    seen = visible(scores.shape[-2], scores.shape[-1], attention_mask, scores.device)
    # Not -inf: a row of padding, which sees no key, would become NaN in the softmax.
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
