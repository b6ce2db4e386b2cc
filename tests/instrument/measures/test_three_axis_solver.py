"""The solvers of the three-axis fit: the banded one of a causal triangle, conjugate gradients for
any pairs.
"""

import numpy as np
import pytest
import torch
from attention_inputs import devices
from numpy.testing import assert_allclose
from three_axis_reference import RIDGE, design, ridge_solve

import repo_interp as ri
from repo_interp.measures.kernels import solvers
from repo_interp.measures.kernels.axis_fit import additive_pairs, fit_axes, fit_pairs
from repo_interp.measures.kernels.solvers import Axes, fit_triangle


@pytest.fixture(autouse=True)
def _factored_anew():
    """Clear the solvers kept by length, which would hide faults in how they are made."""
    for kept in (solvers.dissect, solvers._factorize, solvers._gauges):
        kept.cache_clear()


def split(unknowns):
    return Axes(*torch.as_tensor(unknowns).chunk(3, -1))


def joined(axes):
    return torch.cat(axes, -1).cpu().numpy()


def triangle(n):
    every = torch.ones(n, dtype=torch.bool)
    return additive_pairs(every, every)


@pytest.mark.parametrize("ridge", [1e-8, 1e-3, 10.0])
def test_any_ridge(ridge):
    matrix = design(np.tril(np.ones((20, 20), dtype=bool)))
    values = np.random.default_rng(1).normal(size=(len(matrix), 2))
    found = joined(fit_triangle(split((matrix.T @ values).T), ridge)).T
    assert_allclose(found, ridge_solve(matrix, values, ridge), atol=1e-10)


TINY = [5e-324, 1e-100, 1e-20, 1e-14]


@pytest.mark.parametrize("ridge", TINY)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9, 22, 40])
def test_a_ridge_that_rounding_loses_gives_the_least_axes(tokens, ridge):
    """Case: "Factor is exactly singular"; on an accelerator the axes of 4 tokens were 1e6 too large."""
    matrix = design(np.tril(np.ones((tokens, tokens), dtype=bool)))
    values = np.random.default_rng(tokens).normal(size=(len(matrix), 2))
    expected = np.linalg.lstsq(matrix, values, rcond=1e-10)[0]
    sums = split((matrix.T @ values).T)
    assert_allclose(joined(fit_triangle(sums, ridge)).T, expected, atol=1e-9)
    on_a_card = solvers.dissect(tokens, solvers.kept_ridge(tokens, ridge), torch.device("cpu"))
    solved = on_a_card.solve(torch.cat(sums, -1).T)
    basis = solvers._gauges(tokens, solved.device)
    assert_allclose(solved - basis @ (basis.T @ solved), expected, atol=1e-8)


