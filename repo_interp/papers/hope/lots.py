"""Components of a model on random tokens, in independent lots (HoPE sec. 3.1): what every figure of HoPE's analysis is made of.

Sequences of random tokens after BOS, in `repeats` lots: the lots give the spread. The paper takes 5,000 sequences; a few hundred give
the same curves but for noise, which is measured and shown.

Knows nothing about claims and figures, nor which sequences are taken of which model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.analysis.observing import stream
from repo_interp.errors import InputError
from repo_interp.measures.components import Components
from repo_interp.measures.statistics import Measure
from repo_interp.models.reposition import attentions
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.random_tokens import random_token_prompts

KEPT = ("component_by_distance", "frequency", "activated", "low_frequency", "turn_share", "turn_upper", "distance_pairs")

TOGETHER: Any = {"data_vars": "all", "coords": "minimal", "compat": "override", "join": "exact"}
"""How equal measurements are put side by side."""


@dataclass(frozen=True)
class Sampling:
    """How much is measured."""

    sequences: int = 64
    """Of each length, in all lots together."""
    repeats: int = 4
    """Independent lots."""
    controls: int = 2
    """Twins with random weights."""
    step_sequences: int = 32
    """At each saved step of training, in all lots together."""
    batch_size: int = 8
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise InputError(f"a spread needs at least two lots of sequences, not {self.repeats}")
        for name in ("sequences", "step_sequences"):
            if getattr(self, name) < self.repeats:
                raise InputError(f"{name} must be at least one a lot, so {self.repeats}; not {getattr(self, name)}")


def lots(bridge, tokens: int, training_length: int, sequences: int, sampling: Sampling) -> xr.Dataset:
    """Components [repeat, layer, ...] of independent lots of random sequences of `tokens` tokens."""
    measures: tuple[Measure, ...] = (  # pyright: ignore[reportAssignmentType]
        Components(training_length, prompts="mean"),
        Components(training_length, prompts="mean", first_token=1, name="without_first"),
    )
    found: list[xr.Dataset] = []
    for repeat in range(sampling.repeats):
        count = sequences // sampling.repeats + (repeat < sequences % sampling.repeats)
        prompts = random_prompts(bridge, tokens, count, sampling.seed * sampling.repeats + repeat)
        groups = stream(bridge, prompts, measures, sampling.batch_size)
        components = groups["components"]
        kept = components[list(KEPT)]
        kept["logit"] = components["logit_by_distance"].mean("head", keep_attrs=True)
        kept["logit_without_first"] = groups["without_first"]["logit_by_distance"].mean("head", keep_attrs=True)
        kept["vaf"], kept["vaf_curve"] = components["vaf_mean"], components["vaf_curve_mean"]
        found.append(kept)
    return xr.concat(found, dim=xr.IndexVariable("repeat", range(sampling.repeats)), **TOGETHER)


def random_prompts(bridge, tokens: int, count: int, seed: int) -> Iterator[Prompt]:
    """Random tokens after the tokenizer's BOS, if it has one; without a tokenizer, random ids of the whole vocabulary."""
    if getattr(bridge, "tokenizer", None) is not None:
        yield from random_token_prompts(bridge.tokenizer, tokens, count, seed)
        return
    vocabulary = int(next(attentions(bridge)).config.vocab_size)
    for index in range(count):
        yield Prompt(tokens=tuple(np.random.default_rng([seed, index, tokens]).integers(0, vocabulary, tokens).tolist()))


def bands(measured: xr.Dataset) -> xr.Dataset:
    """`frequency`, `activated` and `low_frequency` [component] of the first layer that rotates, of a group or of lots of them."""
    one = measured[["frequency", "activated", "low_frequency"]]
    one = one.isel({axis: 0 for axis in one.dims if axis not in ("layer", "component")}, drop=True)
    rotating = np.flatnonzero(one["frequency"].notnull().any("component").values)
    place = int(rotating[0]) if rotating.size else 0
    chosen = one.isel(layer=place).drop_vars(["layer", "scheme"], errors="ignore")
    return chosen.assign({name: chosen[name].astype(bool) for name in ("activated", "low_frequency")})


def named_bands(band: xr.Dataset) -> str:
    """Which components are activated and how many are lower, as a sentence for a caption."""
    chosen = np.flatnonzero(band["activated"].values)
    thetas = band["frequency"].values[chosen]
    named = ", ".join(f"r = {place} (θ = {theta:.4g} rad)" for place, theta in zip(chosen, thetas, strict=True))
    return f"Activated: {named or 'none'}; {int(band['low_frequency'].sum())} components are lower."
