"""R11: which layers learn their positions, judged from recorded losses and shares of needles."""

from __future__ import annotations

import numpy as np
import pytest
from verdicts import judged

from position_papers.kit import Scored
from position_papers.kit.judge.claims import FAILS, HOLDS, UNDECIDED, UNMEASURABLE
from position_papers.repo.placement import PLACEMENT, R11_FEW, R11_LOWER, TOLERANCE, place_of
from position_papers.training.configuration import TrainingConfiguration, replaced
from position_papers.training.trained import Recorded

SHARES = np.array([0.50, 0.56, 0.44])
LOSSES = np.array([0.01, 0.012, 0.008])


def scored(layout: str, shares=SHARES, losses=LOSSES, layers: int = 4) -> Scored:
    """A model of needles with recorded shares and losses, one per seed."""
    configurations = [
        replaced(
            TrainingConfiguration(task="niah_keys"),
            {"scheme": layout, "seed": seed, "layers": layers},
        )
        for seed in range(len(shares))
    ]
    runs = tuple(
        Recorded(
            seed,
            "share of the values found",
            200,
            10,
            # at the training length all find the same, beyond it as stated
            {"64": 1.0, "128": 0.9, "256": float(share)},
            configuration,
            float(loss),
        )
        for seed, (share, loss, configuration) in enumerate(
            zip(shares, losses, configurations, strict=True)
        )
    )
    return Scored(
        f"niah_keys/{layout}",
        layout,
        configurations[0],
        128,
        "share of the values found",
        None,
        runs,
    )


def outcomes(*models: Scored) -> dict:
    return {each.claim: each for each in judged(PLACEMENT.tabulate(models))}


@pytest.mark.parametrize(
    ("layout", "layers", "place"),
    [
        ("rope", 4, "rope"),
        ("repo@1/3", 4, "upper"),
        ("repo@3", 4, "few"),
        ("repo@2", 4, ""),
        ("repo,repo,rope,rope", 4, "lower"),
        ("repo,repo,repo,rope", 4, ""),
        ("repo", 1, "upper"),
        ("repo@6", 8, "few"),
    ],
)
def test_a_layout_is_placed_by_the_layers_that_learn_positions(layout, layers, place):
    assert place_of(scored(layout, layers=layers)) == place


@pytest.mark.parametrize(
    ("rise", "outcome"),
    [
        ([0.01, 0.012, 0.008], HOLDS),
        ([-0.3, -0.302, -0.298], FAILS),
        ([0.3, -0.3, 0.1], UNDECIDED),
    ],
)
def test_few_layers_are_as_rope_within_the_tolerance_on_both_sides(rise, outcome):
    found = outcomes(scored("rope"), scored("repo@3", SHARES + np.array(rise)))
    assert found[R11_FEW].outcome == outcome
    # the mean over L and 2 L, and not over the shorter length
    assert found[R11_FEW].estimate.value == pytest.approx((0.9 + (SHARES + rise).mean()) / 2)
    assert f"{TOLERANCE:g} less" in R11_FEW.rule.words


@pytest.mark.parametrize(
    ("losses", "outcome"),
    [
        (LOSSES + 0.5, HOLDS),
        (LOSSES - 0.005, FAILS),
        (LOSSES + np.array([2.0, -0.005, 0.0]), UNDECIDED),
    ],
)
def test_lower_layers_are_unstable_where_training_ends_with_more_loss_than_both_rivals(
    losses, outcome
):
    models = scored("rope"), scored("repo@1"), scored("repo,rope,rope,rope", losses=losses)
    assert outcomes(*models)[R11_LOWER].outcome == outcome


def test_a_rival_that_was_not_given_leaves_the_claim_open_and_is_named():
    found = outcomes(scored("repo@3"), scored("repo,rope,rope,rope"), scored("repo@1"))
    assert {each.outcome for each in found.values()} == {UNMEASURABLE}
    assert all("RoPE" in " ".join(each.notes) for each in found.values())
    assert outcomes(scored("rope"), scored("repo@1")) == {}
