"""Position interpolation and YaRN: against transformers for RoPE, and for the sets of HoPE."""

import math

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from repo_interp.positions.hope import high_components, hope_frequencies, only_high
from repo_interp.positions.rotary import rotate, turn
from repo_interp.positions.scaling import interpolate, yarn_attention_scaling, yarn_frequencies


def rope(base, d_head):
    return 1.0 / base ** (torch.arange(0, d_head, 2, dtype=torch.float32) / d_head)


FREQUENCIES = rope(10_000.0, 16)


@pytest.mark.parametrize("factor", [1.0, 2.0, 16.0])
@pytest.mark.parametrize(
    ("base", "d_head", "length", "betas"),
    [
        (10_000.0, 64, 512, {}),
        (500_000.0, 128, 4096, {}),
        (10_000.0, 128, 131_072, {}),
        (500_000.0, 8, 48, {}),
        (10_000.0, 64, 2048, {"beta_fast": 16.0, "beta_slow": 2.0}),
    ],
)
def test_yarn_equals_transformers_on_rope(base, d_head, length, betas, factor):
    parameters = {"rope_type": "yarn", "rope_theta": base, "factor": factor, **betas}
    config = LlamaConfig(
        head_dim=d_head,
        max_position_embeddings=int(length * factor),
        rope_parameters=parameters | {"original_max_position_embeddings": length},
    )
    expected, scaling = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ours = yarn_frequencies(rope(base, d_head), factor, length, **betas)
    assert_close(ours, expected, atol=0, rtol=2e-6)
    assert yarn_attention_scaling(factor) == pytest.approx(scaling)
    assert yarn_attention_scaling(0.5) == 1.0


@pytest.mark.parametrize("length", [24, 512, 4096])
def test_what_hope_keeps_is_stretched_as_in_rope_and_what_it_does_not_stays_zero(length):
    frequencies = rope(10_000.0, 64)
    kept = high_components(frequencies, length)
    stretched = yarn_frequencies(frequencies, 4.0, length)
    ours = yarn_frequencies(hope_frequencies(frequencies, length), 4.0, length)
    assert_close(ours, stretched.where(kept, 0.0), atol=0, rtol=1e-5)
    repeated = yarn_frequencies(only_high(frequencies, length), 4.0, length)
    again = torch.arange(int((~kept).sum())) % int(kept.sum())
    assert_close(repeated[~kept], stretched[kept][again], atol=0, rtol=1e-5)


def test_order_and_dtype_are_kept_and_no_frequency_is_no_trouble():
    frequencies, shuffle = rope(10_000.0, 32).double(), torch.randperm(16)
    stretched = yarn_frequencies(frequencies, 4.0, 512)
    assert_close(yarn_frequencies(frequencies[shuffle], 4.0, 512), stretched[shuffle])
    for few in ([0.0, 0.0, 0.0], [1.0, 0.0]):
        assert yarn_frequencies(torch.tensor(few), 4.0, 512).tolist() == few


def test_interpolated_frequencies_are_interpolated_positions():
    features, positions = torch.randn(3, 7, 16), torch.randn(7) * 30
    ours = rotate(features, positions, interpolate(FREQUENCIES, 4.0))
    assert_close(ours, rotate(features, positions / 4.0, FREQUENCIES))


@pytest.mark.parametrize(
    ("scale", "arguments"),
    [
        (interpolate, (FREQUENCIES, 0.0)),
        (yarn_attention_scaling, (-1.0,)),
        (yarn_frequencies, (FREQUENCIES, math.nan, 512)),
        (yarn_frequencies, (FREQUENCIES, 2.0, 0)),
    ],
)
def test_factors_and_lengths_that_are_not_positive_are_refused(scale, arguments):
    with pytest.raises(ValueError, match=r"a positive (factor|training length) was wanted; got"):
        scale(*arguments)


@pytest.mark.parametrize(
    ("shape", "tables", "dtypes"),
    [
        ((2, 3, 5, 8), (1, 1, 5, 4), (torch.float32, torch.float32)),
        ((2, 3, 5, 8), (1, 1, 5, 4), (torch.bfloat16, torch.bfloat16)),
        ((1, 3, 5, 8), (2, 3, 5, 4), (torch.bfloat16, torch.bfloat16)),
        ((5, 8), (3, 5, 4), (torch.bfloat16, torch.float32)),
    ],
)
def test_a_rotation_without_gradients_makes_the_same_sums(shape, tables, dtypes):
    features, turning = torch.randn(shape, dtype=dtypes[0]), torch.randn(2, *tables)
    found = []
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            found.append(turn(features, *turning.to(dtypes[1])))
    assert_close(*found, atol=0, rtol=0)
