"""The map a_{i-j} + b_i + c_j over any set of seen pairs: its sums over diagonals, rows and columns, in O(n log n).

A pair (i, j) of a query and a key is seen where row i takes part, key j takes part and 0 <= i - j < window. With R and S the masks of
rows and keys, the normal matrix of the fit by three axes, applied to axes a, b, c, is a handful of correlations:

    diagonal t:  n_t a_t + sum_i R_i b_i S_{i-t} + sum_j R_{j+t} S_j c_j             (t < window)
    row i:       R_i (n_i b_i + sum_t a_t S_{i-t} + sum of S_j c_j over j in the window)
    column j:    S_j (n_j c_j + sum_t a_t R_{j+t} + sum of R_i b_i over the rows whose window holds j)

n_t, n_i, n_j count the seen pairs of a diagonal, a row, a column. Knows nothing about attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from scipy.fft import next_fast_len
from torch import Tensor

from repo_interp.measures.causal_pairs import advanced, delayed
from repo_interp.measures.triangle_solver import Axes


@dataclass(frozen=True)
class SeenPairs:
    """Pairs of the rows and keys that take part; build it by `seen_pairs`. All arrays are float64."""

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
        """Diagonal, row and column sums of the map; leading axes broadcast against the masks'."""
        a, b, c = axes.distance, axes.query * self.rows, axes.key * self.keys
        distances = a if self.window is None else _first(a, self.window)
        spectrum = self._forward(distances)
        diagonal = self._back(
            self._forward(b) * self.key_spectrum.conj() + self.row_spectrum * self._forward(c).conj()
        )
        if self.window is not None:
            diagonal = _first(diagonal, self.window)
        return Axes(
            torch.where(self.counts.distance > 0, self.counts.distance * a + diagonal, 0),
            self.counts.query * axes.query
            + self.rows * (self._back(spectrum * self.key_spectrum) + _earlier(c, self.window)),
            self.counts.key * axes.key
            + self.keys * (self._back(self.row_spectrum * spectrum.conj()) + _later(b, self.window)),
        )

    def _forward(self, values: Tensor) -> Tensor:
        return torch.fft.rfft(values, n=_length(values.shape[-1]))

    def _back(self, spectrum: Tensor) -> Tensor:
        tokens = self.rows.shape[-1]
        return torch.fft.irfft(spectrum, n=_length(tokens))[..., :tokens]


def seen_pairs(
    rows: Bool[Tensor, "... n"], keys: Bool[Tensor, "... n"], window: int | None = None
) -> SeenPairs:
    """The pairs of `rows` with the `keys` not later than them and, with a window, not further back than window - 1."""
    row, key = rows.to(torch.float64), keys.to(torch.float64)
    length = _length(row.shape[-1])
    row_spectrum, key_spectrum = torch.fft.rfft(row, n=length), torch.fft.rfft(key, n=length)
    diagonal = torch.fft.irfft(row_spectrum * key_spectrum.conj(), n=length)[..., : row.shape[-1]].round()
    if window is not None:
        diagonal = _first(diagonal, window)
    counts = Axes(diagonal, row * _earlier(key, window), key * _later(row, window))
    return SeenPairs(row, key, row_spectrum, key_spectrum, window, counts)


def _length(tokens: int) -> int:
    return int(next_fast_len(2 * tokens, real=True))


def _first(values: Tensor, count: int) -> Tensor:
    """`values` with zeros from entry `count` on."""
    return torch.where(torch.arange(values.shape[-1], device=values.device) < count, values, 0)


def _earlier(values: Tensor, window: int | None) -> Tensor:
    """Sum of the last `window` entries up to each."""
    until = values.cumsum(-1)
    return until if window is None or window >= values.shape[-1] else until - delayed(until, window, axis=-1)


def _later(values: Tensor, window: int | None) -> Tensor:
    """Sum of the next `window` entries from each on."""
    onward = values.flip(-1).cumsum(-1).flip(-1)
    return onward if window is None or window >= values.shape[-1] else onward - advanced(onward, window, axis=-1)
