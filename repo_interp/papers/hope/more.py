"""Figures beside HoPE's claims: norms of rotary pairs, the components of one pair of tokens, turns by learned positions.

Nothing is judged here.
"""

from __future__ import annotations

import xarray as xr

from repo_interp.analysis.analyze import analyze
from repo_interp.measures.labels import described
from repo_interp.measures.rotation import Rotation
from repo_interp.measures.statistics import Measure
from repo_interp.models.load import load
from repo_interp.papers.hope.lots import bands, named_bands, random_prompts
from repo_interp.papers.hope.measurements import Measured, components_of_pair, depends_on
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.result import Result, plain
from repo_interp.plots.views.component_shares import pair_norms, pair_of_tokens, turn_histogram
from repo_interp.positions.layouts import LEARNED


def norms(one: Measured, cache: Cache) -> Result:
    """Norms of query and key pairs per component, layer and head (which frequencies heads use), on a lot of a few sequences."""
    count = min(8, one.sampling.sequences)

    def measure() -> xr.Dataset:
        bridge = load(one.path, one.sampling.device)
        prompts = list(random_prompts(bridge, one.training_length, count, one.sampling.seed))
        measures: list[Measure] = [Rotation(one.training_length)]  # pyright: ignore[reportAssignmentType]
        return plain(analyze(bridge, prompts, measures)["rotation"].to_dataset()[["query_norm", "key_norm"]])

    group = cache.dataset("hope_norms", {**depends_on(one.digest, one.sampling), "sequences": count}, measure)
    band = bands(one.within)
    return Result(
        f"norms_{one.name}",
        f"Mean norm of the rotary pairs of queries and keys of {one.name} by component and head, on {count} sequences of random "
        f"tokens. Triangle: activated. {named_bands(band)}",
        plain(group.assign(band.data_vars)),
        pair_norms(group, band),
    )


def pair(one: Measured, cache: Cache) -> Result:
    """The components of the logit between the last token and the one half the training length before it, mean over heads."""
    query, key = one.training_length - 1, one.training_length // 2 - 1

    def measure() -> xr.Dataset:
        bridge = load(one.path, one.sampling.device)
        prompt = next(random_prompts(bridge, one.training_length, 1, one.sampling.seed))
        return components_of_pair(bridge, prompt.tokens, query, key).to_dataset(name="logit_of_head")

    of_pair = cache.dataset("hope_pair", depends_on(one.digest, one.sampling), measure)["logit_of_head"]
    band = bands(one.within)
    data = band.assign(
        logit=described(of_pair.mean(("layer", "head")), "component of the logit of a pair, mean over heads", "q·k")
    )
    return Result(
        f"pair_{one.name}",
        f"Components of {one.name}'s logit between query {query} and key {key} of one sequence of random tokens, mean over layers and "
        f"heads, and their sum from the fastest on. {named_bands(band)}",
        plain(data.assign(logit_of_head=of_pair)),
        pair_of_tokens(data, f"{one.name}: token {query} to token {key}"),
    )


def turns(one: Measured) -> Result:
    """How far learned positions turn each component, over the layers that learn them."""
    layers = [place for place, scheme in enumerate(one.layout) if scheme in LEARNED]
    group = one.within.sel(weights="trained").isel(layer=layers)
    share = described(group["turn_share"].mean(("repeat", "layer", "head")), "share of pairs by the angle that they turn", "1")
    upper = group["turn_upper"].isel(repeat=0, drop=True)
    data = bands(group).assign(turn_share=share, turn_upper=upper)
    return Result(
        f"turns_{one.name}",
        f"Angles by which the learned positions of {one.name} turn each component, over the pairs of {one.sampling.sequences} sequences "
        f"of {one.training_length} random tokens, mean over the heads that learn positions.",
        plain(data),
        turn_histogram(data, f"{one.name}: turns by learned positions"),
    )
