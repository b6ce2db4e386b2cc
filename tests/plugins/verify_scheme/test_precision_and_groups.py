"""Half precision, heads that share keys, and chunks with a cache: mistakes are found and named."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, LlamaConfig

import repo_interp as ri
from repo_interp import installed_points
from repo_interp.models.decoder import as_decoder
from repo_interp.models.scheme_parts import SchemeParts
from repo_interp.plugins.verify_scheme.chunks import compare_chunks
from repo_interp.plugins.verify_scheme.grouped_heads import grouped_heads
from repo_interp.plugins.verify_scheme.half_precision import (
    compare_with_float64,
    half_precision,
    run_in_precision,
)
from repo_interp.positions.assigners import RememberingAssigner, TokenIndex
from repo_interp.positions.layouts import SCHEMES
from repo_interp.positions.logits import PositionLogits, exact
from repo_interp.positions.rotary import expand_heads

TOKENS = torch.randint(3, 64, (1, 64), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(installed_points, "_REGISTERED", {})


@torch.no_grad()
def model_of(scheme, kv_heads=2):
    """A decoder of four heads, whose scheme's weights are no longer those of its start."""
    if not isinstance(scheme, str):
        ri.register_scheme("mine", scheme)
        scheme = "mine"
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = ri.reposition(plain.eval(), scheme)
    for weight in as_decoder(model).scheme_parameters:
        weight.data += 0.3 * torch.randn_like(weight)
    return model


@torch.no_grad()
def found(check, scheme):
    """The finding of a check, or an empty text, and the difference."""
    model = model_of(scheme)
    if check is grouped_heads:
        difference, lines = check(model, lambda: model_of(scheme, kv_heads=4), TOKENS)
    else:
        difference, lines = check(model, TOKENS)
    return (lines or [""])[0], difference


def parts(assigner=TokenIndex, logits=None, transform=None, frequencies=True):
    def build(builder, rotation, d_head):
        return SchemeParts(
            "mine",
            assigner(),
            rotation.frequencies if frequencies else None,
            position_logits=logits and logits(),
            transform=transform and transform(rotation, d_head),
        )

    return build


@pytest.mark.parametrize("scheme", [*SCHEMES, "forgetting", "path", "pope", "selective_rope"])
def test_schemes_that_come_with_the_packages_pass_with_a_margin(scheme):
    for check in (half_precision, grouped_heads, compare_chunks):
        line, difference = found(check, scheme)
        assert line == ""
        assert (difference > 0) == (check is not grouped_heads) or difference < 1e-5


class Turned(nn.Module):
    """RoPE as a transform, with angles in a precision; None: that of the queries."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def turned(self, x, z):
        dtype = self.dtype or x.dtype
        theta = 1e4 ** -(torch.arange(8) / 8)
        angle = z.to(dtype)[..., None] * theta.to(dtype)
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, queries, keys, positions):
        return self.turned(queries, positions), self.turned(keys, positions)


def turning(dtype):
    return parts(transform=lambda rotation, d_head: Turned(dtype), frequencies=False)


class Index(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, hidden_states, index):
        return index.to(self.dtype or hidden_states.dtype)[:, None]


class Sums(RememberingAssigner):
    """Sums of steps that tokens decide, in a precision."""

    features = 1

    def __init__(self, dtype):
        super().__init__()
        self.step, self.sums = nn.Linear(64, 1), dtype

    def remember(self, hidden_states, past):
        steps = 1 + exact(self.step(hidden_states)).sigmoid()
        before = 0 if past is None else past[:, -1:].to(self.sums)
        return before + steps.to(self.sums).cumsum(1)

    def recall(self, memory, seen):
        return memory[:, -seen.shape[2] :, 0][:, None]


class Distances(PositionLogits):
    """A bias of the distance in a precision; None: that of the queries."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, queries, keys, rows, columns, visible, scale, values=None, gate_keys=None):
        rows, columns = (exact(z if z.ndim == 3 else z[:, None]) for z in (rows, columns))
        distance = (rows[..., None] - columns[..., None, :]).abs()
        return (-0.3 * distance).to(self.dtype or queries.dtype) * visible


class Weights(PositionLogits):
    """The logarithm of a softmax, in a precision; None: that of the queries."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, queries, keys, rows, columns, visible, scale, values=None, gate_keys=None):
        dtype = self.dtype or queries.dtype
        logits = queries.to(dtype) @ expand_heads(keys, queries.shape[1]).mT.to(dtype)
        return log_softmax(logits.masked_fill(~visible, -1e4), -1) * visible


class Rates(PositionLogits):
    """A bias whose learned rate is widened before or after the exponential."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.log = dtype, nn.Parameter(torch.zeros(4, 1, 1))

    def forward(self, queries, keys, rows, columns, visible, scale, values=None, gate_keys=None):
        rate = self.log.exp() if self.dtype is None else exact(self.log).exp()
        distance = (rows[:, None, :, None] - columns[:, None, None]).abs()
        return -rate * distance * visible


