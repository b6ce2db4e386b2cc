"""Charts of attention mass from generated tokens to spans, and the heads that attend.

RePo sec. 5.1, table 4.

    mass(S) = mean over rows i of sum_{j in S} A_ij        rows: those that produced the generated tokens, or the generated ones
    mass per token = mass(S) / |S|, in units of 10^-2 as in table 4

A_ij is attention after the softmax. Draws the group `attention_mass` of a run. This module knows
nothing about how mass is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import xarray as xr

from repo_interp.plots.marks import (
    BACKGROUND,
    Chart,
    Dots,
    Finding,
    Heads,
    Table,
    by_scheme,
    counted,
    group,
    has_groups,
    head_rows,
    heads_named,
    heads_of,
    number,
    ordered_spans,
    over_prompts,
    percent,
    pick,
    ranked_heads,
    runner_up,
    table_of,
)
from repo_interp.plots.style import PaperFigure, style
from repo_interp.plots.view import View

UNIT = 100.0
"""Table 4's unit is 10^-2."""
RANKED = 16
"""Heads of the ranking's figure."""
_ROWS = {"producing": "rows that produced the answer", "generated": "the answer's own rows"}


@style()
def mass_by_span(run: xr.DataTree) -> PaperFigure:
    """Draw the attention mass per token x 100 of every span (table 4).

    It shows the mean over all layers and over those of each scheme, prompts, and 90 % of heads.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: The run has no attention mass.
    """
    return mass_chart(run).figure()


def mass_chart(run: xr.DataTree) -> Dots:
    """Make the chart of `mass_by_span`.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The chart.
    """
    dataset = group(run, "attention_mass")
    per_token, chance = UNIT * dataset["mass_per_token"], chance_per_token(dataset)
    if chance is not None:
        named = {"long_name": "even attention"}
        per_token = per_token.assign_coords(control=(UNIT * chance).assign_attrs(named))
    count = counted(per_token.sizes["prompt"], "prompt")
    per_token, runs = by_scheme(per_token.sel(span=shown_spans(dataset)))
    title = "attention mass per token"
    drawn = per_token.rename(title).assign_attrs(
        long_name=f"{title}, {rows_in_words(dataset)}",
        units="10⁻²",
        detail=f"mean over {count} (ticks); line: middle 90 % of heads",
    )
    return Dots(
        drawn,
        runs,
        "span",
        name="attention_mass_by_span",
        caption="Attention from the rows of the answer to a token of each span (RePo, table 4). Even "
        "attention gives equal weights to all tokens that a row sees.",
    )


@style()
def heads_ranked(run: xr.DataTree, span: str = "needle") -> PaperFigure:
    """Draw the heads with the largest attention mass on a span.

    A dot is the mean over prompts, a tick a prompt.

    Args:
        run: Tree of a run, a group per measure.
        span: Name of the span.

    Returns:
        The figure.

    Raises:
        InputError: The run has no attention mass, or lacks this span.
    """
    return ranking_chart(run, span).figure()


def ranking_chart(run: xr.DataTree, span: str) -> Dots:
    """Make the chart of `heads_ranked`.

    Args:
        run: Tree of a run, a group per measure.
        span: Name of the span.

    Returns:
        The chart.
    """
    dataset, means = group(run, "attention_mass"), mass_of_heads(run, span)
    first = ranked_heads(means)[:RANKED]
    # Labels along one new axis select pairs of layer and head, not all combinations.
    layer, head = (xr.DataArray(list(numbers), dims="rank") for numbers in zip(*first, strict=True))
    mass = (UNIT * dataset["mass"].sel(span=span)).sel(layer=layer, head=head)
    mass = mass.assign_coords(rank=[f"L{layer} H{head}" for layer, head in first])
    if "chance" in dataset:
        chance = UNIT * float(dataset["chance"].sel(span=span).mean())
        named = {"long_name": f"even attention ({number(chance)} %)"}
        mass = mass.assign_coords(control=("rank", np.full(len(first), chance), named))
    mass, runs = by_scheme(mass)
    # Without the row of all layers (""), which would repeat each head.
    drawn = mass.sel(run=[name for name in runs.names if name]).assign_attrs(
        long_name=f"attention mass on {span}, {rows_in_words(dataset)}",
        units="%",
        detail=f"{'all' if len(first) == means.size else f'first {len(first)} of'} {counted(means.size, 'head')}; mean over "
        f"{counted(mass.sizes['prompt'], 'prompt')} (ticks)",
    )
    return Dots(
        drawn,
        runs,
        "rank",
        name="heads_ranked",
        caption=f"Heads by the attention that the rows of the answer give to {span}, most first.",
    )


