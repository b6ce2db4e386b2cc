"""Compare two models: angles, queries, keys, and products of queries and keys.

The attention modules of both models get the same random hidden states. This finds pairs that a
conversion put into another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.models.rotation import Source
from repo_interp.models.rotation_probe import replica, run_replica
from repo_interp.plugins.verify.layer_rotation import (
    TOLERANCE,
    LayerRotation,
    angle_between,
    first_distance,
    measured_rotation,
    pair_numbers,
    rotating_modules,
)
from repo_interp.plugins.verify.rotation_faults import Findings, RotationFinding
from repo_interp.positions.rotary import expand_heads

CORRELATION = 0.9
"""Correlation of queries, or keys, of two models below which there is a finding. Quantized weights
stay above it.
"""
PRODUCT_TOLERANCE = 0.3
"""Relative difference of products of queries and keys that is a finding.
"""


def differences(
    model: Any,
    other: Any,
    modules: Mapping[int, tuple[Any, Source | None]],
    layers: Mapping[int, LayerRotation],
    deltas: Sequence[int],
    dtype: torch.dtype,
) -> Findings:
    """Find differences of angles, queries, keys, or their products between two models.

    Args:
        model: The first model.
        other: The second model.
        modules: Attention modules of the first model, from `rotating_modules`.
        layers: Rotations of the first model by layer.
        deltas: Distances, in tokens.
        dtype: Precision of the tables.

    Returns:
        Faults by layer.

    Raises:
        InputError: The models differ in family or layers.
    """
    others = rotating_modules(other)
    if others.keys() != modules.keys() or other.config.model_type != model.config.model_type:
        raise InputError(
            "two models of one family with as many layers were wanted; got a "
            f"{model.config.model_type} of {len(modules)} layers and a "
            f"{other.config.model_type} of {len(others)}"
        )

    def of_layer(number: int) -> Iterator[RotationFinding]:
        mine, theirs = layers[number].measured, measured_rotation(*others[number], deltas, dtype)
        if mine.angles.shape != theirs.angles.shape:
            expected = f"{len(mine.pairs)} pairs that turn, as in the first model"
            yield RotationFinding((), expected, f"{len(theirs.pairs)}", deltas[0])
            return
        error = angle_between(mine.angles, theirs.angles)
        off = (error > TOLERANCE[dtype]).any(0)
        turned_otherwise = bool(off.any())
        if turned_otherwise:
            by = f"{float(error.max()):.2g} rad off"
            yield RotationFinding(
                pair_numbers(off), "the angles of the first model", by, first_distance(off, deltas)
            )
        first, second = _of_weights(*modules[number]), _of_weights(*others[number])
        # Products are compared only where angles and both factors agree.
        texts = {name: _difference(first[name], second[name]) for name in ("queries", "keys")}
        if not any(texts.values()) and not turned_otherwise:
            difference = float(
                (first["products"] - second["products"]).norm()
                / first["products"].norm().clamp_min(1e-12)
            )
            texts["products of queries and keys"] = (
                f"{difference:.0%} of them off" if difference > PRODUCT_TOLERANCE else ""
            )
        for name, text in texts.items():
            if text:
                yield RotationFinding((), f"the {name} of the first model", text, deltas[0])

    return {number: of_layer(number) for number in modules}


def _of_weights(stock: Any, source: Source | None) -> dict[str, Tensor]:
    """Unrotated queries and keys [head, token, d_head], and products of rotated ones."""
    hidden, copied = (
        torch.randn(1, 8, stock.config.hidden_size, generator=torch.Generator().manual_seed(1)),
        replica(stock, True),
    )
    index = torch.arange(8)[None]
    # At position 0 nothing turns.
    tables = [
        None if source is None else source.tables(hidden, places)
        for places in (torch.zeros_like(index), index)
    ]
    still, turned = (
        [vectors[0].double() for vectors in run_replica(copied, hidden, by)[:2]] for by in tables
    )
    products = turned[0] @ expand_heads(turned[1][None], len(turned[0]))[0].mT
    return {"queries": still[0], "keys": still[1], "products": products}


def _difference(mine: Tensor, theirs: Tensor) -> str:
    """Describe the difference of two modules' queries, or keys; empty if they agree."""
    if mine.shape != theirs.shape:
        return f"{list(theirs.shape)} instead of {list(mine.shape)}"
    if torch.equal(mine, theirs) or _agreement(mine, theirs) > CORRELATION:
        return ""
    # The usual fault of a conversion: interleaved pairs instead of halves, or the reverse.
    half = mine.shape[-1] // 2
    interleaved = torch.arange(2 * half).view(2, half).T.flatten()
    for order, text in (
        (interleaved, "interleaved pairs instead of halves"),
        (interleaved.argsort(), "halves instead of interleaved pairs"),
    ):
        if _agreement(mine[..., order], theirs) > CORRELATION:
            return text
    return f"a correlation of {_agreement(mine, theirs):.2f} with them"


def _agreement(one: Tensor, other: Tensor) -> float:
    # Means of random inputs are near 0, so the cosine is a correlation.
    return float(nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))
