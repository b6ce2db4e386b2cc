"""Scores of heads: TransformerLens' definitions, slow references from whole patterns, and heads
built by hand that get their scores.
"""

import math

import numpy as np
import pytest
import torch
from attention_inputs import random_inputs
from families import tiny
from hand_built import hand_built
from torch.testing import assert_close
from transformer_lens import head_detector
from transformer_lens.head_detector import compute_head_attention_similarity_score, detect_head

import repo_interp as ri
from benchmarks.tiny_models import small_model
from repo_interp.measures.kernels.mirror import mirror, mirror_score, mirror_scores
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import with_layout
from repo_interp.models.side_by_side import SideBySide
from repo_interp.models.wrapped import model_of
from repo_interp.plugins.heads import head_scores as scoring
from repo_interp.plugins.heads.head_patterns import (
    ContentSums,
    departure_sums,
    detection_rows,
    detection_sums,
    distance_sums,
    place_sums,
)
from repo_interp.plugins.heads.head_scores import (
    SCORES,
    prompt_scores,
    random_scores,
    repeated_tokens,
)
from repo_interp.tasks import Prompt, make_task

THEIRS = ("previous_token", "duplicate_token", "induction")


def head_scores(model, prompts, sequences, rows=512, top=1):
    """Scores on repeated tokens and on prompts, in the order of SCORES."""
    found = random_scores(as_decoder(model), sequences) | prompt_scores(
        as_decoder(model), prompts, rows, top
    )
    return {name: found[name] for name in SCORES if name in found}


@pytest.mark.parametrize("tokens", [[1, 5, 6, 7, 5, 6, 7], [2, 2, 2, 3, 2], [9, 9]])
def test_detectors_are_those_of_transformer_lens(tokens):
    given = torch.tensor([tokens])
    inputs = random_inputs(prompts=1, heads=3, kv_heads=3, tokens=len(tokens))
    weights = inputs.logits(torch.arange(len(tokens))).softmax(-1).float()
    found = detection_sums(weights, torch.arange(len(tokens)), given)
    for name in THEIRS:
        pattern = getattr(head_detector, f"get_{name}_head_detection_pattern")(given)
        for head in range(3):
            expected = compute_head_attention_similarity_score(
                weights[0, head],
                pattern,
                exclude_bos=False,
                exclude_current_token=False,
                error_measure="mul",
            )
            assert float(found[name][0, head]) / len(tokens) == pytest.approx(expected, abs=1e-6)
    assert found["sink"][0] == pytest.approx(weights[0, :, :, 0].sum(-1).double())


def test_scores_on_prompts_are_detect_head_of_the_bridge():
    bridge, task = ri.zoo("reversal/rope"), make_task("reversal")
    (prompt,) = task.prompts(1, test_set="6")
    text = " ".join(prompt.token_text[1:])
    assert bridge.to_tokens(text)[0].tolist() == list(prompt.tokens)
    plain = Prompt(tokens=prompt.tokens)
    found = head_scores(model_of(bridge), [plain], np.array([[5, 6, 7, 5, 6, 7]]))
    rows = detection_rows(torch.arange(len(plain.tokens)), torch.tensor([plain.tokens]))
    for name in THEIRS:
        theirs = detect_head(bridge, text, f"{name}_head").numpy()  # a mean over all rows
        of_pairs = theirs * len(plain.tokens) / float(rows[name])
        assert found[f"{name}_on_prompts"] == pytest.approx(of_pairs, abs=1e-5)
    assert not {"retrieval", "source_mass", "contribution", "mirror"} & set(found)


def test_detectors_are_means_over_the_rows_in_which_they_have_a_pair():
    """Of `5 6 7 5 6 7` the last three rows have an earlier copy; of `5 6 7` none has."""
    rows = detection_rows(torch.arange(6), torch.tensor([[5, 6, 7, 5, 6, 7]]))
    assert rows == {"previous_token": 5, "duplicate_token": 3, "induction": 3, "sink": 6}
    model = model_of(hand_built(40, 46))
    found = head_scores(model, [Prompt(tokens=(5, 6, 7))], np.array([[*range(5, 25)] * 2]))
    assert found["induction"][1, 0] > 0.95
    # the head looks at both copies alike: half of its attention, in all rows that have two
    assert found["duplicate_token"][1, 1] == pytest.approx(0.5, abs=0.01)
    assert "induction_on_prompts" not in found and "sink_on_prompts" in found


