"""What to show first where nobody chose: the span that a prompt is about, and the heads that have most to tell.

Of the layers that learn positions, if there are any, the heads with the most attention on that span; without attention mass,
those whose positions spread most. Reads a run; draws nothing.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.plots.marks.arrays import nanmean, ranked
from repo_interp.plots.marks.reading import BACKGROUND, group, has_groups, learned_layers, ordered_spans


def main_span(run: xr.DataTree) -> str | None:
    """The span that attention is ranked by: the needle, else the first one that is neither the rest nor generated. None without
    one.
    """
    if not has_groups(run, ["attention_mass"]):
        return None
    dataset = group(run, "attention_mass")
    for name in ordered_spans(map(str, dataset["span"].values)):
        if name not in (BACKGROUND, "generated") and np.isfinite(dataset["table"].sel(span=name)):
            return name
    return None


def telling_heads(run: xr.DataTree) -> list[tuple[int, int]]:
    """All heads (layer, head) that have positions and learn them, the most telling first; all with positions where none learns.

    Raises InputError when the run has no positions.
    """
    positions = group(run, "positions")
    ranges = _over_prompts(positions["position_range"])
    scores, span = ranges, main_span(run)
    if span is not None:
        means = _over_prompts(group(run, "attention_mass")["mass"].sel(span=span))
        scores = means.reindex(layer=ranges["layer"], head=ranges["head"])
    chosen = learned_layers(positions) or [int(layer) for layer in ranges["layer"].values]
    usable = scores.where(np.isfinite(ranges)).sel(layer=chosen)
    heads = usable["head"].values
    return [(chosen[layer], int(heads[head])) for layer, head in ranked(usable.values)]


def _over_prompts(values: xr.DataArray) -> xr.DataArray:
    values = values.transpose("layer", "head", "prompt")
    axes = {"layer": values["layer"].values, "head": values["head"].values}
    return xr.DataArray(nanmean(values.values, axis=2), axes, ("layer", "head"))
