"""What comes with the package: loads strictly, says what made it, and does what its scores say."""

from __future__ import annotations

import numpy as np
import pytest

from position_papers.training.trained import recorded_scores, zoo_runs
from repo_interp.analysis.trained_task import trained_task
from repo_interp.checkpoint_files.stored import weight_files
from repo_interp.errors import InputError
from repo_interp.experiments.responses import forced_responses
from repo_interp.models.checkpoints import identify, load_model, load_tokenizer
from repo_interp.shipped import zoo_names, zoo_path, zoo_seeds

ONE_MEGABYTE = 2**20
ANSWERED = [("niah/repo", "256", 1.0), ("reversal/repo", "10", 1.0), ("reversal/repo", "20", 0.9)]
"""Checkpoint, test set, and the share of prompts that it must at least answer."""


def test_other_seeds_are_named_below_the_checkpoint():
    assert zoo_seeds("reversal/repo")[:3] == (0, 1, 2) and zoo_seeds("niah/repo") == (0,)
    path = zoo_path("reversal/repo/seed-1")
    assert [run.seed for run in recorded_scores(path)] == [1]
    load_model(identify(path))
    with pytest.raises(InputError, match="niah/repo"):
        zoo_path("niah/rumour")
    for name in ("reversal/repo/seed-999", "niah/repo/seed-1"):
        with pytest.raises(
            InputError, match=rf"these are: {name.rpartition('/')[0]} \(seed 0\), and "
        ):
            zoo_path(name)


@pytest.mark.parametrize("name", zoo_names())
def test_every_checkpoint_loads_strictly_and_is_small_and_says_what_made_it(name):
    path = zoo_path(name)
    own, checkpoint = recorded_scores(path)[0], identify(path)
    load_model(checkpoint)
    assert load_tokenizer(checkpoint).get_vocab() == trained_task(path).tokenizer().get_vocab()
    assert sum(file.stat().st_size for file in weight_files(path)) < 4 * ONE_MEGABYTE
    assert name.split("/")[0] == own.configuration.task
    assert all("made_with" in line["training"] for line in zoo_runs(path))
    assert all(
        run.steps == own.configuration.steps and run.loss < 5 for run in recorded_scores(path)
    )


@pytest.mark.parametrize(("name", "test_set", "least"), ANSWERED)
def test_checkpoints_answer_fresh_prompts_as_their_scores_say(name, test_set, least):
    task, model = trained_task(zoo_path(name)), load_model(zoo_path(name))
    prompts = task.prompts(20, seed=12345, test_set=test_set)
    share = float(np.mean(task.score(forced_responses(model, task, prompts), prompts)))
    assert share >= least
    assert abs(share - recorded_scores(zoo_path(name))[0].means[test_set]) <= 0.1
