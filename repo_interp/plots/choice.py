"""Which heads to show first where nobody chose: those with the most attention on the needle, else those that spread most.

Of the layers that learn positions, if there are any. Reads a run; draws nothing.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.plots.mass import nanmean, ranked
from repo_interp.plots.reading import group, has_groups, learned_layers


def telling_heads(run: xr.DataTree, span: str = "needle") -> list[tuple[int, int]]:
    """All heads (layer, head) that have positions and learn them, the most telling first; all with positions where none learns.

    Raises InputError when the run has no positions.
    """
    positions = group(run, "positions")
    ranges = positions["position_range"].mean("prompt").transpose("layer", "head")
    scores = ranges
    if has_groups(run, ["attention_mass"]) and span in run["attention_mass"]["span"].values:
        mass = run["attention_mass"]["mass"].sel(span=span).transpose("layer", "head", "prompt")
        means = xr.DataArray(nanmean(mass.values, axis=2), {"layer": mass["layer"], "head": mass["head"]})
        scores = means.reindex(layer=ranges["layer"], head=ranges["head"])
        if not np.isfinite(scores).any():
            scores = ranges
    chosen = learned_layers(positions) or [int(layer) for layer in ranges["layer"].values]
    usable = scores.where(np.isfinite(ranges)).sel(layer=chosen)
    heads = usable["head"].values
    return [(chosen[layer], int(heads[head])) for layer, head in ranked(usable.values)]