def test_attention_that_a_sink_takes_is_at_no_distance():
    """Found: it counted as attention to token 0, so gpt-oss' heads looked far."""
    weights = torch.zeros(1, 1, 2, 40)
    weights[..., 10] = 0.25
    rows = torch.tensor([30, 39])
    assert_close(distance_sums(weights, rows), torch.tensor([[0.25 * (20 + 29)]]).double())


def test_rows_in_parts_and_loops_over_whole_patterns_give_the_same_sums():
    inputs = random_inputs(prompts=1, heads=2, kv_heads=2, tokens=40)
    rows = torch.arange(40)
    logits = inputs.logits(rows)
    weights = logits.softmax(-1)
    distance = (rows[:, None] - rows).numpy()
    # a sequence's beginning, as query and as key, says nothing of contents
    seen = (distance >= 0) & (rows >= 1).numpy() & (rows >= 2)[:, None].numpy()
    for split in (40, 7):
        sums, far, departure = ContentSums.empty(2, 40, rows.device), 0.0, 0.0
        for part in rows.split(split):
            some = inputs.logits(part)
            sums.add(some, part)
            far = far + distance_sums(some.softmax(-1), part)
            departure = departure + departure_sums(some.softmax(-1), some)
        for head in range(2):
            of_head = weights[0, head].numpy()
            assert float(far[0, head]) == pytest.approx((of_head * distance).sum())
            entropy = -sum(p * math.log(p) for p in of_head[distance >= 0])
            even = sum(math.log(i + 1) for i in range(40))
            assert float(departure[0, head]) == pytest.approx(even - entropy)
            values = logits[0, head].numpy()
            mean = np.where(seen, values, 0).sum(1) / np.maximum(seen.sum(1), 1)
            centred = values - mean[:, None]
            of_distance = [centred[seen & (distance == far)] for far in range(39)]
            explained = sum(len(some) * some.mean() ** 2 for some in of_distance)
            share = 1 - explained / np.square(centred[seen]).sum()
            assert float(sums.share()[head]) == pytest.approx(share)


def test_distance_alone_has_no_content_and_equal_weights_no_place():
    rows = torch.arange(30)
    sums = ContentSums.empty(1, 30, rows.device)
    sums.add(
        -(0.3 * (rows[:, None] - rows).double()).masked_fill(rows[:, None] < rows, torch.inf)[
            None, None
        ],
        rows,
    )
    # rows of different lengths have different means: only a row's own mean is taken away
    assert float(sums.share()) > 0
    equal = torch.ones(30, 30, dtype=torch.double).tril()[None, None]
    places, counted = place_sums(equal / equal.sum(-1, keepdim=True), rows)
    parts = (places / counted)[0, 0]
    assert counted == 20 and parts[1] == pytest.approx(parts[0]) == pytest.approx(parts[2])
    ends = torch.zeros(1, 1, 30, 30, dtype=torch.double)
    ends[..., 1] += 0.5
    ends[0, 0].diagonal().add_(0.5)
    first, middle, last = (place_sums(ends, rows)[0] / counted)[0, 0]
    assert middle == 0 and first == pytest.approx(last) and first > 2


def test_random_tokens_are_all_different_where_there_are_enough_and_repeated_once():
    tokens = repeated_tokens(3, 10, 20, [0, 2], 1, seed=5)
    assert tokens.shape == (3, 21) and (tokens[:, 0] == 1).all()
    assert (tokens[:, 1:11] == tokens[:, 11:]).all()
    assert all(len({*row} - {0, 1, 2}) == 10 for row in tokens[:, 1:11].tolist())
    assert (tokens == repeated_tokens(3, 10, 20, [0, 2], 1, seed=5)).all()
    few = repeated_tokens(1, 10, 4, [], None, seed=0)
    assert few.shape == (1, 20) and set(few[0]) <= {0, 1, 2, 3}


