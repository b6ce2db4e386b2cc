"""segments: text to segments; variance between them and jumps at their edges - closed forms, slow
references, controls, a run.
"""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
import xarray as xr
from attention_inputs import random_inputs
from families import tiny
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused

import repo_interp as ri
from repo_interp.measures.kernels import segmentation
from repo_interp.measures.kernels.segmentation import (
    chance,
    generator,
    has_ties,
    largest_jumps,
    match_share,
    shuffled_edges,
    variance_between,
)
from repo_interp.plugins.cope import gates
from repo_interp.plugins.segments import segments
from repo_interp.plugins.segments.segments import Segments, _within
from repo_interp.tasks.prompt import Prompt, structure
from repo_interp.tasks.prompt.structure import prompt_structure, separators
from repo_interp.tasks.prompt.structure import segments as segments_of


def cut(text):
    """A prompt written with bars between its tokens."""
    return text.split("|")


# text to segments
# --------------------------------------------------------------------------------------------------


def begins(kind, texts, spans=None):
    """First tokens of the segments after the first, as texts."""
    labels = segments_of(kind, len(texts), spans or {}, texts)
    return [texts[token] for token in range(1, len(texts)) if labels[token] != labels[token - 1]]


PROSE = cut('<bos>|One| two|.| Three|?"| Four|\n| five|!|\n\n|  |Six|.|5| is| it|.')


def test_lines_sentences_and_paragraphs_of_prose():
    assert begins("lines", PROSE) == [" five", "  "]
    assert begins("sentences", PROSE) == [" Three", " Four", "  "]
    assert begins("paragraphs", PROSE) == ["  "]
    assert begins("blocks", PROSE) == begins("sections", PROSE) == begins("examples", PROSE) == []
    held = [PROSE[token] for token in separators(len(PROSE), {}, PROSE)]
    assert held == [".", '?"', "\n", "!", "\n\n"]


def test_a_token_with_a_break_and_blanks_ends_its_line_and_one_with_text_behind_begins_the_next():
    texts = ["a", ":\n    ", "b", "\nc", " d", " \n \n", "e"]
    assert begins("lines", texts) == ["b", "\nc", "e"]
    assert begins("paragraphs", texts) == ["e"]


CODE = cut(
    "import| x|\n\n|@|once|\n|def| f|(|):|\n|    |return| x.y|\n\n|class| C|:|\n|    |def| "
    "g|(|self|):|\n    |    |# Not a title|\n|# nor this|\n|define| (|f|)"
)


def test_blocks_of_code_begin_with_their_decorators_and_its_comments_are_no_sections():
    assert begins("blocks", CODE) == ["@", "class", "    "]
    assert begins("sections", CODE) == []
    held = [CODE[token] for token in separators(len(CODE), {}, CODE)]
    assert set(held) == {"@", "class", "\n", "\n\n", "\n    ", "def"} and held.count("def") == 1


def test_sections_begin_with_their_headings():
    wiki = cut("=| =| Life| =| =|\n| He| was|.|\n| =| =| Work| =| =|\n| He| wrote|.")
    assert begins("sections", wiki) == [" ="] and segments_of("sections", 19, {}, wiki)[10] == 1
    assert begins("sections", cut("# |One|\n|text|\n|## |Two|\n|#|hash")) == ["## "]


def test_words_without_spaces_are_set_apart():
    words = ["the", "dog", ".", "it", "runs", "!", "3.5", "now"]
    assert begins("sentences", words) == ["it", "3.5"]
    assert begins("sentences", ["一", "。", "二", "。"]) == ["二"]


def test_spans_come_before_text():
    texts = ["a", "\n", "b", "\n", "c"]
    spans = {
        "examples": (0, 1, 2, 3),
        "examples.2": (0, 1),
        "examples.10": (2, 3),
        "examples.10.label": (3,),
        "separator": (2,),
    }
    assert segments_of("examples", 5, spans, texts).tolist() == [0, 0, 1, 1, -1]
    assert separators(5, spans, texts) == (2,)
    assert separators(5, {}, None) == separators(5, {}, [""] * 5) == ()
    assert segments_of("lines", 5, {}, None).tolist() == [-1] * 5


