"""The report card: its intervals in closed form, its rivals from records, and a tiny scheme from
its function to its page.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from own_schemes import parts
from refusals import refused
from scipy import stats

import repo_interp as ri
from position_papers.card import card, starts
from position_papers.card.columns import BUDGETS, COLUMNS, Column, columns_of, plain_layout
from position_papers.card.content import Card, TaskCard
from position_papers.card.cost import costs
from position_papers.card.figures import compares, differences, scores_and_losses
from position_papers.card.heads import head_numbers
from position_papers.card.intervals import BETTER, NOT_LEARNED, UNDECIDED, WORSE, margin
from position_papers.card.records import (
    Row,
    Run,
    as_run,
    compared,
    known_encodings,
    records_of,
    rivals,
)
from position_papers.card.report import Watch
from position_papers.card.texts import ordered
from position_papers.card.trials import Trials
from position_papers.commands import card as command
from position_papers.kit.judge.differences import Sample, wilson
from position_papers.training import train
from position_papers.training.plan import FRESH, recipe
from position_papers.training.trained import add_run, recorded_scores
from position_papers.zoo_directory import DIRECTORY
from repo_interp import installed_points
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.errors import Taken
from repo_interp.positions.assigners import TokenIndex

TINY: dict[str, Any] = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "steps": 4,
    "batch": 2,
    "warm_up": 1,
    "log_every": 1,
    "score_prompts": 4,
    "task_options": {"first_longest": 2, "longest": 4, "longest_test": 5},
}
COLUMN = Column("reversal", ("4",), ("5",), fields=TINY)
NORMAL = float(stats.norm.isf(0.025))


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(installed_points, "_REGISTERED", {})


def shares(*scores: float, prompts: int = 200, numbers: tuple[int, ...] | None = None) -> Sample:
    numbers = tuple(range(len(scores))) if numbers is None else numbers
    return Sample(np.array(scores), np.empty(0), prompts, True, numbers)


def nats(*scores: float) -> Sample:
    return Sample(np.array(scores), np.empty(0), 0, False, tuple(range(len(scores))))


# ---- intervals -----------------------------------------------------------------------------------


def test_seeds_are_paired_and_the_interval_is_students():
    found = margin(nats(3.0, 3.1, 3.5), nats(2.9, 2.7, 3.0))
    differences = np.array([0.1, 0.4, 0.5])
    reach = stats.t.isf(0.025, 2) * differences.std(ddof=1) / math.sqrt(3)
    assert found.difference == pytest.approx(differences.mean())
    assert (found.low, found.high) == pytest.approx((1 / 3 - reach, 1 / 3 + reach))
    assert found.over == "3 paired seeds"


def test_seeds_that_do_not_spread_leave_the_width_that_prompts_have():
    found = margin(shares(1, 1, 1), shares(0, 0, 0))
    # Newcombe's: Wilson's limits of 200 of 200 and of 0 of 200 are n / (n + z^2) and z^2 / (n + z^2)
    narrow = NORMAL**2 / (200 + NORMAL**2)
    assert found.low == pytest.approx(1 - math.sqrt(2) * narrow) and found.high == 1
    assert found.verdict(higher=True) == BETTER and found.verdict(higher=False) == WORSE
    equal = margin(shares(0, 0, 0), shares(0, 0, 0))
    assert (equal.low, equal.high) == pytest.approx((-narrow, narrow))
    assert equal.verdict(higher=True) == UNDECIDED


def test_one_seed_against_one_has_no_interval_and_one_against_several_has_students():
    alone = margin(shares(1.0), shares(0.0))
    assert alone.difference == 1 and np.isnan([alone.low, alone.high]).all()
    assert alone.verdict(higher=True) == UNDECIDED
    beside = margin(shares(0.5, prompts=10**6), shares(0.2, 0.3, 0.4, prompts=10**6))
    reach = stats.t.isf(0.025, 2) * 0.1 * math.sqrt(1 + 1 / 3)
    assert (beside.low, beside.high) == pytest.approx((0.2 - reach, 0.2 + reach))


def test_prompts_that_both_answered_are_paired():
    one, other = np.array([1.0] * 150 + [0.0] * 50), np.array([1.0] * 120 + [0.0] * 80)
    samples = shares(0.75, 0.75, 0.75), shares(0.6, 0.6, 0.6)
    found = margin(*samples, (one, other))
    # 30 of 200 differ, all to one side: variance p (1 - p) 200 / 199
    reach = stats.t.isf(0.025, 199) * math.sqrt(0.15 * 0.85 / 199)
    assert (found.low, found.high) == pytest.approx((0.15 - reach, 0.15 + reach))
    assert found.over == "3 paired seeds, 200 paired prompts"
    apart = margin(*samples)
    assert apart.low < found.low and found.high < apart.high
    # nats have no interval of shares, and are not cut
    windows = np.array([3.0, 5.0, 4.0]), np.array([1.0, 2.0, 3.0])
    reach = stats.t.isf(0.025, 2) / math.sqrt(3)
    assert margin(nats(4, 4), nats(2, 2), windows).high == pytest.approx(2 + reach)
    # where all prompts say the same, they have no spread, and Newcombe's stays
    alike = shares(1, 1, 1), shares(0, 0, 0)
    assert margin(*alike, (np.ones(600), np.zeros(600))) == margin(*alike)


SCORES = st.lists(st.floats(0, 1), min_size=1, max_size=5)


@given(SCORES, SCORES, st.integers(1, 1000))
def test_limits_of_shares_stay_in_reach_are_the_wider_ones_and_turn_with_the_sides(a, b, prompts):
    one, other = shares(*a, prompts=prompts), shares(*b, prompts=prompts)
    found, back = margin(one, other), margin(other, one)
    if max(len(a), len(b)) == 1:
        return
    assert (
        -1 <= found.low <= found.difference + 1e-12 and found.difference - 1e-12 <= found.high <= 1
    )
    assert (found.low, found.high) == pytest.approx((-back.high, -back.low))
    # what the interval excludes is rare, and nothing else
    if abs(found.p_value - 0.05) > 1e-6:
        assert (found.p_value < 0.05) == (found.low > 0 or found.high < 0)
    # Newcombe's, written out
    (low, high), (below, above) = (wilson(each.mean, prompts) for each in (one, other))
    newcombe = found.difference - math.hypot(one.mean - low, above - other.mean)
    assert found.low <= newcombe + 1e-12
    assert found.high >= found.difference + math.hypot(high - one.mean, other.mean - below) - 1e-12


# ---- rivals --------------------------------------------------------------------------------------

TABLE = {
    ("reversal", "alibi"): (0.287, 3, "+0.287 [+0.18, +0.39]"),
    ("reversal", "nope"): (0.344, 3, "+0.344 [+0.13, +0.56]"),
    # without the cut at 1, [+0.63, +1.07]
    ("reversal", "repo"): (0.847, 8, "+0.847 [+0.63, +1.00]"),
    ("flip_flop", "repo"): (0.911, 3, "-0.022 [-0.14, +0.10]"),
    ("flip_flop", "path"): (0.994, 3, "+0.062 [-0.01, +0.14]"),
    ("flip_flop", "cope"): (1.000, 3, "+0.067 [-0.02, +0.16]"),
    ("selective_copy", "selective_rope"): (0.985, 3, "+0.985 [+0.93, +1.00]"),
}
"""Beside RoPE, from the records alone: mean beyond the training length, seeds, and the difference.
They were computed without this code, from the records and `judge.differences`, and cut to 1.
"""


@pytest.mark.parametrize(("task", "name"), TABLE)
def test_records_alone_give_the_table_that_was_made_without_this_code(task, name):
    rows = rivals(COLUMNS[task], COLUMNS[task].configuration("mine", 0), DIRECTORY)
    mean, seeds, said = TABLE[task, name]
    row, rope = (rows[each].sample() for each in (name, "rope"))
    assert row is not None and rope is not None
    assert (round(row.mean, 3), len(row.seeds)) == (mean, seeds)
    found = margin(row, rope)
    assert f"{found.difference:+.3f} [{found.low:+.2f}, {found.high:+.2f}]" == said


def test_three_at_one_against_three_at_zero_are_told_apart_with_a_width():
    rows = rivals(
        COLUMNS["selective_copy"], COLUMNS["selective_copy"].configuration("m", 0), DIRECTORY
    )
    found = compared(rows["cope"], rows["rope"])
    assert found.verdict == BETTER and found.margin is not None
    assert 0.97 < found.margin.low < 1 == found.margin.high


def test_rivals_have_the_budget_of_the_recipe_and_all_others_are_missing():
    found = rivals(COLUMNS["language"], COLUMNS["language"].configuration("mine", 0), DIRECTORY)
    assert {"rope", "cope", "pope", "cope_16"} <= set(found)
    # continued ones, and those of longer windows
    assert not {"repo", "rope_continued", "rope_512"} & set(found)
    continued = COLUMNS["niah_keys"]
    asked = continued.configuration("mine", 0, continue_from="runs/start")
    assert {"rope", "nope", "repo", "repo_bottom"} <= set(rivals(continued, asked, DIRECTORY))
    assert "pretrained" not in rivals(continued, asked, DIRECTORY)
    other = COLUMNS["reversal"].configuration("mine", 0, feed_forward=96)
    assert not rivals(COLUMNS["reversal"], other, DIRECTORY)
    assert {"rope", "forgetting", "r2n1"} <= set(known_encodings())


def test_every_column_is_a_recipe_with_test_sets_that_its_records_have():
    assert set(BUDGETS["quick"].tasks) < set(BUDGETS["standard"].tasks) == set(COLUMNS)
    for task, column in COLUMNS.items():
        asked = vars(column.configuration("mine", 0, continue_from="x" if column.start else ""))
        assert {
            name: asked[name] for name in recipe(task, bool(column.start)) if name != "score_every"
        } == {
            name: value
            for name, value in recipe(task, bool(column.start)).items()
            if name != "score_every"
        }
        assert task in FRESH
        for row in rivals(column, column.configuration("mine", 0), DIRECTORY).values():
            for run in row.runs:
                assert {*column.inside, *column.beyond} <= set(run.recorded.means)


def test_a_record_has_its_command_its_versions_and_the_digest_of_its_line():
    lines = (DIRECTORY / "reversal/runs.jsonl").read_text(encoding="utf-8").splitlines()
    by_seed = {run.recorded.seed: run for run in records_of(DIRECTORY, "reversal")["rope"]}
    line = next(each for each in lines if json.loads(each)["name"] == "rope")
    run = by_seed[json.loads(line)["seed"]]
    assert run.sha256 == hashlib.sha256(line.encode()).hexdigest()
    assert run.made_with["command"].startswith("repo-interp train reversal --scheme rope")
    assert run.machine[0] == "cpu" and run.date == ""


def row_of(scores: dict[int, tuple[float, float]], column: Column = COLUMN, **fields: Any) -> Row:
    """A row whose runs scored so much in the training length and beyond, by seed."""
    (record,) = [run for run in records_of(DIRECTORY, "reversal")["rope"] if run.recorded.seed == 0]
    made = dict.fromkeys(("python", "torch", "transformers", "numpy"), "1") | fields
    runs = []
    for seed, (inside, beyond) in scores.items():
        means = {column.inside[0]: inside, **dict.fromkeys(column.beyond, beyond)}
        recorded = {**vars(record.recorded), "seed": seed, "means": means}
        if column.task == "language":
            recorded["metric"] = "log perplexity"
        runs.append(Run(type(record.recorded)(**recorded), made))
    return Row("one", column, tuple(runs))


@pytest.mark.parametrize("alone", [True, False])
def test_the_figures_of_a_card_draw_each_run_where_it_is(alone):
    """Interval, scores by test set, and losses, as matplotlib has them."""
    (rope,) = [run for run in records_of(DIRECTORY, "reversal")["rope"] if run.recorded.seed == 0]
    logged = replace(rope, recorded=replace(rope.recorded, log=((1, 2.0), (2, 0.5))))
    mine = Row("mine", COLUMNS["reversal"], (logged,))
    theirs = (
        () if alone else tuple(rivals(mine.column, rope.recorded.configuration, DIRECTORY).values())
    )
    each = TaskCard(mine.column, mine, theirs, tuple(compared(mine, row) for row in theirs), ())
    made = Card("mine", "", 1, (), (), (each,))
    scores, losses = scores_and_losses(made, each).axes
    drawn = {line.get_label(): line for line in scores.lines}
    assert drawn["mine"].get_xdata().tolist() == list(range(2, 31))
    assert drawn["mine"].get_ydata().tolist() == list(rope.recorded.means.values())
    logged = [run for row in (mine, *theirs) for run in row.runs if run.recorded.log]
    assert len(losses.lines) == len(logged) >= (1 if alone else 2)
    assert [2.0, 0.5] in [line.get_ydata().tolist() for line in losses.lines]
    assert ("rope" in drawn) != alone
    assert compares(made) != alone
    if not alone:
        (panel,) = differences(made).axes
        names = [label.get_text() for label in panel.get_yticklabels()]
        limits = {one.row.name: one.limits for one in each.compared}
        bars = [bar.get_segments()[0] for bar in panel.collections]
        # One seed each has no interval, and no bar.
        drawn = {name: tuple(bar[:, 0]) for name, bar in zip(names, bars, strict=True) if len(bar)}
        assert len(drawn) > 3
        assert drawn == {name: ends for name, ends in limits.items() if np.isfinite(ends).all()}


def test_a_scheme_that_has_not_learned_is_never_called_worse():
    whole = row_of({0: (1, 1), 1: (1, 1), 2: (1, 1)})
    half = row_of({0: (1, 0), 1: (0.3, 0), 2: (1, 0)})
    assert compared(whole, half).verdict == compared(half, whole).verdict == NOT_LEARNED
    assert compared(whole, row_of({0: (1, 0), 1: (1, 0)})).verdict == BETTER


def test_seeds_of_other_versions_are_not_paired():
    ours = row_of({0: (1, 0.1), 1: (1, 0.5), 2: (1, 0.9)})
    theirs = {0: (1, 0.05), 1: (1, 0.45), 2: (1, 0.85)}
    paired, apart = compared(ours, row_of(theirs)), compared(ours, row_of(theirs, torch="2"))
    assert paired.margin is not None and apart.margin is not None
    assert paired.margin.over.startswith("3 paired seeds") and not paired.unpaired
    assert apart.margin.over.startswith("3 and 3 seeds") and apart.unpaired
    assert apart.margin.high > paired.margin.high


def test_language_models_are_compared_on_the_same_texts_alone():
    column = Column("language", ("256",), ("512",), learned=None)
    ours = row_of({0: (3, 3.0), 1: (3, 3.1)}, column)
    theirs = row_of({0: (3, 3.5), 1: (3, 3.7), 4: (3, 9.0)}, column)
    found = compared(ours, theirs)
    assert found.margin is not None and found.margin.difference == pytest.approx(-0.55)
    assert compared(ours, row_of({4: (3, 9.0)}, column)).verdict == "other texts"
    assert compared(ours, row_of({0: (3, 3.5)}, column, python="3.12")).verdict == "other texts"


def test_rivals_stand_in_groups_and_by_name_within_each():
    def one(name: str, verdict: str) -> Any:
        return SimpleNamespace(row=SimpleNamespace(name=name), verdict=verdict)

    given = [
        one("b", BETTER),
        one("z", UNDECIDED),
        one("a", BETTER),
        one("y", WORSE),
        one("c", UNDECIDED),
    ]
    assert [each.row.name for each in ordered(given)] == ["y", "c", "z", "a", "b"]


def test_the_zoo_names_the_layout_of_an_encoding():
    assert (
        plain_layout("reversal", "repo") == "repo"
        and plain_layout("counting", "repo") == "repo@1/3"
    )
    assert plain_layout("flip_flop", "repo_alibi") == "repo_alibi@1/3"
    assert plain_layout("reversal", "repo_index") == "repo_index"
    assert plain_layout("language", "hope") == "hope"


# ---- a tiny scheme -------------------------------------------------------------------------------


def register(scale: float = 1.0, digest: str = "a" * 64) -> None:
    from repo_interp.models.scheme_registry import register_function

    register_function(
        "mine",
        lambda b, r, d: parts(TokenIndex(), r.frequencies * scale),
        {"function": "build", "sha256": digest},
    )


def small(out: Path, **more: Any) -> Any:
    return card("mine", out, **({"columns": [COLUMN], "seeds": (0,), "zoo": out} | more))


@pytest.fixture
def zoo(tmp_path) -> Path:
    """Records of RoPE at the tiny recipe, and of another budget."""
    for seed in (0, 1):
        fields = TINY | {"score_every": 0}
        made = train("rope", "reversal", tmp_path / f"rope-{seed}", seed=seed, **own(fields))
        add_run(tmp_path / "zoo", "reversal/rope", made)
    longer = train(
        "nope", "reversal", tmp_path / "nope", **own(TINY | {"steps": 5, "score_every": 0})
    )
    add_run(tmp_path / "zoo", "reversal/nope", longer)
    return tmp_path / "zoo"


def own(fields: dict[str, Any]) -> dict[str, Any]:
    """Over the recipe of reversal, the fields that `COLUMN` has alone."""
    return {"curriculum": 0.0, "scheme_options": {}} | fields


def test_a_card_from_the_function_to_the_page(tmp_path, zoo):
    register()
    lines: list[str] = []
    done: list[tuple[Any, ...]] = []
    # The recipe of reversal alone has options of schemes, which the tiny one lacks
    column = Column("reversal", ("4",), ("5",), fields=own(TINY) | recipe_options())
    found = small(
        tmp_path / "card",
        columns=[column],
        seeds=(0, 1),
        zoo=zoo,
        watch=Watch(lines.append, lambda *step: done.append(step)),
    )
    assert lines[0].startswith("verify_scheme: no findings; not held against a reference")
    assert "2 trainings, about" in lines[1] and "version 1 of 1 of mine" in lines[1]
    assert [line for line in lines if line.startswith("finished")] == [
        "finished: mine on reversal, seed 0",
        "finished: mine on reversal, seed 1",
    ]
    assert found["encoding"].values.tolist() == ["mine", "rope"]
    assert found["rival"].values.tolist() == ["rope"]
    assert np.isfinite(found["loss"].values).all() and np.isfinite(found["score"].values).all()
    runs = tmp_path / "card/versions" / ("a" * 12) / "reversal"
    for seed in (0, 1):
        (recorded,) = recorded_scores(runs / f"seed-{seed}")
        mine = found.sel(encoding="mine", task="reversal", seed=seed)
        assert float(mine["loss"]) == recorded.loss
        assert mine["score"].values.tolist() == [recorded.means["4"], recorded.means["5"]]
    # RoPE by another name: the same numbers, seed by seed
    alike = found["loss"].sel(task="reversal")
    assert alike.sel(encoding="mine").values.tolist() == alike.sel(encoding="rope").values.tolist()
    assert found["difference"].item() == 0 and found["low"].item() < 0 < found["high"].item()
    assert found["verdict"].item() == NOT_LEARNED
    assert found.attrs["versions"] == 1 and found.attrs["sha256"] == "a" * 64
    page = (tmp_path / "card/card.md").read_text()
    assert "| **mine** | 2 | not learned at this recipe, training loss" in page
    assert "No record of this budget: nope, " in page and "tried in this directory: 1." in page
    assert "Heads after training, seed 0" in page and "worse here" in page
    assert (tmp_path / "card/differences.png").read_bytes().startswith(b"\x89PNG")
    # the other page has the same tables and opens by itself: no script, and figures within
    html = (tmp_path / "card/card.html").read_text()
    cells = [row.split(" | ") for row in page.splitlines() if row.startswith("| ")]
    for cell in (cell.strip("|* ") for row in cells for cell in row):
        assert f">{escape(cell)}</t" in html, cell
    assert html.count('src="data:image/') == 2 and html.count("<h2") == 5
    assert "<script" not in html and not re.search(r"(src|href)=.(?!data:|#)", html)
    assert "worse here" in html and "repo-interp" not in html.split("Provenance")[0]
    table = pd.read_csv(tmp_path / "card/card.csv")
    mine = found["score"].sel(encoding="mine", task="reversal")
    for part, head in (("training length", "score[4]"), ("beyond", "score[5]")):
        assert table[head][0] == pytest.approx(float(mine.sel(part=part).mean("seed")))
    spread = float(mine.sel(part="beyond").std("seed", ddof=1))
    assert table["beyond_sd"][0] == pytest.approx(spread)
    assert "| test set | mine | rope |" in page and "- *heads: needle*: share" in page
    assert table["encoding"].tolist() == ["mine", "rope"] and table["seeds"].tolist() == [
        "0 1",
        "0 1",
    ]
    # again: nothing is trained, and the same is said
    before = {file: file.stat().st_mtime_ns for file in runs.glob("*/model.safetensors")}
    again: list[str] = []
    assert small(
        tmp_path / "card", columns=[column], seeds=(0, 1), zoo=zoo, watch=Watch(again.append)
    ).equals(found)
    assert "nothing is trained" in again[1]
    assert before == {file: file.stat().st_mtime_ns for file in before}


def recipe_options() -> dict[str, Any]:
    """Those of the recipe of reversal, which `train` puts below all that is given."""
    return {"scheme_options": recipe("reversal", False)["scheme_options"], "learning_rate": 0.002}


def test_interrupted_it_goes_on_and_each_finished_cell_stands_in_the_table_at_once(tmp_path):
    register()
    whole = small(tmp_path / "whole", seeds=(0, 1))
    seen: list[str] = []
    watch = Watch(step=lambda *done: seen.append(done[0]), stop=lambda: "seed 1" in seen[-1])
    with pytest.raises(KeyboardInterrupt, match="the same command goes on"):
        small(tmp_path / "cut", seeds=(0, 1), watch=watch)
    table = pd.read_csv(tmp_path / "cut/card.csv")
    assert table["seeds"].astype(str).tolist() == ["0"]
    told = (tmp_path / "cut/card.md").read_text()
    assert "When this was written: reversal, seed 1 at step 1." in told
    folder = tmp_path / "cut/versions" / ("a" * 12) / "reversal/seed-1"
    assert (folder / "state.pt").exists() and not (folder / "config.json").exists()
    # an edited file leaves it alone, and says so
    register(0.01, "b" * 64)
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path / "cut", watch=Watch(lines.append, stop=lambda: True))
    assert "version 2 of 2 of mine" in lines[2] and lines[1] == (
        f"version 1 of 2 had another source ({'a' * 12}); what it trained is kept: reversal, "
        "seed 0 finished; reversal, seed 1 at step 1"
    )
    told = (tmp_path / "cut/card.md").read_text()
    assert "directory: 2; this is number 2; scores were seen of 1.\n" in told
    assert "Not finished yet." in told and "reversal, seed 0 at step 1." in told
    register()
    lines.clear()
    found = small(tmp_path / "cut", seeds=(0, 1), watch=Watch(lines.append))
    xr.testing.assert_equal(found, whole)
    assert "version 1 of 2 of mine" in lines[2]
    assert "goes on from step 1 of 4: mine on reversal, seed 1" in lines
    weights = [
        (
            tmp_path / name / "versions" / ("a" * 12) / "reversal/seed-1/model.safetensors"
        ).read_bytes()
        for name in ("whole", "cut")
    ]
    assert weights[0] == weights[1]


def test_an_edited_function_is_another_version_and_is_counted(tmp_path):
    register()
    small(tmp_path / "card")
    register(0.01, "b" * 64)
    second = small(tmp_path / "card")
    assert second.attrs["versions"] == 2
    assert sorted(path.name for path in (tmp_path / "card/versions").iterdir()) == [
        "a" * 12,
        "b" * 12,
    ]
    assert (
        "in this directory: 2; this is number 2; scores were seen of 2. Who sees several"
        in (tmp_path / "card/card.md").read_text()
    )
    # nor does it go on with a run of the first that is put into its place
    register(0.02, "c" * 64)
    versions = tmp_path / "card/versions"
    (versions / ("a" * 12)).rename(versions / ("c" * 12))
    with refused("was begun with another function", Taken):
        small(
            tmp_path / "card",
            columns=[Column("reversal", ("4",), ("5",), fields=TINY | {"steps": 4})],
        )


def test_a_scheme_that_sees_later_tokens_is_not_trained(tmp_path):
    from own_schemes import Distance

    class Later(Distance):
        def forward(self, queries, keys, query_index, key_index, visible, scale, *more):
            past = super().forward(queries, keys, query_index, key_index, visible, scale)
            return past * (1 + keys.mean())

    ri.register_scheme("mine", lambda b, r, d: parts(TokenIndex(), logits=Later()))
    with refused("nothing was trained: mine fails verify_scheme: "):
        small(tmp_path / "card")
    assert not (tmp_path / "card").exists()


def test_a_wrong_formula_is_found_beside_its_reference_alone(tmp_path):
    def rope(queries, keys, positions):
        return rotated(queries, positions) @ rotated(keys, positions).mT / queries.shape[-1] ** 0.5

    def rotated(vectors, positions):
        pairs = vectors.shape[-1] // 2
        angles = positions[..., None] * 10000.0 ** (-torch.arange(pairs) / pairs)
        x, y = vectors[..., :pairs], vectors[..., pairs:]
        return torch.cat(
            [x * angles.cos() - y * angles.sin(), y * angles.cos() + x * angles.sin()], -1
        )

    register()
    lines: list[str] = []
    found = small(tmp_path / "right", reference=rope, watch=Watch(lines.append))
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    name = f"rope` of a source with SHA-256 {digest[:12]}..."
    assert lines[0] == f"verify_scheme: no findings; held against the reference `{name}"
    assert found.attrs["reference_sha256"] == digest
    assert f"SHA-256 {digest[:12]}...<" in (tmp_path / "right/card.html").read_text()
    register(1.1)
    with refused("nothing was trained: mine fails verify_scheme: reference: logits of layer"):
        small(tmp_path / "wrong", reference=rope)
    assert not (tmp_path / "wrong").exists()
    with refused("a reference is the formula of one scheme; 'mine,rope' has 2"):
        card(
            "mine,rope",
            tmp_path / "two",
            columns=[replace(COLUMN, fields=TINY | {"layers": 2})],
            reference=rope,
        )


def test_what_a_card_refuses(tmp_path):
    register()
    with refused("layout 'mine@5' starts at layer 5; the model's layers are 0 to 0"):
        card("mine@5", tmp_path / "card", columns=[COLUMN])
    assert not (tmp_path / "card").exists()
    with refused("there is no budget 'huge'; wanted one of quick, standard"):
        small(tmp_path / "card", budget="huge")
    with refused("no card has a task 'niah'; there are reversal, flip_flop"):
        card("mine", tmp_path / "card", tasks=["niah"])
    small(tmp_path / "card")
    ri.register_scheme("yours", lambda b, r, d: parts(TokenIndex(), r.frequencies))
    with refused("has the card of 'mine', not of 'yours'; give another --out"):
        card("yours", tmp_path / "card", columns=[COLUMN])
    (tmp_path / "else").mkdir()
    (tmp_path / "else/notes.txt").write_text("mine")
    with refused("exists and holds no card; give another --out"):
        small(tmp_path / "else")
    (tmp_path / "card/card.toml").write_text("[")
    with refused("does not say whose card it is"):
        small(tmp_path / "card")


def test_what_is_left_is_what_costs(tmp_path):
    register()
    trials = Trials(tmp_path, "mine")
    planned = trials.trainings([COLUMN], (0, 1))
    found = costs(planned)
    assert list(found) == ["reversal"] and 0 < found["reversal"] < 60
    assert [training.steps_left for training in planned] == [4, 4]
    small(tmp_path / "card")
    left = Trials(tmp_path / "card", "mine").trainings([COLUMN], (0,))
    assert [training.steps_left for training in left] == [0] and costs(left) == {}
    # a continued task first trains what it goes on from, with seeds that have one
    unshipped = replace(COLUMNS["niah_keys"], seeds=(0, 1, 3))
    both = trials.trainings([unshipped], (0, 2))
    assert [training.seed for training in both] == [0, 3, 0, 3]
    assert [bool(training.configuration.continue_from) for training in both] == [
        False,
        False,
        True,
        True,
    ]
    assert both[2].configuration.continue_from == both[0].directory.as_posix()
    with refused("goes on from niah_keys/pretrained, which has no seed 8"):
        trials.trainings([unshipped], (8,))
    own = trials.trainings(columns_of(["niah_keys"]), (0, 1, 2))
    assert [training.configuration.continue_from for training in own] == [
        f"niah_keys/pretrained/seed-{seed}" for seed in (9, 10, 11)
    ]


def test_a_start_that_ships_is_not_trained_and_has_the_digest_of_the_registry(
    tmp_path, monkeypatch
):
    column = replace(COLUMNS["niah_keys"], start="niah_keys/rope", seeds=())
    trials = Trials(tmp_path / "card", "nope")
    first, second = trials.trainings([column], (0, 1))
    assert first.configuration.continue_from == "niah_keys/rope"
    assert second.configuration.continue_from == "niah_keys/rope/seed-1"
    # of seed 5 records alone ship
    start, own = trials.trainings([column], (5,))
    assert own.configuration.continue_from == start.directory.as_posix()
    # one that was begun here goes on
    begun = tmp_path / "card/starts/niah_keys-rope/seed-0"
    begun.mkdir(parents=True)
    (begun / "training.toml").touch()
    assert trials.trainings([column], (0,))[0].directory == begun
    # other weights by that name
    monkeypatch.setattr(starts, "DIRECTORY", tmp_path)
    shutil.copy(DIRECTORY / "registry.csv", tmp_path)
    shutil.copytree(DIRECTORY / "niah_keys/nope", tmp_path / "niah_keys/rope")
    with refused("niah_keys/rope has other weights than registry.csv lists"):
        Trials(tmp_path / "other", "nope").trainings([column], (0,))


def test_heads_are_those_of_the_measures():
    repo = head_numbers(zoo_path("reversal/repo"), "20")
    model, task = ri.open_model("reversal/repo"), ri.tasks.make_task("reversal")
    prompts = task.prompts(8, 0, "20")
    run = ri.analyze(model, prompts, ["positions", "fake_distance"], experiments=[])
    ranges = run["positions"]["position_range"].mean("prompt").values.ravel()
    assert repo["range"].to_numpy() == pytest.approx(ranges)
    assert repo["disentangled"].to_numpy() == pytest.approx(
        run["fake_distance"]["r"].mean("prompt").values.ravel()
    )
    assert repo.attrs["left_out"] == "" and len(repo) == 16
    nope = head_numbers(zoo_path("reversal/nope"), "20")
    assert not {"range", "resolution", "band"} & set(nope) and {"needle", "axes"} <= set(nope)


# ---- the command ---------------------------------------------------------------------------------


def typed(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words.split())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("t5 --out a", "'t5': wanted FILE.py:FUNCTION, such as t5.py:build"),
        ("t5.py --out a", "'t5.py': wanted FILE.py:FUNCTION"),
        ("t5.py:build,rope --out a", "wanted FILE.py:FUNCTION"),
        ("t5.py:build --out a", "there is no file t5.py; wanted FILE.py:FUNCTION"),
        ("mine.py:built --out a", "mine.py has no function 'built'; it has build"),
        ("mine.py:build --tasks niah --out a", "no card has a task 'niah'"),
        ("mine.py:build --out mine.py", "mine.py is a file"),
        ("mine.py:build --out other", "other has the card of 't5', not of 'mine'"),
        ("mine.py:build --device tpu --out a", "tpu"),
        ("mine.py:build --out a --reference no.py:f", "there is no file no.py"),
        (
            "mine.py:build --out a --reference mine.py:f",
            "mine.py has no function 'f'; it has build",
        ),
        (
            "mine.py:build --out a --reference two.py:f",
            "f cannot be called with .queries, keys, pos",
        ),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(words, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def build(b, r, d): ...")
    Path("two.py").write_text("def f(q, k): ...")
    Path("other").mkdir()
    Path("other/card.toml").write_text('scheme = "t5"\n')
    with refused(line):
        command.run(typed(words))
    assert not Path("a").exists()


@pytest.mark.parametrize(
    "words",
    ["mine.py:build", "mine.py:build --out a --budget huge", "m.py:build --out a --seeds 2-0"],
)
def test_argparse_refuses_what_no_option_takes(words, capsys):
    with pytest.raises(SystemExit) as ended:
        typed(words)
    assert ended.value.code == 2 and capsys.readouterr().err


def test_options_are_declared_and_refused_without_torch(tmp_path):
    code = (
        "import argparse, sys\n"
        "from position_papers.commands import card\n"
        "from repo_interp.errors import InputError\n"
        "parser = argparse.ArgumentParser()\n"
        "card.add_arguments(parser)\n"
        "parser.format_help()\n"
        "try:\n"
        "    card.run(parser.parse_args(['none.py:build', '--out', 'a']))\n"
        "except InputError:\n"
        "    sys.exit('torch' in sys.modules)\n"
        "sys.exit(2)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


def test_the_command_prints_the_card_of_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from repo_interp.models.scheme_parts import SchemeParts\n"
        "from repo_interp.positions.assigners import TokenIndex\n"
        "def build(b, r, d): return SchemeParts('mine', TokenIndex(), r.frequencies)\n"
    )
    monkeypatch.setitem(COLUMNS, "reversal", COLUMN)
    assert command.run(typed("mine.py:build --tasks reversal --out card")) == 0
    printed = capsys.readouterr().out
    assert "finished: mine on reversal, seed 0" in printed
    assert "reversal: no rival has records" in printed and "card/card.html" in printed
    digest = hashlib.sha256(Path("mine.py").read_bytes()).hexdigest()
    stated = (Path("card/versions") / digest[:12] / "reversal/seed-0/training.toml").read_text()
    assert digest in stated and 'command = "repo-interp' in stated
    (made,) = [as_run(line) for line in of_card(Path("card"))]
    assert made.date and made.seconds >= 0


def of_card(directory: Path) -> list[dict[str, Any]]:
    from position_papers.training.trained import line_of

    return [line_of(place, "mine") for place in directory.glob("versions/*/*/seed-*")]


def test_training_from_python_goes_on_and_is_that_of_the_recipe(tmp_path):
    made = train("rope", "reversal", tmp_path / "run", seed=3, **own(TINY))
    (run,) = recorded_scores(made)
    assert (run.seed, run.steps, run.configuration.scheme_options) == (
        3,
        4,
        {"assignment": "layer"},
    )
    records: list[Any] = []
    assert train("rope", "reversal", made, seed=3, on_record=records.append, **own(TINY)) == made
    assert not records
    with refused("has another training run", Taken):
        train("rope", "reversal", made, seed=4, **own(TINY))
    with refused("a training configuration has no 'step'"):
        train("rope", "reversal", tmp_path / "other", step=4)
