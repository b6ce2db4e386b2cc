"""R9 on needles that RoPE does not find all of, judged from recorded shares alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from verdicts import notes_of, results_of, verdicts_of

from position_papers.kit.cache import Cache
from position_papers.kit.judge.claims import FAILS, HOLDS, UNDECIDED, UNMEASURABLE
from position_papers.kit.judge.differences import NORMAL_95, paired_seeds
from position_papers.kit.subjects import subject
from position_papers.repo.harder_needles import HARD, HARDER_NEEDLES
from position_papers.repo.options import Options
from position_papers.training.configuration import TrainingConfiguration, replaced, to_toml

ROPE, NOPE = np.array([0.5, 0.7, 0.6, 0.8]), np.zeros(4)
TASK = {"length": 64, "first_length": 64, "longest_test": 128}


@pytest.fixture
def judged(tmp_path):
    """What comes of shares by seed of repo, rope and nope, as runs that left records alone."""

    def of(**shares):
        subjects = []
        for name, values in shares.items():
            place = tmp_path / name
            for seed, share in enumerate(values):
                directory = place if seed == 0 else place / f"seed-{seed}"
                directory.mkdir(parents=True, exist_ok=True)
                scheme = {"repo": "repo@1/3"}.get(name, name)
                fields = {"scheme": scheme, "seed": seed, "task_options": TASK}
                configuration = replaced(TrainingConfiguration(task="niah_keys"), fields)
                (directory / "training.toml").write_text(to_toml(configuration))
                scores = {"metric": "share of the values found", "prompts": 200, "steps": 10}
                scores["test_sets"] = {"64": float(share), "128": 0.0}
                (directory / "scores.json").write_text(json.dumps(scores))
            known = dict(zip(("repo", "rope", "nope"), HARD[:3], strict=True))
            subjects.append(subject(known[name], place))
        return results_of(HARDER_NEEDLES, subjects, Options(), Cache())

    return of


@pytest.mark.parametrize(
    ("above", "outcome"),
    [
        ([0.1, 0.12, 0.08, 0.1], HOLDS),
        ([-0.1, -0.12, -0.08, -0.1], FAILS),
        ([0.1, -0.1, 0.05, -0.02], UNDECIDED),
    ],
)
def test_differences_are_taken_seed_by_seed(judged, above, outcome):
    (result,) = judged(repo=ROPE + above, rope=ROPE, nope=NOPE)
    (found,) = (each for each in verdicts_of(result) if each.claim.label == "R9")
    assert (found.outcome, found.checkpoint) == (outcome, HARD[0])
    assert found.estimate.value == pytest.approx((ROPE + above).mean())
    low, high = paired_seeds(ROPE + np.array(above), ROPE).limits(NORMAL_95)
    assert f"95 %: {low:+.3f} to {high:+.3f}" in notes_of(found)
    (drawing,) = result.drawings
    assert drawing.data.sizes["method"] == 1 and "training ended" in drawing.caption
    assert drawing.data["score"].sel(checkpoint=HARD[0], test_set=64).mean() == pytest.approx(
        float((ROPE + above).mean())
    )
    drawing.figure.draw_without_rendering()


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ({"repo": ROPE, "rope": ROPE}, "no NoPE was given"),
        ({"repo": ROPE, "rope": ROPE, "nope": NOPE + 0.95}, "the task needs none"),
        ({"repo": ROPE, "rope": NOPE + 0.995, "nope": NOPE}, "nothing can be above it"),
        ({"repo": ROPE, "nope": NOPE}, "no checkpoint of RoPE"),
    ],
)
def test_what_decides_nothing_says_why(judged, shares, why):
    (result,) = judged(**shares)
    (found,) = (each for each in verdicts_of(result) if each.checkpoint == HARD[0])
    assert found.outcome == UNMEASURABLE and why in notes_of(found)
