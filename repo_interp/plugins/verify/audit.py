"""Audit of rotation: the angle by which pairs turn with distance, against the stated one.

    error(l, h, r, delta) = | angle(q_r, R q_r at position delta) - theta_r delta |
                            mod 2 pi, in radians, of layer l, head h, pair r

A model that does not rotate as its configuration says gives plausible short texts, and fails at
long ones. So the angle is measured on the attention modules themselves, called with the tables that
the model's rotary module makes for the positions delta: powers of two and their neighbours, to the
longest length. The angle is computed in float64 from passes in float32 (or in `dtype`). Expected
are

    theta_r      transformers' rope functions, from the configuration; 1 / theta^(2r/d) in
                 float64 for the default kind
    pairs        those of a module of the same class, built anew
    length       |R q_r| / |q_r| = attention_scaling (YaRN's factor)
    no rotation  where the configuration says that a layer has none

Frequencies that depend on the length of a pass (dynamic NTK, longrope) are those of a pass that is
one token longer than the longest distance.

A second model is compared by its angles, and by the queries, the keys and the products of both that
its weights make of the same hidden states: pairs that a conversion put into another order are found
there. `UNSEEN` names the parts that are not compared. Knows no scheme of ours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from repo_interp.checkpoint_files.architectures import native_layout, training_length
from repo_interp.errors import InputError, quoted, warn
from repo_interp.files import path_of
from repo_interp.models.attention_modules import attention_modules
from repo_interp.models.checkpoints import load_model, open_checkpoint
from repo_interp.models.decoder import as_decoder
from repo_interp.models.identity_tables import identity_tables
from repo_interp.models.lasting import require_weights
from repo_interp.models.precision import float32_by_default
from repo_interp.models.rotation import (
    Source,
    find_pairs,
    length_factor,
    replica,
    rotaries,
    run_replica,
    source_of,
)
from repo_interp.models.wrapped import model_of
from repo_interp.plugins.verify.dumped_tables import SUFFIXES, read_tables
from repo_interp.positions.layouts import LEARNED
from repo_interp.positions.rotary import expand_heads
from repo_interp.values import format_ranges

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Radians: a larger error is a finding."""
ROUNDING = 2.0**-22
"""Of an angle that is computed in float32: theta delta has this relative error, whatever the tables
are stored in.
"""
LENGTH_TOLERANCE = 1e-2
"""Relative error of the length of a turned pair that is a finding."""
CORRELATION = 0.9
"""Between queries, or keys, of two models: less is a finding; quantized weights may give more.

"""
PRODUCT_TOLERANCE = 0.3
"""Relative error of the products of queries and keys of two models that is a finding, by the same
measure.
"""
UNSEEN = (
    "values, what attention writes, feed-forward parts, norms between layers, embeddings and masks"
)
"""Parts that no audit compares."""


