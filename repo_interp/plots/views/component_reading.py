"""What figures and the page take out of the group `components` of a run: the layers that rotate alike, bands, VAF.

Knows a run; draws nothing.
"""

from __future__ import annotations

import warnings

import numpy as np
import xarray as xr

from repo_interp.plots.marks.reading import group, learned_layers, schemes


def rotating_layers(components: xr.Dataset) -> list[int]:
    """Layers that rotate by the frequencies of the first layer that rotates anything; none where none does."""
    frequency = components["frequency"].transpose("layer", "component")
    rotating = np.flatnonzero(frequency.notnull().any("component").values)
    if not rotating.size:
        return []
    alike = [place for place in rotating if np.array_equal(frequency[place], frequency[rotating[0]], equal_nan=True)]
    return [int(components["layer"].values[place]) for place in alike]


def bands(components: xr.Dataset, layer: int) -> xr.Dataset:
    """`frequency`, `activated` and `low_frequency` [component] of a layer."""
    chosen = (
        components[["frequency", "activated", "low_frequency"]].sel(layer=layer).drop_vars(["layer", "scheme"], errors="ignore")
    )
    return chosen.assign({name: chosen[name].astype(bool) for name in ("activated", "low_frequency")})


def vaf_of_heads(components: xr.Dataset, name: str = "vaf") -> xr.DataArray:
    """VAF [layer, head, component] in per cent, the mean over prompts, however the run keeps it."""
    if f"{name}_mean" in components:
        return components[f"{name}_mean"].transpose("layer", "head", "component")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a head whose logits do not vary has no VAF
        return components[name].mean("prompt").transpose("layer", "head", "component")


def training_length(run: xr.DataTree) -> int:
    """The training length that bands were made for, in tokens."""
    return int(group(run, "components").attrs["training_length"])


def logits_by_scheme(run: xr.DataTree) -> xr.DataArray:
    """Mean logit [checkpoint, weights, length, distance] as `logit_by_distance` draws it: a "checkpoint" a scheme of the layout."""
    components = group(run, "components")
    named = schemes(components)
    kinds = list(dict.fromkeys(named.values()))
    curves = [
        components["logit_by_distance"]
        .sel(layer=[layer for layer, scheme in named.items() if scheme == kind])
        .mean(("layer", "head"))
        for kind in kinds
    ]
    stacked = xr.concat(curves, dim=xr.IndexVariable("checkpoint", kinds))
    stacked = stacked.expand_dims(weights=["trained"], length=[stacked.sizes["distance"]])
    trained = training_length(run)
    return stacked.assign_coords(scheme=("checkpoint", kinds), training_length=("checkpoint", [trained] * len(kinds)))


def turns_of_learned(components: xr.Dataset) -> xr.Dataset | None:
    """`turn_share` [component, turn], the mean over heads that learn positions, and `turn_upper`; None where none does."""
    layers = learned_layers(components)
    if not layers:
        return None
    share = components["turn_share"].sel(layer=layers).mean(("layer", "head"))
    return bands(components, layers[0]).assign(turn_share=share, turn_upper=components["turn_upper"])
