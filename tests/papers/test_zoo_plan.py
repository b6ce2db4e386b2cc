"""The plan of the zoo: what is trained and how, that it is what ships, and that it is carried out whole and resumed."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from position_papers.catalogue import PAPERS, paper
from position_papers.kit.recorded_scores import recorded_scores
from position_papers.training.configuration import TrainingConfiguration, to_toml
from position_papers.training.folder import TrainingFolder
from position_papers.training.plan import AHEAD, PLAN, Planned, chosen, planned_runs
from position_papers.training.shipping import command, install, make, unfinished, zoo_page
from position_papers.training.trained import trained_configuration
from position_papers.zoo import zoo_entry, zoo_path
from repo_interp import cli
from repo_interp.errors import InputError
from repo_interp.models.checkpoints import identify, load_model
from repo_interp.shipped import zoo_names

RUNS = planned_runs(PLAN)
LATER = [run for run in planned_runs((*PLAN, *AHEAD)) if run.planned in AHEAD]
TINY = {"width": 16, "heads": 2, "layers": 1, "steps": 2, "batch": 2, "warm_up": 1, "score_prompts": 2, "score_every": 0}
SMALL_TASK = {"task_options": {"longest": 4, "longest_test": 5, "words": 8, "first_longest": 3}}


def test_a_checkpoint_ships_exactly_where_the_plan_says_so():
    assert set(zoo_names()) == {planned.name for planned in PLAN if planned.weights}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.planned.name}-{run.seed}")
def test_what_ships_was_trained_as_the_plan_says_and_says_so(run):
    recorded = {one.seed: one for one in recorded_scores(zoo_path_or_records(run.planned.name))}
    shipped = recorded[run.seed].configuration
    for name in (field.name for field in dataclasses.fields(TrainingConfiguration)):
        if name == "continue_from":  # where it stood when it was trained
            assert bool(shipped.continue_from) is bool(run.configuration.continue_from)
        elif name not in ("checkpoint_every", "log_every", "score_every"):  # what is kept and told on the way decides no byte
            assert getattr(shipped, name) == getattr(run.configuration, name), name


def test_what_is_ahead_is_not_there_yet():
    """With its records it belongs into PLAN, whose tests hold it to them."""
    assert not {planned.name for planned in PLAN} & {planned.name for planned in AHEAD}
    assert [planned.name for planned in AHEAD if zoo_path_or_records(planned.name).exists()] == []


@pytest.mark.parametrize("run", [*RUNS, *LATER], ids=lambda run: f"{run.planned.name}-{run.seed}")
def test_the_command_of_a_run_gives_its_configuration(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where nothing is trained yet
    assert configuration_of(command(run)) == run.configuration


def test_schemes_of_a_task_have_equal_budgets():
    groups = {}
    for run in (*RUNS, *LATER):
        if run.planned.name.endswith("/pretrained"):
            continue
        budget = [
            getattr(run.configuration, name) for name in ("steps", "batch", "learning_rate", "width", "heads", "curriculum")
        ]
        options = tuple(sorted(run.planned.fields.get("task_options", {}).items()))
        slowly = run.planned.name.endswith("_slow")
        groups.setdefault((run.planned.task, options, run.planned.continue_from, slowly), []).append(budget)
    assert all(budget == budgets[0] for budgets in groups.values() for budget in budgets)


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_takes_only_checkpoints_that_are_planned(name):
    """Found: a name that no plan had, so that a figure silently lacked a line."""
    assert set(paper(name).zoo) <= {planned.name for planned in (*PLAN, *AHEAD)}


def test_the_zoo_is_small():
    zoo = zoo_path("niah/repo").parent.parent
    size = sum(file.stat().st_size for file in zoo.rglob("*") if file.is_file())
    assert size < 94e6, "with the adapters' 13 MB, a package index takes wheels of 100 MB"
    assert max(zoo_entry(name).bytes for name in zoo_names()) < 2.5e6


def test_a_part_of_the_plan_comes_with_what_it_continues():
    plan = (
        Planned("niah/pretrained", "rope"),
        Planned("niah/repo", "repo", continue_from="niah/pretrained"),
        Planned("reversal/repo", "repo"),
    )
    assert [planned.name for planned in chosen(plan, ["niah/repo"])] == ["niah/pretrained", "niah/repo"]
    assert [planned.name for planned in chosen(plan, ["reversal"])] == ["reversal/repo"]
    assert chosen(plan, []) == plan
    with pytest.raises(InputError, match="niah/r'; give a task, one of niah, reversal, or a TASK/NAME"):
        chosen(plan, ["niah/r"])
    with pytest.raises(InputError, match="continues niah/pretrained, which the plan lacks"):
        planned_runs(plan[1:])


def test_a_plan_is_trained_in_order_resumed_and_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = (
        Planned("reversal/pretrained", "rope", fields=TINY | SMALL_TASK, weights=()),
        Planned("reversal/repo", "repo", (0,), "reversal/pretrained", TINY | SMALL_TASK),
    )
    runs = planned_runs(plan)
    assert [run.planned.name for run in unfinished(runs)] == ["reversal/pretrained", "reversal/repo"]
    assert make(runs, 1, lambda: None)
    assert not unfinished(runs)
    before = {file: file.stat().st_mtime_ns for file in Path("runs").rglob("*") if file.is_file()}
    assert make(runs, 1, lambda: None)
    assert {file: file.stat().st_mtime_ns for file in Path("runs").rglob("*") if file.is_file()} == before

    zoo = tmp_path / "zoo"
    (zoo / "reversal" / "repo" / "seed-1").mkdir(parents=True)
    (zoo / "reversal" / "repo" / "stale").write_text("of an earlier one")
    for run in runs:
        install(run, zoo)
    load_model(identify(zoo / "reversal" / "repo"))
    assert {path.name for path in (zoo / "reversal" / "pretrained").iterdir()} == {"training.toml", "log.jsonl", "scores.json"}
    assert (zoo / "reversal" / "repo" / "seed-1").is_dir() and not (zoo / "reversal" / "repo" / "stale").exists()
    assert trained_configuration(zoo / "reversal" / "repo").continue_from == "runs/zoo/reversal/pretrained"
    assert sorted(path.name for path in (zoo / "reversal").iterdir()) == ["pretrained", "repo"]


def test_the_page_of_the_zoo_is_what_the_records_say():
    zoo = zoo_path("niah/repo").parent.parent
    assert (zoo / "README.md").read_text(encoding="utf-8") == zoo_page(PLAN, AHEAD, zoo), (
        "stale: repo-interp zoo train --into repo_interp/zoo"
    )


def test_the_command_lists_what_ships(capsys):
    assert cli.main(["zoo"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in zoo_names())
    assert cli.main(["zoo", "list", "no/such"]) == 2
    assert "no checkpoint no/such comes with the package; these do: " in capsys.readouterr().err
    assert cli.main(["zoo", "train", "no/such"]) == 2
    assert "give a task, one of" in capsys.readouterr().err


def test_the_command_says_how_far_training_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = next(run for run in RUNS if run.planned.name == "reversal/rope")
    folder = TrainingFolder(run.directory)
    folder.begin(to_toml(run.configuration))
    folder.append({"step": 500, "seconds": 60.0})
    assert cli.main(["zoo", "plan", "reversal"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("reversal/")}
    assert rows["reversal/rope"][1:3] == ["0/3", "500/7,500"] and " ".join(rows["reversal/rope"][-2:]) == "14 min"
    assert rows["reversal/nope"][1:] == ["0/3", "0/7,500", "-", "?"]


def zoo_path_or_records(name: str) -> Path:
    """The directory of a planned checkpoint in the package, with weights or without."""
    return zoo_path("niah/repo").parent.parent / name


def configuration_of(text: str) -> TrainingConfiguration:
    """What `repo-interp train ...` would train, without training it."""
    import argparse

    from position_papers.commands import train

    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return train._runs(parser.parse_args(shlex.split(text)[2:]))[0][0]
