"""R10: what f_phi may see, judged from log perplexities over seeds and from trends of positions."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from verdicts import judged

from position_papers.kit import Scored
from position_papers.kit.judge.claims import FAILS, HOLDS, UNDECIDED, UNMEASURABLE
from position_papers.repo.assigners import ASSIGNERS, R10, R10_INDEX, TOLERANCE, Assigned
from position_papers.training.configuration import TrainingConfiguration, replaced
from position_papers.training.trained import Recorded

LINEAR = np.array([3.50, 3.56, 3.44])


def assigned(scheme: str, log_perplexity, trend=None) -> Assigned:
    """A language model with recorded log perplexities, one per seed."""
    layout = f"{scheme}@1/3"
    configurations = [
        replaced(TrainingConfiguration(task="language"), {"scheme": layout, "seed": seed})
        for seed in range(len(log_perplexity))
    ]
    runs = tuple(
        Recorded(seed, "log perplexity", 64, 10, {"32": float(value)}, configuration)
        for seed, (value, configuration) in enumerate(
            zip(log_perplexity, configurations, strict=True)
        )
    )
    name = f"language/{scheme}"
    scored = Scored(name, layout, configurations[0], 32, "log perplexity", None, runs)
    heads = None if trend is None else xr.DataArray([[trend]], dims=("prompt", "layer", "head"))
    return Assigned(scored, scheme, heads)


def outcomes(*models: Assigned) -> dict:
    return {each.claim: each for each in judged(ASSIGNERS.tabulate(models))}


@pytest.mark.parametrize(
    ("rise", "outcome"),
    [
        ([0.01, 0.011, 0.012], HOLDS),
        ([0.08, 0.081, 0.082], FAILS),
        ([-0.08, -0.081, -0.082], FAILS),
        ([0.0, 0.09, -0.03], UNDECIDED),
    ],
)
def test_comparable_is_within_the_tolerance_on_both_sides_with_the_error_over_seeds(rise, outcome):
    found = outcomes(
        assigned("repo", LINEAR),
        assigned("repo_attention", LINEAR + np.array(rise)),
        assigned("repo_convolution", LINEAR),
    )
    assert found[R10].outcome == outcome
    assert found[R10].estimate.value == pytest.approx(np.exp(LINEAR.mean()))
    assert f"{TOLERANCE:g} nats" in R10.rule.words


def test_an_assigner_that_was_not_given_leaves_the_claim_open_and_names_it():
    found = outcomes(assigned("repo", LINEAR), assigned("repo_attention", LINEAR))
    assert found[R10].outcome == UNMEASURABLE
    assert "RePo" in " ".join(found[R10].notes)
    assert outcomes(assigned("repo", LINEAR)) == {}


def test_positions_follow_the_index_where_half_of_the_heads_do():
    trends = {HOLDS: [0.95, -0.99, 0.2, 0.91], FAILS: [0.95, 0.89, 0.2, -0.3]}
    for outcome, trend in trends.items():
        verdict = outcomes(assigned("repo_index", LINEAR, trend))[R10_INDEX]
        assert verdict.outcome == outcome
        expected = sum(abs(value) >= 0.9 for value in trend) / 4
        assert verdict.estimate.value == pytest.approx(expected)
