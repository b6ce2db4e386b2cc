"""What positions that are made of one known thing are called: the table of docs/measures.md."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from constructed_positions import constructed

import repo_interp as ri
from repo_interp.plugins.sources.position_sources import PositionSources

PAGE = Path(__file__).parents[3] / "docs" / "measures.md"
RANDOM = ("random walk", "leaky mean of noise, .95")


def called(draws, **options):
    """Names by source, counted over draws."""
    inputs, spans, sources = constructed(draws, **options)
    measure = PositionSources()
    kinds = measure.conclude(measure.observe(inputs, spans))["kind"].values[0]
    names = defaultdict(Counter)
    for source, kind in zip(sources, kinds, strict=True):
        names[source][str(kind)] += 1
    return names


@pytest.fixture(scope="module")
def names():
    return called(4)


def printed():
    """The table of the page: what each source is called."""
    table = PAGE.read_text().split("| positions | name |\n|---|---|\n")[1].split("\n\n")[0]
    return dict(line.strip("| ").split(" | ") for line in table.splitlines())


def test_the_page_says_what_every_source_is_called_in_most_draws(names):
    assert {source: kinds.most_common(1)[0][0] for source, kinds in names.items()} == printed()
    assert len(names) >= 48


def test_names_hold_from_draw_to_draw(names):
    unsure = {source: kinds for source, kinds in names.items() if kinds.most_common(1)[0][1] < 3}
    assert not unsure


@pytest.mark.parametrize("texts", [1, 3])
def test_walks_and_slow_noise_have_a_name_in_at_most_one_draw_of_twenty(texts):
    for source, kinds in called(60, texts=texts, chosen=RANDOM).items():
        assert kinds["other"] >= 57, (source, kinds)


def test_line_ends_are_marked_where_their_tokens_end_no_other_lines():
    """A table of words with a number of its own for "\\n" marks nothing; other line ends do."""
    found = called(3, breaks="last", chosen=("last of a line", "word"))
    assert found == {"last of a line": {"marks lines": 3}, "word": {"places words": 3}}
    tables = called(40, texts=1, chosen=("word", "line break"))
    assert tables == {"word": {"places words": 40}, "line break": {"places words": 40}}


def test_one_text_names_no_shape_and_needs_no_second_one_for_words():
    found = called(2, texts=1, chosen=("V", "sine", "index", "word", "previous word"))
    assert {source: [*kinds] for source, kinds in found.items()} == {
        "V": ["other"],
        "sine": ["other"],
        "index": ["counts tokens"],
        "word": ["places words"],
        "previous word": ["places by previous word"],
    }


def test_positions_that_are_set_in_a_model_are_called_what_they_are():
    model = ri.load("language/repo")
    layer = ri.layout(model).index("repo")
    items = [
        "lamp",
        "chair",
        "table",
        "spoon",
        "lamp",
        "fork",
        "knife",
        "plate",
        "chair",
        "cup",
        "glass",
        "bowl",
        "lamp",
        "tray",
    ] * 2
    lines = [
        f"item {k % 7}: the {word} costs {k * 3 % 11} and is {'large' if k % 3 else 'small'}"
        for k, word in enumerate(items)
    ]
    prompt = ri.prompt("\n".join(lines)[:700], model)
    count, random = len(prompt.tokens), np.random.default_rng(0)
    before = [0, *prompt.tokens[:-1]]
    table = random.random(1 + max(prompt.tokens))
    for expected, positions in (
        ("other", random.normal(size=count).cumsum()),
        ("places words", table[list(prompt.tokens)]),
        ("places by previous word", table[before]),
        ("counts tokens", np.arange(count)),
        ("constant", np.ones(count)),
    ):
        with ri.set_positions(model, layer=layer, head=0, values=positions.astype(float).tolist()):
            run = ri.analyze(model, prompt, ("position_sources",), layers=[layer], experiments=())
        assert run["position_sources"]["kind"].sel(layer=layer, head=0).item() == expected