@dataclass(frozen=True)
class Finding:
    """One fault, in some pairs (none named: in all), from a distance on."""

    pairs: tuple[int, ...]
    expected: str
    measured: str
    first_distance: int

    def line(self, layers: Sequence[int]) -> str:
        """Describe the fault.

        Args:
            layers: Layers in which it was found.

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


Findings = Mapping[int, Iterable[Finding]]
"""Faults by layer."""


@dataclass(frozen=True)
class _StatedRotation:
    """Rotation of a layer as its configuration states it."""

    frequencies: Tensor
    """float64, of the pairs that turn; empty where the layer does not rotate."""
    length: float


@dataclass(frozen=True)
class _MeasuredRotation:
    """Rotation of a layer as its module computes it."""

    pairs: tuple[tuple[int, int], ...]
    """First and second entries, fastest first."""
    angles: Tensor
    """[head, pair, distance], radians, mod 2 pi."""
    lengths: Tensor
    """[head, pair, distance], turned over plain."""


@dataclass(frozen=True)
class _Layer:
    """Both rotations of a layer, and how far they are apart."""

    stated: _StatedRotation
    measured: _MeasuredRotation
    errors: Tensor
    """[head, pair, distance]; a pair that one side lacks counts as still."""
    wrong: Tensor
    """Errors beyond the tolerance and the rounding of an angle in float32."""


def distances(longest: int) -> list[int]:
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


def audit(
    model: Any, other: Any = None, dtype: torch.dtype = torch.float32, longest: int | None = None
) -> xr.Dataset:
    """Compare the rotation of a stock model with its configuration, and with another model.

    Args:
        model: Model of Hugging Face, on any device.
        other: A second model of the same family; None: the first alone is audited.
        dtype: Precision of the hidden states that the rotary module makes tables for.
        longest: The last distance, in tokens; None: twice the training length.

    Returns:
        `error [layer, component, distance]` (largest of the heads, radians); `largest_error` and
        `first_distance [layer, head, component]` (-1 where the error stays below the tolerance);
        `frequency [layer, component]`. The attribute `findings` has one line for every fault;
        `not_compared` names the parts that were not compared.

    Raises:
        InputError: `longest` is out of range, the model has no observable attention, or the models
            differ in family or layers.
    """
    config = model.config
    longest = 2 * training_length(config) if longest is None else longest
    # Tables are made from positions in float32, which holds whole numbers exactly up to 2^24.
    if not isinstance(longest, int) or not 1 <= longest <= 1 << 24:
        raise InputError(
            f"the longest distance is {quoted(longest)}; wanted a whole number from 1 to {1 << 24}"
        )
    deltas = distances(longest)
    modules = _modules(model)
    if not modules:
        raise InputError(
            f"this {config.model_type} has no attention module whose rotation could be measured"
        )
    layers = {
        layer: _compare(
            _stated_rotation(model, stock, source, longest + 1),
            _measure(stock, source, deltas, dtype),
            deltas,
            TOLERANCE[dtype],
        )
        for layer, (stock, source) in modules.items()
    }
    found = [_faults(layers, deltas), _exchanged_pairs(config, layers, deltas)]
    if other is not None:
        found.append(_differences(model, other, modules, layers, deltas, dtype))
    unseen = UNSEEN if other is not None else f"keys, queries before rotation, {UNSEEN}"
    return _table(model, layers, deltas, dtype, unseen, found)


def audit_tables(model: Any, path: Path) -> xr.Dataset:
    """Compare the rotation that another runtime wrote into a file with a model's configuration.

    Args:
        model: Model of Hugging Face, on any device.
        path: File of tables or vectors, see `dumped_tables`.

    Returns:
        As `audit`, at the positions of the file, for every layer that rotates.

    Raises:
        InputError: The file cannot be read, or has positions up to 0 alone.
    """
    angles, lengths, positions, dtype = read_tables(path)
    # Ascending, as `_first` wants; of a position that occurs twice the first one is read.
    deltas, places = np.unique(positions.numpy(), return_index=True)
    deltas, places = deltas[deltas > 0].tolist(), places[deltas > 0]
    if not deltas:
        raise InputError(f"{path} holds position 0 alone, where nothing turns")
    allowed = TOLERANCE.get(dtype, 1e-3)
    still = (angles[:, places].abs() < allowed).all(1)

    def seen(wanted: _StatedRotation) -> _MeasuredRotation:
        # pairs that stay still and that nobody expects to turn, as in a partial rotation
        spare = bool(still[len(wanted.frequencies) :].all())
        some = slice(len(wanted.frequencies) if spare else None)
        # A table does not say which entries of a head a pair consists of.
        pairs = tuple((pair, pair) for pair in range(len(angles[some])))
        return _MeasuredRotation(pairs, angles[None, some, places], lengths[None, some, places])

    stated = {
        layer: _stated_rotation(model, stock, source, deltas[-1] + 1)
        for layer, (stock, source) in _modules(model).items()
    }
    layers = {
        layer: _compare(wanted, seen(wanted), deltas, allowed)
        for layer, wanted in stated.items()
        if len(wanted.frequencies)
    }
    if not layers:
        raise InputError(f"no layer of this {model.config.model_type} rotates")
    unseen = f"order of pairs in a head, {UNSEEN}"
    return _table(model, layers, deltas, dtype, unseen, [_faults(layers, deltas)])


def _modules(model: Any) -> dict[int, tuple[Any, Source | None]]:
    """By layer, the attention module, and where its tables come from."""
    stack = as_decoder(model).stack
    several = [*rotaries(stack)]
    return {
        stock.layer_idx: (stock, source_of(several, stock, model.config))
        for stock in attention_modules(stack)
    }


def _stated_rotation(model: Any, stock: Any, source: Source | None, length: int) -> _StatedRotation:
    """Rotation of a pass of `length` tokens by the configuration."""
    # Granite keeps a configuration for every base of its rotary modules.
    config, layer = model.config if source is None else source.config, stock.layer_idx
    parameters = getattr(config, "rope_parameters", None) or {}
    if native_layout(config)[layer] != "rope" or not parameters:
        return _StatedRotation(torch.empty(0, dtype=torch.float64), 1.0)
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
        return _StatedRotation(float(of_layer["rope_theta"]) ** -exponents, 1.0)
    frequencies, factor = ROPE_INIT_FUNCTIONS[name](
        config, torch.device("cpu"), seq_len=length, layer_type=kind
    )
    factor = (
        float(factor) if source is None else length_factor(replica(stock), source, float(factor))
    )
    return _StatedRotation(frequencies.double(), factor)


def _measure(
    stock: Any, source: Source | None, deltas: Sequence[int], dtype: torch.dtype
) -> _MeasuredRotation:
    """Angles by which an attention module turns at `deltas`, with the tables of the model."""
    still = torch.empty(1, 0, len(deltas))
    if source is None:
        return _MeasuredRotation((), still, still)
    # A replica computes in float32 whatever the precision of the model.
    copied = replica(stock)
    # Angles do not depend on the hidden states; the seed makes findings repeat.
    hidden = torch.randn(
        1, len(deltas), stock.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    device = next(source.rotary.buffers()).device
    with torch.no_grad():
        # The hidden states give only their dtype: tables are rounded to it, as in a pass.
        tables = source.tables(hidden.to(device, dtype), torch.tensor([deltas], device=device))
    tables = (
        tables.cpu()
        if isinstance(tables, Tensor)
        else tuple(table.cpu().float() for table in tables)
    )
    # Pairs are measured, so those that a conversion permuted are compared rightly.
    pairs = find_pairs(copied, tables)
    if not pairs:
        return _MeasuredRotation((), still, still)
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
    return _MeasuredRotation(tuple(pairs), angles.transpose(1, 2), lengths.transpose(1, 2))


def _compare(
    stated: _StatedRotation,
    measured: _MeasuredRotation,
    deltas: Sequence[int],
    tolerance: float,
) -> _Layer:
    # Sides with fewer pairs are padded by pairs that do not turn.
    known, turning = len(stated.frequencies), len(measured.pairs)
    count = max(known, turning)
    frequencies = nn.functional.pad(stated.frequencies, (0, count - known))
    wanted = frequencies[:, None] * torch.tensor(deltas, dtype=torch.float64)
    found = nn.functional.pad(measured.angles, (0, 0, 0, count - turning))
    errors = _between(found, wanted)
    return _Layer(stated, measured, errors, errors > tolerance + ROUNDING * wanted)


def _between(angles: Tensor, others: Tensor) -> Tensor:
    """How far angles are apart, mod 2 pi."""
    # Shifted by pi before and after, so that angles on both sides of +-pi are near each other.
    return torch.remainder(angles - others + math.pi, 2 * math.pi).sub(math.pi).abs()


def _first(wrong: Tensor, deltas: Sequence[int]) -> int:
    """The first distance at which a pair is `wrong` [pair, distance]."""
    return deltas[int(wrong.any(0).nonzero()[0])]


def _numbers(wrong: Tensor) -> tuple[int, ...]:
    """The pairs that are `wrong` [pair, distance] at some distance."""
    return tuple(wrong.any(1).nonzero().flatten().tolist())


def _faults(layers: Mapping[int, _Layer], deltas: Sequence[int]) -> Findings:
    """Where layers turn otherwise than their configuration says."""
    return {number: _faults_of(layer, deltas) for number, layer in layers.items()}


def _faults_of(layer: _Layer, deltas: Sequence[int]) -> Iterator[Finding]:
    stated, measured, off = layer.stated, layer.measured, layer.wrong.any(0)
    to_turn, turning = len(stated.frequencies), len(measured.pairs)
    first = _first(off, deltas) if bool(off.any()) else deltas[0]
    # One finding a layer: a wrong number of pairs makes all errors large.
    if not to_turn and turning:
        expected = "no rotation, as the configuration says"
        yield Finding((), expected, f"{turning} pairs that turn", deltas[0])
    elif to_turn and not turning:
        yield Finding((), f"{to_turn} pairs that turn", "no rotation", deltas[0])
    elif to_turn != turning:
        yield Finding((), f"{to_turn} pairs that turn (partial rotation)", f"{turning}", first)
    elif bool(off.any()):
        # The message shows the pair that is farthest off.
        worst = int(layer.errors.amax((0, 2)).argmax())
        yield Finding(
            _numbers(off),
            f"theta {float(stated.frequencies[worst]):.6g} (pair {worst})",
            f"{float(measured.angles[0, worst, 0]) / deltas[0]:.6g}, "
            f"{float(layer.errors.max()):.2g} rad off",
            first,
        )
    if to_turn and turning:
        length = float(measured.lengths.median())
        if abs(length / stated.length - 1) > LENGTH_TOLERANCE:
            expected = f"queries lengthened by {stated.length:.4g} (attention factor)"
            yield Finding((), expected, f"{length:.4g}", deltas[0])


def _exchanged_pairs(config: Any, layers: Mapping[int, _Layer], deltas: Sequence[int]) -> Findings:
    """Pairs of other entries than those of a module of the same family that is built anew."""
    # Buffers of rotary modules are kept: they hold the frequencies.
    with init_empty_weights(include_buffers=False):
        fresh = AutoModelForCausalLM.from_config(config)
    found = {}
    for number, (stock, source) in _modules(fresh).items():
        seen = layers[number].measured.pairs if number in layers else ()
        if source is None or not seen:
            continue
        with torch.no_grad():
            tables = source.tables(torch.zeros(1, 1, 1), torch.tensor([[1]]))
        wanted = find_pairs(replica(stock), tables)
        # A different number of pairs is a finding of `_faults` already.
        if tuple(wanted) != seen and len(wanted) == len(seen):
            expected = f"entries {_format_pairs(wanted)} as pairs"
            found[number] = [Finding((), expected, _format_pairs(seen), deltas[0])]
    return found


def _differences(
    model: Any,
    other: Any,
    modules: Mapping[int, tuple[Any, Source | None]],
    layers: Mapping[int, _Layer],
    deltas: Sequence[int],
    dtype: torch.dtype,
) -> Findings:
    """Faults of a second model: other angles, queries, keys or products of both."""
    others = _modules(other)
    if others.keys() != modules.keys() or other.config.model_type != model.config.model_type:
        raise InputError(
            "two models of one family with as many layers were wanted; got a "
            f"{model.config.model_type} of {len(modules)} layers and a "
            f"{other.config.model_type} of {len(others)}"
        )

    def of_layer(number: int) -> Iterator[Finding]:
        mine, theirs = layers[number].measured, _measure(*others[number], deltas, dtype)
        if mine.angles.shape != theirs.angles.shape:
            expected = f"{len(mine.pairs)} pairs that turn, as in the first model"
            yield Finding((), expected, f"{len(theirs.pairs)}", deltas[0])
            return
        error = _between(mine.angles, theirs.angles)
        off = (error > TOLERANCE[dtype]).any(0)
        turned_otherwise = bool(off.any())
        if turned_otherwise:
            by = f"{float(error.max()):.2g} rad off"
            yield Finding(_numbers(off), "the angles of the first model", by, _first(off, deltas))
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
                yield Finding((), f"the {name} of the first model", text, deltas[0])

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
    """Describe how two modules' queries, or keys, differ; empty where they agree."""
    if mine.shape != theirs.shape:
        return f"{list(theirs.shape)} instead of {list(mine.shape)}"
    if torch.equal(mine, theirs) or _agreement(mine, theirs) > CORRELATION:
        return ""
    # The usual fault of a conversion: pairs interleaved or split in halves.
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
    # Of random inputs, means are near 0, so the cosine is a correlation.
    return float(nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))


