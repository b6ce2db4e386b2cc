"""Rotation of a layer: stated by its configuration, and computed by its module.

    error(l, h, r, delta) = | angle(q_r, R q_r at position delta) - theta_r delta |
                            mod 2 pi, in radians, of layer l, head h, pair r

Attention modules are called with the tables of the model's rotary module for the positions delta.
The angle is computed in float64 from passes in float32. The expected values are

    theta_r      transformers' rope functions, from the configuration; 1 / theta^(2r/d) in
                 float64 for the default kind
    length       |R q_r| / |q_r| = attention_scaling (YaRN's factor)
    no rotation  in layers for which the configuration states none
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from repo_interp.checkpoint_files.architectures import native_layout
from repo_interp.models.attention_modules import attention_modules
from repo_interp.models.decoder import as_decoder
from repo_interp.models.identity_tables import identity_tables
from repo_interp.models.rotation import Source, rotaries, source_of
from repo_interp.models.rotation_probe import find_pairs, length_factor, replica, run_replica

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Radians: a larger error is a finding."""
ROUNDING = 2.0**-22
"""Relative error of the angle theta delta in float32, whatever the precision of the tables.
"""


@dataclass(frozen=True)
class StatedRotation:
    """Rotation of a layer as its configuration states it."""

    frequencies: Tensor
    """Frequencies of the pairs that turn, float64; empty if the layer does not rotate."""
    length: float


@dataclass(frozen=True)
class MeasuredRotation:
    """Rotation of a layer as its module computes it."""

    pairs: tuple[tuple[int, int], ...]
    """First and second entries, fastest first."""
    angles: Tensor
    """[head, pair, distance], radians, mod 2 pi."""
    lengths: Tensor
    """[head, pair, distance], length of the turned over that of the plain pair."""


@dataclass(frozen=True)
class LayerRotation:
    """Both rotations of a layer, and their difference."""

    stated: StatedRotation
    measured: MeasuredRotation
    errors: Tensor
    """[head, pair, distance]; a pair that one side lacks counts as not turning."""
    wrong: Tensor
    """Errors beyond the tolerance and the rounding of an angle in float32."""


def tested_distances(longest: int) -> list[int]:
    """Return the distances at which rotation is measured.

    Args:
        longest: The last distance, in tokens.

    Returns:
        Powers of two with their neighbours from 1 to `longest`, and `longest`.
    """
    powers = [1 << exponent for exponent in range(longest.bit_length())]
    return sorted(
        {near for power in powers for near in (power - 1, power, power + 1) if 1 <= near <= longest}
        | {longest}
    )


def rotating_modules(model: Any) -> dict[int, tuple[Any, Source | None]]:
    """Find the attention modules of a model.

    Args:
        model: Model of Hugging Face.

    Returns:
        By layer, the module, and the source of its tables.
    """
    stack = as_decoder(model).stack
    several = [*rotaries(stack)]
    return {
        stock.layer_idx: (stock, source_of(several, stock, model.config))
        for stock in attention_modules(stack)
    }


