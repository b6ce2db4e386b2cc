"""Attention of tokens: the strongest keys of the selected head and token.

Group `attention_rows` of a run.

The page shows a row over the prompt's text, as bars, and as logits by distance. If the run has no
positions, as with a RoPE model, this section also shows the text and the heads. This module knows
nothing about how rows are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import xarray as xr

from repo_interp.plots.marks import (
    Chart,
    HeadRows,
    Heads,
    PromptRows,
    checkpoint_name,
    first_prompt,
    group,
    has_groups,
)
from repo_interp.plots.view import Interactive, PageOptions, View
from repo_interp.plots.views.explorer import EXPLORER


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    """Map attention on token 0 and on the previous token; chart rows of every head.

    Maps are means over the stored rows; a key that is not stored in a row counts as 0. The rows
    belong to the first prompt and to other prompts in the run.
    """
    rows, shown = group(run, "attention_rows"), first_prompt(run)
    first = 0 if shown is None else shown.prompt
    # Token 0 sees only itself, and has no previous token.
    later = rows.sel(query=rows["query"].values > 0)
    for name, key in (
        ("token 0", xr.zeros_like(later["query"])),
        ("the previous token", later["query"] - 1),
    ):
        share = 100 * later["weight"].where(later["key"] == key, 0.0).sum("rank").mean("query")
        # `where` and `sum` made 0 of heads without attention; these stay undefined.
        share = share.where(later["weight"].notnull().any(("query", "rank")))
        label = f"attention on {name}, mean over tokens of prompt {first}"
        yield Heads(share.assign_attrs(long_name=label, units="%"))
    prompts = [PromptRows(first, rows["weight"], rows["key"], rows["log_total"])]
    for prompt in rows["prompt"].values.tolist() if "prompt_weight" in rows else ():
        of_prompt = rows[["prompt_weight", "prompt_key", "prompt_log_total"]].sel(prompt=prompt)
        # Rows that the run does not keep of this prompt, padding among them, are NaN. The chart
        # wants the names of the first prompt.
        of_prompt = of_prompt.dropna("token", subset=["prompt_log_total"], how="all").rename(
            token="query", strongest="rank"
        )
        if prompt != first and of_prompt.sizes["query"]:
            prompts.append(PromptRows(prompt, *of_prompt.data_vars.values()))
    yield HeadRows("Attention of the chosen token", prompts)


def _embed(run: xr.DataTree, options: PageOptions) -> tuple[Any, Sequence[str]]:
    """Data for the explorer where no section of positions has it."""
    if has_groups(run, ["positions"]) or "token_count" not in group(run, "attention_rows"):
        return None, ()
    return EXPLORER.data(run, options)


VIEW = View(
    "attention_rows",
    "Where a token looks",
    "Attention after the softmax from a token to the keys that it looks at most, and the "
    "logits by their distance: choose a head and a token above.",
    _charts,
    interactive=Interactive(EXPLORER.markup, EXPLORER.script, _embed, EXPLORER.parts),
    describe=lambda run: f"Attention in {checkpoint_name(run)}",
    compared=(),
    not_averaged=("weight", "key", "log_total", "prompt_weight", "prompt_key", "prompt_log_total"),
)