def _by_fault(findings: Findings) -> Iterator[str]:
    """One line for every fault, with all layers that have it."""
    # A fault usually is in every layer; findings are frozen, so equal ones share a key.
    layers: dict[Finding, list[int]] = {}
    for layer, of_layer in findings.items():
        for finding in of_layer:
            layers.setdefault(finding, []).append(layer)
    for finding in sorted(layers, key=lambda finding: repr(astuple(finding))):
        yield finding.line(sorted(layers[finding]))


def _table(
    model: Any,
    layers: Mapping[int, _Layer],
    deltas: Sequence[int],
    dtype: torch.dtype,
    not_compared: str,
    found: Sequence[Findings],
) -> xr.Dataset:
    heads, components = (
        max(1, *(layer.errors.shape[axis] for layer in layers.values())) for axis in (0, 1)
    )
    shape = (len(layers), heads, components)
    largest, first = np.full(shape, np.nan), np.full(shape, -1, dtype=np.int64)
    by_distance = np.full((len(layers), components, len(deltas)), np.nan)
    frequency = np.full((len(layers), components), np.nan)
    for row, layer in enumerate(layers.values()):
        error, off = layer.errors.numpy(), layer.wrong.numpy()
        heads_of, pairs, _ = error.shape
        largest[row, :heads_of, :pairs] = error.max(-1, initial=0.0)
        first[row, :heads_of, :pairs] = np.where(
            off.any(-1), np.asarray(deltas)[off.argmax(-1)], -1
        )
        by_distance[row, :pairs] = error.max(0)
        frequency[row, : len(layer.stated.frequencies)] = layer.stated.frequencies
    by_component, by_head = ("layer", "component"), ("layer", "head", "component")
    variables = {
        "error": (
            (*by_component, "distance"),
            by_distance,
            "error of the angle, largest of the heads",
            "rad",
        ),
        "largest_error": (by_head, largest, "largest error of the angle", "rad"),
        "first_distance": (by_head, first, "first distance with an error", "token"),
        "frequency": (by_component, frequency, "expected frequency", "rad"),
    }
    return xr.Dataset(
        {
            name: (axes, values, {"long_name": long, "units": units})
            for name, (axes, values, long, units) in variables.items()
        },
        coords={
            "layer": list(layers),
            "head": range(heads),
            "component": range(components),
            "distance": list(deltas),
        },
        attrs={
            "not_compared": not_compared,
            "model_type": model.config.model_type,
            "dtype": str(dtype).removeprefix("torch."),
            "longest": deltas[-1],
            "findings": "\n".join(line for findings in found for line in _by_fault(findings)),
        },
    )


