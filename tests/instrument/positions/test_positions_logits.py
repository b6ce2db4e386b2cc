"""What every scheme that adds to the logits must do: equal a slow loop, cached, padded, grouped, in
bf16.
"""

import math

import numpy as np
import pytest
import torch
from slow_biases import slow_bias
from torch.testing import assert_close

from repo_interp.positions.biases import FIRE, ALiBi, KerpleLog
from repo_interp.positions.contextual import (
    ContextualPositions,
    FixedSlopes,
    InterpolatedEmbedding,
    LearnedSlopes,
    PositionMLP,
    SeparatelyGatedPositions,
)
from repo_interp.positions.logits import cap_logits, grouped_product
from repo_interp.positions.piecewise import relu_network

HEADS, KV_HEADS, D_HEAD, D_MODEL = 4, 2, 6, 12
SCALE = D_HEAD**-0.5

SCHEMES = {
    "alibi": lambda: ALiBi(HEADS),
    "kerple log": lambda: KerpleLog(HEADS),
    "fire": lambda: FIRE(HEADS, width=8, threshold=5.0),
    "cope": lambda: ContextualPositions(InterpolatedEmbedding(20, D_HEAD)),
    "cope, few positions": lambda: ContextualPositions(InterpolatedEmbedding(3, D_HEAD)),
    "cope, value gates": lambda: ContextualPositions(InterpolatedEmbedding(20, D_HEAD), "values"),
    "cope, separate keys": lambda: SeparatelyGatedPositions(
        InterpolatedEmbedding(20, D_HEAD), D_MODEL, KV_HEADS, D_HEAD
    ),
    "cope, open gates": lambda: ContextualPositions(InterpolatedEmbedding(5, D_HEAD), "open"),
    "cope mlp": lambda: ContextualPositions(PositionMLP(D_HEAD, width=5, unit=4.0)),
    "cope alibi": lambda: ContextualPositions(FixedSlopes(HEADS)),
    "cope learned slopes": lambda: ContextualPositions(LearnedSlopes(HEADS)),
    "cope relative": lambda: ContextualPositions(
        InterpolatedEmbedding(20, D_HEAD), relative_map=InterpolatedEmbedding(5, D_HEAD)
    ),
}


@pytest.fixture(params=SCHEMES)
def scheme(request):
    torch.manual_seed(3)
    module = SCHEMES[request.param]()
    with torch.no_grad():  # away from the zeros at which some of them start
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return module


class Prompts:
    """Queries, keys and values of a batch, with the tokens of each prompt that are valid."""

    def __init__(self, valid, dtype=torch.float32):
        batch, tokens = valid.shape
        drawn = torch.Generator().manual_seed(0)
        self.queries, self.keys, self.values, self.hidden = (
            torch.randn(batch, *shape, generator=drawn).to(dtype)
            for shape in (
                (HEADS, tokens, D_HEAD),
                (KV_HEADS, tokens, D_HEAD),
                (KV_HEADS, tokens, D_HEAD),
                (tokens, D_MODEL),
            )
        )
        self.index = valid.cumsum(-1) - 1
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        self.visible = (causal & valid[:, None, :] & valid[:, :, None])[:, None]

    def features(self):
        return self.queries, self.keys, self.values, self.hidden

    def logits(self, scheme, rows=slice(None), dtype=None, gate_keys=None):
        """Position logits of features that are widened to `dtype` behind the projection."""
        gate_keys = scheme.gate_keys(self.hidden) if gate_keys is None else gate_keys
        queries, keys, values, gate_keys = (
            features if features is None else features.to(dtype or features.dtype)
            for features in (self.queries[:, :, rows], self.keys, self.values, gate_keys)
        )
        index = self.index.to(dtype or self.index.dtype)
        visible = self.visible[:, :, rows]
        return scheme(queries, keys, index[..., rows], index, visible, SCALE, values, gate_keys)


def whole(batch=2, tokens=9):
    return torch.ones(batch, tokens, dtype=torch.bool)


def slow_map(position_map, head, query, position):
    if isinstance(position_map, InterpolatedEmbedding):
        position = min(position, len(position_map.weight) - 1)
        below, above = position_map.weight[[math.floor(position), math.ceil(position)]]
        share = position - math.floor(position)
        return float(query @ (share * above + (1.0 - share) * below))
    if isinstance(position_map, PositionMLP):
        hidden = position_map.hidden(torch.tensor([position / position_map.unit]))
        return float(query @ position_map.output(torch.relu(hidden)))
    if isinstance(position_map, LearnedSlopes):
        return float(position_map.weight[head]) * position
    return -(2.0 ** (-8.0 * (head + 1) / HEADS)) * position


