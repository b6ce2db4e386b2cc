"""Find the heads whose cached keys must be turned, and test whether two measures predict them.

    cost(l, h) = mean over prompts of  loss(only keys of layer l, key-value head h not turned)
                                       - loss(dense)                                    nats

The predictions come from one dense pass, as means over prompts and the query heads that read these
keys: `semantic_share` (fake_distance), `semantic_stability` (stability), and `mass`, the attention
of later tokens to the chunk. The higher the first two, the less distance should matter, so both
predict a negative rank correlation with the cost. One head alone may cost nothing although all
together cost much. Therefore the heads of all layers are also split at the median of each
prediction, and the keys of one half are left unturned together: `half_change`. The interval of the
correlation is the 2.5 % and 97.5 % quantile over bootstrap samples of whole layers, since heads of
one layer are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float

from repo_interp.analysis.analyze import analyze
from repo_interp.analysis.coercion import Prompts
from repo_interp.errors import InputError, quoted
from repo_interp.models.decoder import Decoder
from repo_interp.plugins.reuse.chunk_cache import cache_of, rotates_by_index, turned
from repo_interp.plugins.reuse.reuse_cost import checked_reuse, costs, losses_of
from repo_interp.runtime.console import Console
from repo_interp.runtime.progress import steps
from repo_interp.storage.store import Progress
from repo_interp.tasks import Prompt

PREDICTIONS = {
    "semantic_share": ("fake_distance", "share of the semantic axis (fake_distance)"),
    "semantic_stability": ("stability", "share of distances that keep a preference (stability)"),
    "mass": ("attention_mass", "attention of later tokens to the chunk"),
}
_SAMPLES = 2000


def reuse_cost_by_head(
    model: Any,
    prompts: Prompts,
    chunk: tuple[int, int],
    shift: int | None = None,
    *,
    layers: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure the cost of not turning the keys of one head, and compare it with predictions.

    Args:
        model: As in `reuse_cost`.
        prompts: As in `reuse_cost`.
        chunk: As in `reuse_cost`.
        shift: As in `reuse_cost`.
        layers: Layers to test; None: all layers whose keys turn.
        progress: Called with prompts done and in all; None: a bar on standard error.

    Returns:
        By `head`, first "dense", then labels such as "3.0" (layer 3, key-value head 0): `loss
        [head, prompt]`, `mean_loss`, `change`, `change_low` and `change_high` in nats, as in
        `reuse_cost`; `semantic_share`, `semantic_stability` and `mass`, NaN for "dense". By
        `prediction`: the rank `correlation` with the change over heads, `correlation_low` and
        `correlation_high`. `half_change`, `half_change_low` and `half_change_high` [prediction,
        half]: the change if the keys of all heads at or below the median ("lower"), or above it
        ("upper"), are not turned, over all layers that turn.

    Raises:
        InputError: As `reuse_cost`; or a layer does not turn keys.
    """
    decoder, given, shift = checked_reuse(model, prompts, chunk, shift)
    turning = [one.layer_idx for one in decoder.layers if rotates_by_index(one)]
    some = turning if layers is None else list(layers)
    if not some or not {*some} <= {*turning}:
        raise InputError(f"layers are {quoted(layers)}; wanted some of those that turn: {turning}")
    all_units = [(layer, head) for layer in turning for head in range(_heads(decoder, layer))]
    units = [unit for unit in all_units if unit[0] in {*some}]
    known = _predictions(decoder, given, chunk, all_units)
    halves = [
        [
            unit
            for unit, above in zip(all_units, values > np.median(values), strict=True)
            if above == up
        ]
        for values in known.values()
        for up in (False, True)
    ]
    first, stop = chunk
    by, rows = torch.full((stop - first,), -float(shift)), []
    with steps(Console(stderr=True)) as step:
        tell = partial(step, "reusing by head") if progress is None else progress
        for prompt in given:
            dense = cache_of(decoder, torch.tensor(prompt.tokens[:stop]))
            moved = [dense]
            for group in [*([unit] for unit in units), *halves]:
                cached = dense
                for layer, head in group:
                    cached = turned(decoder, cached, first, by, (layer, [head]))
                moved.append(cached)
            rows.append(losses_of(decoder, moved, prompt, chunk))
            tell(len(rows), len(given))
    losses = np.stack(rows, -1)
    labels = ["dense", *(f"{layer}.{head}" for layer, head in units)]
    found = costs(losses[: len(labels)], {"head": labels})
    places = [all_units.index(unit) for unit in units]
    change, of_layer = found["change"].values[1:], np.array([layer for layer, _ in units])
    triples = []
    for name, values in known.items():
        attrs = {"long_name": PREDICTIONS[name][1], "units": "1"}
        found[name] = ("head", [np.nan, *values[places]], attrs)
        triples.append(rank_correlation(values[places], change, of_layer))
    for end, values in zip(("", "_low", "_high"), zip(*triples, strict=True), strict=True):
        found[f"correlation{end}"] = ("prediction", list(values), {"units": "1"})
    of_halves = costs(
        losses[[0, *range(len(labels), len(losses))]], {"half": range(1 + len(halves))}
    )
    for end in ("", "_low", "_high"):
        values = of_halves[f"change{end}"].values[1:].reshape(len(known), 2)
        found[f"half_change{end}"] = (("prediction", "half"), values, {"units": "nat"})
    attrs = {"first": first, "stop": stop, "shift": shift}
    coords = {"prediction": list(PREDICTIONS), "half": ["lower", "upper"]}
    return found.assign_coords(coords).assign_attrs(attrs)


