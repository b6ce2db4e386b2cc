"""Views: every group has one, a figure is drawn once for the files and the page, and another
package gives its own as we give ours.
"""

from __future__ import annotations

import re
import sys
from base64 import b64decode

import numpy as np
import pytest
import xarray as xr

from repo_interp.entry_points import EXPERIMENTS, MEASURES, OWN, VIEWS
from repo_interp.errors import InputError
from repo_interp.plots import paper_figure, report_page, style, tables
from repo_interp.plots.pages.frame import MOST_SVG, picture, template
from repo_interp.plots.pages.report import write_report
from repo_interp.plots.view_catalogue import figures_of, view_of, views_of


def test_every_group_of_ours_has_a_view_under_its_name():
    experiments = {*OWN[EXPERIMENTS], "output_traces", "scores"}
    assert set(OWN[VIEWS]) == {*OWN[MEASURES], *experiments}
    for group in OWN[VIEWS]:
        view = view_of(group)
        assert view is not None and view.group == group and view.title and view.lead
    assert view_of("nothing") is None


def test_views_stand_in_the_order_of_the_page_whatever_that_of_the_run(small):
    order = ["positions", "attention_mass", "patterns"]
    run = xr.DataTree(children={name: small[name] for name in reversed(order)})
    assert [view.group for view in views_of(run)] == order


def test_the_page_embeds_the_very_svg_of_the_files(small, tmp_path):
    part = small.drop_nodes(["positions", "patterns"]).isel(layer=[5])
    assert write_report(part, tmp_path / "report.html", tmp_path, ("svg",)) == []
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    names = ("attention_mass_by_span", "heads_ranked")  # and a map that a reader clicks
    files = [(tmp_path / f"{name}.svg").read_bytes() for name in names]
    embedded = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    assert [b64decode(content) for content in embedded] == files
    assert {file.stem for file in tmp_path.glob("*.svg")} == {*names, "heads_map"}


def test_a_picture_with_a_large_svg_is_a_png_and_its_caption_is_escaped():
    with style():
        figure = paper_figure(2, 1)
    small_svg, large_svg = (
        {"svg": bytes(size), "png": b"png"} for size in (MOST_SVG, MOST_SVG + 1)
    )
    assert picture(figure, "", small_svg).source.startswith("data:image/svg+xml;base64,AAA")
    shown = picture(figure, "a <line>", large_svg)
    assert (shown.width, shown.source) == (264, "data:image/png;base64,cG5n")
    html = template().static_of({"pictures": [shown], "tables": []})
    assert 'alt="a &lt;line&gt;"' in html and "a <line>" not in html


def test_what_says_little_is_folded_and_still_there(small, no_pictures, tmp_path):
    """Of the RoPE layers alone every position is its index."""
    plain = small.sel(layer=[0, 1], head=[0], prompt=[0])
    assert [view.informative(plain) for view in views_of(plain)] == [False, True, False]
    assert all(view.informative(small) for view in views_of(small))
    page = report_page(plain, tmp_path / "plain.html").read_text(encoding="utf-8")
    assert (
        page.count("<details><summary>Figures and tables with little information about this run")
        == 2
    )
    assert "Ranges of positions, max − min" in page
    assert {"positions", "patterns"} < {table.name for table in tables(plain)}


def test_a_page_with_nothing_to_click_has_no_script(no_pictures, tmp_path):
    score = ("test_set", [0.5, 1.0], {"long_name": "mean score", "units": "1"})
    variables = {"mean_score": score, "standard_error": score, "test_set": ["easy", "hard"]}
    run = xr.DataTree.from_dict({"scores": xr.Dataset(variables)})
    page = report_page(run, tmp_path / "scores.html").read_text(encoding="utf-8")
    assert "<script" not in page and "script-src" not in page and "JavaScript" not in page
    assert 'alt="Score of a model on a task."' in page and "<td>hard</td>" in page


# another package
# --------------------------------------------------------------------------------------------------

