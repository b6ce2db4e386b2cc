"""Which pairs of a query and an earlier key are seen, and how many there are.

    (i, j) is seen  <=>  j <= i,  i - j < window,  i and j take part

A sliding window is a difference: the pairs beyond it, i - j >= window, are the causal pairs of the
same queries with the keys delayed by `window` tokens. Counts by query and key are running sums of
the mask, those by distance its autocorrelation. Knows nothing about features.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from scipy.fft import next_fast_len
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from repo_interp.inputs import changes_of

_made: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By tensor, what was made of it and of others."""


def once(name: Hashable, make: Callable[[], Any], tensor: Tensor, *others: Tensor) -> Any:
    """Return what `make` gives of some tensors, made once for as long as `tensor` is there and none
    is changed.

    All layers of a pass share its masks and, most often, their frequencies.
    """
    made = cast("dict[Hashable, Any]", _made.setdefault(tensor, {}))
    key = name, *((id(each), changes_of(each)) for each in (tensor, *others))
    if key not in made:
        # Others are kept, so that their ids stay theirs; `tensor` is not, so that it goes when
        # nobody else has it.
        made[key] = make(), [each for each in others if each is not tensor]
    return made[key][0]


def is_whole(mask: Bool[Tensor, "*any"]) -> bool:
    """Whether the mask holds everywhere; the device is waited for once per mask."""
    return once("whole", lambda: bool(mask.all()), mask)


def extents(mask: Bool[Tensor, "prompt token"]) -> list[tuple[int, int, int]]:
    """First token, last token + 1 and number of the tokens of every prompt; (0, 0, 0) where there
    is none.

    Waits once per mask.
    """

    def of_prompt(tokens: list[bool]) -> tuple[int, int, int]:
        count = sum(tokens)
        return (
            (tokens.index(True), len(tokens) - tokens[::-1].index(True), count)
            if count
            else (0, 0, 0)
        )

    return once("extents", lambda: [of_prompt(tokens) for tokens in mask.tolist()], mask)


@dataclass(frozen=True)
class PairCounts:
    """Numbers of seen pairs, float64."""

    query: Float[Tensor, "... query"]
    key: Float[Tensor, "... key"]
    distance: Float[Tensor, "... distance"]
    total: Float[Tensor, "..."]

    @cached_property
    def shares(self) -> Float[Tensor, "... 1 distance"]:
        """What each pair is of those at its distance; 0 where there is none."""
        return ((self.distance > 0) / self.distance.clamp(min=1))[..., None, :]

    @cached_property
    def distances(self) -> Float[Tensor, "... 1"]:
        """Number of distances that pairs have."""
        return (self.distance > 0).sum(-1, keepdim=True, dtype=torch.float64)

    def of(self, row: Int[Tensor, "*some"]) -> PairCounts:
        """Those of some prompts."""
        return PairCounts(
            *(part[row] for part in (self.query, self.key, self.distance, self.total))
        )


def pair_counts(
    keys: Bool[Tensor, "... token"],
    window: int | None = None,
    queries: Bool[Tensor, "... token"] | None = None,
) -> PairCounts:
    """How many seen pairs each query, each key and each distance i - j has, and how many there are.

    Exact.

    The masks say which tokens take part; `queries` None: those of the keys.
    """
    if queries is None or queries is keys:
        return once(("pairs", window), lambda: _pair_counts(keys, window, keys), keys)
    return _pair_counts(keys, window, queries)


def _pair_counts(keys: Tensor, window: int | None, queries: Tensor) -> PairCounts:
    tokens, key = keys.shape[-1], keys.to(torch.float64)
    query = queries.to(torch.float64)
    length = fast_length(2 * tokens - 1)
    spectrum = torch.fft.rfft(query, n=length) * torch.fft.rfft(key, n=length).conj_physical()
    distance = torch.fft.irfft(spectrum, n=length)[..., :tokens].round()
    if window is not None:
        distance[..., window:] = 0
    return PairCounts(
        query=earlier(key, window) * query,
        key=later(query, window) * key,
        distance=distance,
        total=distance.sum(-1),
    )


def earlier(values: Float[Tensor, "... token"], window: int | None) -> Float[Tensor, "... token"]:
    """Sum of the last `window` entries up to each."""
    sums = values.cumsum(-1)
    if window is None or window >= values.shape[-1]:
        return sums
    return sums - delayed(sums, window, axis=-1)


def later(values: Float[Tensor, "... token"], window: int | None) -> Float[Tensor, "... token"]:
    """Sum of the next `window` entries from each on."""
    sums = values.flip(-1).cumsum(-1).flip(-1)
    if window is None or window >= values.shape[-1]:
        return sums
    return sums - advanced(sums, window, axis=-1)


def fast_length(least: int) -> int:
    """A length of Fourier transforms of at least `least` entries that are fast."""
    length = next_fast_len(least, real=True)
    assert length is not None
    return length


def signed_keys(
    keys: Float[Tensor, "... token d_head"], window: int | None
) -> Iterator[tuple[int, int, Float[Tensor, "... token d_head"]]]:
    """(sign, delay, keys delayed by it): their causal pairs, added with the signs, are the pairs in
    the window.
    """
    yield 1, 0, keys
    if window is not None and window < keys.shape[-2]:
        yield -1, window, delayed(keys, window, axis=-2)


def delayed(values: Tensor, by: int, axis: int) -> Tensor:
    """`values` moved `by` places towards the end of `axis`; zeros come in."""
    rest = values.shape[axis] - by
    moved = torch.zeros_like(values)
    moved.narrow(axis, by, rest).copy_(values.narrow(axis, 0, rest))
    return moved


def advanced(values: Tensor, by: int, axis: int) -> Tensor:
    """`values` moved `by` places towards the start of `axis`; zeros come in."""
    rest = values.shape[axis] - by
    moved = torch.zeros_like(values)
    moved.narrow(axis, 0, rest).copy_(values.narrow(axis, by, rest))
    return moved
