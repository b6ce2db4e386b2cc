"""Which pairs of a query and an earlier key are seen, and how many there are.

    (i, j) is seen  <=>  j <= i,  i - j < window,  i and j take part

A sliding window is a difference: the pairs beyond it, i - j >= window, are the causal pairs of the
same queries with the keys delayed by `window` tokens. Counts by query and key are running sums of
the mask, those by distance its autocorrelation. This module knows nothing about features.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from scipy.fft import next_fast_len
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from repo_interp.runtime.tensor_changes import changes_of

_made: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Results of `once` by name, per tensor."""


def once(name: Hashable, make: Callable[[], Any], tensor: Tensor, *others: Tensor) -> Any:
    """Return the result of `make`, computed once while the tensors stay unchanged.

    The result is kept for as long as `tensor` exists. All layers of a pass share its masks and,
    mostly, their frequencies.

    Args:
        name: Key of the result among those of the same tensors.
        make: Function of no arguments that computes the result.
        tensor: Tensor that the result depends on.
        *others: Further tensors that it depends on.

    Returns:
        The result of `make`, or the one kept.
    """
    # Weak, and by identity: tensors compare elementwise, and a mask goes with its batch
    made = cast("dict[Hashable, Any]", _made.setdefault(tensor, {}))
    # With the version, so that a tensor changed in place is computed anew
    key = name, *((id(used), changes_of(used)) for used in (tensor, *others))
    if key not in made:
        # Others are kept, so that their ids stay theirs; `tensor` is not, so that it goes when
        # nobody else has it.
        made[key] = make(), [other for other in others if other is not tensor]
    return made[key][0]


def is_whole(mask: Bool[Tensor, "*any"]) -> bool:
    """Return whether a mask holds everywhere.

    Waits for the device once per mask.

    Args:
        mask: Mask of any shape.

    Returns:
        True if every entry is True.
    """
    if mask.ndim == 2:  # known with the extents, in one question to the device
        return all(count == mask.shape[1] for _, _, count in extents(mask))
    return once("whole", lambda: bool(mask.all()), mask)


def made_of(mask: Bool[Tensor, "prompt token"], other: Bool[Tensor, "*any"]) -> Tensor:
    """Note that another mask holds everywhere where a mask does, and return it.

    Args:
        mask: Mask of the tokens.
        other: The same in another form.

    Returns:
        `other`.
    """
    once("whole", lambda: is_whole(mask), other)
    return other


def by_head(mask: Bool[Tensor, "prompt token"]) -> Bool[Tensor, "prompt 1 token"]:
    """Return a mask with an axis of heads, made once.

    Args:
        mask: Mask of the tokens.

    Returns:
        A copy: a view would refer to the mask that it is kept with, and neither would ever go.
    """
    return once("heads", lambda: made_of(mask, mask[:, None].clone()), mask)


def on_host(of_batch: Shaped[Tensor, "prompt token"]) -> Shaped[np.ndarray, "prompt token"]:
    """Return a mask, or the tokens, of a batch as an array of numpy.

    Waits for the device once per batch.

    Args:
        of_batch: Numbers that all layers share.

    Returns:
        The array.
    """
    # A copy: numpy's view would keep the tensor alive that it is kept with
    return once("host", lambda: of_batch.cpu().numpy().copy(), of_batch)


def known_on_host(
    of_batch: Shaped[Tensor, "prompt token"], array: Shaped[np.ndarray, "prompt token"]
) -> Shaped[Tensor, "prompt token"]:
    """Note the array that a tensor was made from, so that `on_host` does not wait for the device.

    Args:
        of_batch: A mask, or the tokens, of a batch.
        array: The same numbers, which nobody may change afterwards.

    Returns:
        `of_batch`.
    """
    once("host", lambda: array, of_batch)
    return of_batch


def extents(mask: Bool[Tensor, "prompt token"]) -> list[tuple[int, int, int]]:
    """Return where the tokens of every prompt begin and end.

    Waits for the device once per mask.

    Args:
        mask: Mask of the tokens.

    Returns:
        Per prompt the first token, the last token + 1, and the number of tokens; (0, 0, 0) for a
        prompt without tokens.
    """

    def found() -> list[tuple[int, int, int]]:
        tokens = on_host(mask)
        if not tokens.shape[1]:
            return [(0, 0, 0)] * len(tokens)
        first, after = tokens.argmax(1), tokens.shape[1] - tokens[:, ::-1].argmax(1)
        count = tokens.sum(1)
        ends = np.stack([first, after, count], 1) * (count > 0)[:, None]
        return [tuple(of_prompt) for of_prompt in ends.tolist()]

    return once("extents", found, mask)


