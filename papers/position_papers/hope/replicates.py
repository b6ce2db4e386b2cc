"""Rotary components of a checkpoint on random tokens, in independent replicates (HoPE sec. 3.1):
what claims H1, H2, H4 and H5 rest on.

    replicate      mean logit m(t) and components C_r(t) at distance t over sequences of random tokens after BOS; replicates give the spread
    kind           the paper assigns "a random token to all positions": every token "independent", or one token "repeated" - both are taken
                   of repeated tokens every sequence is a replicate: it has one token, which it
                   differs by from the others
    weights        the trained checkpoint, and random-weight controls; each is kept by itself, so that an interrupted measurement goes on
    within, beyond sequences of L and of 2 L tokens; L is the training length, or `length` where
    that is shorter

Read from it: rotary components by band (HoPE sec. 3.1), activated, pi / L < theta_r < 2 pi / L, and
those of lower frequency. A layer with a window of w tokens compares none further apart, so that its
L is min(w, training length): what is measured `within` is of the layers with the L of the first
that rotates, over the distances below it. Measured are all checkpoints with weights but those
trained to copy, which are there for their scores.

The paper takes 5,000 sequences; a few hundred give the same curves but for noise, which is measured
and shown. A long sequence has as many pairs of tokens as many short ones: of models trained on more
than LONG tokens, a replicate is of about LONG tokens, or one sequence, controls have one replicate;
and of controls, and beyond L, only the first layers are measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from position_papers.hope.wording import OVER_REPLICATES, capped
from position_papers.kit import Cache, Claim, Evidence, Needs, Subject, each, evidence, joined
from repo_interp.analysis.analyze import stream
from repo_interp.errors import InputError
from repo_interp.measures.components import Components
from repo_interp.models.decoder import as_decoder
from repo_interp.models.fresh_weights import load_fresh
from repo_interp.models.load import load
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.random_tokens import Kind, drawn, random_token_prompts
from repo_interp.values import Count, CountOrNone, Seed

TRAINED = "trained"
KINDS: tuple[Kind, ...] = ("independent", "repeated")
DRAWN = 2
"""Controls, at most, of other checkpoints, beside which nothing is judged: they are drawn."""
LONG = 2048
"""Training length, in tokens, above which sequences and layers are fewer: SmolLM2's 8,192 then take
one core about 20 minutes.
"""
FIRST_LAYERS = 4
"""Of controls within L, and of the trained weights beyond it, where L is long; H4 is about the
first layer, and controls have only that.
"""
_MEASURED = ("frequency", "band_length", "activated", "low_frequency", "turn_share", "turn_upper")
_BESIDE: Any = {
    "data_vars": "all",
    "coords": "minimal",
    "compat": "override",
    "join": "outer",
    "fill_value": {"activated": False, "low_frequency": False},
}
"""How measurements of controls are put beside others, which may have more layers and replicates."""


@dataclass(frozen=True)
class Sampling:
    """How much is measured."""

    sequences: Count = 64
    """Sequences of each length, in all replicates together."""
    repeats: Count = 4
    """Independent replicates."""
    controls: Count = 10
    """Random-weight controls of a checkpoint with RoPE in every layer, which is judged beside them.
    """
    repeated_sequences: Count = 16
    """Sequences of one repeated token of each length, in all replicates together."""
    step_sequences: Count = 32
    """Sequences at each saved step of training, in all replicates together."""
    length: CountOrNone = 0
    """Most tokens that are taken as L, for a quick look at a model trained on long sequences; 0:
    the training length.
    """
    batch_size: Count = 8
    seed: Seed = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise InputError(
                f"repeats is {self.repeats}; wanted at least two replicates, for a spread"
            )
        for name in ("sequences", "repeated_sequences", "step_sequences"):
            if getattr(self, name) < self.repeats:
                raise InputError(
                    f"{name} is {getattr(self, name)}; wanted at least {self.repeats}, one "
                    "per replicate"
                )
        if self.length and self.length < 16:
            raise InputError(
                f"length is {self.length}; wanted at least 16 tokens, or 0 for the training length"
            )

    def count_of(self, kind: Kind) -> int:
        """Sequences of a kind, in all replicates together."""
        return self.repeated_sequences if kind == "repeated" else self.sequences

    def repeats_of(self, kind: Kind) -> int:
        """Replicates of a kind."""
        return self.repeated_sequences if kind == "repeated" else self.repeats

    def tokens_of(self, training_length: int) -> int:
        """L: the tokens of a sequence within the training length."""
        return min(self.length or training_length, training_length)


# ---- which checkpoints ---------------------------------------------------------------------------


def is_analysed(subject: Subject) -> bool:
    """Whether the attention of a checkpoint is measured: it has weights, and was not trained to
    copy.
    """
    copies = subject.configuration is not None and subject.configuration.task == "copying"
    return subject.has_weights and not copies


def has_rope_alone(subject: Subject) -> bool:
    """Whether a checkpoint that is measured has RoPE in every layer."""
    return is_analysed(subject) and set(subject.schemes) == {"rope"}


NEEDS_ROPE = Needs(
    each(has_rope_alone),
    "no checkpoint with RoPE in every layer was given",
    ("language/rope",),
    "rope",
)


# ---- measuring -----------------------------------------------------------------------------------


def within(
    subject: Subject, options: Sampling, cache: Cache, kind: Kind = "independent"
) -> xr.Dataset:
    """Replicates [weights, repeat, layer, ...] of `subject` on sequences of L tokens, and as
    attributes what captions say of them; where the first layer that rotates has a window, of the
    layers with its window, whose L is what they see.
    """
    data = _of_length(subject, options, cache, 1, kind)
    assert data is not None
    lengths = data["band_length"].sel(weights=TRAINED, repeat=0).values
    own = int(lengths[first_rotating(data)])
    trained = own if own < data.attrs["length"] else data.attrs["training_length"]
    seen = data.isel(layer=np.flatnonzero(lengths == own), distance=slice(own))
    return seen.assign_attrs(length=own, training_length=trained)


def beyond(
    subject: Subject, options: Sampling, cache: Cache, kind: Kind = "independent"
) -> xr.Dataset | None:
    """The same on sequences of 2 L tokens, of all layers; None for positions that end at L, and
    where a window hides from the first layer what is beyond.
    """
    return None if "learned" in subject.schemes else _of_length(subject, options, cache, 2, kind)


def of_model(
    bridge: Any,
    tokens: int,
    length: int,
    sequences: int,
    sampling: Sampling,
    kind: Kind = "independent",
    layers: Sequence[int] | None = None,
) -> xr.Dataset:
    """Components [repeat, ...] of replicates with `sequences` of `tokens` tokens in all; `length`
    is the L of their bands.

    With fewer sequences than replicates there are as few of these. `layers`: which are measured;
    None: all.
    """
    repeats = sampling.repeats_of(kind)
    counts = [sequences // repeats + (repeat < sequences % repeats) for repeat in range(repeats)]
    seeds = [sampling.seed * repeats + repeat for repeat in range(repeats)]
    datasets = [
        _replicate(
            bridge,
            random_prompts(bridge, tokens, count, seed, kind),
            length,
            sampling.batch_size,
            layers,
        )
        for count, seed in zip(counts, seeds, strict=True)
        if count
    ]
    return joined(dict(enumerate(datasets)), "repeat")


def random_prompts(
    bridge: Any, tokens: int, count: int, seed: int, kind: Kind = "independent"
) -> Iterator[Prompt]:
    """Prompts of random tokens after the tokenizer's BOS, if it has one; without a tokenizer, of
    the whole vocabulary.
    """
    if getattr(bridge, "tokenizer", None) is not None:
        yield from random_token_prompts(bridge.tokenizer, tokens, count, seed, kind)
        return
    vocabulary = range(as_decoder(bridge).vocabulary_size)
    for index in range(count):
        yield Prompt(tokens=tuple(drawn(vocabulary, tokens, [seed, index, tokens], kind)))


@dataclass(frozen=True)
class Extent:
    """How much of one model is measured on sequences of one length and kind."""

    sequences: int
    layers: int | None = None
    """The first ones; None: all."""


def extent(subject: Subject, options: Sampling, multiple: int, kind: Kind, weights: str) -> Extent:
    """What is measured of `weights`, "trained" or a control's, on sequences of `multiple` times L
    tokens.
    """
    if subject.training_length <= LONG:
        return Extent(options.count_of(kind))
    each = max(1, LONG // (multiple * options.tokens_of(subject.training_length)))
    if weights == TRAINED:
        return Extent(options.repeats * each, None if multiple == 1 else FIRST_LAYERS)
    return Extent(each, FIRST_LAYERS if multiple == 1 else 1)


def controls(subject: Subject, options: Sampling) -> int:
    """How many random-weight controls of `subject` are measured."""
    return options.controls if has_rope_alone(subject) else min(DRAWN, options.controls)


def _of_length(
    subject: Subject, options: Sampling, cache: Cache, multiple: int, kind: Kind
) -> xr.Dataset | None:
    """Replicates on sequences of `multiple` times L tokens, of every model from the cache where it
    was measured before.
    """
    length, measured = options.tokens_of(subject.training_length), {}
    names = [TRAINED, *(f"random {number}" for number in range(controls(subject, options)))]
    for done, name in enumerate(names):
        cache.progress(
            f"{subject.name}: models on {kind} tokens, {multiple * length} a sequence",
            done,
            len(names),
        )
        own = extent(subject, options, multiple, kind, name)
        measured[name] = subject.measured(
            cache,
            _measure,
            options,
            *(name, multiple * length, length, kind, own),
            extent=str(own),
            repeats=options.repeats_of(kind),
            weights=name,
            tokens=multiple * length,
            length=length,
            kind=kind,
        )
        if multiple > 1 and int(measured[name]["band_length"].isel(repeat=0, layer=0)) < length:
            return None
    data = xr.concat(list(measured.values()), dim=xr.IndexVariable("weights", names), **_BESIDE)
    return data.assign_attrs(
        checkpoint=subject.name,
        length=length,
        training_length=subject.training_length,
        sequences=extent(subject, options, multiple, kind, TRAINED).sequences,
        kind=kind,
    )


def _measure(
    subject: Subject,
    options: Sampling,
    weights: str,
    tokens: int,
    length: int,
    kind: Kind,
    measured: Extent,
) -> xr.Dataset:
    """Replicates [repeat, layer, ...] of the trained weights, or of a control, "random 0"."""
    trained = weights == TRAINED
    bridge = (
        load(subject.path, options.device)
        if trained
        else load_fresh(subject.path, int(weights.split()[1]), options.device)
    )
    layers = None if measured.layers is None else range(min(measured.layers, len(subject.schemes)))
    return of_model(bridge, tokens, length, measured.sequences, options, kind, layers)


def _replicate(
    bridge: Any,
    prompts: Iterable[Prompt],
    length: int,
    batch_size: int,
    layers: Sequence[int] | None = None,
) -> xr.Dataset:
    """One replicate: what `Components` gives for `prompts`, with the means over heads and layers
    that the claims are about.
    """
    measure: Any = Components(length, prompts="mean")
    components = stream(bridge, prompts, [measure], batch_size, layers)["components"]
    data = components[list(_MEASURED)]
    lengths = data["band_length"].values
    alike = np.flatnonzero(lengths == lengths[first_rotating(data)])
    data["component_by_distance"] = (
        components["component_by_distance"].isel(layer=alike).mean("layer", keep_attrs=True)
    )
    data["first_layer_by_distance"] = components["component_by_distance"].isel(layer=0, drop=True)
    data["logit"] = components["logit_by_distance"].mean("head", keep_attrs=True)
    data["vaf"], data["vaf_curve"] = components["vaf_mean"], components["vaf_curve_mean"]
    return data


def first_rotating(data: xr.Dataset) -> int:
    """The place of the first layer that rotates; 0 where none does."""
    frequency = data["frequency"]
    return int(
        frequency.notnull()
        .any([axis for axis in frequency.dims if axis != "layer"])
        .values.argmax()
    )


def bands(data: xr.Dataset) -> xr.Dataset:
    """`frequency`, `activated` and `low_frequency` [component] of the first layer that rotates, of
    replicates or of one of them.
    """
    by_layer = data[["frequency", "activated", "low_frequency"]].drop_attrs(deep=False)
    by_layer = by_layer.isel(
        {axis: 0 for axis in by_layer.dims if axis not in ("layer", "component")}, drop=True
    )
    chosen = by_layer.isel(layer=first_rotating(by_layer)).drop_vars(
        ["layer", "scheme"], errors="ignore"
    )
    return chosen.assign(
        {name: chosen[name].astype(bool) for name in ("activated", "low_frequency")}
    )


# ---- evidence ------------------------------------------------------------------------------------


def evidence_of(
    claim: Claim,
    data: xr.Dataset,
    measured: str,
    values: Mapping[str, Any],
    ours: float,
    of_replicates: Sequence[float] | np.ndarray,
    of_controls: Iterable[float],
    note: str,
) -> Evidence:
    """Evidence on `claim` from a number of the mean over replicates, and the same number of every
    replicate and of every random-weight control.
    """
    controls = ", ".join(f"{number:.3g}" for number in of_controls)
    return evidence(
        claim,
        data.attrs["checkpoint"],
        measured,
        values,
        ours,
        np.std(of_replicates, ddof=1),
        OVER_REPLICATES,
        data.attrs["sequences"],
        f"random weights: {controls}" if controls else "",
        note,
        capped(data),
    )
