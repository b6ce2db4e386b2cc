"""Sums over the seen pairs (`seen_pairs`) of a query and an earlier key, without making a map.

    y_ij = q_i . k_j = sum_r C_r(i, j),   C_r(i, j) = q_ir k_jr + q_ir' k_jr'   (r' = r + d/2)

A sum over seen pairs of anything bilinear in q_i and k_j stays the same when the features of tokens
that take no part are set to zero: padding on either side, and leaving tokens out (the beginning of
the sequence, say), cost nothing.

Tokens are cut into chunks. Pairs within a chunk are multiplied out, P = tril(Q_c K_c^T); a query's
pairs with earlier chunks need only the sum of their keys, a key's pairs with later chunks the sum
of their queries, and second moments only Grams: for every two dimensions a, b

    sum_{i, j} q_ia q_ib k_ja k_jb = sum_c (Q_c^T Q_c)_ab (sum_{c' < c} K_c'^T K_c')_ab
            over all pairs of different chunks

so with M the right side and g_a = sum_i q_ia (P K)_ia + sum_b M_ab,

    sum y^2 = sum P^2 + sum M,   sum C_r y = g_r + g_r',
    sum Y^2 = sum P_Y^2 + (sum of M over the dimensions of Y)

with Y the sum of some of the components. sum C_r^2 needs running sums of k_r^2, k_r'^2 and k_r k_r'
alone. Cost O(n d (d + chunk)) per head. Products of features are in their dtype, sums over chunks
in float64. This module knows nothing about logits or measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from repo_interp.measures.kernels.seen_pairs import once, shift_earlier, signed_keys
from repo_interp.runtime.memory import CORE, memory_for

CHUNK = 128
"""Most tokens of a chunk."""

_LEAF = 16
"""Tokens within which the squares of single components are summed pair by pair."""

Some = Callable[[Tensor], Tensor]
"""Function that takes some chunks of a tensor."""

_GRAMS = 8
"""Number of chunks with Grams from one product, if not all chunks are done at once."""

_STRETCH = CORE // 4
"""Bytes of the features, or logits, that are gone through at a time on a processor."""


@lru_cache(maxsize=8)
def _lower(size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "query key"]:
    return torch.ones(size, size, dtype=dtype, device=device).tril()


def _product(
    left: Float[Tensor, "key member chunk a b"], right: Float[Tensor, "key any chunk b c"]
) -> Tensor:
    """Return left @ right, by one operator and three views where no head shares a key."""
    if left.shape[:3] != right.shape[:3]:
        return left @ right
    # matmul also ends in bmm, but launches several more operators
    return torch.bmm(left.flatten(0, 2), right.flatten(0, 2)).unflatten(0, left.shape[:3])


def in_chunks(
    features: Float[Tensor, "... token d_head"], size: int
) -> Float[Tensor, "... chunk within d_head"]:
    """Cut tokens into chunks; zeros fill the last one.

    Args:
        features: Any dtype, [..., token, d_head].
        size: Tokens per chunk.

    Returns:
        [..., chunk, within, d_head]: a view where `size` divides the tokens.
    """
    missing = -features.shape[-2] % size
    if missing:
        features = torch.nn.functional.pad(features, (0, 0, 0, missing))
    return features.unflatten(-2, (-1, size))


def chunk_size(d_head: int) -> int:
    """Return tokens per chunk so that products within chunks and Grams cost the same.

    Args:
        d_head: Dimensions of a head.

    Returns:
        A power of two, 32 to `CHUNK`.
    """
    # P costs n chunk d and the Grams n d^2: equal at chunk = d. Powers of two hold whole leaves
    return min(CHUNK, max(32, 2 ** (d_head - 1).bit_length()))


def gram_products(
    queries: Float[Tensor, "key member chunk within feature"],
    other_queries: Float[Tensor, "key member chunk within other"],
    keys: Float[Tensor, "key 1 chunk within feature"],
    other_keys: Float[Tensor, "key any chunk within other"],
) -> Float[Tensor, "key member feature other"]:
    """Return sums over the pairs of different chunks of q_ia u_ib k_ja v_jb, u and v the others.

    Args:
        queries: q, [key, member, chunk, within, feature], float32 or float64.
        other_queries: u, [key, member, chunk, within, other].
        keys: k, [key, 1, chunk, within, feature].
        other_keys: v, [key, 1 or member, chunk, within, other].

    Returns:
        Sums [key, member, feature, other], float64.
    """
    if _fit(queries, other_queries):
        # A running sum less the chunk itself: Grams of the keys in earlier chunks
        of_keys = _product(keys.mT, other_keys).to(torch.float64)
        return (_product(queries.mT, other_queries) * (of_keys.cumsum(2) - of_keys)).sum(2)
    new = {"dtype": torch.float64, "device": queries.device}
    # On a processor only the running Gram exists, which fits into a cache
    before = torch.zeros(*other_keys.shape[:2], keys.shape[-1], other_keys.shape[-1], **new)
    products = torch.zeros(*queries.shape[:2], *before.shape[2:], **new)
    for start in range(0, queries.shape[2], _GRAMS):
        some = (slice(None), slice(None), slice(start, start + _GRAMS))
        of_queries, of_keys = (
            queries[some].mT @ other_queries[some],
            keys[some].mT @ other_keys[some],
        )
        # The query's product comes first: `before` must not hold the chunk's own keys yet
        for of_query, of_key in zip(of_queries.unbind(2), of_keys.unbind(2), strict=True):
            products.addcmul_(of_query, before)
            before += of_key
    return products


def _fit(queries: Tensor, others: Tensor) -> bool:
    """Whether the Grams of all chunks fit into memory at once: never in a processor's caches."""
    # 8 bytes: Grams are float64
    return 8 * queries.shape[:3].numel() * queries.shape[-1] * others.shape[-1] <= memory_for(
        queries.device, 0
    )


