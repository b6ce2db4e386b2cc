"""Parts run in processes of their own and go to one table; the parts of the cost have the rows that
a page needs.

No time is judged.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from attention_inputs import random_inputs

from benchmarks import cost, outputs, peers, robustness, running
from benchmarks.running import cost as cost_of
from benchmarks.running import time_command
from repo_interp.measures.maps import Maps
from repo_interp.shipped import zoo_path

GIVEN = Namespace()
COLUMNS = ("what", "cpu_seconds", "note")


def written(given: Namespace, note: str):
    """A part that says in which process it ran."""
    yield {"what": "a", "cpu_seconds": 0.5, "note": f"{note} | {os.getpid() != given.parent}"}


def failing(given: Namespace):
    """A part that fails."""
    raise RuntimeError("no such thing")


def killed(given: Namespace):
    """A part whose process is killed, as for lack of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    yield {}


def run(monkeypatch, table: Path, parts, *words: str) -> list[running.Row]:
    """Run parts of this file; a fork does not import torch again, as the start of every real part
    does.
    """
    monkeypatch.setattr(
        running, "get_context", lambda real: get_context("fork" if real == "spawn" else None)
    )
    parser = ArgumentParser()
    parser.add_argument("--parent", type=int, default=os.getpid())
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return running.run(parser, parts, COLUMNS, table, lambda file, frame: None, by_name=("long",))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_parts_run_in_processes_of_their_own_and_replace_their_rows(monkeypatch, tmp_path, capsys):
    table = tmp_path / "new" / "table.csv"
    parts = {name: partial(written, note=name) for name in ("b/1", "b/10", "a", "long")}
    (row,) = run(monkeypatch, table, parts, "b/1")
    assert row["note"] == "b/1 | True"
    before = pandas.read_csv(table)
    parts["b/1"] = partial(written, note="again")
    run(monkeypatch, table, parts, "a", "b/1")
    after = pandas.read_csv(table)
    assert list(before["part"]) == ["b/1"], "a section is a whole word"
    assert list(after["part"]) == ["b/1", "a"] and list(after["note"]) == [
        "again | True",
        "a | True",
    ], "in the order of the parts"
    assert after["with"].str.contains(f"torch {torch.__version__}", regex=False).all()
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, table, parts, "c")
    assert (
        end.value.code == 2
        and "there is no part 'c'; there are b/1, b/10, a, long" in capsys.readouterr().err
    )


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_part_that_fails_or_is_killed_is_a_line_and_costs_the_others_nothing(
    monkeypatch, tmp_path
):
    parts = {
        "failing": failing,
        "killed": killed,
        "fine": partial(written, note="x"),
        "long": failing,
    }
    with pytest.raises(
        SystemExit,
        match=r"^failing: RuntimeError: no such thing\nkilled: BrokenProcessPool: [^\n]*$",
    ):
        run(monkeypatch, tmp_path / "table.csv", parts)
    assert list(pandas.read_csv(tmp_path / "table.csv")["part"]) == ["fine"]


def test_ratios_are_over_the_row_beside_of_the_same_part():
    # as an earlier table
    columns = ["part", *(name for name in cost.COLUMNS if name != "operators"), "with"]
    lines = [
        ("a", "forward pass", None, 2.0, 4.0),
        ("b", "forward pass", None, 8.0, 4.0),
        ("b", "all", "forward pass", 2.0, 8.0),
    ]
    rows = [
        dict(zip(("part", "what", "beside", "cpu_seconds", "megabytes"), line, strict=True))
        for line in lines
    ]
    shown = cost.with_ratios(pandas.DataFrame(rows, columns=columns))
    assert shown["time ×"].isna().tolist() == [True, True, False]
    assert shown.loc[2, "time ×"] == 0.25 and shown.loc[2, "memory ×"] == 2.0
    clock = [
        {"part": "c", "what": "forward pass", "wall_seconds": 2.0},
        {"part": "c", "what": "all", "beside": "forward pass", "wall_seconds": 3.0},
    ]
    assert cost.with_ratios(pandas.DataFrame(clock, columns=columns)).loc[1, "time ×"] == 1.5, (
        "of the clock where nothing else is known"
    )
    assert running.markdown(shown[["part", "what", "time ×"]]).splitlines()[1:] == [
        *(
            "|---|---|---:|",
            "| a | forward pass |  |",
            "| b | forward pass |  |",
            "| b | all | 0.25 |",
        ),
    ]


