"""Effect of one rotary pair: the loss with its frequency changed, minus the loss of the model.

    effect_lr = mean over units of loss(theta_lr <- f theta_lr) - loss       f = 1/4, 0, or any factor
    turns_r   = theta_r L / 2 pi                                             within L positions

A pair that turns less than once within the training length L has not seen all angles in training,
and reaches new ones beyond L. YaRN (Peng et al. 2024, sec. 3.2) interpolates these pairs together.
This module changes one pair at a time, by `rescaled`, and measures its cost by `try_edits`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr
from torch import nn

from repo_interp.analysis.coercion import Prompts
from repo_interp.errors import InputError
from repo_interp.interventions.frequencies import require_rotation, rescaled, rotates
from repo_interp.measures.labels import described_group
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.side_by_side import BatchSize
from repo_interp.plugins.edits.token_losses import checked_prompts, prompt_batches
from repo_interp.plugins.edits.trials import BLOCK, try_edits
from repo_interp.runtime.console import Console
from repo_interp.storage.store import Progress
from repo_interp.tasks import Prompt
from repo_interp.values import Finite, TokensOrNone, checked

CHANGES = {"quarter": 0.25, "stop": 0.0}
"""Factors of the frequency, by name."""
_ENDS = ("", "_low", "_high")
_TEXTS = {
    "change": "change of the loss by one pair [nat]",
    "change_low": "lower end of the 95 % interval of the change [nat]",
    "change_high": "upper end of the 95 % interval of the change [nat]",
    "together": "change of the loss by all these pairs [nat]",
    "together_low": "lower end of the 95 % interval of the change by all [nat]",
    "together_high": "upper end of the 95 % interval of the change by all [nat]",
    "plain_loss": "loss as it is [nat]",
    "units": "units that have tokens in the band",
}


def pair_effects(
    model: nn.Module,
    prompts: Prompts,
    change: Literal["quarter", "stop"] | float = "quarter",
    *,
    pairs: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    bands: Sequence[tuple[int, int]] | None = None,
    block: int = BLOCK,
    batch_size: BatchSize | Literal["auto"] = "auto",
    store: str | Path | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure the cost of changing the frequency of one rotary pair at a time.

        found = ri.pair_effects(model, texts, "quarter")
        print(found.attrs["finding"])
        ri.plots.pair_effects(found)

    Args:
        model: Bridge or model.
        prompts: Prompts in any form that `analysis.coercion` takes; longer than the training
            length, to see which pair fails beyond it.
        change: "quarter": the frequency times 1/4; "stop": times 0; or a factor.
        pairs: Numbers of pairs, the fastest first; None: all that rotate.
        layers: Layers to change one at a time, with one row each; None: all at once.
        bands: As for `try_edits`; None: tokens within the training length, and tokens beyond it.
        block: Length in tokens of the units into which a single text is cut.
        batch_size: Number of prompts per forward pass, its limits, or "auto".
        store: Directory that keeps finished batches, as for `try_edits`.
        progress: Called with finished points and all points; None: prints the number of points and
            a bar to standard error.

    Returns:
        `change [pair, band]`, or [layer, pair, band] with `layers`, in nats, and its paired 95 %
        interval over prompts, `change_low` and `change_high`; NaN where a layer lacks a pair.
        `together [band]` or [layer, band]: the same with all these pairs changed at once.
        `plain_loss` and `units` [band]. The coordinate `turns` counts turns of a pair within the
        training length. The attribute `finding` is a sentence.

    Raises:
        InputError: The factor is 1, a layer or a pair does not rotate, layers that are changed
            together have different frequencies, or as for `try_edits`.
    """
    decoder = as_decoder(model)
    given_factor = CHANGES.get(change, change) if isinstance(change, str) else change
    factor = checked(given_factor, Finite, "the factor of a frequency")
    if factor == 1:
        raise InputError("a frequency times 1 is the same; give another factor")
    prompt_list = checked_prompts(decoder, prompts)
    length = decoder.training_length
    rows = _turns(decoder, layers, pairs, length)
    edits = {
        (layer, pair): rescaled(
            model,
            layer,
            factors=[factor if some in (pair, *every) else 1.0 for some in range(count)],
        )
        for layer, (count, turns) in rows.items()
        for pair, every in [*((pair, ()) for pair in turns), ("all pairs", turns)]
    }
    if bands is None and not all(prompt.generated for prompt in prompt_list):
        bands = _within_and_beyond(prompt_list, length)
    if progress is None:
        passes = (1 + len(edits)) * len(prompt_batches(decoder, prompt_list, batch_size))
        tokens = sum(len(prompt.tokens) for prompt in prompt_list)
        Console(stderr=True).print(
            f"pair_effects: {1 + len(edits)} times {tokens:,} tokens, in {passes:,} passes"
        )
    names = {str(key): key for key in edits}
    found = try_edits(
        model,
        prompt_list,
        {name: edits[key] for name, key in names.items()},
        bands=bands,
        block=block,
        batch_size=batch_size,
        store=store,
        progress=progress,
    )
    numbers = sorted({pair for _, turns in rows.values() for pair in turns})
    group = _arranged(found, list(edits), list(rows), numbers)
    turns = [[of_row.get(pair, np.nan) for pair in numbers] for _, of_row in rows.values()]
    axes = ("pair",) if layers is None else ("layer", "pair")
    group = group.assign_coords(turns=(axes, turns[0] if layers is None else turns))
    group["turns"].attrs |= {"long_name": f"turns within {length:,} positions", "units": "1"}
    group.attrs = {"factor": factor, "training_length": length, "unit": found.attrs["unit"]}
    return group.assign_attrs(prompts=len(prompt_list), finding=_finding(group))


