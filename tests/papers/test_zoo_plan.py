"""The plan of the zoo: what is trained and how, that it is what ships, and that it is carried out
whole and resumed.
"""

from __future__ import annotations

import dataclasses
import shutil
import tomllib
from pathlib import Path

import pytest
import torch

from position_papers import PAPERS, paper
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
from position_papers.training.trained import recorded_scores, trained_configuration, zoo_runs
from position_papers.zoo_directory import DIRECTORY
from repo_interp import cli, shipped
from repo_interp.errors import InputError
from repo_interp.models.checkpoints import identify, load_model
from repo_interp.shipped import training_record, zoo_names, zoo_path

RUNS = planned_runs(PLAN)
PLANNED = {run.planned.name for run in RUNS}
LATER = [run for run in planned_runs((*PLAN, *AHEAD)) if run.planned in AHEAD]
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


def test_a_checkpoint_ships_exactly_where_the_plan_says_so():
    assert set(zoo_names()) == {planned.name for planned in PLAN if planned.weights}


def test_what_ships_was_trained_as_the_plan_says_and_says_so():
    free = {
        "checkpoint_every",
        "log_every",
        "score_every",
        "device",
        "deterministic",
        "continue_from",
    }
    """What is kept and told, where, and where the checkpoint that it goes on from stood."""
    recorded = {
        name: {one.seed: one.configuration for one in recorded_scores(DIRECTORY / name)}
        for name in PLANNED
    }
    for run in RUNS:
        shipped, wanted = vars(recorded[run.planned.name][run.seed]), vars(run.configuration)
        assert {name for name in wanted if shipped[name] != wanted[name]} <= free, run.directory
        assert bool(shipped["continue_from"]) is bool(wanted["continue_from"]), run.directory


def test_what_is_ahead_is_not_there_yet():
    """With its records it belongs into PLAN, whose tests hold it to them."""
    assert not {planned.name for planned in PLAN} & {planned.name for planned in AHEAD}
    assert [planned.name for planned in AHEAD if recorded_scores(DIRECTORY / planned.name)] == []


def test_schemes_of_a_task_have_equal_budgets():
    groups = {}
    for run in (*RUNS, *LATER):
        if run.planned.name.endswith("/pretrained"):
            continue
        equal = ("steps", "batch", "learning_rate", "width", "heads", "curriculum")
        budget = [getattr(run.configuration, name) for name in equal]
        options = tuple(sorted(run.planned.fields.get("task_options", {}).items()))
        slowly = run.planned.name.endswith(("_slow", "_50000"))
        groups.setdefault(
            (run.planned.task, options, run.planned.continue_from, slowly), []
        ).append(budget)
    assert all(budget == budgets[0] for budgets in groups.values() for budget in budgets)


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_takes_only_checkpoints_that_are_planned(name):
    """Found: a name that no plan had, so that a figure silently lacked a line."""
    assert set(paper(name).zoo) <= {planned.name for planned in (*PLAN, *AHEAD)}


def test_the_zoos_are_small():
    for zoo, most_bytes, most_files in ((shipped.DIRECTORY, 2e6, 12), (DIRECTORY, 53 * 2**20, 180)):
        files = [file for file in zoo.rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) < most_bytes and len(files) <= most_files


def test_the_registry_says_what_is_there(tmp_path):
    zoo = shutil.copytree(DIRECTORY, tmp_path / "zoo")
    write_registry(zoo)
    assert (zoo / REGISTRY).read_text(encoding="utf-8") == (DIRECTORY / REGISTRY).read_text(
        encoding="utf-8"
    )


def test_every_checkpoint_finds_the_record_of_its_run():
    for run in RUNS:
        if run.seed in run.planned.weights:
            place = zoo_path(run.shipped.as_posix())
            (line,) = zoo_runs(place if run.seed else DIRECTORY / run.planned.name / "seed-0")
            beside = place / "training.toml"
            found = (
                tomllib.loads(beside.read_text(encoding="utf-8"))
                if beside.is_file()
                else training_record(place)
            )
            assert found == line["training"] and found["seed"] == run.seed, run.shipped


