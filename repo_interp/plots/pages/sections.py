"""What the report page shows: a registry of sections, each keyed by the groups of the run that it needs.

A section is built from a run alone: a sentence, notes, tables, charts (plotly figures as plain dictionaries) and data for its
own script. A new measure adds a `Section` here or by `register`; a run without its groups does not show it. Knows nothing
about how a page is put together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xarray as xr

from repo_interp.plots.marks.choice import main_span
from repo_interp.plots.marks.reading import group
from repo_interp.plots.marks.table import Table
from repo_interp.plots.pages import charts, explorer
from repo_interp.plots.pages.tables import head_table, mass_table, pattern_table, range_table, score_table
from repo_interp.plots.views import component_page, disentanglement_figures, disentanglement_page, experiment_page
from repo_interp.plots.views.gates import gate_charts, gate_table
from repo_interp.plots.views.segments import segment_charts, segment_table
from repo_interp.plots.views.task_scores import score_chart


@dataclass(frozen=True)
class PageOptions:
    """What the caller of the page asked for."""

    prompts: tuple[int, ...] | None = None
    """Prompts whose positions are embedded, in order; None: all, as many as fit."""
    budget: int = 16_000_000
    """Bytes of embedded positions."""


@dataclass(frozen=True)
class Content:
    """What one section shows. Texts are plain and escaped by the page; `html` is trusted."""

    lead: str
    tables: tuple[Table, ...] = ()
    charts: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Caption and plotly figure (`data`, `layout`) of every chart. A point whose `customdata` is [layer, head] opens that head.
    """
    notes: tuple[str, ...] = ()
    html: str = ""
    data: Any = None
    """JSON for the section's script."""


@dataclass(frozen=True)
class Section:
    """One part of the page: shown when the run has all its `groups`."""

    name: str
    title: str
    groups: tuple[str, ...]
    build: Callable[[xr.DataTree, PageOptions], Content]
    script: str | None = None
    """A file of `page/` that draws `data`: it calls `reportSections[name] = function (element, data, page) {...}`."""


def register(section: Section) -> None:
    """Add `section` to the page, in place of one with the same name or at the end."""
    names = [other.name for other in SECTIONS]
    if section.name in names:
        SECTIONS[names.index(section.name)] = section
    else:
        SECTIONS.append(section)


def _explorer(run: xr.DataTree, options: PageOptions) -> Content:
    data, notes = explorer.embed(run, options.prompts, options.budget)
    return Content(
        "Every dot is a token: its index in the prompt against the position that the head gives to it, in positions.",
        notes=notes,
        html=explorer.markup(),
        data=data,
    )


def _mass(run: xr.DataTree, options: PageOptions) -> Content:
    return Content(
        "Attention after the softmax from the generated tokens, to each token of a span (RePo, table 4).",
        tables=(mass_table(run),),
        charts=(
            (
                "Attention mass per token by span: boxes over heads, dots are prompts, diamonds the table's mean",
                charts.mass_by_span(run),
            ),
        ),
    )


def _heads(run: xr.DataTree, options: PageOptions) -> Content:
    span = main_span(run)
    if span is None:
        return Content("No prompt of this run marks a span that heads could be ranked by.")
    return Content(
        f"Share of the attention of the generated tokens that goes to the {span}. Choose a head to see its positions.",
        tables=(head_table(run, span),),
        charts=((f"All heads by their attention mass on the {span}", charts.heads_ranked(run, span)),),
    )


def _patterns(run: xr.DataTree, options: PageOptions) -> Content:
    return Content(
        "Chunks of a prompt by how positions run inside them: constant, strictly monotonic, or neither (RePo, fig. 3).",
        tables=(pattern_table(run),),
        charts=(("Shares of the patterns by layer and head", charts.pattern_shares(run)),),
    )


def _ranges(run: xr.DataTree, options: PageOptions) -> Content:
    return Content(
        "Largest minus smallest position of a head, the mean over prompts, against the context length (RePo, fig. 2).",
        tables=(range_table(run),),
        charts=(
            (
                "Range of positions by layer and head; the dashed line is the context length",
                charts.position_ranges(run),
            ),
        ),
    )


def _components(run: xr.DataTree, options: PageOptions) -> Content:
    data = component_page.component_data(run)
    if data is None:
        return Content("No layer of this run rotates queries and keys, so there are no rotary components.")
    lead = (
        "The logit of a pair of tokens is a sum of rotary components, one a frequency (HoPE, fig. 3): choose one to see its part."
    )
    return Content(lead, tables=(component_page.component_table(run),), html=component_page.markup(), data=data)


