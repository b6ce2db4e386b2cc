"""Many symmetric, singular systems at once: (A + ridge) x = s by conjugate gradients, diagonally preconditioned.

    z = r / (diag A + ridge),  p <- z + (r.z / r'.z') p,  x <- x + (r.z / p.A p) p,  r <- r - (r.z / p.A p) A p

A is positive semi-definite and its null space is known. Nothing of the exact s or x lies in it, but rounding does, and
would come back divided by the ridge: it is projected out of both. A is only ever applied, never made.
Knows nothing about what is solved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

MOST_STEPS = 2000


def solve(
    apply: Callable[[Float[Tensor, "... unknown"]], Float[Tensor, "... unknown"]],
    sums: Float[Tensor, "... unknown"],
    diagonal: Float[Tensor, "... unknown"],
    null_space: Float[Tensor, "... unknown direction"],
    ridge: float,
    tolerance: float,
) -> Float[Tensor, "... unknown"]:
    """Solution of every system along the last axis; leading axes of A's `diagonal` and `null_space` broadcast.

    Stops when the residual, in the preconditioner's norm, is below `tolerance` times that of `sums` in every
    system. An unknown that A does not touch (diagonal 0) stays 0. ArithmeticError after `MOST_STEPS` steps.
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


def _orthonormal(
    directions: Float[Tensor, "... unknown direction"],
) -> Float[Tensor, "... unknown direction"]:
    """An orthonormal basis of what the directions span; columns of zeros where they depend on each other."""
    scaled = directions / directions.norm(dim=-2, keepdim=True).clamp(min=torch.finfo(directions.dtype).tiny)
    basis, sizes, _ = torch.linalg.svd(scaled, full_matrices=False)
    return basis * (sizes > 1e-9).to(basis.dtype)[..., None, :]


def _without(basis: Tensor, values: Tensor) -> Tensor:
    return values - (basis @ (basis.transpose(-1, -2) @ values[..., None]))[..., 0]