@pytest.mark.parametrize("part", [cost.layer, cost.model, cost.step])
def test_every_row_of_a_tiny_model_is_beside_another(part):
    rows = {row["what"]: row for row in part(GIVEN, subject="tiny", tokens=48)}
    assert part is cost.step or rows["forward pass"]["operations"] > 0
    assert all(row["beside"] in rows for row in rows.values() if "beside" in row)
    assert all(math.isfinite(row.get("cpu_seconds", 0.0)) for row in rows.values())
    wanted = {
        "layer": {*cost.NAMES, "all measures, textbook"},
        "model": {"forward pass and all measures", "the process"},
        "step": {"step of transformers", "step, rope", "step, repo@1/3"},
    }
    assert wanted[part.__name__] <= rows.keys()


def test_a_device_is_measured_where_there_is_one_and_operators_are_counted_anywhere():
    """The path of a GPU, rehearsed on the processor."""
    rows = {
        row["what"]: row for row in cost.accelerator(GIVEN, "tiny", 48, "float32", device="cpu")
    }
    wanted = {cost.STOCK, cost.FORWARD, "forward pass and all measures", cost.PATTERNS_CACHED}
    assert wanted < rows.keys() and len(rows) == 5
    assert all(row["wall_seconds"] > 0 and row["note"] == "float32, cpu" for row in rows.values())
    assert {row.get("beside") for row in rows.values()} == {None, cost.STOCK, cost.FORWARD}
    if not (torch.cuda.is_available() or torch.mps.is_available()):
        without = list(cost.accelerator(GIVEN, "tiny", 48, "float32"))
        assert [row["what"] for row in without] == list(rows) and all(
            "needs an accelerator" in row["note"] for row in without
        )
    counts = [row["operators"] for row in cost.operators(GIVEN, 48, subject="tiny")]
    assert 0 < counts[0] < counts[1] < counts[2], "each is a pass and more"


def test_loading_is_measured_beside_the_weights():
    weights, load = cost.loading(GIVEN, "niah/repo")
    assert 0 < weights["megabytes"] < 20
    assert load["beside"] == weights["what"] and load["cpu_seconds"] > 0


def test_a_process_is_measured_by_itself_and_one_that_fails_is_not():
    held = bytearray(200_000_000)
    held[::4096] = b"x" * len(held[::4096])
    code = "import time; x = bytes(50_000_000).replace(bytes(1), b'a'); time.sleep(0.1)"
    assert 50 < time_command(f'-S -c "{code}"')[1]["megabytes"] < 190, "not what this process holds"
    with pytest.raises(OSError, match="ended with 3"):
        time_command('-c "raise SystemExit(3)"')


def test_what_stands_in_the_repository_is_what_the_tables_say(monkeypatch, tmp_path):
    """Pages are written from their tables: `make bench trust` after editing one by hand."""
    monkeypatch.chdir(Path(__file__).parents[2])
    for module, table, page in (
        (cost, Path("figures/bench/bench.csv"), Path("figures/bench/README.md")),
        (robustness, robustness.TABLE, robustness.PAGE),
    ):
        copy = tmp_path / table.name
        copy.write_bytes(table.read_bytes())
        module.write_page(copy, running.read(copy, module.COLUMNS))
        written = {path for path in tmp_path.iterdir() if path.suffix == ".md"}
        assert [path.read_text(encoding="utf-8") for path in written] == [
            page.read_text(encoding="utf-8")
        ]
        written.pop().unlink()


def test_a_row_holds_where_enough_of_what_it_tried_held():
    assert robustness.holds({"tried": 100, "held": 85, "needed": 0.85}) and robustness.holds(
        {"note": "a remark"}
    )
    assert not robustness.holds({"tried": 100, "held": 84, "needed": 0.85})
    assert not robustness.holds({"tried": 0, "held": 0, "needed": 1.0}), "nothing was tried"


