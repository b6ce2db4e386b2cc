"""Three-axis fit with its distance axis over cells of learned positions.

The cell of a token is u = floor(z / width).

    W_ij ~ a[u_i - u_j] + b_i + c_j

Where positions are the token index and width is 1, u_i - u_j = i - j and this is the fit of
`axis_fit`; a layer that learns its positions is judged by the distances it has made. Only the
correlation is wanted, whose error is of the order of the square of the solver's: few steps of
conjugate gradients do.

Binned as a difference of cells, a distance between positions makes everything a sum over cells.
Tokens are cut into chunks: pairs within one are gone through; a row's pairs with earlier chunks
need only the number of keys that a cell held before its chunk,

    sum_{j before chunk} a[u_i - u_j] = sum_m H_m a[u_i - m]

(a convolution, read off at u_i; alike for columns and for the bins), and the sum of q_i . k_j over
a bin only the sum of a cell's keys: q_i . K_m falls into bin u_i - m. A window takes away the
causal pairs with the keys delayed by it (seen_pairs). Cost per head: O(n (cells + chunk) d) for the
sums of products, O(n chunk + n / chunk cells log cells), in time and memory, for those of the map.
Knows nothing about how positions came about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.causal_pairs import in_chunks
from repo_interp.measures.kernels.logit_sums import MapSums, row_blocks
from repo_interp.measures.kernels.seen_pairs import (
    fast_length,
    later,
    shift_earlier,
    shift_later,
    signed_keys,
)
from repo_interp.measures.kernels.solvers import Axes, conjugate_gradients, gauges
from repo_interp.memory import SHARED, memory_for
from repo_interp.plugins.three_axis.axis_fit import pearson
from repo_interp.positions.rotary import expand_heads

TOLERANCE = 1e-6
"""Residual of conjugate gradients, relative to that at the start."""

CHUNK = 32
"""Tokens per chunk."""


def position_correlation(
    inputs: AttentionInputs, sums: MapSums, width: float, most_cells: int, ridge: float
) -> Float[Tensor, "prompt head"]:
    """Return Pearson's correlation of the logits and their fit over position cells.

    Args:
        inputs: A layer that has positions, and a batch.
        sums: Sums of the logits over the seen pairs, from `logit_sums`.
        width: Width of a cell, in positions.
        most_cells: Most cells that the positions of a head may reach over in a prompt.
        ridge: Weight of the squared axes, above 0.

    Returns:
        Correlations [prompt, head], float64; NaN for a head with more cells, and where the logits
        do not vary.

    Raises:
        ValueError: The layer has no positions.
    """
    if inputs.head_positions is None:
        raise ValueError(
            f"layer {inputs.layer} ({inputs.scheme}) has no positions to measure distances by"
        )
    # Heads whose positions reach too far stay NaN: arrays over their cells could be of any size
    cell, within = _cells(inputs.head_positions, inputs.valid, width, most_cells)
    takes_part = inputs.valid[:, None] & within[..., None]
    # The heads to fit and their numbers of cells: one copy from the device.
    fitted, most = torch.stack([within.long(), cell.amax(-1) + 1]).flatten(1).tolist()
    items = np.flatnonzero(fitted)
    correlation = torch.full(within.shape, torch.nan, dtype=torch.float64, device=cell.device)
    queries, keys = inputs.rotated_queries, expand_heads(inputs.rotated_keys, inputs.heads)
    tokens, d_head = queries.shape[-2:]
    # Per token 2048 bytes: some eight float64 numbers for each of the CHUNK pairs within a chunk
    at_once = max(1, memory_for(queries.device, 2 * SHARED) // (tokens * (8 * d_head + 2048)))
    for block in (items[start : start + at_once] for start in range(0, len(items), at_once)):
        prompt, head = (
            torch.from_numpy(part).to(cell.device)
            for part in (block // inputs.heads, block % inputs.heads)
        )
        part = takes_part[prompt, head]
        pairs = binned_pairs(
            cell[prompt, head], part, inputs.window, max(most[item] for item in block)
        )
        if inputs.is_bilinear:
            some_queries = queries[prompt, head].masked_fill(~part[..., None], 0)
            some_keys = keys[prompt, head].masked_fill(~part[..., None], 0)
            by_bin = inputs.logit_scale * product_sums(
                some_queries, some_keys, pairs, inputs.window
            )
        else:
            by_bin = _bins_by_rows(inputs, cell[prompt, head], prompt, head, pairs)
        some = [by_bin, sums.lines.query[prompt, head], sums.lines.key[prompt, head]]
        correlation[prompt, head] = _fit_correlation(
            torch.cat(some, -1), sums.square[prompt, head], pairs, ridge
        )
    return correlation


def _cells(
    positions: Float[Tensor, "prompt head token"],
    valid: Bool[Tensor, "prompt token"],
    width: float,
    most_cells: int,
) -> tuple[Int[Tensor, "prompt head token"], Bool[Tensor, "prompt head"]]:
    """Return cells of valid tokens from the lowest on, else 0, and heads within `most_cells`."""
    cell = torch.floor(positions.to(torch.float64) / width)
    lowest = cell.masked_fill(~valid[:, None], torch.inf).amin(-1, keepdim=True)
    cell = (cell - lowest).masked_fill(~valid[:, None], 0)
    within = (cell.amax(-1) < most_cells) & valid.any(-1)[:, None]
    return torch.where(within[..., None], cell, 0).to(torch.int64), within


def _fit_correlation(
    sums: Float[Tensor, "item unknown"],
    square: Float[Tensor, "item"],
    pairs: BinnedPairs,
    ridge: float,
) -> Float[Tensor, "item"]:
    # Unknowns in one vector: bins, rows, columns
    sizes = [part.shape[-1] for part in pairs.counts]

    def apply(unknowns: Tensor) -> Tensor:
        return torch.cat(pairs.sums(*unknowns.split(sizes, -1)), -1)

    axes = conjugate_gradients(
        apply, sums, torch.cat(pairs.counts, -1), pairs.gauges(), ridge, TOLERANCE
    )
    of_fit = apply(axes)
    return pearson(
        count=pairs.counts.distance.sum(-1),
        total=sums[..., : sizes[0]].sum(-1),
        square=square,
        fitted_total=of_fit[..., : sizes[0]].sum(-1),
        fitted_square=(axes * of_fit).sum(-1),
        product=(axes * sums).sum(-1),
    )


def _bins_by_rows(
    inputs: AttentionInputs,
    cell: Int[Tensor, "item token"],
    prompt: Tensor,
    head: Tensor,
    pairs: BinnedPairs,
) -> Float[Tensor, "item bin"]:
    """Return the sum of the logits of every bin, from some rows at a time: O(n^2 d)."""
    sums = torch.zeros_like(pairs.counts.distance)
    for rows, logits in row_blocks(inputs):
        values = torch.where(inputs.visible(rows)[:, None], logits, 0)[prompt, head]
        _add_by_bin(sums, values, cell[:, rows, None], cell[:, None, :])
    return sums


def _add_by_bin(
    sums: Float[Tensor, "item bin"], values: Tensor, row_cell: Tensor, key_cell: Tensor
) -> None:
    """Add values [item, row, key] to the bins of their differences of cells, in place."""
    # The middle bin is difference 0; later cells may come first, so bins are signed
    bins = row_cell - key_cell + (sums.shape[-1] - 1) // 2
    sums.scatter_add_(-1, bins.flatten(1), values.flatten(1).to(torch.float64))


@dataclass(frozen=True)
class CellPairs:
    """Causal pairs of rows and keys by their cells, for some heads; made by `binned_pairs`.

    Float64.
    """

    cells: int
    tokens: int
    row_cell: Int[Tensor, "item chunk token"]
    rows: Float[Tensor, "item chunk token"]
    """1 where a row takes part, else 0."""
    key_cell: Int[Tensor, "item chunk token"]
    keys: Float[Tensor, "item chunk token"]

    @property
    def bins(self) -> int:
        """Number of bins: a difference of d cells is at d + cells - 1."""
        return 2 * self.cells - 1

    @cached_property
    def keys_before(self) -> Complex[Tensor, "item chunk frequency"]:
        """Spectrum of the number of keys in a cell before a chunk."""
        held = _held(self.key_cell, self.keys, self.cells)
        return torch.fft.rfft(held.cumsum(1) - held, n=_length(self.cells))

    @cached_property
    def rows_after(self) -> Complex[Tensor, "item chunk frequency"]:
        """Spectrum of the number of rows in a cell behind a chunk."""
        # Chunks up to and including this one: the last entry less it are the rows behind
        until = _held(self.row_cell, self.rows, self.cells).cumsum(1)
        return torch.fft.rfft(until[:, -1:] - until, n=_length(self.cells))

    @cached_property
    def bin_within(self) -> Int[Tensor, "item pair"]:
        """Bins of the pairs of a chunk, seen or not."""
        bins = self.row_cell[..., :, None] - self.key_cell[..., None, :] + self.cells - 1
        return bins.flatten(1)

    @cached_property
    def seen_within(self) -> Float[Tensor, "item chunk row key"]:
        """1 for the seen pairs of a chunk."""
        return (self.rows[..., :, None] * self.keys[..., None, :]).tril_()

    def of_distance(self, a: Float[Tensor, "item bin"]) -> tuple[Tensor, Tensor]:
        """Return sums of a[u_i - u_j] over the causal pairs of rows and of columns.

        Args:
            a: Values [item, bin].

        Returns:
            Sums by row and by column, [item, n].
        """
        within = a.gather(-1, self.bin_within).view_as(self.seen_within) * self.seen_within
        by_row = within.sum(-1) + self._read(self.keys_before, a, self.row_cell)
        # A column m sums a over the rows behind it, sum_u R_u a[u - m]: the same convolution with
        # the bins of a backwards.
        by_key = within.sum(-2) + self._read(self.rows_after, a.flip(-1), self.key_cell)
        return self._flat(by_row), self._flat(by_key)

    def by_bin(
        self, b: Float[Tensor, "item n"], c: Float[Tensor, "item n"]
    ) -> Float[Tensor, "item bin"]:
        """Return sums of b_i + c_j over the causal pairs of every bin.

        Args:
            b: Values [item, n] of the rows, 0 where a token does not take part.
            c: Values [item, n] of the columns, 0 where a token does not take part.

        Returns:
            Sums [item, bin].
        """
        rows, keys = _in_chunks(b), _in_chunks(c)
        over_pairs = (rows[..., :, None] + keys[..., None, :]) * self.seen_within
        sums = torch.zeros(len(b), self.bins, dtype=b.dtype, device=b.device)
        sums.scatter_add_(-1, self.bin_within, over_pairs.flatten(1))
        # Between chunks: sum_u sum_m (rows at u)(keys at m) falls into bin u - m, a
        # cross-correlation over cells for every chunk; the spectra of all chunks are summed before
        # the one inverse transform.
        held_rows, held_keys = (
            self._spectrum(self.row_cell, rows),
            self._spectrum(self.key_cell, keys),
        )
        spectrum = (held_rows * self.keys_before.conj() + self.rows_after * held_keys.conj()).sum(1)
        around = torch.fft.irfft(spectrum, n=_length(self.cells))
        negative = around[..., around.shape[-1] - self.cells + 1 :]
        return sums + torch.cat([negative, around[..., : self.cells]], -1)

    def _spectrum(self, cell: Tensor, weights: Tensor) -> Tensor:
        return torch.fft.rfft(_held(cell, weights, self.cells), n=_length(self.cells))

    def _read(self, held: Tensor, a: Tensor, cell: Tensor) -> Float[Tensor, "item chunk token"]:
        """Return sum_m held_m a[u - m] at the cell u of every token."""
        # Bin u - m stands at u - m + cells - 1 in a, so the sum for cell u is entry u + cells - 1
        # of the convolution. The transform is shorter than the convolution; the part that wraps
        # around ends up before entry cells - 1.
        length = _length(self.cells)
        spread = torch.fft.irfft(held * torch.fft.rfft(a, n=length)[:, None], n=length)
        return spread[..., self.cells - 1 : 2 * self.cells - 1].gather(-1, cell)

    def _flat(self, values: Float[Tensor, "item chunk token"]) -> Float[Tensor, "item n"]:
        return values.flatten(1)[:, : self.tokens]


@dataclass(frozen=True)
class BinnedPairs:
    """Pairs inside the window by bins: causal pairs less those beyond the window.

    Made by `binned_pairs`.
    """

    parts: tuple[tuple[int, int, CellPairs], ...]
    """(sign, delay, pairs of the rows with the keys delayed)."""
    takes_part: Float[Tensor, "item n"]

    @cached_property
    def counts(self) -> Axes:
        """Seen pairs of every bin, row and key."""
        by_bin, by_row, by_key = self._coupled(None, self.takes_part, self.takes_part)
        # Every pair has a row and a key. Counts by bin went through a transform; rounded, an empty
        # bin is exactly 0
        return Axes((by_bin / 2).round(), self.takes_part * by_row, self.takes_part * by_key)

    @property
    def cells(self) -> int:
        """Number of cells that positions fall into."""
        return self.parts[0][2].cells

    def sums(
        self, a: Float[Tensor, "item bin"], b: Float[Tensor, "item n"], c: Float[Tensor, "item n"]
    ) -> Axes:
        """Return sums of a[u_i - u_j] + b_i + c_j over bins, rows and columns.

        Args:
            a: Distance axis [item, bin].
            b: Query axis [item, n].
            c: Key axis [item, n].

        Returns:
            Sums [item, bin], [item, n] and [item, n]; 0 where no pair is.
        """
        b, c = b * self.takes_part, c * self.takes_part
        by_bin, by_row, by_key = self._coupled(a, b, c)
        # Bins without a pair hold the rounding of the transforms, which a solver would amplify
        touched = self.counts.distance > 0
        return Axes(
            torch.where(touched, self.counts.distance * a + by_bin, 0),
            self.counts.query * b + self.takes_part * by_row,
            self.counts.key * c + self.takes_part * by_key,
        )

    def _coupled(self, a: Tensor | None, b: Tensor, c: Tensor) -> list[Tensor]:
        """Sums over bins, rows and keys of the other two axes; without `a`, of b and c alone."""
        sums: list[Any] = [0, 0, 0]
        for sign, delay, pairs in self.parts:
            delayed = shift_later(c, delay, axis=-1)
            by_row, by_key = delayed.cumsum(-1), later(b, None)
            if a is not None:
                rows, keys = pairs.of_distance(a)
                by_row, by_key = rows + by_row, keys + by_key
            found = pairs.by_bin(b, delayed), by_row, shift_earlier(by_key, delay, axis=-1)
            sums = [whole + sign * part for whole, part in zip(sums, found, strict=True)]
        return sums

    def gauges(self) -> Float[Tensor, "item unknown direction"]:
        """Return the directions (a, b, c) in which the map does not change.

        Returns:
            Three directions [item, unknown, direction]; unknowns are bins, rows and columns in this
            order.
        """
        pairs = self.parts[0][2]
        cell = pairs.row_cell.flatten(1)[:, : pairs.tokens].to(torch.float64)
        difference = torch.arange(1 - self.cells, self.cells, device=cell.device).to(cell)
        return gauges(Axes(difference.expand(len(cell), -1), cell, cell))


def binned_pairs(
    cell: Int[Tensor, "item n"], takes_part: Bool[Tensor, "item n"], window: int | None, cells: int
) -> BinnedPairs:
    """Bin the pairs of tokens by the difference of their cells.

    Args:
        cell: Cell of every token [item, n], 0 .. `cells` - 1.
        takes_part: Mask [item, n] of the tokens.
        window: Tokens that a query looks back over, itself included; None for all.
        cells: Number of cells.

    Returns:
        The pairs.
    """
    part, parts = takes_part.to(torch.float64), []
    for sign, delay, keys in signed_keys(part[..., None], window):
        tokens = cell, part, shift_later(cell, delay, axis=-1), keys[..., 0]
        parts.append((sign, delay, CellPairs(cells, cell.shape[-1], *map(_in_chunks, tokens))))
    return BinnedPairs(tuple(parts), part)


def product_sums(
    queries: Float[Tensor, "item n d_head"],
    keys: Float[Tensor, "item n d_head"],
    pairs: BinnedPairs,
    window: int | None,
) -> Float[Tensor, "item bin"]:
    """Return the sum of q_i . k_j over the seen pairs of every bin.

    Args:
        queries: Rotated queries [item, n, d_head], 0 where a token does not take part.
        keys: Rotated keys [item, n, d_head], likewise.
        pairs: Pairs of the same tokens.
        window: The window of `pairs`.

    Returns:
        Sums [item, bin], float64.
    """
    delayed_keys = signed_keys(keys, window)
    return torch.stack(
        [
            sign * _causal_product_sums(queries, some_keys, part)
            for (sign, _, some_keys), (_, _, part) in zip(delayed_keys, pairs.parts, strict=True)
        ]
    ).sum(0)


def _causal_product_sums(
    queries: Tensor, keys: Tensor, pairs: CellPairs
) -> Float[Tensor, "item bin"]:
    (items, tokens, width), cells = queries.shape, pairs.cells
    row_cell, key_cell = (cell.flatten(1) for cell in (pairs.row_cell, pairs.key_cell))
    new = {"dtype": torch.float64, "device": queries.device}
    sums = torch.zeros(items, pairs.bins, **new)
    # The cells of all items in one long axis.
    held = torch.zeros(items * cells, width, **new)
    first_cell = torch.arange(items, device=queries.device)[:, None] * cells
    every_cell = torch.arange(cells, device=queries.device)
    # An accelerator makes and drops maps of many rows faster than it sums up cells.
    size = max(CHUNK, math.isqrt(memory_for(queries.device, 0) // (32 * items)))
    for start in range(0, tokens, size):
        some = slice(start, min(start + size, tokens))
        some_queries, some_keys = queries[:, some], keys[:, some]
        rows, columns = row_cell[:, some, None], key_cell[:, some]
        _add_by_bin(sums, (some_queries @ some_keys.mT).tril_(), rows, columns[:, None])
        if start:
            # Pairs with all earlier chunks, cell by cell: q_i . K_m goes into bin u_i - m.
            crossed = some_queries @ held.view(items, cells, width).to(queries.dtype).mT
            _add_by_bin(sums, crossed, rows, every_cell)
        # Only now do this chunk's keys join their cells: one index_add_ serves all items.
        joining = some_keys.flatten(0, 1).to(torch.float64)
        held.index_add_(0, (first_cell + columns).flatten(), joining)
    return sums


def _in_chunks(values: Tensor) -> Tensor:
    """Return [item, n] as [item, chunk, token]."""
    return in_chunks(values[..., None], CHUNK)[..., 0]


def _held(cell: Tensor, weights: Tensor, cells: int) -> Float[Tensor, "item chunk cell"]:
    """Return the sum of the weights of every cell's tokens, per chunk."""
    held = torch.zeros(*cell.shape[:-1], cells, dtype=torch.float64, device=cell.device)
    return held.scatter_add_(-1, cell, weights)


def _length(cells: int) -> int:
    """Return a fast transform length at which no entry that is read wraps around."""
    return fast_length(2 * cells)
