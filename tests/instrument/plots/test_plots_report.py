"""The page: its data decode to the run's numbers, no token breaks it, nothing is requested,
everything stands without JavaScript too.
"""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from drawn import without_pictures
from run_fixture import AWKWARD, large_run

import repo_interp as ri
from repo_interp.errors import InputError
from repo_interp.plots import report_page
from repo_interp.plots.marks.arrays import focused_range
from repo_interp.plots.marks.head_charts import NOTHING, HeadImage
from repo_interp.plots.pages.frame import json_script
from repo_interp.plots.view import PageOptions
from repo_interp.plots.view_catalogue import views_of
from repo_interp.plots.views.attention_mass import mass_table
from repo_interp.plots.views.explorer import explorer_data


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, and the texts of some."""

    def __init__(self, page: Path | str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        kept = ("script", "td", "th", "h2", "p", "pre", "caption")
        self.texts: dict[str, list[str]] = {tag: [] for tag in kept}
        self._open: list[str] = []
        self.feed(page if isinstance(page, str) else page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag in self.texts:
            self.texts[tag].append("")
            self._open.append(tag)

    def handle_endtag(self, tag):
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data):
        if self._open:
            self.texts[self._open[-1]][-1] += data

    def data(self, section: str):
        scripts = [attributes for tag, attributes in self.elements if tag == "script"]
        sections = [one.get("data-section") for one in scripts]
        return json.loads(self.texts["script"][sections.index(section)])


def unpack_layer(block: dict) -> np.ndarray:
    """The positions [head, token] of one layer as the page's scripts read them, float32."""
    rows = np.frombuffer(base64.b64decode(block["values"]), dtype="<f4").reshape(
        max(block["row"]) + 1, -1
    )
    return rows[block["row"]]


@pytest.fixture(scope="module")
def page(small, tmp_path_factory) -> Page:
    with without_pictures():
        return Page(report_page(small, tmp_path_factory.mktemp("page") / "report.html"))


def test_embedded_positions_are_the_runs_bit_for_bit(small, page):
    data = page.data("positions")["data"]
    assert [one["prompt"] for one in data["prompts"]] == [0, 1, 2] and data["heads"] == [0, 1, 2, 3]
    position = small["positions"]["position"]
    for one in data["prompts"]:
        for layer, block in one["layers"].items():
            expected = position.sel(prompt=one["prompt"], layer=int(layer)).values[:, :96]
            assert (unpack_layer(block) == expected).all()
            for head, row in enumerate(block["row"]):
                assert tuple(block["focused"][row]) == focused_range(expected[head])
    first = data["prompts"][0]
    # equal heads are embedded once
    assert [first["layers"][layer]["row"] for layer in "02"] == [[0, 0, 0, 0], [0, 1, 2, 3]]
    texts = small["positions"]["token_text"].sel(prompt=0).values[:96].tolist()
    assert first["texts"] == texts and set(AWKWARD) <= set(texts)
    assert first["spans"]["needle"] == [[51, 56]] and first["spans"]["needle.1.key"] == [[51, 51]]


def test_no_token_breaks_out_of_the_page(page):
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 3 + 1  # the data of three sections, and the page's own
    assert "b" not in tags and any("</script><b>" in text for text in page.texts["pre"])


def test_the_page_in_a_notebook_is_the_page_whatever_its_texts(small, page, no_pictures):
    ((tag, frame),) = Page(ri.show(small, height=431)._repr_html_()).elements
    assert tag == "iframe" and "height: 431px" in frame["style"]
    assert frame["sandbox"].split() == ["allow-scripts", "allow-downloads"]
    again = Page(frame["srcdoc"])
    assert again.elements == page.elements and again.texts == page.texts
    wrong: Any = True
    for height in (0, wrong):
        with pytest.raises(InputError, match="wanted pixels"):
            ri.show(small, height=height)


def test_json_may_stand_in_a_script():
    text = '</script> <!-- \u2028 &lt; \ud800 " \\ \x00'
    written = json_script({"text": text})
    assert not re.search("[<>&\u2028\u2029]", written)
    written.encode("utf-8")
    assert json.loads(written) == {"text": text}
    with pytest.raises(ValueError, match="JSON"):
        json_script([float("nan")])


