"""The page in a browser: it opens, heads are chosen, text is found, tokens are clicked; keys, narrow, dark, and from an address."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from chromium import Browser, executable
from drawn import without_pictures
from families import tiny
from run_fixture import large_run, small_run

import repo_interp as ri
from repo_interp.measures.attention_rows import AttentionRows
from repo_interp.plots import report_page
from repo_interp.plots.findings import Finding
from repo_interp.plots.pages import report
from repo_interp.plots.pages.report import write_report

CHROMIUM = executable()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed, so that no page can be opened")
WORDS = ["<bos>", "A", "special", "magic", "number", "is", "hidden", "here", "and", "magic", "again", "."]


def word_run() -> xr.DataTree:
    """Twelve words, two layers of two heads, and logits of every pair: head 1 of layer 3 sends token 9 to token 3."""
    positions = small_run()["positions"].to_dataset().isel(prompt=[0], layer=[2, 3], head=[0, 1], token=slice(0, 12))
    positions = positions.assign(token_text=(("prompt", "token"), [WORDS]), token_count=("prompt", [12]))
    logits = np.where(np.tri(12, dtype=bool), 0.0, np.nan) * np.ones((2, 2, 1, 1))
    logits[1, 1, 9, 3] = 5.0
    maps = xr.Dataset(
        {"logit_map": (("layer", "head", "query_block", "key_block"), logits), "block_size": 1},
        {name: positions[name] for name in ("layer", "head", "scheme")} | {"query_block": range(12), "key_block": range(12)},
    )
    return xr.DataTree.from_dict({"/positions": positions, "/maps": maps})


SEEN = ri.tasks.Prompt(
    tokens=tuple(range(3, 3 + len(WORDS))), spans={"needle": (3, 4), "query": (9,)}, generated=(11,), token_text=tuple(WORDS)
)


def measured(layout: str, measures: tuple, prompts: tuple = (SEEN,)) -> xr.DataTree:
    """A run of a tiny model of random weights over the twelve words."""
    run = ri.analyze(ri.bridge(ri.reposition(tiny("llama"), layout)), list(prompts), measures)
    run.attrs["checkpoint"] = f"tiny/{layout}"
    return run


TOKENS = ("attention_rows", "predictions")
FOUND = [
    Finding("The <b>patterns</b> say little.", "patterns, no null", 0.9, "patterns"),
    Finding("L4 H2 finds the needle.", "mass above 50 %", 0.8, "attention_mass", 4, 2, 1, 30),
    Finding("L5 H1 has constant positions.", "share above .9", 0.7, "patterns", 5, 1),
]


@pytest.fixture(scope="module")
def rope() -> xr.DataTree:
    return measured("rope", ("attention_mass", *TOKENS), (SEEN, replace(SEEN, tokens=SEEN.tokens[::-1])))


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    one = Browser(tmp_path_factory.mktemp("profile"), CHROMIUM)
    yield one
    one.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory, rope) -> Path:
    directory = tmp_path_factory.mktemp("pages")
    with without_pictures(), pytest.MonkeyPatch.context() as none_found:
        none_found.setattr(report, "findings", lambda run: [])  # pages without any, but where a test is about them
        report_page(small_run(), directory / "small.html")
        report_page(word_run(), directory / "words.html")
        report_page(large_run(prompts=1, layers=3, heads=4, tokens=4096), directory / "long.html", megabytes=0.2)
        report_page(rope, directory / "rope.html")
        report_page(measured("repo", ("positions", AttentionRows(rows=4, keys=3), "predictions")), directory / "few.html")
        sides = {layout: measured(layout, ("positions", *TOKENS)) for layout in ("repo", "repo@1")}
        framed = ri.show(rope)._repr_html_()
        (directory / "framed.html").write_text(framed.replace("sandbox=", "data-sandbox="))  # so that the test may look into it
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(report, "findings", lambda run: FOUND)
            report_page(small_run(), directory / "found.html")
        assert not write_report(ri.compare(sides), directory / "compared.html", directory / "figures")
    return directory


@pytest.fixture
def opened(browser, pages):
    """Opens a page by its name, in a window of a desktop unless told otherwise; whatever happens, its console stays without errors."""

    def open_page(name: str, address: str = "", width: int = 1280, dark: bool = False) -> Browser:
        browser.size(width, 900, dark)
        browser.open(f"{(pages / name).as_uri()}{address}")
        frame = "document.querySelector('iframe')"
        browser.wait(f"'alive' in ({frame} ? {frame}.contentDocument : document).documentElement.dataset")
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


def test_it_opens_on_all_heads_and_the_prompt_and_a_click_opens_a_head(opened):
    browser = opened("small.html")
    assert tiles(browser) == [f"{layer}/{head}" for layer in range(6) for head in range(4)]
    assert browser.run("document.querySelectorAll('#explorer-text span[data-token]').length") == 96
    generated = small_run()["positions"].to_dataset()["span_mask"].sel(prompt=0, span="generated").values
    assert f"Token {np.flatnonzero(generated)[0] - 1} " in text_of(browser, "#explorer-facts"), (
        "the token that produced the answer"
    )
    title, prompts = text_of(browser, "#gallery-score option"), small_run()["positions"].sizes["prompt"]
    assert text_of(browser, "#gallery-mean") == f"Colour and number of a head: {title}, mean over {prompts} prompts."
    mean, drawn = browser.run("document.querySelector('#gallery-grid .tile').title").split(". Drawn: ")
    number = text_of(browser, "#gallery-grid .tile-score")
    assert mean.endswith(f": {title}, mean over {prompts} prompts: {number}") and drawn.startswith("the chosen prompt")
    before = shown_heads(browser)
    assert before[0] != before[1]
    wanted = next(head for head in reversed(tiles(browser)) if head not in before)
    browser.run(f"document.querySelector('.tile[data-head=\"{wanted}\"]').click()")
    assert shown_heads(browser) == [wanted, before[1]]
    replaced = f"L{before[0][0]} H{before[0][2]}"
    assert text_of(browser, "#explorer-said") == f"L{wanted[0]} H{wanted[2]} is shown in place of {replaced}."
    browser.run("document.querySelector('#explorer-text [data-token=\"9\"]').click()")
    assert "does not hold where it looks" in text_of(browser, "#explorer-looks"), "this run has no logits"
    ranges = "[...document.querySelectorAll('#explorer-panels .plot')].map((one) => one.layout.yaxis.range.join())"
    assert len(set(browser.run(ranges))) == 2
    browser.run("document.querySelector('input[value=global]').click()")
    assert len(set(browser.run(ranges))) == 1, "one scale for all panels"


def test_it_opens_on_the_first_finding_that_names_a_head_and_a_button_chooses_another(opened):
    browser = opened("found.html")
    pressed = "document.querySelector('.tile[aria-pressed=true]').dataset.head"
    fields = ("explorer-prompt", "gallery-score")
    prompt, score = (f"document.querySelector('#{field}').selectedOptions[0].text" for field in fields)
    assert browser.run(f"[{pressed}, {score}]") == ["4/2", "attention mass on needle (%)"]
    assert browser.run(prompt).startswith("1 ") and browser.run("document.querySelector('#explorer-token').value") == "30"
    told = browser.run("[...document.querySelectorAll('#findings li')].map((one) => one.textContent)")
    assert [finding.sentence in text and finding.evidence in text for finding, text in zip(FOUND, told, strict=True)] == [
        True
    ] * 3
    places = "[...document.querySelectorAll('#findings, #gallery-grid')].map((one) => one.getBoundingClientRect().top)"
    assert browser.run(f"Math.max(...{places})") < 700, "both begin on the first screen"
    assert browser.run("document.documentElement.scrollHeight") < 6000
    browser.run("document.querySelector('#findings button[data-head=\"1\"]').click()")
    assert browser.run(pressed) == "5/1" and "chunks" in browser.run(score)
    assert text_of(browser, "#explorer-facts").startswith("Token "), "one is chosen where the finding names none"


def test_a_map_shows_the_largest_prompt_and_the_chosen_one_and_a_table_is_saved(opened):
    browser = opened("found.html")
    mass = 100 * small_run()["attention_mass"].to_dataset()["mass"].sel(span="needle")
    shown = "[...document.querySelectorAll('#gallery-grid .tile-score')].map((one) => Number(one.textContent))"
    for of, values in (("largest", mass.max("prompt")), ("chosen", mass.sel(prompt=1)), ("mean", mass.mean("prompt"))):
        choose(browser, "gallery-of", of)
        assert browser.run(shown) == pytest.approx(values.transpose("layer", "head").values.ravel().tolist(), rel=6e-3)
    saved = browser.run("""new Promise((done) => {
        const address = URL.createObjectURL;
        URL.createObjectURL = (blob) => { blob.text().then(done); return address(blob); };
        [...document.querySelectorAll('#attention_mass caption .save')].filter((one) => one.textContent === 'CSV').pop().click();
    })""")
    first, second = list(csv.reader(saved.splitlines()))[:2]
    assert first[:3] == ["rank", "layer", "head"] and len(first) == len(second)
    assert mass.mean("prompt").max() == pytest.approx(float(second[4]), rel=6e-3)


def test_the_rest_of_a_row_is_shown_without_token_0(opened, rope):
    opened("small.html")  # else a page that is open already keeps its state
    browser = opened("rope.html")
    browser.run("document.querySelector('.tile[data-head=\"1/2\"]').click()")
    browser.run("document.querySelector('#explorer-text [data-token=\"9\"]').click()")
    browser.run("document.querySelector('#explorer-sink').click()")
    own = rope["attention_rows"].to_dataset().sel(layer=1, head=2, query=9)
    weights = dict(zip(own["key"].values.tolist(), own["weight"].values.tolist(), strict=True))
    bars = "document.querySelector('.chosen-panel .plot').data.find((trace) => trace.type === 'bar')"
    browser.wait("document.querySelector('#explorer-looks').textContent.startsWith('L1 H2 looks from token 9 without token 0')")
    keys, shares = browser.run(f"[{bars}.x, {bars}.y]")
    assert sorted(keys) == list(range(1, 10)) and sum(shares) == pytest.approx(100, rel=2e-3)
    assert shares == pytest.approx([100 * weights[key] / (1 - weights[0]) for key in keys], rel=2e-3)
    assert "from token 9 without token 0 at tokens" in text_of(browser, "#explorer-looks")


def test_a_page_in_a_notebook_comes_to_life(opened):
    browser = opened("framed.html")
    inside = "document.querySelector('iframe').contentDocument"
    browser.run(f"{inside}.querySelector('.tile[data-head=\"1/2\"]').click()")
    browser.run(f"{inside}.querySelector('a[href=\"#predictions\"]').click()")
    assert browser.run(f"{inside}.querySelector('#predictions > details').open")
    assert browser.run(f"{inside}.querySelector('.tile[aria-pressed=true]').dataset.head") == "1/2"


def test_words_are_found_across_tokens(opened):
    browser = opened("words.html")
    assert text_of(browser, "#explorer-text").startswith("<bos> A special magic number")
    assert find(browser, "Special  MAGIC number").startswith("1 of 1")
    assert browser.run("[...document.querySelectorAll('.match')].map((one) => one.dataset.token)") == ["2", "3", "4"]
    assert find(browser, "magic").startswith("1 of 2") and find(browser, "magic").startswith("2 of 2")
    assert "Token 9" in text_of(browser, "#explorer-facts")
    assert "is not in this prompt" in find(browser, "needle")
    for _ in range(2):  # a head is never added twice
        browser.run("document.querySelector('#explorer-add').click()")
    assert sorted(shown_heads(browser)) == ["2/0", "2/1", "3/0", "3/1"]
    assert browser.run("document.querySelector('#explorer-add').disabled")


def test_a_clicked_token_says_where_it_looks(opened):
    browser = opened("words.html")
    browser.run("document.querySelector('.tile[data-head=\"3/1\"]').click()")
    browser.run("document.querySelector('#explorer-text [data-token=\"9\"]').click()")
    share = 100 * np.exp(5) / (np.exp(5) + 9)
    assert f"L3 H1 looks from token 9 at tokens 3 “magic” {share:.1f} %" in text_of(browser, "#explorer-looks")
    browser.run("document.querySelector('.tile[data-head=\"2/0\"]').click()")
    assert "L2 H0 looks from token 9 at tokens 0 “<bos>” 10 %" in text_of(browser, "#explorer-looks")


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


def test_a_run_without_positions_opens_on_its_heads_and_shows_where_they_look(opened, rope):
    browser = opened("rope.html")
    rows, expected = rope["attention_rows"].to_dataset(), rope["predictions"].to_dataset()
    assert len(tiles(browser)) == rows.sizes["layer"] * rows.sizes["head"]
    assert browser.run("document.querySelector('#explorer-panels .plot').data.some((trace) => trace.type === 'bar')"), "not empty"
    maps = "[...document.querySelector('#gallery-score').options].map((one) => one.text)"
    title = "attention on token 0, mean over tokens of prompt 0 (%)"
    choose(browser, "gallery-score", str(browser.run(maps).index(title)))
    later = rows.sel(layer=1, head=2, query=slice(1, None))
    sink = 100 * float(later["weight"].where(later["key"] == 0).sum("rank").mean())
    assert float(text_of(browser, '.tile[data-head="1/2"] .tile-score')) == pytest.approx(sink, rel=6e-3)
    browser.run("document.querySelector('.tile[data-head=\"1/2\"]').click()")
    browser.run("document.querySelector('#explorer-text [data-token=\"9\"]').click()")
    bars = "document.querySelector('.chosen-panel .plot').data.find((trace) => trace.type === 'bar')"
    own = rows.sel(layer=1, head=2, query=9)
    keys, weights = browser.run(f"[{bars}.x, {bars}.y]")
    assert keys == own["key"].values[:10].tolist() and weights == pytest.approx(
        (100 * own["weight"].values[:10]).tolist(), rel=1e-3
    )
    after = expected.sel(token=9)
    said = text_of(browser, "#explorer-facts")
    assert f"Expected next: {after['next_text'].values[0] or '∅'} {100 * float(after['probability'][0]):.3g} %" in said
    assert f"what does follow has {100 * float(after['probability_of_next']):.3g} %" in said
    browser.run("document.querySelector('#attention_rows .head-charts').scrollIntoView()")
    browser.wait("document.querySelectorAll('#attention_rows .head-charts .js-plotly-plot').length === 2")
    distances, logits = browser.run(
        "(() => { const [one] = document.querySelectorAll('#attention_rows .head-charts .plot')[1].data; return [one.x, one.y]; })()"
    )
    there = np.log(own["weight"].values[:10]) + float(own["log_total"])
    assert sorted(distances) == list(range(10))
    assert sorted(logits) == pytest.approx(sorted(there.tolist()), abs=2e-3)
    browser.run("Object.assign(document.querySelector('#explorer-prompt'), {value: 1}).dispatchEvent(new Event('change'))")
    browser.run("document.querySelector('#explorer-text [data-token=\"7\"]').click()")
    other = rows.sel(prompt=1, layer=1, head=2, token=7)
    keys, weights = browser.run(f"[{bars}.x, {bars}.y]")
    assert keys == other["prompt_key"].values.tolist()
    assert weights == pytest.approx((100 * other["prompt_weight"].values).tolist(), rel=1e-3)


def test_a_token_without_a_row_names_the_nearest_one_that_has(opened):
    browser = opened("few.html")
    browser.run("document.querySelector('#explorer-text [data-token=\"8\"]').click()")
    assert "The run keeps the rows of 4 tokens" in text_of(browser, "#explorer-looks")
    browser.run("document.querySelector('#explorer-looks button').click()")
    assert browser.run("document.querySelector('#explorer-token').value") == "9"
    assert "looks from token 9 at tokens" in text_of(browser, "#explorer-looks")
    assert "Expected next" in text_of(browser, "#explorer-facts")


def test_what_is_chosen_on_one_side_of_a_comparison_is_chosen_on_the_other(opened):
    browser = opened("compared.html")
    assert browser.run(
        "new Set([...document.querySelectorAll('[id]')].map((one) => one.id)).size === document.querySelectorAll('[id]').length"
    )
    sides = "[...document.querySelectorAll('.sides > section')]"
    chosen = f"{sides}.map((side) => side.querySelector('.tile[aria-pressed=true]').dataset.head)"
    tokens = f"{sides}.map((side) => side.querySelector('[id$=explorer-token]').value)"
    assert len(set(browser.run(chosen))) == 1
    browser.run("document.querySelector('#side-0 .tile[data-head=\"1/3\"]').click()")
    browser.wait(f"String({chosen}) === '1/3,1/3'")
    browser.run("document.querySelector('#side-1-explorer-text [data-token=\"7\"]').click()")
    assert browser.run(tokens) == ["7", "7"]
    looks = browser.run(f"{sides}.map((side) => side.querySelector('[id$=explorer-looks]').textContent)")
    assert all(text.startswith("L1 H3 looks from token 7") for text in looks) and looks[0] != looks[1]
    browser.run("document.querySelector('#side-1 .plot').focus()")
    browser.press("ArrowRight")
    assert browser.run(tokens) == ["8", "8"]
    assert browser.run("[...document.querySelectorAll('.switch input:checked')].map((one) => one.value)") == ["own", "own"]
    address = browser.run("location.hash")
    browser = opened("compared.html", address, width=420, dark=True)
    browser.wait(f"String({chosen}) === '1/3,1/3' && String({tokens}) === '8,8'")
    assert browser.run("document.documentElement.scrollWidth") <= 420


@pytest.mark.parametrize(("width", "dark"), [(420, False), (420, True), (600, False), (800, False), (1280, False), (1600, False)])
def test_a_page_is_as_wide_as_its_window_and_no_control_is_cut(opened, width, dark):
    browser = opened("small.html", width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    paper = browser.run("document.querySelector('#explorer-panels .plot').layout.paper_bgcolor")
    assert paper == ("#1e2023" if dark else "#ffffff")
    cut = """[...document.querySelectorAll('select')].filter((one) => one.offsetParent).flatMap((one) => {
        const pen = document.createElement('canvas').getContext('2d');
        pen.font = getComputedStyle(one).font;
        return [...one.options].map((option) => option.text).filter((text) => pen.measureText(text).width > one.clientWidth - 16);
    })"""
    assert width == 420 or browser.run(cut) == []
