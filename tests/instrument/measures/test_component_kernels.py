"""Profiles, moments and VAF of rotary components: closed forms, the slow way, precision, memory,
devices.
"""

from dataclasses import replace

import pytest
import torch
from causal_reference import component_maps, diagonal_sums, inputs_of, random_features, seen
from torch.testing import assert_close

from repo_interp.measures.kernels.heads import head_blocks, reduced
from repo_interp.measures.kernels.rotary_components import (
    ComponentSums,
    component_moments,
    variance_accounted_as_printed,
)
from repo_interp.memory import working_memory

FEW, NONE, ALL = [1, 1, 0, 0, 0, 0], [0] * 6, [1] * 6
BANDS = torch.tensor([FEW, [0, 0, 1, 0, 1, 1], NONE, ALL]).bool()
PARTS = torch.tensor([FEW, NONE, [0, 0, 1, 1, 1, 1]]).bool()


def of_heads(make, queries, keys, valid=None, window=None, memory=2**24):
    """What `make` gives of every block, [prompt, head, ...]."""
    prompts, heads = queries.shape[:2]
    with working_memory(memory):
        parts = [
            make(block).flatten(0, 1)
            for block in head_blocks(inputs_of(queries, keys, valid, window))
        ]
    return torch.cat(parts).unflatten(0, (prompts, heads))


def component_profiles(*features, **options):
    return of_heads(lambda block: block.profiles, *features, **options)


def moments(name, bands, *features, **options):
    def make(block):
        made = component_moments(block, block.profiles.sum(-1), bands)
        of_components, of_bands = slice(bands.shape[-1]), slice(bands.shape[-1], None)
        values = made.variance_accounted if name == "of_bands" else getattr(made, name)
        return values[..., of_bands if name == "of_bands" else of_components]

    return of_heads(make, *features, **options)


def vaf(queries, keys, valid=None, window=None):
    """Of every component, in two precisions where need be."""
    inputs = replace(inputs_of(queries, keys, valid, window), prompts=torch.arange(len(queries)))
    return reduced(inputs, [ComponentSums(training_length=16)])[0].explained["vaf"]


shapes = pytest.mark.parametrize(
    ("tokens", "kv_heads", "window"),
    [
        (1, 4, None),
        (2, 4, 1),
        (17, 2, None),
        (130, 4, None),
        (150, 1, 5),
        (150, 4, 128),
        (290, 2, 200),
    ],
)


@shapes
def test_profiles_and_moments_equal_those_of_the_whole_maps(tokens, kv_heads, window):
    queries, keys, valid = random_features(tokens, kv_heads)
    queries = queries.masked_fill(~valid[:, None, :, None], float("nan"))
    pairs = seen(valid, window)[:, None, None]
    maps = component_maps(queries, keys).masked_fill(~pairs, 0)
    profiles = component_profiles(queries, keys, valid, window, memory=1)
    assert_close(profiles, diagonal_sums(maps), rtol=1e-10, atol=1e-10)
    count = pairs.double().sum((-1, -2))
    mean = maps.sum((-1, -2)) / count
    centred = (maps - mean[..., None, None]).masked_fill(~pairs, 0).flatten(-2)
    covariance = centred @ centred.transpose(-1, -2) / count[..., None]
    close = {"rtol": 1e-10, "atol": 1e-10, "equal_nan": True}
    for memory in (1, 2**18, 2**31):  # one head at a time, a few, and all of them in one product
        of = {"queries": queries, "keys": keys, "valid": valid, "window": window, "memory": memory}
        assert_close(moments("variance", BANDS, **of)[..., 0], covariance.sum((-1, -2)), **close)
        assert_close(moments("with_whole", BANDS, **of), covariance.sum(-1), **close)
        assert_close(
            moments("of_part", BANDS, **of), covariance.diagonal(dim1=-2, dim2=-1), **close
        )


@pytest.mark.parametrize("bands", [BANDS, PARTS], ids=["overlapping", "parts"])
def test_vaf_of_components_and_bands_by_their_definitions(bands):
    queries, keys, valid = random_features(140)
    of_components = moments("variance_accounted", bands, queries, keys, valid)
    of_bands = moments("of_bands", bands, queries, keys, valid)
    maps, pairs = component_maps(queries, keys), seen(valid)
    for prompt in range(3):
        values = maps[prompt].flatten(-2)[..., pairs[prompt].flatten()]
        logits = values.sum(1)
        whole = logits.var(-1, correction=0)
        alone = 100 * (1 - (logits[:, None] - values).var(-1, correction=0) / whole[:, None])
        assert_close(of_components[prompt], alone, rtol=1e-10, atol=1e-10)
        for number, band in enumerate(bands):
            left = (logits - values[:, band].sum(1)).var(-1, correction=0)
            assert_close(
                of_bands[prompt, :, number], 100 * (1 - left / whole), rtol=1e-10, atol=1e-10
            )
        printed = 100 * (1 - (logits[:, None] - values).sum(-1) / logits.sum(-1, keepdim=True))
        assert_close(variance_accounted_as_printed(values.sum(-1)), printed, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 300, 50])
@pytest.mark.parametrize("mean", [0.0, 1.0, 5.0, 20.0, 70.0])
def test_float32_keeps_the_digits_of_vaf_where_the_mean_dwarfs_the_spread(mean, window):
    queries, keys, valid = random_features(500, mean=mean, dtype=torch.float32)
    found = vaf(queries, keys, valid, window)
    exact = vaf(queries.double(), keys.double(), valid, window)
    assert_close(found / 100, exact / 100, rtol=2e-6, atol=2e-6)


def test_float32_keeps_the_digits_where_components_oppose_each_other():
    queries, keys, valid = random_features(500, mean=0.0, dtype=torch.float32)
    queries[..., 2] += 50
    queries[..., 3] += 50
    keys[..., 2] += 50
    keys[..., 3] -= 50
    found = vaf(queries, keys, valid)
    exact = vaf(queries.double(), keys.double(), valid)
    assert_close(found / 100, exact / 100, rtol=2e-6, atol=2e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_gpu_gives_what_the_cpu_gives(dtype, window):
    queries, keys, valid = random_features(400, kv_heads=2, mean=5.0, dtype=dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    there = [tensor.cuda() for tensor in (queries, keys, valid)]
    for kernel in (component_profiles, vaf):
        found, expected = kernel(*there, window).cpu(), kernel(queries, keys, valid, window)
        assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
