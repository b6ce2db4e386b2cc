"""ALiBi, KERPLE and FIRE: closed forms, starting values, and real-valued positions."""

import pytest
import torch
from torch.testing import assert_close

from repo_interp.positions.biases import FIRE, ALiBi, KerpleLog, geometric_slopes

BIASES = (ALiBi, KerpleLog, FIRE)


def bias_of(module, positions):
    """Of one head-less row of positions."""
    return module.bias(positions[None, None], positions[None, None])[0]


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_slopes_are_a_geometric_series_that_ends_at_a_256th(heads):
    number = torch.arange(1.0, heads + 1)
    assert_close(geometric_slopes(heads), 2.0 ** (-8 * number / heads))
    with pytest.raises(ValueError, match="got 0 heads"):
        geometric_slopes(0)


def test_slopes_can_be_another_series():
    assert geometric_slopes(4, first=1.0, ratio=0.25).tolist() == [1.0, 1 / 4, 1 / 16, 1 / 64]
    bias = bias_of(ALiBi(2, first=3.0, ratio=0.5), torch.tensor([0.0, 2.0]))
    assert bias.tolist() == [[[0, -6], [-6, 0]], [[0, -3], [-3, 0]]]


def test_kerple_starts_inside_the_ranges_of_its_authors_and_stays_lawful():
    log = KerpleLog(4000)
    scale, rate = log.log_scale.exp(), log.log_rate.exp()
    assert scale.min() >= 0.01 and 1.9 < scale.max() <= 2.0 and abs(scale.mean() - 1.0) < 0.05
    assert rate.min() >= 0.01 and 0.95 < rate.max() <= 1.0 and abs(rate.mean() - 0.5) < 0.03
    with torch.no_grad():
        log.log_scale.fill_(-30.0)
    assert (bias_of(log, torch.arange(5.0)) <= 0).all()


def test_fire_starts_as_published():
    fire = FIRE(12)
    assert fire.curvature.item() == pytest.approx(0.1)
    assert fire.first_threshold * fire.threshold_factor.item() == pytest.approx(512.0)
    assert fire.hidden.weight.shape == (32, 1) and fire.output.weight.shape == (12, 32)


@pytest.mark.parametrize("kind", BIASES)
def test_gradients_reach_real_valued_positions_and_are_finite_at_distance_zero(kind):
    module = kind(4)
    positions = torch.tensor([0.0, 0.0, 1.5, 4.0], requires_grad=True)
    (bias_of(module, positions) * torch.randn(4, 4, 4)).sum().backward()
    assert positions.grad.any()
    for learned in (positions, *module.parameters()):
        assert learned.grad.isfinite().all()


@pytest.mark.parametrize("kind", BIASES)
def test_a_bias_is_made_once_for_prompts_that_share_their_index(kind):
    index = torch.arange(5).expand(3, -1)
    queries, keys = torch.zeros(2, 3, 4, 5, 2)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    assert kind(4)(queries, keys, index, index, visible, 1.0).shape == (1, 4, 5, 5)
