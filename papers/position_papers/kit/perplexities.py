"""Perplexities of language models side by side, at the training length and beyond; the common part
of CoPE's and HoPE's claims.

    perplexity = exp of the mean of -log p over the tokens of held-out windows; compared as log
    perplexity, window by window

Windows of text differ far more than models, so only perplexities of the same windows are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from position_papers.kit.judge.differences import between
from position_papers.kit.scores import PLAIN, Scored, in_layers, score_table
from repo_interp.measures.labels import with_attrs


def on_the_same_windows(scored: Sequence[Scored]) -> list[Scored]:
    """Return the members of `scored` with comparable perplexities: those with weights, if any have
    weights.

    A run without weights has recorded a mean over other windows.
    """
    return [each for each in scored if each.live is not None] or list(scored)


def perplexity_table(scored: Sequence[Scored], method: str = PLAIN) -> xr.Dataset:
    """Return perplexity [checkpoint, test_set, seed] by ascending length in tokens, for
    `score_figures`.
    """
    table = score_table(scored, method=method).assign_coords(
        layout=("checkpoint", [in_layers(each) for each in scored])
    )
    values = xr.apply_ufunc(np.exp, table["score"])
    error = with_attrs(
        values.mean("seed") * table["standard_error"],
        "standard error of the perplexity over windows",
        "1",
    )
    table = table.assign(score=with_attrs(values, "perplexity", "1"), standard_error=error)
    return table.assign_coords(test_set=table["test_set"].astype(int)).sortby("test_set")


def differences(
    rows: Sequence[tuple[Scored, str]], reference: Scored, name: str, table: xr.Dataset
) -> dict[str, xr.DataArray]:
    """Return log perplexity of each checkpoint and method of `rows` minus that of `reference`,
    called `name`, by checkpoint and test set of `table`, with its standard error from
    `differences.between`, for `score_figures`; NaN if one has no scores.
    """
    values = np.full((2, len(rows), table.sizes["test_set"]), np.nan)
    for row, (each, method) in enumerate(rows):
        for place, test_set in enumerate(table["test_set"].values.astype(str)):
            if test_set in each.test_sets and test_set in reference.test_sets:
                own = between(each.sample((test_set,), method), reference.sample((test_set,)))
                values[:, row, place] = (
                    own.margin,
                    own.standard_error if np.isfinite(own.standard_error) else np.nan,
                )
    axes = {axis: table[axis].values for axis in ("checkpoint", "test_set")}
    margin, error = (xr.DataArray(each, axes, tuple(axes)) for each in values)
    above = with_attrs(
        margin, f"log perplexity above that of {name}", "nat per token"
    ).assign_attrs({"from": name})
    return {
        "difference": above,
        "difference_error": with_attrs(
            error, "standard error of the difference over seeds or windows", "nat per token"
        ),
    }


def compared(
    rows: Sequence[tuple[Scored, str]], table: xr.Dataset, reference: Scored | None, name: str
) -> tuple[xr.Dataset, str]:
    """Return the `table` of perplexities of `rows`, with `differences` from `reference`, called
    `name`, if there is one; and sentences for the caption: seeds and windows, checkpoints continued
    from a trained one, and the differences.
    """
    errors = (table["standard_error"] / table["score"].mean("seed")).values
    known, count = errors[np.isfinite(errors)], table.sizes["seed"]
    caption = (
        "One training seed."
        if count == 1
        else f"Mean over up to {count} training seeds; small dots: each."
    )
    if known.size:
        caption += (
            f" Standard error over windows: up to {100 * known.max():.2g} %; all "
            "have the same, and are compared on each."
        )
    if continued := dict.fromkeys(
        each.name for each, _ in rows if each.configuration.continue_from
    ):
        caption += (
            f" More training than the others, on from a trained RoPE model: {', '.join(continued)}."
        )
    if reference is not None:
        table = table.assign(differences(rows, reference, name, table))
        caption += (
            f" Below: log perplexity above that of {name}, with two standard errors - over "
            "training seeds where one of the two has several, else over the windows that both have."
        )
    return table.assign_attrs(axis="tokens", training_length=rows[0][0].training_length), caption


def shortest_and_longest(scored: Scored) -> tuple[str, str]:
    """Return the training length, and the longest length with scores, as names of test sets."""
    lengths = sorted(int(name) for name in scored.test_sets)
    return str(min(lengths, key=lambda length: abs(length - scored.training_length))), str(
        lengths[-1]
    )
