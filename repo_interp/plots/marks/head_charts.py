"""Charts of every head for the page: curves, images, arrows and numbers.

The page draws the charts of the head that is chosen in the explorer.

    curves   float32, base64, [layer, head, point]
    images   16 bits between the smallest and the largest value of a head

Images are coarsened by means of 2 x 2 until all heads fit into `MOST_IMAGE` bytes. This module
knows nothing about the meaning of the values.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.plots.marks.arrays import digits_of, nanmean, nested_digits
from repo_interp.plots.marks.chart import Chart
from repo_interp.plots.marks.reading import head_axes

MOST_POINTS = 160
"""Points of a curve in the page."""
MOST_IMAGE = 6_000_000
"""Bytes of all the images of a chart in the page."""
MOST_ROWS = 1_600_000
"""Bytes of the rows of attention of a prompt in the page."""
MOST_OTHER_ROWS = 1_200_000
"""Characters of the rows of all prompts but the first in the page."""
FEWEST_RANKS = 4
"""Strongest keys of a row of attention in the page, at least."""
LEAST_LOGARITHM = -32.0
"""The natural logarithm of the smallest attention weight that the page distinguishes from 0."""
NOTHING = 65535
"""Code of an image's cell without a value."""


@dataclass(frozen=True)
class HeadCurves(Chart):
    """Curves [layer, head, point] by their names, over `at` [point]."""

    title: str
    x: str
    y: str
    at: np.ndarray
    curves: Mapping[str, xr.DataArray]

    def data(self) -> dict[str, Any]:
        """The chart as JSON; long curves are thinned evenly to `MOST_POINTS`."""
        places = np.unique(
            np.linspace(0, len(self.at) - 1, min(MOST_POINTS, len(self.at))).round().astype(int)
        )
        packed = {}
        for name, curve in self.curves.items():
            values = curve.transpose("layer", "head", ...).values[..., places]
            packed[name] = _base64(values, "<f4")
        axes = head_axes(next(iter(self.curves.values())))
        return {
            "kind": "curves",
            **_plain(self),
            "at": digits_of(self.at[places]),
            "curves": packed,
            **axes,
        }


@dataclass(frozen=True)
class HeadImage(Chart):
    """Block means [layer, head, row, column] over the tokens of prompt `prompt`.

    `size`: tokens along a block.
    """

    title: str
    x: str
    y: str
    values: xr.DataArray
    size: int
    tokens: int
    prompt: int
    causal_logits: bool = False
    """Whether rows are queries, columns keys and values logits, so that a row shows where a token
    attends.
    """

    def data(self) -> dict[str, Any]:
        """The chart as JSON, coarsened until it fits."""
        values, size = self.values.transpose("layer", "head", ...).values.astype(float), self.size
        # 2 bytes a cell; each round leaves a quarter of them
        while 2 * values.size > MOST_IMAGE and min(values.shape[-2:]) > 1:
            values, size = _halved(values), 2 * size
        low, high = (
            # [layer, head]; fmin and fmax ignore NaN, and a head of nothing else gets 0
            np.nan_to_num(end.reduce(values, axis=(2, 3)), posinf=0, neginf=0)
            for end in (np.fmin, np.fmax)
        )
        # A constant head would divide by 0
        spread = np.where(high > low, high - low, 1.0)
        with np.errstate(invalid="ignore"):
            levels = np.round(
                (values - low[..., None, None]) / spread[..., None, None] * (NOTHING - 1)
            )
        packed = np.where(np.isfinite(levels), levels, NOTHING)
        scales = {"low": nested_digits(low), "spread": nested_digits(spread)}
        shape = {"rows": values.shape[-2], "columns": values.shape[-1], "size": size}
        return {
            "kind": "image",
            **_plain(self),
            **shape,
            **scales,
            "values": _base64(packed),
            **head_axes(self.values),
        }


@dataclass(frozen=True)
class HeadArrows(Chart):
    """Complex numbers [layer, head, component] as arrows from 0.

    They are `real` + i `imaginary`; `strong` ones are colored.
    """

    title: str
    x: str
    real: xr.DataArray
    imaginary: xr.DataArray
    strong: xr.DataArray

    def data(self) -> dict[str, Any]:
        """The chart as JSON."""
        parts = {"real": self.real, "imaginary": self.imaginary, "strong": self.strong}
        packed = {
            name: nested_digits(part.transpose("layer", "head", ...).values)
            for name, part in parts.items()
        }
        return {"kind": "arrows", **_plain(self), **packed, **head_axes(self.real)}


@dataclass(frozen=True)
class HeadNumber(Chart):
    """One number per head [prompt, layer, head], as a sentence about the chosen prompt."""

    title: str
    values: xr.DataArray

    def data(self) -> dict[str, Any]:
        """The numbers as JSON."""
        values = self.values.transpose("prompt", "layer", "head")
        numbers = {
            "prompts": values["prompt"].values.tolist(),
            "values": nested_digits(values.values),
        }
        return {"kind": "number", **_plain(self), **numbers, **head_axes(values)}


