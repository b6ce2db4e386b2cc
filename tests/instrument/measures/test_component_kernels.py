"""Profiles, moments and VAF of rotary components: the slow way, precision, memory, devices."""

from dataclasses import replace

import pytest
import torch
from causal_reference import component_maps, diagonal_sums, inputs_of, random_features, seen
from torch.testing import assert_close

from repo_interp.measures.kernels.heads import head_blocks, reduced
from repo_interp.measures.kernels.rotary_components import (
    ComponentSums,
    component_moments,
    pair_components,
    pair_sums,
    variance_shares,
)
from repo_interp.measures.kernels.seen_pairs import pair_counts
from repo_interp.runtime.memory import working_memory

FEW, NONE, ALL = [1, 1, 0, 0, 0, 0], [0] * 6, [1] * 6
BANDS = torch.tensor([FEW, [0, 0, 1, 0, 1, 1], NONE, ALL]).bool()
PARTS = torch.tensor([FEW, NONE, [0, 0, 1, 1, 1, 1]]).bool()


def of_heads(make, queries, keys, valid=None, window=None, memory=2**24):
    """What `make` gives of every block, [prompt, head, ...]."""
    with working_memory(memory):
        blocks = head_blocks(inputs_of(queries, keys, valid, window))
        parts = [make(block).flatten(0, 1) for block in blocks]
    return torch.cat(parts).unflatten(0, queries.shape[:2])


def component_profiles(*features, **options):
    return of_heads(lambda block: block.profiles, *features, **options)


def vaf(queries, keys, valid=None, window=None):
    """Of every component, in two precisions where need be."""
    inputs = replace(inputs_of(queries, keys, valid, window), prompts=torch.arange(len(queries)))
    (sums,) = reduced(inputs, [ComponentSums(training_length=16)])
    counts = pair_counts(inputs.valid, window)
    return variance_shares(sums.moments[None], counts, sums.bands)["vaf"][0]


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "window", "bands"),
    [
        (1, 4, None, BANDS),
        (7, 4, 1, BANDS),
        (130, 2, None, PARTS),
        (150, 4, 128, BANDS),
        (290, 1, 200, PARTS),
    ],
)
def test_profiles_moments_and_vaf_are_those_of_the_whole_maps(tokens, kv_heads, window, bands):
    queries, keys, valid = random_features(tokens, kv_heads)
    queries = queries.masked_fill(~valid[:, None, :, None], float("nan"))
    pairs = seen(valid, window)[:, None, None]
    maps = component_maps(queries, keys).masked_fill(~pairs, 0)
    given = {"queries": queries, "keys": keys, "valid": valid, "window": window}
    close = {"rtol": 1e-10, "atol": 1e-10, "equal_nan": True}
    assert_close(component_profiles(**given, memory=1), diagonal_sums(maps), **close)
    count = pairs.double().sum((-1, -2))
    mean = maps.sum((-1, -2)) / count
    centred = (maps - mean[..., None, None]).masked_fill(~pairs, 0).flatten(-2)
    part = torch.cat([torch.eye(6), bands]).double()
    whole, parts = centred.sum(2, keepdim=True), part @ centred
    variance = whole.square().sum(-1) / count
    expected = {
        "variance": variance,
        "with_whole": (whole * parts).sum(-1) / count,
        "of_part": parts.square().sum(-1) / count,
        "accounted": variance - (whole - parts).square().sum(-1) / count,
    }

    def moments(block):
        made = component_moments(pair_sums(block, bands), block.counts.total[..., None], bands)
        values = [getattr(made, name).expand_as(made.of_part) for name in expected]
        return torch.stack(values, -1)

    for memory in (1, 2**18, 2**31):  # one head at a time, a few, and all of them in one product
        found = of_heads(moments, **given, memory=memory).unbind(-1)
        for one, other in zip(found, expected.values(), strict=True):
            assert_close(one, other.expand_as(one), **close)


def test_components_of_one_pair_are_those_of_the_map():
    queries, keys, _ = random_features(9, kv_heads=2)
    maps = component_maps(queries, keys)
    for query, key in ((7, 2), (2, 7)):
        found = pair_components(inputs_of(queries, keys), query, key)
        assert_close(found, maps[..., query, key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mean", "window"), [(0.0, 300), (1.0, None), (5.0, 50), (20.0, None), (70.0, 300)]
)
def test_float32_keeps_the_digits_of_vaf_where_the_mean_dwarfs_the_spread(mean, window):
    queries, keys, valid = random_features(500, mean=mean, dtype=torch.float32)
    found = vaf(queries, keys, valid, window)
    exact = vaf(queries.double(), keys.double(), valid, window)
    assert_close(found / 100, exact / 100, rtol=2e-6, atol=2e-6)


def test_float32_keeps_the_digits_where_components_oppose_each_other():
    queries, keys, valid = random_features(500, mean=0.0, dtype=torch.float32)
    queries[..., 2:4] += 50
    keys[..., 2:4] += torch.tensor([50, -50])
    found = vaf(queries, keys, valid)
    exact = vaf(queries.double(), keys.double(), valid)
    assert_close(found / 100, exact / 100, rtol=2e-6, atol=2e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_gpu_gives_what_the_cpu_gives(dtype):
    queries, keys, valid = random_features(400, kv_heads=2, mean=5.0, dtype=dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    there = [tensor.cuda() for tensor in (queries, keys, valid)]
    for kernel in (component_profiles, vaf):
        found, expected = kernel(*there, 100).cpu(), kernel(queries, keys, valid, 100)
        assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
