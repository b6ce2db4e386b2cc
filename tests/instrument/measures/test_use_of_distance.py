"""Stability, symbols, octaves and activations: closed forms, and slow loops over what is sampled."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_inputs import random_inputs, with_holes
from numpy.testing import assert_allclose

from repo_interp.measures.activations import Activations
from repo_interp.measures.kernels.samples import draw_keys, places_of, spread_places
from repo_interp.measures.octaves import Octaves
from repo_interp.measures.stability import Stability
from repo_interp.measures.statistics import merge
from repo_interp.measures.symbols import Symbols
from repo_interp.positions.rotary import rotate


def measured(measure, *inputs):
    return measure.conclude(merge([measure.observe(some, {}) for some in inputs]))


def indexed(**shape):
    """Random inputs whose positions are the token index."""
    inputs = random_inputs(scheme="rope", position_rows=1, **shape)
    count = inputs.valid.shape[1]
    return replace(inputs, positions=torch.arange(count).double().expand(inputs.positions.shape))


def test_samples_are_valid_tokens_and_visible_keys():
    inputs = with_holes(indexed(tokens=30))
    for row, places in enumerate(places_of(inputs.valid)):
        chosen = spread_places(places, 5, 0.5)
        assert chosen == sorted(set(chosen)) and set(chosen) <= set(places)
        assert chosen[-1] == places[-1] and places.index(chosen[0]) == len(places) // 2
        seen = inputs.visible(torch.tensor(chosen))[row]
        keys = draw_keys(seen, 200, torch.Generator().manual_seed(0))
        assert seen.gather(-1, keys).all()
        # every visible key is drawn in the end
        assert {*keys[0].tolist()} == {*seen[0].nonzero()[:, 0].tolist()}
    assert spread_places([7], 4, 0.0) == [7] and spread_places([2, 5], 4, 0.0) == [5]


def test_stability_equals_a_loop_over_keys_and_distances():
    inputs = random_inputs(1, 4, 2, tokens=20, position_rows=2, seed=3)
    measure = Stability(queries=3, keys=4, distances=7, training_length=30, seed=5)
    group = measured(measure, inputs)
    chosen = spread_places(places_of(inputs.valid)[0], 3, 0.5)
    seen = inputs.visible(torch.tensor(chosen))[0]
    keys = draw_keys(seen, 4, torch.Generator().manual_seed(5))
    extent = float(inputs.positions.max() - inputs.positions.min())
    high = inputs.frequencies > 2 * math.pi / 30
    for head in range(4):
        kept, told, changes, shares, entropies = 0.0, 0, [], [], []
        for row, query in enumerate(chosen):
            q = inputs.queries[0, head, query]

            def logit(key, distance, q=q, head=head):
                turned = rotate(
                    q[None], torch.tensor([distance], dtype=torch.float64), inputs.frequencies
                )[0]
                return float(turned @ inputs.keys[0, head // 2, key]) * inputs.logit_scale

            for key in keys[row].tolist():
                pairs = (
                    torch.complex(*q.chunk(2))
                    * torch.complex(*inputs.keys[0, head // 2, key].chunk(2)).conj()
                )
                size = pairs.abs() * inputs.logit_scale
                steps = [extent * step / 6 for step in range(7)]
                change = np.mean([abs(logit(key, d + 1) - logit(key, d)) for d in steps])
                changes.append(change / float(size.norm()))
                shares.append(float(size[high].norm() / size.norm()))
                p = (size.square() / size.square().sum()).numpy()
                entropies.append(-(p * np.log(p)).sum() / math.log(len(p)))
            for first, second in keys[row].unflatten(0, (-1, 2)).tolist():
                if first == second:
                    continue
                told += 1
                signs = [np.sign(logit(first, d) - logit(second, d)) for d in steps]
                kept += np.mean([sign == signs[0] for sign in signs])
        of_head = group.isel(prompt=0, layer=0, head=head)
        assert_allclose(of_head["semantic_stability"], kept / told, atol=1e-12)
        assert int(of_head["compared"]) == told
        assert_allclose(of_head["positional_sensitivity"], np.mean(changes), rtol=1e-9)
        assert_allclose(of_head["high_share"], np.mean(shares), rtol=1e-9)
        assert_allclose(of_head["frequency_entropy"], np.mean(entropies), rtol=1e-9)


def test_pairs_that_hardly_turn_are_stable_and_random_phases_leave_norms():
    inputs = indexed(tokens=40)
    slow = replace(inputs, frequencies=torch.full_like(inputs.frequencies, 1e-9))
    group = measured(Stability(training_length=64), slow)
    assert_allclose(group["semantic_stability"], 1.0)
    assert float(group["positional_sensitivity"].max()) < 1e-8
    assert_allclose(group["high_share"], 0.0)
    # one pair: a change per position of |c| |e^(i theta) - 1| |cos|, whatever the phase
    half_turn = torch.tensor([math.pi], dtype=torch.float64)
    some = {"queries": inputs.queries[..., :2], "keys": inputs.keys[..., :2]}
    one = replace(inputs, frequencies=half_turn, **some)
    group = measured(Stability(training_length=64, distances=40), one)
    assert_allclose(group["frequency_entropy"], 0.0, atol=1e-12)
    assert_allclose(group["high_share"], 1.0)


def test_random_phases_of_unrelated_keys_look_like_the_phases_that_are_there():
    """Random queries and keys have random phases already: the null is where the measure is."""
    group = measured(
        Stability(training_length=64, keys=64), indexed(heads=8, kv_heads=8, tokens=60)
    )
    assert abs(float((group["semantic_stability"] - group["random_stability"]).mean())) < 0.03


def test_a_head_of_places_and_a_head_of_contents():
    inputs = indexed(tokens=40)
    alike = replace(inputs, keys=inputs.keys[:, :, :1].expand_as(inputs.keys).clone())
    group = measured(Symbols(), alike)
    assert_allclose(group["position_score"], 1.0)
    group = measured(Symbols(), random_inputs(scheme="nope", tokens=40))
    assert_allclose(group["symbol_score"], 1.0)
    assert float(abs(group["position_score"]).max()) < 0.5
    assert 0 < float(group["null_score"].max()) < 0.7


def test_symbols_equal_a_loop_over_rows():
    inputs = random_inputs(1, 2, 1, tokens=24, position_rows=1, seed=2)
    group = measured(Symbols(queries=3, permutations=2, seed=4), inputs)
    chosen = spread_places(list(range(24)), 3, 0.75)
    keys = range(1, chosen[0] + 1)
    generator, scores, sizes = torch.Generator().manual_seed(4), [], []
    for _ in range(2):
        moved, _ = (torch.randperm(len(keys), generator=generator) for _ in range(2))
        for row in chosen:
            seen = [inputs.keys[0, 0, key] for key in keys]
            vectors = [inputs.queries[0, 1, row], *seen, *(seen[n] for n in moved)]
            turned = [
                rotate(vector[None], inputs.positions[0, 0, place][None], inputs.frequencies)[0]
                for vector, place in zip(vectors, [row, *keys, *keys], strict=True)
            ]
            logits = torch.stack(turned[1:]) @ turned[0]
            before, after = logits.numpy().reshape(2, -1)
            orders = (before, before[moved.numpy()])
            scores.append([np.corrcoef(after, part)[0, 1] for part in orders])
            share = inputs.pattern(torch.tensor([row]))[0, 1, 0, keys[0] : keys[-1] + 1].sum()
            sizes.append([before.std(ddof=1) * inputs.logit_scale, float(share)])
    of_head = group.isel(prompt=0, layer=0, head=1)
    found = [of_head["position_score"], of_head["symbol_score"]]
    assert_allclose(found, np.mean(scores, axis=0), rtol=1e-8)
    found = [of_head["logit_spread"], of_head["attention_share"]]
    assert_allclose(found, np.mean(sizes, axis=0), rtol=1e-6)


def test_few_keys_and_other_schemes_have_no_score():
    assert measured(Symbols(), indexed(tokens=8))["position_score"].isnull().all()
    other = replace(indexed(tokens=40), scheme="a scheme of another package")
    assert measured(Symbols(), other)["symbol_score"].isnull().all()
    assert measured(Stability(), random_inputs(scheme="nope"))["semantic_stability"].isnull().all()


@pytest.mark.parametrize("window", [None, 7])
def test_octaves_are_all_of_attention_and_equal_a_loop(window):
    inputs = with_holes(replace(indexed(tokens=30), window=window))
    group = measured(Octaves(queries=6), inputs)
    whole = group["mass"].sum("octave") + group["own_token"] + group["first_token"]
    assert_allclose(whole, 1.0, rtol=1e-12)
    for prompt, places in enumerate(places_of(inputs.valid)):
        rows = spread_places(places, 6, 0.0)
        pattern = inputs.pattern(torch.tensor(rows))[prompt].numpy()
        for octave in group["octave"].values:
            expected = [
                sum(pattern[2, n, key] for key in places[1:] if octave <= row - key < 2 * octave)
                for n, row in enumerate(rows)
            ]
            found = group["mass"].isel(prompt=prompt, layer=0, head=2).sel(octave=octave)
            assert_allclose(found, np.mean(expected), rtol=1e-9, atol=1e-15)


def test_the_sink_that_was_built_in_is_named():
    inputs = indexed(tokens=64)
    keys = torch.zeros_like(inputs.keys)
    keys[:, :, 9] = 1.0
    queries = torch.ones_like(inputs.queries) * 4
    flat = replace(inputs, scheme="nope", positions=None, frequencies=None)
    group = measured(Octaves(), replace(flat, keys=keys, queries=queries))
    assert group["sink_token"].values.tolist() == [[9], [9]]
    # e^l of it against one for each other key
    weight = math.exp(4 * 8 * inputs.logit_scale)
    rows = [row for row in spread_places(list(range(64)), 32, 0.0) if row > 9]
    expected = np.mean([weight / (weight + row) for row in rows])
    assert_allclose(group["sink_mass"], expected, rtol=1e-6)
    even = np.mean([1 / (row + 1) for row in rows])
    assert_allclose(group["sink_uniform"], even, rtol=1e-6)
    assert group["received"].sizes == {"layer": 1, "token": 64}
    assert measured(Octaves(later_queries=40), inputs)["sink_token"].values.tolist() == [[-1], [-1]]


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_shortest_prompts_have_attention_and_no_sink(tokens):
    group = measured(Octaves(), indexed(tokens=tokens))
    assert group["octave"].values.tolist() == [1]
    assert (group["sink_token"] == -1).all() and group["sink_mass"].isnull().all()
    assert_allclose(group["first_token"] + group["own_token"].where(tokens > 1, 0.0), 1.0)


def test_activations_that_were_built_in_are_counted_at_the_sink():
    """Two entries of token 9 and one of token 4 are massive; all look at 9. Median 1."""
    inputs = indexed(prompts=2, tokens=64)
    keys, residual = torch.zeros_like(inputs.keys), torch.ones(2, 64, 8, dtype=torch.float64)
    keys[:, :, 9] = 1.0
    residual[:, 9, 2], residual[:, 9, 5], residual[:, 4, 0] = -3000.0, 1001.0, 2000.0
    residual[:, 20, 1] = 1000.0  # not above
    made = replace(
        inputs,
        **{"scheme": "nope", "positions": None, "frequencies": None, "keys": keys},
        queries=torch.ones_like(inputs.queries) * 4,
        read_residual=lambda: residual,
    )
    group = measured(Activations(), made)
    wanted = {"largest": 3000, "median": 1, "sink_largest": 3000, "massive": 3, "sink_massive": 2}
    for name, value in (
        wanted | {"largest_token": 9, "largest_dimension": 2, "sink_token": 9}
    ).items():
        assert group[name].values.tolist() == [[value], [value]], name
    assert group["largest_by_token"].sel(token=[3, 4, 9]).values.tolist() == [[1, 2000, 3000]]
    # above 1000 times the median, and not above 100
    small = measured(Activations(), replace(made, read_residual=lambda: residual / 100))
    assert (small["massive"] == 0).all() and (small["largest"] == 30).all()


def test_activations_equal_a_loop():
    inputs = with_holes(indexed(tokens=30, prompts=2))
    residual = 10 * inputs.residual**5
    inputs = replace(inputs, read_residual=lambda: residual)
    group = measured(Activations(queries=5), inputs).isel(layer=0)
    for prompt, places in enumerate(places_of(inputs.valid)):
        entries = [
            (abs(float(residual[prompt, token, at])), token, at)
            for token in places
            for at in range(residual.shape[-1])
        ]
        ordered, largest = sorted(entries), max(entries)
        median = ordered[(len(ordered) - 1) // 2][0]
        rows = torch.tensor(spread_places(places, 5, 0.5))
        received = inputs.pattern(rows)[prompt].sum((0, 1))
        sink = max(places, key=lambda token: float(received[token]))
        massive = [e for e in entries if e[0] > 100 and e[0] > 1000 * median]
        expected = {
            **dict(zip(("largest", "largest_token", "largest_dimension"), largest, strict=True)),
            **{"median": median, "massive": len(massive), "sink_token": sink},
            "sink_massive": sum(token == sink for _, token, _ in massive),
            "sink_largest": max(size for size, token, _ in entries if token == sink),
        }
        for name, value in expected.items():
            assert_allclose(group[name][prompt], value, rtol=1e-12, err_msg=name)
    assert int(group["massive"].max()) > 0