def square_products(
    queries: Float[Tensor, "key member chunk within feature"],
    keys: Float[Tensor, "key any chunk within feature"],
) -> Float[Tensor, "key member feature feature"]:
    """Return `gram_products` of features with themselves.

    They are symmetric: one of the two blocks off the diagonal is not made on a processor.

    Args:
        queries: [key, member, chunk, within, feature], float32 or float64.
        keys: [key, 1 or member, chunk, within, feature].

    Returns:
        Sums [key, member, feature, feature], float64.
    """
    if _fit(queries, queries):  # the fewest launches
        return gram_products(queries, queries, keys, keys)
    half = queries.shape[-1] // 2
    upper = gram_products(queries[..., :half], queries, keys[..., :half], keys)
    lower = gram_products(
        queries[..., half:], queries[..., half:], keys[..., half:], keys[..., half:]
    )
    # [[A, B], [B^T, C]]: a quarter of the products is saved
    return torch.cat([upper, torch.cat([upper[..., half:].mT, lower], -1)], -2)


@dataclass(frozen=True)
class CausalPairs:
    """Sums over the seen pairs of every head; all are computed on first access.

    Features are 0 where a token takes no part.
    """

    queries: Float[Tensor, "key member token d_head"]
    keys: Float[Tensor, "key any token d_head"]
    """One for all members, or one per member."""
    window: int | None
    chunk: int
    """Tokens per chunk."""

    @cached_property
    def parts(self) -> tuple[tuple[int, int, Chunks], ...]:
        """(sign, delay, chunks): their causal pairs, added with the signs, are the seen pairs."""
        queries, every = in_chunks(self.queries, self.chunk), signed_keys(self.keys, self.window)
        return tuple(
            (sign, delay, Chunks(queries, in_chunks(keys, self.chunk)))
            for sign, delay, keys in every
        )

    @cached_property
    def by_query(self) -> Float[Tensor, "key member query"]:
        """sum_j y_ij, float64."""
        # The last chunk is padded with zeros; their sums are cut off
        return self._sum(lambda chunks: chunks.by_query)[..., : self.queries.shape[-2]]

    @cached_property
    def by_key(self) -> Float[Tensor, "key member key"]:
        """sum_i y_ij, float64."""
        tokens = self.queries.shape[-2]
        moved = [
            # Keys beyond the window were delayed; the delay of their sums is undone
            sign * shift_earlier(chunks.by_key[..., :tokens], delay, axis=-1)
            for sign, delay, chunks in self.parts[1:]
        ]
        return sum(moved, self.parts[0][2].by_key[..., :tokens])

    @cached_property
    def square(self) -> Float[Tensor, "key member"]:
        """Sum of y^2, float64."""
        return self._sum(lambda chunks: chunks.square_within + chunks.products.sum((-1, -2)))

    @cached_property
    def magnitude(self) -> Float[Tensor, "key member"]:
        """Sum of the absolute terms that gave `square`: its rounding is relative to it."""
        # Signs are left out on purpose: rounding follows the size of terms, even if they cancel
        terms = [
            chunks.square_within + chunks.products.abs().sum((-1, -2))
            for _, _, chunks in self.parts
        ]
        return sum(terms[1:], terms[0])

    @cached_property
    def with_logits(self) -> Float[Tensor, "key member component"]:
        """Sum of C_r y per component r, float64."""
        return self._sum(lambda chunks: chunks.with_logits)

    @cached_property
    def component_squares(self) -> Float[Tensor, "key member component"]:
        """Sum of C_r^2 = sum_i q_r^2 K_rr + 2 q_r q_r' K_rr' + q_r'^2 K_r'r'.

        K are the sums of k_r k_s up to i: between chunks, M alone gives them.
        """
        return self._sum(lambda chunks: chunks.component_squares)

    def squares_of(self, bands: Bool[Tensor, "band component"]) -> Float[Tensor, "key member band"]:
        """Return sum Y^2, Y the sum of the components of a band.

        Args:
            bands: Mask [band, component].

        Returns:
            Sums [key, member, band], float64.
        """
        return self._sum(lambda chunks: chunks.squares_of(bands))

    def scatter(self, pairs: Float[Tensor, "key 1"]) -> Float[Tensor, "key member"]:
        """Return sum (y - mean y)^2 over the seen pairs.

        Args:
            pairs: Number of seen pairs [key, 1], float64.

        Returns:
            Sums [key, member], float64, at least 0.
        """
        # Rounding may leave it below 0 where all y are equal
        return (self.square - self.by_query.sum(-1) ** 2 / pairs.clamp(min=1)).clamp(min=0)

    def _sum(self, of: Callable[[Chunks], Tensor]) -> Tensor:
        return sum((sign * of(chunks) for sign, _, chunks in self.parts[1:]), of(self.parts[0][2]))