def _predictions(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    chunk: tuple[int, int],
    units: Sequence[tuple[int, int]],
) -> dict[str, np.ndarray]:
    spanned = [
        Prompt(
            prompt.tokens,
            {"chunk": tuple(range(*chunk))},
            tuple(range(chunk[1] + 1, len(prompt.tokens))),
        )
        for prompt in prompts
    ]
    measures = [measure for measure, _ in PREDICTIONS.values()]
    run = analyze(decoder.module, spanned, measures, experiments=(), progress=lambda *_: None)
    found = {}
    for name, (measure, _) in PREDICTIONS.items():
        array: xr.DataArray = run[f"{measure}/{name}"]  # pyright: ignore[reportAssignmentType]
        array = array.sel(span="chunk") if "span" in array.dims else array
        array = array.mean([dim for dim in array.dims if dim not in ("layer", "head")])
        values = []
        for layer, head in units:
            group = array.sizes["head"] // _heads(decoder, layer)
            readers = array.sel(layer=layer).values[head * group : (head + 1) * group]
            values.append(float(np.nanmean(readers)))
        found[name] = np.array(values)
    return found


def _heads(decoder: Decoder, layer: int) -> int:
    return decoder.by_layer[layer].kv_heads


def rank_correlation(
    one: Float[np.ndarray, "unit"], other: Float[np.ndarray, "unit"], groups: np.ndarray
) -> tuple[float, float, float]:
    """Return Spearman's correlation with its 95 % interval over bootstrap samples of groups.

    Args:
        one: Values of units; units with NaN are left out.
        other: Other values of the same units.
        groups: Group of each unit; groups are drawn as a whole.

    Returns:
        Correlation, and both ends of its interval; NaN if fewer than three groups have values, or
        all values are equal.
    """
    known = np.isfinite(one) & np.isfinite(other)
    one, other, groups = one[known], other[known], groups[known]
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    if len(members) < 3 or not np.ptp(one) or not np.ptp(other):
        return np.nan, np.nan, np.nan
    draws = np.random.default_rng(0).integers(len(members), size=(_SAMPLES, len(members)))
    samples = []
    for draw in draws:
        places = np.concatenate([members[number] for number in draw])
        samples.append(_spearman(one[places], other[places]))
    low, high = np.nanquantile(samples, [0.025, 0.975])
    return _spearman(one, other), float(low), float(high)


def _spearman(one: np.ndarray, other: np.ndarray) -> float:
    ranks = [_ranks(values) for values in (one, other)]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return np.nan
    return float(np.corrcoef(np.stack(ranks))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks; equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
