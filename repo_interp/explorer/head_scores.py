"""Map of the heads of one pass: scores, positions at a few tokens, and order by distance.

    head_score [score, layer, head]       the mirror score if the prompt names the source of each
                                          generated token (`kernels.mirror`); the order at the
                                          largest distance if a layer learns positions; scores
                                          that measures offer (`Measure.head_scores`); attention to
                                          token 0 and to the previous token (`passes.looked`)
    outline [layer, head, point]          positions at up to `POINTS` tokens
    order [layer, head, distance]         `orders`

This module knows nothing about edits, and no measure by name.
"""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from repo_interp.explorer.orders import orders
from repo_interp.explorer.passes import Pass
from repo_interp.measures.kernels.mirror import MEANING, mirror, mirror_score
from repo_interp.measures.labels import with_attrs
from repo_interp.models.decoder import Decoder
from repo_interp.run import with_schemes
from repo_interp.tasks import Prompt

POINTS = 32
"""Tokens at which the map of heads samples positions."""
LOOKS = ("attention to token 0", "attention to the previous token")
"""Scores of `passes.looked`."""
ORDER = "order"
"""Order of positions at the largest distance of `orders`."""
_ORDER = (
    "of two tokens that stand far apart, how often the later one has the higher position: "
    "1 always, -1 never, 0 as often as not"
)


def scores_of_heads(passed: Pass, prompt: Prompt, decoder: Decoder) -> xr.Dataset:
    """Map the heads of a pass.

    Args:
        passed: A pass, under edits or none.
        prompt: Its prompt.
        decoder: Decoder of the model.

    Returns:
        `head_score` [score, layer, head] with `meaning` and `by_index` (as in `HeadScore`) [score];
        `outline` [layer, head, point]; and where some head has other positions than the token index
        `order` [layer, head, distance].
    """
    position = passed.positions
    axes = {axis: position[axis].variable for axis in ("layer", "head")}
    distances, order = orders(position.values)
    # Values [layer, head], meaning, and whether they follow from the token index
    scores: dict[str, tuple[np.ndarray, str, bool]] = {}
    if prompt.sources is not None:
        mirrored = [[_mirror(row, prompt) for row in of_layer] for of_layer in position.values]
        scores["mirror"] = np.array(mirrored), MEANING, False
    # Whatever the edits are, so that both states have the same scores
    if not {*decoder.schemes}.isdisjoint(decoder.learned_schemes):
        far = order[..., -1] if len(distances) else np.full(order.shape[:-1], np.nan)
        scores[ORDER] = far, _ORDER, False
    for name, score in passed.scores.items():
        values = score.values.isel(prompt=0).transpose("layer", "head").values
        scores.setdefault(name, (values, score.meaning, score.by_index))
    looks = torch.stack([passed.looks[layer] for layer in position["layer"].values.tolist()], 1)
    scores |= {name: (values, "", False) for name, values in zip(LOOKS, looks.numpy(), strict=True)}
    values, meanings, by_index = zip(*scores.values(), strict=True)
    stacked = xr.DataArray(
        np.stack(values).astype("float64"),
        {
            "score": list(scores),
            **axes,
            "meaning": ("score", list(meanings)),
            "by_index": ("score", list(by_index)),
        },
        ("score", "layer", "head"),
    )
    # A short prompt has fewer tokens than points, and rounding would repeat some
    points = np.unique(np.linspace(0, len(prompt.tokens) - 1, POINTS).round().astype(int))
    sampled = position.isel(token=points).rename(token="point")
    named = {
        "head_score": with_attrs(stacked, "score of each head", "1"),
        "outline": with_attrs(sampled, "position at evenly spaced tokens", "positions"),
    }
    if len(distances):
        by_distance = xr.DataArray(
            order, {**axes, "distance": distances}, ("layer", "head", "distance")
        )
        named["order"] = with_attrs(by_distance, "order that positions tell by distance", "1")
    return with_schemes(xr.Dataset(named), decoder.schemes, decoder.learned_schemes)


def _mirror(position: np.ndarray, prompt: Prompt) -> float:
    if not np.isfinite(position).all():
        return np.nan
    return mirror_score(mirror(position, prompt.tokens, prompt.sources or (), prompt.generated))