BY_PRECISION = {
    "transformed queries or keys": turning,
    "positions": lambda dtype: parts(lambda: Index(dtype)),
    "positions, summed": lambda dtype: parts(lambda: Sums(dtype or torch.bfloat16)),
    "position logits": lambda dtype: parts(logits=lambda: Distances(dtype)),
    "position logits, of a softmax": lambda dtype: parts(logits=lambda: Weights(dtype)),
    "position logits, of a rate": lambda dtype: parts(lambda: None, lambda: Rates(dtype)),
}


@pytest.mark.parametrize("name", BY_PRECISION)
def test_what_is_made_in_half_precision_is_found_and_the_same_in_float32_is_not(name):
    line, _ = found(half_precision, BY_PRECISION[name](None))
    part = name.partition(",")[0]
    assert line.startswith(f"half: {part} of layer 0 in bfloat16 differ from float64 by up to ")
    assert "first at token " in line and "of positions from 384 on" in line
    assert found(half_precision, BY_PRECISION[name](torch.float32))[0] == ""


@pytest.mark.parametrize("name", ["transformed queries or keys", "positions", "position logits"])
def test_a_precision_that_the_code_names_is_found_too(name):
    """It would be the same in a float64 copy of the part."""
    line, _ = found(half_precision, BY_PRECISION[name](torch.bfloat16))
    assert line.startswith(f"half: {name} of layer 0 in bfloat16")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_a_layer_are_its_formula_in_float64_up_to_the_bound(dtype):
    """The bound is no slack: the differences reach a hundredth of it, and grow with the rounding."""
    u = torch.finfo(dtype).eps / 2
    _, start, (traces,) = run_in_precision(model_of("rope"), dtype, [TOKENS], 384)
    for each in traces:
        *_, logits = compare_with_float64(each, u)
        q, k = (expand_heads(each.tensors[name].double(), 4) for name in ("queries", "keys"))
        angle = torch.arange(start, start + 64).double()[:, None] * 1e4 ** (
            -torch.arange(8).double() / 8
        )
        q, k = (
            torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
            for x in (q, k)
        )
        slow = (q @ k.conj().mT).real / 4
        errors = (each.tensors["scores"].double() - slow).abs().tril()
        # The table of frequencies is one of float32.
        assert float((errors - logits.errors).abs().max()) < 1e-3
        assert 0.01 < float((logits.errors / logits.allowed).max()) < 1


class OwnKeys(PositionLogits):
    """Dot products with keys that are repeated in an order."""

    def __init__(self, repeat):
        super().__init__()
        self.repeat = repeat

    def forward(self, queries, keys, rows, columns, visible, scale, values=None, gate_keys=None):
        return exact(queries) @ self.repeat(exact(keys), queries.shape[1]).mT * visible


