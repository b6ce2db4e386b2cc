"""Charts of the sources of heads' positions: resolution, kinds of heads, and shares.

    map of the page    the largest share of a head's position variance, held out, in the color of its source

Draws the group `position_sources`. This module knows nothing about how shares were computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xarray as xr

from repo_interp.plots.marks import (
    MISSING,
    Chart,
    Finding,
    Heads,
    Lines,
    Panels,
    Table,
    charts_of,
    counted,
    evenly_spaced,
    group,
    head_rows,
    heads_named,
    heads_where,
    learned_layers,
    number,
    over_prompts,
    percent,
    runs_of,
    schemes,
    shared_rows,
    strongest_head,
)
from repo_interp.plots.style import PaperFigure, style
from repo_interp.plots.view import Beside, View
from repo_interp.plugins.heads.view import colours_of_names, names_grid
from repo_interp.plugins.sources.names import (
    CLEAR,
    CLOCKS,
    CONSTANT,
    NAMES,
    ORDERED,
    OTHER,
    TEXTS,
)
from repo_interp.plugins.sources.position_texts import FROM, READS, SOURCE_OF, clearest
from repo_interp.plugins.sources.position_texts import TEXTS as COLOURED_TEXTS
from repo_interp.plugins.sources.rows_picture import COLOURS, rows_charts

_KINDS = [*NAMES, OTHER, CONSTANT]
STEPS = 0.15
"""Share of variance by which segments lead the slow part where a head steps with them."""
SMALL = 1.0
"""Range in positions, and so the largest angle in radians, of a head without large rotations."""


@style()
def head_kinds(run: xr.DataTree) -> PaperFigure:
    """Draw the kinds of heads, a cell per layer and head.

    With several runs there is a panel per run.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.
    """
    return _kinds_grid("position_sources", run).figure()


def _kinds_grid(name: str, run: xr.DataTree, caption: str = "") -> Panels:
    kinds = group(run, "position_sources")["kind"]
    return names_grid(name, run, kinds, _KINDS, "What positions do", caption)


def _kinds(dataset: xr.Dataset) -> Heads:
    """Return the kind of every head as a map in the colors of the figure."""
    kind = dataset["kind"].transpose("layer", "head")
    place = np.array(
        [[_KINDS.index(name) if name else np.nan for name in row] for row in kind.values]
    )
    shades = np.array([*colours_of_names(_KINDS).values()])
    numbers = kind.copy(data=place).assign_attrs(
        long_name="kind of head, by its positions", units=""
    )
    # NaN gets an arbitrary index; `Heads` draws cells without a number in gray.
    return Heads(
        numbers,
        colours=shades[np.nan_to_num(place).astype(int)],
        texts=kind,
        meanings={name: f"positions {does}" for name, does in READS.items()},
    )


def _largest(dataset: xr.Dataset) -> Heads:
    share = dataset["share"].sel(source=[*COLOURS]).transpose("layer", "head", "source")
    known = share.notnull().all("source").values
    # [layer, head]; argmax would return the place of a NaN
    leading = np.nan_to_num(share.values, nan=-np.inf).argmax(-1)
    colours = np.where(known, np.array([*COLOURS.values()])[leading], MISSING)
    title = (
        "largest share of position variance (orange: slow part, blue: token, pink: previous "
        "token, green: segment, red: line end)"
    )
    return Heads(share.max("source").assign_attrs(long_name=title, units="1"), colours=colours)


def _known_heads(dataset: xr.Dataset) -> list[tuple[int, int]]:
    """List heads (layer, head) with sources.

    If any head learns positions or counts by gates, only such heads are listed.
    """
    heads = heads_where(dataset["r_squared"].notnull())
    reading = _reading_layers(dataset)
    return [(layer, head) for layer, head in heads if layer in reading] or heads


def _reading_layers(dataset: xr.Dataset) -> list[int]:
    """Layers with positions that depend on the content of a token."""
    gated = (layer for layer, name in schemes(dataset).items() if name.startswith("cope"))
    return [*learned_layers(dataset), *gated]


def source_table(run: xr.DataTree) -> Table:
    """Tabulate the sources of positions.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per head: shares, and R^2 of the token alone, in whole per cent. If heads of a layer
        have equal numbers, only the first has a row.
    """
    dataset = group(run, "position_sources")
    percents = [
        *(dataset["share"].sel(source=name) for name in dataset["source"].values),
        dataset["shape"],
    ]
    different = {}
    # Rounded first: heads with equal rounded numbers count as equal.
    columns = [(100 * fraction).round() for fraction in percents]
    for layer, head, *row in head_rows([*columns, dataset["resolution"]], _known_heads(dataset)):
        row = (*row, str(dataset["kind"].sel(layer=layer, head=head).values))
        # Heads that share positions have equal rows.
        different.setdefault((layer, *row), (layer, head, *row))
    tokens, share = (
        counted(int(dataset["counted_tokens"]), "token"),
        number(100 * float(dataset["counted_share"])),
    )
    note = (
        "% of the variance of positions (CoPE: of gates) within prompts, held out, over "
        f"{tokens} ({share} % of all: "
        "tokens that also occur in other folds). A share is what a source adds to those "
        "before it; slow to rest sum to 100; a negative share misleads. Slow: a function of the "
        "token index, and low frequencies of each prompt. Shape: one function of the index on "
        "prompts that it was not fitted to. Resolution: tokens apart from which 90 % of pairs "
        "stand in one order in every prompt. Of heads whose numbers are the same the first is "
        "named."
    )
    names = (
        "layer",
        "head",
        "scheme",
        *map(str, dataset["source"].values),
        "shape",
        "resolution",
        "kind",
    )
    return Table(
        "position_sources", "What explains the positions", names, tuple(different.values()), note
    )


def _informative(run: xr.DataTree) -> bool:
    dataset = group(run, "position_sources")
    return any(layer in _reading_layers(dataset) for layer, _ in _known_heads(dataset))


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    dataset = group(run, "position_sources")
    yield from rows_charts(run)
    if _known_heads(dataset):
        present = [name for name in READS if (run["position_sources"]["kind"] == name).any()]
        meanings = "; ".join(f"{name}: they {READS[name]}" for name in present)
        yield _kinds_grid("position_sources", run, f"What positions do. {meanings}".strip())
    if "kind" in dataset and (dataset["kind"] != "").any():
        yield _kinds(dataset)
    yield _largest(dataset)
    yield Heads(dataset["r_squared"])


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Report the kinds of heads, and the number of heads near a threshold of their name."""
    dataset, kinds = group(run, "position_sources"), clearest(run)
    if not kinds:
        return
    texts, named, from_where = int(dataset["texts"]), dataset["kind"] != "", ""
    of = "positions" if learned_layers(dataset) else "gates"
    measured = f"{counted(int(dataset['counted_tokens']), 'token')} of {counted(texts, 'prompt')}"
    few = (
        "" if texts >= TEXTS else f" (in {counted(texts, 'prompt')}; three or more name shapes too)"
    )
    total, of_clocks = int(named.sum()), [kind for kind in kinds if kind in CLOCKS]
    counts = {kind: int(clear.notnull().sum()) for kind, clear in kinds.items()}
    does = [f"{counts[kind]} {READS[kind]}" for kind in kinds if kind not in CLOCKS]
    if of_clocks:
        from_where = ", ".join(f"{counts[kind]} {FROM[kind]}" for kind in of_clocks)
        clocks = sum(counts[kind] for kind in of_clocks)
        does = [f"{clocks} order two tokens rightly in 90 % of pairs", *does]
        from_where = f"; clocks: {from_where}"
    shared = shared_rows(dataset[["alone", "share"]].to_array(), named)
    learned = f"learned {of}" if of == "positions" else of
    sentence = (
        f"Of {counted(total, 'head')} with {learned}{shared}, by their {of} {', '.join(does)}{few}"
    )
    if len(counts) == 1 and not of_clocks and total in counts.values():
        sentence = f"In all {total} heads with {learned}, {of} {READS[next(iter(counts))]}{few}"
    near = dataset["near_threshold"] == 1
    evidence = (
        f"{measured}{from_where}; the kind of {int((near & named).sum())} of {total} heads lies near a limit "
        f"({ORDERED:g} of the order, {CLEAR:g} of the variance); nulls are positions shifted round "
        "each prompt, and tables of random words"
    )
    layer, head, _ = strongest_head(next(iter(kinds.values())))
    yield Finding(sentence, evidence, 0.9, "position_sources", layer, head)
    for kind, clear in kinds.items():
        if kind in CLOCKS:  # reported by `patterns`, with the distance
            continue
        heads = heads_where(clear.notnull())
        ends = " to ".join(
            dict.fromkeys(f"{100 * float(end):.3g}" for end in (clear.min(), clear.max()))
        )
        source = "one slow shape in all prompts" if kind == "slow shape" else SOURCE_OF[kind][1]
        sentence = (
            f"{heads_named(heads, per_layer=dataset.sizes['head'])}: {source} explains {ends} % of "
            f"the variance of {of}, on held-out text{_small(run, clear.notnull())}"
        )
        evidence = measured
        if kind != "slow shape":
            null = dataset["alone_null"].sel(source=SOURCE_OF[kind][0]).where(clear.notnull())
            # On held-out tokens a useless source may be worse than the mean
            evidence += f"; of {of} shifted round the prompt at most {100 * max(0.0, float(null.max())):.3g} %"
        if kind == "places words" and of == "positions":
            evidence += "; untrained positions can do so too, since hidden states hold the word"
        yield Finding(sentence, evidence, 0.57, "position_sources", *heads[0])


