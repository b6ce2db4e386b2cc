"""Heads behind a failing cell of a map of scores.

These heads attend less to the needle in the failing cell; their effect is measured on prompts with
a right answer.

    change_h = mean over failing prompts of mass_h(needle) - mean over passing ones
            from the rows that produce the answer
    effect_h = mean over passing prompts of log p(answer | h ablated) - log p(answer)
            nats, of the heads of the largest change

The prompts are generated again from their description in the run of scores. Passing prompts are
from the cell and the nearest cells, cells of equal length first, until there are `FEWEST`.
This module knows nothing about tasks and how scores are drawn.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from torch import nn

from repo_interp.analysis.ablation_effects import log_probabilities
from repo_interp.analysis.analyze import analyze
from repo_interp.errors import InputError, warn
from repo_interp.experiments.experiment import standard_error
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.load import open_model
from repo_interp.models.provenance import identity
from repo_interp.run import require_run
from repo_interp.tasks import Prompt, make_task, recorded_task
from repo_interp.tasks.niah import niah
from repo_interp.tasks.prompt import digest, main_span
from repo_interp.tasks.task import whole_number

if TYPE_CHECKING:
    import pandas as pd


FEWEST = 5
"""Least number of passing prompts to compare with, if the run has so many."""


def explain_cell(
    scores: xr.DataTree, depth: float, length: int, bridge: nn.Module | None = None, most: int = 10
) -> pd.DataFrame:
    """Return the heads behind a failing cell of a map of scores.

        ri.explain_cell(scores, depth=10, length=512)

    Args:
        scores: Run of `ri.score` or `repo-interp score` with a map by depth and length.
        depth: Depth of the cell, in per cent.
        length: Length of the cell, in tokens.
        bridge: Model that was scored; None: it is loaded by its name.
        most: Number of heads with the largest change for which effects are measured.

    Returns:
        One row per head, the largest effects first, then the largest changes: layer, head, the mass
        on the needle in per cent for `failing` and `passing` prompts, their difference `change`,
        and for `most` heads `effect` in nats and `standard_error`. `attrs` has the compared
        `prompts`, failing ones first, `failing_prompts` as (test set, prompt) of the run, and
        `passing_cells`.

    Raises:
        InputError: The run has no such map, no prompt fails in the cell, no prompt marks a needle,
            or the model or the prompts differ from the scored ones.
    """
    require_run(scores)
    group = scores["scores"].to_dataset() if "scores" in scores.children else xr.Dataset()
    if "score_map" not in group or group["score_map"].dims != ("depth", "length"):
        raise InputError(
            "this run has no map of scores by depth and length; score a task that has both, "
            "such as niah or ruler"
        )
    bridge = open_model(str(scores.attrs["checkpoint"])) if bridge is None else bridge
    decoder = as_decoder(bridge)
    if identity(decoder).get("checkpoint_digest") != scores.attrs.get("checkpoint_digest"):
        raise InputError(
            f"the run scored other weights of {scores.attrs.get('checkpoint')} than those of "
            "this model; give the model that it scored"
        )
    prompts, passed, cells = _scored_prompts(group, decoder)
    here = [number for number, cell in enumerate(cells) if cell == (depth, length)]
    failing = [number for number in here if not passed[number]]
    if not failing:
        known = ", ".join(
            f"({d}, {n})" for d, n in sorted({cells[number] for number in np.flatnonzero(~passed)})
        )
        raise InputError(
            f"no prompt fails at depth {depth} and length {length}; cells with failing "
            f"prompts: {known or 'none'}"
        )
    # Effects are measured on prompts with a right answer: a failing prompt has none to lose.
    passing = _nearest(cells, passed, (depth, length))
    if len(passing) < FEWEST:
        warn(
            f"{len(passing)} of the run's prompts passed, so effects are means over {len(passing)}; "
            f"for at least {FEWEST} score more prompts per test set"
        )
    span, chosen = main_span(prompts), [*failing, *passing]
    if span is None:
        raise InputError("the prompts mark no needle that heads could look at")
    run = analyze(bridge, [prompts[number] for number in chosen], ("attention_mass",))
    # Per cent; failing prompts are first in `chosen`, as `sides` expects
    mass = 100 * run["attention_mass"]["mass"].sel(span=span)
    sides = {"failing": slice(len(failing)), "passing": slice(len(failing), None)}
    means = {
        name: mass.isel(prompt=side).mean("prompt").reset_coords(drop=True)
        for name, side in sides.items()
    }
    # Heads of layers without attention have no mass
    table = xr.Dataset(means).to_dataframe(["layer", "head"]).dropna().reset_index()
    table["change"] = table["failing"] - table["passing"]
    table = table.sort_values("change", key=abs, ascending=False, ignore_index=True)
    pairs = [(int(layer), int(head)) for layer, head in table[["layer", "head"]].to_numpy()[:most]]
    # The empty set is the whole model, the reference of all effects
    whole, *ablated = log_probabilities(
        decoder, [[], *([pair] for pair in pairs)], [prompts[number] for number in passing]
    )
    # The table is longer: only its first `most` heads were ablated
    for row, values in zip(table.index, ablated, strict=False):
        table.loc[row, ["effect", "standard_error"]] = (
            (values - whole).mean(),
            standard_error(values - whole),
        )
    table = table.sort_values(
        "effect", key=abs, ascending=False, kind="stable", na_position="last", ignore_index=True
    )
    passing_cells = sorted({cells[number] for number in passing})
    table.attrs = {
        "failing": len(failing),
        "passing": len(passing),
        "passing_cells": passing_cells,
        # (test set, prompt): prompts are numbered test set by test set
        "failing_prompts": [divmod(number, group.sizes["prompt"]) for number in failing],
        "prompts": [prompts[number] for number in chosen],
        "span": span,
    }
    return table


def _scored_prompts(
    group: xr.Dataset, decoder: Decoder
) -> tuple[list[Prompt], np.ndarray, list[tuple[int, int]]]:
    """Return the scored prompts with their answers, whether they passed, and their cells."""
    count, seed, prompts = group.sizes["prompt"], int(group.attrs["seed"]), []
    for test_set in group["test_set"].values:
        made, asked = _remake(group, str(test_set), count, seed, decoder)
        # `asked`, not `made`: the run has the digest of prompts without answers
        if digest(asked) != str(group["prompts_digest"].sel(test_set=test_set).values):
            raise InputError(
                f"the prompts of test set {test_set} cannot be made again as they were "
                "scored; score again"
            )
        prompts += made
    # A score below 1 misses some of several answers, so the prompt counts as failing
    passed = group["score"].transpose("test_set", "prompt").values.ravel() >= 1
    cells = [
        # Depths in tens of per cent, as `task_scores` bins them for the map
        (round(float(prompt.attributes["depth"]), -1), int(prompt.attributes["length"]))
        for prompt in prompts
    ]
    return prompts, passed, [(int(depth), length) for depth, length in cells]


def _remake(
    group: xr.Dataset, test_set: str, count: int, seed: int, decoder: Decoder
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Return the prompts of a test set with their answers, and as they were scored."""
    if group.attrs["task"] == "ruler":
        options = {name: group.attrs[name] for name in ("dialect", "depth") if name in group.attrs}
        length = whole_number(test_set, "the number of tokens", 1 << 22)
        made, asked = (
            niah(
                decoder.tokenizer,
                str(group.attrs["variant"]),
                length,
                count,
                seed,
                answer=answer,
                **options,
            )
            # Scored prompts end before the answer; effects need the answer's log-probability
            for answer in ("reference", "none")
        )
        return made, asked
    task = make_task(str(group.attrs["task"]))
    stored = {
        name: group.attrs[f"task_{name}"]
        for name in task.options()
        if f"task_{name}" in group.attrs
    }
    options = {
        # A run has all options as text; literal_eval runs no code from a foreign file
        name: text if isinstance(task.options()[name], str) else ast.literal_eval(text)
        for name, text in stored.items()
    }
    made = recorded_task("the run", task.name, "small", options, {}).prompts(count, seed, test_set)
    return made, made


def _nearest(
    cells: Sequence[tuple[int, int]], passed: np.ndarray, cell: tuple[float, int]
) -> list[int]:
    """Return passing prompts of the nearest cells: of the same length first, then by depth."""
    depth, length = cell

    def far(place: int) -> tuple[float, float]:
        # Lengths double, so their distance is a ratio: 256 and 1,024 are equally far from 512
        return abs(float(np.log(cells[place][1] / length))), abs(cells[place][0] - depth)

    places = sorted((int(place) for place in np.flatnonzero(passed)), key=far)
    if not places:
        raise InputError("no prompt of this run passes, so no comparison is possible")
    # Whole cells: all prompts as near as the fifth, so that order within a cell does not matter
    return [place for place in places if far(place) <= far(places[min(FEWEST, len(places)) - 1])]
