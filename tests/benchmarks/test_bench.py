"""Parts run in processes of their own and go to one table; the parts of the cost have the rows that
a page needs.

No time is judged.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from attention_inputs import random_inputs
from emulated_card import emulated_card
from forked import forked
from places import ROOT

import repo_interp as ri
from benchmarks import cost, launches, outputs, peers, robustness, running
from benchmarks.running import cost as cost_of
from benchmarks.running import time_command
from repo_interp.analysis.batches import make_batches
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.measures.kernels.seen_pairs import is_whole, on_host
from repo_interp.plugins.fake_distance.maps import Maps
from repo_interp.tasks.prompt import Prompt

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
    named = ("part", "what", "beside", "cpu_seconds", "wall_seconds", "megabytes")
    lines = [
        ("a", "forward pass", None, 2.0, None, 4.0),
        ("b", "forward pass", None, 8.0, None, 4.0),
        ("b", "all", "forward pass", 2.0, None, 8.0),
        # of the clock where nothing else is known
        ("c", "forward pass", None, None, 2.0, None),
        ("c", "all", "forward pass", None, 3.0, None),
    ]
    shown = cost.with_ratios(pandas.DataFrame(lines, columns=named).reindex(columns=columns))
    np.testing.assert_equal(shown["time ×"].tolist(), [np.nan, np.nan, 0.25, np.nan, 1.5])
    assert shown.loc[2, "memory ×"] == 2.0
    assert running.markdown(shown[["part", "what", "time ×"]]).splitlines()[1:4] == [
        "|---|---|---:|",
        "| a | forward pass |  |",
        "| b | forward pass |  |",
    ]


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        (cost.layer, {*cost.NAMES, "all measures, textbook"}),
        (cost.model, {"forward pass and all measures", "the process"}),
        (cost.step, {"step of transformers", "step, rope", "step, repo@1/3"}),
    ],
)
def test_every_row_of_a_tiny_model_is_beside_another(part, wanted):
    rows = {row["what"]: row for row in part(GIVEN, subject="tiny", tokens=24)}
    assert wanted <= rows.keys()
    assert part is cost.step or rows["forward pass"]["operations"] > 0
    assert all(row["beside"] in rows for row in rows.values() if "beside" in row)
    assert all(math.isfinite(row.get("cpu_seconds", 0.0)) for row in rows.values())


def test_a_device_is_measured_where_there_is_one():
    """The path of a GPU, rehearsed on the processor."""
    rows = list(cost.accelerator(GIVEN, "tiny", 24, "float32", device="cpu"))
    names = [row["what"] for row in rows]
    wanted = {cost.STOCK, cost.FORWARD, "forward pass and all measures", cost.PATTERNS_CACHED}
    assert wanted < {*names} and len(rows) == 5
    assert all(row["wall_seconds"] > 0 and row["note"] == "float32, cpu" for row in rows)
    assert {row.get("beside") for row in rows} == {None, cost.STOCK, cost.FORWARD}
    if not (torch.cuda.is_available() or torch.mps.is_available()):
        without = list(cost.accelerator(GIVEN, "tiny", 24, "float32"))
        assert [row["what"] for row in without] == names
        assert all("needs an accelerator" in row["note"] for row in without)


def test_operators_are_counted():
    counts = [row["operators"] for row in cost.operators(GIVEN, 24, subject="tiny")]
    assert 0 < counts[0] < counts[1] < counts[2], "each is a pass and more"


MOST = {
    "seven measures": (482, 306, 3, 0),
    "seven measures: the call": (926, 552, 5, 8),
    "three_axis, default extras": (168, 105, 2, 0),
    "seven, default extras": (562, 349, 4, 0),
    "seven, default extras: the call": (1939, 1114, 8, 10),
    "measures by default": (632, 331, 2, 0),
    "measures by default: the call": (604, 321, 6, 13),
}
"""Operators, launches, waits and uploads of one more layer, or of a call beside its layers: what all
layers compute together counts to the call, and so does the last layer of a pass, which ends before
it attends and shares no rotation with it.
"""


def test_a_layer_asks_no_more_of_an_accelerator(monkeypatch):
    """On an emulated card; 2,496 operators and 1,807 launches of three axes by default were found.

    Measures that are a part of these analyses are not counted by themselves, but for one.
    """
    made = cost._analyses
    wanted = {cost.FORWARD, cost.BARE, "attention_mass", *MOST}

    def some(*given):
        return {name: call for name, call in made(*given).items() if name in wanted}

    monkeypatch.setattr(cost, "_analyses", some)
    rows = {row["what"]: row for row in cost.launches(GIVEN, 256, "repo layer")}
    found = {what: tuple(rows[what][kind] for kind in launches.KINDS) for what in MOST}
    above = {what: some for what, some in found.items() if any(np.greater(some, MOST[what]))}
    assert not above, "more than at most"
    alone = rows["forward pass"]["launches"], rows["analysis that measures nothing"]["launches"]
    assert 0 < alone[0] <= alone[1] < found["seven measures"][1]
    assert all(row["beside"] in rows for row in rows.values() if "beside" in row)


def test_what_is_asked_of_a_card_is_told_apart():
    with emulated_card() as card, launches.Launches() as seen:
        ones = torch.ones(3, 2, device=card)  # a launch
        ones.mT[0].flatten()  # views
        torch.tensor([1.0]).to(card)  # an upload, which is a launch
        ones.cpu(), bool(ones.any()), ones[ones > 0]  # a wait each, and launches: 1, 1, 2
        torch.ones(3) + 1  # nothing of the card
    assert [seen.counts[kind] for kind in launches.KINDS[1:]] == [6, 3, 1]


def test_a_batch_is_known_on_the_host_until_it_changes():
    """The batch that an analysis makes asks the device for nothing that was made on the host."""
    prompts = [Prompt((1, 2, 3), {"needle": (1,)}, (2,)), Prompt((4, 5), {}, (1,))]
    with emulated_card() as card:
        (batch,) = make_batches(prompts, 2, card)
        with launches.Launches() as seen:
            for given in (batch.tokens, batch.valid, *batch.spans.values()):
                on_host(given)
            assert not is_whole(batch.valid)
        assert seen.counts["waits"] == 0
        assert on_host(batch.tokens).tolist() == [[1, 2, 3], [4, 5, 0]]
        assert on_host(batch.spans["needle"]).tolist() == [[0, 1, 0], [0, 0, 0]]
        batch.tokens[1, 0] = 9
        assert on_host(batch.tokens).tolist() == [[1, 2, 3], [9, 5, 0]]


def test_loading_is_measured_beside_the_weights():
    weights, load = cost.loading(GIVEN, "niah/repo")
    assert 0 < weights["megabytes"] < 20
    assert load["beside"] == weights["what"] and load["cpu_seconds"] > 0


def test_a_process_is_measured_by_itself():
    held = bytearray(200_000_000)
    held[::4096] = b"x" * len(held[::4096])
    code = "import time; x = bytes(50_000_000).replace(bytes(1), b'a'); time.sleep(0.1)"
    assert 50 < time_command(f'-S -c "{code}"')[1]["megabytes"] < 190, "not what this process holds"


@pytest.mark.parametrize(
    ("module", "table", "page"),
    [
        (cost, Path("figures/bench/bench.csv"), Path("figures/bench/README.md")),
        (robustness, robustness.TABLE, robustness.PAGE),
    ],
)
def test_what_stands_in_the_repository_is_what_the_tables_say(
    module, table, page, monkeypatch, tmp_path
):
    """Pages are written from their tables: `make bench trust` after editing one by hand."""
    monkeypatch.chdir(ROOT)
    copy = tmp_path / table.name
    copy.write_bytes(table.read_bytes())
    module.write_page(copy, running.read(copy, module.COLUMNS))
    (written,) = tmp_path.glob("*.md")
    assert written.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("row", "holds"),
    [
        ({"tried": 100, "held": 85, "needed": 0.85}, True),
        ({"tried": 100, "held": 84, "needed": 0.85}, False),
        ({"tried": 0, "held": 0, "needed": 1.0}, False),
        ({"note": "a remark"}, True),
    ],
)
def test_a_row_holds_where_enough_of_what_it_tried_held(row, holds):
    assert robustness.holds(row) == holds


def test_every_value_and_row_that_differs_is_named(tmp_path):
    run = ri.analyze(ri.load_model("niah/repo"), [list(range(5, 25))], ["positions"])
    head = "<table class='provenance'><tr><td>day</td></tr></table>"
    for name, number in (("before", 1), ("after", 2)):
        (tmp_path / name).mkdir()
        run["positions"].attrs["changed"] = number
        ri.write_run(run, tmp_path / name / "run.nc")
        (tmp_path / name / "table.csv").write_text(f"a,b\n{number},1\nR7 (time),{number}\n")
        page = f"{head}<table><tr><td>a</td><td>{number}</td></tr></table>"
        (tmp_path / name / "page.html").write_text(page)
    assert list(outputs.differing(tmp_path / "before", tmp_path / "before")) == []
    (tmp_path / "after" / "page.png").write_bytes(b"")
    said = outputs.differing(tmp_path / "before", tmp_path / "after")
    assert [line.removeprefix(f"{tmp_path / 'after'}/") for line in said] == [
        "page.html: a | 1: missing",
        "page.html: a | 2: new",
        "page.png: new",
        "run.nc: /positions: changed was '1', is '2'",
        "table.csv: 1,1: missing",
        "table.csv: 2,1: new",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["dot products", "written out"])
def test_maps_of_long_prompts_are_made_in_blocks(softcap):
    """The logits of these heads would take 268 MB."""
    inputs = dataclasses.replace(
        random_inputs(1, tokens=4096, dtype=torch.float32), softcap=softcap
    )
    assert cost_of(lambda: Maps().observe(inputs, {}))["megabytes"] < 80


@pytest.mark.parametrize("job", peers.JOBS)
def test_the_numbers_of_peers_agree(job):
    """Every side on a tiny model, in this process; what a job costs is another process's."""
    checkpoint = str(zoo_path("reversal/repo" if job in peers.LEARNED else "reversal/rope"))
    tokens = peers.prompt_tokens(41, ri.load_model("reversal/rope").config.vocab_size)
    sides = {
        side: compute(opened(checkpoint), tokens)
        for side, (opened, compute) in peers.JOBS[job].items()
    }
    expected = next(iter(sides.values()))
    if job in ("mass on spans", "names of heads"):
        assert expected.shape[:2] == (4, 4) and np.ptp(expected) > 0
    for side, found in sides.items():
        peers.require_equal(found, expected, side)


@pytest.mark.parametrize("other", [np.full(3, 2e-5), np.array([0.0, np.nan, 0.0])])
def test_numbers_of_peers_that_differ_are_refused(other):
    line = r"ours differs from theirs by (2e-05|nan); wanted at most 1e-05"
    with pytest.raises(ValueError, match=line):
        peers.require_equal(other, np.zeros(3), "ours differs from theirs")


def test_peers_are_processes_in_turns_and_one_that_fails_is_named(tmp_path, monkeypatch):
    """A fork does not import torch again, as every real process does."""

    def run(command, **_):
        assert command[3:5] == ["-m", "benchmarks.peers"]
        return forked(lambda: peers.main(*command[5:]))

    monkeypatch.setattr(peers, "TURNS", 1)
    monkeypatch.setattr(peers, "subprocess", SimpleNamespace(run=run))
    rows = list(peers.peers(GIVEN, "reversal/rope", "mass on spans", (41,)))
    first, ours = (f"mass on spans, 41 tokens: {side}" for side in peers.JOBS["mass on spans"])
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