def test_mirrors_have_a_score_of_one_and_positions_of_words_alone_none():
    def score(positions):
        return mirror_score(mirror(np.array(positions), [*"abaccaba"], [3, 2, 1, 0], [4, 5, 6, 7]))

    by_word = {"a": 0.0, "b": 4.0, "c": 9.0}
    assert score([0, 1, 2, 3, 3, 2, 1, 0.0]) == 1
    assert score([by_word[word] for word in "abaccaba"]) == score(np.zeros(8)) == 0
    assert score(np.arange(8.0)) < 0
    # as a layer does that reads embeddings alone, of any weights
    words = [*"abccba"]
    of_words = mirror(np.array([0, 1, 2, 2, 1, 0.0]), words, [2, 1, 0], [3, 4, 5])
    assert np.isnan(mirror_score(of_words)), "no word is there twice"


def test_heads_are_scored_together_as_one_by_one():
    positions = np.random.default_rng(0).normal(size=(5, 12))
    positions[1] = 2.0
    for words in ([*"abcabcabcabc"], [*"abcdefghijkl"], [*"aaaaaaaaaaaa"]):
        given = words, [0, 1, 2, 3], [8, 9, 10, 11]
        alone = [mirror_score(mirror(z, *given)) for z in positions]
        np.testing.assert_array_equal(mirror_scores(positions, *given), alone)


def test_the_correlation_of_copies_with_their_sources_is_numpys():
    positions = np.array([0.3, 2.0, -1.0, 0.7, 1.1, 1.5])
    found = mirror(positions, [*"abcabc"], [0, 1, 2], [3, 4, 5]).correlation
    expected = np.corrcoef(positions[[3, 4, 5]], positions[[0, 1, 2]])[0, 1]
    np.testing.assert_allclose(found, expected)
    assert -0.9 < found < -0.1


def test_prompts_without_a_word_twice_have_no_part_in_the_mirror_score():
    bridge = ri.zoo("reversal/repo")
    task = make_task("reversal")
    prompts = task.prompts(8, test_set="8")
    words = [{prompt.tokens[place] for place in prompt.spans["words"]} for prompt in prompts]
    twice = [prompt for prompt, own in zip(prompts, words, strict=True) if len(own) < 8]
    assert 0 < len(twice) < len(prompts)
    tokens = repeated_tokens(1, 8, task.vocabulary_size, [], None, seed=0)
    every, of_twice = (head_scores(bridge, some, tokens)["mirror"] for some in (prompts, twice))
    np.testing.assert_array_equal(every, of_twice)
    assert abs(every[0]).max() < 1e-3 < every[2].min()


# ---- answers -------------------------------------------------------------------------------------

NEEDLE = Prompt(
    tokens=(1, 10, 11, 12, 13, 14, 20, 21, 22, 23, 24, 25, 26, 11, 12, 13, 14),
    spans={"needle": (2, 3, 4, 5), "query": (13,)},
    generated=(14, 15, 16),
)
"""The needle 11 12 13 14; after the question 11 its rest is the answer."""


def reference(bridge, prompt):
    """Retrieval and mass on the source [layer, head], from whole patterns and loops."""
    tokens = torch.tensor([prompt.tokens])
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(tokens)
    layers, heads = bridge.cfg.n_layers, bridge.cfg.n_heads
    retrieval, mass = np.zeros((layers, heads)), np.zeros((layers, heads))
    for layer in range(layers):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0]
        for head in range(heads):
            for place in prompt.generated:
                row, wanted = pattern[head, place - 1], prompt.tokens[place]
                mass[layer, head] += float(row[list(prompt.spans["needle"])].sum())
                strongest = int(row.argmax())
                said = int(logits[0, place - 1].argmax()) == wanted
                copied = prompt.tokens[strongest] == wanted
                retrieval[layer, head] += said and copied and strongest in prompt.spans["needle"]
    return retrieval / len(prompt.generated), mass / len(prompt.generated)


