"""Charts of the tolerance to perturbed positions (Position Generalization fig. 5).

Log perplexity, or a score, over gamma x l_max for every kind.

A cell shows the value; its color shows how much worse it is than without perturbation. All kinds
and figures share one scale, linear up to 1/200 of its end (2 % of perplexity) and logarithmic
beyond, so that effects of small shares stay visible beside large ones. Draws the group
`perturbation`. This module knows nothing about how tokens were moved.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xarray as xr
from matplotlib.colors import SymLogNorm

from repo_interp.errors import InputError, quoted
from repo_interp.plots.marks import Finding, Panels, Table, group, percent, table_of, unit_label
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, style
from repo_interp.plots.view import View

KIND_NAMES = {
    "text_order": "Text order",
    "feature_order": "Feature order",
    "position_offset": "Position offsets",
    "feature_placement": "Feature placement",
}
REACH = {"nat": 4.0, "1": 1.0}
"""End of the color scale by unit of the value: 4 nats per token, or the whole range of a share.

Worse values have the last color.
"""
VALUES = {
    "log_perplexity": "log perplexity",
    "log_perplexity_rise": "rise of the log perplexity of targets that no move touched",
    "output_change": "relative change of attention outputs, mean over layers and heads",
    "task_score": "task score",
}
"""Titles of the values. A score is titled by its metric if the run has the name."""
SIGNED = "logarithmic beyond ±{:.2g}"


@style()
def perturbation_grid(run: xr.DataTree, value: str = "log_perplexity") -> PaperFigure:
    """Draw a value over share and distance of moved tokens (fig. 5).

    There is one panel per kind of perturbation.

    Args:
        run: Tree of a run, a group per measure.
        value: One of `VALUES`.

    Returns:
        The figure.

    Raises:
        InputError: The run has no perturbation, or `value` is not one of `VALUES`.
    """
    return _grid(run, "", value).figure()


def _grid(run: xr.DataTree, name: str, value: str) -> Panels:
    if value not in VALUES:
        raise InputError(f"values of perturbation are {', '.join(VALUES)}, not {quoted(value)}")
    dataset = group(run, "perturbation")
    cells, worse, reach = worse_than_without(dataset, value)
    moved = [f"{100 * gamma:g}" for gamma in cells["gamma"].values]
    cells = cells.assign_coords(
        gamma=("gamma", moved, {"long_name": "tokens moved (%)"}),
        l_max=("l_max", cells["l_max"].values, {"long_name": "longest move, l_max (tokens)"}),
    )
    kinds = {KIND_NAMES.get(kind, kind): kind for kind in map(str, cells["kind"].values)}
    beyond = "both" if bool((abs(worse) > 1.05 * reach).any()) else "neither"
    ticks = [share * reach for share in (-1, -0.1, -0.01, 0, 0.01, 0.1, 1)]
    label, cmap, lowest = "worse than without", "PuOr_r", -reach
    if value == "output_change":  # a size, neither better nor worse
        label, cmap, lowest, ticks = "change", "Oranges", 0.0, ticks[3:]
    look = {"cmap": cmap, "norm": SymLogNorm(reach / 200, vmin=lowest, vmax=reach)}
    return Panels(
        name,
        {shown: cells.sel(kind=kind) for shown, kind in kinds.items()},
        unit_label(_title(dataset, value).capitalize(), cells),
        ".3f",
        look,
        shown={shown: worse.sel(kind=kind).values for shown, kind in kinds.items()},
        bar={
            "label": f"{unit_label(label, cells)}\n{SIGNED.format(reach / 200)}",
            "ticks": ticks,
            "format": "%g",
            "extend": beyond,
        },
        width=PAGE_WIDTH,
        caption=f"{_title(dataset, value).capitalize()}, when a share of the tokens, of the keys or of the "
        "positions is moved (columns) by up to some tokens (rows). Colors: how much worse than without.",
    )


def _title(dataset: xr.Dataset, value: str) -> str:
    """Title of `value`."""
    stated = dataset.attrs.get("metric") if value == "task_score" else None
    return str(stated or VALUES[value])


def worse_than_without(dataset: xr.Dataset, value: str) -> tuple[xr.DataArray, xr.DataArray, float]:
    """Compute how much worse a value is than without perturbation.

    Args:
        dataset: Group `perturbation` of a run.
        value: One of `VALUES`.

    Returns:
        The value [kind, l_max, gamma], its loss relative to gamma = 0, and the end of the color
        scale of the loss.
    """
    cells = mean_over_heads(dataset[value])
    # A score falls when perplexity rises, so its loss has the other sign.
    better_up = value == "task_score" and dataset.attrs.get("higher_is_better") == "True"
    worse = (cells.sel(gamma=0.0) - cells if better_up else cells - cells.sel(gamma=0.0)).transpose(
        *cells.dims
    )
    # A value with another unit has no fixed scale: it ends at the largest change, if that is not 0.
    return (
        cells,
        worse,
        REACH.get(
            str(cells.attrs.get("units", "1")), max(float(np.nanmax(np.abs(worse.values))), 1e-12)
        ),
    )


def mean_over_heads(values: xr.DataArray) -> xr.DataArray:
    """Average a value over layers and heads where it has them.

    Args:
        values: Variable of the group `perturbation`.

    Returns:
        Values [kind, l_max, gamma].
    """
    axes = ("kind", "l_max", "gamma")
    # Keep attributes: units and names are read later.
    with xr.set_options(keep_attrs=True):
        return values.mean({*values.dims} - {*axes}).transpose(*axes)


def values_to_show(run: xr.DataTree) -> tuple[str, ...]:
    """List the values of the perturbation without duplicates.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        Names; the score of the task is left out if it equals the log perplexity.
    """
    dataset = group(run, "perturbation")
    # A task scored by log perplexity would repeat the figure. The score is the last of VALUES.
    same = np.allclose(dataset["task_score"], dataset["log_perplexity"], equal_nan=True)
    # Runs of earlier versions have fewer values
    shown = list(VALUES)[: len(VALUES) - same]
    return tuple(value for value in shown if value in dataset)


def perturbation_tables(run: xr.DataTree) -> tuple[Table, ...]:
    """Tabulate the values of the perturbation.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One table per value: rows are kinds and reaches, columns shares of moved tokens.
    """
    dataset = group(run, "perturbation")
    tables = []
    for value in values_to_show(run):
        values = mean_over_heads(dataset[value])
        columns = [
            (f"{100 * gamma:g} % moved", values.sel(gamma=gamma))
            for gamma in values["gamma"].values
        ]
        layers = ", ".join(map(str, np.atleast_1d(dataset.attrs["layers"])))
        label = unit_label(values.attrs["long_name"].capitalize(), values)
        note = (
            f"{label}, {dataset.attrs['prompts']} prompts of the task "
            f"{dataset.attrs['task']}, in layers {layers}."
        )
        title = _title(dataset, value).capitalize()
        tables.append(
            table_of(
                f"perturbation_{value}",
                title,
                columns,
                note,
                {**KIND_NAMES, "l_max": "farthest move"},
            )
        )
    return tuple(tables)


def _charts(run: xr.DataTree) -> Iterator[Panels]:
    names = {"log_perplexity_rise": "rise"}
    return (
        _grid(run, f"perturbation_{names.get(value, value)}", value)
        for value in values_to_show(run)
    )


LEAST_RISE = 0.01
"""Least rise of log perplexity for a finding, in nats: 1 % of perplexity."""


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Find the kind of perturbation with the largest loss at its smallest share.

    The loss must be at least `LEAST_RISE`.
    """
    measured = group(run, "perturbation")
    rise = measured["log_perplexity_rise"]
    smallest = [gamma for gamma in measured["gamma"].values if gamma > 0][:1]
    if not smallest or not np.isfinite(rise.values).any():
        return
    at_least = rise.sel(gamma=smallest[0]).isel(l_max=0)
    # Written as `not >=`, so that NaN returns too.
    if not float(at_least.max()) >= LEAST_RISE:
        return
    kind = str(at_least["kind"].values[int(np.nanargmax(at_least.values))])
    moved = (
        f"Moving {percent(float(smallest[0]))} of the tokens by up to {int(measured['l_max'][0])} "
        f"({KIND_NAMES.get(kind, kind).lower()})"
    )
    sentence = f"{moved} raises the log perplexity by {float(at_least.max()):.2g} nats per token"
    evidence = (
        f"the smallest dose, and the kind that costs most, over {measured.attrs['prompts']} prompts of "
        f"the task {measured.attrs['task']}; at least {LEAST_RISE} is needed"
    )
    yield Finding(sentence, evidence, 0.4, "perturbation")


VIEW = View(
    "perturbation",
    "Tolerance to moved tokens and positions",
    "A share of the tokens, of the keys or of the positions is moved by up to a few tokens; "
    "how much worse the model then predicts "
    "(Position Generalization, fig. 5, table 1). Targets of reordered text are those of the "
    "new order.",
    _charts,
    tables=perturbation_tables,
    findings=_findings,
    compared=("log_perplexity_rise", "task_score"),
)