def test_every_value_and_row_that_differs_is_named(tmp_path):
    import repo_interp as ri

    run = ri.analyze(ri.zoo("niah/repo"), [list(range(5, 60))], ["positions"])
    page = (
        "<table "
        'class="provenance"><tr><td>day</td></tr></table><table><tr><td>a</td><td>{}</td></tr></table>'
    )
    for name, number in (("before", 1), ("after", 2)):
        (tmp_path / name).mkdir()
        run["positions"].attrs["changed"] = number
        ri.write_run(run, tmp_path / name / "run.nc")
        (tmp_path / name / "table.csv").write_text(f"a,b\n{number},1\nR7 (time),{number}\n")
        (tmp_path / name / "page.html").write_text(page.format(number))
    assert list(outputs.differing(tmp_path / "before", tmp_path / "before")) == []
    (tmp_path / "after" / "page.png").write_bytes(b"")
    said = [
        line.removeprefix(f"{tmp_path / 'after'}/")
        for line in outputs.differing(tmp_path / "before", tmp_path / "after")
    ]
    assert said == [
        *("page.html: a | 1: missing", "page.html: a | 2: new", "page.png: new"),
        *(
            "run.nc: /positions: changed was '1', is '2'",
            "table.csv: 1,1: missing",
            "table.csv: 2,1: new",
        ),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["dot products", "written out"])
def test_maps_of_long_prompts_are_made_in_blocks(softcap):
    """The logits of these heads would take 268 MB."""
    inputs = dataclasses.replace(
        random_inputs(1, tokens=4096, dtype=torch.float32), softcap=softcap
    )
    assert cost_of(lambda: Maps().observe(inputs, {}))["megabytes"] < 80


def test_the_numbers_of_peers_agree_and_others_are_refused():
    """Every side of every job on a tiny model, in this process; what a job costs is another
    process's.
    """
    checkpoint = str(zoo_path("reversal/rope"))
    tokens = peers.prompt_tokens(
        41, json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    )
    for job, sides in peers.JOBS.items():
        expected, *others = [
            compute(opened(checkpoint), tokens) for opened, compute in sides.values()
        ]
        assert job == "loading" or (
            expected.shape[:2] == (4, 4)
            and np.ptp(expected) > (0 if job != "retrieval scores" else -1)
        )
        for side, found in zip([*sides][1:], others, strict=True):
            peers.require_equal(found, expected, f"{job}: {side}")
    for other in (np.full(3, 2e-5), np.array([0.0, np.nan, 0.0])):
        with pytest.raises(
            ValueError, match=r"ours differs from theirs by (2e-05|nan); wanted at most 1e-05"
        ):
            peers.require_equal(other, np.zeros(3), "ours differs from theirs")


def test_peers_are_processes_in_turns_and_one_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "TURNS", 1)
    rows = list(peers.peers(GIVEN, "reversal/rope", "mass on spans", (41,)))
    first, ours = (
        "mass on spans, 41 tokens: rows over the cache",
        "mass on spans, 41 tokens: attention_mass",
    )
    assert [(row["what"], row.get("beside")) for row in rows] == [(first, None), (ours, first)]
    assert all(row["cpu_seconds"] > 0 and row["megabytes"] > 100 for row in rows)
    with pytest.raises(OSError, match=r"^loading, transformers: "):
        peers._one("loading", "transformers", str(tmp_path), 41, tmp_path / "a.npy")


def test_a_command_is_timed_to_its_first_line_and_to_the_line_that_ends_it():
    code = "import time; print('one', flush=True); time.sleep(.4); print('http', flush=True)"
    first, whole = time_command(f'-c "{code}"')
    assert 0 < first < whole["wall_seconds"] - 0.3
    served = time_command(f'-c "{code}; time.sleep(60)"', "http")[1]
    assert 0.4 < served["wall_seconds"] < 30
    with pytest.raises(OSError, match="ended with 3"):
        time_command('-c "raise SystemExit(3)"')
