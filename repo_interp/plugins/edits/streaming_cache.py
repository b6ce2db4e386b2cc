"""A cache that keeps the first tokens and a window of the last ones, so that it stops growing.

    kept after token t: keys j < sinks, and keys j > t + 1 - window

Later queries see no other keys where those at least `window` tokens back are hidden but for the
first ones (`hidden_keys`): then a text is generated as with a cache of all keys, in a memory and a
time a token that stay the same (StreamingLLM, Xiao et al. 2023). Keys keep their positions, which
for the index grow; `distances` caps what lies beyond the training length.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from repo_interp.values import Count, checked

NotNegative = Annotated[int, Interval(ge=0)]


class StreamingCache(Cache):
    """Key-value cache of the first tokens and of a window of the last ones.

        def lost(pair):
            return (pair.distance >= 128) & (pair.key >= 4)

        with iv.hidden_keys(model, lost):
            model.generate(**tokens, past_key_values=ri.StreamingCache(128, 4), max_new_tokens=9999)

    Without `hidden_keys` tokens that share a pass see each other and all cached keys.

    Args:
        window: Last tokens that a query sees, itself included.
        sinks: First tokens that stay.

    Raises:
        InputError: A number is no whole number, or too small; or, in the pass, prompts are padded,
            or a scheme remembers all earlier tokens.
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
        self.key_numbers: Tensor = torch.empty(0, dtype=torch.long)
        """Of the keys that the last `update` returned."""
        self._kept = self.key_numbers

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.seen, self._kept = 0, self._kept[:0]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return the kept keys and values and the new ones, and keep those that are seen later."""
        keys, values = super().update(key_states, value_states)
        new = torch.arange(self.seen, self.seen + key_states.shape[2], device=keys.device)
        self.seen += len(new)
        self.key_numbers = torch.cat([self._kept.to(keys.device), new])
        stays = (self.key_numbers < self.sinks) | (self.key_numbers > self.seen - self.window)
        self._kept = self.key_numbers[stays]
        self.keys, self.values = keys[:, :, stays], values[:, :, stays]
        return keys, values

    def get_seq_length(self) -> int:
        """Return how many tokens passed, kept or not."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the keys of the next pass, as if the kept ones were the last ones."""
        return len(self._kept) + query_length, self.seen - len(self._kept)
