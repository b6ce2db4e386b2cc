"""The atlas of heads: the names of every head, and the table of its numbers on the page.

    names       a cell per layer and head, in the color of its first name

Draws the group `atlas` of a run; `plugins.head_tables.overview` draws all numbers. Knows what names mean, and nothing
about how scores are measured and names given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.patches import Patch

from repo_interp.plots.marks import (
    BESIDE,
    MISSING,
    Cell,
    Chart,
    CustomFigure,
    Finding,
    Heads,
    Panels,
    Table,
    cells,
    counted,
    digits_of,
    evenly_spaced,
    group,
    has_runs,
    heads_named,
    heads_of,
    heads_where,
    learned_layers,
    percent,
    runner_up,
    runs_of,
    schemes,
    strongest_head,
    unit_label,
)
from repo_interp.plots.marks.arrays import MEAN
from repo_interp.plots.style import (
    PAGE_WIDTH,
    PaperFigure,
    scheme_name,
    style,
)
from repo_interp.plots.view import Beside, Interactive, PageOptions, View
from repo_interp.plugins.head_tables.overview import (
    atlas_overview,
    head_columns,
    names_of,
    standardised,
)
from repo_interp.plugins.heads.head_names import MEANINGS

ON_RANDOM_TOKENS = ("induction", "previous_token", "duplicate_token", "sink", "place_u")
MAPPED = (
    *ON_RANDOM_TOKENS,
    "source_mass",
    "retrieval",
    "contribution",
    "mirror",
    "departure",
    "distance",
)
"""Scores that have a map of heads on the page, where the run has them."""
LISTED = 8
"""Heads of a name that the table lists."""
NO_NAME = "no name"
GRAYS = (14, 15)
"""Places of the gray shades in matplotlib's tab20."""
COLUMNS = 4
"""Runs that have a column in the table of names."""


@style()
def atlas_names(run: xr.DataTree) -> PaperFigure:
    """Draw the names of heads, a cell per layer and head.

    A cell has the color of the first name and the number of further ones. Several runs have a
    panel for every run.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The figure.
    """
    return _names_chart(run).figure()


def _names_chart(run: xr.DataTree) -> Panels:
    atlas = group(run, "atlas")
    first_names = {str(names).split(", ")[0] for names in atlas["name"].values.ravel()}
    meanings = [f"{name}: {meaning}" for name, meaning in MEANINGS.items() if name in first_names]
    return names_grid(
        "atlas_names",
        run,
        atlas["name"],
        atlas["label"].values.tolist(),
        "Name of a head (+n: n further ones)",
        ". ".join(
            ["Names of heads by layer and head; +1: the head has another name", *meanings, ""]
        ).strip(),
    )


def _names_map(atlas: xr.Dataset) -> Heads:
    """The names of every head as a map of the page, in the color of the first."""
    names = atlas["name"].transpose("layer", "head")
    first = [[of[0] if of else "" for of in row] for row in names_of(names)]
    labels = atlas["label"].values.tolist()
    colors = {**colours_of_names(labels), "": MISSING}
    places = [[labels.index(name) if name else np.nan for name in row] for row in first]
    return Heads(
        names.copy(data=places).assign_attrs(long_name="names of heads", units=""),
        colours=np.array([[colors[name] for name in row] for row in first]),
        texts=names.astype(str),
        meanings=MEANINGS,
    )


def colours_of_names(labels: Sequence[str]) -> dict[str, str]:
    """Choose a color for each name, in figures and on the page.

    Args:
        labels: Names, in order.

    Returns:
        Colors as hexadecimal numbers, by name; none of them is gray, which stands for no name.
    """
    # tab20 alternates dark and light shades of ten hues: all dark ones are used before a light one.
    palette = mpl.colormaps["tab20"]
    shades = [*range(0, 20, 2), *range(1, 20, 2)]
    named = [to_hex(palette(shade)) for shade in shades if shade not in GRAYS]
    return {label: named[place % len(named)] for place, label in enumerate(labels)}