@dataclass(frozen=True)
class PairCounts:
    """Numbers of seen pairs, float64."""

    query: Float[Tensor, "... query"]
    key: Float[Tensor, "... key"]
    distance: Float[Tensor, "... distance"]
    total: Float[Tensor, "..."]

    @cached_property
    def shares(self) -> Float[Tensor, "... 1 distance"]:
        """1 / number of seen pairs at a distance; 0 where there is none."""
        return ((self.distance > 0) / self.distance.clamp(min=1))[..., None, :]

    @cached_property
    def distances(self) -> Float[Tensor, "... 1"]:
        """Number of distances that pairs have."""
        return (self.distance > 0).sum(-1, keepdim=True, dtype=torch.float64)

    def of(self, row: Int[Tensor, "*some"]) -> PairCounts:
        """Return the counts of some prompts.

        Args:
            row: Indices of the prompts in the batch.

        Returns:
            Counts with the axes of `row` in the place of the first axis.
        """
        return PairCounts(
            *(part[row] for part in (self.query, self.key, self.distance, self.total))
        )


def pair_counts(
    keys: Bool[Tensor, "... token"],
    window: int | None = None,
    queries: Bool[Tensor, "... token"] | None = None,
) -> PairCounts:
    """Count the seen pairs of every query, key and distance i - j, and of a prompt.

    Args:
        keys: Mask of the keys that take part.
        window: Tokens that a query sees, itself included; None: all earlier tokens.
        queries: Mask of the queries that take part; None: that of the keys.

    Returns:
        Exact counts, float64, with the leading axes of the masks.
    """
    if queries is None or queries is keys:
        return once(("pairs", window), lambda: _pair_counts(keys, window, keys), keys)
    return _pair_counts(keys, window, queries)


def _pair_counts(keys: Tensor, window: int | None, queries: Tensor) -> PairCounts:
    tokens, key = keys.shape[-1], keys.to(torch.float64)
    query = queries.to(torch.float64)
    length = fast_length(2 * tokens - 1)
    spectrum = torch.fft.rfft(query, n=length) * torch.fft.rfft(key, n=length).conj_physical()
    # Counts are whole numbers; the transform leaves rounding on them
    distance = torch.fft.irfft(spectrum, n=length)[..., :tokens].round()
    if window is not None:
        distance[..., window:] = 0
    return PairCounts(
        # Times the mask: a row that takes no part sees no pair, whatever keys are before it
        query=earlier(key, window) * query,
        key=later(query, window) * key,
        distance=distance,
        total=distance.sum(-1),
    )


def earlier(values: Float[Tensor, "... token"], window: int | None) -> Float[Tensor, "... token"]:
    """Sum the `window` entries up to and including every entry.

    Args:
        values: Entries along the last axis.
        window: Number of entries in a sum; None: all up to the entry.

    Returns:
        Sums of the shape of `values`.
    """
    sums = values.cumsum(-1)
    if window is None or window >= values.shape[-1]:
        return sums
    return sums - shift_later(sums, window, axis=-1)


def later(values: Float[Tensor, "... token"], window: int | None) -> Float[Tensor, "... token"]:
    """Sum the `window` entries from every entry on.

    Args:
        values: Entries along the last axis.
        window: Number of entries in a sum; None: all from the entry on.

    Returns:
        Sums of the shape of `values`.
    """
    sums = values.flip(-1).cumsum(-1).flip(-1)
    if window is None or window >= values.shape[-1]:
        return sums
    return sums - shift_earlier(sums, window, axis=-1)


def fast_length(least: int) -> int:
    """Return a length for which Fourier transforms are fast.

    Args:
        least: Least number of entries.

    Returns:
        The smallest fast length of real transforms that is at least `least`.
    """
    length = next_fast_len(least, real=True)
    assert length is not None
    return length


def signed_keys(
    keys: Float[Tensor, "... token d_head"], window: int | None
) -> Iterator[tuple[int, int, Float[Tensor, "... token d_head"]]]:
    """Split the pairs in a window into causal pairs with signs.

    The causal pairs of the yielded keys, added with their signs, are the pairs in the window.

    Args:
        keys: Keys along the axis `token`.
        window: Tokens that a query sees, itself included; None: all earlier tokens.

    Yields:
        Sign, delay in tokens, and the keys delayed by it.
    """
    yield 1, 0, keys
    if window is not None and window < keys.shape[-2]:
        # Key j at j + window: its causal pairs are those with i - j >= window, which must go
        yield -1, window, shift_later(keys, window, axis=-2)


def shift_later(values: Tensor, by: int, axis: int) -> Tensor:
    """Move entries towards the end of an axis; zeros come in.

    Args:
        values: Entries.
        by: Places to move by, at most the size of the axis.
        axis: Axis to move along.

    Returns:
        A new tensor of the shape of `values`.
    """
    rest = values.shape[axis] - by
    moved = torch.zeros_like(values)
    moved.narrow(axis, by, rest).copy_(values.narrow(axis, 0, rest))
    return moved


def shift_earlier(values: Tensor, by: int, axis: int) -> Tensor:
    """Move entries towards the start of an axis; zeros come in.

    Args:
        values: Entries.
        by: Places to move by, at most the size of the axis.
        axis: Axis to move along.

    Returns:
        A new tensor of the shape of `values`.
    """
    rest = values.shape[axis] - by
    moved = torch.zeros_like(values)
    moved.narrow(axis, 0, rest).copy_(values.narrow(axis, by, rest))
    return moved
