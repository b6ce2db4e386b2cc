"""Faults of rotation: layers that differ from their configuration, or from a new module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from repo_interp.models.rotation_probe import find_pairs, replica
from repo_interp.plugins.verify.layer_rotation import (
    LayerRotation,
    first_distance,
    pair_numbers,
    rotating_modules,
)
from repo_interp.values import format_ranges

LENGTH_TOLERANCE = 1e-2
"""Relative error of the length of a turned pair that is a finding."""


@dataclass(frozen=True)
class RotationFinding:
    """One fault, in some pairs (empty: in all), from a distance on."""

    pairs: tuple[int, ...]
    expected: str
    measured: str
    first_distance: int

    def line(self, layers: Sequence[int]) -> str:
        """Describe the fault.

        Args:
            layers: Layers with the fault.

        Returns:
            One line: layers, pairs, expected and measured values, first distance.
        """
        pairs = (
            f", pair{'s' if len(self.pairs) > 1 else ''} {format_ranges(self.pairs)}"
            if self.pairs
            else ""
        )
        return (
            f"layer{'s' if len(layers) > 1 else ''} {format_ranges(layers)}{pairs}: expected "
            f"{self.expected}, measured {self.measured}, "
            f"from distance {self.first_distance} on"
        )


Findings = Mapping[int, Iterable[RotationFinding]]
"""Faults by layer."""


def faults(layers: Mapping[int, LayerRotation], deltas: Sequence[int]) -> Findings:
    """Find layers that rotate differently than their configuration says.

    Args:
        layers: Rotations by layer.
        deltas: Distances, in tokens.

    Returns:
        Faults by layer.
    """
    return {number: _faults_of(layer, deltas) for number, layer in layers.items()}


def _faults_of(layer: LayerRotation, deltas: Sequence[int]) -> Iterator[RotationFinding]:
    stated, measured, off = layer.stated, layer.measured, layer.wrong.any(0)
    to_turn, turning = len(stated.frequencies), len(measured.pairs)
    first = first_distance(off, deltas) if bool(off.any()) else deltas[0]
    # One finding per layer: a wrong number of pairs makes all errors large.
    if not to_turn and turning:
        expected = "no rotation, as the configuration says"
        yield RotationFinding((), expected, f"{turning} pairs that turn", deltas[0])
    elif to_turn and not turning:
        yield RotationFinding((), f"{to_turn} pairs that turn", "no rotation", deltas[0])
    elif to_turn != turning:
        yield RotationFinding(
            (), f"{to_turn} pairs that turn (partial rotation)", f"{turning}", first
        )
    elif bool(off.any()):
        # The message shows the pair that is farthest off.
        worst = int(layer.errors.amax((0, 2)).argmax())
        yield RotationFinding(
            pair_numbers(off),
            f"theta {float(stated.frequencies[worst]):.6g} (pair {worst})",
            f"{float(measured.angles[0, worst, 0]) / deltas[0]:.6g}, "
            f"{float(layer.errors.max()):.2g} rad off",
            first,
        )
    if to_turn and turning:
        length = float(measured.lengths.median())
        if abs(length / stated.length - 1) > LENGTH_TOLERANCE:
            expected = f"queries lengthened by {stated.length:.4g} (attention factor)"
            yield RotationFinding((), expected, f"{length:.4g}", deltas[0])


def exchanged_pairs(
    config: Any, layers: Mapping[int, LayerRotation], deltas: Sequence[int]
) -> Findings:
    """Find pairs that consist of other entries than in a new module of the family.

    Args:
        config: Configuration of the model.
        layers: Rotations by layer.
        deltas: Distances, in tokens.

    Returns:
        Faults by layer.
    """
    # Buffers of rotary modules are kept: they hold the frequencies.
    with init_empty_weights(include_buffers=False):
        fresh = AutoModelForCausalLM.from_config(config)
    found = {}
    for number, (stock, source) in rotating_modules(fresh).items():
        seen = layers[number].measured.pairs if number in layers else ()
        if source is None or not seen:
            continue
        with torch.no_grad():
            tables = source.tables(torch.zeros(1, 1, 1), torch.tensor([[1]]))
        wanted = find_pairs(replica(stock), tables)
        # A different number of pairs is a finding of `faults` already.
        if tuple(wanted) != seen and len(wanted) == len(seen):
            expected = f"entries {format_pairs(wanted)} as pairs"
            found[number] = [RotationFinding((), expected, format_pairs(seen), deltas[0])]
    return found


def lines_by_fault(findings: Findings) -> Iterator[str]:
    """Describe every fault once, with all layers that have it.

    Args:
        findings: Faults by layer.

    Yields:
        Lines.
    """
    # A fault usually is in every layer; findings are frozen, so equal ones share a key.
    layers: dict[RotationFinding, list[int]] = {}
    for layer, of_layer in findings.items():
        for finding in of_layer:
            layers.setdefault(finding, []).append(layer)
    for finding in sorted(layers, key=lambda finding: repr(astuple(finding))):
        yield finding.line(sorted(layers[finding]))


def format_pairs(pairs: Sequence[tuple[int, int]]) -> str:
    """Format the first two pairs.

    Args:
        pairs: First and second entries.

    Returns:
        The text, such as "(0, 8), (1, 9), ...".
    """
    return ", ".join(f"({first}, {second})" for first, second in pairs[:2]) + (
        ", ..." if len(pairs) > 2 else ""
    )
