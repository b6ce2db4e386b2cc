"""The table of encodings: what the records say, and nothing where there are none."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from places import DOCS

from position_papers.card import encodings
from position_papers.card.columns import Column
from position_papers.card.encodings import (
    as_table,
    cells,
    in_order,
    rows_of,
    taught,
    trainings,
)
from position_papers.card.filling import fill
from position_papers.card.records import FILLED, NINE, records_of
from position_papers.training.trained import read_runs
from position_papers.zoo_directory import DIRECTORY
from repo_interp import installed_points
from repo_interp.checkpoint_files.options import SchemeOptions, options_of
from repo_interp.cli.scheme_files import read_scheme_files
from repo_interp.positions.layouts import named_schemes, parse_layout


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The program that writes the page."""
    specification = importlib.util.spec_from_file_location("docs_encodings", DOCS / "encodings.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_page_and_its_table_are_what_the_records_say(script, capsys):
    assert script.main(["--check"]) == 0, capsys.readouterr().err
    page = (DOCS / "encodings.md").read_text(encoding="utf-8")
    assert "\n1. On reversal, of " in page and "| repo_index |  |" in page


def test_every_filled_cell_has_the_digest_and_the_command_of_its_record():
    table = pd.read_csv(DOCS / "encodings.csv", dtype={"sha256": str})
    lines = {
        hashlib.sha256(line.encode()).hexdigest(): json.loads(line)
        for file in DIRECTORY.rglob("runs.jsonl")
        for line in file.read_text(encoding="utf-8").splitlines()
    }
    filled = table[table["sha256"].notna()]
    assert len(filled) > 100
    row: Any
    for row in filled.itertuples():
        line = lines[row.sha256]
        assert (line["name"], line["training"]["task"], line["seed"]) == (
            *(row.encoding, row.task, row.seed),
        )
        assert line["training"]["made_with"]["command"] == row.command
        assert line["loss"] == pytest.approx(row.loss, rel=1e-5)
    empty = table[table["sha256"].isna()].drop(columns=["encoding", "task", "seed"])
    assert empty.isna().to_numpy().all()


def test_there_are_40_encodings_by_seven_tasks_by_three_seeds():
    found = cells()
    asked = [cell for cell in found if cell.seed in [cell.column.seed(each) for each in (0, 1, 2)]]
    assert len(asked) == 40 * 7 * 3
    assert len(in_order(found)) == sum(cell.run is None for cell in asked)
    assert {cell.seed for cell in asked if cell.column.task == "niah_keys"} == {9, 10, 11}


def test_empty_cells_are_filled_in_the_order_of_what_is_wanted():
    order = [(cell.encoding, cell.column.task, cell.seed) for cell in in_order(cells())]
    places = {each: place for place, each in enumerate(order)}
    language = [place for (_, task, _), place in places.items() if task == "language"]
    assert min(language) > max(place for (_, t, _), place in places.items() if t != "language")
    for one, later in (
        (("hope", "reversal", 0), ("continuous", "reversal", 0)),
        (("fire", "reversal", 2), ("continuous", "reversal", 0)),
        (("repo_alibi", "selective_copy", 0), ("kerple", "reversal", 1)),
        (("continuous", "reversal", 2), ("hope", "counting", 0)),
    ):
        assert one not in places or later not in places or places[one] < places[later]


def test_what_ships_is_what_the_table_would_train(tmp_path, monkeypatch):
    monkeypatch.setattr(installed_points, "_REGISTERED", {})
    read_scheme_files([f"{DOCS / 'nine_schemes.py'}:{name}" for name in NINE])
    for cell in cells():
        if cell.run is None or cell.seed not in [cell.column.seed(each) for each in (0, 1, 2)]:
            continue
        (*_, planned) = trainings(cell, tmp_path)
        shipped, wanted = cell.run.recorded.configuration, planned.configuration
        assert shipped.scheme == wanted.scheme, cell
        useful = options_of(named_schemes(shipped.scheme))
        chosen = [
            {name: each.scheme_options.get(name, getattr(SchemeOptions(), name)) for name in useful}
            for each in (shipped, wanted)
        ]
        assert chosen[0] == chosen[1], cell


def test_every_empty_cell_can_be_trained_in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(installed_points, "_REGISTERED", {})
    read_scheme_files([f"{DOCS / 'nine_schemes.py'}:{name}" for name in NINE])
    empty, places = in_order(cells()), set()
    for cell in empty:
        (*start, planned) = trainings(cell, tmp_path)
        places.add(planned.directory)
        # every start of the table ships
        assert not start
        assert bool(cell.column.start) == bool(planned.configuration.continue_from)
        assert planned.configuration.seed == cell.seed
        parse_layout(planned.configuration.scheme, planned.configuration.layers)
    assert len(places) == len(empty)


def test_a_difference_is_taught_where_it_is_decided_after_holms_correction():
    found = {each.task: each for each in taught(rows_of())}
    reversal = found["reversal"]
    assert {"repo", "alibi"} <= set(reversal.decided) <= set(reversal.tested)
    # at 5 % alone; not beside five others
    nope = reversal.tested["nope"]
    assert nope.limits[0] > 0 and nope.p_value < 0.05 and "nope" not in reversal.decided
    p_values = sorted(one.p_value for one in reversal.tested.values())
    wanted = 0
    while wanted < len(p_values) and p_values[wanted] * (len(p_values) - wanted) < 0.05:
        wanted += 1
    assert len(reversal.decided) == wanted
    # RoPE has not learned copying
    assert not found["copying"].tested
    assert "rope" not in reversal.tested
    # one seed decides nothing, though RoPE's three of selective_copy are all at 0
    seeds = {name: len(row.runs) for name, row in rows_of()["selective_copy"].items()}
    assert "repo" in seeds and {"cope", "selective_rope"} <= set(found["selective_copy"].tested)
    assert all(seeds[name] > 1 for name in found["selective_copy"].tested)


TINY = Column(
    "reversal",
    ("4",),
    ("5",),
    fields={
        **{"layers": 1, "width": 16, "heads": 2, "steps": 2, "batch": 2, "warm_up": 1},
        **{"log_every": 1, "score_prompts": 4},
        "task_options": {"first_longest": 2, "longest": 4, "longest_test": 5},
    },
)


@pytest.mark.usefixtures("forking")
def test_a_scheme_of_the_file_fills_a_cell_with_the_digest_of_its_source(tmp_path, monkeypatch):
    monkeypatch.setattr(installed_points, "_REGISTERED", {})
    monkeypatch.setattr(encodings, "COLUMNS", {"reversal": TINY})
    monkeypatch.setattr(encodings, "known_encodings", lambda: ("harope",))
    file = DOCS / "nine_schemes.py"
    (cell, *_) = in_order(cells(tmp_path))
    assert fill([cell], tmp_path / "runs", zoo=tmp_path, scheme_files=[f"{file}:harope"])
    (run,) = records_of(tmp_path, "reversal")["harope"]
    assert run.recorded.configuration.scheme == "harope" and np.isfinite(run.recorded.loss)
    stated = json.loads(run.made_with["functions"])["harope"]
    assert stated["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.usefixtures("forking")
def test_a_filled_cell_is_recorded_at_once_and_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.setattr(encodings, "COLUMNS", {"reversal": TINY})
    monkeypatch.setattr(encodings, "known_encodings", lambda: ("rope", "nope"))
    zoo, out, seen = tmp_path / "zoo", tmp_path / "runs", []
    empty = in_order(cells(zoo))
    assert [(cell.encoding, cell.seed) for cell in empty] == [
        *(("rope", 0), ("nope", 0), ("rope", 1), ("nope", 1), ("rope", 2), ("nope", 2)),
    ]
    steps = []
    assert fill(
        *(empty[:2], out, 2),
        zoo=zoo,
        on_record=seen.append,
        on_step=lambda cell, done, total: steps.append((cell, total)),
    )
    assert ("rope on reversal, seed 0", 2) in steps
    assert sorted(cell.encoding for cell in seen) == ["nope", "rope"]
    file = zoo / FILLED / "reversal/runs.jsonl"
    assert [(line["name"], line["seed"]) for line in read_runs(file)] == [("nope", 0), ("rope", 0)]
    table: Any = as_table(cells(zoo)).set_index(["encoding", "task", "seed"])
    assert table["sha256"].notna().sum() == 2 and np.isfinite(table["loss"].iloc[0])
    for name in ("rope", "nope"):  # of two encodings with one task and seed, each has its own run
        (run,) = records_of(zoo, "reversal")[name]
        assert run.recorded.configuration.scheme == name
    (run,) = records_of(zoo, "reversal")["rope"]
    assert table.loc[("rope", "reversal", 0), "date"] == run.date != ""
    assert run.made_with["command"] == "python docs/encodings.py --fill"
    # scores of single prompts and losses on the way are in the record
    recorded = run.recorded
    assert {name: values.mean() for name, values in recorded.by_prompt.items()} == recorded.means
    assert all(len(values) == recorded.prompts == 4 for values in recorded.by_prompt.values())
    assert [step for step, _ in recorded.log] == [1, 2]
    assert recorded.log[-1][1] == pytest.approx(recorded.loss, rel=1e-3)
    # the record is lost, and the training is not
    before = sorted(path.stat().st_mtime_ns for path in out.rglob("model.safetensors"))
    file.unlink()
    assert fill(in_order(cells(zoo))[:2], out, zoo=zoo)
    assert len(read_runs(file)) == 2
    assert before == sorted(path.stat().st_mtime_ns for path in out.rglob("model.safetensors"))
    assert in_order(cells(zoo))[0].seed == 1
