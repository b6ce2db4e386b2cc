"""Tables that turn nothing: the results of ordinary ones and zeros, without the arithmetic."""

import functools
import inspect

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as of_cohere
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as of_gptj
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as of_llama
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb as of_llama4

from repo_interp.models.identity_tables import Ones, Zeros, identity_tables, skip_rotation

FEATURES = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
TABLES = torch.ones(2, 5, 8), torch.zeros(2, 5, 8)


class Arithmetic(TorchDispatchMode):
    """Keeps the names of the products and sums that are computed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        """Call `operator`."""
        name = operator._schema.name.removeprefix("aten::")
        if name in ("mul", "add", "sub"):
            self.seen.append(name)
        return operator(*arguments, **(keywords or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotation", [of_llama, of_cohere])
def test_a_stock_rotation_returns_what_it_was_given(rotation, dtype):
    given = FEATURES.to(dtype), FEATURES[:, :1].to(dtype)
    tables = identity_tables(tuple(table.to(dtype) for table in TABLES))
    with Arithmetic() as arithmetic:
        found = rotation(*given, *tables)
    assert [type(each) for each in found] == [torch.Tensor] * 2
    assert_close(found, given, rtol=0, atol=0)
    assert rotation is of_cohere or arithmetic.seen == []


def test_interleaved_and_complex_rotations_do_too():
    features = FEATURES.transpose(1, 2)  # [batch, token, head, d_head]
    half = identity_tables(tuple(table[..., :4] for table in TABLES))
    assert torch.equal(of_gptj(features, half[1], half[0]), features)
    turns = identity_tables(torch.ones(2, 5, 4, dtype=torch.complex64))
    for found in of_llama4(features, features[:, :, :1], turns):
        assert type(found) is torch.Tensor
        assert torch.equal(found, features[:, :, : found.shape[2]])


def test_gradients_pass_as_through_ordinary_tables():
    found = []
    for tables in (TABLES, identity_tables(TABLES)):
        queries = FEATURES.clone().requires_grad_()
        (of_llama(queries, queries, *tables)[0] ** 2).sum().backward()
        found.append(queries.grad)
    assert_close(found[0], found[1], rtol=0, atol=0)


class Family:
    """What a module of modeling code holds: a rotation, and a class that finds it by its name."""

    def __init__(self, rotation):
        self.calls = 0
        self.names = {"apply_rotary_pos_emb": self.counted(rotation)}
        exec("def forward(*given): return apply_rotary_pos_emb(*given)", self.names)
        self.forward = self.names["forward"]

    def counted(self, rotation):
        """Count the calls of `rotation`."""

        @functools.wraps(rotation)
        def called(*given):
            self.calls += 1
            return rotation(*given)

        return called


def test_a_rotation_that_hands_on_its_arguments_is_called_once():
    family, tables = Family(inspect.unwrap(of_llama)), identity_tables(TABLES)
    for _ in range(2):  # replaced once
        skip_rotation(family.forward)
    for _ in range(3):
        found = family.forward(FEATURES, FEATURES[:, :1], *tables)
        assert found[0] is FEATURES and torch.equal(found[1], FEATURES[:, :1])
    assert family.calls == 1
    turns = torch.rand(2, 5, 8), torch.rand(2, 5, 8)
    found = family.forward(FEATURES, FEATURES, *turns)
    assert family.calls == 2 and torch.equal(found[0], of_llama(FEATURES, FEATURES, *turns)[0])


def test_a_rotation_that_reorders_is_always_called():
    def reordered(queries, keys, cosines, sines):
        return inspect.unwrap(of_llama)(queries.flip(-1), keys.flip(-1), cosines, sines)

    family, tables = Family(reordered), identity_tables(TABLES)
    skip_rotation(family.forward)
    for _ in range(2):
        assert torch.equal(family.forward(FEATURES, FEATURES, *tables)[0], FEATURES.flip(-1))
    assert family.calls == 2


def test_every_other_operation_sees_ones_and_zeros():
    ones, zeros = identity_tables(TABLES)
    features = FEATURES[:, 0]
    plain = [
        (ones + features, features + 1),
        (ones * 2.0, torch.full_like(ones, 2.0)),
        (zeros - features, -features),
        (features[:1] * ones, features[:1].expand(2, -1, -1)),
        (features.bfloat16() * ones, features.bfloat16().float()),
        (features * zeros, TABLES[1]),
        (zeros * ones, TABLES[1]),
    ]
    for found, wanted in plain:
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    assert type(ones * 2.0) is torch.Tensor and type(ones + 1) is torch.Tensor


def test_views_and_casts_stay_tables():
    ones, zeros = identity_tables(TABLES)
    assert isinstance(ones[..., :4].unsqueeze(1).to(torch.float64), Ones)
    assert all(isinstance(part, Zeros) for part in zeros.chunk(2, dim=-1))