def rows_in_words(dataset: xr.Dataset) -> str:
    """Describe the rows of attention that the mass is taken from.

    Args:
        dataset: Group of a run.

    Returns:
        Text from the group's attributes, such as "rows that produced the answer".
    """
    return _ROWS.get(str(dataset.attrs.get("rows")), "rows not recorded")


def chance_per_token(dataset: xr.Dataset) -> xr.DataArray | None:
    """Average the mass per token that equal weights would give to spans.

    Args:
        dataset: Group of a run.

    Returns:
        Mean over prompts and layers [span]; None if the run lacks it.
    """
    if "chance" not in dataset:
        return None
    # A span that a prompt lacks has no tokens: NaN leaves it out of the mean.
    return (dataset["chance"] / dataset["span_tokens"].where(dataset["span_tokens"] > 0)).mean(
        ("prompt", "layer")
    )


def mass_of_heads(run: xr.DataTree, span: str) -> xr.DataArray:
    """Average the attention mass on a span over prompts.

    Args:
        run: Tree of a run, a group per measure.
        span: Name of the span.

    Returns:
        Mass [layer, head] in per cent.

    Raises:
        InputError: The run has no attention mass, or lacks this span.
    """
    means = over_prompts(UNIT * pick(group(run, "attention_mass")["mass"], span=span))
    return means.transpose("layer", "head").assign_attrs(
        long_name=f"attention mass on {span}", units="%"
    )


def shown_spans(dataset: xr.Dataset) -> list[str]:
    """List top-level spans in reading order; deeper parts are left to the tables.

    Args:
        dataset: Group of a run.

    Returns:
        The spans; if there are several needles, these follow their parent.
    """
    present = ordered_spans(map(str, dataset["span"].values))
    parts = {
        name: [other for other in present if other.startswith(f"{name}.") and other.count(".") == 1]
        for name in present
    }
    table = {name: float(dataset["table"].sel(span=name)) for name in present}
    shown = []
    for name in present:
        if "." not in name and np.isfinite(table[name]):
            # A single needle has the same tokens as its parent, and would repeat the row.
            several = [part for part in parts[name] if np.isfinite(table[part])]
            shown += [name, *(several if len(several) > 1 else [])]
    return shown


def ranked_span(run: xr.DataTree) -> str | None:
    """Choose the span that heads are ranked by.

    It is the run's attribute `main_span`; without it the needle, else the first span that is
    neither the rest nor generated.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        Name of the span; None if the run has no mass on it.
    """
    if not has_groups(run, ["attention_mass"]):
        return None
    dataset = group(run, "attention_mass")
    declared = run.attrs.get("main_span")
    for name in [declared] if declared else ordered_spans(map(str, dataset["span"].values)):
        if name not in dataset["span"]:
            continue
        if name not in (BACKGROUND, "generated") and np.isfinite(dataset["table"].sel(span=name)):
            return name
    return None


def mass_table(run: xr.DataTree) -> Table:
    """Tabulate the attention mass per token x 100 of every span (RePo table 4).

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per span: the mean, and deviations over prompts and over heads.

    Raises:
        InputError: The run has no attention mass.
    """
    dataset = group(run, "attention_mass")
    per_token = UNIT * dataset["mass_per_token"]
    columns = {
        "mass per token (10⁻²)": dataset["table"],
        "± over prompts": per_token.mean(("layer", "head")).std("prompt", ddof=1),
        "± over heads": per_token.mean("prompt").std(("layer", "head"), ddof=1),
    }
    if (chance := chance_per_token(dataset)) is not None:
        columns["even attention (10⁻²)"] = UNIT * chance
    note = (
        f"Mean over prompts, {dataset.sizes['layer']} layers and {dataset.sizes['head']} "
        "heads each; ± is the standard deviation. "
        "Even attention: equal weights on all tokens that a row sees. A dotted name is a part of its "
        "parent."
    )
    return _table_of_spans(
        "attention_mass", "Attention mass from generated tokens, by span", dataset, columns, note
    )


