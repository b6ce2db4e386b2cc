"""Layers computed together on an accelerator, and at once on a processor."""

import gc

import pytest
import torch
from attention_inputs import random_inputs
from emulated_card import CARD, emulated_card
from numpy.testing import assert_array_equal

from repo_interp.measures.kernels.joint import jointly
from repo_interp.measures.labels import arrays
from repo_interp.runtime.memory import working_memory

LAYERS = [torch.arange(6.0).view(2, 3) + 10 * layer for layer in range(3)]
AXES = {"product": "layer head token", "sums": "layer"}
SHAPES: list[torch.Size] = []
"""Of what `scaled` was called with."""


@pytest.fixture(autouse=True)
def _no_calls():
    SHAPES.clear()


def scaled(factor, values):
    SHAPES.append(values.shape)
    return {"product": values * factor, "sums": values.sum((1, 2))}


def layers_of(factors, device=None):
    """Arrays of every layer: rows of two of four heads, and a number."""
    of_layer = random_inputs(prompts=1, heads=4, kv_heads=4, tokens=3)
    calls = (
        jointly(scaled, {"values": tensor.to(device)}, [factor])
        for tensor, factor in zip(LAYERS, factors, strict=True)
    )
    return [
        arrays(of_layer, {name: (axes, call[name]) for name, axes in AXES.items()})
        for call in calls
    ]


def assert_right(layers, factors):
    for made, tensor, factor in zip(layers, LAYERS, factors, strict=False):
        product = (tensor * factor).repeat_interleave(2, 0).numpy()
        assert_array_equal(made.values["product"][1], product[None])
        assert_array_equal(made.values["sums"][1], [tensor.sum().item()])


def test_a_processor_computes_at_once():
    made = layers_of([2.0, 2.0, 3.0])
    assert SHAPES == [(1, 2, 3)] * 3
    assert_right(made, [2.0, 2.0, 3.0])


def test_an_accelerator_computes_layers_together_once_one_is_read():
    with emulated_card():
        made = layers_of([2.0, 2.0, 2.0], CARD)
        assert SHAPES == []
        assert_right(made, [2.0, 2.0, 2.0])
    assert SHAPES == [(3, 2, 3)]


def test_layers_that_do_not_share_are_computed_apart_and_unread_ones_never():
    with emulated_card():
        some, other = (torch.tensor(factor, device=CARD) for factor in (2.0, 3.0))
        made = layers_of([some, other, some], CARD)[:2]
        gc.collect()
        assert_right(made, [2.0, 3.0])
    assert SHAPES == [(1, 2, 3)] * 2


def test_as_many_layers_as_fit_are_computed_together():
    with emulated_card(), working_memory(2 * 32 * LAYERS[0].nbytes):
        assert_right(layers_of([2.0] * 3, CARD), [2.0] * 3)
    assert SHAPES == [(2, 2, 3), (1, 2, 3)]


def test_derivatives_are_left_out():
    of_layer = jointly(scaled, {"values": LAYERS[0].clone().requires_grad_()}, [2.0])
    assert_array_equal(of_layer["sums"], 15.0)
