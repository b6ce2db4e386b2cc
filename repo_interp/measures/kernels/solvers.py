"""Solvers of the three-axis fit: a banded direct one, and conjugate gradients.

Position Generalization, eq. 2, 7 and 8.

**A causal triangle**, exactly, in O(n):

    min over a, b, c of  sum_{0 <= j <= i < n} (W_ij - a_{i-j} - b_i - c_j)^2 + ridge |a, b, c|^2

a: the distance axis, b: the query axis, c: the key axis, as in eq. 2 (eq. 8 has b and c the other
way round). The normal equations need no W, only its diagonal, row and column sums:

    (n-t+ridge) a_t + sum_{i >= t} b_i   + sum_{j <= n-1-t} c_j = sum over the diagonal i-j = t
    (t+1+ridge) b_t + sum_{d <= t} a_d   + sum_{j <= t} c_j     = sum over row t
    (n-t+ridge) c_t + sum_{d <= n-1-t} a_d + sum_{i >= t} b_i   = sum over column t

Every coupling is triangular, so the differences of consecutive equations (a: t minus t+1, b: t
minus t-1, c: t minus t+1) couple only neighbors and t with n-1-t. Ordered by min(t, n-1-t) that is
a banded system: its LU has about 26 n entries and serves every head of every layer. Three
directions leave the fit as it is - the gauges (1, -1, 0), (1, 0, -1), (t, -t, t) - and the ridge
solution has no part in them: it remains after they are projected out, which also removes their
rounding errors, amplified by 1 / ridge in any solve. A ridge below `LEAST_RIDGE` n, by which the system would
be singular, is taken for that: the gauges apart, it changes no more than the eleventh digit. An accelerator has no banded LU worth its
launches: there the system is cut into parts with six unknowns between them, dense blocks of a size
that n hardly changes.

**Any other set of pairs**, by conjugate gradients, diagonally preconditioned, for (A + ridge) x =
s:

    z = r / (diag A + ridge),  p <- z + (r.z / r'.z') p,
    x <- x + (r.z / p.A p) p,  r <- r - (r.z / p.A p) A p

A is positive semi-definite and its null space is known. Nothing of the exact s or x lies in it, but
rounding does, and would come back divided by the ridge: it is projected out of both. A is only ever
applied, never made.

This module knows nothing about attention, heads or prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import sparse
from scipy.sparse.linalg import SuperLU, splu
from torch import Tensor

from repo_interp.runtime.memory import memory_for

LEAST_RIDGE = 1e-12
"""Ridge per token of a triangle, at least."""


class Axes(NamedTuple):
    """Three axes of a fit, or three arrays per distance, per query and per key."""

    distance: Float[Tensor, "... n"]
    query: Float[Tensor, "... n"]
    key: Float[Tensor, "... n"]


def fit_triangle(sums: Axes, ridge: float) -> Axes:
    """Return the axes of the ridge fit of a causal triangle of n tokens.

    The factorization depends on n alone; it is computed on the CPU and kept for the lengths used
    last.

    Args:
        sums: Sums of W over every diagonal, row and column [..., n], float64.
        ridge: Weight of the squared axes.

    Returns:
        Axes of the shapes of `sums`, float64, in units of W, on the same device.

    Raises:
        ValueError: `ridge` is not positive, so that the axes are not determined.
    """
    if not ridge > 0:
        raise ValueError(f"ridge must be positive, got {ridge}")
    tokens, shape = sums.distance.shape[-1], sums.distance.shape[:-1]
    ridge = kept_ridge(tokens, ridge)
    columns = torch.stack(sums, dim=-2).reshape(-1, 3 * tokens).T
    if columns.device.type == "cpu":
        solution = _solve_banded(columns.contiguous().numpy(), ridge)
    else:
        solution = dissect(tokens, ridge, columns.device).solve(columns)
    basis = _gauges(tokens, columns.device)
    # Takes the gauges out, with rounding errors there, which were divided by the ridge
    axes = torch.addmm(solution, basis, basis.T @ solution, alpha=-1).T
    return Axes(*axes.reshape(*shape, 3, tokens).unbind(-2))


def kept_ridge(tokens: int, ridge: float) -> float:
    """Return the ridge, or the least one with which both factorizations keep their digits.

    Args:
        tokens: Number of tokens of the triangle.
        ridge: Weight of the squared axes, positive.

    Returns:
        At least `LEAST_RIDGE` per token.
    """
    return max(ridge, LEAST_RIDGE * tokens)


def _solve_banded(sums: np.ndarray, ridge: float) -> Float[Tensor, "unknown column"]:
    lower_upper, order = _factorize(len(sums) // 3, ridge)
    # Row 3 n of the padded sums is 0: equations at the ends have nothing subtracted
    axes, differences = (
        np.empty_like(sums),
        sums - np.pad(sums, ((0, 1), (0, 0)))[_neighbours(len(sums) // 3)],
    )
    axes[order] = lower_upper.solve(differences[order])
    return torch.from_numpy(axes)


class Dissection(NamedTuple):
    """The system in dense parts with six unknowns between them, for an accelerator."""

    places: Int[Tensor, "entry"]
    """Unknowns, part by part; the last six of a part stand between it and the next."""
    neighbours: Int[Tensor, "entry"]
    back: Int[Tensor, "unknown"]
    rows: Float[Tensor, "part size size_and_12"]
    """The system's rows, with six columns of either neighbor."""
    inverse: Float[Tensor, "part inner inner"]
    to_ends: Float[Tensor, "part 12 inner"]
    from_ends: Float[Tensor, "part inner 12"]
    between: Float[Tensor, "between any"]
    """Of six unknowns at the end of a part and twelve sums, part by part."""

    def solve(self, sums: Float[Tensor, "unknown column"]) -> Float[Tensor, "unknown column"]:
        """Solve the system, with two rounds of refinement, since inverses lose digits.

        Args:
            sums: Right-hand sides [3 n, column].

        Returns:
            Axes [3 n, column].
        """
        padded = torch.nn.functional.pad(sums, (0, 0, 0, 1))
        known = (padded[self.places] - padded[self.neighbours]).unflatten(0, self.rows.shape[:2])
        solved = self._solve(known)
        for _ in range(2):
            windows = _windows(solved.flatten(0, 1), 6, *self.rows.shape[1:])
            solved = solved + self._solve(torch.baddbmm(known, self.rows, windows, alpha=-1))
        return solved.flatten(0, 1)[self.back]

    def _solve(self, known: Float[Tensor, "part size column"]) -> Float[Tensor, "part size column"]:
        inner = self.inverse.shape[-1]
        inside, ends = known[:, :inner], known[:, inner:]
        at_ends = torch.bmm(self.to_ends, inside)
        between = self.between @ torch.cat([ends, at_ends], 1).flatten(0, 1)
        inside = torch.baddbmm(
            torch.bmm(self.inverse, inside),
            self.from_ends,
            _windows(between, 6, 6, 12, after=0),
            alpha=-1,
        )
        return torch.cat([inside, between.unflatten(0, ends.shape[:2])], 1)