def test_structure_names_what_there_is_and_refuses_other_kinds():
    texts = ["a", "\n", "b", "\n", "c"]
    found = prompt_structure(("lines", "examples"), 5, {}, texts)
    assert found == {
        "separator": (1, 3),
        "segments.lines": (0, 1, 2, 3, 4),
        "segments.lines.starts": (0, 2, 4),
    }
    with refused("'stanzas'; there are examples, sections"):
        prompt_structure(("stanzas",), 5, {}, texts)


def test_both_floors_mean_the_same_names():
    assert set(gates.KINDS) < set(segments.KINDS) == set(structure.KINDS)
    assert (segmentation.INSIDE, segmentation.STARTS) == (structure.INSIDE, structure.STARTS)


# variance between
# --------------------------------------------------------------------------------------------------


def test_variance_between_equals_the_sums_written_out():
    values = np.random.default_rng(0).normal(size=(3, 30))
    for edges in ((5, 6, 20), (1, 15, 29)):
        found = variance_between(torch.as_tensor(values), torch.tensor([edges]))[0]
        for row, z in zip(found, values, strict=True):
            between = [len(part) * (part.mean() - z.mean()) ** 2 for part in np.split(z, edges)]
            assert_allclose(row, sum(between) / ((z - z.mean()) ** 2).sum())
    still = torch.tensor([[0.1], [torch.nan]]).expand(2, 30)
    assert variance_between(still, torch.tensor([[7, 19]])).isnan().all()


# jumps at edges
# --------------------------------------------------------------------------------------------------


def test_the_largest_jumps_are_found_where_they_are_whatever_their_sign():
    values = torch.tensor([[0, 0.1, 5, 5.1, 5, -4, -4.1, -4], [8, 0, 0, 0, 0, 0, 0, -9.0]])
    assert largest_jumps(values, 2, torch.arange(7)[None]).tolist() == [[[2, 5], [1, 7]]]
    assert not has_ties(values, 2)
    assert has_ties(values, 3), "the second row has one size of step only besides"


def test_equal_jumps_come_in_the_order_given():
    index = torch.arange(8.0)[None]
    assert largest_jumps(
        index, 2, torch.tensor([[6, 0, 1, 2, 3, 4, 5], [2, 3, 0, 1, 4, 5, 6]])
    ).tolist() == [[[1, 7]], [[3, 4]]]


def slow_matched(found, edges, tolerance):
    """The best assignment of all, one to one."""
    near = np.abs(found[:, None] - edges) <= tolerance
    orders = permutations(range(len(edges)))
    return max(np.mean([near[row, column] for row, column in enumerate(o)]) for o in orders)


@pytest.mark.parametrize("tolerance", [0, 1, 3])
def test_matching_is_the_best_assignment(tolerance):
    random = np.random.default_rng(tolerance)
    pairs = [[np.sort(random.choice(14, 4, replace=False)) for _ in range(2)] for _ in range(25)]
    found, edges = torch.tensor(np.array(pairs)).unbind(1)
    expected = [slow_matched(*pair, tolerance) for pair in pairs]
    assert len(set(expected)) > 2
    assert_allclose(match_share(found, edges, tolerance), expected)
    assert_allclose(match_share(found[:, None], edges, tolerance).diagonal(), expected)


# shuffled layouts
# --------------------------------------------------------------------------------------------------


def test_shuffled_layouts_keep_number_and_lengths():
    edges = torch.tensor([2, 9, 14, 30])
    drawn = shuffled_edges(edges, 40, 200, np.random.default_rng(0))
    assert drawn.shape == (200, 4) and drawn.min() >= 1 and drawn.max() <= 39
    inner = drawn.diff(dim=1)
    assert set(inner.unique().tolist()) == {2, 7, 5, 16, 10}
    assert len({tuple(row) for row in drawn.tolist()}) > 150
    assert abs(float(drawn.double().mean()) - 20) < 1, "as many on the left as on the right"


