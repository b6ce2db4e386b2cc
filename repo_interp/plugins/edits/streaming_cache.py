"""A cache that keeps the first tokens and a window of the last ones, so that it stops growing.

    kept after token t: keys j < sinks, and keys j > t + 1 - window

If `hidden_keys` hides all keys that are at least `window` tokens back, except the first ones, no
query sees a dropped key. The text is then the same as with a full cache, while memory and time per
token stay constant (StreamingLLM, Xiao et al. 2023). Keys keep their positions, so the token index
grows without limit; `distances` can cap distances at the training length.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from repo_interp.errors import InputError
from repo_interp.values import Count, checked

NotNegative = Annotated[int, Interval(ge=0)]


class StreamingCache(Cache):
    """Key-value cache of the first tokens and of a window of the last ones.

        def lost(pair):
            return (pair.distance >= 128) & (pair.key >= 4)

        with iv.hidden_keys(model, lost):
            model.generate(**tokens, past_key_values=ri.StreamingCache(128, 4), max_new_tokens=9999)

    Without `hidden_keys`, the tokens of a pass see each other and all cached keys, also keys
    outside of the window.

    Args:
        window: Number of last tokens that a query sees, itself included.
        sinks: Number of first tokens that stay in the cache.

    Raises:
        InputError: `window` or `sinks` is not a whole number or is too small; or, in the pass,
            prompts are padded, or a scheme remembers all earlier tokens.
    """

    def __init__(self, window: int, sinks: int = 4) -> None:
        """Make an empty cache."""
        sizes = checked(window, Count, "the window"), checked(sinks, NotNegative, "the sinks")
        super().__init__(layer_class_to_replicate=partial(_Layer, *sizes))  # pyright: ignore[reportArgumentType]


class _Layer(DynamicLayer):
    """Keys and values of one layer."""

    is_croppable = False

    def __init__(self, window: int, sinks: int) -> None:
        super().__init__()
        self.window, self.sinks, self.seen = window, sinks, 0
        self.kept = torch.empty(0, dtype=torch.long)
        """Numbers of the keys that are kept."""

    def numbers_of(self, current: Any) -> Tensor:
        """Return the numbers of the keys that `update` returns in a pass, which has their positions."""
        if current.memory is not None:
            raise InputError(
                "a StreamingCache drops earlier tokens, and the scheme of this layer remembers all "
                "of them; choose another cache"
            )
        if bool((current.index[:, -1] + 1 != self.seen + current.index.shape[-1]).any()):
            raise InputError(
                "a StreamingCache counts tokens from 0 on without padding; give prompts of one "
                "length, one token after the other"
            )
        return self._with_new(current.index.shape[-1])

    def _with_new(self, count: int) -> Tensor:
        new = torch.arange(self.seen, self.seen + count, device=self.device)
        return torch.cat([self.kept.to(self.device), new])

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.seen, self.kept = 0, self.kept[:0]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return the kept and the new keys and values, and keep those that later queries see."""
        keys, values = super().update(key_states, value_states)
        numbers = self._with_new(key_states.shape[2])
        self.seen += key_states.shape[2]
        stays = (numbers < self.sinks) | (numbers > self.seen - self.window)
        self.kept, self.keys, self.values = numbers[stays], keys[:, :, stays], values[:, :, stays]
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of tokens so far, kept or dropped."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys of the next pass, and their offset if they were consecutive."""
        return len(self.kept) + query_length, self.seen - len(self.kept)
