"""Stability, symbols, octaves and activations: closed forms, and slow loops over what is sampled."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from attention_inputs import random_inputs, with_holes
from numpy.testing import assert_allclose

import repo_interp as ri
from repo_interp.measures.kernels.samples import draw_keys, middles, places_of, spread_places
from repo_interp.measures.statistics import merge
from repo_interp.plugins.distance.activations import Activations
from repo_interp.plugins.distance.octaves import Octaves
from repo_interp.plugins.distance.stability import Stability
from repo_interp.plugins.distance.symbols import Symbols
from repo_interp.plugins.distance.view import OCTAVES, received_from_many
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
    group = measured(measure, inputs).isel(prompt=0, layer=0)
    chosen = spread_places(places_of(inputs.valid)[0], 3, 0.5)
    seen = inputs.visible(torch.tensor(chosen))[0]
    keys = draw_keys(seen, 4, torch.Generator().manual_seed(5)).tolist()
    distances = torch.arange(7.0).double() / 6 * (inputs.positions.max() - inputs.positions.min())
    high = inputs.frequencies > 2 * math.pi / 30
    for head in range(4):
        kept, changes, shares, entropies = [], [], [], []
        for query, drawn in zip(chosen, keys, strict=True):
            q, curves = inputs.queries[0, head, query] * inputs.logit_scale, []
            for key in drawn:
                k = inputs.keys[0, head // 2, key]
                here, next_to = (
                    rotate(q.expand(7, -1), distances + step, inputs.frequencies) @ k
                    for step in (0, 1)
                )
                curves.append(here)
                size = torch.complex(*q.chunk(2)).abs() * torch.complex(*k.chunk(2)).abs()
                changes.append((next_to - here).abs().mean() / size.norm())
                shares.append(size[high].norm() / size.norm())
                p = size.square() / size.square().sum()
                entropies.append(-(p * p.log()).sum() / math.log(len(p)))
            for a, b in ((0, 1), (2, 3)):
                if drawn[a] != drawn[b]:
                    signs = (curves[a] - curves[b]).sign()
                    kept.append((signs == signs[0]).double().mean())
        expected = {
            "semantic_stability": np.mean(kept),
            "compared": len(kept),
            "positional_sensitivity": np.mean(changes),
            "high_share": np.mean(shares),
            "frequency_entropy": np.mean(entropies),
        }
        for name, value in expected.items():
            assert_allclose(group[name].sel(head=head), value, rtol=1e-9, err_msg=name)


def test_one_pair_has_no_entropy_and_half_a_turn_per_position_is_a_high_frequency():
    inputs = indexed(tokens=40)
    some = {"queries": inputs.queries[..., :2], "keys": inputs.keys[..., :2]}
    half_turn = torch.tensor([math.pi], dtype=torch.float64)
    group = measured(Stability(training_length=64), replace(inputs, frequencies=half_turn, **some))
    assert_allclose(group["frequency_entropy"], 0.0, atol=1e-12)
    assert_allclose(group["high_share"], 1.0)


def test_random_phases_of_unrelated_keys_look_like_the_phases_that_are_there():
    """Random queries and keys have random phases already: the null is where the measure is."""
    inputs = indexed(heads=8, kv_heads=8, tokens=60)
    group = measured(Stability(training_length=64, keys=64), inputs)
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
    keys = slice(1, chosen[0] + 1)
    positions, contents = inputs.positions[0, 0], inputs.keys[0, 0, keys]
    generator, found = torch.Generator().manual_seed(4), []
    for _ in range(2):
        moved, _ = (torch.randperm(chosen[0], generator=generator) for _ in range(2))
        for row in chosen:
            query = rotate(inputs.queries[0, 1, [row]], positions[[row]], inputs.frequencies)[0]
            before, after = (
                (rotate(of, positions[keys], inputs.frequencies) @ query).numpy()
                for of in (contents, contents[moved])
            )
            scores = [np.corrcoef(after, part)[0, 1] for part in (before, before[moved.numpy()])]
            share = float(inputs.pattern(torch.tensor([row]))[0, 1, 0, keys].sum())
            found.append([*scores, before.std(ddof=1) * inputs.logit_scale, share])
    names = ["position_score", "symbol_score", "logit_spread", "attention_share"]
    ours = group[names].isel(prompt=0, layer=0, head=1).to_array()
    assert_allclose(ours, np.mean(found, axis=0), rtol=1e-8)


def test_few_keys_and_other_schemes_have_no_score():
    nope = random_inputs(scheme="nope")
    other = replace(indexed(tokens=40), scheme="a scheme of another package")
    biased = replace(other, position_logits=lambda rows: torch.zeros(2, 4, len(rows), 40))
    for measure, inputs in (
        (Symbols(), indexed(tokens=8)),
        (Symbols(), replace(biased, reads_content=lambda: True)),
        (Stability(), nope),
    ):
        assert measured(measure, inputs).isnull().all().to_array().all()
    of_rope = measured(Symbols(), indexed(tokens=40))
    assert of_rope.notnull().all().to_array().all()
    for inputs in (other, biased):
        xr.testing.assert_allclose(measured(Symbols(), inputs), of_rope)


@pytest.mark.parametrize(("count", "most"), [(3, 8), (8, 8), (9, 8), (100, 8), (1537, 512)])
def test_rows_of_long_prompts_are_the_middles_of_equal_parts(count, most):
    chosen = middles(count, most)
    parts = min(count, most)
    assert chosen == [int((part + 0.5) * count / parts) for part in range(parts)]


@pytest.mark.parametrize("queries", [512, 6])
@pytest.mark.parametrize("starts", [(0,), (0, 3, 11, 12)], ids=["one text", "packed"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("memory", [2**10, 2**24])
def test_octaves_are_all_of_attention_and_equal_a_loop_over_rows(window, starts, queries, memory):
    """Rows in one part or one by one; a document of one token, padding and holes among others."""
    documents = torch.isin(torch.arange(30), torch.tensor(starts)).cumsum(0).expand(2, -1)
    packed = {} if len(starts) == 1 else {"documents": documents}
    inputs = with_holes(replace(indexed(tokens=30), window=window, **packed))
    with ri.working_memory(memory):
        group = measured(Octaves(queries=queries), inputs).isel(layer=0)
    whole = group["mass"].sum("octave") + group["own_token"] + group["first_token"]
    assert_allclose(whole, 1.0, rtol=1e-12)
    for prompt, places in enumerate(places_of(inputs.valid)):
        number = documents[prompt].tolist()
        first = {place: next(t for t in places if number[t] == number[place]) for place in places}
        asked = [place for place in places if first[place] != place]
        asked = [asked[middle] for middle in middles(len(asked), queries)]
        pattern = inputs.pattern(torch.arange(30))[prompt].numpy()
        mass, ends = np.zeros((4, len(group["octave"]))), np.zeros((2, 4))
        for row in asked:
            ends += pattern[:, row, first[row]], pattern[:, row, row]
            for key in places[: places.index(row)]:
                if key != first[row]:
                    mass[:, int(math.log2(row - key))] += pattern[:, row, key]
        found = group.isel(prompt=prompt)
        assert_allclose(found["mass"], mass / len(asked), rtol=1e-9, atol=1e-15)
        for name, values in zip(("first_token", "own_token"), ends, strict=True):
            assert_allclose(found[name], values / len(asked), rtol=1e-9)


def test_packed_documents_have_the_sinks_of_single_ones():
    """Means over their rows; the first token of the second one is no sink but a first token."""
    inputs = indexed(prompts=1, tokens=80)
    index = torch.cat([torch.arange(50), torch.arange(30)])
    keys = inputs.keys.clone()
    keys[:, :, [0, 50]] = 4 * inputs.queries.mean(2)[:, :, None]
    inputs = replace(inputs, keys=keys, positions=index.double().expand(inputs.positions.shape))
    packed = measured(Octaves(), replace(inputs, documents=(torch.arange(80) >= 50).long()[None]))
    alone = [
        measured(
            Octaves(),
            replace(
                inputs,
                **{name: getattr(inputs, name)[:, :, some] for name in ("queries", "keys")},
                **{"positions": inputs.positions[:, :, some], "valid": inputs.valid[:, some]},
            ),
        )
        for some in (slice(50), slice(50, 80))
    ]
    for name in ("first_token", "own_token", "mass"):
        one, other = (group[name].reindex_like(packed[name], fill_value=0.0) for group in alone)
        assert_allclose(packed[name], (49 * one + 29 * other) / 78, rtol=1e-9, err_msg=name)
    strongest = max(
        zip(alone, (0, 50), strict=True),
        key=lambda part: float((part[0]["sink_mass"].mean("head") - part[0]["sink_uniform"]).max()),
    )
    assert packed["sink_token"].item() == strongest[1] + strongest[0]["sink_token"].item()


def test_attention_to_the_first_token_is_that_of_all_rows_of_the_pass():
    """Case: .0368 where row 1, which sees two keys, was one of 32 rows."""
    model = ri.zoo("language/rope")
    tokens = torch.randint(3, 60, (300,), generator=torch.Generator().manual_seed(0))
    run = ri.analyze(model, tokens, measures=("octaves",))["octaves"].isel(prompt=0)
    for layer, head in ((0, 0), (1, 1)):
        pattern = ri.attention_pattern(model, tokens, layer, head).values
        of_head = run["first_token"].sel(layer=layer, head=head)
        assert_allclose(of_head, pattern[1:, 0].mean(), atol=1e-6)


def looking_at(token, **more):
    """Inputs without positions whose queries give the key of a token the logit 32 scales, and 0 to
    all others.
    """
    inputs = indexed(tokens=64)
    keys = torch.zeros_like(inputs.keys)
    keys[:, :, token] = 1.0
    queries = torch.full_like(inputs.queries, 4)
    nope = {"scheme": "nope", "positions": None, "frequencies": None}
    return replace(inputs, keys=keys, queries=queries, **nope, **more)


def test_the_sink_that_was_built_in_is_named():
    inputs = looking_at(9)
    group = measured(Octaves(), inputs)
    assert (group["sink_token"] == 9).all()
    # e^l of it against one for each other key
    weight = math.exp(4 * 8 * inputs.logit_scale)
    rows = np.arange(10, 64)
    assert_allclose(group["sink_mass"], np.mean(weight / (weight + rows)), rtol=1e-6)
    assert_allclose(group["sink_uniform"], np.mean(1 / (rows + 1)), rtol=1e-6)
    assert group["received"].sizes == {"layer": 1, "token": 64}
    # 54 queries come after token 9, and fewer than a quarter of all 63 after token 50
    fewer, more = (measured(Octaves(later_queries=later), inputs) for later in (54, 55))
    assert (fewer["sink_token"] == 9).all() and (more["sink_token"] < 9).all()
    assert (measured(Octaves(later_queries=1), looking_at(50))["sink_token"] < 50).all()


def test_tokens_that_few_queries_see_are_on_no_chart_of_what_tokens_receive():
    """Found: the last tokens stood out in every layer, since they see each other alone."""
    group = measured(Octaves(), looking_at(9))
    # Token 0 is the first of its document, whose row is not asked: 63 rows see it, none token 63
    assert group["received_queries"][0].values.tolist() == [63, *range(62, -1, -1)]
    drawn = received_from_many(group)[0]
    kept = group["received_queries"][0].values >= 63 / 16
    assert 0 < (~kept).sum() < 64 / 8 and (drawn.notnull().values == kept).all()
    assert_allclose(drawn.values[kept], group["received"][0].values[kept])
    earlier = group.drop_vars("received_queries")
    assert received_from_many(earlier).identical(group["received"]), "a run of before draws all"


def test_attention_by_distance_is_drawn_less_even_attention():
    """Found: where heads look nowhere, its line and that of even attention hid each other."""
    group = measured(Octaves(), looking_at(9)).assign_coords(scheme=("layer", ["nope"]))
    run = xr.DataTree.from_dict({"octaves": group})
    run.attrs = {"checkpoint": "small", "layout": "nope"}
    (ax,) = dict(OCTAVES.figures(run))["attention_by_octave"].axes
    (line,) = [line for line in ax.lines if str(line.get_gid()).startswith("mean")]
    beyond = (group["mass"] - group["uniform"]).isel(prompt=0).mean(("layer", "head"))
    assert_allclose(line.get_ydata(), beyond)
    (level,) = [line for line in ax.lines if line.get_gid() == "level"]
    assert set(level.get_ydata()) == {0.0}


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_shortest_prompts_have_attention_and_no_sink(tokens):
    group = measured(Octaves(), indexed(tokens=tokens))
    assert group["octave"].values.tolist() == [1]
    assert (group["sink_token"] == -1).all() and group["sink_mass"].isnull().all()
    assert_allclose(group["first_token"] + group["own_token"].where(tokens > 1, 0.0), 1.0)


def drawn_residual():
    inputs = with_holes(indexed(tokens=30))
    return inputs, 10 * inputs.residual**5


def massive_residual(scale=1.0):
    """Two entries of token 9 and one of token 4 are massive; all look at 9. Median 1."""
    residual = torch.ones(2, 64, 8, dtype=torch.float64)
    residual[:, 9, 2], residual[:, 9, 5], residual[:, 4, 0] = -3000.0, 1001.0, 2000.0
    residual[:, 20, 1] = 1000.0  # not above
    return looking_at(9), residual * scale


@pytest.mark.parametrize(
    ("given", "massive"),
    # the last: above 1000 times the median, and not above 100
    [(drawn_residual(), 1), (massive_residual(), 3), (massive_residual(0.01), 0)],
    ids=["drawn", "massive", "small"],
)
def test_activations_equal_numpy_over_the_tokens_that_are_there(given, massive):
    inputs, residual = given
    inputs = replace(inputs, read_residual=lambda: residual)
    group = measured(Activations(queries=5), inputs).isel(layer=0)
    assert (group["massive"] == massive).all()
    for prompt, places in enumerate(places_of(inputs.valid)):
        rows = torch.tensor(spread_places(places, 5, 0.5))
        sink = int(inputs.pattern(rows)[prompt].sum((0, 1)).nan_to_num().argmax())
        # what is no token is as small as nothing
        sizes = np.where(inputs.valid[prompt, :, None], residual[prompt].abs(), 0)
        token, entry = np.unravel_index(sizes.argmax(), sizes.shape)
        median = np.quantile(sizes[places], 0.5, method="lower")
        of_sink = sizes[sink]
        expected = {
            **{"largest": sizes.max(), "largest_token": token, "largest_dimension": entry},
            **{"median": median, "sink_token": sink, "sink_largest": of_sink.max()},
            "sink_massive": ((of_sink > 100) & (of_sink > 1000 * median)).sum(),
        }
        for name, value in expected.items():
            assert_allclose(group[name][prompt], value, rtol=1e-12, err_msg=name)
        if not prompt:
            largest = group["largest_by_token"].sel(token=places)
            assert_allclose(largest, sizes[places].max(-1))