@pytest.mark.parametrize("made", ["hand", "random"])
def test_retrieval_and_mass_are_those_of_whole_patterns(made, monkeypatch):
    monkeypatch.setattr(scoring, "CELLS", 200)
    torch.manual_seed(1)
    bridge = (
        hand_built(40, 46)
        if made == "hand"
        else ri.bridge(ri.reposition(tiny("llama"), "rope,repo,nope"))
    )
    retrieval, mass = reference(bridge, NEEDLE)
    found = head_scores(model_of(bridge), [NEEDLE], repeated_tokens(2, 8, 40, [0], 1, 0))
    assert found["retrieval"] == pytest.approx(retrieval, abs=1e-6)
    assert found["source_mass"] == pytest.approx(mass, abs=1e-5)
    if made == "hand":
        # the induction head copies; no other head looks there
        assert retrieval[1, 0] == 1 and retrieval.sum() == 1
        contribution = found["contribution"]
        assert contribution[1, 0] > 0.5 and np.abs(np.delete(contribution.ravel(), 4)).max() < 1e-6


def test_long_prompts_are_measured_on_some_of_their_rows():
    model = ri.reposition(tiny("llama"), "repo")
    prompt = Prompt(tokens=tuple(np.random.default_rng(0).integers(3, 64, 90).tolist()))
    sequences = repeated_tokens(2, 8, 64, [0], None, 0)
    whole, some = (head_scores(model, [prompt], sequences, rows=rows) for rows in (512, 30))
    assert set(whole) == set(some) and not np.array_equal(whole["distance"], some["distance"])
    assert some["distance"] == pytest.approx(whole["distance"], rel=0.15)
    assert np.array_equal(some["position_range"], whole["position_range"])


def several_prompts():
    """Of two lengths; some with answers, in different rows and with different sources."""
    drawn = np.random.default_rng(0).integers(3, 60, (7, 24)).tolist()
    made = [{}, {}, {"needle": (2, 3)}, {"needle": (4,)}, {"needle": (5, 6, 7)}, {"needle": (2,)}]
    answers = [(), (), (20, 21, 22), (20, 21, 22), (18, 19), (20, 21, 22)]
    return [
        Prompt(tuple(tokens), spans, answer)
        for tokens, spans, answer in zip(drawn, made, answers, strict=False)
    ] + [
        Prompt(tuple(drawn[6][:17]), generated=(15, 16), attributes={"source": [3, 2]}),
        Prompt(tuple(drawn[5][:17]), generated=(15, 16), attributes={"source": [7, 3]}),
    ]


@pytest.mark.parametrize(
    ("family", "dtype", "close"),
    [
        ("llama", torch.float64, 1e-9),
        ("gemma2", torch.float64, 1e-9),  # norms behind attention
        ("qwen3_next", torch.float32, 1e-5),  # gates; its experts take no float64
    ],
)
def test_prompts_that_share_a_pass_have_the_scores_of_single_ones(
    family, dtype, close, monkeypatch
):
    torch.manual_seed(0)
    model = (
        ri.reposition(tiny("llama"), "rope,repo,nope")
        if family == "llama"
        else with_layout(small_model(family), None)
    ).to(dtype)
    decoder, passes = as_decoder(model), []
    decoder.stack.register_forward_hook(lambda *given: passes.append(1))
    together = prompt_scores(decoder, several_prompts())
    # one that measures norms, then one per length and rows of answers
    assert len(passes) == 1 + 4
    monkeypatch.setattr(scoring, "batch_limit", lambda *_: SideBySide(prompts=1))
    alone = prompt_scores(decoder, several_prompts())
    assert len(passes) == 5 + 1 + 8
    monkeypatch.undo()
    monkeypatch.setattr(scoring, "CELLS", 2000)
    in_parts = prompt_scores(decoder, several_prompts())
    assert {"contribution", "content", "source_mass"} <= {*together} == {*alone} == {*in_parts}
    for name, scores in alone.items():
        np.testing.assert_allclose(together[name], scores, rtol=close, atol=close, err_msg=name)
        np.testing.assert_allclose(in_parts[name], scores, rtol=close, atol=close, err_msg=name)


def test_copies_of_one_position_have_no_correlation_with_sources_that_differ():
    found = mirror(np.array([0.0, 1, 2, 5, 5, 5]), [*"abcabc"], [0, 1, 2], [3, 4, 5])
    assert np.isnan(found.correlation) and found.copies == 4.0