def _format_pairs(pairs: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"({first}, {second})" for first, second in pairs[:2]) + (
        ", ..." if len(pairs) > 2 else ""
    )


@float32_by_default()
def verify(
    model: str | os.PathLike[str] | nn.Module,
    other: str | os.PathLike[str] | nn.Module | None = None,
    dtype: str = "float32",
    longest: int | None = None,
) -> xr.Dataset:
    """Compare the rotation of a checkpoint or model with its configuration, and with another one.

    Angles do not depend on weights, so without `other` no weight is read. See `audit`.

    Args:
        model: Model of Hugging Face, path, hub id, name of the zoo or GGUF file.
        other: The same, to compare with; or a file of rotation tables, or of queries before and
            after rotation, that another runtime wrote (.npz, .safetensors, see `dumped_tables`);
            None: no other.
        dtype: Precision of the hidden states that the rotary module makes tables for.
        longest: The last distance, in tokens; None: twice the training length.

    Returns:
        The dataset of `audit`.

    Raises:
        InputError: `dtype` is unknown, or a checkpoint cannot be opened.
    """
    if dtype not in (names := {str(known).removeprefix("torch."): known for known in TOLERANCE}):
        raise InputError(f"dtype {quoted(dtype)} is unknown; wanted one of {', '.join(names)}")
    if isinstance(other, str | os.PathLike) and os.fspath(other).endswith(SUFFIXES):
        return audit_tables(_open(model, weights=False), Path(other))
    opened = _open(model, weights=other is not None)
    return audit(
        opened, None if other is None else _open(other, weights=True), names[dtype], longest
    )


def _open(model: Any, weights: bool) -> Any:
    if isinstance(model, nn.Module):
        owner = model_of(model)
        # those of rotation, which alone matter
        if any(buffer.is_meta for buffer in owner.buffers()):
            require_weights(as_decoder(owner))
        return owner
    checkpoint = open_checkpoint(path_of(model, "a checkpoint or a model"))
    config = checkpoint.config
    others = sorted(
        {
            ours
            for ours, native in zip(checkpoint.layout, native_layout(config), strict=True)
            if ours not in (native, *LEARNED)
        }
    )
    if others:
        warn(
            f"layers of {model} are {', '.join(others)}; audited is how the "
            f"{config.model_type} that it stands on rotates, not these"
        )
    if weights:
        return load_model(model)
    # Angles do not depend on weights.
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config)
