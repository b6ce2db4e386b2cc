"""Charts of papers, stored and drawn again: what comes back, and what is refused."""

from __future__ import annotations

import lzma
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray as xr
from refusals import refused

from position_papers import PAPERS
from position_papers.kit.charts import CHARTS, LARGEST, read_charts, write_charts
from position_papers.kit.paper_directory import draw_again, read_page
from repo_interp.errors import InputError

STORED = Path(__file__).parents[2] / "figures"


def received(*arguments: Any) -> Any:
    """Stand for a function that draws: return its arguments."""
    return arguments


received.__annotations__["return"] = "PaperFigure"
received.__module__ = "position_papers.kit.charts"


@pytest.fixture
def drawing_here(monkeypatch):
    """Stored charts that call `received` find it."""
    monkeypatch.setattr("position_papers.kit.charts.received", received, raising=False)


def test_data_of_every_kind_come_back(drawing_here, tmp_path):
    curve = xr.DataArray([0.5, np.nan], {"step": [1, 2]}, ("step",), "loss", {"units": "nat"})
    data = curve.to_dataset().assign(name=("step", ["a", "b"]), known=("step", [True, False]))
    tree = xr.DataTree.from_dict({"/": xr.Dataset(attrs={"model": "x"}), "/loss": data})
    given = [
        (data, "a title", np.int64(3)),
        ({"panel, beyond L/2": data, "other": curve.rename(None)},),
        (curve, tree, [1, 2]),
    ]
    records = write_charts([partial(received, *each) for each in given], tmp_path / CHARTS)
    first, second, third = (chart() for chart in read_charts(records, tmp_path / CHARTS))
    assert first[0].identical(data) and first[1:] == ("a title", 3)
    assert list(second[0]) == ["panel, beyond L/2", "other"]
    assert second[0]["panel, beyond L/2"].identical(data) and second[0]["other"].equals(curve)
    assert third[0].identical(curve) and third[1].identical(tree) and third[2] == [1, 2]
    again = tmp_path / "again"
    assert write_charts([partial(received, *each) for each in given], again) == records
    assert again.read_bytes() == (tmp_path / CHARTS).read_bytes()


def test_a_chart_of_too_much_data_is_not_stored(drawing_here, tmp_path):
    large, small = (xr.Dataset({"x": ("pixel", np.zeros(n))}) for n in (LARGEST // 4 + 1, 2))
    charts = [partial(received, each) for each in (large, small)]
    without, record = write_charts(charts, tmp_path / CHARTS)
    assert not without
    assert read_charts([record], tmp_path / CHARTS)[0]()[0].identical(small)


def test_what_cannot_be_drawn_is_refused_in_one_line(drawing_here, tmp_path):
    file, written = tmp_path / CHARTS, tmp_path / "written"
    (record,) = write_charts([partial(received, str(written), "a")], file)
    for name, why in (
        ("os:getcwd", "no chart 'os:getcwd'"),
        ("position_papers.kit.charts:gone", "no chart 'position_papers.kit.charts:gone'"),
        ("position_papers.gone:gone", "no chart 'position_papers.gone:gone'"),
        ("repo_interp.storage.files:write_text", "it draws nothing"),
    ):
        with pytest.raises(InputError, match=why):
            read_charts([{**record, "function": name}], file)
    assert not written.exists()
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(InputError, match="is damaged"):
        read_charts([record], file)


@pytest.mark.parametrize("paper", PAPERS)
def test_the_stored_figures_of_a_paper_are_drawn_again(paper, tmp_path):
    facts = read_page(STORED / paper)
    figures = facts["figures"]
    charts = read_charts((figure["chart"] for figure in figures), STORED / paper / CHARTS)
    assert len(charts) == len(figures) > 10
    shutil.copy(STORED / paper / CHARTS, tmp_path)
    assert draw_again(tmp_path / "elsewhere", facts) == [figure["figure"] for figure in figures]
    assert draw_again(tmp_path, facts | {"figures": figures[-1:]}) == []
    assert [file.stem for file in tmp_path.glob("*.png")] == [figures[-1]["figure"]]


def test_a_file_that_unpacks_to_more_or_leads_elsewhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("position_papers.kit.charts.MOST_BYTES", 1 << 24)
    file = tmp_path / CHARTS
    file.write_bytes(lzma.compress(bytes((1 << 24) + 1)))
    with refused("unpacks to more than 16 MB"):
        read_charts([], file)
    with h5py.File(tmp_path / "plain.nc", "w") as plain:
        plain.create_dataset("own", shape=(4,), dtype="i1", external=[("elsewhere", 0, 4)])
    file.write_bytes(lzma.compress((tmp_path / "plain.nc").read_bytes()))
    with refused("takes its numbers from other files"):
        read_charts([], file)
