"""Row, column and diagonal sums of causal logits: closed forms, a reference that makes the map, precision, memory."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from repo_interp.measures.causal_pairs import pair_counts
from repo_interp.measures.causal_sums import causal_sums, diagonal_sums


def seen(valid, window):
    """[prompt, query, key] by the definition."""
    tokens = valid.shape[-1]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return mask & valid[:, None, :] & valid[:, :, None]


def by_diagonal(maps):
    tokens = maps.shape[-1]
    return torch.stack([maps.diagonal(-t, -2, -1).sum(-1) for t in range(tokens)], -1)


def logit_maps(queries, keys, valid, window, scale):
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    logits = queries.double() @ keys.double().transpose(-1, -2) * scale
    return logits.nan_to_num(0.0).masked_fill(~seen(valid, window)[:, None], 0)


def random_inputs(
    tokens, kv_heads=4, seed=0, mean=0.5, dtype=torch.float64, heads=4, dimensions=12, prompts=3
):
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        noise = torch.randn(prompts, count, tokens, dimensions, generator=generator, dtype=torch.float64)
        return noise + mean * torch.randn(
            prompts, count, 1, dimensions, generator=generator, dtype=torch.float64
        )

    queries, keys = draw(heads), draw(kv_heads)
    valid = torch.ones(prompts, tokens, dtype=torch.bool)
    valid[0, tokens - tokens // 5 :] = False
    valid[1, : tokens // 3] = False
    valid[2, tokens // 2] = False
    return queries.to(dtype), keys.to(dtype), valid


@pytest.mark.parametrize("tokens", [1, 7, 128, 131, 300])
@pytest.mark.parametrize("window", [None, 1, 5, 100, 128, 1000])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_sums_equal_those_of_the_whole_map(tokens, window, kv_heads):
    queries, keys, valid = random_inputs(tokens, kv_heads)
    queries = queries.masked_fill(~valid[:, None, :, None], float("nan"))
    sums = causal_sums(queries, keys, valid, window, scale=0.25, memory=1)
    maps = logit_maps(queries, keys, valid, window, 0.25)
    close = {"rtol": 1e-10, "atol": 1e-10}
    assert_close(sums.query, maps.sum(-1), **close)
    assert_close(sums.key, maps.sum(-2), **close)
    assert_close(sums.distance, by_diagonal(maps), **close)
    assert_close(sums.total, maps.sum((-1, -2)), **close)
    assert_close(sums.square, maps.square().sum((-1, -2)), **close)
    counts = pair_counts(valid, window)
    pairs = seen(valid, window).double()
    assert torch.equal(counts.query, pairs.sum(-1))
    assert torch.equal(counts.key, pairs.sum(-2))
    assert torch.equal(counts.distance, by_diagonal(pairs))
    assert torch.equal(counts.total, pairs.sum((-1, -2)))


def test_long_prompts_go_through_several_strides():
    queries, keys, valid = random_inputs(4200, dimensions=4, heads=1, kv_heads=1, prompts=3)
    sums = causal_sums(queries, keys, valid, window=3000)
    maps = logit_maps(queries, keys, valid, 3000, 1.0)
    for ours, expected in (
        (sums.query, maps.sum(-1)),
        (sums.key, maps.sum(-2)),
        (sums.square, maps.square().sum((-1, -2))),
    ):
        assert_close(ours, expected, rtol=1e-10, atol=1e-9)


def test_how_many_heads_go_at_once_does_not_matter():
    queries, keys, valid = random_inputs(200, kv_heads=2)
    one, all_at_once = (
        causal_sums(queries, keys, valid, memory=1),
        causal_sums(queries, keys, valid, memory=2**40),
    )
    for name in ("query", "key", "distance", "total", "square"):
        assert_close(getattr(one, name), getattr(all_at_once, name), rtol=1e-13, atol=1e-11)


def test_constant_features_count_the_pairs():
    ones = torch.ones(1, 2, 50, 4, dtype=torch.float64)
    sums = causal_sums(ones, ones, scale=0.5)
    assert_close(sums.query, 2.0 * torch.arange(1, 51, dtype=torch.float64).expand(1, 2, 50))
    assert_close(sums.distance, 2.0 * torch.arange(50, 0, -1, dtype=torch.float64).expand(1, 2, 50))
    assert_close(sums.square, torch.full((1, 2), 4.0 * 50 * 51 / 2, dtype=torch.float64))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("mean", [0.5, 5.0, 70.0])
def test_float32_variance_keeps_its_digits_also_where_the_mean_dwarfs_the_spread(mean, window):
    queries, keys, valid = random_inputs(600, mean=mean, dtype=torch.float32)
    sums = causal_sums(queries, keys, valid, window)
    exact = causal_sums(queries.double(), keys.double(), valid, window)
    pairs = pair_counts(valid, window).total[:, None]

    def variance(of):
        return of.square / pairs - (of.total / pairs) ** 2

    assert_close(variance(sums), variance(exact), rtol=2e-6, atol=0)


def test_longest_distances_are_right_in_float32():
    queries, keys, _ = random_inputs(1500, dtype=torch.float32)
    last = diagonal_sums(queries, keys)[..., -1]
    assert_close(
        last, (queries[..., -1, :].double() * keys[..., 0, :].double()).sum(-1), rtol=1e-9, atol=1e-9
    )


def test_strided_and_half_precision_features_are_taken():
    queries, keys, valid = random_inputs(90)
    strided = queries.transpose(1, 2).contiguous().transpose(1, 2)
    assert_close(causal_sums(strided, keys, valid).square, causal_sums(queries, keys, valid).square)
    half = causal_sums(queries.bfloat16(), keys.bfloat16(), valid)
    exact = causal_sums(queries.bfloat16().double(), keys.bfloat16().double(), valid)
    assert_close(half.square, exact.square, rtol=1e-6, atol=0)


def test_shapes_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="do not pair"):
        causal_sums(torch.zeros(1, 3, 8, 4), torch.zeros(1, 2, 8, 4))
