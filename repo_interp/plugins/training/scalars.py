"""A few numbers of a run, for the log of a training."""

from __future__ import annotations

import numpy as np
import xarray as xr

from repo_interp.plots.findings import findings
from repo_interp.positions.layouts import FIXED
from repo_interp.run import require_run


def training_scalars(run: xr.DataTree) -> dict[str, float]:
    """Return a few numbers of a run for the log of a training.

        positions_range           of learned positions, mean over prompts and heads
        positions_hybrid_share    of chunks, mean over heads with learned positions
        positions_NAME_mass       attention from generated tokens to the prompts' main span:
                                  mean over prompts, of the head with most
        positions_findings        number of findings (`ri.findings`)
        positions_valid_cells     number of values by layer and head (and prompt, if stored by
                                  prompt) that are finite and differ from all other heads
        positions_tied_cells      number of values that another head of the layer has too
        positions_undefined_cells number of values that are NaN or infinite

    Args:
        run: Run of `measure_step` or `analyze`.

    Returns:
        Numbers by name, as far as the run has their groups.
    """
    require_run(run)
    found: dict[str, float] = {}
    for name, group, variable, chosen in (
        ("range", "positions", "position_range", {}),
        ("hybrid_share", "patterns", "pattern_share", {"pattern": "hybrid"}),
    ):
        if group in run.children:
            values = run[group].to_dataset()[variable].sel(chosen)
            learned = ~values["scheme"].isin(FIXED)
            found |= {name: float(values.isel(layer=learned).mean())} if learned.any() else {}
    span = str(run.attrs.get("main_span", ""))
    if span and "attention_mass" in run.children:
        found[f"{span}_mass"] = float(
            run["attention_mass"].to_dataset()["mass"].sel(span=span).mean("prompt").max()
        )
    found["findings"] = float(len(findings(run)))
    cells = [
        # [..., head], for the comparison of heads below
        array.transpose(..., "head").values
        for group in run.children.values()
        for array in group.to_dataset().data_vars.values()
        if array.dtype.kind == "f"
        and {"layer", "head"} <= {*array.dims} <= {"prompt", "layer", "head"}
    ]
    counts = np.zeros(3)
    for values in cells:
        finite = np.isfinite(values)
        # [..., head, head]: every head equals itself, so a tied head has a count of two or more.
        tied = finite & ((values[..., None] == values[..., None, :]).sum(-1) > 1)
        counts += [(finite & ~tied).sum(), tied.sum(), (~finite).sum()]
    kinds = ("valid_cells", "tied_cells", "undefined_cells")
    found |= dict(zip(kinds, counts.tolist(), strict=True))
    return {f"positions_{name}": value for name, value in found.items()}
