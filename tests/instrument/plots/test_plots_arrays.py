"""Small functions of arrays, numbers and texts: ranges of axes as in the RePo authors' demo, means
over prompts, labels, thinned lines.
"""

import json

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose
from run_fixture import OFFICIAL

from repo_interp.plots.marks.arrays import MEAN, focused_range, global_range, over_prompts
from repo_interp.plots.marks.drawing import contiguous, envelope, number
from repo_interp.plots.marks.token_axis import thin, token_label
from repo_interp.plots.style import style

DEMO = json.loads((OFFICIAL / "repo_mha" / "demo_expected.json").read_text())


def test_the_focused_range_of_every_official_row_is_that_of_the_demo():
    expected = np.load(OFFICIAL / "repo_mha" / "expected.npz")
    learned = expected["repo_layers"].tolist()
    for row in DEMO["ranges"]:
        positions = np.arange(96)
        if row["layer"] in learned:
            layer = learned.index(row["layer"])
            positions = expected["pred_indices"][layer, 0, row["head"]]
        assert_allclose(positions[:3], row["y_first3"], rtol=1e-6)
        assert_allclose(focused_range(positions), row["suggested_range"], rtol=1e-12)
    for row in DEMO["synthetic"]:
        found, wanted = focused_range(row["y"]), row["suggested_range"]
        assert found == (wanted and pytest.approx(wanted, rel=1e-12))


def test_ranges_of_few_values_and_without_nan():
    assert focused_range([2.5] * 6) == global_range([2.5]) == (1.5, 3.5)
    assert focused_range([np.nan, *range(10), np.inf]) == focused_range(range(10))
    for values in ([], [1.0] * 5, [1.0] * 5 + [np.nan, np.inf]):
        assert focused_range(values) is None
    assert global_range([np.nan]) is None


def test_a_mean_over_prompts_says_of_how_many_it_is():
    values = xr.DataArray([[1.0, np.nan], [3.0, 4.0], [5.0, np.nan]], dims=("prompt", "head"))
    np.testing.assert_array_equal(over_prompts(values), [3, 4])
    assert over_prompts(values).attrs[MEAN] == "mean over 1 to 3 prompts"
    assert over_prompts(values.isel(head=[1])).attrs[MEAN] == "mean over 1 prompt"
    assert MEAN not in over_prompts(values.isel(prompt=[1])).attrs


def test_the_envelope_keeps_the_extremes_of_every_bin():
    values = np.random.default_rng(0).normal(size=1000)
    values[300:400] = np.nan
    kept = envelope(values, 50)
    assert kept.size <= 102
    for part in np.array_split(np.arange(1000), 50):
        if np.isfinite(values[part]).any():
            inside = values[np.intersect1d(kept, part)]
            for extreme in (np.nanmin, np.nanmax):
                assert extreme(inside) == extreme(values[part])


def test_thinned_lines_stretches_and_numbers():
    assert thin([50, 51, 0, 10, 55, 49, 99], gap=5) == [0, 10, 50, 55, 99]
    assert contiguous([9, 3, 4, 5]) == [(3, 5), (9, 9)] and contiguous([]) == []
    shown = {
        0: "0",
        1.7536: "1.75",
        0.01449: "0.0145",
        4095.3: "4095",
        1e-7: "1.0e-07",
        np.nan: "–",
    }
    assert {value: number(value) for value in shown} == shown


def test_token_labels_show_every_character():
    labels = {
        " the": "␣the",
        "\n": "↵",
        "\t\r": "⇥␍",
        "": "∅",
        "\x00": "\\x00",
        "a\u200bb": "a\\u200bb",
        "naïve": "naïve",
        "日本": "\\u65e5\\u672c",
        "🙂": "\\U0001f642",
        "\u0301": "◌\u0301",
        "$x^2$": "$x^2$",
        "abcdefghijklmnop": "abcdefghijklm…",
    }
    with style():
        assert {text: token_label(text) for text in labels} == labels
