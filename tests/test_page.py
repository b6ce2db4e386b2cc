"""The page in a browser: it opens, heads are chosen, text is found, tokens are clicked; keys, narrow, dark, and from an address."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from chromium import Browser, executable
from run_fixture import large_run, small_run

from repo_interp.plots import report_page
from repo_interp.plots.marks.head_charts import NOTHING, HeadImage

CHROMIUM = executable()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed, so that no page can be opened")
WORDS = ["<bos>", "A", "special", "magic", "number", "is", "hidden", "here", "and", "magic", "again", "."]


def word_run() -> xr.DataTree:
    """Twelve words, two layers of two heads, and logits of every pair: head 1 of layer 1 sends token 9 to token 3."""
    run = small_run()
    positions = run["positions"].to_dataset().isel(prompt=[0], layer=[2, 3], head=[0, 1], token=slice(0, 12)).copy(deep=True)
    positions = positions.drop_vars("token_text").assign(token_text=(("prompt", "token"), [WORDS]))
    positions["token_count"][:] = 12
    logits = np.where(np.tri(12, dtype=bool), 0.0, np.nan) * np.ones((2, 2, 1, 1))
    logits[1, 1, 9, 3] = 5.0
    maps = xr.Dataset(
        {"logit_map": (("layer", "head", "query_block", "key_block"), logits), "block_size": 1},
        coords={
            "layer": [2, 3],
            "head": [0, 1],
            "query_block": range(12),
            "key_block": range(12),
            "scheme": ("layer", ["repo", "repo"]),
        },
    )
    return xr.DataTree.from_dict({"/positions": positions, "/maps": maps})


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    one = Browser(tmp_path_factory.mktemp("profile"), CHROMIUM)
    yield one
    one.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("pages")
    report_page(small_run(), directory / "small.html")
    report_page(word_run(), directory / "words.html")
    report_page(large_run(prompts=1, layers=3, heads=4, tokens=4096), directory / "long.html", megabytes=0.2)
    return directory


@pytest.fixture
def opened(browser, pages):
    """Opens a page by its name, in a window of a desktop unless told otherwise; whatever happens, its console stays without errors."""

    def open_page(name: str, address: str = "", width: int = 1280, dark: bool = False) -> Browser:
        browser.size(width, 900, dark)
        browser.open(f"{(pages / name).as_uri()}{address}")
        return browser

    yield open_page
    assert browser.errors == []


def tiles(browser: Browser) -> list[str]:
    return browser.run("[...document.querySelectorAll('#gallery-grid .tile')].map((tile) => tile.dataset.head)")


def choose(browser: Browser, field: str, value: str) -> None:
    browser.run(f"Object.assign(document.querySelector('#{field}'), {{value: '{value}'}}).dispatchEvent(new Event('input'))")


def shown_heads(browser: Browser) -> list[str]:
    return browser.run(
        "[...document.querySelectorAll('.panel .layer')].map((one, place) => "
        "one.value + '/' + document.querySelectorAll('.panel .head')[place].value)"
    )


def text_of(browser: Browser, name: str) -> str:
    return browser.run(f"document.querySelector('{name}').textContent")


def find(browser: Browser, text: str) -> str:
    browser.run(f"Object.assign(document.querySelector('#explorer-find'), {{value: '{text}'}}).focus()")
    browser.press("Enter")
    return text_of(browser, "#explorer-found")


def test_it_opens_on_all_heads_and_the_prompt(opened):
    browser = opened("small.html")
    assert tiles(browser) == [f"{layer}/{head}" for layer in range(6) for head in range(4)]
    assert browser.run("document.querySelectorAll('#explorer-text span[data-token]').length") == 96
    first, second = shown_heads(browser)
    assert first != second
    assert "No token is chosen" in text_of(browser, "#explorer-facts")


def test_heads_are_sorted_by_a_score_and_filtered(opened):
    browser = opened("small.html")
    mass = 100 * small_run()["attention_mass"].to_dataset()["mass"].sel(span="needle").mean("prompt").values
    scores = browser.run("[...document.querySelector('#gallery-score').options].map((one) => one.text)")
    choose(browser, "gallery-score", str(scores.index("attention mass on needle (%)")))
    choose(browser, "gallery-order", "largest")
    order = np.argsort(-mass, axis=None, kind="stable")
    assert tiles(browser) == [f"{place // 4}/{place % 4}" for place in order]
    choose(browser, "gallery-scheme", "RePo")
    learned = tiles(browser)
    assert 0 < len(learned) < 24 and all(int(head[0]) >= 2 for head in learned)
    least = float(np.median(mass))
    choose(browser, "gallery-least", str(least))
    assert tiles(browser) == [head for head in learned if mass[int(head[0]), int(head[2])] >= least]
    choose(browser, "gallery-from", "3")
    assert all(int(head[0]) >= 3 for head in tiles(browser))


def test_a_click_opens_a_head_and_says_what_it_replaces(opened):
    browser = opened("small.html")
    before = shown_heads(browser)
    wanted = next(head for head in reversed(tiles(browser)) if head not in before)
    browser.run(f"document.querySelector('.tile[data-head=\"{wanted}\"]').click()")
    assert shown_heads(browser) == [wanted, before[1]]
    replaced = f"L{before[0][0]} H{before[0][2]}"
    assert text_of(browser, "#explorer-said") == f"L{wanted[0]} H{wanted[2]} is shown in place of {replaced}."


def test_a_head_is_never_added_twice(opened):
    browser = opened("words.html")
    for _ in range(2):
        browser.run("document.querySelector('#explorer-add').click()")
    assert sorted(shown_heads(browser)) == ["2/0", "2/1", "3/0", "3/1"]
    assert browser.run("document.querySelector('#explorer-add').disabled")


def test_global_is_one_scale_for_all_panels(opened):
    browser = opened("small.html")
    ranges = "[...document.querySelectorAll('#explorer-panels .plot')].map((one) => one.layout.yaxis.range.join())"
    first, second = browser.run(ranges)
    assert first != second
    browser.run("document.querySelector('input[value=global]').click()")
    first, second = browser.run(ranges)
    assert first == second


def test_words_are_found_across_tokens(opened):
    browser = opened("words.html")
    assert text_of(browser, "#explorer-text").startswith("<bos> A special magic number")
    assert find(browser, "Special  MAGIC number").startswith("1 of 1")
    assert browser.run("[...document.querySelectorAll('.match')].map((one) => one.dataset.token)") == ["2", "3", "4"]
    assert find(browser, "magic").startswith("1 of 2") and find(browser, "magic").startswith("2 of 2")
    assert "Token 9" in text_of(browser, "#explorer-facts")
    assert "is not in this prompt" in find(browser, "needle")


def test_a_clicked_token_says_where_it_looks(opened):
    browser = opened("words.html")
    browser.run("document.querySelector('.tile[data-head=\"3/1\"]').click()")
    browser.run("document.querySelector('#explorer-text [data-token=\"9\"]').click()")
    share = 100 * np.exp(5) / (np.exp(5) + 9)
    assert f"L3 H1 looks from token 9 at tokens 3 “magic” {share:.1f} %" in text_of(browser, "#explorer-looks")
    browser.run("document.querySelector('.tile[data-head=\"2/0\"]').click()")
    assert "L2 H0 looks from token 9 at tokens 0 “<bos>” 10 %" in text_of(browser, "#explorer-looks")


def test_a_run_without_logits_says_so(opened):
    browser = opened("small.html")
    browser.run("document.querySelector('#explorer-text [data-token=\"9\"]').click()")
    assert "does not hold where it looks" in text_of(browser, "#explorer-looks")


def test_keys_step_through_tokens_and_heads(opened):
    browser = opened("small.html")
    browser.run("document.querySelector('#explorer-panels .plot').focus()")
    for key in ("End", "ArrowLeft", "ArrowLeft", "ArrowRight"):
        browser.press(key)
    assert browser.run("document.querySelector('#explorer-token').value") == "94"
    browser.press("Escape")
    assert browser.run("document.querySelector('#explorer-token').value") == ""
    browser.run("document.querySelector('.tile[data-head=\"0/0\"]').focus()")
    for key in ("ArrowRight", "ArrowDown"):
        browser.press(key)
    assert browser.run("document.activeElement.dataset.head") == "1/1"


def test_an_address_restores_the_view(opened):
    browser = opened("small.html")
    browser.run("document.querySelector('.tile[data-head=\"4/3\"]').click()")
    choose(browser, "gallery-order", "smallest")
    find(browser, str(small_run()["positions"].to_dataset()["token_text"].values[0, 40]).strip())
    address, heads, order = browser.run("location.hash"), shown_heads(browser), tiles(browser)
    token = browser.run("document.querySelector('#explorer-token').value")
    browser = opened("small.html", address)
    assert (shown_heads(browser), tiles(browser)) == (heads, order)
    assert browser.run("document.querySelector('#explorer-token').value") == token != ""
    assert browser.run("location.hash") == address
    opened("small.html", "#explore?prompt=7&heads=99.1,x&token=many&view=5~1&score=-3")


def test_long_prompts_are_a_median_until_they_are_zoomed_to(opened):
    browser = opened("long.html")
    lines = "document.querySelector('#explorer-panels .plot').data.slice(1).map((one) => one.mode + one.x.length)"
    band, median = browser.run(lines)
    assert int(median.removeprefix("lines")) < 300 and int(band.removeprefix("lines")) < 600
    assert browser.run("!document.querySelector('#explorer-overview').hidden")
    assert len(tiles(browser)) == 12 and browser.run("document.querySelectorAll('.tile path').length") == 12
    browser.run("Object.assign(document.querySelector('#explorer-token'), {value: 3000}).dispatchEvent(new Event('change'))")
    (dots,) = browser.run(lines)
    assert dots.startswith("lines+markers")
    first, last = browser.run("document.querySelector('#explorer-panels .plot').layout.xaxis.range")
    assert first < 3000 < last and last - first < 200


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_page_is_as_wide_as_its_window(opened, dark):
    browser = opened("small.html", width=420, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= 420
    paper = browser.run("document.querySelector('#explorer-panels .plot').layout.paper_bgcolor")
    assert paper == ("#1e2023" if dark else "#ffffff")


def test_images_of_heads_are_coarsened_until_they_fit():
    logits = np.where(np.tri(2001, dtype=bool), np.arange(2001.0), np.nan)
    values = xr.DataArray(logits[None, None], dims=("layer", "head", "row", "column"), coords={"layer": [0], "head": [0]})
    image = HeadImage("logits", "key", "query", values, 1, 2001, 0).data()
    assert (image["rows"], image["columns"], image["size"]) == (1001, 1001, 2)
    levels = np.frombuffer(b64decode(image["values"]), dtype="<u2").reshape(1001, 1001)
    decoded = np.where(levels == NOTHING, np.nan, image["low"][0][0] + image["spread"][0][0] * levels / (NOTHING - 1))
    assert np.isnan(decoded[0, 1:]).all() and decoded[0, 0] == pytest.approx(1 / 3, abs=0.02)  # the mean of its three pairs
    assert decoded[500, :500] == pytest.approx(np.arange(500) * 2 + 0.5, abs=0.05)
    assert decoded[-1, -1] == pytest.approx(2000, abs=0.05)
