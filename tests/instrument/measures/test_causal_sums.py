"""Row, column and diagonal sums of causal logits: closed forms, a reference that makes the map,
precision, memory.
"""

import pytest
import torch
from causal_reference import component_maps, diagonal_sums, inputs_of, random_features, seen
from torch.testing import assert_close

from repo_interp.measures.kernels.heads import reduced
from repo_interp.measures.kernels.logit_sums import LogitSums
from repo_interp.measures.kernels.seen_pairs import pair_counts
from repo_interp.runtime.memory import working_memory


def causal_sums(queries, keys, valid=None, window=None, scale=1.0, memory=2**24):
    with working_memory(memory):
        return reduced(inputs_of(queries, keys, valid, window, scale), [LogitSums()])[0]


def expected(queries, keys, valid, window, scale):
    """Sums over distances, queries and keys, and of squares."""
    maps = component_maps(queries, keys).sum(2) * scale
    maps = maps.masked_fill(~seen(valid, window)[:, None], 0)
    return [*lines(maps), maps.square().sum((-1, -2))]


def lines(maps):
    return diagonal_sums(maps), maps.sum(-1), maps.sum(-2)


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "window"),
    [
        (1, 4, None),
        (7, 1, 1),
        (131, 4, 100),
        (131, 1, None),
        (300, 4, 128),
        (300, 1, 1000),
        (300, 4, None),
    ],
)
def test_sums_equal_those_of_the_whole_map(tokens, kv_heads, window):
    queries, keys, valid = random_features(tokens, kv_heads)
    queries = queries.masked_fill(~valid[:, None, :, None], float("nan"))
    slow = expected(queries, keys, valid, window, 0.25)
    for memory in (1, 2**18, 2**31):  # one head at a time, a few, and all of them in one product
        sums = causal_sums(queries, keys, valid, window, scale=0.25, memory=memory)
        assert_close([*sums.lines, sums.square], slow, rtol=1e-10, atol=1e-10)
    counts, pairs = pair_counts(valid, window), seen(valid, window).double()
    found = [counts.distance, counts.query, counts.key, counts.total]
    assert_close(found, [*lines(pairs), pairs.sum((-1, -2))], rtol=0, atol=0)


def test_long_prompts_go_through_several_strides():
    queries, keys, valid = random_features(2100, d_head=4, heads=1, kv_heads=1, prompts=1)
    sums = causal_sums(queries, keys, valid, window=700)
    slow = expected(queries, keys, valid, 700, 1.0)
    assert_close([*sums.lines, sums.square], slow, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize(
    ("mean", "window"), [(0.5, 300), (5.0, None), (5.0, 300), (70.0, None), (70.0, 300)]
)
def test_float32_variance_keeps_its_digits_also_where_the_mean_dwarfs_the_spread(mean, window):
    queries, keys, valid = random_features(600, mean=mean, dtype=torch.float32)
    sums = causal_sums(queries, keys, valid, window)
    exact = causal_sums(queries.double(), keys.double(), valid, window)
    pairs = pair_counts(valid, window).total[:, None]

    def variance(of):
        return of.square / pairs - (of.lines.distance.sum(-1) / pairs) ** 2

    assert_close(variance(sums), variance(exact), rtol=2e-6, atol=0)


def test_longest_distances_are_right_in_float32():
    queries, keys, _ = random_features(1500, dtype=torch.float32)
    last = causal_sums(queries, keys).lines.distance[..., -1]
    exact = (queries[..., -1, :].double() * keys[..., 0, :].double()).sum(-1)
    assert_close(last, exact, rtol=1e-9, atol=1e-9)


def test_half_precision_features_are_taken():
    queries, keys, valid = random_features(90, dtype=torch.bfloat16)
    half = causal_sums(queries, keys, valid)
    exact = causal_sums(queries.double(), keys.double(), valid)
    assert_close(half.square, exact.square, rtol=1e-6, atol=0)


def test_shapes_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="do not pair"):
        causal_sums(torch.zeros(1, 3, 8, 4), torch.zeros(1, 2, 8, 4))
