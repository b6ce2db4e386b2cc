"""The figures that the groups `components` and `rotation` of one run allow, by name: what `analyze` draws of them.

Knows which figures there are; knows nothing about how one is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import xarray as xr

from repo_interp.plots.marks.reading import group
from repo_interp.plots.style import PaperFigure
from repo_interp.plots.views.component_curves import beyond_training_length, component_curves, logit_by_distance
from repo_interp.plots.views.component_reading import (
    bands,
    logits_by_scheme,
    rotating_layers,
    training_length,
    turns_of_learned,
    vaf_of_heads,
)
from repo_interp.plots.views.component_shares import pair_norms, turn_histogram, vaf_by_component

BEYOND = 1.25
"""Training lengths from which a run's distances are drawn as beyond it."""


def figures_of_components(run: xr.DataTree) -> Iterator[tuple[str, PaperFigure]]:
    """Logit by distance; where layers rotate, components by distance and their VAF; turns where positions are learned."""
    components = group(run, "components")
    yield "logit_by_distance", logit_by_distance(logits_by_scheme(run))
    layers = rotating_layers(components)
    if layers:
        own = components.sel(layer=layers)
        band = bands(components, layers[0])
        curves = own["component_by_distance"].mean("layer").dropna("distance", how="all")
        yield "components_by_distance", component_curves(band.assign(component_by_distance=curves))
        vaf = vaf_of_heads(own).median(("layer", "head")).expand_dims(weights=["trained"])
        yield "component_vaf", vaf_by_component(band.assign(vaf=vaf), "of all pairs' logits, median over heads")
        length = training_length(run)
        if components.sizes["distance"] > BEYOND * length:
            shown = own[["component_by_distance"]].assign(logit_by_distance=own["logit_by_distance"].mean("head"))
            yield "beyond_training_length", beyond_training_length(shown.assign(band.data_vars), length)
    turned = turns_of_learned(components)
    if turned is not None:
        yield "component_turns", turn_histogram(turned)


def figures_of_rotation(run: xr.DataTree) -> Iterator[tuple[str, PaperFigure]]:
    """Norms of the rotary pairs, where layers rotate."""
    rotation = group(run, "rotation")
    if bool(rotation["query_norm"].notnull().any()):
        yield "pair_norms", pair_norms(rotation)