@dataclass(frozen=True)
class Chunks:
    """Queries and keys in chunks of tokens, and sums over their causal pairs.

    Tensors of the size of the features, or of `within`, are made for a few chunks at a time, which
    stay in the processor's caches.
    """

    queries: Float[Tensor, "key member chunk within d_head"]
    keys: Float[Tensor, "key any chunk within d_head"]

    @cached_property
    def within(self) -> Float[Tensor, "key member chunk query key"]:
        """Logits of the causal pairs within chunks, 0 elsewhere."""
        # In place: within chunks the logits are the largest tensor here
        return _product(self.queries, self.keys.mT).mul_(self._lower)

    @property
    def _lower(self) -> Tensor:
        return _lower(self.queries.shape[-2], self.queries.dtype, self.queries.device)

    @cached_property
    def products(self) -> Float[Tensor, "key member d_head d_head"]:
        """M: sums of q_ia q_ib k_ja k_jb over pairs of different chunks."""
        return square_products(self.queries, self.keys)

    @cached_property
    def by_query(self) -> Float[Tensor, "key member query"]:
        """Row sums, including the zeros of the last chunk."""
        sums = self._chunk_sums(self.keys)
        # Only keys of earlier chunks: pairs inside the chunk are in `within`
        before = sums.cumsum(-2) - sums
        return self._lines(
            lambda some: _line(some(self.queries), some(before), some(self.within).sum(-1))
        )

    @cached_property
    def by_key(self) -> Float[Tensor, "key member key"]:
        """Column sums, including the zeros of the last chunk."""
        sums = self._chunk_sums(self.queries)
        after = sums.sum(-2, keepdim=True) - sums.cumsum(-2)
        return self._lines(
            lambda some: _line(some(self.keys), some(after), some(self.within).sum(-2))
        )

    @cached_property
    def square_within(self) -> Float[Tensor, "key member"]:
        """Sum of y^2 within chunks."""
        return self._add_within(lambda some: _sum_of_squares(some(self.within)))

    @cached_property
    def with_logits(self) -> Float[Tensor, "key member component"]:
        """Sum of C_r y."""
        within = self._add_within(
            lambda some: (
                _product(some(self.within), some(self.keys))
                .mul_(some(self.queries))
                .sum(-2)
                .sum(-2, dtype=torch.float64)
            )
        )
        # Half-split pairs: dimension r and r + d/2 add up to component r
        return (within + self.products.sum(-1)).unflatten(-1, (2, -1)).sum(-2)

    def squares_of(self, bands: Bool[Tensor, "band component"]) -> Float[Tensor, "key member band"]:
        """Return sum Y^2, Y the sum of the components of a band.

        Args:
            bands: Mask [band, component].

        Returns:
            Sums [key, member, band], float64.
        """
        # Kept with the mask, since it reads the mask back from the device
        runs, last, pairs = once("pairs of dimensions", lambda: _of_bands(bands), bands)
        # sum over a, b in the band of M_ab, as one product [key * member, d^2] x [d^2, band]
        between = (self.products.flatten(2).flatten(0, 1) @ pairs).view(
            *self.products.shape[:2], -1
        )

        if _fit(self.queries, self.queries):
            # All bands in one product, of the keys' dimensions in a band: the fewest launches.
            keys = (self.keys[:, :, :, None] * bands.repeat(1, 2)[:, None]).flatten(3, 4)
            logits = _product(self.queries, keys.mT).unflatten(-1, (len(bands), -1))
            squares = (logits * self._lower[:, None]).square()
            return between + squares.sum(5).sum((2, 3), dtype=torch.float64)

        def within(some: Some) -> Tensor:
            # A copy, because `within` is cached and other sums read it
            rest, sums = some(self.within).clone(), torch.zeros_like(between)
            for number, dimensions in enumerate(runs):
                # Bands split the components, so the widest is the logits less the others
                if number == last or not dimensions:
                    continue
                queries, keys = (
                    torch.cat([some(part)[..., run] for run in dimensions], -1)
                    for part in (self.queries, self.keys)
                )
                logits = _product(queries, keys.mT).mul_(self._lower)
                sums[..., number] = _sum_of_squares(logits)
                rest -= logits
            if last is not None:
                sums[..., last] = _sum_of_squares(rest)
            return sums

        return self._add_within(within) + between

    @cached_property
    def component_squares(self) -> Float[Tensor, "key member component"]:
        """Sum of C_r^2 = sum_i q_r^2 K_rr + 2 q_r q_r' K_rr' + q_r'^2 K_r'r'.

        K are the sums of k_r k_s up to i: between chunks, M alone gives them.
        """
        whole = _fit(self.queries, self.queries)

        def within(some: Some) -> Tensor:
            if whole:  # the fewest launches
                # Running sums include key i itself: the pair at distance 0 is seen
                running = _squares(some(self.keys)).cumsum_(-2)
                return (running * _squares(some(self.queries))).sum(-2).sum(2, dtype=torch.float64)
            of_queries, of_keys = (
                _squares(some(part).unflatten(-2, (-1, _LEAF)))
                for part in (self.queries, self.keys)
            )
            sums = of_keys.sum(-2)
            # Leaves of 16 tokens: a running sum over all of a chunk would write every prefix
            before = (sums.cumsum(-2) - sums) * of_queries.sum(-2)
            inside = (self._lower[:_LEAF, :_LEAF] @ of_keys * of_queries).sum(-2)
            return inside.add_(before).sum((-2, -3), dtype=torch.float64)

        half = self.products.shape[-1] // 2
        # M_rr and M_rr' in the order of `_squares`: r, then r', then their crossed products
        between = [
            self.products.diagonal(0, -2, -1),
            self.products[..., :half, half:].diagonal(0, -2, -1),
        ]
        # Crossed terms count twice: C_r^2 = (a + b)^2
        first, second, crossed = (self._add_within(within) + torch.cat(between, -1)).chunk(3, -1)
        return torch.add(first + second, crossed, alpha=2)

    def _chunk_sums(self, features: Tensor) -> Float[Tensor, "key any chunk d_head"]:
        # At most CHUNK terms per sum: the features' dtype is enough until chunks are added up
        return features.sum(-2).to(torch.float64)

    def _add_within(self, of: Callable[[Some], Tensor]) -> Tensor:
        parts = [of(some) for some in self._stretches]
        return torch.stack(parts).sum(0) if parts[1:] else parts[0]

    def _lines(self, of: Callable[[Some], Tensor]) -> Tensor:
        parts = [of(some) for some in self._stretches]
        return (torch.cat(parts, -2) if parts[1:] else parts[0]).flatten(-2)

    @cached_property
    def _stretches(self) -> list[Some]:
        """Return a function that takes a few chunks at a time along axis 2."""
        keys, members, chunks, size, width = self.queries.shape
        memory = memory_for(self.queries.device, _STRETCH)
        # Over the bytes of one chunk: its features or its logits, whichever are wider
        at_once = max(
            1, memory // (keys * members * size * max(size, width) * self.queries.element_size())
        )
        if at_once >= chunks:
            return [lambda part: part]
        return [
            partial(_stretch, slice(start, start + at_once)) for start in range(0, chunks, at_once)
        ]


