"""One head on one prompt: its attention pattern, and the parts of one logit.

    logit(i, j) = sum_r pair_r + soft cap + bias                                  exact
                = level + distance(i - j) + query(i) + key(j) + remainder         a fit

pair_r = scale (q_ir k_jr + q_ir' k_jr'), rotated, r' = r + d / 2. The fit is the ridge fit of
`three_axis` over all pairs of the prompt.

The value of a pair at equal positions, scale q_r . k_r without rotation, is the content part;
without rotation (NoPE, additive schemes, the rest of a partial rotation) it is the whole pair. A
fit does not determine the levels of its axes and a common slope (`plugins.three_axis.three_axis`).
Here each axis has mean 0 over the seen pairs, and the key axis has no slope over tokens, so any
growth with the distance is in the distance axis.

This module combines models, prompts and the kernels of measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.analysis.batches import make_batch, texts_of
from repo_interp.analysis.coercion import (
    Prompts,
    as_prompts,
    indexed_prompts,
    require_known_tokens,
)
from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs, select_heads
from repo_interp.measures.kernels.heads import WHOLE_PATTERN
from repo_interp.measures.kernels.logit_sums import logit_sums
from repo_interp.measures.kernels.solvers import Axes
from repo_interp.measures.labels import described_group, with_attrs
from repo_interp.models.capture import decode
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.observing import observing, require_finite
from repo_interp.plugins.three_axis.axis_fit import (
    AdditivePairs,
    additive_pairs,
    fit_axes,
    fit_correlation,
)
from repo_interp.plugins.three_axis.three_axis import ThreeAxis
from repo_interp.positions.logits import cap_logits
from repo_interp.tasks import Prompt
from repo_interp.values import CountOrNone, checked

MOST = 8192
"""Most tokens of a prompt for the pattern of one head (256 MB)."""
MOST_OF_ALL = 2048
"""Most tokens of a prompt for the patterns of all heads (16 MB each)."""
_TEXTS = {
    "logit": ("logit of the query and the key", "logits"),
    "pair": ("part of each rotary pair", "logits"),
    "pair_at_equal_positions": ("the same pair if both tokens had one position", "logits"),
    "frequency": ("frequency of each pair", "rad/position"),
    "angle": ("angle between query and key that their positions make", "rad"),
    "soft_cap": ("what the soft cap changes", "logits"),
    "bias": ("what the scheme adds", "logits"),
    "rounding": ("logit minus the sum of its parts", "logits"),
    "attention": ("attention of the query to the key", "1"),
    "fit": ("parts by the three-axis fit of all logits of the head", "logits"),
}


@torch.no_grad()
def attention_pattern(
    bridge: nn.Module, prompt: Prompts, layer: int, head: int | None = None
) -> xr.DataArray:
    """Return the attention pattern of one head, or of all heads of a layer, over one prompt.

    `ri.plots.attention_pattern` draws the result.

    Args:
        bridge: Bridge or Hugging Face model.
        prompt: One prompt of up to 8,192 tokens, of all heads 2,048, in any form that `as_prompts`
            takes, with position ids or without.
        layer: Index of the layer.
        head: Index of the head; None: all heads.

    Returns:
        Weights [query, key], or [head, query, key] for all heads. A weight is 0 if a query does not
        see the key; the coordinate `seen` [query, key] distinguishes these from seen keys of weight
        0.

    Raises:
        InputError: The prompt is longer, there are several, or the model lacks the layer or the
            head.
    """
    decoder = as_decoder(bridge)
    given = _only(as_prompts(prompt, decoder.tokenizer))
    most = MOST_OF_ALL if head is None else MOST
    if len(given.tokens) > most:
        raise InputError(
            f"the prompt has {len(given.tokens)} tokens, and patterns are made of up to "
            f"{most}; give a part of it, or analyze it with "
            'measures=("attention_rows",), which keeps the strongest keys of every row'
        )
    inputs, labels = _capture_head(decoder, given, layer, head)
    index = torch.arange(len(given.tokens), device=inputs.queries.device)
    parts, seen = [], []
    for rows in index.split(WHOLE_PATTERN):
        parts.append(inputs.pattern(rows)[0].cpu().numpy())
        seen.append(inputs.visible(rows)[0].cpu().numpy())
    weights = np.concatenate(parts, axis=1)
    named = xr.DataArray(
        weights,
        {
            "head": np.arange(len(weights)),
            "query": index.cpu().numpy(),
            "key": index.cpu().numpy(),
            "text": ("key", labels.pop("text")),
            "seen": (("query", "key"), np.concatenate(seen)),
        },
        ("head", "query", "key"),
        "pattern",
    )
    if head is not None:
        named = named.isel(head=0, drop=True)
    of_head = "" if head is None else f", head {head}"
    return with_attrs(named, f"attention of layer {layer}{of_head}", "1").assign_attrs(labels)


@torch.no_grad()
def explain_logit(
    bridge: nn.Module, prompt: Prompts, layer: int, head: int, query: int, key: int
) -> xr.Dataset:
    """Split the logit of a query and a key in one head into its parts.

        parts = ri.explain_logit(bridge, prompt, layer=2, head=1, query=19, key=7)

    `logit` is the sum of `pair` + `soft_cap` + `bias` + `rounding`, and the sum of `fit`, whose
    part "remainder" is the error of the fit. `ri.plots.logit_parts` draws the result.

    Args:
        bridge: Bridge or Hugging Face model.
        prompt: One prompt, in any form that `as_prompts` takes.
        layer: Index of the layer.
        head: Index of the head.
        query: Index of the query token.
        key: Index of the key token.

    Returns:
        The parts, in logits.

    Raises:
        InputError: The query does not see the key, there are several prompts, or a token, the layer
            or the head does not exist.
    """
    decoder = as_decoder(bridge)
    given = _only(indexed_prompts(prompt, decoder.tokenizer))
    # None would be all heads
    head = checked(head, CountOrNone, "head")
    inputs, labels = _capture_head(decoder, given, layer, head)
    length, here = inputs.queries.shape[2], inputs.queries.device
    for name, token in (("query", query), ("key", key)):
        if checked(token, CountOrNone, name) >= length:
            raise InputError(
                f"{name} {token} was asked for; the prompt's tokens are 0 to {length - 1}"
            )
    rows = torch.tensor([query], device=here)
    if not bool(inputs.visible(rows)[0, 0, key]):
        window = "" if inputs.window is None else f", and no more than {inputs.window - 1} earlier"
        window += "" if inputs.hidden is None else ", of which this layer hides some"
        raise InputError(
            f"token {query} does not see token {key}: it sees itself and earlier tokens{window}"
        )
    logit = float(inputs.logits(rows)[0, 0, 0, key])
    turned = (
        _pairs(inputs.rotated_queries[0, 0, query], inputs.rotated_keys[0, 0, key])
        * inputs.logit_scale
    )
    still = _pairs(inputs.queries[0, 0, query], inputs.keys[0, 0, key]) * (
        # The rotation multiplies every pair by this factor (YaRN's attention scaling), also at
        # angle 0
        inputs.logit_scale * inputs.pair_scaling
    )
    frequencies, angles = torch.zeros_like(still), torch.zeros_like(still)
    if inputs.positions is not None and inputs.frequencies is not None:
        frequencies = inputs.frequencies.to(still)
        of_keys = inputs.positions if inputs.key_positions is None else inputs.key_positions
        angles = frequencies * (
            inputs.positions[0, 0, query].double() - of_keys[0, 0, key].double()
        )
        if not inputs.has_frequencies:
            frequencies = torch.full_like(still, torch.nan)
    total = float(turned.sum())
    # The cap acts on the sum, so its part is a difference
    soft_cap = float(cap_logits(turned.sum(), inputs.softcap)) - total
    bias = (
        0.0 if inputs.position_logits is None else float(inputs.position_logits(rows)[0, 0, 0, key])
    )
    fitted, correlation = _fit(inputs, query, key)
    # The remainder makes the parts of the fit add up to the logit
    fitted["remainder"] = logit - sum(fitted.values())
    values = {
        "logit": logit,
        "pair": ("component", turned.cpu().numpy()),
        "pair_at_equal_positions": ("component", still.cpu().numpy()),
        "frequency": ("component", frequencies.cpu().numpy()),
        "angle": ("component", angles.cpu().numpy()),
        "soft_cap": soft_cap,
        "bias": bias,
        # The parts are summed in float64, the logit in the precision of the inputs
        "rounding": logit - total - soft_cap - bias,
        "attention": float(inputs.pattern(rows)[0, 0, 0, key]),
        "fit": ("part", list(fitted.values())),
    }
    text = labels.pop("text")
    named = {
        "query": query,
        "key": key,
        "query_text": text[query],
        "key_text": text[key],
        "fit_r": correlation,
    }
    parts = described_group(
        values, _TEXTS, {"component": np.arange(len(still)), "part": list(fitted)}
    )
    return parts.assign_attrs(labels | named)


def _only(prompts: Sequence[Prompt]) -> Prompt:
    """Return the only prompt."""
    if len(prompts) != 1:
        raise InputError(f"one prompt was wanted; got {len(prompts)}")
    return prompts[0]


def _capture_head(
    decoder: Decoder, prompt: Prompt, layer: int, head: int | None
) -> tuple[AttentionInputs, dict[str, Any]]:
    """Return float64 inputs of one or all heads on a prompt, and attributes of the result."""
    require_known_tokens([prompt.tokens], decoder.vocabulary_size)
    (attention,) = decoder.attentions([checked(layer, CountOrNone, "layer")])
    if head is not None and checked(head, CountOrNone, "head") >= attention.heads:
        raise InputError(f"head {head} was asked for; the model's are 0 to {attention.heads - 1}")
    batch = make_batch([prompt], [0], len(prompt.tokens), decoder.device)
    found: list[AttentionInputs] = []
    with observing(
        decoder, batch.valid, torch.arange(1), found.append, [layer], batch.position_ids
    ):
        decode(decoder, batch.tokens, batch.valid, layer, batch.position_ids, batch.attention_mask)
    require_finite(found[0])
    labels = {
        "layer": layer,
        "scheme": found[0].scheme,
        "text": list(texts_of([prompt], decoder.tokenizer)[0]),
    }
    if head is None:
        return found[0], labels
    return select_heads(found[0], [head]), labels | {"head": head}


def _pairs(
    one: Float[Tensor, "d_head"], other: Float[Tensor, "d_head"]
) -> Float[Tensor, "component"]:
    """Dot product of two vectors in half-split order, per pair, in float64."""
    products = one.double() * other.double()
    # Half-split order: pair r has the dimensions r and r + d / 2, so [2, component]
    return products.unflatten(0, (2, -1)).sum(0)


def _fit(inputs: AttentionInputs, query: int, key: int) -> tuple[dict[str, float], float]:
    """Parts of a logit by the three-axis fit of its head, and the fit's correlation.

    NaN if queries do not see all keys of the window.
    """
    if inputs.hidden is not None:
        return dict.fromkeys(("level", "distance", "query", "key"), math.nan), math.nan
    sums = logit_sums(inputs)
    # [prompt, head, token]: the mask is the same for the only head
    pairs = additive_pairs(inputs.valid[:, None], inputs.valid[:, None], inputs.window)
    axes = fit_axes(sums.lines, inputs.valid, inputs.window, ThreeAxis().ridge)
    correlation = float(fit_correlation(axes, sums.lines, sums.square, pairs))
    level, axes = center_axes(axes, pairs)
    parts = {
        "level": level,
        "distance": axes.distance[0, 0, query - key],
        "query": axes.query[0, 0, query],
        "key": axes.key[0, 0, key],
    }
    return {name: float(value) for name, value in parts.items()}, correlation


def center_axes(axes: Axes, pairs: AdditivePairs) -> tuple[Float[Tensor, ""], Axes]:
    """Return the level of a fitted map, and its axes in a unique form.

    Args:
        axes: Axes of one head.
        pairs: Seen pairs of the prompt.

    Returns:
        The level, and axes with mean 0 over the seen pairs and a key axis without slope.
    """
    steps = torch.arange(axes.key.shape[-1], dtype=torch.float64, device=axes.key.device)

    # Means over pairs, not tokens: a key counts once per query that sees it
    def mean(values: Tensor, counts: Tensor) -> Tensor:
        return (counts * values).sum(-1, keepdim=True) / pairs.total[..., None].clamp(min=1)

    deviation = steps - mean(steps, pairs.counts.key)
    # A prompt of one token has no spread
    spread = mean(deviation**2, pairs.counts.key).clamp(min=torch.finfo(torch.float64).tiny)
    slope = mean(deviation * axes.key, pairs.counts.key) / spread
    # distance + query + key does not change: the added slopes are -(i - j) + i - j = 0
    sloped: Sequence[Tensor] = (
        axes.distance - slope * steps,
        axes.query + slope * steps,
        axes.key - slope * steps,
    )
    levels = [mean(axis, counts) for axis, counts in zip(sloped, pairs.counts, strict=True)]
    return sum(levels)[0, 0, 0], Axes(  # pyright: ignore[reportIndexIssue]
        *(axis - level for axis, level in zip(sloped, levels, strict=True))
    )