def _windows(
    values: Float[Tensor, "entry column"], before: int, step: int, size: int, after: int = 6
) -> Tensor:
    """Stretches [stretch, size, column] of `values` with zeros around them."""
    return torch.nn.functional.pad(values, (0, 0, before, after)).unfold(0, size, step).mT


@lru_cache(maxsize=8)
def dissect(tokens: int, ridge: float, device: torch.device) -> Dissection:
    """Factor the system of a causal triangle for an accelerator.

    Args:
        tokens: Number of tokens n.
        ridge: Weight of the squared axes.
        device: Device of the result.

    Returns:
        The system as dense blocks.
    """
    # On the processor, and kept by length: all layers and heads share it
    system, order = _ordered(tokens, ridge)
    # Parts whose inverses cost as much as the inverse of the unknowns between them.
    # With size 6 k: (3 n / 6 k) (6 k)^3 = (18 n / 6 k)^3 gives k^5 = n^2 / 4
    size, known = 6 * max(2, round((tokens**2 / 4) ** 0.2)), 3 * tokens
    # Six of twelve unknowns are singular but for the ridge
    size = 18 if tokens == 4 else size
    parts = -(-known // size)
    # Six columns of zeros on either side, and ones on the diagonal where the last part is not full.
    padded = sparse.block_diag(
        [
            sparse.csr_array((0, 6)),
            system,
            sparse.eye_array(parts * size - known),
            sparse.csr_array((0, 6)),
        ]
    )
    padded = sparse.csr_array(padded)
    stretches = (
        padded[at : at + size, at : at + size + 12].toarray() for at in range(0, parts * size, size)
    )
    rows = torch.from_numpy(np.stack(list(stretches)))
    inner = size - 6
    inverse = torch.linalg.inv(rows[:, :inner, 6:size])
    from_ends = inverse @ torch.cat([rows[:, :inner, :6], rows[:, :inner, size : size + 6]], -1)
    ends = torch.zeros(parts, 12, inner, dtype=rows.dtype)
    ends[1:, :6, :6], ends[:, 6:] = rows[:-1, inner:, size + 6 :], rows[:, inner:, 6:size]
    # Of both ends of every part, the six before it and the six behind it, in the order of
    # the unknowns between parts.
    place = torch.eye(6 * parts, dtype=rows.dtype)
    place = _windows(place, 6, 6, 12, after=0).flatten(0, 1).T
    schur = (
        torch.block_diag(*rows[:, inner:, size : size + 6])
        - place @ torch.block_diag(*(ends @ from_ends)) @ place.T
    )
    sources = torch.eye(6 * parts, dtype=rows.dtype).unflatten(1, (parts, 6))
    sources = torch.cat([sources, -place.unflatten(1, (parts, 12))], -1)
    between = torch.linalg.inv(schur) @ sources.flatten(1)
    filled = np.full(parts * size - known, known)
    places, neighbours = (
        np.concatenate([order, filled]),
        np.concatenate([_neighbours(tokens)[order], filled]),
    )
    indices = (torch.from_numpy(part) for part in (places, neighbours, order.argsort()))
    made = (*indices, rows, inverse, ends @ inverse, from_ends, between)
    return Dissection(*(part.to(device) for part in made))


def _neighbours(tokens: int) -> np.ndarray:
    """Return the equation subtracted from every equation; 3 n for those at the ends.

    For a and c it is the next equation, for b the previous one.
    """
    steps = np.arange(tokens)
    neighbours = np.concatenate([steps + 1, tokens + steps - 1, 2 * tokens + steps + 1])
    neighbours[[tokens - 1, tokens, -1]] = 3 * tokens
    return neighbours


@lru_cache(maxsize=32)
def _factorize(tokens: int, ridge: float) -> tuple[SuperLU, np.ndarray]:
    system, order = _ordered(tokens, ridge)
    return splu(system, permc_spec="NATURAL"), order


def _ordered(tokens: int, ridge: float) -> tuple[sparse.csc_array, np.ndarray]:
    """Return the differenced system of bandwidth six, and the order of its unknowns."""
    steps = np.arange(tokens)
    # Differencing turns a triangular block of ones into the identity (`same`), or into the identity
    # read backwards (`mirrored`, where the coupling runs up to n-1-t); the diagonal block n_t +
    # ridge becomes bidiagonal.
    to_next = sparse.csr_array(sparse.eye_array(tokens)) - sparse.csr_array(
        sparse.eye_array(tokens, k=1)
    )
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
    # t beside n-1-t, and the three axes of one t side by side: every entry is then near the
    # diagonal, and LU fills in nothing.
    folded = np.minimum(steps, steps[::-1])
    order = np.lexsort((np.tile(steps, 3), np.tile(folded, 3)))
    system = sparse.csc_array(sparse.block_array(blocks))
    return system[order][:, order], order


@lru_cache(maxsize=32)
def _gauges(tokens: int, device: torch.device) -> Float[Tensor, "unknown direction"]:
    """An orthonormal basis of the gauges."""
    steps = torch.arange(tokens, dtype=torch.float64, device="cpu")  # for numpy, below
    # With one token the third gauge is the zero vector
    known = gauges(Axes(steps, steps, steps))[:, : 1 + min(2, tokens)]
    basis, _ = np.linalg.qr(known.numpy())
    return torch.from_numpy(basis).to(device)


def gauges(places: Axes) -> Float[Tensor, "*any unknown direction"]:
    """Return the directions in which the map a_{i-j} + b_i + c_j does not change.

    Args:
        places: Differences of the distances, and places of queries and keys, float64.

    Returns:
        Two constants that cancel, and a slope, with the three axes one after the other.
    """
    distance, query, key = places
    ones = [torch.ones_like(part) for part in places]
    directions = [
        (ones[0], -ones[1], 0 * ones[2]),
        (ones[0], 0 * ones[1], -ones[2]),
        # a_t = t, b_i = -i, c_j = j add up to 0
        (distance, -query, key),
    ]
    return torch.stack([torch.cat(direction, -1) for direction in directions], -1)


MOST_STEPS = 2000


def steps_at_once(device: torch.device) -> tuple[int, int]:
    """Return the number of solver steps before the first convergence check, and between others.

    A check waits for an accelerator, for less than a step takes to launch. Few systems need less
    than ten steps, most less than twenty; those that are there already lose nothing by more.

    Args:
        device: Device of the solver.

    Returns:
        0 and 1 on a CPU, else 8 and 4.
    """
    return (0, 1) if device.type == "cpu" else (8, 4)


def conjugate_gradients(
    apply: Callable[[Float[Tensor, "... unknown"]], Float[Tensor, "... unknown"]],
    sums: Float[Tensor, "... unknown"],
    diagonal: Float[Tensor, "... unknown"],
    null_space: Float[Tensor, "... unknown direction"],
    ridge: float,
    tolerance: float,
) -> Float[Tensor, "... unknown"]:
    """Solve (A + ridge) x = s for every system along the last axis.

    Stops when the residual, in the preconditioner's norm, is below `tolerance` times that of `sums`
    in every system. An unknown that A does not touch (diagonal 0) stays 0.

    Args:
        apply: Function that multiplies A with vectors [..., unknown]; its result is changed.
        sums: Right-hand sides.
        diagonal: Diagonal of A; leading axes broadcast.
        null_space: Directions that A maps to 0; leading axes broadcast.
        ridge: Number that is added to the diagonal of A.
        tolerance: Largest residual, as a share of that of `sums`.

    Returns:
        Solutions of the shape of `sums`, without a part in the null space.

    Raises:
        ArithmeticError: Not converged after `MOST_STEPS` steps.
    """
    touched = diagonal > 0
    null_space = _orthonormal(torch.where(touched[..., None], null_space, 0))
    # 0 where A touches nothing: no step goes there, whatever the residual is
    preconditioner = torch.where(touched, 1 / (diagonal.clamp(min=1) + ridge), 0)
    solution = torch.zeros_like(sums)
    residual = _without(null_space, torch.where(touched, sums, 0))
    step = preconditioner * residual
    tiny = torch.finfo(sums.dtype).tiny
    least = sums.new_full((1, 1, 1), tiny)
    # A squared length; of nothing the least one, which is enough
    norm = _dots(residual, step, least)
    enough = (tolerance**2 * norm).clamp_(min=tiny)
    first, further = steps_at_once(sums.device)
    for number in range(MOST_STEPS + further):
        asked = number >= first and (number - first) % further == 0
        if asked and not bool((norm > enough).any()):
            return _without(null_space, solution)
        applied = apply(step).add_(step, alpha=ridge)
        length = norm / _dots(step, applied, least)
        solution.addcmul_(length, step)
        residual.addcmul_(length, applied, value=-1)
        candidate = preconditioner * residual
        new_norm = _dots(residual, candidate, least)
        step = candidate.addcmul_(new_norm / norm, step)
        norm = new_norm
    raise ArithmeticError(
        f"conjugate gradients did not reach a residual of {tolerance:g} in {MOST_STEPS} steps"
    )


def _dots(
    left: Float[Tensor, "... unknown"],
    right: Float[Tensor, "... unknown"],
    least: Float[Tensor, "1 1 1"],
) -> Float[Tensor, "... 1"]:
    """Products of vectors, at least `least`, since they divide."""
    if not memory_for(left.device, 0):
        # A matrix library takes several times as long for a product with a single vector
        return torch.maximum((left * right).sum(-1, keepdim=True), least[0, 0])
    rows, columns = left.flatten(0, -2)[:, None], right.flatten(0, -2)[..., None]
    return torch.baddbmm(least, rows, columns).view(*left.shape[:-1], 1)


def _orthonormal(
    directions: Float[Tensor, "... unknown direction"],
) -> Float[Tensor, "... unknown direction"]:
    """Return an orthonormal basis of the directions; zeros for dependent columns."""
    scaled = directions / directions.norm(dim=-2, keepdim=True).clamp(
        min=torch.finfo(directions.dtype).tiny
    )
    basis, sizes, _ = torch.linalg.svd(scaled, full_matrices=False)
    # Columns have length 1, so sizes are relative; where gauges coincide one of them is 0
    return basis * (sizes > 1e-9).to(basis.dtype)[..., None, :]


def _without(basis: Tensor, values: Tensor) -> Tensor:
    return values - (basis @ (basis.transpose(-1, -2) @ values[..., None]))[..., 0]
