"""Numbers of the heads of a trained checkpoint, from measures of repo_interp.

    range          positions of a prompt, largest minus smallest (`positions`)
    resolution     least distance in tokens at which positions show order, in all prompts (`patterns`)
    order          largest order that holds from some distance on: 1 always later, -1 always earlier
    needle         share of attention that generated tokens give to the needle (`attention_mass`)
    band           of rotary components, with most of the variance of logits (`components`)
    axes           correlation of logits with a sum of distance, query and key (`three_axis`)
    disentangled   correlation of logits with a position axis plus a semantic one, and the share of
                   the semantic one (`fake_distance`)

Numbers are means over prompts of the training length. Measures that do not fit the scheme are left
out and listed; a head may lack a number.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from position_papers.training.trained import configured_task, trained_configuration
from repo_interp.analysis.analyze import analyze
from repo_interp.analysis.notes import SilentMeasure
from repo_interp.errors import InputError, NotFinite
from repo_interp.models.load import load
from repo_interp.plugins.head_tables.atlas_table import atlas

PROMPTS = 8
MEASURES = (
    *("positions", "patterns", "attention_mass", "components", "three_axis", "fake_distance"),
)
_TAKEN = {
    "mass[needle]": "needle",
    "band": "band",
    "three_axis_r": "axes",
    "fake_distance_r": "disentangled",
    "semantic_share": "semantic share",
}
"""Columns of the atlas of heads, and their names on a card."""


def head_numbers(checkpoint: Path, test_set: str, device: str = "cpu") -> pd.DataFrame:
    """Measure a trained checkpoint.

    Args:
        checkpoint: Directory of the training run.
        test_set: Test set of the training length, for prompts.
        device: Device of the model.

    Returns:
        A row per layer and head; `attrs["left_out"]` has a line for each measure that does not
        fit.
    """
    configuration = trained_configuration(checkpoint)
    assert configuration is not None, checkpoint
    prompts = configured_task(configuration).prompts(PROMPTS, configuration.seed, test_set)
    model, groups, left_out = load(checkpoint, device), {}, []
    for measure in MEASURES:
        # One by one, so that one refusal does not stop other measures.
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", SilentMeasure)
                run = analyze(model, prompts, (measure,), experiments=(), progress=_quiet)
        except (InputError, NotFinite, SilentMeasure) as error:
            left_out.append(str(error) if measure in str(error) else f"{measure}: {error}")
            continue
        groups[measure] = run[measure].to_dataset()
    table = _table(groups)
    table.attrs["left_out"] = "\n".join(left_out)
    return table


def _quiet(*done: object) -> None:
    """Show no bar, since the card has one."""


def _table(groups: dict[str, xr.Dataset]) -> pd.DataFrame:
    run = xr.DataTree.from_dict(groups)
    table, more = pd.DataFrame(), {}
    with suppress(InputError):  # no measure has numbers by head
        table = pd.DataFrame(atlas(run)).set_index(["layer", "head"])
    if "positions" in groups:
        more["range"] = groups["positions"]["position_range"].mean("prompt")
    if "patterns" in groups:
        more |= {
            "resolution": groups["patterns"]["resolution"],
            "order": groups["patterns"]["order_told"],
        }
    columns = {
        name: values.reset_coords(drop=True).transpose("layer", "head").to_series()
        for name, values in more.items()
    }
    columns |= {name: table[own] for own, name in _TAKEN.items() if own in table}
    found = pd.DataFrame(columns)
    # Infinity means that there is no resolution.
    numbers = found.select_dtypes("number").replace([np.inf, -np.inf], np.nan)
    found[numbers.columns] = numbers
    return found.loc[:, found.notna().any()].reset_index()
