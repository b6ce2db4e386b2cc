"""Scores of models for HoPE's claims on the tasks of their training, and of RoPE and HoPE extended
beyond the training length (HoPE sec. 4).

    position interpolation (PI) and YaRN, by the factor n / L for prompts of n > L tokens; within L
    nothing is changed

The claims about copying (H6, H7) and about perplexity (H6) share this code.
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
"""Methods that extend a model, with their names in the paper."""
RIVALS: Mapping[str, str] = {
    layout: layout_name(layout) for layout in (ROPE, "alibi", "kerple", "fire")
}
"""The schemes that HoPE is compared with, as names in figures by layout."""


def scores(subjects: Sequence[Subject], options: ScoreOptions, cache: Cache) -> list[Scored]:
    """Score every checkpoint, and those with RoPE or HoPE in every layer also with each of
    `METHODS`.
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
    """Return every pair of a checkpoint and a method for which there are scores."""
    return [
        (each, method)
        for each in scored
        for method in (PLAIN, *METHODS)
        if has_method(each, method)
    ]


def side_by_side(
    rows: Sequence[tuple[Scored, str]], table: Callable[..., xr.Dataset]
) -> xr.Dataset:
    """Join the results of `table` (scores or perplexities) for checkpoints with methods, sorted by
    the numbers that name their test sets.
    """
    among = [scored for scored, _ in rows]
    tables = [
        table([each], method=method).assign_coords(checkpoint=[label(each, method, among)])
        for each, method in rows
    ]
    joined = xr.concat(tables, dim="checkpoint", join="outer", coords="minimal", compat="override")
    return joined.assign_coords(test_set=joined["test_set"].astype(int)).sortby("test_set")


def label(scored: Scored, method: str, among: Sequence[Scored]) -> str:
    """Return the name of a checkpoint in a legend: its scheme, or its name if two have this scheme,
    and the method that extends it.
    """
    name = in_legend(scored, among)
    return f"{name} + {METHODS[method]}" if method in METHODS else name