@dataclass(frozen=True)
class PromptRows:
    """The largest attention `weights` [layer, head, query, rank] of prompt `prompt`.

    `keys`: the tokens that they are on.

    `totals` [layer, head, query]: the logarithm of the sum of exponentials of a row's logits, so
    that logit = ln weight + total.
    """

    prompt: int
    weights: xr.DataArray
    keys: xr.DataArray
    totals: xr.DataArray

    def data(self) -> dict[str, Any]:
        """Return the rows as JSON.

        A weight is its logarithm between `LEAST_LOGARITHM` and 0 in 16 bits; a key or a total takes
        32 bits. As many ranks as fit into `MOST_ROWS` bytes are kept, but no fewer than
        `FEWEST_RANKS`; if these do not fit, fewer rows are kept, evenly spread.

        Returns:
            The data for the scripts of the page.
        """
        # A weight takes 2 bytes, and its key 4
        per_rank = 6 * self.weights.isel(rank=0).size
        ranks = min(self.weights.sizes["rank"], max(FEWEST_RANKS, MOST_ROWS // per_rank))
        rows = min(
            self.weights.sizes["query"],
            max(1, self.weights.sizes["query"] * MOST_ROWS // (per_rank * ranks)),
        )
        shown = np.unique(np.linspace(0, self.weights.sizes["query"] - 1, rows).round().astype(int))
        weights, keys = (
            part.transpose("layer", "head", "query", "rank").values[:, :, shown, :ranks]
            for part in (self.weights, self.keys)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            logarithms = np.clip(np.log(weights), LEAST_LOGARITHM, 0)
            levels = np.where(
                keys < 0, NOTHING, np.round((1 - logarithms / LEAST_LOGARITHM) * (NOTHING - 1))
            )
        totals = self.totals.transpose("layer", "head", "query").values[..., shown]
        packed = {
            "weights": _base64(levels),
            "keys": _base64(keys, "<i4"),
            "totals": _base64(totals, "<f4"),
        }
        queries = self.weights["query"].values
        return {
            "prompt": self.prompt,
            "kept": len(queries),
            "queries": queries[shown].tolist(),
            "ranks": ranks,
            **packed,
        }


@dataclass(frozen=True)
class HeadRows(Chart):
    """Rows of attention of several prompts.

    Besides the first prompt, as many as fit into `MOST_OTHER_ROWS` bytes are kept.
    """

    title: str
    prompts: Sequence[PromptRows]

    def data(self) -> dict[str, Any]:
        """The rows of every prompt as JSON."""
        kept, room = [self.prompts[0].data()], MOST_OTHER_ROWS
        for prompt in self.prompts[1:]:
            rows = prompt.data()
            # Packed arrays are texts; other values are small
            room -= sum(len(part) for part in rows.values() if isinstance(part, str))
            if room < 0:
                break
            kept.append(rows)
        axes = head_axes(self.prompts[0].weights)
        return {"kind": "rows", **_plain(self), "least": LEAST_LOGARITHM, "prompts": kept, **axes}


@dataclass(frozen=True)
class NextTokens(Chart):
    """Probabilities [token, rank] of the likeliest next tokens of prompt `prompt`.

    It also holds their texts, and the probabilities of the tokens that do follow.
    """

    title: str
    probabilities: xr.DataArray
    texts: np.ndarray
    """[token, rank]"""
    following: xr.DataArray
    """[token]: the probability of the token that does follow."""
    prompt: int

    def data(self) -> dict[str, Any]:
        """The predictions as JSON, numbers with six significant digits."""
        return {
            "kind": "next",
            **_plain(self),
            "tokens": self.probabilities["token"].values.tolist(),
            "probabilities": nested_digits(self.probabilities.transpose("token", "rank").values),
            "texts": self.texts.astype(str).tolist(),
            "following": digits_of(self.following.values),
            "layers": [],
            "heads": [],
        }


def _plain(chart: Any) -> dict[str, Any]:
    """The fields of `chart` that are texts and numbers, by their names."""
    return {name: value for name, value in vars(chart).items() if isinstance(value, str | int)}


def _base64(values: np.ndarray, kind: str = "<u2") -> str:
    # "<": little-endian on any machine, as typed arrays in browsers
    return base64.b64encode(values.astype(kind).tobytes()).decode("ascii")


def _halved(values: np.ndarray) -> np.ndarray:
    """Average 2 x 2 neighbors along the last two axes, without NaN.

    An odd last row or column is kept unchanged.
    """
    rows, columns = values.shape[-2:]
    padded = np.pad(
        values, [(0, 0), (0, 0), (0, rows % 2), (0, columns % 2)], constant_values=np.nan
    )
    # [layer, head, row, 2, column, 2]
    split = padded.reshape(*values.shape[:2], -(-rows // 2), 2, -(-columns // 2), 2)
    return nanmean(split, axis=(3, 5))
