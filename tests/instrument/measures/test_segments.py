"""segments: text to segments; variance between them and jumps at their edges - closed forms, slow
references, controls, a run.
"""

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from attention_inputs import random_inputs
from families import tiny
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused
from scipy.stats import spearmanr

import repo_interp as ri
from repo_interp.measures import gates, segments
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
from repo_interp.measures.segments import Segments, _within
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
    "g|(|self|):|\n    |    |# Not a title|\n|"
    "# nor this|\n|define| (|f|)"
)


def test_blocks_of_code_begin_with_their_decorators_and_its_comments_are_no_sections():
    assert begins("blocks", CODE) == ["@", "class", "    "]
    assert begins("sections", CODE) == []
    held = [CODE[token] for token in separators(len(CODE), {}, CODE)]
    assert held.count("def") == 1 and "class" in held and "@" in held and "\n    " in held
    assert "return" not in held and "define" not in held


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
    assert segments_of("lines", 5, {"lines.1": (1, 2), "lines.2": (3, 4)}, texts).tolist() == [
        -1,
        0,
        0,
        1,
        1,
    ]
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


def at(*edges):
    return torch.tensor([edges])


def test_variance_between_equals_the_sums_written_out():
    values = np.random.default_rng(0).normal(size=(3, 30))
    for edges in ((5, 6, 20), (1, 15, 29)):
        found = variance_between(torch.as_tensor(values), at(*edges))[0]
        for row, z in zip(found, values, strict=True):
            between = [len(part) * (part.mean() - z.mean()) ** 2 for part in np.split(z, edges)]
            assert_allclose(row, sum(between) / ((z - z.mean()) ** 2).sum())
    for still in (0.1, torch.nan):
        assert torch.isnan(variance_between(torch.full((1, 30), still), at(7, 19))).all()


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
    """The best assignment of all."""
    best = 0
    for size in range(1, len(edges) + 1):
        for some in combinations(edges, size):
            if any(
                all(abs(a - b) <= tolerance for a, b in zip(some, other, strict=True))
                for other in permutations(found, size)
            ):
                best = size
    return best / len(edges)


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
    assert shuffled_edges(torch.tensor([1]), 2, 5, np.random.default_rng(0)).unique().tolist() == [
        1
    ]


def test_draws_depend_on_seed_prompt_and_kind():
    given = ((0, 1, "lines"), (1, 1, "lines"), (0, 2, "lines"), (0, 1, "blocks"), (0, 1, "lines"))
    *others, first = [tuple(generator(*of).integers(0, 99, 6)) for of in given]
    assert len({*others}) == 4 and first == others[0]


def test_chance_counts_the_observed_one_among_the_draws():
    drawn = torch.tensor([[0.1, 0.5, 1.0], [0.2, 0.5, 1.0], [0.9, 0.5, 1.0]]).double()
    assert_allclose(chance(drawn, torch.tensor([0.5, 0.6, torch.nan])), [0.5, 0.25, np.nan])


# the measure
# --------------------------------------------------------------------------------------------------


def learned(position, tokens=48, **shape):
    """Inputs with these positions [P, token] in both prompts."""
    inputs = random_inputs(heads=4, kv_heads=position.shape[0], tokens=tokens, **shape)
    return replace(inputs, positions=position.double().expand(2, -1, -1))


def lines(inputs, starts, inside=None):
    where = inputs.valid if inside is None else inside
    begin = torch.zeros_like(inputs.valid)
    begin[:, list(starts)] = True
    return {"segments.lines": where, "segments.lines.starts": begin}


def concluded(inputs, spans, **options):
    asked = Segments(kinds=("lines",), **options)
    return asked.conclude(asked.observe(inputs, spans)).sel(layer=inputs.layer, kind="lines")


STARTS = (0, 7, 11, 20, 33, 40)