def _of_bands(
    bands: Bool[Tensor, "band component"],
) -> tuple[list[list[slice]], int | None, Float[Tensor, "d_d band"]]:
    """Return dimensions of bands, the band that has the rest of the logits, pairs of dimensions."""
    # repeat(1, 2): component r is dimensions r and r + d/2
    chosen, of_dimension = bands.cpu().numpy(), bands.repeat(1, 2)[:, None]
    # Only where every component is in exactly one band can one be had from the rest
    last = int(chosen.sum(-1).argmax()) if (chosen.sum(0) == 1).all() else None
    pairs = (of_dimension.mT & of_dimension).flatten(1).T.to(torch.float64)
    return [_runs(np.tile(band, 2)) for band in chosen], last, pairs


def _stretch(
    chunks: slice, part: Float[Tensor, "key any chunk *axes"]
) -> Float[Tensor, "key any some *axes"]:
    return part[:, :, chunks]


def _line(features: Tensor, others: Tensor, within: Tensor) -> Tensor:
    """Return `within` plus `features` times the sum of their chunk's `others`, float64."""
    # Multiplied and summed: for a product with a single vector, matrix libraries take several times
    # as long.
    return (features * others[..., None, :]).sum(-1) + within


def _sum_of_squares(
    logits: Float[Tensor, "key member chunk query key"],
) -> Float[Tensor, "key member"]:
    # Rows first: summing all axes in float64 would widen the whole map
    return logits.square().sum(-1).sum((-1, -2), dtype=torch.float64)


def _runs(chosen: Bool[np.ndarray, " dimension"]) -> list[slice]:
    """The chosen dimensions as slices."""
    # Slices are views; zeros on both sides make starts and stops alternate
    edges = np.flatnonzero(np.diff(np.pad(chosen.astype(np.int8), 1)))
    return [slice(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]


def _squares(features: Float[Tensor, "*axes d_head"]) -> Float[Tensor, "*axes three_components"]:
    """x_r^2, x_r'^2 and x_r x_r' of every component."""
    first, second = features.chunk(2, -1)
    return torch.cat([features * features, first * second], -1)