def stated_rotation(model: Any, stock: Any, source: Source | None, length: int) -> StatedRotation:
    """Return the rotation of a layer by the configuration.

    Args:
        model: Model of Hugging Face.
        stock: Attention module.
        source: Source of the module's tables.
        length: Number of tokens of the pass.

    Returns:
        The rotation.
    """
    # Granite keeps a configuration for every base of its rotary modules.
    config, layer = model.config if source is None else source.config, stock.layer_idx
    parameters = getattr(config, "rope_parameters", None) or {}
    if native_layout(config)[layer] != "rope" or not parameters:
        return StatedRotation(torch.empty(0, dtype=torch.float64), 1.0)
    # Families with two kinds of layers state parameters by kind.
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds and isinstance(parameters.get(kinds[layer]), dict) else None
    of_layer = parameters[kind] if kind is not None else parameters
    width = (
        getattr(stock, "head_dim", None)
        or getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    rotated = getattr(config, "qk_rope_head_dim", None) or int(
        width * (of_layer.get("partial_rotary_factor") or 1.0)
    )
    name = of_layer.get("rope_type", "default")
    # transformers computes the default kind in float32, which errs at long distances.
    if name == "default":
        exponents = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
        return StatedRotation(float(of_layer["rope_theta"]) ** -exponents, 1.0)
    frequencies, factor = ROPE_INIT_FUNCTIONS[name](
        config, torch.device("cpu"), seq_len=length, layer_type=kind
    )
    factor = (
        float(factor) if source is None else length_factor(replica(stock), source, float(factor))
    )
    return StatedRotation(frequencies.double(), factor)


def measured_rotation(
    stock: Any, source: Source | None, deltas: Sequence[int], dtype: torch.dtype
) -> MeasuredRotation:
    """Measure the angles by which an attention module turns pairs, with the tables of the model.

    Args:
        stock: Attention module.
        source: Source of the module's tables; None: the module has none.
        deltas: Distances, in tokens.
        dtype: Precision of the tables.

    Returns:
        The rotation.
    """
    still = torch.empty(1, 0, len(deltas))
    if source is None:
        return MeasuredRotation((), still, still)
    # A replica computes in float32 whatever the precision of the model.
    copied = replica(stock)
    # Angles do not depend on the hidden states; the seed makes findings repeat.
    hidden = torch.randn(
        1, len(deltas), stock.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    device = next(source.rotary.buffers()).device
    with torch.no_grad():
        # Only the dtype of the hidden states matters: tables are rounded to it, as in a pass.
        tables = source.tables(hidden.to(device, dtype), torch.tensor([deltas], device=device))
    tables = (
        tables.cpu()
        if isinstance(tables, Tensor)
        else tuple(table.cpu().float() for table in tables)
    )
    # Pairs are measured, so pairs that a conversion permuted are compared correctly.
    pairs = find_pairs(copied, tables)
    if not pairs:
        return MeasuredRotation((), still, still)
    plain, turned = (run_replica(copied, hidden, by)[0] for by in (identity_tables(tables), tables))
    first, second = (
        torch.tensor([pair[place] for pair in pairs], dtype=torch.long) for place in (0, 1)
    )
    x, y = (
        (queries[0].double()[..., first], queries[0].double()[..., second])
        for queries in (plain, turned)
    )
    # The angle between plain and turned pair, from cross and dot product.
    angles = torch.atan2(x[0] * y[1] - x[1] * y[0], x[0] * y[0] + x[1] * y[1])
    # [head, distance, pair] up to here.
    lengths = ((y[0] ** 2 + y[1] ** 2) / (x[0] ** 2 + x[1] ** 2).clamp_min(1e-12)).sqrt()
    return MeasuredRotation(tuple(pairs), angles.transpose(1, 2), lengths.transpose(1, 2))


def compare_rotations(
    stated: StatedRotation,
    measured: MeasuredRotation,
    deltas: Sequence[int],
    tolerance: float,
) -> LayerRotation:
    """Return both rotations of a layer with their errors.

    Args:
        stated: Rotation of the configuration.
        measured: Rotation of the module, or of a file.
        deltas: Distances, in tokens.
        tolerance: Tolerance in radians.

    Returns:
        Errors by head, pair and distance.
    """
    # Sides with fewer pairs are padded by pairs that do not turn.
    known, turning = len(stated.frequencies), len(measured.pairs)
    count = max(known, turning)
    frequencies = nn.functional.pad(stated.frequencies, (0, count - known))
    wanted = frequencies[:, None] * torch.tensor(deltas, dtype=torch.float64)
    found = nn.functional.pad(measured.angles, (0, 0, 0, count - turning))
    errors = angle_between(found, wanted)
    return LayerRotation(stated, measured, errors, errors > tolerance + ROUNDING * wanted)


def angle_between(angles: Tensor, others: Tensor) -> Tensor:
    """Return the distance between angles, mod 2 pi.

    Args:
        angles: Radians.
        others: Radians.

    Returns:
        From 0 to pi.
    """
    # Shifted by pi before and after, so that angles on both sides of +-pi are near each other.
    return torch.remainder(angles - others + math.pi, 2 * math.pi).sub(math.pi).abs()


def first_distance(wrong: Tensor, deltas: Sequence[int]) -> int:
    """Return the first distance at which a pair is wrong.

    Args:
        wrong: [pair, distance].
        deltas: Distances, in tokens.

    Returns:
        The distance.
    """
    return deltas[int(wrong.any(0).nonzero()[0])]


def pair_numbers(wrong: Tensor) -> tuple[int, ...]:
    """Return the pairs that are wrong at some distance.

    Args:
        wrong: [pair, distance].

    Returns:
        Their numbers.
    """
    return tuple(wrong.any(1).nonzero().flatten().tolist())