def test_a_part_of_the_plan_comes_with_what_it_continues():
    plan = (
        Planned("niah/pretrained", "rope"),
        Planned("niah/repo", "repo", continue_from="niah/pretrained"),
        Planned("reversal/repo", "repo"),
    )
    assert [planned.name for planned in chosen(plan, ["niah/repo"])] == [
        "niah/pretrained",
        "niah/repo",
    ]
    assert [planned.name for planned in chosen(plan, ["reversal"])] == ["reversal/repo"]
    assert chosen(plan, []) == plan
    with pytest.raises(
        InputError, match="niah/r'; give a task, one of niah, reversal, or a TASK/NAME"
    ):
        chosen(plan, ["niah/r"])
    with pytest.raises(InputError, match="continues niah/pretrained, which the plan lacks"):
        planned_runs(plan[1:])


@pytest.mark.usefixtures("forking")
def test_a_plan_is_trained_in_order_resumed_and_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = (
        Planned("reversal/pretrained", "rope", fields=TINY | SMALL_TASK, weights=()),
        Planned("reversal/repo", "repo", (0,), "reversal/pretrained", TINY | SMALL_TASK),
    )
    runs = planned_runs(plan)
    assert [run.planned.name for run in unfinished(runs)] == [
        "reversal/pretrained",
        "reversal/repo",
    ]
    assert make(runs, 1, lambda: None)
    assert not unfinished(runs)
    before = {file: file.stat().st_mtime_ns for file in Path("runs").rglob("*") if file.is_file()}
    assert make(runs, 1, lambda: None)
    assert {
        file: file.stat().st_mtime_ns for file in Path("runs").rglob("*") if file.is_file()
    } == before

    zoo = tmp_path / "zoo"
    (zoo / "reversal" / "repo" / "seed-1").mkdir(parents=True)
    (zoo / "reversal" / "repo" / "stale").write_text("of an earlier one")
    for run in (*runs, *runs):
        install(run, zoo)
    assert not (zoo / "reversal" / "pretrained").exists()
    assert {path.name for path in (zoo / "reversal").iterdir()} == {
        "repo",
        "runs.jsonl",
        *TOKENIZER,
    }
    left = {path.name for path in (zoo / "reversal" / "repo").iterdir()}
    assert left == {"config.json", "model.safetensors", "seed-1"}
    for run in runs:
        (ours,), (theirs,) = recorded_scores(zoo / run.shipped), recorded_scores(run.directory)
        assert dataclasses.replace(ours, weights=theirs.weights) == theirs
        assert (
            trained_configuration(zoo / run.shipped).continue_from
            == run.configuration.continue_from
        )
    checkpoint = identify(zoo / "reversal" / "repo")
    stored, exact = load_model(checkpoint), load_model(runs[-1].directory)
    for name in TOKENIZER:
        assert (zoo / "reversal" / name).read_bytes() == (runs[-1].directory / name).read_bytes()
    for name, weight in exact.named_parameters():
        assert torch.equal(stored.get_parameter(name), weight.to(torch.float16).to(torch.float32))


def test_the_page_of_the_zoo_is_what_the_records_say():
    assert (DIRECTORY / "README.md").read_text(encoding="utf-8") == zoo_page(
        PLAN, AHEAD, DIRECTORY
    ), "stale: repo-interp zoo train --into papers/zoo"


def test_the_command_lists_what_ships(capsys):
    assert cli.main(["zoo"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in zoo_names())


def test_the_command_says_how_far_training_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = next(run for run in RUNS if run.planned.name == "reversal/rope")
    folder = TrainingFolder(run.directory)
    folder.begin(to_toml(run.configuration))
    folder.append({"step": 500, "seconds": 60.0})
    assert cli.main(["zoo", "plan", "reversal"]) == 0
    rows = {
        line.split()[0]: line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("reversal/")
    }
    assert (
        rows["reversal/rope"][1:3] == ["0/3", "500/7,500"]
        and " ".join(rows["reversal/rope"][-2:]) == "14 min"
    )
    assert rows["reversal/nope"][1:] == ["0/3", "0/7,500", "-", "?"]


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
