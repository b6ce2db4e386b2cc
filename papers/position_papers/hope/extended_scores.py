"""Scores of HoPE's models on the tasks they were trained on, and of RoPE and HoPE extended beyond
the training length (HoPE sec. 4).

    position interpolation (PI) and YaRN, by the factor n / L for prompts of n > L tokens; within L
    nothing is changed

What the claims about copying (H6, H7) and about perplexity (H6) have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import xarray as xr

from position_papers.kit import (
    PLAIN,
    Cache,
    Scored,
    ScoreOptions,
    Subject,
    in_legend,
    score_subject,
)
from repo_interp.plots.marks.scores import layout_name

HOPE, ROPE = "hope", "rope"
METHODS: Mapping[str, str] = {"interpolation": "PI", "yarn": "YaRN"}
"""How a model is extended, and what the paper calls it."""
RIVALS: Mapping[str, str] = {
    layout: layout_name(layout) for layout in (ROPE, "alibi", "kerple", "fire")
}
"""The schemes that HoPE is compared with: their names in figures by layout."""


def scores(subjects: Sequence[Subject], options: ScoreOptions, cache: Cache) -> list[Scored]:
    """The scores of every checkpoint; those with RoPE or HoPE in every layer with each of `METHODS`
    too.
    """
    return [
        score_subject(
            each, options, cache, lambda layout: tuple(METHODS) * (layout in (ROPE, HOPE))
        )
        for each in subjects
    ]


def has_method(scored: Scored, method: str) -> bool:
    """Whether there are scores of a checkpoint with `method`."""
    return method == PLAIN or (scored.live is not None and method in scored.live["method"].values)


def with_methods(scored: Sequence[Scored]) -> list[tuple[Scored, str]]:
    """Every checkpoint with every method that it has scores with."""
    return [
        (each, method)
        for each in scored
        for method in (PLAIN, *METHODS)
        if has_method(each, method)
    ]


def side_by_side(
    rows: Sequence[tuple[Scored, str]], table: Callable[..., xr.Dataset]
) -> xr.Dataset:
    """`table` (of scores, or of perplexities) of checkpoints and methods by the number of their
    test sets, ascending.
    """
    among = [scored for scored, _ in rows]
    tables = [
        table([each], method=method).assign_coords(checkpoint=[label(each, method, among)])
        for each, method in rows
    ]
    joined = xr.concat(tables, dim="checkpoint", join="outer", coords="minimal", compat="override")
    return joined.assign_coords(test_set=joined["test_set"].astype(int)).sortby("test_set")


def label(scored: Scored, method: str, among: Sequence[Scored]) -> str:
    """What a legend calls a checkpoint: its scheme, or its name where two have this scheme; and how
    it is extended.
    """
    name = in_legend(scored, among)
    return f"{name} + {METHODS[method]}" if method in METHODS else name
