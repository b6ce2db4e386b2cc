"""The two solvers of the fit by three axes (Position Generalization, eq. 2, 7 and 8): exact and banded, and conjugate gradients.

**A causal triangle**, exactly, in O(n):

    min over a, b, c of  sum_{0 <= j <= i < n} (W_ij - a_{i-j} - b_i - c_j)^2 + ridge |a, b, c|^2

a: the distance axis, b: the query axis, c: the key axis, as in eq. 2 (eq. 8 has b and c the other way round). The
normal equations need no W, only its diagonal, row and column sums:

    (n-t+ridge) a_t + sum_{i >= t} b_i   + sum_{j <= n-1-t} c_j = sum over the diagonal i-j = t
    (t+1+ridge) b_t + sum_{d <= t} a_d   + sum_{j <= t} c_j     = sum over row t
    (n-t+ridge) c_t + sum_{d <= n-1-t} a_d + sum_{i >= t} b_i   = sum over column t

Every coupling is triangular, so the differences of consecutive equations (a: t minus t+1, b: t minus t-1, c: t minus
t+1) couple only neighbours and t with n-1-t. Ordered by min(t, n-1-t) that is a banded system: its LU has about 26 n
entries and serves every head of every layer. Three directions leave the fit as it is - the gauges (1, -1, 0),
(1, 0, -1), (t, -t, t) - and the ridge solution has no part in them: it is what remains after they are projected out,
which also removes their rounding errors, amplified by 1 / ridge in any solve.

**Any other set of pairs**, by conjugate gradients, diagonally preconditioned, for (A + ridge) x = s:

    z = r / (diag A + ridge),  p <- z + (r.z / r'.z') p,  x <- x + (r.z / p.A p) p,  r <- r - (r.z / p.A p) A p

A is positive semi-definite and its null space is known. Nothing of the exact s or x lies in it, but rounding does, and
would come back divided by the ridge: it is projected out of both. A is only ever applied, never made.

Knows nothing about attention, heads or prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy import sparse
from scipy.sparse.linalg import SuperLU, splu
from torch import Tensor


class Axes(NamedTuple):
    """The three axes of a fit, or three arrays with one entry per distance, per query and per key."""

    distance: Float[Tensor, "... n"]
    query: Float[Tensor, "... n"]
    key: Float[Tensor, "... n"]


def fit_triangle(sums: Axes, ridge: float) -> Axes:
    """Axes of the ridge fit, from the sums of W over each diagonal, row and column of a triangle of n tokens.

    `sums` are float64 of one shape [..., n], in units of W; so are the axes, on the same device. The factorization
    happens on the CPU and is kept for the lengths met last. Raises ValueError unless `ridge` is positive: without it the
    axes are not determined.
    """
    if not ridge > 0:
        raise ValueError(f"ridge must be positive, got {ridge}")
    tokens = sums.distance.shape[-1]
    columns = torch.stack(sums, dim=-2).reshape(-1, 3 * tokens).T.contiguous().cpu().numpy()
    solution = _without_gauges(_factorize(tokens, ridge).solve(columns))
    axes = torch.from_numpy(np.ascontiguousarray(solution.T)).to(sums.distance.device)
    return Axes(*axes.reshape(*sums.distance.shape[:-1], 3, tokens).unbind(-2))


class _Factorization(NamedTuple):
    lower_upper: SuperLU
    order: np.ndarray

    def solve(self, sums: np.ndarray) -> np.ndarray:
        """Axes [3 n, columns] of sums [3 n, columns]."""
        tokens = len(sums) // 3
        # Right-hand sides of the differenced equations: a_t minus a_{t+1}, b_t minus b_{t-1}, c_t minus c_{t+1}. The equations at
        # the ends (a and c at n - 1, b at 0) have no neighbour to subtract and stay.
        differences = sums.copy()
        differences[: tokens - 1] -= sums[1:tokens]
        differences[tokens + 1 : 2 * tokens] -= sums[tokens : 2 * tokens - 1]
        differences[2 * tokens : -1] -= sums[2 * tokens + 1 :]
        axes = np.empty_like(sums)
        axes[self.order] = self.lower_upper.solve(differences[self.order])
        return axes


@lru_cache(maxsize=32)
def _factorize(tokens: int, ridge: float) -> _Factorization:
    steps = np.arange(tokens)
    # Differencing turns a triangular block of ones into the identity (`same`), or into the identity read backwards (`mirrored`,
    # where the coupling runs up to n-1-t); the diagonal block n_t + ridge becomes bidiagonal.
    to_next = sparse.csr_array(sparse.eye_array(tokens)) - sparse.csr_array(sparse.eye_array(tokens, k=1))
    to_previous = to_next.T
    shrinking = sparse.diags_array(tokens - steps + ridge)
    growing = sparse.diags_array(steps + 1 + ridge)
    same = sparse.eye_array(tokens)
    mirrored = sparse.csr_array((np.ones(tokens), (steps, steps[::-1])), shape=(tokens, tokens))
    blocks = [
        [to_next @ shrinking, same, mirrored],
        [same, to_previous @ growing, same],
        [mirrored, same, to_next @ shrinking],
    ]
    # t beside n-1-t, and the three axes of one t beside each other: every entry is then near the diagonal, and LU fills in nothing.
    folded = np.minimum(steps, steps[::-1])
    order = np.lexsort((np.tile(steps, 3), np.tile(folded, 3)))
    system = sparse.csc_array(sparse.block_array(blocks))
    return _Factorization(splu(system[order][:, order], permc_spec="NATURAL"), order)


def _without_gauges(axes: np.ndarray) -> np.ndarray:
    tokens = len(axes) // 3
    ones, zeros, steps = np.ones(tokens), np.zeros(tokens), np.arange(tokens, dtype=np.float64)
    gauges = [np.concatenate([ones, -ones, zeros]), np.concatenate([ones, zeros, -ones])]
    if tokens > 1:  # with one token the third gauge is the zero vector
        gauges.append(np.concatenate([steps, -steps, steps]))
    basis, _ = np.linalg.qr(np.stack(gauges, axis=1))
    return axes - basis @ (basis.T @ axes)


MOST_STEPS = 2000


def conjugate_gradients(
    apply: Callable[[Float[Tensor, "... unknown"]], Float[Tensor, "... unknown"]],
    sums: Float[Tensor, "... unknown"],
    diagonal: Float[Tensor, "... unknown"],
    null_space: Float[Tensor, "... unknown direction"],
    ridge: float,
    tolerance: float,
) -> Float[Tensor, "... unknown"]:
    """Solution of every system along the last axis; leading axes of A's `diagonal` and `null_space` broadcast.

    Stops when the residual, in the preconditioner's norm, is below `tolerance` times that of `sums` in every
    system. An unknown that A does not touch (diagonal 0) stays 0. Raises ArithmeticError after `MOST_STEPS` steps.
    """
    touched = diagonal > 0
    null_space = _orthonormal(torch.where(touched[..., None], null_space, 0))
    preconditioner = torch.where(touched, 1 / (diagonal.clamp(min=1) + ridge), 0)
    tiny = torch.finfo(sums.dtype).tiny
    solution = torch.zeros_like(sums)
    residual = _without(null_space, torch.where(touched, sums, 0))
    step = preconditioner * residual
    norm = (residual * step).sum(-1, keepdim=True)
    enough = tolerance**2 * norm
    for _ in range(MOST_STEPS):
        if bool((norm <= enough).all()):
            return _without(null_space, solution)
        applied = torch.where(touched, apply(step) + ridge * step, 0)
        length = norm / (step * applied).sum(-1, keepdim=True).clamp(min=tiny)
        solution += length * step
        residual -= length * applied
        candidate = preconditioner * residual
        new_norm = (residual * candidate).sum(-1, keepdim=True)
        step = candidate + new_norm / norm.clamp(min=tiny) * step
        norm = new_norm
    raise ArithmeticError(f"conjugate gradients did not reach a residual of {tolerance:g} in {MOST_STEPS} steps")


def _orthonormal(directions: Float[Tensor, "... unknown direction"]) -> Float[Tensor, "... unknown direction"]:
    """An orthonormal basis of what the directions span; columns of zeros where they depend on each other."""
    scaled = directions / directions.norm(dim=-2, keepdim=True).clamp(min=torch.finfo(directions.dtype).tiny)
    basis, sizes, _ = torch.linalg.svd(scaled, full_matrices=False)
    return basis * (sizes > 1e-9).to(basis.dtype)[..., None, :]


def _without(basis: Tensor, values: Tensor) -> Tensor:
    return values - (basis @ (basis.transpose(-1, -2) @ values[..., None]))[..., 0]
