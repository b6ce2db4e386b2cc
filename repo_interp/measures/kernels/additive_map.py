"""The map a_{i-j} + b_i + c_j over any set of pairs: its diagonal, row and column sums, in O(n log n).

A pair (i, j) of a query and a key is seen where row i takes part, key j takes part and 0 <= i - j < window. With R
and S the masks of rows and keys, the normal matrix of the fit by three axes, applied to axes a, b, c, is

    diagonal t:  n_t a_t + sum_i R_i b_i S_{i-t} + sum_j R_{j+t} S_j c_j          (t < window)
    row i:       n_i b_i + R_i (sum_t a_t S_{i-t} + sum of S_j c_j over the keys in the window)
    column j:    n_j c_j + S_j (sum_t a_t R_{j+t} + sum of R_i b_i over the rows whose window holds j)

n_t, n_i, n_j count the seen pairs of a diagonal, a row, a column: a handful of correlations, by Fourier transforms.
Knows nothing about attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from scipy.fft import next_fast_len
from torch import Tensor

from repo_interp.measures.kernels.causal_pairs import advanced, delayed
from repo_interp.measures.kernels.triangle_solver import Axes


@dataclass(frozen=True)
class AdditivePairs:
    """Pairs of the rows and keys that take part; build it by `additive_pairs`. Float64."""

    rows: Float[Tensor, "... n"]
    keys: Float[Tensor, "... n"]
    row_spectrum: Tensor
    key_spectrum: Tensor
    window: int | None
    counts: Axes
    """Seen pairs of every distance, row and key."""

    @property
    def total(self) -> Float[Tensor, "..."]:
        """Number of seen pairs."""
        return self.counts.distance.sum(-1)

    def sums(self, axes: Axes) -> Axes:
        """Diagonal, row and column sums of the map of `axes`; leading axes broadcast against the masks'."""
        a, b, c = _first(axes.distance, self.window), axes.query * self.rows, axes.key * self.keys
        spectrum = self._forward(a)
        diagonal = self._back(self._forward(b) * self.key_spectrum.conj() + self.row_spectrum * self._forward(c).conj())
        by_row = self._back(spectrum * self.key_spectrum) + _earlier(c, self.window)
        by_key = self._back(self.row_spectrum * spectrum.conj()) + _later(b, self.window)
        return Axes(
            self.counts.distance * a + _first(diagonal, self.window),
            self.counts.query * b + self.rows * by_row,
            self.counts.key * c + self.keys * by_key,
        )

    def gauges(self) -> Float[Tensor, "n_unknown direction"]:
        """The directions (a, b, c), one after the other in a vector, in which the map does not change."""
        steps = torch.arange(self.rows.shape[-1], dtype=torch.float64, device=self.rows.device)
        ones, zeros = torch.ones_like(steps), torch.zeros_like(steps)
        directions = [(ones, -ones, zeros), (ones, zeros, -ones), (steps, -steps, steps)]
        return torch.stack([torch.cat(direction) for direction in directions], -1)

    def _forward(self, values: Tensor) -> Tensor:
        return torch.fft.rfft(values, n=_length(values.shape[-1]))

    def _back(self, spectrum: Tensor) -> Tensor:
        tokens = self.rows.shape[-1]
        return torch.fft.irfft(spectrum, n=_length(tokens))[..., :tokens]


def additive_pairs(rows: Bool[Tensor, "... n"], keys: Bool[Tensor, "... n"], window: int | None = None) -> AdditivePairs:
    """The pairs of `rows` with the `keys` not later and, with a window, at most window - 1 earlier."""
    row, key = rows.to(torch.float64), keys.to(torch.float64)
    length = _length(row.shape[-1])
    row_spectrum, key_spectrum = torch.fft.rfft(row, n=length), torch.fft.rfft(key, n=length)
    diagonal = torch.fft.irfft(row_spectrum * key_spectrum.conj(), n=length)[..., : row.shape[-1]].round()
    counts = Axes(_first(diagonal, window), row * _earlier(key, window), key * _later(row, window))
    return AdditivePairs(row, key, row_spectrum, key_spectrum, window, counts)


def _length(tokens: int) -> int:
    """A fast transform length at which correlations of `tokens` entries do not wrap around."""
    length = next_fast_len(2 * tokens, real=True)
    assert length is not None
    return length


def _first(values: Tensor, count: int | None) -> Tensor:
    """`values` with zeros from entry `count` on."""
    if count is None or count >= values.shape[-1]:
        return values
    return torch.where(torch.arange(values.shape[-1], device=values.device) < count, values, 0)


def _earlier(values: Tensor, window: int | None) -> Tensor:
    """Sum of the last `window` entries up to each."""
    until = values.cumsum(-1)
    return until if window is None or window >= values.shape[-1] else until - delayed(until, window, axis=-1)


def _later(values: Tensor, window: int | None) -> Tensor:
    """Sum of the next `window` entries from each on."""
    onward = values.flip(-1).cumsum(-1).flip(-1)
    return onward if window is None or window >= values.shape[-1] else onward - advanced(onward, window, axis=-1)
