"""The referee: every number of figures/README.md is a line of it, none differs, a changed number
does, and what is not there is named.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pandas
import pytest

from benchmarks import referee

FIGURES = Path(__file__).parents[2] / "figures"
FITS = "gemma3-270m/prose/position-generalization"


@pytest.fixture(scope="module")
def lines():
    return referee.table(FIGURES)


def test_every_number_of_the_page_is_a_line_and_none_differs(lines):
    page = (FIGURES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\].*", page, re.MULTILINE)
    shown = {
        row.group(1): row.group(0) for row in re.finditer(r"^\| \[(\w+)\].*", page, re.MULTILINE)
    }
    assert rows == list(referee.CLAIMS)
    for claim, row in shown.items():
        cells = row.split(" | ")[4:8]
        numbers = [
            number
            for cell in cells
            for number in re.findall(r"(?:^|, )((?:≥ )?-?[\d.e+-]+)(?= \(| ±|:)", cell)
        ]
        printed = [line["printed"].split(", ")[0] for line in lines if line["claim"] == claim]
        assert sorted(numbers) == sorted(
            number for number in printed if number != referee.UNMEASURABLE
        ), claim
    assert not [line for line in lines if line["result"] == "differs"]


@pytest.mark.parametrize("column", ["ours", "spread", "outcome"])
def test_a_changed_number_spread_or_outcome_differs(tmp_path, capsys, column):
    shutil.copytree(FIGURES / FITS, tmp_path / FITS, ignore=shutil.ignore_patterns("*.png"))
    assert referee.main(tmp_path) == 0
    verdicts = pandas.read_csv(tmp_path / FITS / "verdicts.csv", dtype=str)
    row = verdicts.index[verdicts["claim"] == "P1"][0]
    old = verdicts.loc[row, column]
    verdicts.loc[row, column] = "fails" if column == "outcome" else f"{float(old) * 1.02:.3g}"
    assert old != verdicts.loc[row, column] and (column != "outcome" or old == "holds")
    verdicts.to_csv(tmp_path / FITS / "verdicts.csv", index=False)
    assert referee.main(tmp_path) == 1
    assert re.search(r"^P1 .* differs$", capsys.readouterr().out, re.MULTILINE)


def test_what_the_csvs_lack_is_named_and_not_copied(tmp_path):
    shutil.copytree(FIGURES / FITS, tmp_path / FITS, ignore=shutil.ignore_patterns("*.png"))
    numbers = pandas.read_csv(tmp_path / FITS / "numbers.csv.gz", dtype=str)
    numbers[~numbers["variable"].str.startswith("three_axis_r")].to_csv(
        tmp_path / FITS / "numbers.csv.gz", index=False
    )
    (line,) = (line for line in referee.table(tmp_path) if line["claim"] == "P1")
    assert (line["recomputed"], line["result"]) == ("–", "not recomputed")
    assert "three_axis_r" in line["missing"]
