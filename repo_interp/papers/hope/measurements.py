"""What the claims of HoPE's analysis are judged on: components of checkpoints on random tokens, within and beyond L (HoPE sec. 3.1).

Sequences of lengths L and 2 L, through the trained checkpoint and through twins with random weights, which are the control. L is the
checkpoint's training length.

Knows nothing about claims and figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.experiments.training_steps import saved_steps
from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.layer_components import pair_components
from repo_interp.measures.labels import described, of_layer
from repo_interp.models.capture import capture
from repo_interp.models.checkpoints import identify
from repo_interp.models.families import training_length
from repo_interp.models.load import load, load_fresh
from repo_interp.models.provenance import checkpoint_digest
from repo_interp.papers.hope.lots import TOGETHER, Sampling, lots
from repo_interp.papers.hope.steps import measure_steps, read_steps
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.result import plain


@dataclass(frozen=True)
class Measured:
    """One checkpoint."""

    name: str
    """What the caller calls it."""
    path: str
    layout: tuple[str, ...]
    training_length: int
    digest: str
    within: xr.Dataset
    """[weights, repeat, layer, ...] on sequences of L tokens: `logit`, `logit_without_first`, `component_by_distance`, `vaf`,
    `vaf_curve` (the latter two means over prompts, heads and layers' own axes kept), bands."""
    beyond: xr.Dataset | None
    """The same on sequences of 2 L tokens; None for positions that end at L."""
    steps: xr.Dataset | None
    """VAF [step, repeat, component] over training and bands, where the training run kept its steps or what was measured on them."""
    sampling: Sampling

    @property
    def scheme(self) -> str:
        """The scheme that the checkpoint is named for: that of its last layer."""
        return self.layout[-1]


def measure_checkpoint(
    name: str, path: str | os.PathLike[str], sampling: Sampling, progress: Callable[[str], None], cache: Cache
) -> Measured:
    """Everything that the claims need of the checkpoint at `path`. Raises InputError where there is none."""
    checkpoint = identify(path)
    length, schemes = training_length(checkpoint.config), checkpoint.layout
    digest = checkpoint_digest(checkpoint.directory)
    depends = depends_on(digest, sampling)

    def of_length(tokens: int) -> xr.Dataset:
        def measure() -> xr.Dataset:
            progress(f"measuring {name} on {tokens} tokens")
            bridges = (
                load(path, sampling.device),
                *(load_fresh(path, seed, sampling.device) for seed in range(sampling.controls)),
            )
            names = ["trained", *(f"random {seed}" for seed in range(sampling.controls))]
            found = [lots(bridge, tokens, length, sampling.sequences, sampling) for bridge in bridges]
            return plain(xr.concat(found, dim=xr.IndexVariable("weights", names), **TOGETHER))

        stated = {**depends, "sequences": sampling.sequences, "controls": sampling.controls, "tokens": tokens}
        return cache.dataset("hope_lots", stated, measure)

    def over_steps() -> xr.Dataset | None:
        recorded = read_steps(path)
        if recorded is not None or not saved_steps(path):
            return recorded

        def measure() -> xr.Dataset:
            progress(f"measuring {name} over its saved steps")
            return plain(measure_steps(path, length, sampling))

        steps = ",".join(f"{step}:{checkpoint_digest(saved)}" for step, saved in saved_steps(path).items())
        return cache.dataset("hope_steps", {**depends, "steps": steps, "sequences": sampling.step_sequences}, measure)

    return Measured(
        name=name,
        path=os.fspath(path),
        layout=schemes,
        training_length=length,
        digest=digest,
        within=of_length(length),
        beyond=None if "learned" in schemes else of_length(2 * length),
        steps=over_steps() if set(schemes) == {"rope"} else None,
        sampling=sampling,
    )


def seconds(path: str | os.PathLike[str], sampling: Sampling, checkpoints: int) -> float:
    """How long so many checkpoints like the one at `path` will take, from timing a few sequences of L tokens.

    seconds = checkpoints x models x (2 lots x time of a lot + 3 sequences x time of a sequence): one of 2 L tokens counts twice.
    """
    trained, length = load(path, sampling.device), training_length(identify(path).config)

    def timed(sequences: int) -> float:
        few = replace(sampling, repeats=2, sequences=sequences)
        start = time.monotonic()
        lots(trained, length, length, sequences, few)
        return time.monotonic() - start

    timed(2)  # the first of a process is slower
    small, large = timed(2), timed(10)
    sequence = max(large - small, 0.0) / 8
    lot = max(small / 2 - sequence, 0.0)
    return checkpoints * (1 + sampling.controls) * (2 * sampling.repeats * lot + 3 * sampling.sequences * sequence)


def depends_on(digest: str, sampling: Sampling) -> dict[str, str | int | float | bool | None]:
    """What every measurement on a checkpoint depends on; how many sequences is stated beside it."""
    return {
        "checkpoint": digest,
        "repeats": sampling.repeats,
        "batch_size": sampling.batch_size,
        "seed": sampling.seed,
        "device": sampling.device,
    }


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