def names_grid(
    name: str,
    run: xr.DataTree,
    texts: xr.DataArray,
    labels: Sequence[str],
    title: str,
    caption: str = "",
) -> Panels:
    """Chart a text per head as cells; several runs have a panel for every run.

    Args:
        name: Name of the chart.
        run: Tree of a run, a group per measure.
        texts: Texts [layer, head] of this run, or [run, layer, head].
        labels: All texts that may occur.
        title: Title of the panel of a single run.
        caption: Caption of the chart.

    Returns:
        The chart.
    """
    parts = {title: texts}
    if has_runs(run):
        runs = runs_of(run)
        parts = {runs.title(one): texts.sel(run=one) for one in evenly_spaced(runs.names, BESIDE)}
    colours = colours_of_names(labels)
    places = {label: place for place, label in enumerate(colours)}
    look = {
        # A color map needs at least one color, also where no name exists.
        "cmap": ListedColormap([*colours.values()] or [MISSING]),
        "vmin": -0.5,
        "vmax": max(1, len(colours)) - 0.5,
        "gid": "names",
    }
    panels, shown, found = {}, {}, set()
    for title, of_run in parts.items():
        names = names_of(of_run)
        # [layer, head]: number of the first name, and how many follow it; NaN is not drawn.
        shown[title] = np.array([[places[of[0]] if of else np.nan for of in row] for row in names])
        further = [[max(len(of) - 1, 0) or np.nan for of in row] for row in names]
        panels[title] = of_run.transpose("layer", "head").copy(data=further)
        found |= {of[0] for of in names.ravel() if of}
    handles = [Patch(facecolor=colours[label], label=label) for label in labels if label in found]
    if any(np.isnan(of_run).any() for of_run in shown.values()) or not handles:
        handles.append(Patch(facecolor=MISSING, label=NO_NAME))
    # As wide as a page, except for the small map of a single run
    width = PAGE_WIDTH if len(parts) > 1 else min(PAGE_WIDTH, 1.2 + 0.36 * texts.sizes["head"])
    return Panels(
        name,
        panels,
        pattern="+.0f",
        look=look,
        shown=shown,
        handles=handles,
        cell=0.17,
        width=width,
        caption=caption,
    )


def atlas_table(run: xr.DataTree) -> Table:
    """List the names of heads with their counts and thresholds.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        One row per name: how many heads have it, which ones, the score to exceed, and the score
        that random weights reach.
    """
    atlas = group(run, "atlas")
    rows: list[tuple[Cell, ...]] = []
    for label in map(str, atlas["label"].values):
        scores = atlas.sel(label=label)
        named_heads = [f"L{layer}\u00a0H{head}" for layer, head in heads_where(scores["named"] > 0)]
        shown = ", ".join(named_heads[:LISTED]) + (
            f", and {len(named_heads) - LISTED} more" if len(named_heads) > LISTED else ""
        )
        rows.append(
            (
                label,
                MEANINGS.get(label, ""),
                len(named_heads),
                shown or "–",
                *cells((scores["threshold"], _reached(scores))),
            )
        )
    names = names_of(atlas["name"])
    used = [label for label, *_, threshold, _ in rows if threshold is not None]
    rules = "; ".join(f"{label}: {atlas['rule'].sel(label=label).values}" for label in used)
    note = (
        f"{sum(not of for of in names.flat)} of {names.size} heads have no name. "
        f"{counted(int(atlas.attrs.get('twins', 0)), 'draw')} of random weights, "
        f"{counted(int(atlas.attrs.get('prompts', 0)), 'prompt')}, "
        f"{atlas.attrs.get('sequences', 0)} sequences of "
        f"{atlas.attrs.get('repeated_tokens', 0)} random tokens, repeated. A dash: this run "
        f"has nothing to measure it by. Rules: {rules}."
    )
    if without := _without_direct_path(atlas):
        note += (
            f" Contributions are missing in layers {', '.join(without)}: no place was found "
            "there where attention's output is added to "
            "the residual stream."
        )
    columns = ("name", "what it does", "heads", "which", "threshold", "random weights, largest")
    return Table("atlas", "Heads by name", columns, tuple(rows), note)


def _reached(of_label: xr.Dataset) -> xr.DataArray:
    """The largest score of random weights for a label; NaN where none were drawn."""
    return of_label["null"].max() if of_label.sizes["twin"] else xr.DataArray(np.nan)


def _without_direct_path(atlas: xr.Dataset) -> list[str]:
    """The layers whose heads have an answer's source, but no contribution to the answer."""
    if "source_mass" not in atlas:
        return []
    answered = atlas["source_mass"].notnull().any("head")
    contributed = (
        atlas["contribution"].notnull().any("head")
        if "contribution" in atlas
        else xr.zeros_like(answered)
    )
    return [str(layer) for layer in atlas["layer"].values[(answered & ~contributed).values]]