def test_segments_of_one_length_are_moved():
    drawn = shuffled_edges(torch.tensor([6, 12, 18]), 24, 300, np.random.default_rng(0))
    assert set((drawn[:, 0] % 6).tolist()) == set(range(6)) and (drawn.diff(dim=1) == 6).all()
    alone = shuffled_edges(torch.tensor([1]), 2, 5, np.random.default_rng(0))
    assert (alone == 1).all()


def test_draws_depend_on_seed_prompt_and_kind():
    given = ((0, 1, "lines"), (1, 1, "lines"), (0, 2, "lines"), (0, 1, "blocks"), (0, 1, "lines"))
    *others, first = [tuple(generator(*of).integers(0, 99, 6)) for of in given]
    assert len({*others}) == 4 and first == others[0]


def test_chance_counts_the_observed_one_among_the_draws():
    drawn = torch.tensor([[0.1, 0.5, 1.0], [0.2, 0.5, 1.0], [0.9, 0.5, 1.0]]).double()
    assert_allclose(chance(drawn, torch.tensor([0.5, 0.6, torch.nan])), [0.5, 0.25, np.nan])


# the measure
# --------------------------------------------------------------------------------------------------


def learned(position, tokens=48):
    """Inputs with these positions [P, token] in both prompts."""
    inputs = random_inputs(kv_heads=position.shape[0], tokens=tokens)
    return replace(inputs, positions=position.double().expand(2, -1, -1))


def concluded(inputs, starts, inside=slice(None), **options):
    """The measure of lines that begin at `starts` and lie `inside`."""
    spans = {name: torch.zeros_like(inputs.valid) for name in (LINES, LINES + ".starts")}
    spans[LINES][:, inside], spans[LINES + ".starts"][:, list(starts)] = True, True
    measure = Segments(kinds=("lines",), **options)
    return measure.conclude(measure.observe(inputs, spans)).sel(layer=inputs.layer, kind="lines")


LINES, STARTS = "segments.lines", (0, 7, 11, 20, 33, 40)


def test_positions_that_step_with_the_lines_follow_them_and_noise_does_not():
    torch.manual_seed(1)
    labels = torch.zeros(48).index_fill_(0, torch.tensor(STARTS[1:]), 1).cumsum(0).long()
    steps = torch.tensor([0.0, 5, -3, 2, 9, 4])[labels] + 0.01 * torch.randn(48)
    group = concluded(learned(torch.stack([steps, torch.randn(48)])), STARTS, draws=99)
    bounds = {
        "variance_between": ((0.999, 1), (0, 0.4)),
        "variance_between_shuffled": ((0, 0.9), (0, 0.4)),
        "variance_between_chance": ((0.01, 0.01), (0.05, 1)),
        "boundary_f1": ((1, 1), (0, 0.9)),
        "boundary_f1_shuffled": ((0, 0.6), (0, 0.6)),
        "boundary_f1_chance": ((0.01, 0.05), (0.05, 1)),
    }
    for name, of_heads in bounds.items():
        for heads, (low, high) in zip(([0, 1], [2, 3]), of_heads, strict=True):
            found = group[name].sel(head=heads)
            assert ((low - 1e-9 <= found) & (found <= high + 1e-9)).all(), name
    assert (group["segment_count"] == 6).all()
    assert_array_equal(group["segment"].sel(prompt=0), labels)


def test_the_index_explains_a_trend_and_has_the_f1_of_chance():
    group = concluded(learned(torch.arange(48.0)[None]), STARTS, draws=400, tolerance=0)
    for name in ("variance_between", "boundary_f1"):
        assert_allclose(*xr.broadcast(group[name], group[f"{name}_index"]))
    assert (group["variance_between"] > 0.9).all()
    assert (group["variance_between_chance"] > 0.05).all()
    for name in ("boundary_f1", "boundary_f1_shuffled"):
        assert_allclose(group[name], 5 / 47, atol=0.02)