class Rows(nn.Module):
    """Positions for every head of the query."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(64, 4, bias=False)

    def forward(self, hidden_states, index):
        return self.map(hidden_states.float()).mT


class OfHeads(PositionLogits):
    """Distances of positions of a head, which are chosen among the rows."""

    def __init__(self, kv_heads, right):
        super().__init__()
        self.chosen = (
            torch.arange(4) if right else torch.arange(kv_heads).repeat_interleave(4 // kv_heads)
        )

    def forward(self, queries, keys, rows, columns, visible, scale, values=None, gate_keys=None):
        rows, columns = rows[:, self.chosen], columns[:, self.chosen]
        return -(rows[..., None] - columns[..., None, :]).abs() * visible


def by_rows(right):
    def build(builder, rotation, d_head):
        added = OfHeads(rotation.kv_heads, right)
        return SchemeParts("mine", Rows(), None, position_logits=added)

    return build


class Matrices(nn.Module):
    def __init__(self, rotation, d_head, interleave):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(d_head).repeat(rotation.kv_heads, 1, 1))
        self.interleave = interleave

    def forward(self, queries, keys, positions):
        group = queries.shape[1] // len(self.matrix)
        of_queries = (
            self.matrix.repeat_interleave(group, 0)
            if self.interleave
            else self.matrix.repeat(group, 1, 1)
        )
        return queries @ of_queries, keys @ self.matrix


class InnerHeads(nn.Module):
    """Positions of key-value heads that lie innermost in the weights."""

    def __init__(self, kv_heads):
        super().__init__()
        self.map = nn.Linear(64, 3 * kv_heads, bias=False)
        self.kv_heads = kv_heads

    def forward(self, hidden_states, index):
        return self.map(hidden_states.float()).unflatten(-1, (3, self.kv_heads)).sum(2).mT


def inner(builder, rotation, d_head):
    return SchemeParts("mine", InnerHeads(rotation.kv_heads), rotation.frequencies)


def frequencies_by_key_head(builder, rotation, d_head):
    own = rotation.frequencies * torch.linspace(1, 2, rotation.kv_heads)[:, None]
    return SchemeParts("mine", TokenIndex(), own)


GROUPED = {
    "keys": lambda right: parts(
        logits=lambda: OwnKeys(
            expand_heads if right else lambda k, heads: k.repeat(1, heads // k.shape[1], 1, 1)
        )
    ),
    "matrices": lambda right: parts(transform=lambda rotation, d: Matrices(rotation, d, right)),
    "rows": by_rows,
}


@pytest.mark.parametrize("name", GROUPED)
def test_heads_that_are_taken_for_others_are_found_and_named(name):
    line, _ = found(grouped_heads, GROUPED[name](False))
    assert line.startswith("grouped: heads that share keys attend otherwise than heads that have")
    assert "first in layer 0 at token " in line
    # Head 0 shares key-value head 0 in any order, and repeated keys are right for head 3 too.
    assert f"where heads {'1, 2, 3' if name == 'rows' else '1, 2'} differ" in line
    assert found(grouped_heads, GROUPED[name](True))[0] == ""


@pytest.mark.parametrize("scheme", [inner, frequencies_by_key_head])
def test_entries_of_key_heads_are_repeated_wherever_they_are(scheme):
    line, difference = found(grouped_heads, scheme)
    assert (line, difference < 1e-5) == ("", True)


class Remembered(RememberingAssigner):
    """Running sums of steps, and a mistake."""

    features = 1

    def __init__(self, before=lambda past: past[:, -1:], place=lambda memory, seen: memory):
        super().__init__()
        self.step, self.before, self.place = nn.Linear(64, 1), before, place

    def remember(self, hidden_states, past):
        steps = exact(self.step(hidden_states)).exp()
        return (0 if past is None else self.before(past)) + steps.cumsum(1)

    def recall(self, memory, seen):
        return self.place(memory, seen)[:, -seen.shape[2] :, 0][:, None]


def test_memories_that_are_wrong_beyond_short_prompts_are_found():
    short = parts(lambda: Remembered(lambda past: past[:, -1:] * (past.shape[1] < 32)))
    line, _ = found(compare_chunks, short)
    assert line.startswith(
        "chunks: 64 tokens in calls of up to 20, with a cache and behind padding"
    )
    assert "in float32, first in layer 0 at token " in line
    assert found(compare_chunks, parts(Remembered))[0] == ""


class OneByOne(nn.Module):
    """The index, of a single token in the precision of the model."""

    def forward(self, hidden_states, index):
        dtype = hidden_states.dtype if index.shape[1] == 1 else torch.float32
        return index.to(dtype)[:, None].to(torch.float32)


def test_a_mistake_of_half_precision_in_calls_of_one_token_is_found():
    assert found(half_precision, parts(OneByOne))[0] == ""
    line, _ = found(compare_chunks, parts(OneByOne))
    # 384 and 20: even, and held by bfloat16; token 21 is not, nor are those of later such calls.
    assert "in bfloat16, first in layer 0 at token 21 of head 0" in line


def test_positions_that_count_padding_are_found_in_chunks():
    def counted(memory, seen):
        return torch.arange(memory.shape[1])[None, :, None].expand_as(memory) ** 1.5

    line, _ = found(compare_chunks, parts(lambda: Remembered(place=counted)))
    assert "first in layer 0 at token 1 of head 0" in line


def test_a_scheme_that_half_precision_breaks_is_verified_so_and_named():
    ri.register_scheme("mine", turning(None))
    checked = ri.verify_scheme("mine")
    line, _ = checked.attrs["findings"].splitlines()
    assert line.startswith("half: transformed queries or keys of layer 0 in bfloat16")
    assert float(checked["difference"].sel(check="causal")) < 1e-5


class Ahead(nn.Module):
    """Token 7 sees the next one, in the rows of heads 2 and 3."""

    def forward(self, hidden_states, index):
        following = hidden_states.roll(-1, 1)[..., 0].float() * (index == 7)
        return torch.stack([index.float().expand(len(following), -1), index + following], 1)


def test_a_finding_names_the_first_layer_token_and_head():
    ri.register_scheme("mine", parts(Ahead))
    line = ri.verify_scheme("mine").attrs["findings"].splitlines()[0]
    assert line.startswith("causal: ") and line.endswith("first in layer 0 at token 7 of head 2")
