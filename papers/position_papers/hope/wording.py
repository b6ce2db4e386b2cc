"""Texts in HoPE's verdicts and captions about the replicates behind the numbers: the kind of
sequences, bands, controls, and whether L was capped.

The functions read the attributes of the measurements of `replicates`.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.tasks.random_tokens import Kind

OVER_REPLICATES = "replicates"
"""The units of the spread of a verdict: the name of replicates in tables."""


def labelled(kind: Kind, *parts: str) -> str:
    """Return the name of the part of a claim about one kind of sequences; independent tokens are
    not named.
    """
    return ", ".join(filter(None, (*parts, "one token repeated" if kind == "repeated" else "")))


def named_bands(band: xr.Dataset, data: xr.Dataset) -> str:
    """Return sentences for a caption: L, the activated components, the number of lower ones, and
    whether L was capped.
    """
    chosen = np.flatnonzero(band["activated"].values)
    thetas = band["frequency"].values[chosen]
    named = ", ".join(
        f"r = {place} (θ = {theta:.4g} rad)" for place, theta in zip(chosen, thetas, strict=True)
    )
    lower = f"{int(band['low_frequency'].sum())} components are lower"
    return (
        f"L = {data.attrs['length']} tokens. Activated: {named or 'none'}; "
        f"{lower}.{capped_caption(data)}"
    )


def parts_caption(data: xr.Dataset) -> str:
    """Return the sentence of a caption for controls with fewer layers than the trained weights."""
    trained, *controls = map(
        int, data["logit"].notnull().any(("repeat", "distance")).sum("layer").values
    )
    few = bool(controls) and controls[0] < trained
    return (
        f" Random weights: the first {controls[0]} of {trained} layers, one replicate each."
        if few
        else ""
    )


def capped(data: xr.Dataset) -> str:
    """Return the reason why claims about the training length cannot be judged on `data` if L was
    capped below it; else "".
    """
    length, trained = data.attrs["length"], data.attrs["training_length"]
    if length == trained:
        return ""
    return (
        f"L was capped at {length} tokens, and the claim is about the {trained} of "
        "training; --set hope.length=0 measures them"
    )


def capped_caption(data: xr.Dataset) -> str:
    """Return the sentence of a caption about a capped L."""
    length, trained = data.attrs["length"], data.attrs["training_length"]
    return (
        f" Here L is capped at {length} of the {trained} tokens of training."
        if length < trained
        else ""
    )
