"""Charts of CoPE's gates and of attention from position alone (CoPE fig. 4, 6).

Every head is shown with its null.

    map       a_ij / max_j a_ij of one head, queries downwards; plus signs on the diagonal: separators
    gates     mean gate of every token, separators darker; below, the sum that a query counts, p_i0

Draws the group `gates` of a run, with the token texts of another group that describes the prompts.
This module knows nothing about how gates are measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    Chart,
    Finding,
    HeadDots,
    Heads,
    Table,
    colour_bar,
    counted,
    described_prompts,
    figures_of_heads,
    group,
    heads_named,
    heads_where,
    label_tokens,
    layer_colour,
    layer_scheme,
    legend_below,
    over,
    over_prompts,
    percent,
    pick,
    prompt_tokens,
    ranked_heads,
    strongest_head,
    table_of,
)
from repo_interp.plots.style import (
    COLUMN_WIDTH,
    PAGE_WIDTH,
    PaperFigure,
    darker,
    paper_figure,
    style,
)
from repo_interp.plots.view import View

CAPTIONS = {
    "gates": "mean gate of each token (above), and the sum of gates that each query counts (below).",
    "position_attention": "attention from position alone, each row scaled to a maximum of 1.",
}
"""Captions of the charts of a head."""
HEADS = 3
"""Heads with a figure."""
LABELS = 90
"""Token labels that fit under a figure of page width."""
_PALE = 0.35
_TABLE = {
    "separator_gate": "gate of separators",
    "other_gate": "gate of others",
    "separator_share": "gates on separators",
    "separator_share_shuffled": "random tokens",
    "separator_share_chance": "chance",
}
_OWN_SEGMENT = {"last_segment_mass": "own", "last_segment_shuffled": "shuffled"}


@style()
def position_attention(run: xr.DataTree, layer: int, head: int, prompt: int = 0) -> PaperFigure:
    """Draw one head's attention from position alone over a prompt (fig. 4).

    A row is a query, and its maximum is 1; separators are plus signs.

    Args:
        run: Tree of a run, a group per measure.
        layer: Label of the layer.
        head: Label of the head in its layer.
        prompt: Label of the prompt.

    Returns:
        The figure.

    Raises:
        InputError: The run has no such map of this prompt and layer; they are kept by
            `Gates(maps=1)`.
    """
    dataset = group(run, "gates")
    if "position_attention" not in dataset:
        raise InputError(
            "this run keeps no attention from position alone; analyze again with the measure "
            "gates and maps=1"
        )
    values = pick(dataset["position_attention"], prompt=prompt, layer=layer, head=head).transpose(
        "query", "key"
    )
    if not np.isfinite(values).any():
        raise InputError(
            f"no attention from position alone is kept of prompt {prompt}, layer {layer}; "
            f"ask for it with maps={prompt + 1}"
        )
    # 1: a separator, 0: another token, -1: padding
    separators = pick(dataset["separator"], prompt=prompt).values
    figure = paper_figure(COLUMN_WIDTH, COLUMN_WIDTH * 0.94)
    ax = figure.subplots()
    shown = draw_attention_map(
        ax,
        # Prompts are padded to the longest one of the run.
        values.values[: _count(separators), : _count(separators)],
        np.flatnonzero(separators == 1),
    )
    colour_bar(
        figure, shown, ax, "attention from position alone (row maximum 1)", pad=0.02, fraction=0.05
    )
    marked = "; +: separator" if (separators == 1).any() else ""
    ax.set_title(
        f"Layer {layer}, head {head} ({layer_scheme(dataset, layer)}), prompt {prompt}{marked}"
    )
    return figure


def draw_attention_map(ax: Axes, weights: np.ndarray, separators: np.ndarray) -> Any:
    """Draw weights as an image, with plus signs at separators on the diagonal.

    Args:
        ax: Axes to draw on.
        weights: Weights [query, key]; NaN is left white.
        separators: Indices of the separators.

    Returns:
        The image.
    """
    shown = ax.imshow(
        weights, cmap="cividis", vmin=0, vmax=1, aspect="equal", interpolation="nearest", gid="map"
    )
    ax.plot(
        separators,
        separators,
        "+",
        color="black",
        markersize=4,
        markeredgewidth=0.8,
        gid="separators",
        # Otherwise marks of the first and last token would be cut at the edge.
        clip_on=False,
    )
    ax.set(xlabel="key (token)", ylabel="query (token)")
    ax.locator_params(nbins=6, integer=True)
    return shown


@style()
def gate_lines(run: xr.DataTree, layer: int, head: int, prompt: int = 0) -> PaperFigure:
    """Draw the gates of a head by token, and their sums by query (fig. 6).

    Separators are darker.

    Args:
        run: Tree of a run, a group per measure.
        layer: Label of the layer.
        head: Label of the head in its layer.
        prompt: Label of the prompt.

    Returns:
        The figure.

    Raises:
        InputError: The run has no gates, or the layer has none.
    """
    dataset = group(run, "gates")
    separators = pick(dataset["separator"], prompt=prompt).values
    count = _count(separators)
    gates = pick(dataset["gate_by_token"], prompt=prompt, layer=layer, head=head).values[:count]
    sums = pick(dataset["counted"], prompt=prompt, layer=layer, head=head).values[:count]
    scheme = layer_scheme(dataset, layer)
    if not np.isfinite(gates).any():
        raise InputError(f"layer {layer} ({scheme}) has no gates; CoPE's layers have")
    largest, colour = (
        float(dataset["largest_position"].sel(layer=layer)),
        layer_colour(dataset, layer),
    )
    figure = paper_figure(PAGE_WIDTH, 3.0)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.3, 1))
    draw_gates(upper, gates, separators[:count] == 1, colour)
    draw_counted(lower, sums, np.flatnonzero(separators[:count] == 1), largest, colour)
    _label_tokens(run, lower, prompt, gates, separators[:count] == 1)
    shares = (
        100
        * dataset.sel(prompt=prompt, layer=layer, head=head)[
            ["separator_share", "separator_share_shuffled"]
        ]
    )
    share, shuffled = map(float, shares.values())
    on_separators = (
        f"; {share:.3g} % of gates on separators, {shuffled:.3g} % on random tokens"
        if np.isfinite(share)
        else ""
    )
    upper.set_title(
        f"Layer {layer}, head {head} ({scheme}), prompt {prompt}, {count:,} tokens{on_separators}"
    )
    marked = [
        Patch(facecolor=darker(colour, 0.6), label="separator"),
        Patch(facecolor=colour, alpha=_PALE, label="other token"),
    ]
    legend_below(figure, marked if (separators == 1).any() else [])
    return figure


def draw_gates(ax: Axes, gates: np.ndarray, separators: np.ndarray, colour: str) -> Axes:
    """Draw gates as bars; separators are darker.

    Args:
        ax: Axes to draw on.
        gates: Gates [token].
        separators: Booleans [token].
        colour: Color of the bars.

    Returns:
        `ax`.
    """
    others, marked = (
        (~separators, "others", colour, _PALE),
        (separators, "separators", darker(colour, 0.6), 1.0),
    )
    for chosen, name, shade, opacity in (others, marked):
        ax.bar(
            np.flatnonzero(chosen),
            gates[chosen],
            width=1.0,
            linewidth=0,
            color=shade,
            alpha=opacity,
            gid=name,
        )
    ax.set(ylabel="mean gate", ylim=(0, 1.02), xlim=(-0.5, len(gates) - 0.5))
    ax.grid(axis="y")
    return ax


def draw_counted(
    ax: Axes, sums: np.ndarray, separators: np.ndarray, largest: float, colour: str
) -> Axes:
    """Draw the sum of gates that every query counts.

    A dashed line marks the largest position if the sums come near it.

    Args:
        ax: Axes to draw on.
        sums: Sums of gates [token].
        separators: Indices of the separators.
        largest: Largest position of the layer.
        colour: Color of the line.

    Returns:
        `ax`.
    """
    ax.plot(np.arange(len(sums)), sums, color=colour, linewidth=1.0, gid="counted")
    ax.plot(
        separators,
        sums[separators],
        "+",
        color="black",
        markersize=3.5,
        markeredgewidth=0.7,
        gid="separators",
    )
    # CoPE caps counts at p_max. A line far above the sums would only flatten the curve.
    if np.isfinite(largest) and np.nanmax(sums) > 0.8 * largest:
        ax.axhline(largest, color="#222222", linestyle="--", linewidth=0.6)
        ax.text(0, largest, f" largest position, {largest:g}", va="bottom", fontsize=5.5)
    ax.set_ylabel("counted (positions)")
    ax.set_ylim(0, None)
    ax.margins(y=0.15)
    ax.grid(axis="y")
    return ax


@style()
def gate_scores(run: xr.DataTree) -> PaperFigure:
    """Draw the shares of gates and attention that follow the text, for all heads.

    The panels show the share of gates on separators and on random tokens, and the share of
    attention from position alone within the query's segment and within shuffled segments. There is
    a panel for every kind of segments in the prompts.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.

    Raises:
        InputError: The run has no gates, or its prompts have neither separators nor segments.
    """
    chart = gate_score_chart(group(run, "gates"))
    if not chart.panels:
        raise InputError(
            "no prompt of this run has separators or segments; give prompts with text, or "
            "with a span separator"
        )
    return chart.figure()


def gate_score_chart(dataset: xr.Dataset) -> HeadDots:
    """Make the chart of `gate_scores`.

    Args:
        dataset: Group of a run.

    Returns:
        The chart; without panels if prompts have neither separators nor segments.
    """
    panels = {}
    for label, scores, control in _with_controls(dataset):
        count = int(scores.notnull().any(("layer", "head")).sum())
        # Shares from 0 to 1, with space for whole dots at both ends.
        limited = scores.assign_attrs(limits=(-0.02, 1.04))
        panels[f"{label} ({counted(count, 'prompt')})"] = limited, control
    return HeadDots(
        "gate_scores",
        panels,
        "null: random tokens, shuffled segments",
        "share",
        caption="Share of gates on separators, and of attention from position alone within the query's "
        "own segment, by head, beside their null.",
    )


def _with_controls(dataset: xr.Dataset) -> Iterator[tuple[str, xr.DataArray, xr.DataArray]]:
    """Yield the title, share [prompt, layer, head] and null of gates and segments.

    These are the share of gates on separators, and the shares of attention within segments of every
    kind in the prompts.
    """
    if np.isfinite(dataset["separator_share"]).any():
        yield "gates on separators", dataset["separator_share"], dataset["separator_share_shuffled"]
    for kind in measured_kinds(dataset):
        mass, shuffled = (
            dataset[f"last_segment_{name}"].sel(kind=kind, drop=True)
            for name in ("mass", "shuffled")
        )
        mass.attrs["long_name"] += f" ({kind})"
        yield f"attention in own {kind.removesuffix('s')}", mass, shuffled


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    """Chart scores of all heads, gates and maps of the first heads, and maps of heads.

    The first heads are from `heads_by_gates`. Their maps are drawn if the run has them.
    """
    dataset = group(run, "gates")
    if (scores := gate_score_chart(dataset)).panels:
        yield scores
    first = int(dataset["prompt"].values[0])
    shown = {"gates": gate_lines}
    if "position_attention" in dataset:
        shown["position_attention"] = position_attention
    for name, draw in shown.items():
        of_head = partial(draw, run, prompt=first)
        yield from figures_of_heads(name, of_head, heads_by_gates(dataset)[:HEADS], CAPTIONS[name])
    for _, share, control in _with_controls(dataset):
        yield Heads(over_prompts(share), over_prompts(control))


def heads_by_gates(dataset: xr.Dataset) -> list[tuple[int, int]]:
    """Sort heads by how much their gates prefer separators over random tokens.

    Without separators, heads are sorted by how much their gates vary over tokens.

    Args:
        dataset: Group of a run.

    Returns:
        Labels (layer, head) of heads with gates.
    """
    beyond = over_prompts(dataset["separator_share"] - dataset["separator_share_shuffled"])
    spread = over_prompts(dataset["gate_by_token"].std("key"))
    return ranked_heads(beyond if np.isfinite(beyond).any() else spread)


def measured_kinds(dataset: xr.Dataset) -> list[str]:
    """List the kinds of segments with measured attention from position alone.

    Args:
        dataset: Group of a run.

    Returns:
        Kinds in the order of the run.
    """
    kinds = [str(kind) for kind in dataset["kind"].values]
    return [
        kind for kind in kinds if np.isfinite(dataset["last_segment_mass"].sel(kind=kind)).any()
    ]


def gate_table(run: xr.DataTree) -> Table:
    """Tabulate the gates of separators and of other tokens.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per head with gates: both means, the share on separators and on random tokens, and
        their chance.
    """
    dataset = group(run, "gates")
    note = (
        f"{_averaged(dataset)} Chance: share of {dataset.attrs.get('draws', '?')} draws of "
        "random tokens that do at least as well. A dash "
        "where the prompts have no separators."
    )
    return table_of(
        "gates",
        "Gates",
        [(title, over_prompts(dataset[name])) for name, title in _TABLE.items()],
        note,
    )


def own_segment_table(run: xr.DataTree) -> Table:
    """Tabulate the attention from position alone within segments.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per kind of segments and head with gates: the share within the query's segment, and
        within shuffled ones.
    """
    dataset = group(run, "gates")
    title = "Attention from position alone within a query's own segment"
    columns = [
        (label, over_prompts(dataset[name]).transpose("kind", ...))
        for name, label in _OWN_SEGMENT.items()
    ]
    return table_of("own_segments", title, columns, _averaged(dataset), {"kind": "segments"})


def _averaged(dataset: xr.Dataset) -> str:
    return f"Means over {counted(dataset.sizes['prompt'], 'prompt')}."


def _label_tokens(
    run: xr.DataTree, ax: Axes, prompt: int, gates: np.ndarray, separators: np.ndarray
) -> None:
    described = described_prompts(run)
    tokens = (
        None
        if described is None or prompt not in described["prompt"]
        else prompt_tokens(described, prompt)
    )
    # Most important first, since `label_tokens` drops labels that collide with earlier ones.
    largest = np.argsort(-gates, kind="stable")[: LABELS // 3].tolist()
    order = [
        *np.flatnonzero(separators).tolist(),
        *largest,
        *range(0, len(gates), max(1, len(gates) // LABELS)),
    ]
    tokens = tokens if tokens is not None and tokens.count == len(gates) else None
    label_tokens(
        ax, tokens, order, LABELS, lambda token: "#000000" if separators[token] else "#777777"
    )


def _count(separators: np.ndarray) -> int:
    """Number of tokens of a prompt without padding (-1)."""
    return int((separators >= 0).sum())


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Find heads with gates on separators.

    Their share is at least twice the share of as many random tokens, and above nearly all draws.
    """
    measured = group(run, "gates")
    share, shuffled, chance = (
        over_prompts(measured[f"separator_share{part}"]) for part in ("", "_shuffled", "_chance")
    )
    found = (chance < 0.05) & (share > 2 * shuffled)
    if not found.any():
        return
    layer, head, best = strongest_head(share.where(found))
    sentence = (
        f"Gates fall on separators in {heads_named(heads_where(found))}: {percent(best)} of their sum "
        f"in L{layer} H{head}"
    )
    control = float(shuffled.sel(layer=layer, head=head))
    evidence = f"{over(measured)}; as many random tokens hold {percent(control)}"
    yield Finding(sentence, evidence, 0.75, "gates", layer, head)


VIEW = View(
    "gates",
    "Gates",
    "Which tokens contextual positions count: gates by token, how much of them falls on "
    "separators, and how much of the attention from "
    "position alone stays within a query's own segment (CoPE, fig. 4, 6). Random tokens "
    "and shuffled segments are the null.",
    _charts,
    tables=lambda run: (gate_table(run), own_segment_table(run)),
    findings=_findings,
    compared=("separator_share", "last_segment_mass", "separator_gate"),
)
