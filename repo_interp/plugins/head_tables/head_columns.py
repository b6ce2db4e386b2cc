"""Numbers of heads from the groups of a run, as columns of the group `atlas`.

    of group            variables, and their reduction                  columns
    atlas               scores and names, as they are                   name, induction, ...
    attention_mass      mass, mean over prompts                         mass[needle], ...
    position_sources    share: sources of f_phi                         reads[token], ...
                        kind: use by the head, in words                 kind
    components          band with most of the variance of the logits    band
    three_axis          r, mean over prompts                            three_axis_r
    fake_distance       r, mean over prompts                            fake_distance_r
                        semantic_share, mean over prompts               semantic_share
    rotation            number of slow dominating pairs                 slow_pairs
    effects             effect of an intervention                       effect[linearised], ...

A variable that is not in the run has no column. This module knows nothing about how numbers are
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.measures.labels import with_attrs

GROUP = "atlas"
HEAD = ("layer", "head")


def add_columns(groups: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Add numbers of single heads from other groups to the group `atlas`.

    Args:
        groups: Groups of a run by name; groups without numbers of heads have no effect.

    Returns:
        The group at the layers and heads of the atlas; without a group `atlas`, only the columns of
        other groups.
    """
    base = groups.get(GROUP, xr.Dataset())
    found: dict[str, xr.DataArray] = {}
    for name, variable, column, become in _TAKEN:
        if name in groups and variable in groups[name]:
            mean = _over_prompts(groups[name][variable])
            values = mean if become is None else become(mean)
            # An empty column would suggest a measurement
            if set(HEAD) <= set(values.dims) and _says_something(values):
                found[column] = values
    if not found:
        return base
    # Measures and the atlas may have different layers or heads
    place = {axis: base[axis] for axis in HEAD if axis in base.coords}
    made = {name: _at_heads(values, place) for name, values in found.items()}
    # `_at_heads` drops coordinates, so without an atlas the schemes come from a measure
    if place or "scheme" not in next(iter(found.values())).coords:
        return base.assign(made)
    return xr.Dataset(made).assign_coords(scheme=next(iter(found.values()))["scheme"])


def _over_prompts(values: xr.DataArray) -> xr.DataArray:
    return (
        values.mean("prompt", skipna=True, keep_attrs=True) if "prompt" in values.dims else values
    )


def _band(by_band: xr.DataArray) -> xr.DataArray:
    by_band = by_band.transpose("layer", "head", "band")
    # Heads without rotation have NaN in all bands; argmax would return the first band
    known = np.isfinite(by_band.values).any(-1)
    largest = np.where(np.isfinite(by_band.values), by_band.values, -np.inf).argmax(-1)
    text = np.where(known, by_band["band"].values.astype(object)[largest], "")
    band = by_band.isel(band=0, drop=True).copy(data=text)
    return with_attrs(
        band, "band of rotary components that accounts for most of the variance of the logits", "1"
    )


def _slow_pairs(slow: xr.DataArray) -> xr.DataArray:
    # -1 marks layers without rotary pairs: their count is NaN, not 0
    count = (slow == 1).sum("component").where((slow >= 0).any("component"))
    return with_attrs(count, "slow dominating rotary pairs", "pairs")


_TAKEN: tuple[tuple[str, str, str, Callable[[xr.DataArray], xr.DataArray] | None], ...] = (
    ("attention_mass", "mass", "mass", None),
    ("position_sources", "share", "reads", None),
    ("position_sources", "kind", "kind", None),
    ("components", "vaf_band", "band", _band),
    ("three_axis", "r", "three_axis_r", None),
    ("fake_distance", "r", "fake_distance_r", None),
    ("fake_distance", "semantic_share", "semantic_share", None),
    ("rotation", "slow_dominating", "slow_pairs", _slow_pairs),
    ("effects", "effect", "effect", None),
)
"""Group, variable, name of the column in the atlas, and the reduction of the variable's mean over
prompts.
"""


def _says_something(values: xr.DataArray) -> bool:
    """Whether any head has a number or a text."""
    return bool((values != "").any() if values.dtype.kind in "OU" else np.isfinite(values).any())


def _at_heads(values: xr.DataArray, place: Mapping[str, xr.DataArray]) -> xr.DataArray:
    """Return values at the layers and heads of an atlas, empty if values are missing.

    Layer and head are the first axes; other coordinates are dropped.
    """
    values = values.reset_coords(drop=True).transpose("layer", "head", ...)
    empty: Any = "" if values.dtype.kind in "OU" else np.nan
    return values.reindex(place, fill_value=empty)
