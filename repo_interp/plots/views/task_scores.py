"""The scores of one checkpoint on one task: by test set, over two axes, as perplexity.

Group `scores` of a run.

    dot   mean over prompts        bar   standard error over prompts        dotted line   the longest test set within training

Test sets with numbers as names form an axis. `marks.scores` draws scores of many checkpoints. This
module knows nothing about how answers are judged.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    Chart,
    Finding,
    Panels,
    RunMaps,
    Table,
    cells,
    charts_of,
    checkpoint_name,
    colour_map,
    group,
    has_runs,
    percent,
    runs_of,
    table_of,
    with_run_axis,
)
from repo_interp.plots.view import Beside, View


def score_grid(run: xr.DataTree) -> Panels:
    """Make a chart of the mean score over both axes of the task, in per cent.

    Cells without a prompt are gray.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The chart.

    Raises:
        InputError: The task lacks two axes.
    """
    values = 100 * _score_map(run)
    named = {
        axis: (axis, values[axis].values, {"long_name": _AXES.get(axis, axis)})
        for axis in map(str, values.dims)
    }
    title = f"{score_title(run)} (%)"
    look = {"cmap": colour_map("score", "#9DCBE6", "#0072B2", "#003A5C"), "vmin": 0, "vmax": 100}
    return Panels("score_map", {title: values.assign_coords(named)}, "", ".0f", look, cell=0.16)


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    yield from _scores(run, "scores")
    if _has_grid(group(run, "scores")):
        yield score_grid(run)


def _charts_beside(tree: xr.DataTree) -> Iterator[Chart]:
    scores, runs = group(tree, "scores"), runs_of(tree)
    if runs.steps is None:
        yield from _scores(tree, "scores_mean_score")
    if "score_map" in scores and scores["score_map"].ndim == 3:
        yield RunMaps(
            scores["score_map"],
            runs,
            name="scores_map",
            caption=f"{scores['score_map'].attrs['long_name']}.",
        )


def _scores(run: xr.DataTree, name: str) -> Iterator[Chart]:
    """Average the score by test set, with standard error and training length.

    For a task in nats it is the perplexity by length.
    """
    scores = group(run, "scores")
    mean, error, axis = scores["mean_score"], scores["standard_error"], scores["test_set"]
    metric, several = str(scores.attrs.get("metric", "score")), has_runs(run)
    title = score_title(run) if several else f"{metric} of {score_title(run)}"
    # Names that are numbers are prompt lengths, which make an axis.
    lengths = all(str(label).isdecimal() for label in axis.values)
    label = f"length ({scores.attrs.get('test_sets_count', 'tokens')})" if lengths else "test set"
    drawn = mean.assign_coords(low=mean - error, high=mean + error)
    drawn = drawn.assign_coords(test_set=axis.assign_attrs(long_name=label))
    drawn = drawn.rename(metric.replace("_", " ")).assign_attrs(long_name=title)
    longest = run.attrs.get("training_length")
    # The dotted line is at the largest test set with prompts no longer than in training, if that
    # is known
    inside = (
        axis.values[scores["tokens"].values <= int(longest)]
        if lengths and longest and "tokens" in scores
        else []
    )
    if len(inside):
        drawn.attrs["training_length"] = max(map(int, inside))
    # Shares have the same axis in all figures; scores in nats have no such ends.
    if str(mean.attrs.get("units", "1")) == "1" and float(mean.max()) <= 1:
        drawn.attrs["limits"] = -0.03, 1.03
    shown = (drawn, runs_of(run)) if several else with_run_axis(run, drawn)
    yield from charts_of(name, *shown)
    if len(inside) and mean.attrs.get("units") == "nat" and not several:
        perplexity = (
            # The exponential of a standard error is not that of the perplexity.
            xr.apply_ufunc(np.exp, drawn.drop_vars(["low", "high"]))
            .rename("perplexity")
            .assign_attrs(drawn.attrs, units="1")
        )
        yield from charts_of("perplexity_by_length", *with_run_axis(run, perplexity))


_AXES = {"depth": "depth (%)", "length": "length (tokens)"}


def _has_grid(scores: xr.Dataset) -> bool:
    return "score_map" in scores and scores["score_map"].ndim == 2


def _score_map(run: xr.DataTree) -> xr.DataArray:
    scores = group(run, "scores")
    if not _has_grid(scores):
        raise InputError(
            "a map of scores needs a task with two axes, such as depth and length; this run "
            "has none"
        )
    return scores["score_map"]


def score_title(run: xr.DataTree) -> str:
    """Write which model was scored on which task: "repo on niah".

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The title; for several runs it names the metric.
    """
    if has_runs(run):
        count = group(run, "scores").attrs.get("count")
        return f"{group(run, 'scores').attrs.get('metric', 'score')}{f', {count} prompts each' if count else ''}"
    return f"{checkpoint_name(run)} on {group(run, 'scores').attrs.get('task', 'a task')}"


def score_table(run: xr.DataTree) -> Table:
    """Tabulate the scores of test sets.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per test set: mean score, its standard error, and perplexity, questions and tokens
        if they are known.
    """
    scores = group(run, "scores")
    metric = str(scores.attrs.get("metric", "score"))
    columns = [(metric, scores["mean_score"]), ("standard error", scores["standard_error"])]
    further = {
        "log_perplexity": ("perplexity of the targets", np.exp),
        "tokens": ("longest prompt (tokens)", lambda counts: counts.astype(int)),
        "questions": ("questions", lambda counts: counts.astype(int)),
        "cut": ("lost their middle (%)", lambda shares: 100 * shares),
    }
    columns += [
        (title, shown(scores[name])) for name, (title, shown) in further.items() if name in scores
    ]
    return table_of("scores", score_title(run), columns, _asked(scores))


def map_table(run: xr.DataTree) -> Table:
    """Tabulate the mean score over both axes of the task.

    A cell of depth and length in which prompts fail has the call that ranks heads for it.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The table.

    Raises:
        InputError: The task lacks two axes.
    """
    values = _score_map(run)
    rows, columns = values.dims
    labels, below = values[rows].values.tolist(), values[columns].values.tolist()
    calls, note = {}, ""
    if (rows, columns) == ("depth", "length"):
        calls = {
            (
                place,
                1 + beside,
            ): f'ri.explain_cell(ri.read_run("run.nc"), depth={labels[place]}, '
            f"length={below[beside]})"
            # Cells without prompts are NaN, and NaN < 1 is false. Column 0 of the table holds the
            # labels.
            for place, beside in np.argwhere(values.values < 1).tolist()
        }
        note = (
            "A click on a cell in which prompts fail shows the call that ranks the heads behind it."
            if calls
            else ""
        )
    cells_of = [(str(label), *cells(row)) for label, row in zip(labels, values.values, strict=True)]
    columns_of = (f"{rows} \\ {columns}", *map(str, below))
    return Table(
        "score_map", str(values.attrs["long_name"]), columns_of, tuple(cells_of), note, calls
    )


def _asked(scores: xr.Dataset) -> str:
    """The options of the scoring, in a sentence."""
    words = {"seed": "seed {}", "count": "{} prompts of each set", "answers": "answers {}"}
    stated = {
        name: value
        for name, value in scores.attrs.items()
        if name != "count" or "questions" not in scores
    }
    asked = ", ".join(text.format(stated[name]) for name, text in words.items() if name in stated)
    left_out = [str(name) for name in np.atleast_1d(scores.attrs.get("left_out", []))]
    left = (
        f"Longer than the model's learned table, left out: {', '.join(left_out)}."
        if left_out
        else ""
    )
    return " ".join(filter(None, (f"{asked}." if asked else "", left)))


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """The score of every test set, the first and the worst."""
    scores = group(run, "scores")
    mean, unit = scores["mean_score"], str(scores["mean_score"].attrs.get("units", "1"))
    # One finding where the first set is the worst.
    for place in dict.fromkeys((0, int(np.nanargmin(mean.values)))):
        value, error = float(mean[place]), float(scores["standard_error"][place])
        number = (
            f"{percent(value)} +- {percent(error)}"
            if unit == "1"
            else f"{value:.3g} +- {error:.2g} {unit}"
        )
        sentence = (
            f"Test set {mean['test_set'].values[place]}: "
            f"{scores.attrs.get('metric', 'mean score')} {number}"
        )
        yield Finding(
            sentence,
            "+-: standard error over prompts",
            0.85 - 0.05 * (place > 0),
            "scores",
        )


VIEW = View(
    "scores",
    "Scores",
    "How well the checkpoint answers, by test set: the mean over prompts, with its standard error.",
    _charts,
    tables=lambda run: (
        score_table(run),
        *([map_table(run)] if _has_grid(group(run, "scores")) else []),
    ),
    findings=_findings,
    compared=("mean_score", "log_perplexity"),
    not_averaged=("mean_score", "standard_error", "score_map"),  # from `score`
    beside=Beside(_charts_beside),
)
