"""Block means of maps: equal to the dense maps, whatever the heads share, mask or add; no n x n is
made.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_inputs import CASES, PADDED, random_inputs
from families import tiny
from numpy.testing import assert_allclose
from refusals import refused
from torch.testing import assert_close

import repo_interp as ri
from repo_interp.plugins.fake_distance.block_means import (
    block_size,
    fake_block_means,
    logit_block_means,
)
from repo_interp.plugins.fake_distance.fake_distance import last_queries
from repo_interp.plugins.fake_distance.maps import Maps
from repo_interp.tasks.prompt import Prompt


def dense_means(logits, size):
    """Of a dense map [prompt, head, query, key] with -inf where nothing is seen."""
    blocks = math.ceil(logits.shape[-1] / size)
    means = torch.full((*logits.shape[:2], blocks, blocks), torch.nan, dtype=torch.float64)
    for prompt, head, row, column in np.ndindex(means.shape):
        block = logits[
            prompt, head, row * size : (row + 1) * size, column * size : (column + 1) * size
        ]
        if torch.isfinite(block).any():
            means[prompt, head, row, column] = block[torch.isfinite(block)].mean()
    return means


@pytest.mark.parametrize(
    ("case", "size"),
    [
        *((case, 5) for case in (*CASES, "softcap", "bias")),
        *(("shared keys", size) for size in (1, 4, 24, 30)),
    ],
)
def test_block_means_are_those_of_the_dense_map(case, size):
    inputs = random_inputs(**CASES.get(case, {"valid": PADDED}))
    bias = torch.randn(2, 4, 24, 24, dtype=torch.float64)
    no_product = {
        "softcap": {"softcap": 0.7},
        "bias": {"position_logits": lambda rows: bias[:, :, rows]},
    }
    inputs = replace(inputs, **no_product.get(case, {}))
    expected = dense_means(inputs.logits(torch.arange(24)), size)
    assert_close(logit_block_means(inputs, size), expected, atol=1e-10, rtol=1e-10, equal_nan=True)


def test_large_means_do_not_drown_differences_in_float32():
    inputs = random_inputs(scheme="nope", tokens=200, dtype=torch.float32)
    inputs = replace(inputs, keys=inputs.keys + 300)
    exact = replace(inputs, queries=inputs.queries.double(), keys=inputs.keys.double())
    expected = dense_means(exact.logits(torch.arange(200)), 16)
    assert_close(logit_block_means(inputs, 16), expected, atol=1e-8, rtol=1e-10, equal_nan=True)


def dense_fake(query, keys, frequencies, bias):
    count = keys.shape[1]
    turned = torch.complex(*query.chunk(2, -1))[:, None] * torch.polar(
        torch.ones(1, dtype=torch.float64), torch.arange(count)[:, None] * frequencies
    )
    keys = torch.complex(*keys.repeat_interleave(len(query) // len(keys), 0).chunk(2, -1))
    return torch.einsum("hdr,hjr->hdj", turned, keys.conj()).real + bias[..., None]


@pytest.mark.parametrize("size", [1, 7])
def test_fake_block_means_are_those_of_the_dense_fake_map(size):
    inputs = random_inputs(kv_heads=2)
    query, bias = last_queries(inputs, 1)[0][0, :, 0], torch.randn(4, 24, dtype=torch.float64)
    found = fake_block_means(query, inputs.keys[0], inputs.frequencies, bias, size)
    expected = dense_means(dense_fake(query, inputs.keys[0], inputs.frequencies, bias)[None], size)[
        0
    ]
    assert_close(found, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("tokens", "side", "size"), [(192, 192, 1), (193, 192, 2), (16384, 192, 86)]
)
def test_blocks_are_as_small_as_the_side_allows(tokens, side, size):
    assert block_size(tokens, side) == size
    assert math.ceil(tokens / size) <= side


def test_the_measure_keeps_blocks_of_the_first_prompt_and_its_last_query():
    inputs, measure = random_inputs(kv_heads=2), Maps(side=6)
    group = measure.conclude(measure.observe(inputs, {}))
    assert group["logit_map"].dims == ("layer", "head", "query_block", "key_block")
    assert group["key_block"].values.tolist() == [0, 4, 8, 12, 16, 20]
    query = last_queries(inputs, 1)[0][0, :, 0]
    fake = dense_fake(query, inputs.keys[0], inputs.frequencies, torch.zeros(4, 24))
    expected = dense_means(fake[None], 4)[0]
    assert_allclose(group["fake_map"].values[0], expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def bridge():
    return ri.bridge(ri.reposition(tiny("qwen3"), "repo"))


def test_maps_of_chosen_heads_stand_beside_the_measures_of_all(bridge):
    assert Maps(heads=("1-2:3", "10-11", "24", "24:1")).needs.heads == {
        1: [3],
        2: [3],
        **dict.fromkeys((10, 11, 24)),
    }
    prompts = [Prompt(tokens=tuple(range(3, count))) for count in (40, 60)]
    everywhere = ri.analyze(bridge, prompts, measures=(Maps(side=10),), batch_size=2)["maps"]
    some = Maps(side=10, heads=("2:1-2", "0", "2:2"))
    run = ri.analyze(bridge, prompts, (some, "positions"), heads=(0, 1), batch_size=2)
    assert run["positions"].sizes["head"] == 2 and run["positions"].sizes["layer"] == 3
    chosen = {0: [0, 1, 2, 3], 2: [1, 2]}
    assert run["maps"]["layer"].values.tolist() == [*chosen]
    for name in ("logit_map", "fake_map"):
        kept = run["maps"][name]
        for layer, heads in chosen.items():
            of_layer = kept.sel(layer=layer).dropna("head", how="all")
            assert of_layer["head"].values.tolist() == heads
            assert_allclose(of_layer, everywhere[name].sel(layer=layer, head=heads), rtol=1e-6)


def test_maps_of_heads_that_are_not_there_are_refused(bridge):
    for heads, said in (("9:0", "layer 9"), ("1:0-4", "maps in layer 1: head 4 was asked for")):
        with refused(said):
            ri.analyze(bridge, [Prompt(tokens=(1, 2, 3, 4))], measures=(Maps(heads=(heads,)),))
    with refused("HEADS=: wanted whole numbers from 0 to 1,000,000"):
        Maps(heads=("5:",))
