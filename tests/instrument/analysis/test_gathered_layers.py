"""Gathered statistics are those that were given, whatever their kinds and sizes."""

from __future__ import annotations

import numpy as np
import pytest

from repo_interp.analysis.gathered_layers import BLOCK, GatheredLayers
from repo_interp.measures.labels import Arrays
from repo_interp.measures.statistics import Statistics

HEADS = np.arange(3)


def _layer(layer: int, tokens: int = 5) -> Statistics:
    generator = np.random.default_rng(layer)
    values = {
        "share": (("prompt", "layer", "head"), generator.random((2, 1, 3))),
        "turned": (("head", "token"), np.asfortranarray(generator.random((3, tokens)))),
        "strided": (("token",), generator.integers(0, 9, 3 * tokens)[::3]),
        "word": (("head",), np.array(["a", "bcd", ""])),
        "kind": (("head",), np.array([None, (1, 2), "x"], dtype=object)),
        "nothing": (("chunk", "head"), np.zeros((0, 3), np.float32)),
        "whole": ((), np.array(layer, np.int16)),
    }
    labels = {"layer": np.array([layer]), "head": HEADS, "token": np.arange(tokens)}
    sums = {"total": (("layer", "head"), generator.random((1, 3)).astype(np.float32))}
    return Statistics(Arrays(values, labels), Arrays(sums, {"layer": np.array([layer])}))


def _assert_equal(found: Statistics, given: Statistics) -> None:
    for name, expected in given.arrays.items():
        part = found.arrays[name]
        assert part.values.keys() == expected.values.keys()
        assert part.labels.keys() == expected.labels.keys()
        for variable, (axes, values) in expected.values.items():
            assert part.values[variable][0] == axes
            np.testing.assert_array_equal(part.values[variable][1], values, strict=True)
        for axis, labels in expected.labels.items():
            np.testing.assert_array_equal(part.labels[axis], labels, strict=True)


def test_layers_come_back_as_they_were_given() -> None:
    gathered = GatheredLayers()
    layers = [_layer(0), _layer(1), _layer(2, tokens=7), _layer(3)]
    for layer in layers:
        gathered.gather("one", layer)
        gathered.gather("other", Statistics(sums=layer.arrays["sums"]))
    for found, given in zip(gathered.statistics("one"), layers, strict=True):
        _assert_equal(found, given)
    for found, given in zip(gathered.statistics("other"), layers, strict=True):
        _assert_equal(found, Statistics(sums=given.arrays["sums"]))
    assert gathered.statistics("none") == []


def test_a_layer_is_copied() -> None:
    """What a measure does to its arrays later changes no gathered layer."""
    gathered, given = GatheredLayers(), _layer(0)
    gathered.gather("one", given)
    given.arrays["per_prompt"].values["share"][1][...] = -1
    (found,) = gathered.statistics("one")
    _assert_equal(found, _layer(0))


@pytest.mark.parametrize("tokens", [BLOCK // 24 - 8, BLOCK // 8, BLOCK])
def test_layers_larger_than_what_a_block_has_left(tokens: int) -> None:
    gathered = GatheredLayers()
    for layer in range(3):
        gathered.gather("one", _layer(layer, tokens))
    for layer, found in enumerate(gathered.statistics("one")):
        _assert_equal(found, _layer(layer, tokens))
    assert len(gathered.blocks) >= 3
