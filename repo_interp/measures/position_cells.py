"""The three-axis fit with a distance axis over learned positions: W_ij ~ a[u_i - u_j] + b_i + c_j,  u = floor(z / width).

z_i - z_j is binned as the difference of the tokens' cells, so that everything is a sum over cells. Chunks of tokens: pairs within one
are gone through; a row's pairs with earlier chunks need only how many keys each cell holds before its chunk,

    sum_{j before chunk} a[u_i - u_j] = sum_m H_m a[u_i - m]       (a convolution, read off at u_i; alike for columns and for the bins)

and the sum of W over a bin needs only the sum of the keys of each cell: q_i . K_m falls into bin u_i - m. Cost O(n (cells + chunk) d) for
the sums, O(n chunk + n / chunk cells log cells) a step of the solver, and as much memory a head.

Knows nothing about how positions came about. Nothing of size n x n or n x cells is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from scipy.fft import next_fast_len
from torch import Tensor

from repo_interp.measures import conjugate_gradient
from repo_interp.measures.axis_fit import pearson

CHUNK = 32
TOLERANCE = 1e-7
"""Of the solver's residual; the correlation's error is of the order of its square."""


@dataclass(frozen=True)
class CellPairs:
    """Causal pairs of the tokens that take part, by the difference of their cells; build it by `cell_pairs`."""

    cell: Int[Tensor, "item chunk token"]
    takes_part: Float[Tensor, "item chunk token"]
    cells: int
    keys_before: Tensor
    """Spectrum of how many keys each cell holds before a chunk [item, chunk, frequency]."""
    rows_after: Tensor
    bin_within: Int[Tensor, "item pair"]
    """Bin of every (row, key) of a chunk; those that are not seen are counted with weight 0."""
    seen_within: Float[Tensor, "item chunk token token"]
    row_counts: Float[Tensor, "item n"]
    column_counts: Float[Tensor, "item n"]

    @property
    def bins(self) -> int:
        """Differences of cells that can occur."""
        return 2 * self.cells - 1

    @property
    def bin_counts(self) -> Float[Tensor, "item bin"]:
        """Seen pairs of every bin."""
        return self._bins(self.takes_part, torch.zeros_like(self.takes_part)).round()

    def sums(
        self, a: Float[Tensor, "item bin"], b: Float[Tensor, "item n"], c: Float[Tensor, "item n"], bin_counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of a[u_i - u_j] + b_i + c_j over every bin, row and column."""
        part = self.takes_part.flatten(1)
        b, c = b * part, c * part
        within = a.gather(-1, self.bin_within).view_as(self.seen_within) * self.seen_within
        rows = (within.sum(-1) + self._read(self.keys_before, a)).flatten(1)
        columns = (within.sum(-2) + self._read(self.rows_after, a.flip(-1))).flatten(1)
        return (
            bin_counts * a + self._bins(b.view_as(self.takes_part), c.view_as(self.takes_part)),
            self.row_counts * b + part * (rows + c.cumsum(-1)),
            self.column_counts * c + part * (columns + b.flip(-1).cumsum(-1).flip(-1)),
        )

    def _bins(self, b: Tensor, c: Tensor) -> Float[Tensor, "item bin"]:
        """sum of b_i + c_j over the pairs of every bin."""
        over_pairs = (b[..., :, None] + c[..., None, :]) * self.seen_within
        within = torch.zeros(len(b), self.bins, dtype=b.dtype, device=b.device)
        within.scatter_add_(-1, self.bin_within, over_pairs.flatten(1))
        spectrum = (self._spectrum(b) * self.keys_before.conj() + self.rows_after * self._spectrum(c).conj()).sum(1)
        around = torch.fft.irfft(spectrum, n=self._length)
        return within + torch.cat([around[..., self._length - self.cells + 1 :], around[..., : self.cells]], -1)

    @property
    def _length(self) -> int:
        return _fast_length(self.cells)

    def _spectrum(self, weights: Float[Tensor, "item chunk token"]) -> Tensor:
        return torch.fft.rfft(_histogram(self.cell, weights, self.cells), n=self._length)

    def _read(self, counts: Tensor, a: Tensor) -> Float[Tensor, "item chunk token"]:
        """sum_m counts_m a[u - m] at the cell u of every token."""
        spread = torch.fft.irfft(counts * torch.fft.rfft(a, n=self._length)[:, None], n=self._length)
        return spread[..., self.cells - 1 : 2 * self.cells - 1].gather(-1, self.cell)


def cell_pairs(cell: Int[Tensor, "item n"], takes_part: Bool[Tensor, "item n"]) -> CellPairs:
    """Pairs of tokens in `cell` 0, 1, ...; n must be a multiple of CHUNK."""
    cells = int(cell.max()) + 1
    cell, weight = cell.unflatten(-1, (-1, CHUNK)), takes_part.to(torch.float64).unflatten(-1, (-1, CHUNK))
    held = _histogram(cell, weight, cells)
    until = held.cumsum(1)
    length = _fast_length(cells)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.float64, device=cell.device).tril()
    return CellPairs(
        cell=cell,
        takes_part=weight,
        cells=cells,
        keys_before=torch.fft.rfft(until - held, n=length),
        rows_after=torch.fft.rfft(until[:, -1:] - until, n=length),
        bin_within=(cell[..., :, None] - cell[..., None, :] + cells - 1).flatten(1),
        seen_within=weight[..., :, None] * weight[..., None, :] * causal,
        row_counts=takes_part * takes_part.to(torch.float64).cumsum(-1),
        column_counts=takes_part * takes_part.to(torch.float64).flip(-1).cumsum(-1).flip(-1),
    )


def bin_sums(
    queries: Float[Tensor, "item n d_head"], keys: Float[Tensor, "item n d_head"], pairs: CellPairs
) -> Float[Tensor, "item bin"]:
    """Sum of q_i . k_j over the pairs of every bin; features of tokens that take no part must be 0. Products in the features' dtype."""
    items, tokens, width = queries.shape
    place = torch.arange(items, device=queries.device)[:, None] * pairs.cells
    held = torch.zeros(items * pairs.cells, width, dtype=torch.float64, device=queries.device)
    sums = torch.zeros(items, pairs.bins, dtype=torch.float64, device=queries.device)
    lower = torch.ones(CHUNK, CHUNK, dtype=queries.dtype, device=queries.device).tril()
    every = torch.arange(pairs.cells - 1, -1, -1, device=queries.device)
    for chunk, (some_queries, some_keys) in enumerate(zip(queries.split(CHUNK, 1), keys.split(CHUNK, 1), strict=True)):
        cell = pairs.cell[:, chunk]
        within = ((some_queries @ some_keys.transpose(-1, -2)) * lower).to(torch.float64)
        bins = cell[..., :, None] - cell[..., None, :] + pairs.cells - 1
        sums.scatter_add_(-1, bins.flatten(1), within.flatten(1))
        crossed = some_queries @ held.view(items, pairs.cells, width).to(queries.dtype).transpose(-1, -2)
        bins = cell[..., :, None] + every
        sums.scatter_add_(-1, bins.flatten(1), crossed.to(torch.float64).flatten(1))
        held.index_add_(0, (place + cell).flatten(), some_keys.flatten(0, 1).to(torch.float64))
    return sums


def _histogram(cell: Tensor, weights: Tensor, cells: int) -> Float[Tensor, "item chunk cell"]:
    counts = torch.zeros(*cell.shape[:-1], cells, dtype=torch.float64, device=cell.device)
    return counts.scatter_add_(-1, cell, weights)


def _fast_length(cells: int) -> int:
    return int(next_fast_len(2 * cells, real=True))
