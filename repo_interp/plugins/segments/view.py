"""Charts of how far positions follow the segments of a prompt (RePo fig. 8, measured).

One head over its segments, and every head with its null.

    bands   segments, every other one shaded; marks above: the head's largest jumps, as many as there are edges
    dots    eta^2 and F1 of every head; gray bars the same for shuffled edges; dashed: the token index

Draws the groups `segments` and, for one head, `positions`. This module knows nothing about how
segments are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from repo_interp.errors import InputError
from repo_interp.plots.marks import (
    Chart,
    CustomFigure,
    HeadDots,
    Heads,
    Table,
    contiguous,
    counted,
    figures_of_heads,
    group,
    has_groups,
    label_tokens,
    learned_layers,
    legend_below,
    number,
    over_prompts,
    pick,
    prompt_tokens,
    ranked_heads,
    schemes,
    sparse_ticks,
    table_of,
)
from repo_interp.plots.style import (
    PAGE_WIDTH,
    PaperFigure,
    paper_figure,
    scheme_colour,
    scheme_name,
    style,
)
from repo_interp.plots.view import View
from repo_interp.plots.views.position_figures import draw_positions

HEADS = 3
"""Heads with a figure."""
LABELS = 60
"""Most segments with a label of their first token."""
SHADE = "#56B4E9"
_SCORES = {"variance_between": "variance between segments η²", "boundary_f1": "jumps at edges, F1"}


@style()
def segment_positions(
    run: xr.DataTree, layer: int, head: int, prompt: int = 0, kind: str | None = None
) -> PaperFigure:
    """Draw the positions of a head over the segments of a prompt.

    Its largest jumps are marked.

    Args:
        run: Tree of a run, a group per measure.
        layer: Label of the layer.
        head: Label of the head in its layer.
        prompt: Label of the prompt.
        kind: Kind of segments; None: `main_kind`.

    Returns:
        The figure.

    Raises:
        InputError: The run has no positions or segments, or the prompt lacks two segments of the
            kind.
    """
    dataset, positions = group(run, "segments"), group(run, "positions")
    kind = _chosen(dataset, kind)
    tokens = prompt_tokens(positions, prompt)
    labels = pick(dataset["segment"], prompt=prompt, kind=kind).values[: tokens.count]
    # Segments are numbered from 0, and -1 is no segment. One segment has nothing to compare with.
    if labels.max() < 1:
        counts = dataset["segment_count"].sel(prompt=prompt)
        present = ", ".join(map(str, counts["kind"].values[counts.values > 1])) or "no segments"
        raise InputError(f"prompt {prompt} has no two {kind}; it has {present}")
    values = pick(positions["position"], prompt=prompt, layer=layer, head=head).values[
        : tokens.count
    ]
    scheme, scores = (
        schemes(positions)[layer],
        dataset.sel(prompt=prompt, kind=kind, layer=layer, head=head),
    )
    figure = paper_figure(PAGE_WIDTH, 2.5)
    ax = figure.subplots()
    draw_positions(ax, values, scheme_colour(scheme))
    shade_segments(ax, labels)
    jumps = largest_steps(values, labels)
    # A jump is between a token and the one before. x in tokens, y as a share of the axes' height.
    ax.plot(jumps - 0.5, np.full(len(jumps), 1.02), "v", color="black", markersize=2.6, transform=ax.get_xaxis_transform(),
            clip_on=False, gid="jumps")  # fmt: skip
    ax.set_ylabel("position z (positions)")
    # return_index gives the first token of every label.
    known, firsts = np.unique(labels, return_index=True)
    firsts = firsts[known >= 0]
    ranked = firsts[sparse_ticks(firsts, LABELS)].tolist()
    label_tokens(
        ax, tokens, ranked, tokens.count, shown="token index, and {} of each segment's first token"
    )
    ax.set_title(
        f"Layer {layer}, head {head} ({scheme_name(scheme)}), prompt {prompt}; "
        f"{_scores_of(scores)}",
        pad=9,
    )
    marks = Line2D(
        [],
        [],
        linestyle="none",
        marker="v",
        color="black",
        markersize=3,
        label=f"{len(jumps)} largest jumps",
    )
    legend_below(
        figure, [Patch(facecolor=SHADE, alpha=0.3, label=f"{kind}, every other one shaded"), marks]
    )
    return figure


def shade_segments(ax: Axes, labels: np.ndarray) -> Axes:
    """Shade every other segment over the height of the axes.

    Args:
        ax: Axes to draw on.
        labels: Segment of every token; tokens in no segment (-1) stay white.

    Returns:
        `ax`.
    """
    for label in range(0, int(labels.max()) + 1, 2):
        for first, last in contiguous(np.flatnonzero(labels == label).tolist()):
            band = ax.axvspan(
                first - 0.5, last + 0.5, facecolor=SHADE, alpha=0.3, linewidth=0, zorder=0
            )
            band.set_gid(f"segment {label}")
    return ax


def largest_steps(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Find the tokens after the largest steps of some values.

    Args:
        values: Values [token].
        labels: Segment of every token; -1: none.

    Returns:
        Indices, as many as there are edges of segments; none if all values are equal.
    """
    # Tokens outside of segments are skipped, so a step may lead across them.
    inside = np.flatnonzero(labels >= 0)
    steps = np.abs(np.diff(values[inside].astype(float)))
    edges = int(np.count_nonzero(np.diff(labels[inside])))
    # Equal steps, as of the token index, have no largest.
    if not np.isfinite(steps).all() or np.ptp(steps) < 1e-9:
        return np.zeros(0, dtype=int)
    # Step t is before token t + 1 of `inside`.
    return np.sort(inside[1:][np.argsort(-steps, kind="stable")[:edges]])


