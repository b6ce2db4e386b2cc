"""Rows of positions by distance, and the text of a prompt, once per kind of heads.

The colors of a text are the positions of the clearest head of a layer.

    clearness    for a clock: 1 / resolution; for another kind: held-out share of the variance that
                 the source explains

If gates count positions (CoPE), the mean gate of a token replaces its position. `position_texts.js`
chooses heads and draws; the explorer has the texts and positions. This module knows nothing about
how heads got their kinds.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.plots.marks import (
    described_prompts,
    group,
    heads_named,
    heads_where,
    nested_digits,
    percent,
    schemes,
)
from repo_interp.plots.view import Interactive, PageOptions
from repo_interp.plots.views.explorer import pack_layer
from repo_interp.plugins.sources.names import CLOCKS, COUNTS, FINE, MIDDLE, NAMES, STEP
from repo_interp.plugins.sources.rows_picture import embedded_picture

FROM = {
    "counts tokens": f"from at most {COUNTS} tokens apart",
    "fine clock": f"from at most {FINE} apart",
    "middle clock": f"from at most {MIDDLE} apart",
    "slow clock": "from further apart",
}
"""Phrases for the resolution of clocks, by kind."""
READS = {
    **{kind: f"order two tokens rightly in 90 % of pairs {where}" for kind, where in FROM.items()},
    "slow shape": "follow one slow shape in every text",
    "places words": "depend on which token it is",
    "places by previous word": "depend on the token before",
    "places in segments": "depend on the line, sentence or span",
    "marks lines": "step at line ends, whichever token ends them",
}
"""Phrases for the use of positions, by kind of heads."""
SOURCE_OF = {
    "places words": ("token", "the word"),
    "places by previous word": ("previous", "the previous word"),
    "places in segments": ("segment", "line, sentence or span"),
    "marks lines": ("line end", "the end of a line"),
}
"""Source and phrase by kind."""


def clearest(run: xr.DataTree) -> dict[str, xr.DataArray]:
    """Compute the clearness of every head.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        Clearness [layer, head] by kind in the run; NaN for heads of other kinds.
    """
    sources, found = group(run, "position_sources"), {}
    if "kind" not in sources or "resolution" not in sources:
        return {}
    for kind in NAMES:
        if kind in CLOCKS:
            values = 1 / sources["resolution"]
        elif kind == "slow shape":
            values = sources["shape"]
        else:
            values = explained_by(sources, SOURCE_OF[kind][0])
        found[kind] = values.where(sources["kind"] == kind).transpose("layer", "head")
    return {kind: values for kind, values in found.items() if values.notnull().any()}


def explained_by(sources: xr.Dataset, source: str) -> xr.DataArray:
    """Return the held-out share of a source for every head.

    Args:
        sources: Group `position_sources` of a run.
        source: Label of the source.

    Returns:
        Shares [layer, head] added to the slow part; for segments that lead the slow part, in place
        of it.
    """
    alone = sources["alone"].sel(source=source, drop=True)
    if source != "segment":
        return alone
    slow, ahead = sources["alone"].sel(source="slow", drop=True), sources["segments_ahead"]
    return xr.apply_ufunc(np.fmax, alone, (slow.clip(0) + ahead).where(ahead >= STEP))


def _says(kind: str, clear: float) -> str:
    """Phrase about a head on the page."""
    if kind in CLOCKS:
        return f"orders two tokens rightly in 90 % of pairs from {1 / clear:.0f} tokens apart"
    explains = f"explains {percent(clear)} of the variance of positions, held out"
    if kind == "slow shape":
        return f"one slow shape over all texts {explains}"
    too = " (a slow curve may explain part of it too)" if kind == "places in segments" else ""
    return f"{SOURCE_OF[kind][1]} {explains}{too}"


def kinds_of_heads(
    run: xr.DataTree, options: PageOptions
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Prepare heads by kind, and gates of the prompts with texts in the explorer.

    Args:
        run: Tree of a run, a group per measure.
        options: Limits and prompts of the page.

    Returns:
        The data (None if no head has a kind or no prompt is described), and sentences about parts
        that were left out.
    """
    kinds, described = clearest(run), described_prompts(run)
    if not kinds or described is None:
        return None, ()
    sources, gates = group(run, "position_sources"), {}
    if "gates" in run.children:
        # `pack_layer` reads a variable `position` over tokens; gates are packed in the same form.
        by_token = run["gates"]["gate_by_token"].rename(key="token").to_dataset(name="position")
        by_token["token_count"] = described["token_count"]
        # Other layers have no gates.
        layers = [layer for layer, scheme in schemes(by_token).items() if scheme.startswith("cope")]
        for prompt in described["prompt"].values.tolist():
            gates[prompt] = {layer: pack_layer(by_token, prompt, layer) for layer in layers}
    shown = [
        {
            "kind": kind,
            "where": heads_named(heads_where(values.notnull()), per_layer=values.sizes["head"]),
            "clear": nested_digits(values.values),
            "says": [
                ["" if np.isnan(clear) else _says(kind, float(clear)) for clear in row]
                for row in values.values
            ],
        }
        for kind, values in kinds.items()
    ]
    axes = {axis: sources[axis].values.tolist() for axis in ("layer", "head")}
    named, picture = int((sources["kind"] != "").sum()), embedded_picture(run)
    return {"kinds": shown, "named": named, "gates": gates, "picture": picture, **axes}, ()


_FILES = files("repo_interp.plugins.sources")
TEXTS = Interactive(
    _FILES / "position_texts.html", _FILES / "position_texts.js", kinds_of_heads, follows=True
)
