"""The explorer in a browser, on the real server: a first minute, every number, hands, keys,
addresses, hostile texts, a lost server.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

import chromium
import numpy as np
import pytest
import torch
import xarray as xr
from chromium import Browser, executable
from families import TINY, tiny
from forked import Forked
from served import TOKEN, Served, serving
from task_tokenizers import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import repo_interp as ri
from benchmarks.tiny_models import small_model
from repo_interp.analysis.trained_task import trained_task
from repo_interp.checkpoint_files.shipped import zoo_path
from repo_interp.cli import _parser, main
from repo_interp.cli.explore_command import _explored, _given
from repo_interp.explorer import Edit, Session
from repo_interp.explorer.explored import Explored
from repo_interp.explorer.messages import message
from repo_interp.explorer.same_texts import over_the_same_texts
from repo_interp.explorer.server import application, listening, server
from repo_interp.explorer.session_edits import POSITIONS
from repo_interp.plugins.heads.atlas import Atlas

CHROMIUM = executable()
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium is installed, so that no page can be opened"
)
SHOWN = "document.querySelector('section[aria-label={}]')"


@pytest.fixture(scope="module")
def prompts():
    return trained_task(zoo_path("reversal/repo")).prompts(2, test_set="12")


@pytest.fixture(scope="module")
def explored(prompts) -> Explored:
    return Explored(ri.load("reversal/repo"), prompts, "reversal/repo")


@pytest.fixture(scope="module")
def reference():
    """The same model for the test itself: that of the server may be at work."""
    return ri.load("reversal/repo")


@pytest.fixture(scope="module")
def served(explored) -> Iterator[Served]:
    with serving(explored) as one:
        yield one


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    one = Browser(tmp_path_factory.mktemp("profile"), CHROMIUM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chromium, "PATIENCE", 60.0)
        yield one
    one.close()


@pytest.fixture
def page(browser, served) -> Iterator[Browser]:
    """The page as it opens; whatever happens, its console stays without errors and it asks nobody
    but its server.
    """
    browser.size(1280, 900)
    open_page(browser, served.address)
    yield browser
    assert browser.errors == []
    assert browser.run(
        "performance.getEntriesByType('resource').every((one) => "
        "one.name.startsWith(location.origin + '/'))"
    )


def open_page(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.wait("'alive' in document.getElementById('explorer').dataset")
    settle(browser)


@contextmanager
def visited(browser: Browser, explored: Explored, port: int | None = None) -> Iterator[Served]:
    """A page that is served and open, and is left before its server ends."""
    browser.size(1280, 900)
    with serving(explored, port) as served:
        open_page(browser, served.address)
        yield served
        leave(browser)


def leave(browser: Browser) -> None:
    """Go away before the server does."""
    browser.send("Page.navigate", url="about:blank")
    browser.wait("location.href === 'about:blank'")


def settle(browser: Browser) -> None:
    browser.wait("document.querySelector('.busy').textContent === ''")


def wait_for_state(browser: Browser, condition: str) -> None:
    """Until something holds of what the address keeps."""
    browser.wait(f"JSON.parse(decodeURIComponent(location.hash.slice(1))).{condition}")


def choose(browser: Browser, control: str, value: object) -> None:
    browser.run(
        f"Object.assign({control}, {{value: {json.dumps(value)}}})"
        ".dispatchEvent(new Event('change'))"
    )


def click(browser: Browser, text: str) -> None:
    browser.run(
        "[...document.querySelectorAll('button')].find((one) => "
        f"one.textContent.startsWith({json.dumps(text)})).click()"
    )
    settle(browser)


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"
    )


def state(browser: Browser) -> dict[str, Any]:
    return json.loads(browser.run("decodeURIComponent(location.hash.slice(1))") or "{}")


def fill(browser: Browser, form: dict[int, str]) -> None:
    """Choose in the form of an edit: 0 heads, 1 tokens, 2 a kind."""
    for place, chosen in form.items():
        choose(browser, f"{SHOWN.format('Edits')}.querySelectorAll('select')[{place}]", chosen)


def write(browser: Browser, kind: str, text: object) -> None:
    """Write a `number` or a `text` in the form of an edit."""
    browser.run(f"{SHOWN.format('Edits')}.querySelector('input[type={kind}]').value = '{text}'")


def edit(browser: Browser, where: str, which: str, kind: str, value: float | str = "") -> None:
    fill(browser, {0: where, 1: which, 2: kind})
    write(browser, "number", value)
    click(browser, "Add edit")


def drawn(browser: Browser, name: str, axis: str = "y") -> list[list[float]]:
    """What a chart shows, trace by trace."""
    plot = f"{SHOWN.format(json.dumps(name))}.querySelector('.plot')"
    return browser.run(f"{plot}.data.map((trace) => [...trace.{axis}])")


def numbers(values: Any) -> np.ndarray:
    return np.array(values, dtype=float)


@in_browser
def test_a_click_turns_the_reversed_words_into_nonsense_and_undo_brings_them_back(page, prompts):
    right = [prompts[0].token_text[place] for place in prompts[0].generated]
    page.wait(
        "document.querySelectorAll('.suggested').length > 0 && "
        "document.querySelectorAll('.continued .right').length === 12"
    )
    assert page.run("document.querySelector('.map [aria-pressed=true]').dataset.head").startswith(
        "2."
    )
    assert texts(page, ".suggested")[0].startswith("give layer 2 the token index")
    page.run("document.querySelector('.suggested').click()")
    page.wait("document.querySelectorAll('.continued span').length === 24")
    moved = np.abs(numbers(drawn(page, "Attention of the chosen token")[0]))
    assert np.nanmax(moved) > 20, "per cent of its attention that the chosen token moves"
    assert texts(page, ".edits li label") == [" layer 2: the token index"]
    assert texts(page, ".continued span")[:12] == right
    assert len(texts(page, ".continued .wrong")) >= 8
    click(page, "Undo")
    page.wait("document.querySelectorAll('.continued span').length === 12")
    assert texts(page, ".continued span") == right and texts(page, ".edits li") == []
    click(page, "Redo")
    page.wait("document.querySelectorAll('.continued .wrong').length >= 8")
    page.run("document.querySelector('.edits input').click()")  # off, and kept
    page.wait("document.querySelectorAll('.continued .wrong').length === 0")
    assert len(texts(page, ".edits li")) == 1


def assert_shown(cells: list[str], percents: np.ndarray) -> None:
    for shown, percent in zip(cells, percents, strict=True):
        if shown in ("< 0.001", "0"):
            assert percent < 1e-3
        else:
            assert float(shown) == pytest.approx(percent, rel=5e-3)


@in_browser
def test_every_number_is_that_of_the_library(page, reference, prompts):
    page.run(
        "document.querySelector('[data-head=\"2.1\"]').dispatchEvent(new MouseEvent('click', "
        "{shiftKey: true}))"
    )
    settle(page)
    page.run(
        "for (const name of ['pointerdown', 'pointerup']) "
        "document.querySelectorAll('.text span')[20]"
        ".dispatchEvent(new PointerEvent(name, {bubbles: true}))"
    )
    settle(page)
    edit(page, "layer:1", "span:words", "scaled", 0.5)
    edit(page, "shown", "token", "shifted", 3)
    heads = ((2, 0), (2, 1))
    edits = [
        Edit(kind="scaled", layer=1, span="words", value=0.5),
        Edit(kind="shifted", heads=heads, tokens=(20,), value=3.0),
    ]
    session = Session(reference, prompts[0], edits)
    seen = session.changed(heads, 20)
    assert (state(page)["heads"], state(page)["token"]) == ([[2, 0], [2, 1]], 20)
    attention = 100 * seen["weight_difference"][:, :21]
    for name, shown in (
        ("Positions", seen["position"]),
        ("Attention of the chosen token", attention),
        ("Logits by distance", seen["logit"][..., :21]),
        ("Answer", seen["curve"]),
    ):
        found = numbers(drawn(page, name))
        np.testing.assert_allclose(found, shown.values.reshape(found.shape), 1e-6, 1e-12)
    assert drawn(page, "Logits by distance", "x")[0] == list(range(20, -1, -1))
    said = page.run(f"{SHOWN.format('Answer')}.querySelector('.said').textContent").split()
    around = [float(said[said.index("→") + step]) for step in (-1, 1)]
    assert around == pytest.approx(seen["log_probability"].values, rel=1e-3)
    cells = texts(page, "[aria-label='Next tokens'] tbody td")
    for column, which in ((0, "clean"), (2, "changed")):
        assert cells[column::4] == seen["next_text"].sel(state=which).values.tolist()
        assert_shown(cells[column + 1 :: 4], 100 * seen["probability"].sel(state=which).values)
    masses = 100 * seen["span_mass"].values.transpose(1, 0, 2).ravel()
    assert_shown(texts(page, "[aria-label=Prompt] tbody td"), masses)
    scores = session.heads(edited=True)["head_score"].sel(score="mirror").values.ravel()
    labels = page.run("[...document.querySelectorAll('.map button')].map((one) => one.ariaLabel)")
    shown = [float(label.rsplit(" ", 1)[1]) for label in labels]
    assert shown == pytest.approx(scores, rel=1e-3, abs=1e-4)


@in_browser
def test_tokens_that_are_dragged_over_color_all_heads_by_their_attention(page, reference, prompts):
    place = (
        "(({left, top, width, height}) => [left + width / 2, top + height / 2])"
        "(document.querySelector('[data-token=\"TOKEN\"]').getBoundingClientRect())"
    )
    page.run("document.querySelector('div.text').scrollIntoView({block: 'center'})")
    page.drag(*(tuple(page.run(place.replace("TOKEN", str(token)))) for token in (7, 6, 5)))
    wait_for_state(page, "selection && !document.querySelector('.looking').hidden")
    settle(page)
    labels = "[...document.querySelectorAll('.map button')].map((one) => one.ariaLabel)"

    def assert_looking(shares: xr.DataArray) -> None:
        said = [label.split(", attention to the selection (%)")[1] for label in page.run(labels)]
        shown = [float(label.rsplit(": ", 1)[1]) for label in said]
        assert shown == pytest.approx(100 * shares.values.ravel(), rel=6e-3, abs=1e-3)

    chosen = state(page)["token"]
    session = Session(reference, prompts[0])
    assert_looking(session.attention_to((5, 7), chosen))
    edit(page, "layer:1", "", "linearised")
    edited = Session(reference, prompts[0], [Edit(kind="linearised", layer=1)])
    assert_looking(edited.attention_to((5, 7), chosen, edited=True))
    choose(page, "document.querySelector('.looking select')", "answer")
    wait_for_state(page, "looking === 'answer'")
    settle(page)
    assert_looking(edited.attention_to((5, 7), edited=True))
    assert np.ptp(session.attention_to((5, 7)).values) > 0.01
    spans = texts(page, "[aria-label=Prompt] thead th")
    assert spans[:2] == ["head", "selection"]
    page.run("document.querySelector('div.text').focus()")
    page.press("Escape")
    wait_for_state(page, "selection === undefined")
    assert page.run("document.querySelector('.looking').hidden")


@in_browser
def test_a_point_is_dragged_and_moved_by_keys(page):
    before = drawn(page, "Positions")[0]
    start = page.run(
        "(() => { const plot = document.querySelector('.plot[tabindex]'), full = "
        "plot._fullLayout; "
        "plot.scrollIntoView({block: 'center'}); const box = plot.getBoundingClientRect(); "
        "return [box.left + full.xaxis._offset + full.xaxis.d2p(8), "
        f"box.top + full.yaxis._offset + full.yaxis.d2p({before[8]})] }})()"
    )
    page.drag(*((start[0] + right, start[1] - up) for right, up in ((0, 0), (3, 20), (3, 40))))
    page.wait("document.querySelectorAll('.edits li').length === 1")
    settle(page)
    (given,) = state(page)["edits"]
    assert (given["kind"], given["heads"], given["tokens"]) == ("frozen", [[2, 0]], [8])
    assert given["value"] > before[8]
    clean, changed = drawn(page, "Positions")
    assert clean == before and changed[9:] == before[9:]
    assert changed[8] == pytest.approx(given["value"], rel=1e-5)
    page.run("document.querySelector('.plot[tabindex]').focus()")
    page.press("ArrowUp")
    wait_for_state(page, f"edits[0].value > {given['value']}")
    settle(page)
    assert state(page)["edits"][0]["value"] == pytest.approx(given["value"] + 1, rel=1e-4)
    page.press("ArrowLeft")
    wait_for_state(page, "token === 7")
    page.run("document.querySelector('div.text').focus()")
    page.press("End")
    wait_for_state(page, "token === 29")


@in_browser
def test_the_address_holds_the_state_and_a_wrong_one_opens_all_the_same(page, served):
    page.run("document.querySelector('[data-head=\"1.2\"]').click()")
    settle(page)
    edit(page, "layer:2", "", "permuted", 7)
    kept, shown = state(page), drawn(page, "Positions")
    assert kept["heads"] == [[1, 2]]
    assert kept["edits"] == [{"kind": "permuted", "layer": 2, "seed": 7}]
    open_page(page, page.run("location.href"))
    assert state(page) == kept and drawn(page, "Positions") == shown
    for given in (
        '{"heads": [[9, 9]]}',
        '{"heads": "x", "edits": 3, "token": -1}',
        '{"edits": [{"kind": "linearised", "layer": 77}]}',
        '{"prompt": 12}',
        "%",
        "{",
    ):
        open_page(page, f"{served.address}#{given}")
        assert len(drawn(page, "Positions")[0]) == 30


@in_browser
def test_what_is_refused_is_said_and_taken_back(page):
    edit(page, "layer:2", "", "copied", 99)
    assert "token 99" in texts(page, ".refused")[0]
    assert texts(page, ".edits li") == [] and "edits" not in state(page)
    edit(page, "layer:2", "", "scaled")
    assert "scaled needs value" in texts(page, ".refused")[0]
    form(page, "layer:3", "pairs_ablated")
    write(page, "text", "x")
    click(page, "Add edit")
    assert "wanted a valid integer" in texts(page, ".refused")[0]
    edit(page, "layer:2", "", "scaled", 2)
    assert texts(page, ".edits label") == [" layer 2: times 2"]
    assert page.run("document.querySelector('.refused').hidden")


def form(browser: Browser, where: str, kind: str) -> dict[str, Any]:
    """Choose heads and a kind in the form, and read what the page then allows."""
    fill(browser, {0: where, 2: kind})
    add = "[...document.querySelectorAll('button')].find((one) => one.textContent === 'Add edit')"
    which = f"{SHOWN.format('Edits')}.querySelectorAll('select')[1]"
    return browser.run(
        f"({{refused: {add}.disabled, reason: {add}.title, all: {which}.disabled, tokens: "
        f"{which}.value, why: {which}.title}})"
    )


@in_browser
def test_frequencies_and_outputs_are_edited_like_positions_and_undone(page):
    clean = drawn(page, "Attention of the chosen token")
    edit(page, "shown", "token", "linearised")
    click(page, "Undo")
    shown = form(page, "layer:2", "linear")
    why = "Frequencies and outputs change for all tokens"
    assert shown == {"refused": False, "reason": "", "all": True, "tokens": "", "why": why}
    edit(page, "layer:2", "", "linear", 4)
    edit(page, "shown", "", "slowest", 2)
    edit(page, "layer:1", "", "mean_ablated")
    form(page, "layer:3", "pairs_ablated")
    write(page, "text", "0-1, 5")
    click(page, "Add edit")
    edits = [
        {"kind": "linear", "layer": 2, "value": 4},
        {"kind": "stopped", "heads": [[2, 0]], "pairs": [6, 7]},
        {"kind": "mean_ablated", "layer": 1},
        {"kind": "pairs_ablated", "layer": 3, "pairs": [0, 1, 5]},
    ]
    assert state(page)["edits"] == edits
    sentences = [message({"ask": "view", "edits": [one]}).edits[0].sentence() for one in edits]
    assert texts(page, ".edits label") == [f" {sentence}" for sentence in sentences]
    for _ in edits:
        click(page, "Undo")
    assert drawn(page, "Attention of the chosen token") == clean and "edits" not in state(page)


@in_browser
def test_the_form_asks_for_every_edit_of_positions_as_its_class_says(page):
    label = "optgroup[label=Positions] option"
    assert texts(page, label) == [kind.form.says for kind in POSITIONS.values()]
    edit(page, "layer:2", "", "scaled", 0.5)
    form(page, "layer:3", "segmented")
    write(page, "text", "4, 9-11")
    click(page, "Add edit")
    assert state(page)["edits"] == [
        {"kind": "scaled", "layer": 2, "value": 0.5},
        {"kind": "segmented", "layer": 3, "starts": [4, 9, 10, 11]},
    ]
    assert texts(page, ".edits label") == [
        " layer 2: times 0.5",
        " layer 3: numbers of segments that begin at tokens 4, 9, 10, 11",
    ]


@in_browser
def test_a_layer_without_rotation_says_why_its_frequencies_are_not_edited(browser):
    bridge = ri.bridge(ri.reposition(tiny("llama"), "nope,rope,rope"))
    with visited(browser, Explored(bridge, [[1, 5, 9, 4, 8, 3, 17, 23]])):
        for layer, kind, reason in (
            (0, "pairs_ablated", "layer 0 (nope) does not rotate"),
            (0, "ranked", "layer 0 (nope) assigns no"),
            (0, "zero_ablated", ""),
            (1, "yarn", ""),
        ):
            seen = form(browser, f"layer:{layer}", kind)
            assert seen["refused"] == bool(reason) and seen["reason"].startswith(reason)
        # it reads no text, and two of its heads share keys
        assert browser.run("document.querySelector('textarea').offsetParent === null")
        edit(browser, "layer:1", "", "permuted", 1)
        assert len(texts(browser, ".edits li")) == 1
        click(browser, "Which positions")
        browser.wait("/nat|needed/.test(document.querySelector('.suggestions').textContent)")
    assert browser.errors == []


SIDES = "[...document.querySelectorAll('.explorer')]"


def beside(browser: Browser, choice: str) -> None:
    labelled = "[...document.querySelectorAll('label')].find((one) => "
    choose(browser, f"{labelled}one.textContent.startsWith('Compare with')).control", choice)
    if choice:
        browser.wait(f"{SIDES}.length === 2 && 'alive' in {SIDES}[1].dataset")


@in_browser
def test_two_checkpoints_and_two_prompts_are_compared_and_linked(browser, prompts):
    other = ri.load("reversal/repo")
    torch.nn.init.zeros_(other.original_model.lm_head.weight)
    blank = float(Session(other, prompts[0]).look([(1, 2)], 9)["probability"].values[0])
    against = over_the_same_texts(
        Explored(ri.load("reversal/repo"), prompts, "reversal/repo"), other, "blank"
    )
    heads = (
        f"String({SIDES}.map((one) => one.querySelector('.tile[aria-pressed=true]').dataset.head))"
    )
    tokens = f"String({SIDES}.map((one) => one.querySelector('.token-number').value))"
    with visited(browser, against):
        beside(browser, "1")
        browser.run(f"{SIDES}[1].querySelector('.tile[data-head=\"1.2\"]').click()")
        browser.wait(f"{heads} === '1.2,1.2'")
        choose(browser, f"{SIDES}[0].querySelector('.token-number')", 9)
        browser.wait(f"{tokens} === '9,9'")
        titles = browser.run(f"{SIDES}.map((one) => one.querySelector('h1').textContent)")
        assert titles == ["Explorer: reversal/repo", "Explorer: blank"]
        share = """one.querySelector('[aria-label="Next tokens"] tbody .number').textContent"""
        shares = browser.run(f"{SIDES}.map((one) => {share})")
        assert float(shares[1]) == pytest.approx(100 * blank, rel=5e-3)
        assert shares[0] != shares[1]
        browser.wait(f"{SIDES}[1].querySelector('.suggestions').textContent !== ''")
        browser.run(
            f"[...{SIDES}[1].querySelectorAll('button')].find((one) => one.textContent === "
            "'Add edit').click()"
        )
        wait_for_state(browser, "against.edits.length === 1")
        assert state(browser).get("edits") is None  # each side has edits of its own
        address = browser.run("location.href")
        leave(browser)
        open_page(browser, address)
        browser.wait(
            f"{SIDES}.length === 2 && {SIDES}[1].querySelectorAll('.edits li').length === 1 "
            f"&& {tokens} === '9,9'"
        )
        beside(browser, "0")
        # the other prompt, over which the same heads are shown
        browser.wait(f"{SIDES}[1].querySelector('select').value === '1'")
        browser.run(f"{SIDES}[0].querySelector('.tile[data-head=\"2.3\"]').click()")
        browser.wait(f"{heads} === '2.3,2.3' && {SIDES}[1].querySelector('select').value === '1'")
        beside(browser, "")
        browser.wait(f"{SIDES}.length === 1")
        assert "against" not in state(browser) and browser.errors == []


def test_models_that_can_have_no_text_in_common_are_refused_and_others_read_the_same_text():
    reads, words, none = (
        ri.bridge(
            ri.reposition(small_model("llama", LlamaConfig(**TINY | {"vocab_size": 512})), "repo"),
            known,
        )
        for known in (tokenizer("byte_level_bpe"), tokenizer("metaspace_bpe"), None)
    )
    with pytest.raises(ri.InputError, match="no tokens and no texts in common"):
        over_the_same_texts(Explored(reads, "abc"), none)
    prompt = ri.prompt("The cat sat on the mat.", reads, animal="cat")
    ((there,),) = (
        one.prompts for one in over_the_same_texts(Explored(reads, prompt), words).others
    )
    assert there.text == prompt.text and there.tokens != prompt.tokens
    assert set(there.spans) == {"animal"}


def test_a_suggestion_tells_its_progress_and_leaves_no_hook_between_two_steps(
    explored, reference, prompts
):
    asked = message({"ask": "suggest", "heads": [[2, 0]]})
    events, tokens = explored.events(asked), torch.tensor([prompts[0].tokens])
    first = next(events)
    with torch.no_grad():
        assert torch.equal(explored.bridge(tokens), reference(tokens))
    *steps, last = first, *events
    assert [step["done"] for step in steps] == [*range(1, 1 + steps[-1]["total"])]
    suggested = Session(reference, prompts[0]).suggest()
    assert [each["effect"] for each in last["suggested"]] == [effect for _, effect in suggested]
    threads, ended = threading.active_count(), explored.events(asked)
    next(ended)
    ended.close()
    assert threading.active_count() == threads


HOSTILE = {
    "markup": "</script><img src=x onerror=\"document.title='hit'\"><b>bold</b> &amp; <!-- {{7*7}}",
    "right to left": "\u202eladder \u05d0\u05d1\u05d2 castle\u200f temple",
    "nul and control": "a \0 \x1b[31m b\tc\n\nd \u2028 e",
}


@pytest.fixture(scope="module")
def reader() -> Iterator[Served]:
    """A tiny model of random weights that reads any text."""
    config = LlamaConfig(**TINY | {"vocab_size": 640})
    model = ri.reposition(LlamaForCausalLM(config).eval(), "repo")
    with serving(Explored(ri.bridge(model, tokenizer("byte_level_bpe")), "abc")) as one:
        yield one


@in_browser
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_text_is_text(browser, reader, case):
    browser.size(1280, 900)
    open_page(browser, reader.address)
    browser.run(f"document.querySelector('textarea').value = {json.dumps(HOSTILE[case])}")
    click(browser, "Read this text")
    browser.wait("document.querySelectorAll('.text span').length > 10")
    settle(browser)
    assert browser.run("document.title") == "Explorer"
    assert browser.run("document.querySelectorAll('img, div.text b').length") == 0
    shown = "".join(texts(browser, "div.text span"))
    assert shown.startswith("<bos>") and not set(shown) & set("\0\x1b\u202e\u200f\u2028\t\n")
    assert case != "markup" or shown.replace("␣", " ") == "<bos>" + HOSTILE[case]
    assert len(drawn(browser, "Positions")[0]) == len(texts(browser, "div.text span"))
    edit(browser, "layer:1", "", "linearised")
    assert texts(browser, ".edits label") == [" layer 1: the token index"]
    assert browser.errors == []
    leave(browser)


@in_browser
def test_a_text_that_is_empty_or_too_long_is_refused_and_the_page_goes_on(page):
    for text, said in (
        ("''", "empty"),
        ("'ladder '.repeat(150000)", "1048576"),
        ("'ladder '.repeat(9000)", "9,00"),
    ):
        page.run(f"document.querySelector('textarea').value = {text}")
        click(page, "Read this text")
        assert said in texts(page, ".refused")[0], texts(page, ".refused")[0]
        assert page.run("document.querySelectorAll('.text span').length") == 30


@in_browser
def test_what_is_kept_is_what_is_shown(page, reference, prompts, tmp_path):
    edit(page, "layer:2", "", "linearised")
    page.run(
        "window.saved = []; Plotly.downloadImage = (plot, options) => "
        "window.saved.push(options.format); "
        "URL.createObjectURL = (blob) => { window.kept = blob; return 'data:,' }"
    )
    edits = [Edit(kind="linearised", layer=2)]
    session = Session(reference, prompts[0], edits, name="reversal/repo")
    code = session.as_python([(2, 0)], 17)
    click(page, "Copy as Python")
    assert texts(page, "pre")[0] == code
    click(page, "netCDF")
    content = page.run(
        "kept.arrayBuffer().then((all) => btoa(String.fromCharCode(...new Uint8Array(all))))"
    )
    (tmp_path / "kept.nc").write_bytes(base64.b64decode(content))
    with xr.open_dataset(tmp_path / "kept.nc", engine="h5netcdf") as kept:
        xr.testing.assert_equal(kept.load(), session.changed([(2, 0)], 17))
        assert kept.attrs["python"] == code
    click(page, "CSV")
    lines = page.run("kept.text()").splitlines()
    assert len(lines) == 1 + 2 * 30 and "weight" in lines[0]
    for kind in ("SVG", "PNG"):
        click(page, kind)
    assert page.run("window.saved") == ["svg", "png"]


@in_browser
def test_narrow_dark_and_with_names_for_screen_readers(page):
    for width in (420, 900):
        page.size(width, 900, dark=True)
        page.wait("document.documentElement.scrollWidth <= innerWidth")
    assert (
        page.run(
            "getComputedStyle(document.getElementById('explorer')).getPropertyValue('--ink').trim()"
        )
        == "#ececee"
    )
    page.wait("document.querySelector('.plot:not([hidden])')._fullLayout.font.color === '#ececee'")
    nameless = (
        "[...document.querySelectorAll('button, select, input, "
        "textarea')].filter((one) => one.checkVisibility() && "
    )
    assert (
        page.run(
            f"{nameless}!(one.ariaLabel || one.textContent.trim() || (one.labels && "
            "one.labels.length))).length"
        )
        == 0
    )


@in_browser
def test_a_page_that_loses_its_server_says_so_and_finds_it_again(browser, explored):
    first = Served(explored)
    open_page(browser, first.address)
    edit(browser, "layer:2", "", "linearised")
    kept = state(browser)
    first.end()
    browser.run("document.querySelector('[data-head=\"1.1\"]').click()")
    browser.wait("!document.querySelector('.banner').hidden")
    with serving(explored, first.port):
        browser.wait(
            "document.querySelector('.banner').hidden && document.querySelectorAll('.edits "
            "li').length === 1"
        )
        wait_for_state(browser, "heads[0][0] === 1")
        settle(browser)
        assert state(browser)["edits"] == kept["edits"]
        leave(browser)
    assert all("net::ERR_" in error for error in browser.errors)


@in_browser
def test_the_widget_shows_the_same_page_by_messages_to_a_kernel(
    browser, reference, prompts, tmp_path
):
    """The widget's own module in a page whose `model` hands messages to this process, in place of a
    notebook.
    """
    widget = ri.explore(reference, prompts)
    (tmp_path / "cell.html").write_text("<!doctype html><body><div id='cell'></div></body>")
    browser.size(1280, 900)
    browser.open((tmp_path / "cell.html").as_uri())
    model = (
        "window.model = {send: (one) => sent.push(one), on: (name, act) => "
        "heard.push(act), off: () => {}}"
    )
    browser.run(f"window.sent = []; window.heard = []; {model}; 0")
    module = (
        f"URL.createObjectURL(new Blob([{json.dumps(widget._esm)}], {{type: 'text/javascript'}}))"
    )
    browser.run(
        f"import({module}).then((one) => {{ one.default.render({{model, el: "
        f"document.getElementById('cell')}}) }})"
    )

    def until(condition: str) -> None:
        for _ in range(2000):
            for sent in browser.run("sent.splice(0)"):
                try:
                    answer = widget.answer(sent["message"])
                except ri.InputError as error:
                    answer = {"refused": str(error)}
                browser.run(
                    "heard.forEach((act) => "
                    f"act({json.dumps({'number': sent['number'], 'answer': answer})}))"
                )
            if browser.run(condition):
                return
            time.sleep(0.01)
        raise TimeoutError(condition)

    until(
        "document.querySelectorAll('.suggested').length > 0 && "
        "document.querySelectorAll('.continued .right').length === 12"
    )
    browser.run("document.querySelector('.tour-start').click()")
    until("document.querySelector('.taught .tour').textContent.startsWith('1 of 5. ')")
    browser.press("Escape")
    until("document.querySelector('.tour') === null")
    browser.run("document.querySelector('.suggested').click()")
    until(
        "document.querySelectorAll('.continued .wrong').length >= 8 && "
        "document.querySelectorAll('.edits li').length === 1"
    )
    seen = Session(reference, prompts[0], [Edit(kind="linearised", layer=2)]).changed([(2, 0)], 17)
    np.testing.assert_allclose(numbers(drawn(browser, "Answer"))[0], seen["curve"], rtol=1e-9)
    assert browser.run("location.hash") == "" and browser.errors == []


def test_the_server_answers_only_its_own_page(served):
    page, ask, own = f"/{TOKEN}/", f"/{TOKEN}/ask", {"ask": "open"}
    evil = {"Origin": "http://evil.example"}
    for path, body, headers, status in (
        (page, None, {}, 200),
        (page, None, {"Host": f"localhost:{served.port}"}, 200),
        (page, None, {"Host": "evil.example"}, 421),
        (ask, own, {"Host": "evil.example"}, 421),
        (ask, own, evil, 403),
        (f"{page}page/explorer.js", None, evil, 403),
        (ask, own, {"Origin": "null"}, 403),
        (ask, own, {"Origin": f"http://127.0.0.1:{served.port}"}, 200),
        (ask, None, {}, 405),
    ):
        assert served.get(path, body, headers)[0] == status, (path, headers)
    for path in ("/", "/wrong/page/explorer.js", f"/{TOKEN}x/"):
        assert served.get(path)[0] in (403, 404)
    for name in ("server.py", "..%2fserver.py", "../server.py", "/etc/passwd"):
        assert served.get(f"{page}page/{name}")[0] == 404


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "broken JSON"),
        (b"\xff", "can't decode"),
        (b'{"ask": "open", "ask": "view"}', "occurs twice"),
        (b"[]", "wanted a valid dictionary, got"),
        (b'{"ask": "view"}', "no head is chosen"),
        (b'{"ask": "view", "heads": [[2, 0]], "token": 99}', "token 99"),
        (b'{"ask": "view", "heads": [' + b"[0, 0]," * 6 + b"[0, 0]]}", "at most 6"),
        (b'{"ask": "view", "heads": [[2, 0]], "selection": [3, 99]}', "token 99"),
        (b'{"ask": "view", "heads": [[2, 0]], "selection": [-1, 3]}', "selection"),
        (b'{"ask": "view", "heads": [[2, 0]], "selection": [3]}', "selection"),
        (b'{"ask": "view", "heads": [[2, 0]], "looking": "all"}', "looking"),
        (b'{"ask": "view", "heads": [[2, 0]], "answer": [0]}', "an answer has tokens"),
        (b'{"ask": "prompt", "prompt": 7}', "no prompt 7"),
        (b'{"ask": "continue", "edits": [{"kind": "linearised", "layer": 9}]}', "layer 9"),
        (b'{"ask": "prompt", "text": "' + b"x" * (9 << 20) + b'"}', "more than 8 MB"),
    ],
)
def test_messages_that_do_not_fit_are_refused_in_one_line(served, body, said):
    status, answer = served.get(f"/{TOKEN}/ask", body)
    content = json.loads(answer.removeprefix(b"data: "))
    assert status == 200 and said in content["refused"] and "\n" not in content["refused"]


def test_a_page_that_goes_away_in_the_midst_of_its_message_is_no_error(explored):
    """Found: a traceback in the terminal."""

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(part: dict) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/{TOKEN}/ask",
        "headers": [(b"host", b"localhost:9")],
    }
    asyncio.run(application(explored, TOKEN, 9)(scope, receive, send))


def test_a_newer_view_ends_the_older_one_of_its_page_alone(served, explored, monkeypatch):
    begun, answer = threading.Event(), explored.answer

    def slow(asked, check):
        begun.set()
        for _ in range(3000 if asked.token == 3 else 0):  # until a newer one has come
            check()
            time.sleep(0.01)
        return answer(asked, check)

    monkeypatch.setattr(explored, "answer", slow)
    with ThreadPoolExecutor() as pages:
        ask = partial(pages.submit, served.ask, ask="view", heads=[[2, 0]])
        older = ask(tab="one", token=3)
        assert begun.wait(30)
        others = [ask(tab="two", token=5), ask(tab="one", token=4)]
        assert older.result(60) == {"superseded": True}
        assert all("numbers" in each.result(60) for each in others)


@pytest.fixture(scope="module")
def measured(prompts):
    return ri.analyze(
        ri.load("reversal/repo"), prompts, ("positions",), experiments=[Atlas(sequences=2, twins=2)]
    )


@in_browser
def test_a_row_of_the_atlas_shows_its_head_and_heads_of_one_name_are_edited_together(
    browser, prompts, measured
):
    explored = Explored(ri.load("reversal/repo"), prompts, "reversal/repo", measured)
    with visited(browser, explored):
        browser.run(
            "[...document.querySelectorAll('.heads tbody tr')].find((row) => "
            "row.textContent.startsWith('L1 H3')).click()"
        )
        wait_for_state(browser, "heads[0].join() === '1,3'")
        settle(browser)
        edit(browser, "group:mirror", "", "linearised")
        (edited,) = state(browser)["edits"]
        assert edited == {"kind": "linearised", "heads": [[2, head] for head in range(4)]}
    assert browser.errors == []


def test_a_run_brings_its_prompts_and_its_atlas_and_is_held_to_its_checkpoint(
    prompts, measured, tmp_path
):
    def explored(*words):
        arguments = _parser(["explore"]).parse_args(["explore", *words])
        return _explored(arguments, _given(arguments))[0]

    ri.write_run(measured, tmp_path / "run.nc")
    found = explored(str(tmp_path))
    assert [(one.tokens, one.generated) for one in found.prompts] == [
        (one.tokens, one.generated) for one in prompts
    ]
    opened, first = (found.answer(message({"ask": ask})) for ask in ("open", "prompt"))
    atlas = opened["head_table"]
    assert opened["checkpoint"] == "reversal/repo" and len(atlas["rows"]) == 16
    assert "mirror" in atlas["rows"][8][atlas["columns"].index("name")]
    assert first["spans"]["words"]["at"] == [[5, 16]]
    assert first["answer"] == list(prompts[0].generated)
    with pytest.raises(ri.InputError, match="other weights"):
        explored(str(tmp_path / "run.nc"), "--checkpoint", "niah/repo")
    other = measured.copy(deep=True)
    other["positions"]["token_id"][0, 3] = 99_999
    ri.write_run(other, tmp_path / "run.nc")
    with pytest.raises(ri.InputError, match="prompt 0 has token 99999; the model's tokens are 0"):
        explored(str(tmp_path))


def test_the_command_prints_its_address_answers_and_ends_with_an_interruption(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path))

    def explore() -> int:
        # A shell that starts the suite in the background lets it ignore interruptions.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return main(["explore", "reversal/repo", "--no-browser"])

    process = Forked(explore)
    address = next(line for line in process.stdout if line.startswith("http://127.0.0.1:")).split()[
        0
    ]
    port, token = address.removeprefix("http://127.0.0.1:").strip("/").split("/")
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    connection.request("POST", f"/{token}/ask", json.dumps({"ask": "open"}))
    assert json.loads(connection.getresponse().read())["checkpoint"] == "reversal/repo"
    connection.close()
    os.kill(process.pid, signal.SIGINT)
    ended = process.wait()
    # a cold start says before that it imports torch
    assert ended.returncode == 130 and "interrupted" in ended.stderr.splitlines()[-1]
    kept = tmp_path / "explore-token"
    assert kept.read_text() == token and kept.stat().st_mode & 0o077 == 0


class Slow(Explored):
    """A model with layers that take longer than the server's patience at its end."""

    def events(self, asked, check=lambda: None):
        for event in super().events(asked, check):
            yield event
            time.sleep(1.5)


