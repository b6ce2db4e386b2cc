"""The solvers of the three-axis fit: the banded one of a causal triangle, conjugate gradients for
any pairs.
"""

import numpy as np
import pytest
import torch
from attention_inputs import devices
from numpy.testing import assert_allclose
from three_axis_reference import RIDGE, design, ridge_solve

from repo_interp.measures.kernels import solvers
from repo_interp.measures.kernels.axis_fit import additive_pairs, fit_axes, fit_pairs
from repo_interp.measures.kernels.solvers import Axes, fit_triangle


def triangle(n):
    return np.tril(np.ones((n, n), dtype=bool))


def split(unknowns):
    return Axes(*torch.as_tensor(unknowns).chunk(3, -1))


def joined(axes):
    return torch.cat(axes, -1).cpu().numpy()


def pairs_mask(rows, keys, window):
    distance = np.arange(len(rows))[:, None] - np.arange(len(rows))
    seen = (distance >= 0) & rows[:, None] & keys
    return seen if window is None else seen & (distance < window)


def some_pairs(n=31, seed=0):
    """(rows, keys, window): everything, some rows only, holes, windows, both."""
    rng = np.random.default_rng(seed)
    every, half, most = np.ones(n, dtype=bool), rng.random(n) < 0.5, rng.random(n) < 0.8
    return [
        (every, every, None),
        (half, every, None),
        (most, most, None),
        (every, every, 7),
        (half, most, 9),
        (every, every, 1),
        (np.zeros(n, dtype=bool), every, None),
    ]


@pytest.mark.parametrize("ridge", [1e-8, 1e-3, 10.0])
def test_any_ridge(ridge):
    matrix = design(triangle(20))
    values = np.random.default_rng(1).normal(size=(len(matrix), 2))
    found = joined(fit_triangle(split((matrix.T @ values).T), ridge)).T
    assert_allclose(found, ridge_solve(matrix, values, ridge), atol=1e-10)


@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 200, 1024])
def test_parts_with_six_unknowns_between_them_are_the_banded_solution(tokens):
    """What an accelerator solves by, from sums that float32 has rounded."""
    drawn = torch.randn(
        2, 3, tokens, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64
    )
    every = torch.ones(tokens, dtype=torch.bool)
    sums = Axes(
        *(
            part.float().double()
            for part in additive_pairs(every, every).sums(Axes(*drawn.unbind(1)))
        )
    )
    solved, expected = (
        solvers.dissect(tokens, RIDGE, torch.device("cpu")).solve(torch.cat(sums, -1).T),
        joined(fit_triangle(sums, RIDGE)),
    )
    gauges = additive_pairs(every, every).gauges().numpy()
    basis, size, _ = np.linalg.svd(gauges, full_matrices=False)
    basis = basis[:, size > 1e-9]
    found = solved.numpy() - basis @ (basis.T @ solved.numpy())
    assert_allclose(found.T, expected, atol=1e-9 * np.abs(expected).max())


def test_a_solution_does_not_depend_on_how_often_it_is_asked_whether_it_is_there(monkeypatch):
    rows, keys, window = some_pairs()[2]
    matrix = design(pairs_mask(rows, keys, window))
    sums = split((matrix.T @ np.random.default_rng(3).normal(size=(len(matrix), 2))).T)
    pairs = additive_pairs(torch.as_tensor(rows), torch.as_tensor(keys), window)
    expected = joined(fit_pairs(sums, pairs, RIDGE))
    monkeypatch.setattr(solvers, "steps_at_once", lambda device: 16)
    assert_allclose(joined(fit_pairs(sums, pairs, RIDGE)), expected, atol=0)


@pytest.mark.parametrize("ridge", [0.0, -1.0, float("nan")])
def test_no_ridge_is_refused(ridge):
    with pytest.raises(ValueError, match="ridge must be positive"):
        fit_triangle(Axes(*torch.zeros(3, 5, dtype=torch.float64)), ridge)


@pytest.mark.parametrize("case", range(7))
def test_sums_of_a_map_are_the_normal_matrix(case):
    rows, keys, window = some_pairs()[case]
    matrix = design(pairs_mask(rows, keys, window))
    pairs = additive_pairs(torch.as_tensor(rows), torch.as_tensor(keys), window)
    axes = np.random.default_rng(2).normal(size=(2, matrix.shape[1]))
    assert_allclose(joined(pairs.sums(split(axes))), axes @ matrix.T @ matrix, atol=1e-12)
    assert_allclose(joined(pairs.counts), np.diag(matrix.T @ matrix), atol=0)
    assert_allclose(pairs.total, len(matrix), atol=0)
    assert_allclose(matrix @ pairs.gauges().numpy(), 0, atol=1e-12)


@devices
@pytest.mark.parametrize("case", range(7))
def test_conjugate_gradients_are_the_dense_ridge_solve(case, device):
    rows, keys, window = some_pairs()[case]
    matrix = design(pairs_mask(rows, keys, window))
    values = 2 + np.random.default_rng(3).normal(size=(len(matrix), 4))
    pairs = additive_pairs(
        torch.as_tensor(rows, device=device), torch.as_tensor(keys, device=device), window
    )
    sums = split((matrix.T @ values).T)
    found = joined(fit_pairs(Axes(*(part.to(device) for part in sums)), pairs, RIDGE)).T
    expected = ridge_solve(matrix, values)
    assert_allclose(matrix @ found, matrix @ expected, atol=1e-8)
    assert_allclose(found, expected, atol=1e-8)


def test_rounding_in_the_null_space_does_not_come_back_divided_by_the_ridge():
    n = 30
    every = torch.ones(1, n, dtype=torch.bool)
    pairs = additive_pairs(every, every)
    axes = split(np.random.default_rng(5).normal(size=(1, 3 * n)))
    exact = pairs.sums(axes)
    noisy = Axes(exact.distance + 1e-5, exact.query, exact.key)
    for solver in (
        lambda sums: fit_pairs(sums, pairs, RIDGE),
        lambda sums: fit_triangle(sums, RIDGE),
    ):
        assert np.abs(joined(solver(noisy)) - joined(solver(exact))).max() < 1e-5


def test_a_prompt_without_tokens_is_left_alone():
    valid = torch.tensor([[False] * 6, [True] * 6])
    axes = fit_axes(Axes(*torch.ones(3, 2, 1, 6, dtype=torch.float64)), valid, None, RIDGE)
    assert_allclose(joined(axes)[0], 0)
    assert np.abs(joined(axes)[1]).max() > 0


def test_a_solve_that_does_not_converge_is_an_error(monkeypatch):
    monkeypatch.setattr(solvers, "MOST_STEPS", 2)
    every = torch.ones(1, 40, dtype=torch.bool)
    with pytest.raises(ArithmeticError, match="did not reach a residual of 1e-11 in 2 steps"):
        fit_pairs(
            Axes(*torch.randn(3, 1, 40, dtype=torch.float64)), additive_pairs(every, every), RIDGE
        )