@style()
def segment_scores(run: xr.DataTree, kind: str | None = None) -> PaperFigure:
    """Draw how far positions follow segments, for every head.

    The scores are the share of variance between segments and the F1 of jumps. The null has shuffled
    edges; the scores of the token index are drawn beside.

    Args:
        run: Tree of a run, a group per measure.
        kind: Kind of segments; None: `main_kind`.

    Returns:
        The figure.

    Raises:
        InputError: The run has no segments of the kind.
    """
    return segment_score_chart(run, kind).figure()


def segment_score_chart(run: xr.DataTree, kind: str | None = None) -> HeadDots:
    """Make the chart of `segment_scores`.

    Args:
        run: Tree of a run, a group per measure.
        kind: Kind of segments; None: `main_kind`.

    Returns:
        The chart.
    """
    dataset = group(run, "segments")
    kind = _chosen(dataset, kind)
    of_kind = dataset.sel(kind=kind)
    counts = of_kind["segment_count"].where(of_kind["segment_count"] > 1)
    sizes = f"{counted(int(counts.count()), 'prompt')} of {float(counts.mean()):.3g} {kind}"
    titles = {name: f"{label}, {sizes}" for name, label in _SCORES.items()}
    return HeadDots(
        f"segment_scores_{kind}",
        {
            title: (
                of_kind[name].assign_attrs(limits=(-0.02, 1.04)),
                of_kind[f"{name}_shuffled"],
            )
            for name, title in titles.items()
        },
        "null: shuffled edges",
        "score",
        {title: float(of_kind[f"{name}_index"].mean()) for name, title in titles.items()},
        "token index",
        caption=f"How far the positions of each head follow the {kind} of a prompt, beside shuffled "
        "edges and the token index.",
    )


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    """Chart scores of all heads for every kind, and the heads that follow segments most.

    These heads are drawn for the main kind.
    """
    dataset = group(run, "segments")
    kind = main_kind(dataset)
    if kind is None:
        return
    for present in dataset["kind"].values[(dataset["segment_count"] > 1).any("prompt").values]:
        yield segment_score_chart(run, str(present))
    beyond = _beyond_shuffled(dataset, kind).assign_attrs(
        long_name=f"η² of {kind} minus that of shuffled edges", units="1"
    )
    # A picture, not an interactive map: the maps below have the values and the null separately.
    caption = f"Variance of positions between {kind}, less that between shuffled ones, by head."
    yield CustomFigure(f"segment_variance_{kind}", Heads(beyond).figure, caption=caption)
    with_segments = dataset["prompt"].values[dataset["segment_count"].sel(kind=kind).values > 1]
    if has_groups(run, ["positions"]):
        draw = partial(segment_positions, run, prompt=int(with_segments[0]), kind=kind)
        caption = (
            f"positions over a prompt, every other one of its {kind} shaded, and the largest jumps."
        )
        heads = heads_by_segments(dataset, kind)[:HEADS]
        yield from figures_of_heads("segments", draw, heads, caption)
    of_kind = dataset.sel(kind=kind, drop=True)
    for name, control in {**dict.fromkeys(_SCORES, "shuffled"), "within_trend": "null"}.items():
        if name in of_kind:  # older runs have no trend
            values = over_prompts(of_kind[name])
            values.attrs["long_name"] += f": {kind}"
            yield Heads(values, over_prompts(of_kind[f"{name}_{control}"]))