def test_positions_that_step_with_the_lines_follow_them_and_noise_does_not():
    torch.manual_seed(1)
    labels = torch.zeros(48).index_fill_(0, torch.tensor(STARTS[1:]), 1).cumsum(0).long()
    steps = torch.tensor([0.0, 5, -3, 2, 9, 4])[labels] + 0.01 * torch.randn(48)
    inputs = learned(torch.stack([steps, torch.randn(48)]))
    group = concluded(inputs, lines(inputs, STARTS), draws=99)
    first, second = group.isel(head=[0, 1]), group.isel(head=[2, 3])
    assert (first["variance_between"] > 0.999).all() and (first["boundary_f1"] == 1).all()
    assert_allclose(first["variance_between_chance"], 0.01)
    assert (first["boundary_f1_chance"] < 0.05).all()
    assert (first["variance_between_shuffled"] < 0.9).all()
    assert (first["boundary_f1_shuffled"] < 0.6).all()
    assert (second["variance_between_chance"] > 0.05).all()
    assert (second["variance_between"] < 0.4).all()
    assert (group["segment_count"] == 6).all()
    assert_array_equal(group["segment"].sel(prompt=0), labels)


def test_the_index_explains_a_trend_and_has_the_f1_of_chance():
    index = torch.arange(48.0)[None]
    inputs = replace(learned(index), scheme="rope", learned=False)
    group = concluded(inputs, lines(inputs, STARTS), draws=400, tolerance=0)
    assert_allclose(
        group["variance_between"], group["variance_between_index"].values[:, None] * np.ones(4)
    )
    assert (group["variance_between"] > 0.9).all() and (
        group["variance_between_chance"] > 0.05
    ).all()
    assert_allclose(group["boundary_f1_index"], 5 / 47, atol=0.02)
    assert_allclose(group["boundary_f1"], group["boundary_f1_index"].values[:, None] * np.ones(4))
    assert_allclose(group["boundary_f1_shuffled"], 5 / 47, atol=0.02)


def test_a_tolerance_forgives_jumps_beside_an_edge():
    position = torch.zeros(1, 48)
    for start in STARTS[1:]:
        position[0, start + 2 :] += 1
    inputs = learned(position)
    found = [
        float(concluded(inputs, lines(inputs, STARTS), tolerance=t)["boundary_f1"][0, 0])
        for t in (0, 1, 2)
    ]
    assert found == [0, 0, 1]


def test_tokens_outside_segments_do_not_count():
    position = torch.tensor([[99.0, -50, 1, 1, 1, 4, 4, 4, 70, -80]])
    inputs = learned(position, tokens=10)
    inside = torch.zeros(2, 10, dtype=torch.bool)
    inside[:, 2:8] = True
    group = concluded(inputs, lines(inputs, (2, 5), inside))
    assert_allclose(group["variance_between"], 1)
    assert_allclose(group["boundary_f1"], 1)
    assert group["segment"].sel(prompt=1).values.tolist() == [-1, -1, 0, 0, 0, 1, 1, 1, -1, -1]


def test_nothing_to_say_is_nan():
    inputs, nope = random_inputs(tokens=48), random_inputs(scheme="nope", tokens=48)
    still = learned(torch.full((1, 48), 2.0))
    group, flat = (concluded(each, lines(each, STARTS)) for each in (nope, still))
    silent = [concluded(inputs, spans) for spans in ({}, lines(inputs, (0,)))]
    for each in (group, *silent, flat):
        assert each["variance_between"].isnull().all()
    assert group["boundary_f1"].isnull().all() and group["variance_between_index"].notnull().all()
    for each in silent:
        assert each["boundary_f1"].isnull().all() and each["variance_between_index"].isnull().all()
        assert (each["segment_count"] == 0).all() and (each["segment"] == -1).all()
    assert flat["variance_between_chance"].isnull().all()
    assert (flat["boundary_f1"] < 0.6).all(), "jumps of no size are no jumps at edges"


# through analyze
# --------------------------------------------------------------------------------------------------