def share_table(run: xr.DataTree) -> Table:
    """Tabulate the attention mass of every span in per cent.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per span: the mean, the largest head's mean over prompts, and the largest head of
        one prompt.

    Raises:
        InputError: The run has no attention mass.
    """
    dataset = group(run, "attention_mass")
    mass = UNIT * dataset["mass"]
    columns = {
        "mean (%)": mass.where(dataset["mass_per_token"].notnull()).mean(
            ("prompt", "layer", "head")
        ),
        "largest head (%)": mass.mean("prompt").max(("layer", "head")),
        "in one prompt (%)": mass.max(("prompt", "layer", "head")),
    }
    if "chance" in dataset:
        columns["even attention (%)"] = UNIT * dataset["chance"].mean(("prompt", "layer"))
    note = (
        "Largest head: its mean over prompts. In one prompt: the largest mass of a head in "
        "any prompt; where it is far above the largest "
        "head's mean, heads share the span, prompt by prompt."
    )
    return _table_of_spans(
        "attention_share", "Attention mass of all tokens of a span", dataset, columns, note
    )


def _table_of_spans(
    name: str, title: str, dataset: xr.Dataset, columns: Mapping[str, xr.DataArray], note: str
) -> Table:
    """Tabulate `columns` [span] and the number of prompts of every span.

    Spans are in reading order; spans in no prompt are left out.
    """
    prompts = dataset["mass_per_token"].notnull().any(("layer", "head")).sum("prompt")
    present = [
        span for span in ordered_spans(map(str, dataset["span"].values)) if prompts.sel(span=span)
    ]
    shown = [
        (title, column.sel(span=present))
        for title, column in {**columns, "prompts": prompts}.items()
    ]
    return table_of(name, title, shown, f"{rows_in_words(dataset).capitalize()}. {note}")


def attention_mass_table(run: xr.DataTree, span: str = "needle", most: int = 20) -> Table:
    """Tabulate the heads with the largest attention mass on a span.

    Args:
        run: Tree of a run, a group per measure.
        span: Name of the span.
        most: Largest number of rows.

    Returns:
        One row per head: layer, head, scheme, mass, and the smallest and the largest prompt, in per
        cent.

    Raises:
        InputError: The run has no attention mass, or lacks this span.
    """
    dataset = group(run, "attention_mass")
    mass, means = UNIT * pick(dataset["mass"], span=span), mass_of_heads(run, span)
    heads = head_rows([means, mass.min("prompt"), mass.max("prompt")], ranked_heads(means)[:most])
    columns = ("rank", "layer", "head", "scheme", f"mass on {span} (%)", "smallest", "largest")
    note = (
        f"Mean, smallest and largest of {mass.sizes['prompt']} prompts; {len(heads)} of "
        f"{means.size:,} heads."
    )
    rows = tuple((rank, *row) for rank, row in enumerate(heads, start=1))
    return Table(
        "heads",
        f"Heads ranked by attention mass on {span}",
        columns,
        rows,
        f"{rows_in_words(dataset).capitalize()}. {note}",
    )


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    yield mass_chart(run)
    if (span := ranked_span(run)) is not None:
        yield ranking_chart(run, span)
        mass = UNIT * group(run, "attention_mass")["mass"].sel(span=span)
        caption = f"Attention from the rows of the answer to {span}, by layer and head."
        yield Heads(mass_of_heads(run, span), prompts=mass, name="heads_map", caption=caption)


def _tables(run: xr.DataTree) -> Iterator[Table]:
    yield from (mass_table(run), share_table(run))
    if (span := ranked_span(run)) is not None:
        yield attention_mass_table(run, span)


