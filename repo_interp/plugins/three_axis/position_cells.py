"""Three-axis fit with its distance axis over cells of learned positions.

The cell of a token is u = floor(z / width).

    W_ij ~ a[u_i - u_j] + b_i + c_j

If positions are the token index and width is 1, u_i - u_j = i - j: this is the fit of `axis_fit`.
For a layer that learns positions, the distance axis is over the learned distances. The result is
only the correlation, with an error of the order of the square of the solver's error, so few steps
of conjugate gradients suffice.

Because distances are differences of cells, all sums are sums over cells. Tokens are split into
chunks. Pairs within a chunk are enumerated. A row's pairs with earlier chunks need only H_m, the
number of keys in cell m before the row's chunk:

    sum_{j before chunk} a[u_i - u_j] = sum_m H_m a[u_i - m]

This is a convolution evaluated at u_i; the sums for columns and bins are analogous. The sum of
q_i . k_j over a bin needs only K_m, the sum of the keys in cell m: q_i . K_m goes to bin u_i - m.
With a window, the causal pairs with keys delayed by the window are subtracted (seen_pairs). The
cost per head is O(n (cells + chunk) d) for the sums of products, and O(n chunk + n / chunk cells
log cells), in time and memory, for the sums of the map. This module knows nothing about where
positions come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.causal_pairs import in_chunks
from repo_interp.measures.kernels.joint import jointly
from repo_interp.measures.kernels.logit_sums import MapSums, row_blocks
from repo_interp.measures.kernels.seen_pairs import (
    fast_length,
    once,
    shift_earlier,
    shift_later,
    signed_keys,
)
from repo_interp.measures.kernels.solvers import Axes, conjugate_gradients, gauges
from repo_interp.plugins.three_axis.axis_fit import pearson
from repo_interp.positions.rotary import expand_heads
from repo_interp.runtime.memory import SHARED, memory_for

TOLERANCE = 1e-6
"""Residual at which conjugate gradients stop, relative to the initial residual."""

CHUNK = 32
"""Tokens per chunk."""


def position_correlation(
    inputs: AttentionInputs, sums: MapSums, width: float, most_cells: int, ridge: float
) -> Any:
    """Return Pearson's correlation of the logits and their fit over position cells.

    Args:
        inputs: A layer that has positions, and a batch.
        sums: Sums of the logits over the seen pairs, from `logit_sums`.
        width: Width of a cell, in positions.
        most_cells: Most cells between the smallest and the largest position of a head in a prompt.
        ridge: Weight of the squared axes, above 0.

    Returns:
        Correlations [prompt, head], float64, for `labels.arrays`; NaN for a head with more cells,
        and where the logits do not vary.

    Raises:
        ValueError: The layer has no positions.
    """
    if inputs.head_positions is None:
        raise ValueError(
            f"layer {inputs.layer} ({inputs.scheme}) has no positions to measure distances by"
        )
    # Heads with more cells stay NaN: arrays over their cells could be of any size
    cell, within = _cells(inputs.head_positions, inputs.valid, width, most_cells)
    queries, keys = inputs.rotated_queries, expand_heads(inputs.rotated_keys, inputs.heads)
    d_head = queries.shape[-1]
    blocks = list(_blocks(cell, within, inputs.valid, d_head))
    # A power of two, so that layers of about as many cells have arrays of one shape
    most = 2 ** (max((cells for _, cells in blocks), default=1) - 1).bit_length()
    every_bin = torch.zeros(
        *within.shape, 2 * most - 1, dtype=torch.float64, device=inputs.valid.device
    )
    for (prompt, head), cells in blocks:
        part = inputs.valid[prompt]
        pairs = binned_pairs(cell[prompt, head], part, inputs.window, cells)
        if inputs.is_bilinear:
            beside = ~part[..., None]
            some_queries = queries[prompt, head].masked_fill(beside, 0)
            some_keys = keys[prompt, head].masked_fill(beside, 0)
            by_bin = inputs.logit_scale * product_sums(
                some_queries, some_keys, pairs, inputs.window
            )
        else:
            by_bin = _bins_by_rows(inputs, cell[prompt, head], prompt, head, pairs)
        every_bin[prompt, head, most - cells : most + cells - 1] = by_bin
    tensors = {"cell": cell, "within": within, "every_bin": every_bin, "sums": sums.together}
    return jointly(_fits, tensors, [inputs.valid, inputs.window, ridge, d_head])["r_position"]


def _blocks(
    cell: Int[Tensor, "*any token"],
    within: Bool[Tensor, "*any"],
    valid: Bool[Tensor, "prompt token"],
    d_head: int,
) -> Iterator[tuple[tuple[Tensor, ...], int]]:
    """Indices of some heads within the limit, as many as fit into memory, and their cells."""
    # One copy from the device for both the heads to fit and their numbers of cells: 0 of others
    most = ((cell.amax(-1) + 1) * within).flatten().tolist()
    items, device = np.flatnonzero(most), cell.device
    # Per token 2048 bytes: about eight float64 numbers for each of the CHUNK pairs within a chunk
    bytes_each = cell.shape[-1] * (8 * d_head + 2048)
    at_once = max(1, memory_for(device, 2 * SHARED) // bytes_each)
    for block in (items[start : start + at_once] for start in range(0, len(items), at_once)):
        place = np.stack(np.unravel_index(block, within.shape))
        yield (
            once(
                ("heads of cells", place.shape, place.tobytes()),
                lambda place=place: torch.from_numpy(place).to(device).unbind(),
                valid,
            ),
            max(most[item] for item in block),
        )


def _fits(
    valid: Bool[Tensor, "prompt token"],
    window: int | None,
    ridge: float,
    d_head: int,
    cell: Int[Tensor, "layer prompt head token"],
    within: Bool[Tensor, "layer prompt head"],
    every_bin: Float[Tensor, "layer prompt head bin"],
    sums: Float[Tensor, "layer prompt head three_tokens_and_1"],
) -> dict[str, Tensor]:
    """Correlations of layers."""
    correlation = torch.full(within.shape, torch.nan, dtype=torch.float64, device=cell.device)
    of_map, most = MapSums(sums), (every_bin.shape[-1] + 1) // 2
    for at, cells in _blocks(cell, within, valid, d_head):
        pairs = binned_pairs(cell[at], valid[at[1]], window, cells)
        by_bin = every_bin[at][:, most - cells : most + cells - 1]
        unknowns = pairs.unknowns(by_bin, of_map.lines.query[at], of_map.lines.key[at])
        correlation[at] = _fit_correlation(unknowns, of_map.square[at], pairs, ridge)
    return {"r_position": correlation}


def _cells(
    positions: Float[Tensor, "prompt head token"],
    valid: Bool[Tensor, "prompt token"],
    width: float,
    most_cells: int,
) -> tuple[Int[Tensor, "prompt head token"], Bool[Tensor, "prompt head"]]:
    """Return cells of valid tokens from the lowest on (else 0), and heads within `most_cells`."""
    # The same for all layers of a pass
    beside = once("not taking part", lambda: ~valid[:, None], valid)
    some = once("some token", lambda: valid.any(-1)[:, None], valid)
    cell = torch.floor(positions.to(torch.float64) / width)
    lowest = cell.masked_fill(beside, torch.inf).amin(-1, keepdim=True)
    cell = (cell - lowest).masked_fill(beside, 0)
    within = (cell.amax(-1) < most_cells) & some
    return torch.where(within[..., None], cell, 0).to(torch.int64), within


def _fit_correlation(
    sums: Float[Tensor, "item unknown"],
    square: Float[Tensor, "item"],
    pairs: BinnedPairs,
    ridge: float,
) -> Float[Tensor, "item"]:
    axes = conjugate_gradients(pairs.sums, sums, pairs.counts, pairs.gauges(), ridge, TOLERANCE)
    of_fit, bins = pairs.sums(axes), pairs.bins
    return pearson(
        count=pairs.counts[..., :bins].sum(-1),
        total=sums[..., :bins].sum(-1),
        square=square,
        fitted_total=of_fit[..., :bins].sum(-1),
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
    """Return the sum of the logits of every bin, a few rows at a time: O(n^2 d)."""
    sums = torch.zeros(len(cell), pairs.bins, dtype=torch.float64, device=cell.device)
    for rows, logits in row_blocks(inputs):
        values = torch.where(inputs.visible(rows)[:, None], logits, 0)[prompt, head]
        _add_by_bin(sums, values, cell[:, rows, None], cell[:, None, :])
    return sums


def _add_by_bin(
    sums: Float[Tensor, "item bin"], values: Tensor, row_cell: Tensor, key_cell: Tensor
) -> None:
    """Add values [item, row, key] in place to the bins of their differences of cells."""
    # The middle bin is difference 0; later cells may come first, so bins are signed
    bins = row_cell - key_cell + (sums.shape[-1] - 1) // 2
    sums.scatter_add_(-1, bins.flatten(1), values.flatten(1).to(torch.float64))


@dataclass(frozen=True)
class BinnedPairs:
    """Pairs inside the window by bins, for some heads; made by `binned_pairs`.

    They are the causal pairs (part 0, sign 1) minus the pairs beyond the window (part 1, sign -1,
    with delayed keys). A row in cell u has place u and a key in cell m has place `cells` - 1 - m;
    the sum of both places is their bin, the difference of cells. All unknowns are one vector
    [item, unknown]: the distance axis padded to `length`, then rows and keys padded to whole
    chunks. Float64.
    """

    cells: int
    tokens: int
    delays: tuple[int, ...]
    """Delay of the keys by part: 0, and the window if there is one."""
    places: Int[Tensor, "item part 2 chunk token"]
    """Places of rows and of keys."""
    taking_part: Float[Tensor, "item part 2 chunk token"]
    """1 where a row, or a key, takes part, else 0."""

    @property
    def bins(self) -> int:
        """Number of bins: a difference of d cells is at d + cells - 1."""
        return 2 * self.cells - 1

    @cached_property
    def length(self) -> int:
        """A fast transform length at which no entry in use wraps around."""
        return fast_length(2 * self.cells)

    def _signed(self, of_parts: Float[Tensor, "item part *axes"]) -> Tensor:
        """Multiply parts by their signs in place: 1 for causal pairs, -1 for pairs to subtract."""
        if len(self.delays) > 1:
            of_parts[:, 1:].neg_()
        return of_parts

    @cached_property
    def bin_within(self) -> Int[Tensor, "item pair"]:
        """Bins of the pairs within a chunk, seen or not."""
        rows, keys = self.places.unbind(2)
        return (rows[..., None] + keys[..., None, :]).flatten(1)

    @cached_property
    def seen_within(self) -> Float[Tensor, "item part chunk row key"]:
        """The sign of the seen pairs within a chunk, else 0."""
        rows, keys = self.taking_part.unbind(2)
        return self._signed((rows[..., None] * keys[..., None, :]).tril_())

    @cached_property
    def opposite(self) -> Complex[Tensor, "item part 2 chunk frequency"]:
        """Spectra of a chunk's partners: earlier keys for its rows, later rows for its keys."""
        held = self._held(self.taking_part)
        until = held.cumsum(3)
        rows, keys = (until[:, :, :, -1:] - until)[:, :, 0], (until - held)[:, :, 1]
        return self._signed(torch.fft.rfft(torch.stack([keys, rows], 2)))

    @cached_property
    def _places_back(self) -> Int[Tensor, "item part 2 chunk token"]:
        """Index of a place's entry after the inverse transform of a conjugated spectrum."""
        return -self.places % self.length

    @cached_property
    def _counts_between(self) -> Float[Tensor, "item unknown"]:
        """Count the pairs of different chunks by bin, row and key."""
        lines = self.taking_part * self._lines_between(self.taking_part)
        # Halved, since every pair has a row and a key. Rounded, so that the transform leaves an
        # empty bin exactly 0
        by_bin = (self._bins_between(self.taking_part) / 2).round()
        return torch.cat([by_bin, self._undelayed(lines)], -1)

    @cached_property
    def counts(self) -> Float[Tensor, "item unknown"]:
        """Number of seen pairs of every bin, row and key: the diagonal of the normal matrix."""
        lines = torch.stack([self.seen_within.sum(-1), self.seen_within.sum(-2)], 2)
        counts = self._counts_between.clone()
        counts[:, self.length :] += self._undelayed(lines)
        counts[:, : self.length].scatter_add_(-1, self.bin_within, self.seen_within.flatten(1))
        return counts

    @cached_property
    def _touched(self) -> Float[Tensor, "item unknown"]:
        """1 for unknowns with a pair, else 0: transforms leave rounding in the others."""
        return (self.counts > 0).to(torch.float64)

    def unknowns(
        self, a: Float[Tensor, "item bin"], b: Float[Tensor, "item n"], c: Float[Tensor, "item n"]
    ) -> Float[Tensor, "item unknown"]:
        """Return values by bin, row and key as one vector.

        Args:
            a: Values of the bins.
            b: Values of the rows.
            c: Values of the keys.

        Returns:
            The vector, padded with 0.
        """
        lines = self.places.shape[3:].numel() - self.tokens
        a = torch.nn.functional.pad(a, (0, self.length - self.bins))
        both = torch.nn.functional.pad(torch.stack([b, c], 1), (0, lines))
        return torch.cat([a, both.flatten(1)], -1)

    def sums(self, unknowns: Float[Tensor, "item unknown"]) -> Float[Tensor, "item unknown"]:
        """Return sums of a[u_i - u_j] + b_i + c_j over bins, rows and keys.

        Args:
            unknowns: The three axes; rows and keys that take no part are 0.

        Returns:
            Sums; 0 without pairs.
        """
        a, both = unknowns[:, : self.length], self._delayed(unknowns[:, self.length :])
        rows, keys = both.unbind(2)
        # The map of the pairs within a chunk, and its sums
        within = a.gather(-1, self.bin_within).view_as(self.seen_within)
        within.add_(rows[..., None]).add_(keys[..., None, :]).mul_(self.seen_within)
        lines = torch.empty_like(both)
        torch.sum(within, -1, out=lines[:, :, 0])
        torch.sum(within, -2, out=lines[:, :, 1])
        # For other chunks, a row sums a over the cells of earlier keys: a correlation, evaluated
        # at the row's place. With the conjugated spectrum it runs backwards
        spectrum = torch.fft.rfft(a).conj_physical()[:, None, None, None]
        around = torch.fft.irfft(self.opposite * spectrum, n=self.length)
        lines += around.gather(-1, self._places_back)
        lines += self._lines_between(both)
        sums = torch.cat([self._bins_between(both), self._undelayed(lines)], -1)
        sums[:, : self.length].scatter_add_(-1, self.bin_within, within.flatten(1))
        return sums.addcmul_(self._counts_between, unknowns).mul_(self._touched)

    def _bins_between(self, values: Float[Tensor, "item part 2 chunk token"]) -> Tensor:
        """Sum over the pairs of different chunks by bin: a convolution of places."""
        # Sum the spectra of all chunks, then transform back once
        spectrum = torch.fft.rfft(self._held(values)).mul_(self.opposite).sum((1, 2, 3))
        return torch.fft.irfft(spectrum, n=self.length)

    def _lines_between(self, values: Float[Tensor, "item part 2 chunk token"]) -> Tensor:
        """Sum over the pairs of different chunks by row and key."""
        between = _between(self.places.shape[3], values.device)
        sums = torch.mm(values.sum(-1).view(-1, len(between)), between)
        return self._signed(sums.view(*values.shape[:-1], 1))

    def _held(
        self, values: Float[Tensor, "item part 2 chunk token"]
    ) -> Float[Tensor, "item part 2 chunk place"]:
        """Sum the values at every place, per chunk."""
        held = values.new_zeros(*values.shape[:-1], self.length)
        return held.scatter_add_(-1, self.places, values)

    def _delayed(
        self, lines: Float[Tensor, "item unknown"]
    ) -> Float[Tensor, "item part 2 chunk token"]:
        """Return values of rows and keys by part, with delayed keys."""
        of_items = lines.view(len(lines), 2, -1)
        parts = [_delay(of_items, delay, shift_later) for delay in self.delays]
        both = torch.stack(parts, 1) if parts[1:] else of_items[:, None]
        return both.unflatten(-1, self.places.shape[3:])

    def _undelayed(
        self, lines: Float[Tensor, "item part 2 chunk token"]
    ) -> Float[Tensor, "item unknown"]:
        """Sum rows and keys over all parts, with the delay of keys undone."""
        parts = lines.flatten(3).unbind(1)
        moved = [
            _delay(part, delay, shift_earlier)
            for part, delay in zip(parts, self.delays, strict=True)
        ]
        return sum(moved[1:], moved[0]).flatten(1)

    def gauges(self) -> Float[Tensor, "item unknown direction"]:
        """Return the directions (a, b, c) in which the map does not change.

        Returns:
            Three directions [item, unknown, direction].
        """
        cell = self.places[:, 0, 0].flatten(1).to(torch.float64)
        difference = torch.arange(self.length, dtype=torch.float64, device=cell.device)
        difference = (difference - (self.cells - 1)).expand(len(cell), -1)
        return gauges(Axes(difference, cell, cell))


