"""Find the token and the position of every key of a cache.

    position(l, h, s) = argmax_p Re sum_r x_r conj(k_r) exp(-i theta_r p)
                        of layer l, key-value head h, slot s: x the cached key, k the key of its
                        token before rotation, r a pair of entries

Prompts with images have three positions per token (mRoPE); `axis_readings` reads their keys by
axis. Keys of a first layer depend on the token alone, so its tokens and positions are exact. In
deeper layers k comes from a dense pass over all tokens, and the position of a slot remains unknown
if the key was computed in another context. Values are not compared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from repo_interp.errors import InputError, quoted
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.load import open_model
from repo_interp.models.precision import float32_by_default
from repo_interp.models.reposition import observable
from repo_interp.plugins.verify_axes.axes import AXES
from repo_interp.plugins.verify_cache.alignment import match_tokens
from repo_interp.plugins.verify_cache.axis_readings import (
    AxisReading,
    read_by_axis,
    verdicts_by_axis,
)
from repo_interp.plugins.verify_cache.cache_faults import CacheFault, faults_of
from repo_interp.plugins.verify_cache.cache_readings import Reading, read_cache
from repo_interp.plugins.verify_cache.cached_keys import read_keys
from repo_interp.plugins.verify_cache.pieces import Piece
from repo_interp.plugins.verify_cache.reference_keys import (
    ReferenceKeys,
    keys_of_vocabulary,
    reference_keys,
    reference_keys_apart,
)
from repo_interp.values import format_ranges

_LONG_NAMES = {
    "position": "position at which the key stands",
    "wanted": "position in a dense pass",
    "agreement": "agreement of phases with that position",
    "token": "number of the token whose key it is, -1: none",
}


@float32_by_default()
def verify_cache(model: Any, tokens: Any, cache: Any) -> xr.DataTree:
    """Find the position of every key of a cache, and compare it with a dense pass of the tokens.

        audited = ri.verify_cache(model, tokens, model(tokens, use_cache=True).past_key_values)

    Args:
        model: Model of Hugging Face or bridge, also wrapped; or the path of a checkpoint.
        tokens: Token ids [token] or [1, token] of one prompt, without padding; or a `Prompt`, whose
            `position_ids` may be [time, height, width] of every token, for prompts with images.
        cache: `past_key_values` of a model's output; or a .npz file, see `read_keys`.

    Returns:
        `position`, `wanted` and `agreement [layer, head, slot]`, `token [layer, slot]`. The attribute
        `verdict` is a few words; `findings` has one line per fault, and `cannot_tell` one line per
        layer with unknown positions, with the reason; `order` is the order of the entries of keys.
        With positions by axis, `position` and `wanted` have a last dimension `axis` (time, height,
        width), there is no `agreement`, and `verdict_by_axis` has a verdict for each axis.

    Raises:
        InputError: The cache belongs to another model or other tokens, or cannot be read.
    """
    opened = open_model(model) if isinstance(model, str | os.PathLike) else model
    decoder = as_decoder(observable(opened))
    ids, by_axis = _token_ids(tokens, decoder), _positions_by_axis(tokens)
    cached = read_keys(cache)
    with torch.no_grad():
        references = reference_keys(decoder, ids, by_axis)
        _require_shapes(cached, references)
        if by_axis is not None:

            def needed(reference: ReferenceKeys) -> int:
                return _needed(reference, len(ids))

            found = read_by_axis(cached, references, by_axis, needed, decoder.dtype)
            _require_tokens(decoder, found[0], cached, references)
            return _tree_by_axis(decoder, found)

        def apart(pieces: Sequence[Piece]) -> dict[int, ReferenceKeys]:
            some = [piece.tokens for piece in pieces]
            return reference_keys_apart(decoder, ids, references, some)

        readings = read_cache(cached, references, apart, decoder.dtype)
        _require_tokens(decoder, readings[0], cached, references)
    return _tree(decoder, len(ids), readings, references)


def _token_ids(tokens: Any, decoder: Decoder) -> Tensor:
    numbers = getattr(tokens, "tokens", tokens)
    try:
        ids = torch.as_tensor(numbers)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(
            f"tokens are {quoted(numbers)}; wanted the token ids [token] of one prompt"
        )
    most = decoder.vocabulary_size
    if not 0 <= int(ids.min()) <= int(ids.max()) < most:
        raise InputError(f"tokens are {int(ids.min())} to {int(ids.max())}; wanted 0 to {most - 1}")
    return ids.long().cpu()


def _positions_by_axis(tokens: Any) -> Tensor | None:
    """Positions [axis, token] of a prompt with an image; None for one position per token."""
    position_ids = getattr(tokens, "position_ids", None)
    if position_ids is None or list(position_ids) == list(range(len(position_ids))):
        return None
    ids = torch.tensor(position_ids)
    if ids.ndim != 2:
        raise InputError(
            "the prompt has position ids of its own, one per token; give its tokens alone, or "
            "[time, height, width] of every token"
        )
    return ids.T


def _needed(reference: ReferenceKeys, tokens: int) -> int:
    """Return the first token that tokens after the prompt see, by the window of the layer."""
    return 0 if reference.window is None else max(0, tokens - reference.window + 1)


def _require_shapes(cached: Mapping[int, Tensor], references: Mapping[int, ReferenceKeys]) -> None:
    for layer, keys in cached.items():
        if layer not in references:
            raise InputError(
                f"the cache has keys of layer {layer}; the model's layers with attention are "
                f"{format_ranges(list(references))}: it is the cache of another model"
            )
        heads, width = keys.shape[0], keys.shape[-1]
        attention = references[layer].attention
        if heads != attention.kv_heads or width < attention.d_head:
            raise InputError(
                f"keys of layer {layer} are {heads} heads of {width} numbers, and the model's "
                f"{attention.kv_heads} of {attention.d_head}: it is the cache of another model, or "
                "stores other data than keys"
            )


def _require_tokens(
    decoder: Decoder,
    first: Reading | AxisReading,
    cached: Mapping[int, Tensor],
    references: Mapping[int, ReferenceKeys],
) -> None:
    """Raise InputError if most keys of the first layer belong to none of the tokens."""
    known = float((first.tokens >= 0).mean()) if len(first.tokens) else 1.0
    if known > 0.5:
        return
    layer = first.layer
    keys = references[layer].split(cached[layer])[0].double()
    others = keys_of_vocabulary(decoder, layer)
    width = others.shape[-1]

    def lengths(vectors: Tensor) -> Tensor:
        stock = references[layer].orders()[0]
        halves = vectors[..., stock] if vectors is keys else vectors
        return torch.hypot(*halves.split(width // 2, -1)).transpose(0, 1).flatten(1)

    distance = match_tokens(lengths(keys), lengths(others), 0.0).distance.median()
    of_other = "tokens; give those that it was made of" if distance < 0.05 else "model, or tokens"
    raise InputError(
        f"{known:.0%} of the cached keys of layer {layer} are those of a given token: it is the "
        f"cache of other {of_other}"
    )


def _tree(
    decoder: Decoder,
    tokens: int,
    readings: Sequence[Reading],
    references: Mapping[int, ReferenceKeys],
) -> xr.DataTree:
    heads = max(len(reading.positions) for reading in readings)
    slots = max(len(reading.tokens) for reading in readings)
    shape = (len(readings), heads, slots)
    by_head = {name: np.full(shape, np.nan) for name in ("position", "wanted", "agreement")}
    token = np.full((len(readings), slots), -1)
    faults: dict[CacheFault, list[int]] = {}
    unread: dict[str, list[int]] = {}
    firsts: dict[int, Reading] = {}
    for row, reading in enumerate(readings):
        here = np.s_[row, : len(reading.positions), : len(reading.tokens)]
        by_head["position"][here], by_head["wanted"][here] = reading.positions, reading.wanted
        if reading.phases is not None:
            at = torch.as_tensor(reading.positions)[..., None]
            by_head["agreement"][here] = reading.phases.agreement(at)[..., 0]
        token[row, : len(reading.tokens)] = reading.tokens
        needed = _needed(references[reading.layer], tokens)
        first = firsts.setdefault(len(reading.tokens), reading)
        for fault in faults_of(reading, first, needed):
            faults.setdefault(fault, []).append(reading.layer)
        if reason := reading.unread or _unclear(reading):
            unread.setdefault(reason, []).append(reading.layer)
    axes = ("layer", "head", "slot")
    variables: dict[str, tuple[tuple[str, ...], np.ndarray]] = {
        name: (axes, values) for name, values in by_head.items()
    }
    variables["token"] = (("layer", "slot"), token)
    coords = {
        "layer": [reading.layer for reading in readings],
        "head": range(heads),
        "slot": range(slots),
    }
    return _dataset(decoder, variables, coords, faults, unread, readings[0].order)


def _tree_by_axis(decoder: Decoder, readings: Sequence[AxisReading]) -> xr.DataTree:
    heads = max(reading.positions.shape[1] for reading in readings)
    slots = max(len(reading.tokens) for reading in readings)
    shape = (len(readings), heads, slots, len(AXES))
    position, wanted = np.full(shape, np.nan), np.full(shape, np.nan)
    token = np.full((len(readings), slots), -1)
    faults: dict[CacheFault, list[int]] = {}
    unread: dict[str, list[int]] = {}
    for row, reading in enumerate(readings):
        _, rows, count = reading.positions.shape
        position[row, :rows, :count] = np.moveaxis(reading.positions, 0, -1)
        wanted[row, :rows, :count] = reading.wanted.T
        token[row, :count] = reading.tokens
        for fault in (*reading.of_tokens, *reading.of_axes):
            faults.setdefault(fault, []).append(reading.layer)
        for reason in reading.unread:
            unread.setdefault(reason, []).append(reading.layer)
    axes = ("layer", "head", "slot", "axis")
    variables = {
        "position": (axes, position),
        "wanted": (axes, wanted),
        "token": (("layer", "slot"), token),
    }
    coords = {
        "layer": [reading.layer for reading in readings],
        "head": range(heads),
        "slot": range(slots),
        "axis": list(AXES),
    }
    tree = _dataset(decoder, variables, coords, faults, unread, readings[0].order)
    is_known = [not np.isnan(position[..., axis]).all() for axis in range(len(AXES))]
    kinds = [fault.kind for fault in faults]
    tree.attrs["verdict_by_axis"] = verdicts_by_axis(kinds, is_known)
    return tree


def _dataset(
    decoder: Decoder,
    variables: Mapping[str, tuple[tuple[str, ...], np.ndarray]],
    coords: Mapping[str, Any],
    faults: Mapping[CacheFault, list[int]],
    unread: Mapping[str, list[int]],
    order: str,
) -> xr.DataTree:
    """Convert readings of either kind to a tree."""
    layers = coords["layer"]
    dataset = xr.Dataset(
        {
            name: (
                dims,
                values,
                {"long_name": _LONG_NAMES[name], "units": "1" if name == "agreement" else "token"},
            )
            for name, (dims, values) in variables.items()
        },
        coords,
        {
            "verdict": ", ".join(dict.fromkeys(fault.kind for fault in faults))
            or ("not told" if np.isnan(variables["position"][1]).all() else "contiguous"),
            "findings": "\n".join(_line(fault, where, layers) for fault, where in faults.items()),
            "cannot_tell": "\n".join(
                f"{_layers(where, layers)}: {reason}" for reason, where in unread.items()
            ),
            "order": order,
            "device": str(decoder.device),
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "not_compared": "values",
        },
    )
    return xr.DataTree(dataset)


def _unclear(reading: Reading) -> str:
    unknown = np.isnan(reading.positions) & ~reading.unexplained & (reading.tokens >= 0)
    if not unknown.any():
        return ""
    return f"{unknown.mean():.0%} of keys are too far from those of a dense pass"


def _line(fault: CacheFault, where: Sequence[int], layers: Sequence[int]) -> str:
    heads = f", head{'s' * (len(fault.heads) > 1)} {format_ranges(fault.heads)}" * bool(fault.heads)
    return f"{fault.kind}: {fault.text} ({_layers(where, layers)}{heads})"


def _layers(where: Sequence[int], layers: Sequence[int]) -> str:
    if len(where) == len(layers):
        return "all layers" if len(layers) > 1 else f"layer {layers[0]}"
    return f"layer{'s' * (len(where) > 1)} {format_ranges(where)}"