def _lead(run: xr.DataTree) -> str:
    span, rows = ranked_span(run), rows_in_words(group(run, "attention_mass")).removeprefix("the ")
    ranked = "no prompt marks a span that heads could be ranked by"
    ranked = ranked if span is None else f"and the heads by what they send to the {span}"
    return (
        f"Attention after the softmax from the {rows}: to each token of a span (RePo, "
        f"table 4), {ranked}."
    )


LEAST_MASS, TIMES_CHANCE = 0.1, 3.0
"""Least attention of the best head to a span for a finding, absolute and relative to equal weights.
"""


STEADY = 0.9
"""Part of each prompt's largest mass that a head has, to be named for all prompts."""


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Find the heads that look at the needle, prompt by prompt.

    A mean over prompts hides heads that share the work.
    """
    measured = group(run, "attention_mass")
    if "needle" not in measured["span"].values:
        return
    mass = measured["mass"].sel(span="needle").transpose("prompt", "layer", "head")
    chance = float(measured["chance"].sel(span="needle").mean())
    # [prompt, head of any layer]
    by_prompt = mass.values.reshape(mass.sizes["prompt"], -1)
    # nanargmax raises for a prompt without any value.
    known = np.isfinite(by_prompt).any(1)
    if not known.any():
        return
    best, most = np.nanargmax(by_prompt[known], 1), np.nanmax(by_prompt[known], 1)
    found = most >= max(LEAST_MASS, TIMES_CHANCE * chance)
    if found.mean() < 0.5:
        return
    places = heads_of(mass)
    # Heads that look there in all prompts do not share the work: each does it
    (steady,) = (by_prompt[known][found] >= STEADY * most[found, None]).all(0).nonzero()
    shares = most[found]
    if len(steady):
        best = np.full_like(best, steady[np.nanmean(by_prompt[known][:, steady], 0).argmax()])
        most, shares = by_prompt[known][:, best[0]], by_prompt[known][found][:, steady]
    heads = sorted({places[number] for number in (steady if len(steady) else best[found])})
    prompts = mass["prompt"].values[known]
    rows = group(run, "attention_rows") if has_groups(run, ["attention_rows"]) else {}
    # Runs without kept rows have nothing to prefer: all prompts count.
    with_rows = np.isin(prompts, rows["prompt"].values if "prompt_weight" in rows else prompts)
    # The strongest prompt among prompts with stored rows of attention
    strongest = int(np.where(with_rows | ~with_rows.any(), most, -1.0).argmax())
    layer, head = places[int(best[strongest])]
    least, largest = percent(shares.min()), percent(shares.max())
    share = " to ".join(dict.fromkeys((least, largest)))
    needle = str(run.attrs.get("needle_is", "the needle"))
    some = f"in {found.sum()} of {known.sum()} prompts" if found.sum() < known.sum() else ""
    if len(heads) == 1 or len(steady):
        gives = "gives {} of its" if len(heads) == 1 else "each give {} of their"
        sentence = f"{heads_named(heads)} {gives.format(share)} attention to {needle}"
        sentence += f", {some}" if some else ""
    else:
        sentence = (
            f"{heads_named(heads)} share the work: {some or 'in each prompt'} one gives {share} of its "
            f"attention to {needle}"
        )
    means = mass.mean("prompt")
    on_average = " on average" if known.sum() > 1 else ""
    sentence += runner_up(means, heads, lambda share: percent(share) + on_average)
    mean = percent(float(means.max()))
    evidence = (
        f"from {rows_in_words(measured)}, by the head with most on it, prompt by prompt; the most that one head "
        f"gives on average over prompts is {mean}; equal weights give {percent(chance)}"
    )
    yield Finding(sentence, evidence, 0.92, "attention_mass", layer, head, int(prompts[strongest]))


VIEW = View(
    "attention_mass",
    "Attention mass by span",
    _lead,
    _charts,
    tables=_tables,
    findings=_findings,
    compared=("mass_per_token", "mass"),
    # its mean over prompts and heads is taken already: that of mass_per_token
    not_averaged=("table",),
)