MODULE = """
import numpy as np
import xarray as xr
from importlib.resources import files
from pathlib import Path

from repo_interp.plots import Table, View, paper_figure, style
from repo_interp.plots.marks.chart import CustomFigure
from repo_interp.plots.marks.head_map import Heads
from repo_interp.plots.view import Interactive

drawn = []
NAMES = {names!r}


def figures(run):
    for name in NAMES:
        drawn.append(name)
        with style():
            figure = paper_figure(2, 1)
            figure.subplots().plot(run["mean_norm"]["norm"].values)
        yield name, figure


def charts(run):
    yield from (CustomFigure(name, lambda figure=figure: figure) for name, figure in figures(run))
    yield Heads(run["mean_norm"]["norm"])


VIEW = View(
    "mean_norm",
    "Norms & more",
    "How long keys are.",
    charts,
    tables=lambda run: (Table("norms", "<i>Norms</i>", ("a",), ((1.5,),)),),
    interactive=Interactive(
        Path(__file__).with_name("norms.html"),
        Path(__file__).with_name("norms.js"),
        lambda run, options: ({{"numbers": [1, options.budget]}}, ("Two heads are left out.",)),
    ),
)
NEITHER = 3
"""


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """Installs a package that shows the group `mean_norm` by `given`, and gives its module."""

    def install(given: str, names: tuple[str, ...] = ("norms",)):
        (tmp_path / "norm_views.py").write_text(MODULE.format(names=names))
        (tmp_path / "norms.html").write_text('<div id="norms-live"></div>')
        (tmp_path / "norms.js").write_text("window.reportSections.mean_norm = function () {};")
        about = tmp_path / "norm_views-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: norm-views\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(
            f"[repo_interp.plots]\nmean_norm = norm_views:{given}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "norm_views", raising=False)

    return install


def with_norms(run: xr.DataTree) -> xr.DataTree:
    norm = ("layer", "head"), np.arange(6.0).reshape(2, 3)
    norms = xr.Dataset({"norm": norm}, {"layer": [0, 1], "head": [0, 1, 2]})
    return xr.DataTree.from_dict({"patterns": run["patterns"].to_dataset(), "mean_norm": norms})


def test_a_group_without_a_view_has_maps_a_table_and_figures_of_what_it_gives_by_head(
    small, no_pictures, tmp_path
):
    """Of a long axis evenly spread labels."""
    values = {
        "norm": (("prompt", "layer", "head"), np.arange(12.0).reshape(2, 2, 3)),
        "share": (("layer", "head", "pair"), np.arange(90.0).reshape(2, 3, 15)),
        "word": (("layer", "head"), [["a"] * 3] * 2),
        "spread": ("layer", [1.0, 2.0]),
    }
    axes = {"prompt": [0, 5], "layer": [2, 7], "head": range(3), "pair": np.linspace(0, 7, 15)}
    own = xr.Dataset(values, axes)
    mass = small["attention_mass"].to_dataset()
    run = xr.DataTree.from_dict({"attention_mass": mass, "own": own})
    assert write_report(run, tmp_path / "report.html", tmp_path, ("png",)) == []
    names = {f"own_share_{label}_0" for label in range(8)} | {"own_norm", "own_share"}
    assert names <= {file.stem for file in tmp_path.glob("own_*.png")} <= {*names, "own_spread"}
    *_, table = tables(run)
    assert table.columns[2:] == ("norm", *(f"share, pair {label}.0" for label in range(8)))
    assert table.rows[0][:4] == (7, 2, 8.0, 75.0) and len(table.rows) == 6
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '"title":"share, pair 2.0"' in page
    assert '"prompts":{"numbers":[0,5],"values":[[[0.0,1.0,2.0],' in page
    said = "8 of 15 labels of the axis pair, evenly spread, are shown; run.nc has all."
    assert table.note.endswith(said) and page.count(said) >= 2


def test_a_view_of_another_package_gives_all_that_ours_give(
    small, other_package, no_pictures, tmp_path
):
    other_package("VIEW")
    shown = with_norms(small)
    page = report_page(shown, tmp_path / "report.html", megabytes=2).read_text(encoding="utf-8")
    section = page.partition('<section id="mean_norm"')[2].partition("</section>")[0]
    for part in (
        *("Norms &amp; more", "&lt;i&gt;Norms&lt;/i&gt;", '<div id="norms-live"></div>'),
        *('"data":{"numbers":[1,2000000]}', "Two heads are left out."),
    ):
        assert part in section
    assert "window.reportSections.mean_norm" in page
    assert [table.name for table in tables(shown)] == ["patterns", "norms"]


@pytest.mark.parametrize("names", [("pattern_shares",), ("../a",)])
def test_a_figure_needs_a_plain_name_of_its_own(small, other_package, names):
    other_package("figures", names)
    with pytest.raises(InputError, match="wanted a plain name that no other figure has"):
        list(figures_of(with_norms(small)))


def test_what_is_no_view_is_refused_by_name(small, other_package):
    other_package("NEITHER")
    with pytest.raises(InputError, match="'mean_norm' of the package norm-views is of type int"):
        views_of(with_norms(small))
