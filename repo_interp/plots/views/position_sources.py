"""What heads read for their positions: a bar of shares per head, and the variance that the token alone explains.

    bar    held-out shares of a head's position variance by source, one upon the other; negative ones hang below 0; together they are 1
    ▼      positions follow from the token alone

Draws the group `position_sources`. Knows nothing about how shares were taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from repo_interp.errors import InputError
from repo_interp.plots.marks.arrays import heads_where
from repo_interp.plots.marks.drawing import counted, legend_below, number, panels, scheme_swatches, sparse_ticks
from repo_interp.plots.marks.finding import Finding, heads_named
from repo_interp.plots.marks.heads import HeadMap, head_grid_figure
from repo_interp.plots.marks.reading import LEARNED_SCHEMES, group, schemes
from repo_interp.plots.marks.table import Cell, Table
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, style
from repo_interp.plots.view import View

COLOURS = {"token": "#0072B2", "index": "#E69F00", "segment": "#009E73", "previous": "#CC79A7", "rest": "#D9D9D9"}
NAMES = {
    "token": "token",
    "index": "token index",
    "segment": "segment (line, sentence, span ...)",
    "previous": "previous token",
    "rest": "what is left",
}
MISLEADS = 0.01
"""Size of a negative share from which the lead mentions it; tables and bars show all."""
HEADS_IN_ROW = 64
"""Heads of one row."""
ROWS = 256
"""Rows of the table at most."""


@style()
def position_source_bars(run: xr.DataTree) -> PaperFigure:
    """Shares of every head's position variance by source. Raises InputError when the run has no sources, or no head has any."""
    dataset = group(run, "position_sources")
    heads = _known_heads(dataset)
    if not heads:
        raise InputError(
            "no head of this run has sources of its positions: give at least two different prompts, and layers with positions or gates"
        )
    per_row = max(1, HEADS_IN_ROW // dataset.sizes["head"])
    layers, per_layer = list(dict.fromkeys(layer for layer, _ in heads)), dataset.sizes["head"]
    rows = [layers[first : first + per_row] for first in range(0, len(layers), per_row)]
    figure, axes = panels(len(rows), 1, 1.35, 0.7, PAGE_WIDTH, sharey=True)
    for ax, of_row in zip(axes, rows, strict=True):
        shown = [(layer, head) for layer, head in heads if layer in of_row]
        own = dataset.stack(of=("layer", "head")).sel(of=shown)
        numbers = np.searchsorted(dataset["head"].values, own["head"].values)
        places = np.array([of_row.index(layer) for layer, _ in shown]) + (numbers + 0.5) / per_layer * 0.94 - 0.47
        above, below = np.zeros(len(shown)), np.zeros(len(shown))
        for source, colour in COLOURS.items():
            values = own["share"].sel(source=source).values
            bottom = np.where(values >= 0, above, below)
            ax.bar(places, values, 0.84 / per_layer, bottom, color=colour, linewidth=0, gid=f"source {source}")
            above, below = above + np.maximum(values, 0), below + np.minimum(values, 0)
        follows = own["follows_from_token"].values == 1
        ax.plot(places[follows], above[follows] + 0.06, "v", color="black", markersize=3, gid="follows")
        ax.axhline(0, color="#333333", linewidth=0.6)
        ticks = [of_row[place] for place in sparse_ticks(of_row, 24)]
        ax.set_xticks([of_row.index(layer) for layer in ticks], [str(layer) for layer in ticks])
        ax.set(xlim=(-0.6, max(per_row, 1) - 0.4 if len(rows) > 1 else len(of_row) - 0.4), ylabel="share of variance")
        ax.grid(axis="y")
        scheme_swatches(ax, {layer: schemes(dataset)[layer] for layer in of_row}, "x")
    axes[-1].set_xlabel(f"layer, its {counted(dataset.sizes['head'], 'head')} from left to right")
    axes[0].set_title("What positions read, on held-out prompts")
    mark = Line2D([], [], linestyle="none", marker="v", color="black", markersize=3, label="follows from the token alone")
    legend_below(figure, [*(Patch(facecolor=COLOURS[source], label=label) for source, label in NAMES.items()), mark])
    return figure


def _known_heads(dataset: xr.Dataset) -> list[tuple[int, int]]:
    """Heads (layer, head) with sources; only those of layers that learn positions or count by gates, where there are any."""
    heads = heads_where(dataset["r_squared"].notnull())
    return [(layer, head) for layer, head in heads if _reads(schemes(dataset)[layer])] or heads


def _reads(scheme: str) -> bool:
    """Whether positions of this scheme are made of what a token holds."""
    return scheme in LEARNED_SCHEMES or scheme.startswith("cope")


def source_table(run: xr.DataTree) -> Table:
    """One row per head, of heads of a layer with the same numbers the first: shares and R^2 of the token alone, in whole per cent."""
    dataset = group(run, "position_sources")
    rows: list[tuple[Cell, ...]] = []
    for layer, head in _known_heads(dataset):
        own = dataset.sel(layer=layer, head=head)
        values = [*own["share"].sel(source=list(COLOURS)).values, float(own["alone"].sel(source="token"))]
        numbers = (*(round(100 * value) for value in values), {1: "yes", 0: "no", -1: "–"}[int(own["follows_from_token"])])
        if not rows or (layer, *numbers) != (rows[-1][0], *rows[-1][2:]):
            rows.append((layer, head, *numbers))
    tokens = counted(int(dataset["counted_tokens"]), "token")
    note = (
        f"% of the variance of positions (CoPE: of gates) within prompts, held-out ones, over {tokens} "
        f"({number(100 * float(dataset['counted_share']))} % of all: tokens that also occur in other prompts). Token to rest sum to 100; a "
        "negative share misleads on prompts that were not fitted to. Of heads whose numbers are the same the first is named. Last: whether "
        "positions follow from the token alone."
    )
    left = f" {counted(len(rows) - ROWS, 'row')} left out." if len(rows) > ROWS else ""
    columns = ("layer", "head", *COLOURS, "token alone", "follows")
    return Table("position_sources", "What positions read", columns, tuple(rows[:ROWS]), note + left)


def token_grid(run: xr.DataTree) -> PaperFigure:
    """R^2 of the token alone, layers by heads. Raises InputError when the run has no sources."""
    return head_grid_figure(_token_alone(group(run, "position_sources")))


def _token_alone(dataset: xr.Dataset) -> xr.DataArray:
    alone = dataset["alone"].sel(source="token", drop=True)
    return alone.assign_attrs(long_name="position variance from the token alone, R²", units="1")


def _figures(run: xr.DataTree) -> Iterator[tuple[str, PaperFigure]]:
    if _known_heads(group(run, "position_sources")):
        yield "position_sources", position_source_bars(run)
        yield "positions_from_token", token_grid(run)


def _informative(run: xr.DataTree) -> bool:
    dataset = group(run, "position_sources")
    return any(_reads(schemes(dataset)[layer]) for layer, _ in _known_heads(dataset))


def _lead(run: xr.DataTree) -> str:
    dataset = group(run, "position_sources")
    heads = _known_heads(dataset)
    if not heads:
        return "Nothing was measured: this needs at least two different prompts, and layers with positions or gates."
    follow = sum(int(dataset["follows_from_token"].sel(layer=layer, head=head)) == 1 for layer, head in heads)
    beyond = sum(float(dataset["share"].sel(layer=layer, head=head).min()) < -MISLEADS for layer, head in heads)
    return (
        "Shares of a head's position variance that token, index, segment and previous token explain on prompts that were not "
        f"fitted to; what is left is context. Of {counted(len(heads), 'head')}, {follow} "
        f"{'follows' if follow == 1 else 'follow'} from the token alone. Sources that go together divide what both explain"
        + (f"; {counted(beyond, 'head')} {'has' if beyond == 1 else 'have'} a negative share, which misleads." if beyond else ".")
    )


def _head_maps(run: xr.DataTree) -> Sequence[HeadMap]:
    dataset = group(run, "position_sources")
    return [
        HeadMap(_token_alone(dataset)),
        HeadMap(dataset["r_squared"].assign_attrs(long_name="position variance explained, R²")),
    ]


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Heads whose positions follow from the token alone, on held-out prompts."""
    follows = group(run, "position_sources")["follows_from_token"]
    if heads := heads_where(follows == 1):
        judged = int((follows >= 0).sum())
        sentence = f"Positions of {heads_named(heads)} follow from the token alone ({len(heads)} of {judged} heads)"
        evidence = "position_sources.alone of the token at least .9, held-out R squared"
        yield Finding(sentence, evidence, 0.55, "position_sources", *heads[0])


VIEW = View(
    "position_sources",
    "What positions read",
    _lead,
    _figures,
    tables=lambda run: (source_table(run),),
    findings=_findings,
    head_maps=_head_maps,
    informative=_informative,
    live=("positions_from_token",),
    compared=("share", "r_squared"),
)