_LEADS = {
    "three_axis": "Correlation of a head's logits with a part for the distance, one for the query and one for the key, added up "
    "(Position Generalization, sec. 3.1).",
    "fake_distance": "Correlation of the logits that the last query would give every key at every distance with a part for the "
    "distance and one for the key, added up (Position Generalization, sec. 3.2). Without rotation it is 1, and says nothing.",
    "rotation": "Correlation of the logits with f + g, the closed form of the few slow rotary components that dominate a head "
    "(Position Generalization, theorem 2).",
}


def _correlations(name: str) -> Callable[[xr.DataTree, PageOptions], Content]:
    def build(run: xr.DataTree, options: PageOptions) -> Content:
        table = disentanglement_figures.correlation_table(run, name)
        maps = disentanglement_page.map_charts(run, name) if name in disentanglement_page.MAPPED else ()
        return Content(_LEADS[name], tables=(table,), charts=(*disentanglement_figures.correlation_charts(run, name), *maps))

    return build


def _perturbation(run: xr.DataTree, options: PageOptions) -> Content:
    return Content(
        "A share of the tokens, of the keys or of the positions is moved by up to a few tokens; how much worse the model then predicts "
        "(Position Generalization, fig. 5, table 1). Reordered text is judged as it then stands.",
        tables=experiment_page.perturbation_tables(run),
        charts=experiment_page.perturbation_charts(run),
    )


def _extrapolation(run: xr.DataTree, options: PageOptions) -> Content:
    return Content(
        "Prompts longer than those of training, run plainly and by methods of length extension: how far attention outputs leave the "
        "distribution they had (Position Generalization, table 2).",
        tables=(experiment_page.extrapolation_table(run),),
        charts=experiment_page.extrapolation_charts(run),
    )


def _traces(run: xr.DataTree, options: PageOptions) -> Content:
    outside = 100 * float(group(run, "output_traces")["trace_outside"].mean())
    return Content(
        "Attention outputs at the training length, and those of a few later queries as their window of keys slides on (Position "
        f"Generalization, fig. 6). {outside:.2g} % of the lines' points are further out than 99 % of the dots, by Mahalanobis' distance.",
        charts=experiment_page.traces_chart(run),
    )


def _gates(run: xr.DataTree, options: PageOptions) -> Content:
    return Content(
        "Which tokens contextual positions count: gates by token, how much of them falls on separators, and how much of the attention "
        "from position alone stays within a query's own segment (CoPE, fig. 4, 6) - each beside shuffled tokens or segments.",
        tables=(gate_table(run),),
        charts=gate_charts(run),
    )


def _segments(run: xr.DataTree, options: PageOptions) -> Content:
    return Content(
        "How far positions follow the structure of a prompt (RePo, fig. 8): the share of their variance between segments, and whether "
        "their largest jumps are at edges - beside shuffled edges, and beside the token index.",
        tables=(segment_table(run),),
        charts=segment_charts(run),
    )


def _scores(run: xr.DataTree, options: PageOptions) -> Content:
    return Content(
        "How well the checkpoint answers, by test set: the mean over prompts, with its standard error.",
        tables=(score_table(run),),
        charts=(("Mean score by test set; bars are standard errors over prompts", score_chart(run)),),
    )


SECTIONS: list[Section] = [
    Section("explorer", "Positions, head by head", ("positions",), _explorer, "explorer.js"),
    Section("mass", "Attention mass by span", ("attention_mass",), _mass),
    Section("heads", "Heads ranked", ("attention_mass",), _heads),
    Section("patterns", "Patterns of positions", ("patterns",), _patterns),
    Section("ranges", "Ranges of positions", ("positions",), _ranges),
    Section("components", "Rotary components", ("components",), _components, "components.js"),
    Section("three_axis", "Position and semantics: three axes", ("three_axis",), _correlations("three_axis")),
    Section("fake_distance", "Position and semantics: fake distance", ("fake_distance",), _correlations("fake_distance")),
    Section("rotation", "Rotating pairs", ("rotation",), _correlations("rotation")),
    Section("perturbation", "Tolerance to moved tokens and positions", ("perturbation",), _perturbation),
    Section("extrapolation", "Beyond the training length", ("extrapolation",), _extrapolation),
    Section("output_traces", "Attention outputs over sliding windows", ("output_traces",), _traces),
    Section("gates", "Gates", ("gates",), _gates),
    Section("segments", "Positions and segments", ("segments",), _segments),
    Section("scores", "Scores", ("scores",), _scores),
]
