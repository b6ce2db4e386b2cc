"""What comes with the package: loads strictly, says what made it, and does what its scores say."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest

from position_papers.training.plan import PLAN, Planned, planned_runs
from position_papers.training.trained import recorded_scores, zoo_runs
from position_papers.zoo_directory import DIRECTORY
from repo_interp.analysis.trained_task import trained_task
from repo_interp.checkpoint_files.shipped import training_record, zoo_names, zoo_path, zoo_seeds
from repo_interp.checkpoint_files.stored import weight_files
from repo_interp.errors import InputError
from repo_interp.experiments.responses import forced_responses
from repo_interp.models.checkpoints import identify, load_model, load_tokenizer

RUNS = planned_runs(PLAN)
FREE = {"checkpoint_every", "log_every", "score_every", "device", "deterministic", "continue_from"}
"""What is kept and told, where, and where the checkpoint that it goes on from stood."""


def test_other_seeds_are_named_below_the_checkpoint():
    assert zoo_seeds("reversal/repo")[:3] == (0, 1, 2) and zoo_seeds("niah/repo") == (0,)
    assert [run.seed for run in recorded_scores(zoo_path("reversal/repo/seed-1"))] == [1]
    for name, refused in (
        ("niah/rumour", "niah/repo"),
        ("reversal/repo/seed-999", r"these are: reversal/repo \(seed 0\), and "),
    ):
        with pytest.raises(InputError, match=refused):
            zoo_path(name)


def test_a_checkpoint_ships_exactly_where_the_plan_says_so():
    assert {name: zoo_seeds(name) for name in zoo_names()} == {
        planned.name: planned.weights for planned in PLAN if 0 in planned.weights
    }
    # of what others go on from, other seeds alone
    (start,) = (planned for planned in PLAN if planned.weights and 0 not in planned.weights)
    assert all(zoo_path(f"{start.name}/seed-{seed}").is_dir() for seed in start.weights)
    with pytest.raises(InputError, match=f"no checkpoint '{start.name}/seed-1' is installed"):
        zoo_path(f"{start.name}/seed-1")


@pytest.mark.parametrize("planned", PLAN, ids=lambda planned: planned.name)
def test_what_ships_was_trained_as_the_plan_says_loads_strictly_and_is_small(planned: Planned):
    runs = [run for run in RUNS if run.planned is planned]
    for run, record in zip(runs, recorded_scores(DIRECTORY / planned.name), strict=True):
        shipped, wanted = vars(record.configuration), vars(run.configuration)
        assert {name for name in wanted if shipped[name] != wanted[name]} <= FREE, run.seed
        assert bool(shipped["continue_from"]) is bool(wanted["continue_from"])
        assert (record.seed, record.steps) == (run.seed, wanted["steps"]) and record.loss < 5
        if run.seed not in planned.weights:
            continue
        place = zoo_path(run.shipped.as_posix())
        checkpoint, task = identify(place), trained_task(place)
        load_model(checkpoint)
        assert load_tokenizer(checkpoint).get_vocab() == task.tokenizer().get_vocab()
        assert sum(file.stat().st_size for file in weight_files(place)) < 4 * 2**20
        (line,) = zoo_runs(place if run.seed else DIRECTORY / planned.name / "seed-0")
        beside = place / "training.toml"
        stated = beside.is_file() and tomllib.loads(beside.read_text(encoding="utf-8"))
        assert (stated or training_record(place)) == line["training"]
        assert line["training"]["made_with"] and line["training"]["seed"] == run.seed


@pytest.mark.parametrize(("name", "test_set"), [("niah/repo", "256"), ("reversal/repo", "20")])
def test_checkpoints_answer_fresh_prompts_as_their_scores_say(name, test_set):
    task, model = trained_task(zoo_path(name)), load_model(zoo_path(name))
    prompts = task.prompts(20, seed=12345, test_set=test_set)
    share = float(np.mean(task.score(forced_responses(model, task, prompts), prompts)))
    assert share >= 0.9
    assert abs(share - recorded_scores(zoo_path(name))[0].means[test_set]) <= 0.1
