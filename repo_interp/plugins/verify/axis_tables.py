"""Tables of mRoPE by axis: compare a model, or a file, with a new module of the model's family.

    angle(r, s) = theta_r p(axis(r), s)     of pair r, token s: p its position in time, height, width

The positions are those of a text with an image: all axes count, then height and width run over a
grid while time is constant, then all count again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM

from repo_interp.errors import InputError
from repo_interp.models.rotation import Source
from repo_interp.plugins.verify.dumped_tables import one_per_pair
from repo_interp.plugins.verify.layer_rotation import (
    ROUNDING,
    TOLERANCE,
    LayerRotation,
    MeasuredRotation,
    angle_between,
    rotating_modules,
    stated_rotation,
)
from repo_interp.plugins.verify_axes.axes import (
    AXES,
    AxisFault,
    AxisTurns,
    axis_faults,
    positions_by_axis,
    turns_by_axis,
)
from repo_interp.values import format_ranges

_TEXT, _GRID = 4, (5, 7)


def image_positions() -> Int[Tensor, "axis token"]:
    """Return positions of four tokens of text, an image of 5 x 7 tokens, and text again.

    Returns:
        Positions in time, height and width.
    """
    text = torch.arange(_TEXT).expand(len(AXES), -1)
    grid = torch.cartesian_prod(torch.zeros(1).long(), *(torch.arange(size) for size in _GRID)).T
    return torch.cat([text, _TEXT + grid, _TEXT + max(_GRID) + text], 1)


def axis_findings(model: Any, layers: Mapping[int, LayerRotation]) -> dict[int, list[AxisFault]]:
    """Find pairs that turn by another axis than in a new module of the model's family.

    Computes in float32 for any model, since a coarser precision hides the axes of slow pairs.

    Args:
        model: Model of Hugging Face.
        layers: Its rotations by layer.

    Returns:
        Mistakes by layer; none for families without axes.
    """
    modules = {
        layer: source
        for layer, (_, source) in rotating_modules(model).items()
        if source is not None and _has_axes(source)
    }
    fresh = _built_anew(model.config) if modules else {}
    found, positions = {}, image_positions()
    for layer, source in modules.items():
        stated = layers[layer].stated
        angles, lengths = _table(source, positions)
        # `faults` reports a different number of pairs.
        if layer in fresh and len(angles) == len(stated.frequencies):
            axes = axes_of(fresh[layer])
            of_pairs = torch.polar(lengths / stated.length, angles)
            turns = _turns(of_pairs, stated.frequencies, axes, positions, torch.float32)
            found[layer] = list(axis_faults(turns, *positions_by_axis(turns)))
    return found


def file_rotations(
    model: Any, angles: Tensor, lengths: Tensor, positions: Tensor, dtype: torch.dtype
) -> tuple[dict[int, LayerRotation], dict[int, list[AxisFault]], list[str]]:
    """Compare the pairs of a file with the axes of the model's pairs.

    Args:
        model: Model of Hugging Face.
        angles: Angles of the file [pair, token].
        lengths: Lengths of the file [pair, token].
        positions: Positions of the file, in time, height and width.
        dtype: Precision of the file.

    Returns:
        Rotations by layer, with tokens along the axis of distances; mistakes; and axes on which
        neighboring positions cannot be distinguished.

    Raises:
        InputError: The model has one position per token, or the number of pairs differs.
    """
    layers, found, unclear = {}, {}, set()
    for layer, (stock, source) in rotating_modules(model).items():
        if source is None or not _has_axes(source):
            continue
        stated = stated_rotation(model, stock, source, int(positions.max()) + 1)
        count, allowed = len(stated.frequencies), TOLERANCE.get(dtype, 1e-3)
        if not bool(angles.any()):  # columns of a table that never turns seem to repeat others
            angles, lengths = (part[:1].expand(count, -1) for part in (angles, lengths))
        if len(angles) < count or bool((angles[count:].abs() > allowed).any()):
            raise InputError(f"the file has {len(angles)} pairs that turn; the model has {count}")
        axes, pairs = axes_of(source), tuple((pair, pair) for pair in range(count))
        seen = MeasuredRotation(pairs, angles[None, :count], lengths[None, :count])
        wanted = stated.frequencies[:, None] * positions[axes]
        errors = angle_between(seen.angles, wanted)
        wrong = errors > allowed + ROUNDING * wanted
        layers[layer] = LayerRotation(stated, seen, errors, wrong)
        of_pairs = torch.polar(lengths[:count] / stated.length, angles[:count])
        turns = _turns(of_pairs, stated.frequencies, axes, positions, dtype)
        told, lost = positions_by_axis(turns)
        found[layer] = list(axis_faults(turns, told, lost))
        unclear |= {name for name, at in zip(AXES, told.isnan() & ~lost, strict=True) if at.any()}
    if not found:
        raise InputError(
            f"the file has positions by axis, and pairs of this {model.config.model_type} turn by "
            "one position per token; give positions [token]"
        )
    return layers, found, sorted(unclear, key=AXES.index)


def axes_of(source: Source) -> Int[Tensor, "pair"]:
    """Return the axis of positions by which each pair of a rotary module turns.

    Args:
        source: The module.

    Returns:
        Indices in `AXES`, by pair.
    """
    by_axis = [_table(source, one[:, None])[0] for one in torch.eye(3).long()]
    return torch.stack(by_axis)[..., 0].abs().argmax(0)


def lines_by_axis(findings: Mapping[int, list[AxisFault]]) -> Iterator[str]:
    """Describe every mistake once, with all layers that have it.

    Args:
        findings: Mistakes by layer.

    Yields:
        Lines.
    """
    layers: dict[AxisFault, list[int]] = {}
    for layer, faults in findings.items():
        for fault in faults:
            layers.setdefault(fault, []).append(layer)
    for fault, numbers in layers.items():
        where = f"layer{'s' * (len(numbers) > 1)} {format_ranges(numbers)}"
        yield f"{where}: {fault.kind}: {fault.text}"


def _has_axes(source: Source) -> bool:
    return hasattr(source.rotary, "mrope_section")


def _built_anew(config: Any) -> dict[int, Source]:
    # Buffers of rotary modules are kept: they hold the frequencies.
    with init_empty_weights(include_buffers=False):
        fresh = AutoModelForCausalLM.from_config(config)
    found = rotating_modules(fresh).items()
    return {layer: source for layer, (_, source) in found if source is not None}


def _table(
    source: Source, positions: Int[Tensor, "axis token"]
) -> tuple[Float[Tensor, "pair token"], Float[Tensor, "pair token"]]:
    """Angles and lengths of a module's tables."""
    device = next(source.rotary.buffers()).device
    with torch.no_grad():
        cosines, sines = (
            one_per_pair(table[0].double().cpu())
            for table in source.tables(
                torch.zeros(1, 1, 1, device=device), positions[:, None].to(device)
            )
        )
    return torch.atan2(sines, cosines), torch.hypot(cosines, sines)


def _turns(
    of_pairs: Tensor, frequencies: Tensor, axes: Tensor, positions: Tensor, dtype: torch.dtype
) -> AxisTurns:
    """Pairs of a table [pair, token] as one head, with unit vectors as their unrotated pairs."""
    turned, tokens = of_pairs.T[None], torch.arange(positions.shape[1])
    plain = torch.ones_like(turned)
    return turns_by_axis(turned, plain, frequencies, axes, positions, tokens, dtype)
