"""What heads read for their positions: the source that explains most of every head, and all shares in a table.

    cell    the largest share of a head's position variance, held out, in the colour of its source, paler the smaller it is

Draws the group `position_sources`. Knows nothing about how shares were taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xarray as xr
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch

from repo_interp.errors import InputError
from repo_interp.plots.marks.arrays import heads_where
from repo_interp.plots.marks.drawing import counted, number
from repo_interp.plots.marks.finding import Finding, heads_named, two_digits
from repo_interp.plots.marks.heads import MISSING, HeadMap, head_grid_figure, head_rows
from repo_interp.plots.marks.reading import LEARNED_SCHEMES, group, schemes
from repo_interp.plots.marks.table import Cell, Table
from repo_interp.plots.style import PaperFigure
from repo_interp.plots.view import View

COLOURS = {"index": "#E69F00", "segment": "#009E73", "token": "#56B4E9", "previous": "#CC79A7"}
NAMES = {"index": "token index", "segment": "segment (line, sentence, span ...)", "token": "token", "previous": "previous token"}
ROWS = 256
"""Rows of the table at most."""
_SAID = (
    (
        "places words",
        "place{s} a token by which word it is: it explains {ends} % of their variance, held out",
        "alone",
        "token",
        100,
    ),
    (
        "places in segments",
        "place{s} a token by its line, sentence or span: it explains {ends} % of their variance, held out",
        "alone",
        "segment",
        100,
    ),
    ("marks lines", "step{s} at line breaks, by {ends} standard deviations", "line_step", "rest", 1),
)
"""Of a kind of heads, what it does, and the variable, its source where it has one, and the unit that say how much."""


def head_sources(run: xr.DataTree) -> PaperFigure:
    """The source with the largest share of every head's position variance. Raises InputError when the run has no sources."""
    heads = _largest(group(run, "position_sources"))
    if not heads.values.notnull().any():
        raise InputError(
            "no head of this run has sources of its positions: give longer texts, and layers with positions or gates"
        )
    assert heads.colours is not None
    values = heads.values.assign_attrs(long_name="largest share of position variance")
    return head_grid_figure(values, heads.colours, [Patch(color=COLOURS[name], label=text) for name, text in NAMES.items()])


def _largest(dataset: xr.Dataset) -> HeadMap:
    share = dataset["share"].sel(source=[*COLOURS]).transpose("layer", "head", "source")
    known = share.notnull().all("source").values
    leading, sizes = np.nan_to_num(share.values, nan=-np.inf).argmax(-1), np.clip(share.max("source").values, 0.2, 1.0)
    shade = np.vectorize(lambda size, colour: to_hex(1 - size + size * np.array(to_rgb(colour))))
    colours = np.where(known, shade(np.nan_to_num(sizes), np.array([*COLOURS.values()])[leading]), MISSING)
    title = "largest share of position variance (orange: token index, green: segment, blue: token, pink: previous token)"
    return HeadMap(share.max("source").assign_attrs(long_name=title, units="1"), colours=colours)


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
    token = dataset.sel(source="token")
    percents = [*(dataset["share"].sel(source=name) for name in dataset["source"].values), token["alone"], token["alone_null"]]
    different: dict[tuple[Cell, ...], tuple[Cell, ...]] = {}
    columns = [(100 * each).round() for each in percents]
    for layer, head, *row in head_rows([*columns, dataset["line_step"]], _known_heads(dataset)):
        row = (*row, str(dataset["kind"].sel(layer=layer, head=head).values))
        different.setdefault((layer, *row), (layer, head, *row))
    tokens, share = counted(int(dataset["counted_tokens"]), "token"), number(100 * float(dataset["counted_share"]))
    note = (
        f"% of the variance of positions (CoPE: of gates) within prompts, held out, over {tokens} ({share} % of all: "
        "tokens that also occur in other folds). A share is what a source adds to those before it; index to rest sum to 100; "
        "a negative share misleads. Shuffled: the token alone, for positions permuted over tokens. Step: of the last tokens of "
        "lines, in standard deviations. Of heads whose numbers are the same the first is named."
    )
    left = f" {counted(len(different) - ROWS, 'row')} left out." if len(different) > ROWS else ""
    names = ("layer", "head", "scheme", *map(str, dataset["source"].values), "token alone", "shuffled", "step", "kind")
    return Table("position_sources", "What positions read", names, tuple(different.values())[:ROWS], note + left)


def _figures(run: xr.DataTree) -> Iterator[tuple[str, PaperFigure]]:
    if _known_heads(group(run, "position_sources")):
        yield "position_sources", head_sources(run)


def _informative(run: xr.DataTree) -> bool:
    dataset = group(run, "position_sources")
    return any(_reads(schemes(dataset)[layer]) for layer, _ in _known_heads(dataset))


def _lead(run: xr.DataTree) -> str:
    if not _known_heads(group(run, "position_sources")):
        return "Nothing was measured: this needs texts in which tokens occur again, and layers with positions or gates."
    return (
        "Shares of a head's position variance that token index, segment, token and previous token explain on stretches of text that were "
        "not fitted to, each beyond those before it; what is left is context."
    )


def _head_maps(run: xr.DataTree) -> Sequence[HeadMap]:
    dataset = group(run, "position_sources")
    return [_largest(dataset), HeadMap(dataset["r_squared"].assign_attrs(long_name="position variance explained, R²"))]


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Heads that follow from the token alone, and what kinds of heads read, with the null of each."""
    dataset = group(run, "position_sources")
    follows = dataset["follows_from_token"]
    if heads := heads_where(follows == 1):
        judged = int((follows >= 0).sum())
        sentence = f"Positions of {heads_named(heads)} follow from the token alone ({len(heads)} of {judged} heads)"
        evidence = "position_sources.alone of the token at least .9, held-out R squared"
        yield Finding(sentence, evidence, 0.55, "position_sources", *heads[0])
    for kind, does, variable, source, unit in _SAID if "kind" in dataset else ():
        found, of_source = dataset["kind"] == kind, dataset.sel(source=source)
        if heads := heads_where(found):
            sizes, null = (unit * of_source[name].where(found) for name in (variable, f"{variable}_null"))
            ends = " to ".join(dict.fromkeys(two_digits(float(size)) for size in np.abs(sizes).quantile((0, 1))))
            sentence = f"{heads_named(heads, 12, dataset.sizes['head'])} {does.format(s='s' * (len(heads) == 1), ends=ends)}"
            evidence = f"position_sources.{variable}; of permuted positions at most {two_digits(max(0.0, float(null.max())))}"
            yield Finding(sentence, evidence, 0.57, "position_sources", *heads[0])


VIEW = View(
    "position_sources",
    "What positions read",
    _lead,
    _figures,
    tables=lambda run: (source_table(run),),
    findings=_findings,
    head_maps=_head_maps,
    informative=_informative,
    live=("position_sources",),
    compared=("share", "r_squared"),
)
