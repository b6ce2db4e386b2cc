"""The plan of the zoo: what is trained and how, that it is what ships, and that it is carried out
whole and resumed.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from position_papers import named
from position_papers.commands import zoo as zoo_command
from position_papers.training.configuration import to_toml
from position_papers.training.folder import TrainingFolder
from position_papers.training.plan import AHEAD, PLAN, Planned, chosen, planned_runs
from position_papers.training.shipping import (
    REGISTRY,
    TOKENIZER,
    install,
    make,
    unfinished,
    write_registry,
    zoo_page,
)
from position_papers.training.trained import recorded_scores
from position_papers.zoo_directory import DIRECTORY
from repo_interp import cli
from repo_interp.checkpoint_files import shipped
from repo_interp.checkpoint_files.shipped import zoo_names
from repo_interp.errors import InputError
from repo_interp.models.checkpoints import load_model

RUNS = planned_runs(PLAN)
TINY = {
    "width": 16,
    "heads": 2,
    "layers": 1,
    "steps": 2,
    "batch": 2,
    "warm_up": 1,
    "score_prompts": 2,
    "score_every": 0,
}
SMALL_TASK = {"task_options": {"longest": 4, "longest_test": 5, "words": 8, "first_longest": 3}}


def test_what_is_ahead_is_not_there_yet():
    """With its records it belongs into PLAN, whose tests hold it to them."""
    assert not {planned.name for planned in PLAN} & {planned.name for planned in AHEAD}
    assert not any(recorded_scores(DIRECTORY / planned.name) for planned in AHEAD)


def test_schemes_of_a_task_have_equal_budgets():
    groups = {}
    for run in planned_runs((*PLAN, *AHEAD)):
        planned, name = run.planned, run.planned.name
        if not name.endswith("/pretrained"):
            equal = ("steps", "batch", "learning_rate", "width", "heads", "curriculum")
            budget = [getattr(run.configuration, field) for field in equal]
            options = tuple(sorted(planned.fields.get("task_options", {}).items()))
            slowly = name.endswith(("_slow", "_50000"))
            alike = planned.task, options, planned.continue_from, slowly
            assert groups.setdefault(alike, budget) == budget, name


def test_a_paper_takes_only_checkpoints_that_are_planned():
    """Found: a name that no plan had, so that a figure silently lacked a line."""
    planned = {planned.name for planned in (*PLAN, *AHEAD)}
    assert not {name for each in named(()).values() for name in each.zoo} - planned


def test_the_zoos_are_small():
    for zoo, most_bytes, most_files in ((shipped.DIRECTORY, 2e6, 12), (DIRECTORY, 57 * 2**20, 240)):
        files = [file for file in zoo.rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) < most_bytes and len(files) <= most_files


def test_the_registry_and_the_page_are_what_the_records_say(tmp_path):
    """A stale page: repo-interp zoo train --into papers/zoo."""
    zoo = shutil.copytree(DIRECTORY, tmp_path / "zoo")
    write_registry(zoo)
    assert (zoo / REGISTRY).read_bytes() == (DIRECTORY / REGISTRY).read_bytes()
    page = (DIRECTORY / "README.md").read_text(encoding="utf-8")
    assert page == zoo_page(PLAN, AHEAD, DIRECTORY)


def test_a_part_of_the_plan_comes_with_what_it_continues():
    plan = (
        Planned("niah/pretrained", "rope"),
        Planned("niah/repo", "repo", continue_from="niah/pretrained"),
        Planned("reversal/repo", "repo"),
    )
    assert chosen(plan, ["niah/repo"]) == plan[:2]
    later = (*plan[:2], Planned("niah/repo_again", "repo", continue_from="niah/repo"))
    assert chosen(later, ["niah/repo_again"]) == later
    ordered = [run.planned.name for run in planned_runs(reversed(later))]
    assert ordered == ["niah/pretrained", "niah/repo", "niah/repo_again"]
    assert chosen(plan, ["reversal"]) == plan[2:] and chosen(plan, []) == plan
    with pytest.raises(InputError, match="give a task, one of niah, reversal, or a TASK/NAME"):
        chosen(plan, ["niah/r"])
    with pytest.raises(InputError, match="continues niah/pretrained, which the plan lacks"):
        planned_runs(plan[1:])


def times(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}


@pytest.mark.usefixtures("forking")
def test_a_plan_is_trained_in_order_resumed_and_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = (
        Planned("reversal/pretrained", "rope", fields=TINY | SMALL_TASK, weights=()),
        Planned("reversal/repo", "repo", (0,), "reversal/pretrained", TINY | SMALL_TASK),
    )
    runs = planned_runs(plan)
    assert unfinished(runs) == runs
    assert make(runs, 1, lambda: None) and not unfinished(runs)
    before = times(Path("runs"))
    assert make(runs, 1, lambda: None) and times(Path("runs")) == before

    zoo = tmp_path / "zoo"
    (zoo / "reversal" / "repo" / "seed-1").mkdir(parents=True)
    (zoo / "reversal" / "repo" / "stale").write_text("of an earlier one")
    for run in (*runs, *runs):
        install(run, zoo)
    left = {path.relative_to(zoo / "reversal").as_posix() for path in zoo.glob("*/**/*")}
    kept = {"repo", "repo/config.json", "repo/model.safetensors", "repo/seed-1"}
    assert left - {"."} == kept | {"runs.jsonl", *TOKENIZER}
    for run in runs:
        (ours,), (theirs,) = recorded_scores(zoo / run.shipped), recorded_scores(run.directory)
        # losses on the way stand in the zoo's lines alone
        assert ours.log and dataclasses.replace(ours, weights=theirs.weights, log=()) == theirs
    stored, exact = (load_model(at) for at in (zoo / "reversal" / "repo", runs[-1].directory))
    for name in TOKENIZER:
        assert (zoo / "reversal" / name).read_bytes() == (runs[-1].directory / name).read_bytes()
    for name, weight in exact.named_parameters():
        assert torch.equal(stored.get_parameter(name), weight.to(torch.float16).to(torch.float32))


def test_the_command_lists_what_ships_and_says_how_far_training_is(tmp_path, monkeypatch, capsys):
    assert cli.main(["zoo"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in zoo_names())
    monkeypatch.chdir(tmp_path)
    run = next(run for run in RUNS if run.planned.name == "reversal/rope")
    folder = TrainingFolder(run.directory)
    folder.begin(to_toml(run.configuration))
    folder.append({"step": 500, "seconds": 60.0})
    assert cli.main(["zoo", "plan", "reversal"]) == 0
    lines = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    rows = dict(line.split(" ", 1) for line in lines if line.startswith("reversal/"))
    assert rows["reversal/rope"].startswith("0/3 500/7,500 ")
    assert rows["reversal/rope"].endswith(" 14 min")
    assert rows["reversal/nope"] == "0/3 0/7,500 - ?"


@pytest.mark.usefixtures("forking")
def test_the_zoo_is_trained_on_the_device_that_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny = (Planned("reversal/tiny", "rope", fields=TINY | SMALL_TASK | {"device": "cuda"}),)
    monkeypatch.setattr(zoo_command, "PLAN", tiny)
    (run,) = planned_runs(tiny)
    # on another device than it goes on on
    TrainingFolder(run.directory).begin(to_toml(run.configuration))
    assert cli.main(["zoo", "train", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("1 training runs on cpu, 0 of them finished\n")
    assert TrainingFolder(run.directory).is_finished and unfinished(planned_runs(tiny)) == []
