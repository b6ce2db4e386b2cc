"""The data of a run that the explorer of its model uses: prompts and the table of heads.

A run is a tree of `ri.analyze`, with a group per measure. This module knows no measure by name.
"""

from __future__ import annotations

from typing import Any

import xarray as xr

from repo_interp.errors import InputError
from repo_interp.measures.measure_catalogue import measures_offering
from repo_interp.plots.marks.reading import described_prompts, prompt_tokens
from repo_interp.plots.view_catalogue import view_of_heads
from repo_interp.run import require_run
from repo_interp.storage.json_values import as_json
from repo_interp.tasks import Prompt
from repo_interp.tasks.prompt import GENERATED, REST


def head_table(run: xr.DataTree) -> dict[str, Any] | None:
    """Read the table of heads that a view of the run makes.

    Args:
        run: A run of `ri.analyze`.

    Returns:
        Names of columns, and rows; None if no view has such a table.
    """
    view = view_of_heads(run)
    if view is None or view.heads is None:
        return None
    frame = view.heads(run)
    if view.head_columns:
        columns = ("layer", "head", *view.head_columns)
        frame = frame[[name for name in columns if name in frame]]
    return {"columns": list(frame.columns), "rows": as_json([*frame.itertuples(index=False)])}


def prompts_in(run: xr.DataTree) -> list[Prompt]:
    """Read the prompts that a run describes.

    Args:
        run: A run of `ri.analyze`.

    Returns:
        The prompts.

    Raises:
        InputError: The run does not hold them.
    """
    require_run(run)
    group = described_prompts(run)
    if group is None or "token_id" not in group:
        raise InputError(
            "this run does not hold its prompts; analyze again with the measure "
            f"{' or '.join(measures_offering('prompt_tokens'))}"
        )
    prompts = []
    for number in map(int, group["prompt"].values):
        told = prompt_tokens(group, number)
        ids = group["token_id"].sel(prompt=number).values[: told.count].tolist()
        spans = {
            name: tuple(places)
            for name, places in told.spans.items()
            # A Prompt derives the rest, and takes generated tokens apart
            if name not in (REST, GENERATED)
        }
        texts = told.texts if told.texts_are == "text" else None
        given = (
            group["position_id"].sel(prompt=number).transpose("token", ...)
            if "position_id" in group
            else None
        )
        prompts.append(
            Prompt(
                tuple(ids),
                spans,
                tuple(told.spans.get(GENERATED, ())),
                token_text=texts,
                position_ids=None if given is None else given.values[: told.count].tolist(),
                documents=1,
            )
        )
    return prompts