def atlas_data(run: xr.DataTree, options: PageOptions) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Prepare the table of heads on the page.

    Args:
        run: Tree of a run, a group per measure.
        options: Limits and prompts of the page.

    Returns:
        A row per head (layer, head, scheme, name, numbers with six significant digits), and
        sentences for the parts that were left out.
    """
    atlas = group(run, "atlas")
    columns, described = head_columns(atlas), []
    # Names first; the sort is stable, so other columns keep their order.
    for name in sorted(columns, key=lambda name: name != "name"):
        text, values = columns[name].dtype.kind in "OUS", columns[name].values.ravel()
        title = unit_label(str(columns[name].attrs.get("long_name", name)), columns[name])
        shown = values.astype(str).tolist() if text else digits_of(values)
        described.append({"name": name, "title": title, "text": text, "values": shown})
    heads, named = heads_of(atlas), schemes(atlas)
    return {
        "heads": heads,
        "schemes": [scheme_name(named[layer]) for layer, _ in heads],
        "columns": described,
    }, ()


def changed_names(tree: xr.DataTree) -> Table:
    """List the heads whose names differ between runs.

    Heads are matched by layer and number. Between steps of one training that is the same head;
    between models of two trainings it is only the same place.

    Args:
        tree: Tree with an axis `run`.

    Returns:
        One row per such head, one column per run.
    """
    runs, name = runs_of(tree), group(tree, "atlas")["name"].transpose("run", "layer", "head")
    shown = evenly_spaced(runs.names, COLUMNS)
    rows = tuple(
        (
            layer,
            head,
            *(str(text) or "–" for text in name.sel(run=shown, layer=layer, head=head).values),
        )
        for layer, head in heads_where((name != name.isel(run=0)).any("run"))
    )
    note = (
        f"{len(rows)} of {name.sizes['layer'] * name.sizes['head']} heads are not called "
        "the same; heads are lined up by their place."
    )
    return Table(
        "atlas", "Heads whose name changes", ("layer", "head", *map(runs.title, shown)), rows, note
    )


def _charts(run: xr.DataTree) -> Iterator[Chart]:
    atlas = group(run, "atlas")
    if "name" in atlas:
        yield _names_chart(run)
    # An overview clusters the heads of one run.
    if has_runs(run):
        return
    if "name" in atlas:
        yield _names_map(atlas)
    if len(standardised(atlas)[1]) > 1 and len(heads_of(atlas)) > 2:
        yield CustomFigure(
            "atlas_overview",
            partial(atlas_overview, run),
            caption="All numbers of heads, in standard deviations from the mean over heads; alike heads and "
            "alike numbers stand together.",
        )
    for name in filter(atlas.__contains__, MAPPED):
        over = "random tokens" if name in ON_RANDOM_TOKENS else _texts(atlas)
        yield Heads(atlas[name].assign_attrs({MEAN: f"mean over {over}"}))


_LOOKS_AT: Mapping[str, Any] = {
    "sink": "first",
    "previous_token": "previous",
    "duplicate_token": "copy",
    "induction": "after a copy",
}
_FILES = files("repo_interp.plugins.heads")
_FOUND = {
    "mirror": (
        0.95,
        "Mirror heads: {heads}; a copy gets a position near its source's ({best}: {score:.2f} of 1)",
        "on {texts}",
    ),
    "retrieval": (
        0.9,
        "Retrieval heads: {heads}; for {share} of the answer's tokens {best} looks most at the token "
        "copied{next}",
        "on {texts}",
    ),
    "induction": (
        0.8,
        "Induction heads: {heads}; {best} gives {share} of its attention to what followed an earlier copy{next}",
        "where random tokens repeat{further}",
    ),
    "sink": (
        0.7,
        "Attention sink: {heads} {give} more than half to token 0, from layer {first} on, most {best} "
        "({share}){next}",
        "{where}{further}",
    ),
    "previous token": (
        0.6,
        "Previous-token heads: {heads}; {best} gives {share} of its attention to the token before{next}",
        "on random tokens{further}",
    ),
    "duplicate token": (
        0.5,
        "Duplicate-token heads: {heads}; {best} gives {share} of its attention to earlier copies{next}",
        "where random tokens repeat{further}",
    ),
}
"""By name in the atlas, which is also the name of the score: the weight of the finding, its
sentence, and the texts on which the score was measured.
"""
_COUNTED = {
    "sink": ("rest", "on token 0 (sinks)"),
    "previous token": ("look", "at the token before (previous token)"),
    "induction": ("look", "at what followed an earlier copy (induction)"),
    "duplicate token": ("look", "at earlier copies (duplicate token)"),
}
"""By name the verb and the rest of a clause in the sentence about all heads of a model without
learned positions.
"""
IN_SHORT = 0.3
"""Factor on the weight of a name that `_in_short` has counted already."""


def _findings(run: xr.DataTree) -> Iterator[Finding]:
    """Report names that some heads have: their scores exceed those of random weights."""
    atlas = group(run, "atlas")
    texts, short = _texts(atlas), _in_short(atlas)
    if short is not None:
        yield short
    for label, (weight, sentence, measured) in _FOUND.items():
        score = label.replace(" ", "_")
        has = (
            atlas["named"].sel(label=label) > 0
            if label in atlas["label"].values and score in atlas
            else xr.DataArray(False)
        )
        if not has.any():
            continue
        threshold, shown = float(atlas["threshold"].sel(label=label)), atlas[score]
        on_prompts, where, further = atlas.get(f"{score}_on_prompts"), "on random tokens", ""
        # The rule of a sink is one half on any text, so prompts come first
        if label == "sink" and on_prompts is not None and (on_prompts > threshold).any():
            further, where = f"; on random tokens {_many(has)} do", f"in {texts}"
            shown, has = on_prompts, on_prompts > threshold
        layer, head, best = strongest_head(shown.where(has))
        if on_prompts is not None and shown is not on_prompts:
            there = float(on_prompts.sel(layer=layer, head=head))
            further = f"; in {texts} {percent(there)}" if np.isfinite(there) else ""
        words = {
            "heads": _many(has),
            "best": f"L{layer} H{head}",
            "score": best,
            "share": percent(best),
            "give": "gives" if int(has.sum()) == 1 else "give",
            "next": runner_up(shown, [(layer, head)]),
            "first": min(heads_where(has))[0],
            "texts": texts,
            "where": where,
            "further": further,
        }
        evidence = (
            f"{measured.format(**words)}; the score of a named head is above {threshold:.3g}; "
            f"{_controls(atlas, label)}"
        )
        if short is not None and label in _COUNTED:
            weight *= IN_SHORT
        yield Finding(
            sentence.format(**words),
            evidence,
            weight,
            "atlas",
            layer,
            head,
            variable=score,
            looks_at=_LOOKS_AT.get(score, ""),
        )


def _controls(atlas: xr.Dataset, label: str) -> str:
    """Scores of models with random weights for a name, in words."""
    null, twins = float(_reached(atlas.sel(label=label))), atlas.sizes["twin"]
    if not twins:
        return "no models with random weights were asked for"
    return f"{counted(twins, 'model')} with random weights reach{'es' * (twins == 1)} {null:.2g}"


def _in_short(atlas: xr.Dataset) -> Finding | None:
    """Count heads by name, for a model without learned positions that has two kinds."""
    if "name" not in atlas or learned_layers(atlas):
        return None
    labels = [label for label in _COUNTED if label in atlas["label"].values]
    counts = {label: int((atlas["named"].sel(label=label) > 0).sum()) for label in labels}
    counts = {label: count for label, count in counts.items() if count}
    if len(counts) < 2:
        return None
    parts, last_verb = [], ""
    for label, count in counts.items():
        verb, where = _COUNTED[label]
        # A repeated verb is left out: "14 look at the token before, 8 at what followed ..."
        parts.append(
            f"{count} {verb}{'s' * (count == 1)} {where}"
            if verb != last_verb
            else f"{count} {where}"
        )
        last_verb = verb
    kinds = ", ".join(parts)
    evidence = "; ".join(f"{label}: {_controls(atlas, label)}" for label in counts)
    sentence = f"Of {atlas['name'].size} heads {kinds}"
    return Finding(sentence, f"on random tokens that repeat; {evidence}", 0.96, "atlas")


def _texts(atlas: xr.Dataset) -> str:
    """Say which prompts the scores are means over."""
    count = atlas.attrs.get("prompts", 1)
    return "the prompt" if count == 1 else f"the first {count} prompts"


def _many(has: xr.DataArray) -> str:
    """Name a few heads; count many."""
    named = heads_where(has)
    return heads_named(named, 8) if len(named) <= 8 else f"{len(named)} of {has.size} heads"


def _heads(run: xr.DataTree) -> Any:
    # With torch, which no figure needs
    from repo_interp.plugins.head_tables.atlas_table import atlas

    return atlas(run)


VIEW = View(
    "atlas",
    "The atlas of heads",
    "What every head does, in numbers and by name. A head has a name when its score is large "
    "and beyond what the same model reaches with random weights. That does not show that the model needs the head for it.",
    _charts,
    tables=lambda run: (atlas_table(run),),
    heads=_heads,
    head_columns=(
        *("name", "mirror", "retrieval", "induction", "previous_token", "sink", "position_range"),
    ),
    findings=_findings,
    interactive=Interactive(_FILES / "atlas.html", _FILES / "atlas.js", atlas_data),
    compared=MAPPED,
    not_averaged=("named", "null", "threshold", "mass"),
    by_index=("position_distance", "constant", "mono", "hybrid", "position_range"),
    beside=Beside(
        _charts, lambda tree: (changed_names(tree),) if "name" in group(tree, "atlas") else ()
    ),
)