@lru_cache(maxsize=8)
def _between(chunks: int, device: torch.device) -> Float[Tensor, "2_chunks 2_chunks"]:
    """Matrix that sums earlier keys for a chunk's rows, and later rows for its keys."""
    earlier = torch.ones(chunks, chunks, dtype=torch.float64, device=device).triu_(1)
    nothing = torch.zeros_like(earlier)
    rows, keys = torch.cat([nothing, earlier.T], -1), torch.cat([earlier, nothing], -1)
    return torch.cat([rows, keys])


def _delay(
    lines: Float[Tensor, "item 2 n"], by: int, shift: Callable[..., Tensor]
) -> Float[Tensor, "item 2 n"]:
    """Delay the values of keys."""
    return torch.stack([lines[:, 0], shift(lines[:, 1], by, axis=-1)], 1) if by else lines


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
    tokens = cell.shape[-1]
    cell, part = (_in_chunks(values).flatten(1) for values in (cell, takes_part.to(torch.float64)))
    delays = (0,) if window is None or window >= tokens else (0, window)
    both = torch.stack([cell, cells - 1 - cell], 1), part[:, None].expand(-1, 2, -1)
    places, taking = (
        torch.stack([_delay(values, delay, shift_later) for delay in delays], 1).unflatten(
            -1, (-1, CHUNK)
        )
        for values in both
    )
    return BinnedPairs(cells, tokens, delays, places, taking)


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
    parts = [
        _causal_product_sums(queries, some_keys, pairs, part)
        for part, (_, _, some_keys) in enumerate(signed_keys(keys, window))
    ]
    return parts[0] if len(parts) == 1 else parts[0] - parts[1]


def _causal_product_sums(
    queries: Tensor, keys: Tensor, pairs: BinnedPairs, part: int
) -> Float[Tensor, "item bin"]:
    (items, tokens, width), cells = queries.shape, pairs.cells
    row_cell, key_place = pairs.places[:, part].flatten(2).unbind(1)
    key_cell = cells - 1 - key_place
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
        # Only now add this chunk's keys to their cells, with one index_add_ for all items.
        if some.stop < tokens:
            joining = some_keys.flatten(0, 1).to(torch.float64)
            held.index_add_(0, (first_cell + columns).flatten(), joining)
    return sums


def _in_chunks(values: Tensor) -> Tensor:
    """Return [item, n] as [item, chunk, token]."""
    return in_chunks(values[..., None], CHUNK)[..., 0]
