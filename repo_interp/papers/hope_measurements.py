"""What the claims of HoPE's analysis are judged on: components of checkpoints on random tokens, within and beyond L (HoPE sec. 3.1).

Sequences of random tokens after BOS, of lengths L and 2 L, in `repeats` independent lots, through the trained checkpoint and
through twins with random weights: the lots give the spread, the twins the control. L is the checkpoint's training length. The paper
takes 5,000 sequences; a few hundred give the same curves but for noise, which is measured and shown.

Knows nothing about claims and figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.experiments.streaming import stream
from repo_interp.experiments.training_steps import over_steps, saved_steps
from repo_interp.inputs import AttentionInputs
from repo_interp.measures.components import Components
from repo_interp.measures.labels import described, of_layer
from repo_interp.measures.layer_components import pair_components
from repo_interp.measures.statistics import Measure
from repo_interp.models.capture import capture
from repo_interp.models.fresh import load_fresh
from repo_interp.models.load import load
from repo_interp.models.provenance import length_trained, loaded_from
from repo_interp.models.reposition import attentions, layout
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


@dataclass(frozen=True)
class Measured:
    """One checkpoint."""

    name: str
    """What the caller calls it."""
    path: Path
    layout: tuple[str, ...]
    training_length: int
    digest: str
    within: xr.Dataset
    """[weights, repeat, layer, ...] on sequences of L tokens: `logit`, `logit_without_first`, `component_by_distance`, `vaf`,
    `vaf_curve` (the latter two means over prompts, heads and layers' own axes kept), bands."""
    beyond: xr.Dataset | None
    """The same on sequences of 2 L tokens; None for positions that end at L."""
    steps: xr.Dataset | None
    """[step, repeat, layer, ...] on sequences of L tokens, where the training run kept its steps."""
    sampling: Sampling

    @property
    def scheme(self) -> str:
        """The scheme that the checkpoint is named for: that of its last layer."""
        return self.layout[-1]


def measure_checkpoint(name: str, path: str | os.PathLike[str], sampling: Sampling) -> Measured:
    """Everything that the claims need of the checkpoint at `path`. Raises InputError where there is none."""
    trained = load(path, sampling.device)
    length, schemes = length_trained(trained), layout(trained)
    origin = loaded_from(trained)
    bridges = {"trained": trained} | {
        f"random {seed}": load_fresh(path, seed, sampling.device) for seed in range(sampling.controls)
    }
    lengths = (length,) if "learned" in schemes else (length, 2 * length)
    found = [
        xr.concat(
            [lots(bridge, tokens, length, sampling.sequences, sampling) for bridge in bridges.values()],
            dim=xr.IndexVariable("weights", list(bridges)),
            **TOGETHER,
        )
        for tokens in lengths
    ]
    return Measured(
        name=name,
        path=Path(path),
        layout=schemes,
        training_length=length,
        digest="" if origin is None else origin.digest,
        within=found[0],
        beyond=found[1] if len(found) > 1 else None,
        steps=_steps(path, length, sampling) if set(schemes) == {"rope"} else None,
        sampling=sampling,
    )


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


def components_of_pair(bridge, tokens: Sequence[int], query: int, key: int) -> xr.DataArray:
    """Components [layer, head, component] of the logit between the tokens numbered `query` and `key`, in units of q . k.

    Raises InputError where one of them is not there, or the key comes after the query.
    """
    if not 0 <= key <= query < len(tokens):
        raise InputError(f"a pair needs 0 <= key <= query < {len(tokens)}, not key {key} and query {query}")
    found: list[xr.DataArray] = []

    def receive(inputs: AttentionInputs) -> None:
        found.append(of_layer(inputs, ("layer", "head", "component"), pair_components(inputs, query, key)[0]))

    batch = torch.tensor([tokens], device=next(bridge.parameters()).device)
    capture(bridge, batch, torch.ones_like(batch, dtype=torch.bool), torch.tensor([0]), receive)
    return described(
        xr.concat(found, dim="layer", join="exact", coords="minimal", compat="override"),
        "component of the logit of a pair",
        "q·k",
    )


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


def _steps(path: str | os.PathLike[str], length: int, sampling: Sampling) -> xr.Dataset | None:
    found = saved_steps(path)
    if not found:
        return None
    return over_steps(found, lambda bridge: lots(bridge, length, length, sampling.step_sequences, sampling), sampling.device)
