"""Learning curves: loss and score by step of runs that kept their logs."""

import json
from dataclasses import replace

import numpy as np
from refusals import refused

from position_papers.kit.cache import Cache
from position_papers.kit.experiment import run
from position_papers.kit.learning_curves import LEARNING_CURVES
from position_papers.kit.subjects import subject
from position_papers.training.configuration import TrainingConfiguration, to_toml

LOSSES = {"": [3.0, 2.0, 1.0], "seed-1": [5.0, 4.0, 2.0]}
SCORES = {"": [None, 0.25, 1.0], "seed-1": [None, 0.75, 0.5]}


def trained(directory, scheme, seeds):
    """Records of runs that logged steps 10, 20 and 30, and scored the last two."""
    configuration = TrainingConfiguration(task="flip_flop", scheme=scheme)
    for number, seed in enumerate(seeds):
        place = directory / seed
        place.mkdir(parents=True)
        (place / "training.toml").write_text(to_toml(replace(configuration, seed=number)))
        rows = zip((10, 20, 30), LOSSES[seed], SCORES[seed], strict=True)
        lines = [json.dumps({"step": s, "loss": x, "score": y, "seconds": 1}) for s, x, y in rows]
        (place / "log.jsonl").write_text("".join(line + "\n" for line in lines))
    return subject(directory.name, directory)


def test_a_line_per_checkpoint_over_the_steps_with_a_band_over_seeds(tmp_path):
    kept = trained(tmp_path / "mine", "rope", LOSSES), trained(tmp_path / "cope", "cope", [""])
    (result,) = run(LEARNING_CURVES, kept, None, Cache(), lambda line: None)
    (drawing,) = result.drawings
    assert drawing.name == "learning_curves_flip_flop" and not result.evidence
    loss, score = drawing.figure.axes
    lines = {
        line.get_gid(): np.transpose(line.get_data()).tolist()
        for ax in (loss, score)
        for line in ax.lines
    }
    assert lines == {
        "loss mine": [[10, 4], [20, 3], [30, 1.5]],
        "loss cope": [[10, 3], [20, 2], [30, 1]],
        "score mine": [[20, 0.5], [30, 0.75]],
        "score cope": [[20, 0.25], [30, 1]],
    }
    band = score.collections[0].get_paths()[0].get_extents()
    assert band.extents.tolist() == [20, 0.25, 30, 1]
    assert score.get_ylabel() == drawing.data["score"].attrs["long_name"]
    assert "nat" in loss.get_ylabel()
    (tmp_path / "cope" / "log.jsonl").write_text('{"step": 1}\n')
    with refused("is no log of a training run"):
        list(run(LEARNING_CURVES, kept, None, Cache(), lambda line: None))


def test_checkpoints_without_a_log_have_no_curves(tmp_path):
    kept = trained(tmp_path / "mine", "rope", [""])
    (tmp_path / "mine" / "log.jsonl").unlink()
    assert list(run(LEARNING_CURVES, [kept], None, Cache(), lambda line: None)) == []
