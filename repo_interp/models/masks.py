"""What a stock attention module hides or adds by itself, read off the call of its attention
function.

mask        the decoder's: causal, windows, padding; boolean, additive, or none (plainly causal)
window      as the call says, else as the configuration says where the mask of this pass confirms it
own         a relative bias (Inkling), a mask made by the module (Doge), keys that each query selects (DeepSeek's sparse attention)
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
_HIDDEN = -1e4
"""Logit of a key that a module hides by itself, for measures: its weight is 0 in float32."""


@dataclass(frozen=True)
class Masked:
    """The mask of one call, and what the module adds to the logits by itself."""

    mask: Tensor | None
    bias: Float[Tensor, "any any row key"] | None = None
    """Added to the scaled logits."""
    hidden: Bool[Tensor, "any 1 row key"] | None = None
    """Keys that the module alone hides; no measure knows them from windows and padding."""

    @property
    def for_measures(self) -> Tensor | None:
        """`bias` with the hidden keys in it."""
        if self.hidden is None:
            return self.bias
        return (
            torch.where(self.hidden, _HIDDEN, 0.0)
            if self.bias is None
            else self.bias.float().masked_fill(self.hidden, _HIDDEN)
        )


def masked_by(
    module: Any,
    queries: Tensor,
    keys: int,
    attention_mask: Tensor | None,
    given: Tensor | None,
    keywords: dict[str, Any],
) -> Masked:
    """What `module` masks and adds in a call with `keys` keys; `given`: the mask that the decoder
    gave it.

    Takes what it uses out of `keywords`. Raises InputError for a tensor that is not known.
    """
    for name, value in keywords.items():
        if isinstance(value, Tensor) and name not in _KNOWN:
            raise InputError(
                f"{type(module).__name__} gives attention {name!r}, which is not supported"
            )
    selected, bias = keywords.pop("indices", None), keywords.pop("position_bias", None)
    own = attention_mask is not None and (
        given is None or attention_mask.data_ptr() != given.data_ptr()
    )
    if selected is None and bias is None and not own:
        return Masked(attention_mask)
    rows, device = queries.shape[2], queries.device
    seen = visible(rows, keys, attention_mask, device)
    if own and attention_mask is not None and attention_mask.dtype != torch.bool:
        within = attention_mask[..., :keys].masked_fill(~seen, 0.0)
        bias = within if bias is None else bias + within
    if selected is not None:
        chosen = torch.zeros(len(queries), 1, rows, keys, dtype=torch.bool, device=device)
        seen = seen & chosen.scatter(-1, selected.long()[:, None], True)
    return Masked(
        seen,
        bias,
        None if selected is None and not own else visible(rows, keys, None, device) & ~seen,
    )


def window_of(
    config: Any, keywords: dict[str, Any], attention_mask: Tensor | None, keys: int
) -> int | None:
    """Keys that a query sees; None: all earlier ones."""
    if "sliding_window" in keywords:
        return keywords["sliding_window"]
    window = getattr(config, "sliding_window", None)
    if window is None or attention_mask is None or keys <= window:
        return None
    last = visible(1, keys, attention_mask[..., -1:, :], attention_mask.device)
    return None if bool(last[..., : keys - window].any()) else window


def visible(
    rows: int, keys: int, attention_mask: Tensor | None, device: torch.device
) -> Bool[Tensor, "batch 1 row key"]:
    """Which of the keys the last `rows` tokens may see: `attention_mask` boolean, additive, or none
    (plainly causal).
    """
    if attention_mask is None:
        return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)[None, None]
    attention_mask = attention_mask[..., :keys]
    return (
        attention_mask
        if attention_mask.dtype == torch.bool
        else attention_mask > torch.finfo(attention_mask.dtype).min / 2
    )


def masked(scores: Float[Tensor, "batch head row key"], attention_mask: Tensor | None) -> Tensor:
    """Scores with what may not be seen at the lowest finite value."""
    seen = visible(scores.shape[-2], scores.shape[-1], attention_mask, scores.device)
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