def _by_steps(run: xr.DataTree, finding: Finding) -> str:
    """Name the ordered heads that step with the parts of a prompt rather than run through it."""
    if (finding.group, finding.variable) != ("patterns", "resolution"):
        return ""
    patterns, sources = group(run, "patterns"), group(run, "position_sources")
    if not {"alone", "segments_ahead"} <= sources.variables.keys():
        return ""
    found = patterns["resolution"].sel(layer=learned_layers(patterns)).notnull()
    slow = sources["alone"].sel(source="slow").where(found)
    segments = (slow.clip(0) + sources["segments_ahead"]).where(sources["segments_ahead"] >= STEPS)
    heads = heads_where(segments.notnull())
    if not heads:
        return ""
    explains = " to ".join(
        dict.fromkeys(percent(float(end)) for end in (segments.min(), segments.max()))
    )
    return (
        f"; {heads_named(heads, per_layer=found.sizes['head'])} by steps: line, sentence or span "
        f"explain {explains} of the variance, a slow function of the index "
        f"{percent(float(slow.where(segments.notnull()).max()))} or less"
    )


def _small(run: xr.DataTree, found: xr.DataArray) -> str:
    """Report heads in `found` whose range of positions is so small that no pair rotates far."""
    if "positions" not in run.children or "position_range" not in group(run, "positions"):
        return ""
    widest = float(over_prompts(group(run, "positions")["position_range"]).where(found).max())
    if not widest < SMALL:
        return ""
    return f"; their ranges, at most {number(widest)} positions, turn no pair of a head far"