def _turns(
    decoder: Decoder, layers: Any, pairs: Any, length: int
) -> dict[int | None, tuple[int, dict[int, float]]]:
    """By layer (None: all at once), the number of pairs, and the turns of the pairs to change."""
    if layers is None:
        several = [attention for attention in decoder.layers if rotates(attention)]
        if not several:
            require_rotation(decoder.layers[0])
        named: dict[int | None, RepositionedAttention] = {None: several[0]}
        if len({tuple(one.frequencies.flatten().tolist()) for one in several}) > 1:
            raise InputError(
                "layers of this model rotate by different frequencies, so a pair is not the same "
                f"in all; give layers=range({decoder.layer_count}), and each has a row"
            )
    else:
        numbers = checked(tuple(layers), tuple[TokensOrNone, ...], "layers")
        if not numbers:
            raise InputError("no layer was named; leave layers out for all at once")
        named = {attention.layer_idx: attention for attention in decoder.attentions(numbers)}
    rows = {}
    for layer, attention in named.items():
        require_rotation(attention)
        # Under an intervention heads may differ; a pair counts as turning if it turns in any head.
        frequencies = (
            attention.frequencies.detach().abs().reshape(-1, attention.frequencies.shape[-1])
        )
        turns = (frequencies.amax(0).double() * length / (2 * math.pi)).tolist()
        moving = [pair for pair, turned in enumerate(turns) if turned]
        some = moving if pairs is None else checked(tuple(pairs), tuple[TokensOrNone, ...], "pairs")
        if wrong := [pair for pair in some if pair not in moving]:
            raise InputError(
                f"pair {wrong[0]} of layer {attention.layer_idx} does not rotate; those that do are "
                f"{moving[0]} to {moving[-1]}"
            )
        if not some:
            raise InputError("no pair was named; leave pairs out for all")
        rows[layer] = len(turns), {pair: turns[pair] for pair in some}
    return rows


def _within_and_beyond(prompts: Sequence[Prompt], length: int) -> list[tuple[int, int]] | None:
    longest = max(len(prompt.tokens) for prompt in prompts)
    return [(0, length - 1), (length, longest - 1)] if longest > length else None


def _arranged(
    found: xr.Dataset, keys: Sequence[Any], layers: Sequence[int | None], pairs: Sequence[int]
) -> xr.Dataset:
    """Changes of `try_edits` by pair, and by layer if layers are changed one at a time."""
    places = {key: place + 1 for place, key in enumerate(keys)}
    values: dict[str, Any] = {}
    for end in _ENDS:
        # Index -1 selects a last row of NaN, for pairs that a layer lacks.
        change = np.pad(found[f"change{end}"].values, ((0, 1), (0, 0)), constant_values=np.nan)
        by_row = [[change[places.get((layer, pair), -1)] for pair in pairs] for layer in layers]
        together = [change[places[layer, "all pairs"]] for layer in layers]
        for name, numbers, axes in (
            ("change", by_row, ("pair", "band")),
            ("together", together, ("band",)),
        ):
            whole = np.array(numbers)
            at_once = layers[0] is None
            values[name + end] = (axes, whole[0]) if at_once else (("layer", *axes), whole)
    values["plain_loss"] = ("band", found["mean_loss"].values[0])
    values["units"] = ("band", found["units"].values)
    coordinates: Mapping[str, Any] = {"pair": list(pairs), "band": found["band"].values}
    if layers[0] is not None:
        coordinates = {"layer": list(layers), **coordinates}
    return described_group(values, _TEXTS, coordinates)


def _finding(group: xr.Dataset) -> str:
    """Name the pair that changes the loss of the last band most."""
    last = group.isel(band=-1)
    place = np.nanargmax(np.abs(last["change"].values))
    index = np.unravel_index(place, last["change"].shape)
    here = last.isel(dict(zip(last["change"].dims, map(int, index), strict=True)))
    where = f"in layer {int(here['layer'])} " if "layer" in group.dims else ""
    which = (
        "the answer" if str(last["band"].values) == "answer" else f"tokens {last['band'].values}"
    )

    def told(name: str) -> str:
        value, low, high = (float(here[name + end]) for end in _ENDS)
        between = f" [{low:+.3f}, {high:+.3f}]" if np.isfinite(low) else ""
        return f"{value:+.3f}{between} nats"

    return (
        f"Pair {int(here['pair'])}, which turns {float(here['turns']):.2g} times within "
        f"{group.attrs['training_length']:,} positions, {where}at {group.attrs['factor']:g} of its "
        f"frequency changes the loss of {which} by {told('change')}, the most of "
        f"{int(last['change'].notnull().sum())}; all of these pairs together change it by "
        f"{told('together')}"
    )
