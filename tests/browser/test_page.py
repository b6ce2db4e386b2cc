"""The page in a browser: it opens, heads are chosen, text is found, tokens are clicked; keys,
narrow, dark, and from an address.
"""

from __future__ import annotations

import csv
import json
import shutil
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
from repo_interp.plugins.sources.names import NAMES

CHROMIUM = executable()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium is installed, so that no page can be opened"
)
SMALL = small_run()
MASS = 100 * SMALL["attention_mass"]["mass"].sel(span="needle")
WORDS = [
    "<bos>",
    "A",
    "special",
    "magic",
    "number",
    "is",
    "hidden",
    "here",
    "and",
    "magic",
    "again",
    ".",
]


def word_run() -> xr.DataTree:
    """Twelve words, two layers of two heads, and logits of every pair: head 1 of layer 3 sends
    token 9 to token 3.
    """
    positions = (
        small_run()["positions"]
        .to_dataset()
        .isel(prompt=[0], layer=[2, 3], head=[0, 1], token=slice(0, 12))
    )
    positions = positions.assign(
        token_text=(("prompt", "token"), [WORDS]), token_count=("prompt", [12])
    )
    logits = np.where(np.tri(12, dtype=bool), 0.0, np.nan) * np.ones((2, 2, 1, 1))
    logits[1, 1, 9, 3] = 5.0
    maps = xr.Dataset(
        {"logit_map": (("layer", "head", "query_block", "key_block"), logits), "block_size": 1},
        {name: positions[name] for name in ("layer", "head", "scheme")}
        | {"query_block": range(12), "key_block": range(12)},
    )
    return xr.DataTree.from_dict({"/positions": positions, "/maps": maps})