def kind_shares(tree: xr.DataTree) -> xr.DataArray:
    """Compute the share of a layer's heads by kind.

    Args:
        tree: Tree with an axis `run`.

    Returns:
        Shares [run, layer, kind] for layers with kinds in any run.
    """
    kind = group(tree, "position_sources")["kind"]
    names = xr.DataArray(_KINDS, {"kind": _KINDS}, ("kind",))
    shares = (
        (kind == names)
        # Heads without a kind (NoPE, or a run without the layer) are not in the denominator.
        .where(kind != "")
        .mean("head")
        .dropna("layer", how="all")
        .rename("kind_share")
    )
    return shares.assign_attrs(long_name="share of a layer's heads that are of a kind", units="1")


def kinds_table(tree: xr.DataTree) -> Table:
    """Tabulate the number of heads by kind, and list them.

    For runs of training steps it shows which layers come first.

    Args:
        tree: Tree with an axis `run`.

    Returns:
        One row per kind, one column per run.
    """
    kind, runs, rows = group(tree, "position_sources")["kind"], runs_of(tree), []
    shown = evenly_spaced(runs.names, 6)
    for name in NAMES:
        found = [heads_where(kind.sel(run=run) == name) for run in shown]
        if any(found):
            rows.append(
                (
                    name,
                    *(
                        f"{len(heads)}  {heads_named(heads, 6, kind.sizes['head'])}"
                        for heads in found
                    ),
                )
            )
    return Table(
        "kinds", "Heads by what their positions do", ("kind", *map(runs.title, shown)), tuple(rows)
    )


def _charts_beside(tree: xr.DataTree) -> Iterator[Chart]:
    if "kind" not in tree["position_sources"] or not (shares := kind_shares(tree)).size:
        return
    runs, caption = runs_of(tree), "What the positions of every head do, run by run."
    yield _kinds_grid("position_sources_kind", tree, caption)
    if runs.steps is not None:
        yield Lines(
            shares,
            runs,
            "run",
            "kind",
            "layer",
            name="position_sources_kind_by_layer",
            caption=caption,
        )
    yield from charts_of("position_sources_kind_share", shares, runs)


VIEW = View(
    "position_sources",
    "What explains the positions",
    "What a head's positions follow. Left: whether the later of two tokens has the higher position, "
    "by how far apart they are. Right: how much of their variance follows from a slow curve over the "
    "text, from the word, the word before, the segment (line, sentence or span) and the end of a line, "
    "on text that was not fitted to. Each adds to those on its left, and the rest is context. "
    "Only tokens that occur again count; layers without positions or gates have none.",
    _charts,
    tables=lambda run: (source_table(run),),
    findings=_findings,
    clause=_by_steps,
    informative=_informative,
    interactive=COLOURED_TEXTS,
    beside=Beside(
        _charts_beside,
        lambda tree: (kinds_table(tree),) if "kind" in tree["position_sources"] else (),
    ),
    compared=("share", "r_squared"),
    by_index=("share", "r_squared"),
)
