"""The rows of the tables are the run's numbers: those of the official analysis."""

import json

import numpy as np
import pytest
from run_fixture import OFFICIAL

from repo_interp.errors import InputError
from repo_interp.plots.marks.table import Table
from repo_interp.plots.views.attention_mass import attention_mass_table, mass_table, share_table
from repo_interp.plots.views.patterns import pattern_table
from repo_interp.plots.views.ranges import range_table

ANALYSIS = json.loads((OFFICIAL / "expected_analysis.json").read_text())["repo_mha"]


def test_mass_table_is_the_official_table_4(small):
    """±: a standard deviation, absent for the one prompt with a second needle."""
    table = mass_table(small)
    spans, official = {row[0]: row for row in table.rows}, ANALYSIS["attention_mass"]
    for span, expected in official["mean_over_sequences"].items():
        assert spans[span][1] == pytest.approx(100 * expected["per_token"], abs=1e-5)
    names = list(spans)
    assert names[:3] == ["needle", "needle.1", "needle.1.key"] and names[-1] == "generated"
    sequences = [100 * one["needle"]["per_token"] for one in official["per_sequence"]]
    assert spans["needle"][2] == pytest.approx(np.std(sequences, ddof=1), abs=1e-5)
    assert spans["needle.2"][2] is None and table.formatted()[names.index("needle.2")][2] == "–"


def test_shares_are_those_of_the_run(small):
    """Masses of the top spans are all of the attention; the largest head is that of the run's
    means, and of its prompts.
    """
    spans = {row[0]: row for row in share_table(small).rows}
    whole = sum(spans[span][1] for span in ("needle", "query", "rest", "generated"))
    assert 90 < whole <= 100 + 1e-6
    mass = 100 * small["attention_mass"]["mass"].sel(span="needle")
    expected = float(mass.mean("prompt").max()), float(mass.max())
    assert spans["needle"][2:4] == pytest.approx(expected) and expected[0] < expected[1]


def test_pattern_table_has_the_official_shares(small):
    table = pattern_table(small)
    rows = {row[:2]: row[2:] for row in table.rows}
    official = {("learned layers", ""): ANALYSIS["positions"]["overall"]}
    for layer, shares in ANALYSIS["positions"]["per_layer"].items():
        official[f"layer {layer}", "RePo"] = shares
    for labels, shares in official.items():
        expected = [100 * shares[name] for name in ("constant", "mono", "hybrid")]
        assert rows[labels] == pytest.approx(expected)
    assert "288 chunks" in table.note and "size 16, epsilon 0.2" in table.note


def test_range_table_has_the_official_extremes(small):
    table = range_table(small)
    largest = max(row[table.columns.index("largest")] for row in table.rows)
    assert largest == pytest.approx(ANALYSIS["positions"]["max_range"], rel=1e-6)
    assert table.rows[0][2:] == pytest.approx((95, 95, 95, 100 * 95 / 96))


def test_head_table_ranks_and_keeps_the_spread_over_prompts(small):
    table = attention_mass_table(small, most=5)
    masses = [row[4] for row in table.rows]
    assert masses == sorted(masses, reverse=True)
    needle = 100 * small["attention_mass"]["mass"].sel(span="needle")
    for place, row in enumerate(table.rows):
        mass = needle.sel(layer=row[1], head=row[2]).values
        assert row[4:] == pytest.approx((mass.mean(), mass.min(), mass.max()))
        assert row[0] == place + 1
    with pytest.raises(InputError, match="no span 'haystack'"):
        attention_mass_table(small, span="haystack")


def test_a_notebook_shows_a_table_whatever_its_texts_are():
    table = Table("t", "a < b", ("name", "x"), (("<b>", 1234), ("c", None)), "note & more")
    html = table._repr_html_()
    assert "<td>&lt;b&gt;</td><td>1,234</td>" in html and "<td>–</td>" in html
    assert "<caption>a &lt; b</caption>" in html and "note &amp; more" in html