SEEN = ri.tasks.Prompt(
    tokens=tuple(range(3, 3 + len(WORDS))),
    spans={"needle": (3, 4), "query": (9,)},
    generated=(11,),
    token_text=tuple(WORDS),
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
    return measured(
        "rope", ("attention_mass", *TOKENS), (SEEN, replace(SEEN, tokens=SEEN.tokens[::-1]))
    )


@pytest.fixture(scope="module")
def runs() -> dict[str, xr.DataTree]:
    """Runs whose numbers are compared with their pages, by the names of these."""
    counting = ri.tasks.make_task("counting").prompts(2)
    return {
        "kinds": ri.analyze(
            ri.zoo("reversal/repo"),
            ri.tasks.make_task("reversal").prompts(3),
            ("positions", "patterns", "position_sources"),
        ),
        "gated": ri.analyze(
            ri.zoo("counting/cope"), counting, ("position_sources", "gates", "attention_rows")
        ),
        "fits": measured(
            "rope",
            ("three_axis", "fake_distance", "rotation", *TOKENS),
            (SEEN, replace(SEEN, tokens=SEEN.tokens[::-1])),
        ),
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    one = Browser(tmp_path_factory.mktemp("profile"), CHROMIUM)
    yield one
    one.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory, rope, runs) -> Path:
    directory = tmp_path_factory.mktemp("pages")
    with without_pictures(), pytest.MonkeyPatch.context() as none_found:
        # pages without any, but where a test is about them
        none_found.setattr(report, "findings", lambda *_: [])
        report_page(small_run(), directory / "small.html")
        report_page(word_run(), directory / "words.html")
        report_page(
            large_run(prompts=1, layers=3, heads=4, tokens=4096),
            directory / "long.html",
            megabytes=0.2,
        )
        report_page(rope, directory / "rope.html")
        report_page(
            measured("repo", ("positions", AttentionRows(rows=4, keys=3), "predictions")),
            directory / "few.html",
        )
        for name, run in runs.items():
            report_page(run, directory / f"{name}.html")
        sides = {layout: measured(layout, ("positions", *TOKENS)) for layout in ("repo", "repo@1")}
        framed = ri.show(rope)._repr_html_()
        # so that the test may look into it
        (directory / "framed.html").write_text(framed.replace("sandbox=", "data-sandbox="))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(report, "findings", lambda *_: FOUND)
            report_page(small_run(), directory / "found.html")
        assert not write_report(
            ri.compare(sides), directory / "compared.html", directory / "figures"
        )
    return directory


@pytest.fixture
def opened(browser, pages):
    """Opens a page by its name, in a window of a desktop unless told otherwise; whatever happens,
    its console stays without errors.
    """

    def open_page(name: str, address: str = "", width: int = 1280, dark: bool = False) -> Browser:
        browser.size(width, 900, dark)
        # Chromium keeps a compiled script by the address of its page; plotly's takes a second.
        shown = shutil.copyfile(pages / name, pages / "shown.html")
        browser.open(f"{shown.as_uri()}{address}")
        frame = "document.querySelector('iframe')"
        browser.wait(
            f"'alive' in ({frame} ? {frame}.contentDocument : document).documentElement.dataset"
        )
        return browser

    yield open_page
    assert browser.errors == []


def tiles(browser: Browser) -> list[str]:
    return browser.run(
        "[...document.querySelectorAll('.map .tile')].map((tile) => tile.dataset.head)"
    )


def control(label: str, inside: str = "document") -> str:
    """The control with this label."""
    return (
        f"[...{inside}.querySelectorAll('label')].find((one) => "
        f"one.textContent.startsWith({json.dumps(label + ' ')})).control"
    )


def choose(browser: Browser, label: str, value: str) -> None:
    browser.run(
        f"(() => {{ const one = Object.assign({control(label)}, {{value: {json.dumps(value)}}}); "
        "for (const name of ['input', 'change']) one.dispatchEvent(new Event(name)); })()"
    )


def shown_heads(browser: Browser) -> list[str]:
    return browser.run(
        "[...document.querySelectorAll('.tile[aria-pressed=true]')].map((one) => one.dataset.head)"
    )


def click_token(browser: Browser, token: int, inside: str = "document") -> None:
    browser.run(
        "for (const name of ['pointerdown', 'pointerup']) "
        f"{inside}.querySelector('.text [data-token=\"{token}\"]').dispatchEvent(new "
        f"PointerEvent(name, {{bubbles: true}}))"
    )


def click_head(browser: Browser, head: str, more: bool = False, inside: str = "document") -> None:
    browser.run(
        f"{inside}.querySelector('.tile[data-head=\"{head}\"]')"
        f".dispatchEvent(new MouseEvent('click', {{bubbles: true, shiftKey: {json.dumps(more)}}}))"
    )


def plot(name: str) -> str:
    """The chart of the section of this name."""
    return f"document.querySelector('section[aria-label=\"{name}\"] .plot')"


ATTENTION, POSITIONS, LOGITS = map(
    plot, ("Attention of the chosen token", "Positions", "Logits by distance")
)
EXPLORER = "document.querySelector('.explorer')"
SAID, LOOKS, FOUND_TEXT = "section[aria-label=Prompt] .said", ".looks", ".found"
TOKEN = "document.querySelector('.token-number').value"


def text_of(browser: Browser, name: str) -> str:
    return browser.run(f"document.querySelector('{name}').textContent")


def find(browser: Browser, text: str) -> str:
    browser.run(f"Object.assign(document.querySelector('.find'), {{value: '{text}'}}).focus()")
    browser.press("Enter")
    return text_of(browser, FOUND_TEXT)


def test_heads_are_sorted_by_a_score_and_filtered(opened):
    browser, mass = opened("small.html"), MASS.mean("prompt").values
    choose(browser, "Color by", "attention mass on needle (%)")
    choose(browser, "Order", "largest")
    order = np.argsort(-mass, axis=None, kind="stable")
    assert tiles(browser) == [f"{place // 4}.{place % 4}" for place in order]
    choose(browser, "Scheme", "RePo")
    learned = tiles(browser)
    assert 0 < len(learned) < 24 and min(learned) >= "2"
    least = float(np.median(mass))
    choose(browser, "At least", str(least))
    assert tiles(browser) == [head for head in learned if mass[int(head[0]), int(head[2])] >= least]
    choose(browser, "Layers", "3")
    assert min(tiles(browser)) >= "3"


def test_it_opens_on_all_heads_and_the_prompt_and_a_click_opens_a_head(opened):
    browser, positions = opened("small.html"), SMALL["positions"]
    assert tiles(browser) == [f"{layer}.{head}" for layer in range(6) for head in range(4)]
    assert browser.run("document.querySelectorAll('.text span[data-token]').length") == 96
    generated = np.flatnonzero(positions["span_mask"].sel(prompt=0, span="generated"))
    assert f"Token {generated[0] - 1} " in text_of(browser, SAID), (
        "the token that produced the answer"
    )
    title = browser.run(f"{control('Color by')}.value")
    of = f"{title} (mean over {positions.sizes['prompt']} prompts)"
    hint = text_of(browser, "section[aria-label=Heads] .hint")
    assert hint.startswith(f"Color and number of a head: {of}.")
    # Of layer 5, whose positions are learned; those of layer 0 are the token index
    last = "[...document.querySelectorAll('.tile')].at(-1)"
    mean, drawn = browser.run(f"{last}.title").split(". Drawn: ")
    score = browser.run(f"{last}.querySelector('.tile-score').textContent")
    assert mean.endswith(f"{of}: {score}")
    assert drawn.startswith("the chosen prompt")
    before = shown_heads(browser)
    wanted = next(head for head in reversed(tiles(browser)) if head not in before)
    click_head(browser, wanted)
    assert len(before) == 2 and shown_heads(browser) == [wanted]
    click_head(browser, before[0], more=True)
    assert sorted(shown_heads(browser)) == sorted([wanted, before[0]])
    click_token(browser, 9)
    assert "has no attention of tokens" in text_of(browser, LOOKS), "this run has no logits"
    ranges = (
        f"Object.entries({POSITIONS}.layout).filter(([name]) => "
        "name.startsWith('yaxis')).map(([, one]) => one.range.join())"
    )
    assert len(set(browser.run(ranges))) == 2
    choose(browser, "Vertical range", "global")
    assert len(browser.run(ranges)) == 1, "one scale for all"
    layer, head = map(int, wanted.split("."))
    position = positions["position"].sel(prompt=0, layer=layer, head=head)[:96]
    assert browser.run(f"{POSITIONS}.data[0].y") == pytest.approx(position.values, rel=1e-6)


def test_what_needs_a_model_is_not_there_and_a_line_says_how_to_get_it(opened):
    browser = opened("small.html")
    edits = "document.querySelector('section[aria-label=Edits]')"
    shown = (
        "[...document.querySelectorAll('.explorer button, .explorer summary, .explorer select')]"
    )
    names = browser.run(f"{shown}.filter((one) => one.offsetParent).map((one) => one.textContent)")
    assert "CSV" in names and not {"netCDF", "Copy as Python", "Your own text"} & {*names}
    assert browser.run(f"{edits}.querySelectorAll('button, select').length") == 0
    assert "need the model: repo-interp explore" in browser.run(f"{edits}.textContent")
    assert browser.run("document.querySelectorAll('.explorer button:disabled').length") == 0
    click_token(browser, 9)
    browser.run(f"{POSITIONS}.focus()")
    browser.press("ArrowUp")
    assert browser.run(f"{edits}.querySelectorAll('li').length") == 0


def test_it_opens_on_the_first_finding_that_names_a_head_and_a_button_chooses_another(opened):
    browser, score = opened("found.html"), f"{control('Color by')}.value"
    assert shown_heads(browser) == ["4.2"]
    assert browser.run(f"[{score}, {TOKEN}]") == ["attention mass on needle (%)", "30"]
    assert browser.run(f"{control('Prompt')}.selectedOptions[0].text").startswith("1 ")
    told = browser.run(
        "[...document.querySelectorAll('#findings li')].map((one) => one.textContent)"
    )
    for finding, text in zip(FOUND, told, strict=True):
        assert finding.sentence in text and finding.evidence in text
    places = (
        "[...document.querySelectorAll('#findings, .map')].map((one) => "
        "one.getBoundingClientRect().top)"
    )
    assert browser.run(f"Math.max(...{places})") < 700, "both begin on the first screen"
    assert browser.run("document.documentElement.scrollHeight") < 6000
    browser.run("document.querySelector('#findings button[data-head=\"1\"]').click()")
    assert shown_heads(browser) == ["5.1"] and "chunks" in browser.run(score)
    assert text_of(browser, SAID).startswith("Token "), "one is chosen where the finding names none"


def test_a_map_shows_the_largest_prompt_and_the_chosen_one_and_a_table_is_saved(opened):
    browser, mean = opened("found.html"), MASS.mean("prompt")
    shown = "[...document.querySelectorAll('.tile-score')].map((one) => Number(one.textContent))"
    for of, values in (
        ("largest", MASS.max("prompt")),
        ("chosen", MASS.sel(prompt=1)),
        ("mean", mean),
    ):
        choose(browser, "Of", of)
        expected = values.transpose("layer", "head").values.ravel()
        assert browser.run(shown) == pytest.approx(expected, rel=6e-3)
    saved = browser.run("""new Promise((done) => {
        const address = URL.createObjectURL;
        URL.createObjectURL = (blob) => { blob.text().then(done); return address(blob); };
        [...document.querySelectorAll('#attention_mass caption .save')].filter((one) => one.textContent === 'CSV').pop().click();
    })""")
    first, second = list(csv.reader(saved.splitlines()))[:2]
    assert first[:3] == ["rank", "layer", "head"] and len(first) == len(second)
    assert mean.max() == pytest.approx(float(second[4]), rel=6e-3)


def test_the_rest_of_a_row_is_shown_without_token_0(opened, rope):
    opened("small.html")  # else a page that is open already keeps its state
    browser = opened("rope.html")
    click_head(browser, "1.2")
    click_token(browser, 9)
    browser.run("document.querySelector('.sink').click()")
    own = rope["attention_rows"].sel(layer=1, head=2, query=9)
    weights = shares_of(own["key"], own["weight"])
    sink = weights.pop(0)
    assert_attention(browser, {key: share / (1 - sink / 100) for key, share in weights.items()})
    assert "from token 9 without token 0 at tokens" in text_of(browser, LOOKS)


def shares_of(keys, weights) -> dict[int, float]:
    """By key that a row has, its weight in per cent."""
    pairs = zip(keys.values.tolist(), (100 * weights.values).tolist(), strict=True)
    return {int(key): share for key, share in pairs if key >= 0}


def assert_attention(browser: Browser, expected: dict[int, float]) -> None:
    keys, shares = browser.run(f"[{ATTENTION}.data[0].x, {ATTENTION}.data[0].y]")
    assert dict(zip(keys, shares, strict=True)) == pytest.approx(expected, rel=2e-3)


def test_a_page_in_a_notebook_comes_to_life(opened):
    browser = opened("framed.html")
    inside = "document.querySelector('iframe').contentDocument"
    click_head(browser, "1.2", inside=inside)
    browser.run(f"{inside}.querySelector('a[href=\"#predictions\"]').click()")
    assert browser.run(f"{inside}.querySelector('#predictions > details').open")
    assert browser.run(f"{inside}.querySelector('.tile[aria-pressed=true]').dataset.head") == "1.2"


def test_words_are_found_across_tokens(opened):
    browser = opened("words.html")
    assert text_of(browser, ".text").startswith("<bos> A special magic number")
    assert find(browser, "Special  MAGIC number").startswith("1 of 1")
    assert browser.run(
        "[...document.querySelectorAll('.text .selected')].map((one) => one.dataset.token)"
    ) == ["2", "3", "4"]
    assert find(browser, "magic").startswith("1 of 2") and find(browser, "magic").startswith(
        "2 of 2"
    )
    assert "Token 9" in text_of(browser, SAID)
    assert "is not in this prompt" in find(browser, "needle")
    click_head(browser, "2.0")
    for _ in range(3):  # a head is never added twice
        browser.run(
            "[...document.querySelectorAll('button')].find((one) => one.textContent === 'Add "
            "a head').click()"
        )
    assert shown_heads(browser) == ["2.0", "2.1", "3.0", "3.1"]
    assert browser.run(
        "[...document.querySelectorAll('button')].find((one) => one.textContent === 'Add a "
        "head').disabled"
    )


def test_a_clicked_token_says_where_it_looks(opened):
    browser = opened("words.html")
    click_head(browser, "3.1")
    click_token(browser, 9)
    share = 100 * np.exp(5) / (np.exp(5) + 9)
    assert f"L3 H1 looks from token 9 at tokens 3 “magic” {share:.1f} %" in text_of(browser, LOOKS)
    click_head(browser, "2.0")
    assert "L2 H0 looks from token 9 at tokens 0 “<bos>” 10 %" in text_of(browser, LOOKS)


def test_keys_step_through_tokens_and_heads(opened):
    browser = opened("small.html")
    browser.run(f"{POSITIONS}.focus()")
    for key in ("End", "ArrowLeft", "ArrowLeft", "ArrowRight"):
        browser.press(key)
    assert browser.run(TOKEN) == "94"
    browser.run("document.querySelector('.tile[data-head=\"0.0\"]').focus()")
    for key in ("ArrowRight", "ArrowDown"):
        browser.press(key)
    assert browser.run("document.activeElement.dataset.head") == "1.1"
    browser.press("Enter")
    assert (
        shown_heads(browser) == ["1.1"]
        and browser.run("document.activeElement.dataset.head") == "1.1"
    )


def test_an_address_restores_the_view(opened):
    browser = opened("small.html")
    click_head(browser, "4.3")
    choose(browser, "Order", "smallest")
    find(browser, str(SMALL["positions"]["token_text"].values[0, 40]).strip())

    def view():
        return (*browser.run(f"[location.hash, {TOKEN}]"), shown_heads(browser), tiles(browser))

    before = view()
    opened("small.html", before[0])
    assert view() == before and before[1] != ""
    for given in (
        '{"prompt": 7, "heads": [[99, 1], "x"], "token": "many", "view": [5, 1]}',
        '{"score": -3, "of": 4, "range": "x", "heads": []}',
        "{",
        "%",
        "atlas",
    ):
        opened("small.html", f"#{given}")
        assert len(tiles(browser)) == 24 and browser.run(f"{POSITIONS}.data.length") > 0


def test_long_prompts_are_a_median_until_they_are_zoomed_to(opened):
    browser = opened("long.html")
    lines = f"{POSITIONS}.data.slice(0, 2).map((one) => one.mode + one.x.length)"
    median, band = browser.run(lines)
    assert int(median.removeprefix("lines")) < 300 and int(band.removeprefix("lines")) < 600
    assert browser.run("!document.querySelector('.overview').hasAttribute('hidden')")
    assert (
        len(tiles(browser)) == 12
        # positions of the other layer are the token index
        and browser.run("document.querySelectorAll('.tile path').length") == 8
    )
    choose(browser, "Token", "3000")
    assert browser.run(lines)[0].startswith("lines+markers")
    first, last = browser.run(f"{POSITIONS}.layout.xaxis.range")
    assert first < 3000 < last and last - first < 200
    assert browser.run("document.querySelectorAll('.text span').length") <= 1500


def test_a_run_without_positions_opens_on_its_heads_and_shows_where_they_look(opened, rope):
    browser, rows = opened("rope.html"), rope["attention_rows"].to_dataset()
    assert len(tiles(browser)) == rows.sizes["layer"] * rows.sizes["head"]
    assert browser.run(f"{ATTENTION}.data.some((trace) => trace.type === 'bar')"), "not empty"
    choose(browser, "Color by", "attention on token 0, mean over tokens of prompt 0 (%)")
    later = rows.sel(layer=1, head=2, query=slice(1, None))
    sink = 100 * float(later["weight"].where(later["key"] == 0).sum("rank").mean())
    shown = float(text_of(browser, '.tile[data-head="1.2"] .tile-score'))
    assert shown == pytest.approx(sink, rel=6e-3)
    click_head(browser, "1.2")
    click_token(browser, 9)
    own = rows.sel(layer=1, head=2, query=9)
    assert_attention(browser, shares_of(own["key"], own["weight"]))
    distances, logits = browser.run(f"[{LOGITS}.data[0].x, {LOGITS}.data[0].y]")
    there = np.log(own["weight"].values[:10]) + float(own["log_total"])
    assert sorted(distances) == list(range(10))
    assert sorted(logits) == pytest.approx(sorted(there), abs=2e-3)
    choose(browser, "Prompt", "1")
    # of each token of another prompt four keys are kept
    browser.wait(f"{ATTENTION}.data[0].x.length === 4")
    click_token(browser, 7)
    browser.wait(
        f"document.querySelector({json.dumps(LOOKS)}).textContent.includes('looks from token 7')"
    )
    other = rows.sel(prompt=1, layer=1, head=2, token=7)
    assert_attention(browser, shares_of(other["prompt_key"], other["prompt_weight"]))


def select(browser: Browser, first: int, last: int) -> None:
    """Drag the mouse over tokens."""
    place = (
        "(({left, top, width, height}) => [left + width / 2, top + height / 2])"
        "(document.querySelector('[data-token=\"TOKEN\"]').getBoundingClientRect())"
    )
    browser.run("document.querySelector('div.text').scrollIntoView({block: 'center'})")
    browser.drag(
        *(tuple(browser.run(place.replace("TOKEN", str(token)))) for token in (first, last))
    )
    browser.wait("!document.querySelector('.looking').hidden")


def looking(browser: Browser) -> list[list[float]]:
    """What a tile says of a head: its attention to the selection, at least and at most."""
    labels = browser.run("[...document.querySelectorAll('.map .tile')].map((one) => one.ariaLabel)")
    assert all(", attention to the selection (%): " in label for label in labels)
    shares = (label.rsplit(": ", 1)[1].split(" to ") for label in labels)
    return [[float(share[0]), float(share[-1])] for share in shares]


def given(rows: xr.Dataset, prefix: str, first: int, last: int) -> np.ndarray:
    """Percents that the kept keys of a row [layer, head, ...] give to tokens."""
    weights, keys = rows[f"{prefix}weight"], rows[f"{prefix}key"]
    inside = weights.where((first <= keys) & (keys <= last), 0.0)
    return 100 * inside.sum(weights.dims[-1]).values.ravel()


def test_tokens_that_are_dragged_over_color_all_heads_by_their_attention(opened, rope):
    browser, rows = opened("rope.html"), rope["attention_rows"].to_dataset()
    before = browser.run(f"{control('Color by')}.value")
    click_token(browser, 9)
    select(browser, 4, 2)
    assert browser.run(f"{control('Color by')}.value") == "attention to the selection (%)"
    asked = text_of(browser, ".looking")
    assert asked.startswith("Which heads look at tokens 2–4 “special magic number”? From token 9")
    exact = given(rows.sel(query=9), "", 2, 4)
    shown = np.array(looking(browser))
    np.testing.assert_allclose(shown, np.stack([exact, exact], 1), rtol=6e-3)
    strongest = browser.run("document.querySelector('.looking button').textContent").split()
    best = divmod(int(exact.argmax()), rows.sizes["head"])
    assert strongest[:2] == [f"L{best[0]}", f"H{best[1]}"]
    browser.run("document.querySelector('.looking button').click()")
    assert shown_heads(browser) == [f"{best[0]}.{best[1]}"]
    # a token that stands before them sees none of them; the answer of token 11 comes from token 10
    click_token(browser, 1)
    assert "stands before them" in text_of(browser, ".looking")
    assert not np.any(looking(browser))
    browser.run(
        "Object.assign(document.querySelector('.looking select'), {value: 'answer'})"
        ".dispatchEvent(new Event('change'))"
    )
    exact = given(rows.sel(query=10), "", 2, 4)
    np.testing.assert_allclose(np.array(looking(browser))[:, 0], exact, rtol=6e-3)
    browser.run("document.querySelector('div.text').focus()")
    browser.press("Escape")
    assert browser.run(f"{control('Color by')}.value") == before
    assert browser.run("document.querySelector('.looking').hidden")


@pytest.mark.usefixtures("no_pictures")
def test_shares_of_rows_without_all_keys_are_bounds_and_say_so(opened, pages):
    model = ri.reposition(tiny("llama"), "rope")
    prompts = [SEEN, replace(SEEN, tokens=SEEN.tokens[::-1])]
    run, whole = (ri.analyze(model, some, ("attention_rows",)) for some in (prompts, prompts[1:]))
    report_page(run, pages / "bounds.html")
    browser = opened("bounds.html")
    choose(browser, "Prompt", "1")
    # of each token of another prompt four keys are kept
    browser.wait(f"{ATTENTION}.data[0].x.length === 4")
    click_token(browser, 8)
    select(browser, 1, 6)
    assert "At least: keys that are not kept may add up to " in text_of(browser, ".looking")
    low, high = np.array(looking(browser)).T
    kept = given(run["attention_rows"].to_dataset().sel(prompt=1, token=8), "prompt_", 1, 6)
    np.testing.assert_allclose(low, kept, rtol=6e-3, atol=1e-3)
    exact = given(whole["attention_rows"].to_dataset().sel(query=8), "", 1, 6)
    assert np.all(low <= exact * 1.01 + 1e-3) and np.all(exact <= high * 1.01 + 0.06)
    assert np.any(high - low > 0.1)


def test_a_token_whose_row_is_not_kept_colors_no_head_and_says_why(opened):
    browser = opened("few.html")
    click_token(browser, 8)
    select(browser, 2, 4)
    assert "The run keeps the rows of 4 tokens" in text_of(browser, ".looking")


def test_the_numbers_that_are_drawn_are_saved_as_csv(opened, rope):
    browser = opened("rope.html")
    click_head(browser, "1.2")
    click_token(browser, 9)
    browser.run("URL.createObjectURL = (blob) => { window.kept = blob; return 'data:,' }")
    browser.run(
        "[...document.querySelectorAll('.explorer header button')].find((one) => "
        "one.textContent === 'CSV').click()"
    )
    browser.wait("Boolean(window.kept)")
    lines = list(csv.DictReader(browser.run("kept.text()").splitlines()))
    assert len(lines) == len(WORDS) and {line["layer"] + line["head"] for line in lines} == {"12"}
    own = rope["attention_rows"].sel(layer=1, head=2, query=9)
    for key, weight in zip(own["key"].values, own["weight"].values, strict=True):
        if key >= 0:
            assert float(lines[key]["weight"]) == pytest.approx(weight, rel=1e-3)
    assert lines[10]["weight"] == "", "a later token is not seen"


@pytest.mark.usefixtures("no_pictures")
def test_all_heads_of_a_deep_model_stand_in_the_map_without_lines_of_the_token_index(opened, pages):
    report_page(large_run(prompts=1, layers=3, heads=32, tokens=200), pages / "wide.html")
    index = large_run(prompts=1, layers=30, heads=9, tokens=200)
    positions = index["positions"].to_dataset()
    positions["position"][:] = np.arange(positions.sizes["token"], dtype="float32")
    index["positions"] = xr.DataTree(positions)
    report_page(index, pages / "deep.html")
    for name, heads, columns in (("wide.html", 96, 32), ("deep.html", 270, 9)):
        browser = opened(name)
        assert len(tiles(browser)) == heads
        widths = browser.run(
            "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])"
            "(document.querySelector('.map').parentElement)"
        )
        assert widths[0] <= widths[1], "no head is hidden"
        ends = browser.run(
            "[...document.querySelectorAll('.map .tile')].map((one) => "
            "one.getBoundingClientRect().right)"
        )
        assert len(set(np.round(ends))) == columns and max(ends) < 1280
    assert browser.run("document.querySelectorAll('.map path').length") == 0
    names = browser.run("[...document.querySelectorAll('.column')].map((one) => one.textContent)")
    assert names == [f"H{head}" for head in range(9)]


def test_next_tokens_are_those_of_the_run(opened, rope):
    browser, after = opened("rope.html"), rope["predictions"].sel(token=9)
    click_token(browser, 9)
    cells = browser.run(
        "[...document.querySelectorAll('[aria-label=\"Next tokens\"] td')].map((one) => "
        "one.textContent)"
    )
    assert [text or "∅" for text in after["next_text"].values] == cells[::2]
    follows = text_of(browser, '[aria-label="Next tokens"] caption').split()[-2]
    shown = [float(number) for number in (*cells[1::2], follows)]
    expected = 100 * np.append(after["probability"], after["probability_of_next"])
    assert shown == pytest.approx(expected, rel=5e-3)


def test_next_tokens_of_a_prompt_that_has_none_are_those_before_the_answer_of_one_that_has(
    opened, rope
):
    browser, panel = opened("rope.html"), '[aria-label="Next tokens"]'
    choose(browser, "Prompt", "1")
    browser.wait(f"document.querySelector('{panel} button') !== null")
    assert text_of(browser, f"{panel} .hint").startswith("A run keeps next tokens of prompt 0")
    caption = text_of(browser, f"{panel} caption")
    assert caption.startswith("Prompt 0, after token 10; the prompt goes on with a token, which")
    shown = browser.run(
        f"[...document.querySelectorAll('{panel} td.number')].map((one) => one.textContent)"
    )
    expected = 100 * rope["predictions"]["probability"].sel(token=10).values
    assert [float(number) for number in shown] == pytest.approx(expected, rel=5e-3)
    browser.run(f"document.querySelector('{panel} button').click()")
    browser.wait(f"document.querySelector('{panel} button') === null")
    assert browser.run(f"[{control('Prompt')}.value, {TOKEN}]") == ["0", "10"]
    assert text_of(browser, f"{panel} caption").startswith("After token 10 “again”; the prompt")


def test_a_token_without_a_row_names_the_nearest_one_that_has(opened):
    browser = opened("few.html")
    click_token(browser, 8)
    assert "The run keeps the rows of 4 tokens" in text_of(browser, LOOKS)
    browser.run("document.querySelector('.looks button').click()")
    assert browser.run(TOKEN) == "9"
    assert "looks from token 9 at tokens" in text_of(browser, LOOKS)
    assert text_of(browser, '[aria-label="Next tokens"] caption').startswith(
        "After token 9 “magic”; the prompt goes on with “again”, which has "
    )


def test_what_is_chosen_on_one_side_of_a_comparison_is_chosen_on_the_other(opened):
    browser = opened("compared.html")
    assert browser.run(
        "new Set([...document.querySelectorAll('[id]')].map((one) => one.id)).size === "
        "document.querySelectorAll('[id]').length"
    )
    sides = "[...document.querySelectorAll('.sides > section')]"
    chosen = f"{sides}.map((side) => side.querySelector('.tile[aria-pressed=true]').dataset.head)"
    tokens = f"{sides}.map((side) => side.querySelector('.token-number').value)"
    browser.wait(f"new Set({chosen}).size === 1")
    click_head(browser, "1.3", inside="document.querySelector('#side-0')")
    browser.wait(f"String({chosen}) === '1.3,1.3'")
    click_token(browser, 7, inside="document.querySelector('#side-1')")
    browser.wait(f"String({tokens}) === '7,7'")
    looks = browser.run(f"{sides}.map((side) => side.querySelector('.looks').textContent)")
    assert (
        all(text.startswith("L1 H3 looks from token 7") for text in looks) and looks[0] != looks[1]
    )
    browser.run("document.querySelector('#side-1 .plot[tabindex]').focus()")
    browser.press("ArrowRight")
    browser.wait(f"String({tokens}) === '8,8'")
    address = browser.run("location.hash")
    browser = opened("compared.html", address, width=420, dark=True)
    browser.wait(f"String({tokens}) === '8,8' && String({chosen}) === '1.3,1.3'")
    assert browser.run("document.documentElement.scrollWidth") <= 420


@pytest.mark.parametrize(
    ("width", "dark"), [(420, False), (420, True), (800, False), (1600, False)]
)
def test_a_page_is_as_wide_as_its_window_and_no_control_is_cut(opened, width, dark):
    browser = opened("small.html", width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    paper = browser.run("document.querySelector('.plot[tabindex]').layout.paper_bgcolor")
    assert paper == ("#1e2023" if dark else "#ffffff")
    cut = """[...document.querySelectorAll('select')].filter((one) => one.offsetParent).flatMap((one) => {
        const pen = document.createElement('canvas').getContext('2d');
        pen.font = getComputedStyle(one).font;
        return [...one.options].map((option) => option.text).filter((text) => pen.measureText(text).width > one.clientWidth - 16);
    })"""
    assert width == 420 or browser.run(cut) == []


COLORED = "[...document.querySelectorAll('.position-texts .panel')]"


def assert_colored(browser: Browser, panel: int, values: xr.DataArray) -> dict[str, int]:
    """A text has the numbers of a head; returns the head, which it names."""
    head = browser.run(f"{COLORED}[{panel}].querySelector('.open').textContent")
    titles = browser.run(
        f"[...{COLORED}[{panel}].querySelectorAll('.colored span')].map((one) => one.title)"
    )
    tokens, numbers = zip(*(title.split(": ") for title in titles), strict=True)
    assert tokens == tuple(f"token {token}" for token in range(len(titles)))
    layer, place = (int(part[1:]) for part in head.removeprefix("show ").split())
    expected = values.sel(layer=layer, head=place)[: len(numbers)]
    np.testing.assert_allclose([*map(float, numbers)], expected, rtol=1e-4, atol=5e-7)
    return {"layer": layer, "head": place}


@pytest.mark.parametrize(
    ("name", "group", "variable"),
    [("kinds", "positions", "position"), ("gated", "gates", "gate_by_token")],
)
def test_the_text_of_every_kind_has_the_numbers_of_the_run(opened, runs, name, group, variable):
    browser, run = opened(f"{name}.html"), runs[name]
    kinds, values = run["position_sources"]["kind"], run[group][variable]
    shown = browser.run(f"{COLORED}.map((one) => one.querySelector('h4').textContent)")
    counts = {kind: int((kinds == kind).sum()) for kind in np.unique(kinds) if kind}
    assert set(shown) == {
        f"{kind}: {counts[kind]} of {sum(counts.values())} heads" for kind in {*NAMES} & {*counts}
    }
    sections = browser.run("[...document.querySelectorAll('main > section')].map((one) => one.id)")
    assert sections[1] == "position_sources", "after the explorer, which fills the first screen"
    for panel, title in enumerate(shown):
        step = f"({COLORED}[{panel}].querySelector('input') || {{max: 0}})"
        for number in range(int(browser.run(f"Number({step}.max)")) + 1):
            if number:
                browser.run(
                    f"Object.assign({step}, {{value: {number}}}).dispatchEvent(new Event('input'))"
                )
            head = assert_colored(browser, panel, values.sel(prompt=0))
            assert kinds.sel(head) == title.split(": ")[0]
    choose_prompt = "document.querySelector('.position-texts > label select')"
    browser.run(f"Object.assign({choose_prompt}, {{value: 1}}).dispatchEvent(new Event('change'))")
    browser.wait(f"{control('Prompt', EXPLORER)}.value === '1'")
    head = assert_colored(browser, 0, values.sel(prompt=1))
    browser.run(f"{COLORED}[0].querySelector('.open').click()")
    browser.wait(
        "document.querySelector('.tile[aria-pressed=true]').dataset.head === "
        f"'{head['layer']}.{head['head']}'"
    )


@pytest.mark.parametrize(("layer", "head", "prompt"), [(0, 1, 0), (1, 0, 1)])
def test_numbers_of_the_chosen_head_are_those_of_the_run(opened, runs, layer, head, prompt):
    """Found: a dash for every head of every run."""
    browser, run = opened("fits.html"), runs["fits"]
    choose(browser, "Prompt", str(prompt))
    click_head(browser, f"{layer}.{head}")
    assert shown_heads(browser) == [f"{layer}.{head}"]
    for group, variable in (
        ("three_axis", "r"),
        ("fake_distance", "r"),
        ("rotation", "closed_form_r"),
    ):
        chart = f"document.querySelector('#{group} .head-charts')"
        browser.run(f"{chart}.closest('details').open = true")
        text = f"{chart}.querySelector('.said').textContent"
        browser.wait(f"({chart}.scrollIntoView(), /(prompt {prompt}\\)|–)$/.test({text}))")
        shown = browser.run(text).removesuffix(f" (prompt {prompt})").rpartition(": ")[2]
        value = run[group][variable].sel(prompt=prompt, layer=layer, head=head).item()
        assert shown == "–" if np.isnan(value) else float(shown) == pytest.approx(value, rel=1e-3)
        assert group != "three_axis" or np.isfinite(value)


LONG_WORDS = WORDS[1:] * 14


@pytest.fixture(scope="module")
def long_prompts(pages) -> xr.DataTree:
    """Two prompts of a tiny model: one without copies of words, one whose words repeat."""
    count = len(LONG_WORDS)
    prompts = [
        ri.tasks.Prompt(tokens=tuple(range(3, 15)), spans={}, token_text=tuple("abcdefghijkl")),
        ri.tasks.Prompt(
            tokens=tuple(3 + place % 11 for place in range(count)),
            spans={},
            token_text=tuple(LONG_WORDS),
        ),
    ]
    run = measured("rope", (AttentionRows(rows=count, keys=6), "components"), tuple(prompts))
    with without_pictures(), pytest.MonkeyPatch.context() as patch:
        induction = Finding(
            "Induction heads: L1 H2.", "above .1", 0.9, "atlas", 1, 2, looks_at="after a copy"
        )
        patch.setattr(report, "findings", lambda *_: [induction])
        report_page(run, pages / "induction.html")
    return run


def test_it_opens_on_a_prompt_and_a_token_that_show_the_finding(opened, long_prompts):
    """Found: the last token, which gives nearly all of its attention to token 0."""
    browser, words = opened("induction.html"), np.array(LONG_WORDS)
    rows = long_prompts["attention_rows"].sel(prompt=1, layer=1, head=2)
    keys = rows["prompt_key"].values.astype(int)
    copies = (keys > 0) & (words[keys - 1] == words[:, None]) & (words[:, None] != ".")
    copies &= keys <= np.arange(len(words))[:, None]
    shares = np.where(copies, rows["prompt_weight"], 0).sum(-1)
    browser.wait(f"{TOKEN} !== ''")
    assert browser.run(f"{control('Prompt')}.value") == "1" and shown_heads(browser) == ["1.2"]
    assert shares[int(browser.run(TOKEN))] == pytest.approx(shares.max(), rel=1e-2)
    assert shares.max() > 0


def test_logits_by_distance_show_all_kept_tokens_on_an_axis_that_doubles(opened, long_prompts):
    """Found: four dots at the left end of the chart."""
    browser = opened("induction.html")
    keys = long_prompts["attention_rows"]["prompt_key"].sel(prompt=1, layer=1, head=2).values
    distances, values = browser.run(f"[{LOGITS}.data[1].customdata, {LOGITS}.data[1].y]")
    assert len(distances) == len(values) > 100 and max(distances) > 100
    known = np.arange(len(keys))[:, None] - keys
    assert set(distances) == set(known[keys >= 0])
    assert browser.run(f"[{LOGITS}.layout.xaxis.type, {LOGITS}.data[1].x[0] >= .5]") == [
        "log",
        True,
    ]


def test_components_of_a_chosen_head_have_the_numbers_of_the_run(opened, long_prompts):
    browser = opened("induction.html")
    browser.run("document.querySelector('#components > details').open = true")
    head = "document.getElementById('components-head')"
    assert browser.run(f"{head}.disabled && {head}.title.includes('layer')")
    for name in ("layer", "head"):
        browser.run(
            f"Object.assign(document.getElementById('components-{name}'), {{value: '2'}})"
            ".dispatchEvent(new Event('change'))"
        )
    components = long_prompts["components"].to_dataset().sel(layer=1, head=2)
    bars = browser.run("document.getElementById('components-vaf').data[0].y")
    assert bars == pytest.approx(components["vaf"].mean("prompt").values, rel=1e-4)
    curve = "document.getElementById('components-curve').data[0]"
    x, y = browser.run(f"[{curve}.x, {curve}.y]")
    logits = components["logit_by_distance"].sel(distance=x).values
    assert y == pytest.approx(logits - logits.mean(), abs=1e-4)


def test_five_steps_highlight_what_they_speak_of_and_can_be_left(opened):
    browser = opened("rope.html")
    start = "document.querySelector('.tour-start').click()"
    named = "[...document.querySelectorAll('.taught')].map((one) => one.ariaLabel)"
    browser.run(start)
    seen = []
    for step in range(1, 6):
        assert text_of(browser, ".taught .tour").startswith(f"{step} of 5. ")
        seen += browser.run(named)
        browser.run("document.activeElement.click()")
    charts = ["Attention of the chosen token", "Logits by distance"]
    assert seen == ["Heads", "Prompt", *charts, "Edits"]
    assert browser.run(named) == [] and browser.run("document.querySelector('.tour')") is None
    close = (
        "[...document.querySelectorAll('.tour button')].find((one) => one.textContent "
        "=== 'Close').click()"
    )
    for leave in (lambda: browser.press("Escape"), lambda: browser.run(close)):
        browser.run(start)
        leave()
        assert browser.run(named) == []


def test_the_map_of_heads_names_and_colours_kinds(opened, runs):
    browser, run = opened("kinds.html"), runs["kinds"]
    choose(browser, "Color by", "kind of head, by its positions")
    kinds = run["position_sources"]["kind"].values.ravel().tolist()
    texts, colours = browser.run(
        "((all) => [all.map((one) => one.querySelector('.tile-score').textContent), "
        "all.map((one) => one.style.getPropertyValue('--score'))])"
        "([...document.querySelectorAll('.map .tile')])"
    )
    assert texts == kinds
    assert len(set(zip(kinds, colours, strict=True))) == len(set(kinds)) > 1
    legend = browser.run(
        "[...document.querySelectorAll('.head-kinds span')].map((one) => one.textContent)"
    )
    assert set(legend) == {f"{kind}: {kinds.count(kind)}" for kind in kinds if kind}


def test_a_run_without_kinds_says_nothing_about_them(opened):
    assert opened("few.html").run("document.querySelectorAll('.position-texts').length") == 0