@pytest.mark.parametrize("ridge", TINY)
def test_three_axes_have_a_fit_with_any_ridge(ridge):
    model = ri.zoo("niah/repo")
    for tokens in (1, 2, 9, 40):
        prompt = [range(5, 5 + tokens)]
        tiny, plain = (
            ri.analyze(model, prompt, measures=[ri.measures.ThreeAxis(ridge=some)], experiments=())
            for some in (ridge, 1e-6)
        )
        for name, values in plain["three_axis"].data_vars.items():
            assert_allclose(tiny["three_axis"][name], values, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("tokens", [1, 2, 17, 1024])
def test_parts_with_six_unknowns_between_them_are_the_banded_solution(tokens):
    """What an accelerator solves by, from sums that float32 has rounded."""
    drawn = np.random.default_rng(tokens).normal(size=(2, 3 * tokens))
    sums = Axes(*(part.float().double() for part in triangle(tokens).sums(split(drawn))))
    solved = solvers.dissect(tokens, RIDGE, torch.device("cpu")).solve(torch.cat(sums, -1).T)
    basis, size, _ = np.linalg.svd(triangle(tokens).gauges().numpy(), full_matrices=False)
    basis = basis[:, size > 1e-9]
    found = solved.numpy() - basis @ (basis.T @ solved.numpy())
    expected = joined(fit_triangle(sums, RIDGE))
    assert_allclose(found.T, expected, atol=1e-9 * np.abs(expected).max())


@pytest.mark.parametrize("ridge", [0.0, float("nan")])
def test_no_ridge_is_refused(ridge):
    with pytest.raises(ValueError, match="ridge must be positive"):
        fit_triangle(Axes(*torch.zeros(3, 5, dtype=torch.float64)), ridge)


N = 31
EVERY = np.ones(N, dtype=bool)
HALF, MOST = np.random.default_rng(0).random((2, N)) < [[0.5], [0.8]]
PAIRS = {
    "every": (EVERY, EVERY, None),
    "some rows": (HALF, EVERY, None),
    "holes": (MOST, MOST, None),
    "window": (EVERY, EVERY, 7),
    "holes and a window": (HALF, MOST, 9),
    "itself alone": (EVERY, EVERY, 1),
    "none": (~EVERY, EVERY, None),
}


def fit_of(rows, keys, window, device="cpu"):
    """Pairs, their design matrix, the sums of random values, and the dense solve of these."""
    distance = np.arange(N)[:, None] - np.arange(N)
    seen = (distance >= 0) & (distance < (window or N)) & rows[:, None] & keys
    pairs = additive_pairs(*(torch.as_tensor(mask, device=device) for mask in (rows, keys)), window)
    matrix = design(seen)
    values = 2 + np.random.default_rng(3).normal(size=(len(matrix), 4))
    sums = Axes(*(part.to(device) for part in split((matrix.T @ values).T)))
    return pairs, matrix, sums, ridge_solve(matrix, values)


@devices
@pytest.mark.parametrize("case", PAIRS)
def test_any_pairs_are_fitted_as_by_the_dense_ridge_solve(case, device, monkeypatch):
    pairs, matrix, sums, expected = fit_of(*PAIRS[case], device)
    assert_allclose(joined(pairs.counts), np.diag(matrix.T @ matrix), atol=0)
    assert_allclose(pairs.total.cpu(), len(matrix), atol=0)
    found = joined(fit_pairs(sums, pairs, RIDGE))
    assert_allclose(found.T, expected, atol=1e-8)
    monkeypatch.setattr(solvers, "steps_at_once", lambda device: (8, 4))
    with ri.working_memory(2**31):
        assert_allclose(joined(fit_pairs(sums, pairs, RIDGE)), found, atol=1e-8)


@pytest.mark.parametrize("ridge", TINY)
@pytest.mark.parametrize("case", PAIRS)
def test_any_pairs_have_the_least_axes_where_the_ridge_is_lost(case, ridge):
    """What pairs leave open beside the gauges is 0, and not what the solver happens to leave."""
    pairs, matrix, sums, _ = fit_of(*PAIRS[case])
    expected = np.linalg.pinv(matrix.T @ matrix, rcond=1e-10) @ np.stack(joined(sums), -1)
    assert_allclose(joined(fit_pairs(sums, pairs, ridge)).T, expected, atol=1e-5)


def test_rounding_in_the_null_space_does_not_come_back_divided_by_the_ridge():
    pairs = triangle(30)
    exact = pairs.sums(split(np.random.default_rng(5).normal(size=(1, 90))))
    noisy = exact._replace(distance=exact.distance + 1e-5)
    for solver in (lambda sums: fit_pairs(sums, pairs, RIDGE), lambda s: fit_triangle(s, RIDGE)):
        assert np.abs(joined(solver(noisy)) - joined(solver(exact))).max() < 1e-5


def test_a_prompt_without_tokens_is_left_alone():
    valid = torch.tensor([[False] * 6, [True] * 6])
    axes = fit_axes(Axes(*torch.ones(3, 2, 1, 6, dtype=torch.float64)), valid, None, RIDGE)
    assert_allclose(joined(axes)[0], 0)
    assert np.abs(joined(axes)[1]).max() > 0


def test_a_solve_that_does_not_converge_is_an_error(monkeypatch):
    monkeypatch.setattr(solvers, "MOST_STEPS", 2)
    with pytest.raises(ArithmeticError, match="did not reach a residual of 1e-11 in 2 steps"):
        fit_pairs(split(torch.randn(1, 120, dtype=torch.float64)), triangle(40), RIDGE)
