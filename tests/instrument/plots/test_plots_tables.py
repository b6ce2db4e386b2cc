"""The rows of the tables are the run's numbers: those of the official analysis."""

import json

import numpy as np
import pytest
from run_fixture import OFFICIAL, small_run

from repo_interp.errors import InputError
from repo_interp.plots import tables
from repo_interp.plots.marks.drawing import number
from repo_interp.plots.marks.table import Table
from repo_interp.plots.views.attention_mass import head_table, mass_table
from repo_interp.plots.views.patterns import pattern_table
from repo_interp.plots.views.ranges import range_table

ANALYSIS = json.loads((OFFICIAL / "expected_analysis.json").read_text())["repo_mha"]


@pytest.fixture(scope="module")
def run():
    return small_run()


def column(table: Table, name: str) -> list:
    return [row[table.columns.index(name)] for row in table.rows]


def test_mass_table_is_the_official_table_4(run):
    table = mass_table(run)
    means = dict(zip(column(table, "span"), column(table, "mass per token (10⁻²)"), strict=True))
    for span, expected in ANALYSIS["attention_mass"]["mean_over_sequences"].items():
        assert means[span] == pytest.approx(100 * expected["per_token"], abs=1e-5)
    assert column(table, "span")[:3] == ["needle", "needle.1", "needle.1.key"] and column(table, "span")[-1] == "generated"


def test_spread_over_prompts_is_a_standard_deviation_and_absent_for_one_prompt(run):
    table = mass_table(run)
    spread = dict(zip(column(table, "span"), column(table, "± over prompts"), strict=True))
    sequences = [100 * one["needle"]["per_token"] for one in ANALYSIS["attention_mass"]["per_sequence"]]
    assert spread["needle"] == pytest.approx(np.std(sequences, ddof=1), abs=1e-5)
    assert spread["needle.2"] is None
    assert dict(zip(column(table, "span"), table.formatted(), strict=True))["needle.2"][2] == "–"


def test_masses_of_the_top_spans_are_all_of_the_attention(run):
    table = mass_table(run)
    masses = dict(zip(column(table, "span"), column(table, "mass (%)"), strict=True))
    total = sum(masses[span] for span in ("needle", "query", "rest", "generated"))
    assert 90 < total <= 100 + 1e-6  # two prompts have a token between the spans


def test_pattern_table_has_the_official_shares(run):
    table = pattern_table(run)
    overall = ANALYSIS["positions"]["overall"]
    assert table.rows[0][2:] == pytest.approx([100 * overall[name] for name in ("constant", "mono", "hybrid")])
    for layer, shares in ANALYSIS["positions"]["per_layer"].items():
        row = table.rows[1 + int(layer)]
        assert row[:2] == (f"layer {layer}", "RePo")
        assert row[2:] == pytest.approx([100 * shares[name] for name in ("constant", "mono", "hybrid")])
    assert "288 chunks" in table.note and "size 16, epsilon 0.2" in table.note


def test_range_table_has_the_official_extremes(run):
    table = range_table(run)
    assert max(column(table, "largest")) == pytest.approx(ANALYSIS["positions"]["max_range"], rel=1e-6)
    assert table.rows[0][2:] == pytest.approx((95, 95, 95, 100 * 95 / 96))


def test_head_table_ranks_and_keeps_the_spread_over_prompts(run):
    table = head_table(run, most=5)
    assert column(table, "rank") == [1, 2, 3, 4, 5]
    masses = column(table, "mass on needle (%)")
    assert masses == sorted(masses, reverse=True)
    for row in table.rows:
        mass = 100 * run["attention_mass"]["mass"].sel(layer=row[1], head=row[2], span="needle").values
        assert row[4:] == pytest.approx((mass.mean(), mass.min(), mass.max()))
    with pytest.raises(InputError, match="no span haystack"):
        head_table(run, span="haystack")


def test_tables_follow_the_groups(run):
    assert [table.name for table in tables(run)] == ["positions", "attention_mass", "heads", "patterns"]
    assert all(len(row) == len(table.columns) for table in tables(run) for row in table.rows)
    assert tables(run)[-1].numeric == (False, False, True, True, True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.7536, "1.75"),
        (0.01449, "0.0145"),
        (95.0, "95.0"),
        (4095.3, "4095"),
        (1e-7, "1.0e-07"),
        (-0.5, "-0.500"),
        (np.nan, "–"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_a_notebook_shows_a_table_whatever_its_texts_are():
    table = Table("t", "a < b", ("name", "x"), (("<b>", 1234), ("c", None)), "note & more")
    html = table._repr_html_()
    assert "<td>&lt;b&gt;</td><td>1,234</td>" in html and "<td>–</td>" in html
    assert "<caption>a &lt; b</caption>" in html and "note &amp; more" in html