def test_an_interruption_ends_a_stream_without_a_word(explored):
    """Found: some 50 lines of traceback of starlette and anyio."""
    place = listening(None)
    slow = Slow(explored.bridge, explored.prompts)

    def serve() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            server(slow, TOKEN, place).run(sockets=[place])
            return 0
        return 130

    port, process = place.getsockname()[1], Forked(serve)
    place.close()  # the process has its own
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", f"/{TOKEN}/ask", json.dumps({"ask": "continue"}))
        assert connection.getresponse().readline().startswith(b"data: ")
        os.kill(process.pid, signal.SIGINT)
        ended = process.wait()
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@in_browser
def test_what_waits_for_its_answer_is_not_drawn_over_the_old_numbers(page):
    """Found: a head and "Without token 0" in one task drew numbers of the old head for the new
    one; a token of another prompt ended in `offsetTop` of undefined.
    """
    settle(page)
    said = "document.querySelector('.looks').textContent"
    tile = "document.querySelectorAll('.map [data-head]')"
    sink = "document.querySelector('.sink')"
    before = page.run(said)
    during = page.run(
        f"(() => {{ [...{tile}].find((one) => one.getAttribute('aria-pressed') !== 'true').click();"
        f" {sink}.click(); return {said}; }})()"
    )
    assert during.split(" looks ")[0] == before.split(" looks ")[0]
    assert "without token 0" in during
    settle(page)
    after = page.run(said)
    assert after.split(" looks ")[0] != before.split(" looks ")[0] and "without token 0" in after
    prompts = "document.querySelector('header select')"
    page.run(
        f"Object.assign({prompts}, {{value: 1}}).dispatchEvent(new Event('change')); {sink}.click()"
    )
    settle(page)
    assert state(page)["prompt"] == 1 and not page.run(f"{sink}.checked")
    # Two changes at once are both asked for, and a refused one takes none of the others along.
    page.run(
        "[...document.querySelectorAll('.text [data-token]')][4].dispatchEvent("
        "new PointerEvent('pointerdown', {bubbles: true}));"
        "[...document.querySelectorAll('.text [data-token]')][4].dispatchEvent("
        f"new PointerEvent('pointerup', {{bubbles: true}})); [...{tile}][1].click()"
    )
    settle(page)
    assert (
        state(page)["token"] == 4 and page.run(f"{tile}[1].getAttribute('aria-pressed')") == "true"
    )