def test_nothing_is_requested(page):
    for tag, attributes in page.elements:
        assert tag not in {"link", "iframe"}
        assert attributes.get("src", "data:image/").startswith("data:image/")
        assert attributes.get("href", "#").startswith("#")
    (policy,) = (each["content"] for _, each in page.elements if "http-equiv" in each)
    assert policy.startswith("default-src 'none'") and not re.search("http|unsafe-eval", policy)


def test_tables_stand_in_plain_html(small, page):
    cells = page.texts["td"]
    for row in mass_table(small).formatted():
        assert set(row) <= set(cells)
    assert "Attention mass from generated tokens, by span" in page.texts["caption"]
    assert "checkpoint" in page.texts["th"] and "official/repo_mha" in page.texts["pre"]


def test_every_picture_says_what_it_shows_and_no_name_is_given_twice(small, page):
    """But those that the page shows as maps."""
    told = [each["alt"] for tag, each in page.elements if tag == "img"]
    charts = (chart for view in views_of(small) for chart in view.drawings(small))
    assert told == [chart.caption for chart in charts if not chart.live]
    assert len(told) == len(set(told)) and all(each.endswith(".") for each in told)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_absent_groups_have_no_section_and_an_empty_run_no_page(small, no_pictures, tmp_path):
    file = tmp_path / "report.html"
    with pytest.raises(InputError, match="at least one measure; this one has none"):
        report_page(xr.DataTree(), file)
    assert not file.exists()
    only = small.drop_nodes(["positions", "attention_mass"])
    only["mean_norm"] = xr.Dataset({"norm": ("layer", [1.0])})
    page = Page(report_page(only, file))
    assert page.texts["h2"] == ["Patterns of positions", "Provenance"]
    assert "mean_norm" in file.read_text()


def test_what_does_not_fit_is_left_out_whole_and_named(tmp_path):
    run = large_run(prompts=4, layers=3, heads=4, tokens=128)
    layer = 4 * 128 * 4 * 4 / 3  # one learned layer in bytes of base64
    data, (note,) = explorer_data(run, PageOptions(budget=round(5 * layer)))
    assert [one["prompt"] for one in data["prompts"]] == [0, 1]
    assert "2 of 4 prompts are in this page: 0–1" in note and "2–3" in note
    data, _ = explorer_data(run, PageOptions(prompts=(3, 1)))
    assert [one["prompt"] for one in data["prompts"]] == [3, 1]
    data, (note,) = explorer_data(run, PageOptions(budget=round(1.5 * layer)))
    assert list(data["prompts"][0]["layers"]) == [0, 2] and "its layers 1 are left out" in note
    with pytest.raises(InputError, match="no prompt 9"):
        explorer_data(run, PageOptions(prompts=(9,)))


def test_layers_without_positions_are_embedded_as_such(small):
    run = small.copy(deep=True)
    for name in ("position", "position_range"):
        run["positions"][name][:, 0] = np.nan
    data, _ = explorer_data(run, PageOptions())
    block = data["prompts"][0]["layers"][0]
    assert np.isnan(unpack_layer(block)).all()
    assert block["global"] == block["focused"] == [None]


def test_images_of_heads_are_coarsened_until_they_fit():
    logits = np.where(np.tri(2001, dtype=bool), np.arange(2001.0), np.nan)
    axes = {"layer": [0], "head": [0]}
    values = xr.DataArray(logits[None, None], axes, ("layer", "head", "row", "column"))
    image = HeadImage("logits", "key", "query", values, 1, 2001, 0).data()
    assert (image["rows"], image["columns"], image["size"]) == (1001, 1001, 2)
    levels = np.frombuffer(base64.b64decode(image["values"]), dtype="<u2").reshape(1001, 1001)
    decoded = image["low"][0][0] + image["spread"][0][0] * levels / (NOTHING - 1)
    decoded[levels == NOTHING] = np.nan
    # the mean of its three pairs
    assert np.isnan(decoded[0, 1:]).all() and decoded[0, 0] == pytest.approx(1 / 3, abs=0.02)
    assert decoded[500, :500] == pytest.approx(np.arange(500) * 2 + 0.5, abs=0.05)


def test_the_page_says_what_was_left_out(small, no_pictures, tmp_path):
    only = small.drop_nodes(["patterns", "attention_mass"])
    page = Page(report_page(only, tmp_path / "report.html", prompts=[2]))
    assert [one["prompt"] for one in page.data("positions")["data"]["prompts"]] == [2]
    assert any("1 of 3 prompts are in this page: 2" in text for text in page.texts["p"])