def of_examples(length, seed):
    """Random tokens: five examples of six tokens behind the first token, each with its label,
    filler, and a question.
    """
    tokens = np.random.default_rng(seed).integers(3, 60, length).tolist()
    spans = {
        "examples": tuple(range(1, 31)),
        "padding": tuple(range(31, length - 5)),
        "query": tuple(range(length - 5, length - 1)),
    }
    for number, start in enumerate(range(1, 31, 6), start=1):
        spans |= {
            f"examples.{number}": tuple(range(start, start + 6)),
            f"examples.{number}.label": (start + 4,),
        }
    return Prompt(
        tuple(tokens),
        spans=spans,
        generated=(length - 1,),
        token_text=tuple(map(str, tokens)),
        answers=(str(tokens[-1]),),
    )


def test_a_run_of_few_shot_prompts():
    wrapped = ri.bridge(ri.reposition(tiny("llama"), "rope,nope,repo"))
    prompts = [of_examples(64, 0), of_examples(64, 1), of_examples(128, 2)]
    run = ri.analyze(
        wrapped, prompts, measures=("positions", "segments", "attention_mass"), batch_size=2
    )
    group = run["segments"].to_dataset()
    assert group["variance_between"].dims == ("prompt", "layer", "head", "kind")
    assert list(group["scheme"].values) == ["rope", "nope", "repo"]
    assert (group["segment_count"].sum("kind") == 5).all()
    examples = group.sel(kind="examples")
    assert (examples["segment_count"] == 5).all()
    labels = examples["segment"].sel(prompt=0).values[:32]
    assert labels.tolist() == [-1, *np.repeat(range(5), 6), -1]
    rope, nope, repo = examples["variance_between"].transpose("layer", ...)
    assert_allclose(rope, (1 - 1 / 25) / (1 - 1 / 900))
    assert nope.isnull().all() and repo.notnull().all()
    z = run["positions"]["position"].sel(prompt=0, layer=2, head=3).values[1:31].astype(float)
    means = z.reshape(5, 6).mean(1)
    assert_allclose(repo.sel(prompt=0, head=3), means.var() / z.var(), rtol=1e-5)


def test_text_of_the_prompt_gives_the_segments():
    words = ["One", " line", "\n", "and", " another", ".", " So", " it", " goes", "."]
    prompt = Prompt(tuple(range(10, 20)), token_text=tuple(words))
    silent = Prompt(tuple(range(10, 20)))
    wrapped = ri.bridge(ri.reposition(tiny("llama"), "repo"))
    group = ri.analyze(
        wrapped, [prompt, silent], measures=(Segments(kinds=("lines", "sentences")),)
    )["segments"].to_dataset()
    assert group["segment"].sel(prompt=0).values.tolist() == [[0] * 3 + [1] * 7, [0] * 6 + [1] * 4]
    assert (
        np.isfinite(group["boundary_f1"].sel(prompt=0)).all()
        and np.isnan(group["boundary_f1"].sel(prompt=1)).all()
    )


def test_trends_within_segments_and_their_null():
    """A ramp that starts again in each segment, one that falls in half of them, a constant, noise."""
    lengths = [6, 9, 3, 12]
    edges = torch.tensor(np.cumsum(lengths)[:-1])
    ramps = [torch.arange(float(n)) for n in lengths]
    noise = torch.randn(400, sum(lengths), generator=torch.Generator().manual_seed(0))
    rows = torch.stack(
        [
            torch.cat(ramps),
            torch.cat([-ramps[0], ramps[1] ** 3, ramps[2], ramps[3]]),
            torch.zeros(sum(lengths)),
        ]
    )
    trend, null = _within(torch.cat([rows, noise]), edges)
    # the segment of 3 tokens has none
    assert trend[:2].tolist() == pytest.approx([1.0, 1 / 3]) and trend[2:3].isnan().all()
    assert null[2:3].isnan().all()
    assert float(null[0]) == pytest.approx(1.96 * (1 / 5 + 1 / 8 + 1 / 11) ** 0.5 / 3)
    slow = []
    for row in noise[:20].numpy():
        parts = [part for part in np.split(row, edges.numpy()) if len(part) > 3]
        slow.append(np.mean([spearmanr(part, range(len(part))).statistic for part in parts]))
    np.testing.assert_allclose(trend[3:23], slow, atol=1e-12)
    assert 0.02 < float((trend[3:].abs() > null[3:]).double().mean()) < 0.08
