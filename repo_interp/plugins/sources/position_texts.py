"""The text of a prompt, once per kind of heads.

Its colours are the positions of the clearest head of a layer.

    clearness    of a head that counts tokens: rank correlation of positions and token index; of one that places words or segments: what
                 these explain of its positions, held out; of one that marks lines: its step at line
                 ends, in standard deviations

Where gates count positions (CoPE) the mean gate of a token takes the place of its position.
`position_texts.js` chooses heads and draws; texts and positions are those of the explorer. Knows
nothing about how heads got their kinds.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import xarray as xr

from repo_interp.plots.marks import (
    described_prompts,
    group,
    heads_named,
    heads_where,
    nested_digits,
    over_prompts,
    schemes,
)
from repo_interp.plots.view import Interactive, PageOptions
from repo_interp.plots.views.explorer import pack_layer

READS = {
    "counts tokens": "follow the token index",
    "marks lines": "step at line ends",
    "places words": "depend on which token it is",
    "places in segments": "depend on the line, sentence or span",
}
"""Of a kind of heads, what its positions do."""
CLEARNESS = {
    "counts tokens": ("alone", "index"),
    "places words": ("alone", "token"),
    "marks lines": ("line_step", "rest"),
    "places in segments": ("alone", "segment"),
}
"""By kind: the variable and its source that say how clearly a head is of it; of counters the trend,
where that was measured.
"""


def clearest(run: xr.DataTree) -> dict[str, xr.DataArray]:
    """Compute how clearly heads show their kind.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        Clarity [layer, head] by kind that some head has; NaN for heads of other kinds.
    """
    sources, found = group(run, "position_sources"), {}
    for kind, (variable, source) in CLEARNESS.items() if "kind" in sources else ():
        values = sources.sel(source=source)[variable]
        if kind == "counts tokens" and "patterns" in run.children:
            values = over_prompts(group(run, "patterns").get("trend", values))
        found[kind] = values.where(sources["kind"] == kind).transpose("layer", "head")
    return {kind: values for kind, values in found.items() if values.notnull().any()}


def kinds_of_heads(
    run: xr.DataTree, options: PageOptions
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Prepare heads by kind, and gates of the prompts whose texts the explorer has.

    Args:
        run: Tree of a run, a group per measure.
        options: Limits and prompts of the page.

    Returns:
        The data, None if no head has a kind or no prompt is described, and sentences for the parts
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
        # Other layers have no gates to show.
        layers = [layer for layer, scheme in schemes(by_token).items() if scheme.startswith("cope")]
        for prompt in described["prompt"].values.tolist():
            gates[prompt] = {layer: pack_layer(by_token, prompt, layer) for layer in layers}
    shown = [
        {
            "kind": kind,
            "measured": values.name,
            "where": heads_named(heads_where(values.notnull()), per_layer=values.sizes["head"]),
            "clear": nested_digits(values.values),
        }
        for kind, values in kinds.items()
    ]
    axes = {axis: sources[axis].values.tolist() for axis in ("layer", "head")}
    return {"kinds": shown, "named": int((sources["kind"] != "").sum()), "gates": gates, **axes}, ()


_FILES = files("repo_interp.plugins.sources")
TEXTS = Interactive(
    _FILES / "position_texts.html", _FILES / "position_texts.js", kinds_of_heads, follows=True
)