def heads_by_segments(dataset: xr.Dataset, kind: str) -> list[tuple[int, int]]:
    """Sort heads by their variance between segments beyond shuffled edges.

    If any layer learns positions, only heads of such layers are listed.

    Args:
        dataset: Group of a run.
        kind: Kind of segments.

    Returns:
        Labels (layer, head).
    """
    return ranked_heads(
        _beyond_shuffled(dataset, kind).sel(
            layer=learned_layers(dataset) or dataset["layer"].values
        )
    )


def _beyond_shuffled(dataset: xr.Dataset, kind: str) -> xr.DataArray:
    """Subtract the variance between shuffled segments, the mean over prompts.

    The result is [layer, head].
    """
    of_kind = dataset.sel(kind=kind, drop=True)
    return over_prompts(
        of_kind["variance_between"] - of_kind["variance_between_shuffled"]
    ).assign_coords(scheme=dataset["scheme"])


def main_kind(dataset: xr.Dataset) -> str | None:
    """Choose the kind with at least two segments in most prompts.

    Ties go to few-shot examples, then to the kind with the most segments.

    Args:
        dataset: Group of a run.

    Returns:
        The kind; None without segments.
    """
    counts = {
        str(kind): dataset["segment_count"].sel(kind=kind).values for kind in dataset["kind"].values
    }
    # A single segment has no edge.
    present = {kind: count for kind, count in counts.items() if (count > 1).any()}
    return max(
        present,
        key=lambda kind: ((present[kind] > 1).sum(), kind == "examples", present[kind].sum()),
        default=None,
    )


def segment_table(run: xr.DataTree) -> Table:
    """Tabulate how far positions follow segments.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per kind of segments and layer with positions: means over heads and prompts of both
        scores and their null.
    """
    dataset = group(run, "segments")
    scores = dataset[
        [f"{name}{part}" for name in _SCORES for part in ("", "_shuffled", "_index", "_chance")]
    ]
    known = dataset[[*_SCORES]].notnull().any(("prompt", "head")).to_dataarray().any("variable")
    means = (
        scores.mean(set(scores.dims) - {"kind", "layer"})
        .where(known)
        .transpose("kind", "layer", ...)
    )
    titles = ("η²", "shuffled", "index", "chance", "F1", "shuffled", "index", "chance")
    note = (
        "η²: share of the variance of positions between segments; F1: of the largest jumps "
        "against the edges. Means over heads and "
        "prompts. Shuffled: the same for shuffled edges; chance: share of shuffles that do "
        "at least as well; index: the token index."
    )
    columns = [*zip(titles, means.values(), strict=True)]
    return table_of("segments", "Positions and segments", columns, note, {"kind": "segments"})


def _chosen(dataset: xr.Dataset, kind: str | None) -> str:
    kind = main_kind(dataset) if kind is None else kind
    if kind is None:
        raise InputError(
            "no prompt of this run has segments; give prompts with text, or with spans such "
            "as examples.1"
        )
    pick(dataset["segment_count"], kind=kind)
    return kind


def _scores_of(scores: xr.Dataset) -> str:
    parts = [
        f"{label} = {number(float(scores[name]))} (shuffled "
        f"{number(float(scores[f'{name}_shuffled']))})"
        for name, label in (("variance_between", "η²"), ("boundary_f1", "F1"))
        if np.isfinite(scores[name])
    ]
    return ", ".join(parts) or "no positions"


VIEW = View(
    "segments",
    "Positions and segments",
    "How far positions follow the structure of a prompt (RePo, fig. 8): the share of their "
    "variance between segments, and whether their "
    "largest jumps are at edges, beside the null (shuffled edges) and the token index.",
    _charts,
    tables=lambda run: (segment_table(run),),
    compared=("variance_between", "boundary_f1"),
)