@torch.no_grad()
def slow_logits(scheme, prompts):
    """Pair by pair, from the formulas."""
    batch, _, tokens, _ = prompts.queries.shape
    by = {"keys": prompts.keys, "values": prompts.values}
    by["separate_keys"] = scheme.gate_keys(prompts.hidden)
    result = torch.zeros(batch, HEADS, tokens, tokens)
    for prompt, head, i in np.ndindex(batch, HEADS, tokens):
        query, rows = prompts.queries[prompt, head, i], prompts.index[prompt]
        index = (rows if rows.ndim == 1 else rows[head * len(rows) // HEADS]).tolist()
        counted, all_counted = 0.0, 0
        for j in reversed(prompts.visible[prompt, 0, i].nonzero()[:, 0].tolist()):
            if not isinstance(scheme, ContextualPositions):
                result[prompt, head, i, j] = slow_bias(scheme, head, index[i], index[j])
                continue
            all_counted += 1
            if scheme.gate_source == "open":
                counted = all_counted
            else:
                against = by[scheme.gate_source][prompt, head // (HEADS // KV_HEADS), j]
                counted += 1.0 / (1.0 + math.exp(-float(query @ against) * SCALE))
            result[prompt, head, i, j] = slow_map(scheme.position_map, head, query, counted)
            if scheme.relative_map is not None:
                result[prompt, head, i, j] += slow_map(
                    scheme.relative_map, head, query, all_counted
                )
    return result


PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("valid", "window"), [(whole(), 9), (PADDED, 9), (PADDED, 4)], ids=["whole", "padded", "window"]
)
def test_equals_the_formula_pair_by_pair(scheme, valid, window):
    """Heads share keys, padding stands on both sides, what is not visible is 0 and counts
    nothing.
    """
    prompts = Prompts(valid)
    prompts.visible &= torch.ones(9, 9, dtype=torch.bool).triu(1 - window)
    assert_close(prompts.logits(scheme), slow_logits(scheme, prompts), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, KV_HEADS, HEADS])
@pytest.mark.parametrize("kind", ["alibi", "kerple log", "fire"])
def test_positions_between_whole_numbers_and_behind_others_have_the_bias_of_the_formula(kind, rows):
    scheme, prompts = SCHEMES[kind](), Prompts(PADDED)
    prompts.index = 5 * torch.randn(2, rows, 9)
    found = prompts.logits(scheme)
    assert_close(found, slow_logits(scheme, prompts), atol=2e-5, rtol=1e-5)


def test_rows_asked_alone_against_all_keys_equal_the_rows_of_the_whole(scheme):
    prompts = Prompts(whole())
    full = prompts.logits(scheme)
    for rows in (slice(8, 9), slice(2, 6)):
        assert_close(prompts.logits(scheme, rows), full[:, :, rows], atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_bfloat16_features_are_used_as_they_are_and_positions_are_not_rounded(scheme):
    scheme = scheme.to(torch.bfloat16)
    prompts = Prompts(whole(batch=1, tokens=400), torch.bfloat16)
    # gates above a half: positions far beyond the 256 of bfloat16
    prompts.queries, prompts.keys = prompts.queries.abs(), prompts.keys.abs()
    logits, gate_keys = prompts.logits(scheme), scheme.gate_keys(prompts.hidden)
    assert logits.dtype == torch.float32
    expected = prompts.logits(scheme.double(), dtype=torch.float64, gate_keys=gate_keys)
    assert expected.dtype == torch.float64
    assert_close(logits.double(), expected, atol=2e-3, rtol=1e-4)


def test_float64_features_meet_float32_parameters(scheme):
    prompts = Prompts(whole())
    wide = prompts.logits(scheme, dtype=torch.float64)
    assert_close(wide.float(), prompts.logits(scheme), atol=2e-5, rtol=1e-5)


def test_autocast_changes_nothing(scheme):
    prompts = Prompts(whole(tokens=40))
    # a projection as any other: autocast may round it
    gate_keys = scheme.gate_keys(prompts.hidden)
    plain = prompts.logits(scheme)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(prompts.logits(scheme, gate_keys=gate_keys), plain)


def test_gradients_reach_parameters_and_features_and_are_those_of_the_formula(scheme):
    scheme = scheme.double()
    prompts = Prompts(whole(batch=1, tokens=6), torch.float64)
    prompts.index = prompts.index.double()
    learned = [*scheme.parameters(), *prompts.features()]
    for tensor in learned:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *_: prompts.logits(scheme), learned, atol=1e-5, rtol=1e-4, fast_mode=True
    )


def test_heads_that_cannot_share_keys_are_refused():
    with pytest.raises(ValueError, match="4 heads cannot share 3 keys evenly"):
        grouped_product(torch.zeros(1, 4, 2, 5), torch.zeros(1, 3, 2, 5))


@pytest.mark.parametrize("units", [1, 16])
def test_the_piecewise_form_is_the_network_itself_with_its_gradients(units):
    shapes = ((2, 3, 5, 7), (units,), (units,), (3, 5, units))
    arguments = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    inputs, weight, bias, output = arguments
    if units > 1:
        weight[:2], bias[0], bias[1] = 0.0, 0.7, -0.7  # units that never switch
        weight[2], bias[2] = weight[3], bias[3]  # two that switch together
        weight[4], bias[4] = 0.0, 0.0  # whose knot would be 0 / 0
    for argument in arguments:
        argument.requires_grad_()
    direct = (torch.relu(inputs[..., None] * weight + bias) * output[None, :, :, None]).sum(-1)
    ours = relu_network(*arguments)
    assert_close(ours, direct, atol=1e-12, rtol=1e-12)
    cotangent = torch.randn(direct.shape, dtype=torch.float64)
    found, expected = (torch.autograd.grad(of, arguments, cotangent) for of in (ours, direct))
    assert_close(found, expected, atol=1e-11, rtol=1e-11)


def test_the_piecewise_form_makes_no_array_with_an_axis_of_units():
    inputs = torch.rand(1, 2, 64, 64, requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()), lambda t: t):
        relu_network(inputs, torch.randn(32), torch.randn(32), torch.randn(2, 1, 32))
    assert sizes and max(sizes) <= 2 * 64 * 64


def test_soft_cap_bounds_large_logits_and_leaves_small_ones():
    logits = torch.tensor([-1e6, -0.01, 0.0, 0.01, 1e6], dtype=torch.float64)
    assert_close(cap_logits(logits, 50.0), logits.clamp(-50, 50), atol=1e-8, rtol=0)
    assert cap_logits(logits, None) is logits
