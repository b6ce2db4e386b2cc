"""Rotary components by band (HoPE sec. 3.1): activated, pi / L < theta_r < 2 pi / L, and those of lower frequency.

Read from what `replicates` measured; `measures.components` says which component is in which band.
"""

from __future__ import annotations

import numpy as np
import xarray as xr


def bands(data: xr.Dataset) -> xr.Dataset:
    """`frequency`, `activated` and `low_frequency` [component] of the first layer that rotates, of replicates or of one of them."""
    by_layer = data[["frequency", "activated", "low_frequency"]].drop_attrs(deep=False)
    by_layer = by_layer.isel({axis: 0 for axis in by_layer.dims if axis not in ("layer", "component")}, drop=True)
    rotating = np.flatnonzero(by_layer["frequency"].notnull().any("component").values)
    place = int(rotating[0]) if rotating.size else 0
    chosen = by_layer.isel(layer=place).drop_vars(["layer", "scheme"], errors="ignore")
    return chosen.assign({name: chosen[name].astype(bool) for name in ("activated", "low_frequency")})
