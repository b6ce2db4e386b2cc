"""What HoPE's verdicts and captions say of the replicates behind their numbers: kind of sequences,
bands, twins, where L was capped.

Knows the attributes of what `replicates` measured, and no claim.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.tasks.random_tokens import Kind

OVER_REPLICATES = "replicates"
"""What the spread of a verdict is taken over, as tables have always called replicates."""


def labelled(kind: Kind, *parts: str) -> str:
    """The part of a claim that is about sequences of a kind; independent tokens are not named."""
    return ", ".join(filter(None, (*parts, "one token repeated" if kind == "repeated" else "")))


def named_bands(band: xr.Dataset, data: xr.Dataset) -> str:
    """L, which components are activated and how many are lower, and whether L was capped, as
    sentences for a caption.
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
    """What a caption adds where controls have fewer layers than the trained weights."""
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
    """Why claims about the training length cannot be judged on `data`, where L was capped below it;
    "" where it was not.
    """
    length, trained = data.attrs["length"], data.attrs["training_length"]
    if length == trained:
        return ""
    return (
        f"L was capped at {length} tokens, and the claim is about the {trained} of "
        "training; --set hope.length=0 measures them"
    )


def capped_caption(data: xr.Dataset) -> str:
    """What a caption adds where L was capped."""
    length, trained = data.attrs["length"], data.attrs["training_length"]
    return (
        f" Here L is capped at {length} of the {trained} tokens of training."
        if length < trained
        else ""
    )
