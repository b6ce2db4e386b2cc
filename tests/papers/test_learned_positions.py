"""The gate on learned positions: what they span, what they follow from, and whether anything is
lost without them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.testing import assert_allclose

from position_papers.kit import learned_positions
from position_papers.kit.cache import Cache
from position_papers.kit.learned_positions import LEAST_RISE, PROMPTS, against, from_token, why_not
from position_papers.kit.subjects import subject
from position_papers.repo.options import Options
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.interventions import replaced
from repo_interp.models.checkpoints import load_model

OPTIONS = Options()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """What was measured once."""
    return Cache(tmp_path_factory.mktemp("gate"))


def shipped(name: str):
    return subject(name, zoo_path(name))


def test_the_share_that_a_token_explains_is_that_of_its_means():
    assert from_token(np.array([1.0, 3.0, 1.0, 3.0]), [7, 8, 7, 8]) == pytest.approx(1)
    assert from_token(np.array([1.0, 1.0, 3.0, 3.0]), [7, 8, 7, 8]) == pytest.approx(0)
    assert np.isnan(from_token(np.ones(4), [7, 8, 7, 8]))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("reversal/repo", ""),
        ("reversal/rope", ""),  # learns no positions
        (
            "language/repo",
            "it is not shown that the learned positions are used",
        ),  # found: freezing them all costs 0.003 nats of 3.4
    ],
)
def test_positions_are_judged_only_where_the_model_uses_them(name, reason, kept):
    why = why_not(shipped(name), OPTIONS, kept)
    assert why[:1] == ((reason,) if reason else ()) and bool(why) is bool(reason)


def test_the_rise_is_the_loss_with_every_learned_position_at_zero(kept):
    mine = shipped("reversal/repo")
    data = mine.measured(kept, learned_positions._measure, OPTIONS, positions_of=PROMPTS)
    model = load_model(mine.path)
    prompts = mine.prompts(mine.task.longest, PROMPTS, OPTIONS.seed)[:3]

    def loss(prompt) -> float:
        with torch.inference_mode():
            logs = model(torch.tensor([prompt.tokens])).logits[0].double().log_softmax(-1)
        wanted = [-logs[at - 1, prompt.tokens[at]] for at in mine.task.targets(prompt)]
        return float(np.mean(wanted))

    def index(positions, here):
        return torch.arange(positions.shape[-1]).expand_as(positions)

    plain = [loss(prompt) for prompt in prompts]
    assert_allclose(data["plain"][:3], plain, rtol=1e-4, atol=1e-6)
    for name, positions in (
        ("frozen", lambda positions, here: torch.zeros_like(positions)),
        ("index", index),
    ):
        with replaced(model, positions, layer=list(mine.learned)):
            assert_allclose(data[name][:3], [loss(prompt) for prompt in prompts], rtol=1e-4)
    assert (data["frozen"] - data["plain"]).min() > LEAST_RISE


@pytest.mark.parametrize(
    ("frozen", "index", "reason"),
    [
        (0.5, 0.3, ""),
        (0.5, -LEAST_RISE / 2, ""),
        (0.5, -0.3, "the learned positions do harm"),
        (0.0, 0.3, "it is not shown that the learned positions are used"),
    ],
)
def test_positions_that_the_token_index_betters_are_not_judged(frozen, index, reason):
    plain = np.random.default_rng(0).uniform(2, 3, 12)
    noise = np.random.default_rng(1).normal(0, 1e-3, (2, 12))
    losses = {
        "plain": plain,
        "frozen": plain + frozen + noise[0],
        "index": plain + index + noise[1],
    }
    data = {name: ("prompt", values) for name, values in losses.items()}
    for name, value in (("range", 5.0), ("from_token", 0.4)):
        data[name] = (("layer", "head"), np.full((1, 2), value))
    why = against(xr.Dataset(data, attrs={"length": 8}))
    assert why[:1] == ((reason,) if reason else ())