@pytest.mark.parametrize(("tolerance", "found"), [(0, 0), (1, 0), (2, 1)])
def test_a_tolerance_forgives_jumps_beside_an_edge(tolerance, found):
    late = torch.isin(torch.arange(48), torch.tensor(STARTS[1:]) + 2)
    group = concluded(learned(late.cumsum(0)[None]), STARTS, tolerance=tolerance)
    assert (group["boundary_f1"] == found).all()


def test_tokens_outside_segments_do_not_count():
    position = torch.tensor([[99.0, -50, 1, 1, 1, 4, 4, 4, 70, -80]])
    group = concluded(learned(position, tokens=10), (2, 5), slice(2, 8))
    assert_allclose(group["variance_between"], 1)
    assert_allclose(group["boundary_f1"], 1)
    assert group["segment"].sel(prompt=1).values.tolist() == [-1, -1, 0, 0, 0, 1, 1, 1, -1, -1]


def assert_empty(group, *names):
    for name in names:
        assert group[name].isnull().all(), name


def test_nothing_to_say_is_nan():
    scores, of_index = (
        [f"{name}{end}" for name in ("variance_between", "boundary_f1")] for end in ("", "_index")
    )
    nope = concluded(random_inputs(scheme="nope", tokens=48), STARTS)
    assert_empty(nope, *scores)
    assert nope[of_index].notnull().all().to_array().all()
    for starts in ((), (0,)):
        silent = concluded(random_inputs(), starts)
        assert_empty(silent, *scores, *of_index)
        assert (silent["segment_count"] == 0).all() and (silent["segment"] == -1).all()
    flat = concluded(learned(torch.full((1, 48), 2.0)), STARTS)
    assert_empty(flat, "variance_between", "variance_between_chance")
    assert (flat["boundary_f1"] < 0.6).all(), "jumps of no size are no jumps at edges"


# through analyze
# --------------------------------------------------------------------------------------------------


def test_texts_and_spans_of_prompts_give_the_segments():
    words, tokens = ("One", " line", "\n", "and", " another", "."), tuple(range(10, 16))
    spans = {"examples": (1, 2, 3, 4), "examples.1": (1, 2), "examples.2": (3, 4)}
    prompts = [Prompt(tokens, spans, token_text=words), Prompt(tokens)]
    bridge = ri.bridge(ri.reposition(tiny("llama"), "repo"))
    measure = Segments(kinds=("lines", "examples"))
    group = ri.analyze(bridge, prompts, measures=(measure,))["segments"].to_dataset()
    labels = [[0, 0, 0, 1, 1, 1], [-1, 0, 0, 1, 1, -1]]
    assert group["segment"].sel(prompt=0).values.tolist() == labels
    assert group["boundary_f1"].dims == ("prompt", "layer", "head", "kind")
    assert group["boundary_f1"].sel(prompt=0).notnull().all()
    assert group["boundary_f1"].sel(prompt=1).isnull().all()


def test_trends_within_segments_and_their_null():
    """A ramp that starts again in each segment, one that falls in half of them, a constant."""
    lengths = [6, 9, 3, 12]
    edges = torch.tensor(np.cumsum(lengths)[:-1])
    ramps = [torch.arange(float(n)) for n in lengths]
    falling = torch.cat([-ramps[0], ramps[1] ** 3, *ramps[2:]])
    trend, null = _within(torch.stack([torch.cat(ramps), falling, torch.zeros(30)]), edges)
    # the segment of 3 tokens has none
    assert_allclose(trend, [1, 1 / 3, np.nan])
    expected = 1.96 * (1 / 5 + 1 / 8 + 1 / 11) ** 0.5 / 3
    assert_allclose(null, [expected, expected, np.nan], rtol=1e-6)
