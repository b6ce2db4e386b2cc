"""The probe of the token index in one call: `ri.position_probe`.

Runs only the measure of `probe_measure`, and adds its finding to the numbers.
"""

from __future__ import annotations

import numpy as np
import xarray as xr
from torch import nn

from repo_interp.analysis.analyze import analyze
from repo_interp.analysis.coercion import Prompts
from repo_interp.errors import InputError
from repo_interp.plots.marks import group
from repo_interp.plugins.probe.held_out_index import FEWEST
from repo_interp.plugins.probe.probe_measure import PositionProbe
from repo_interp.plugins.probe.view import VIEW, interval


def position_probe(
    model: nn.Module, prompts: Prompts, *, tokens: int = 128, folds: int = 5
) -> xr.Dataset:
    """Measure how well a linear probe predicts the token index from each layer's residual stream.

        found = ri.position_probe(model, prompts)
        print(found.attrs["finding"])
        ri.plots.position_probe(found)

    Args:
        model: Bridge or model.
        prompts: Three or more different prompts, in any form that `analysis.coercion` takes; the
            smooth null needs six. Intervals are over prompts, so thirty parts of a long text are
            better than three.
        tokens: Most tokens to read of a prompt; of a longer prompt, the middles of equal parts.
        folds: Number of sets of prompts; every set is held out once.

    Returns:
        `r_squared`, `r_squared_low`, `r_squared_high` and `error` [layer], `null_low` and
        `null_high` [null, layer], `probed_prompts`, `probed_tokens`. The attribute `finding` is a
        sentence.

    Raises:
        InputError: There are fewer than three different prompts of two tokens or more.
    """
    measure = PositionProbe(tokens=tokens, folds=folds)
    run = analyze(model, prompts, [measure], experiments=())
    found = group(run, measure.name)
    if int(found["probed_prompts"]) < FEWEST:
        raise InputError(
            f"{int(found['probed_prompts'])} different prompts were given; a probe is fitted to "
            f"some and judged on others: give {FEWEST} or more, such as parts of a text"
        )
    finding = next(iter(VIEW.findings(run)), None)
    most = found.isel(layer=int(found["r_squared"].fillna(-np.inf).argmax("layer")))
    nothing = (
        "No layer's residual stream tells much of the token index beyond its nulls: R² is at most "
        f"{interval(most)}, where it enters layer {int(most['layer'])}"
    )
    return found.assign_attrs(finding=nothing if finding is None else finding.sentence)
