"""What the positions of heads cause: a head's positions are changed during the pass, and the answer is read again.

    effect [kind, layer, head]    mean over prompts of  log p(answer | that head's positions changed) - log p(answer)        in nats
    interaction [kind, layer]     effect of all heads of a layer together - the sum of each head's
    control [kind, draw]          the heads with the most needed effects together, against as many others drawn at random

Of every prompt three numbers are taken (`readings`): the log-probability of the answer; its logit difference, the answer's logit less
that of the strongest other candidate - the values of other needles where the prompt marks a `distractor`, else all other tokens -;
and the task's score.

Exact effects cost little: what enters each layer is kept from one undisturbed pass, and a pass starts at the first layer that is changed
(`models.resuming`, equal to the whole pass to the last bit). In a model with more than `ALL` heads that go by positions, all are
screened by one backward pass (`attribution`), and the `top` with the largest estimates are measured, with as many others at random,
so that the rank correlation of both says how far the screening can be trusted. Screening estimates the logit difference: a
log-probability is flat where a model is sure. What is NaN was not measured, or the layer has no positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy.stats import spearmanr
from transformers import PreTrainedModel

from repo_interp.errors import InputError
from repo_interp.experiments.attribution import SCREENINGS
from repo_interp.experiments.experiment import PATH_TOKENS, Experiment, Plan, Progress, require_targets, with_attention
from repo_interp.experiments.position_changes import PositionChange, Strength, default_kinds, require_kinds
from repo_interp.experiments.readings import READINGS, Heads, Measurement
from repo_interp.interventions.replacing import heads_with_positions
from repo_interp.models.reposition import attentions, layer_count, layout
from repo_interp.run import with_schemes
from repo_interp.store import NOT_KEPT, Store
from repo_interp.tasks import Prompt
from repo_interp.tasks.task import Scoring
from repo_interp.values import Count, CountOrNone, Finite, Positive, Seed

ALL = 64
"""Heads up to which every one is measured exactly unless `top` says otherwise."""
TOP = 16
"""Heads that are measured exactly, beside as many at random, where there are more."""


def effects(
    model: PreTrainedModel,
    scoring: Scoring,
    prompts: Sequence[Prompt],
    kinds: Sequence[str],
    strength: Strength | None = None,
    top: int = 0,
    set_size: int = 0,
    draws: int = 8,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
    store: Store = NOT_KEPT,
) -> xr.Dataset:
    """The group `effects` of a run: changes of log-probability, logit difference and score, per head, layer and set of heads.

    `kinds` of `position_changes`, made by `strength`. `top`: heads measured exactly, with as many others (0: all up to `ALL`, else `TOP`).
    `set_size`: heads of the most needed set and of each of its `draws` controls (0: as many as a layer has). `store` keeps finished
    points for when it is called again. Raises InputError for kinds, prompts and numbers that cannot be measured.
    """
    strength = Strength() if strength is None else strength
    require_effects(model, scoring, prompts, kinds, strength, top, set_size, draws)
    heads = heads_with_positions(model)
    layers = sorted({layer for layer, _ in heads})
    measurement = Measurement(model, scoring, prompts, strength, batch_size, store)
    measurement.announce(1 + len(kinds) * (len(layers) + 1), progress)
    clean, screened = measurement.screen(kinds)
    jobs, confirmed = {}, {}
    for kind in kinds:
        confirmed[kind] = to_confirm(screened[kind], heads, top, strength.seed)
        for layer in layers:
            single = [[head] for head in confirmed[kind] if head[0] == layer]
            jobs[kind, str(layer)] = [*single, [head for head in heads if head[0] == layer]]
    found = measurement.read(jobs)
    size = (layer_count(model), next(attentions(model)).heads)
    shape = (len(kinds), *size, len(READINGS), len(prompts))
    by_head, by_layer = np.full(shape, np.nan), np.full((*shape[:2], *shape[3:]), np.nan)
    for (kind, layer), sets in jobs.items():
        place, changes = kinds.index(kind), found[kind, layer] - clean
        by_layer[place, int(layer)] = changes[-1]
        for ((_, head),), change in zip(sets[:-1], changes[:-1], strict=True):
            by_head[place, int(layer), head] = change
    chosen = {
        kind: sets_of_heads(by_head[place, :, :, 0].mean(-1), heads, set_size or size[1], draws, strength.seed)
        for place, kind in enumerate(kinds)
    }
    found = measurement.read({(kind, "sets"): sets for kind, sets in chosen.items()})
    by_set = np.full((len(kinds), 1 + draws, len(READINGS), len(prompts)), np.nan)
    in_set = np.zeros((len(kinds), *size), dtype=np.int8)
    for place, kind in enumerate(kinds):
        by_set[place, : len(chosen[kind])] = found[kind, "sets"] - clean
        in_set[place][tuple(np.transpose(chosen[kind][0]))] = 1
    estimates = np.stack([screened[kind] for kind in kinds])
    group = _labelled(scoring, kinds, clean, by_head, by_layer, by_set, in_set, estimates)
    group = group.assign_attrs(task=scoring.name, prompts=len(prompts), set_heads=len(chosen[kinds[0]][0]))
    return with_schemes(with_attention(group, model), layout(model))


def require_effects(
    model: PreTrainedModel,
    scoring: Scoring,
    prompts: Sequence[Prompt],
    kinds: Sequence[str],
    strength: Strength,
    top: int,
    set_size: int,
    draws: int,
) -> None:
    """Raise InputError for what cannot be measured on `model`."""
    if not heads_with_positions(model):
        schemes = dict.fromkeys(attention.scheme for attention in attentions(model))
        raise InputError(
            f"no layer of this model ({', '.join(schemes)}) rotates by positions, so none can be changed; leave effects out"
        )
    if not prompts or not kinds:
        raise InputError("effects need prompts, and kinds of changes; give one of each at least")
    if min(top, set_size) < 0 or draws < 1:
        raise InputError(f"effects: top and set_size are 0 or more, draws at least 1; got {top}, {set_size}, {draws}")
    require_targets("effects", scoring, prompts)
    require_kinds(kinds, prompts, strength)


def whole_passes(model: PreTrainedModel, kinds: int, top: int, draws: int) -> int:
    """What `effects` costs per prompt, in whole forward passes, rounded up.

    Two undisturbed ones and one more with its gradient (three); attention of all layers per kind (a third); from layer l on, the
    share (L - l) / L for each layer and each head that is measured.
    """
    heads = heads_with_positions(model)
    count = layer_count(model)
    share = {layer: (count - layer) / count for layer, _ in heads}
    measured = _confirmed(len(heads), top)
    mean = sum(share[layer] for layer, _ in heads) / len(heads)
    return int(np.ceil(6 + kinds * (1 / 3 + sum(share.values()) + measured * mean + (1 + draws) * max(share.values()))))


def _confirmed(heads: int, top: int) -> int:
    wanted = top or (heads if heads <= ALL else TOP)
    return min(heads, wanted if wanted >= heads else 2 * wanted)


def to_confirm(screened: Float[np.ndarray, "screening layer head prompt"], heads: Heads, top: int, seed: int) -> Heads:
    """The heads that are measured exactly: all, or the `top` largest estimates and as many others at random."""
    count = _confirmed(len(heads), top)
    if count == len(heads):
        return heads
    sizes = np.abs(screened[SCREENINGS.index("output")].mean(-1))
    ranked = sorted(heads, key=lambda head: -sizes[head])
    others = np.random.default_rng([seed, len(heads)]).permutation(len(heads) - count // 2)[: count - count // 2]
    return sorted(ranked[: count // 2] + [ranked[count // 2 + int(other)] for other in others])


def sets_of_heads(effect: Float[np.ndarray, "layer head"], heads: Heads, size: int, draws: int, seed: int) -> list[Heads]:
    """The `size` heads with the lowest known effect, then `draws` sets of as many other heads; as many as there are, at most half."""
    known = sorted((head for head in heads if np.isfinite(effect[head])), key=lambda head: (effect[head], head))
    size = min(size, len(known), max(1, len(heads) // 2))
    others = [head for head in heads if head not in known[:size]]
    generator = np.random.default_rng([seed, size])
    drawn = [generator.permutation(len(others))[:size] for _ in range(draws)] if others else []
    return [known[:size], *([others[int(place)] for place in sorted(places)] for places in drawn)]


def _labelled(
    scoring: Scoring,
    kinds: Sequence[str],
    clean: Float[np.ndarray, "reading prompt"],
    by_head: Float[np.ndarray, "kind layer head reading prompt"],
    by_layer: Float[np.ndarray, "kind layer reading prompt"],
    by_set: Float[np.ndarray, "kind draw reading prompt"],
    in_set: np.ndarray,
    estimates: Float[np.ndarray, "kind screening layer head prompt"],
) -> xr.Dataset:
    """Everything with its axes, units and long name; of `by_set` the first set is the most needed heads, the others are controls."""
    screened = estimates.mean(-1)
    variables = _changes(scoring, clean, by_head, by_layer, by_set) | _mean_changes(by_head, by_layer, by_set)
    variables |= {
        "in_set": (
            ("kind", "layer", "head"),
            in_set,
            {"long_name": "1 for the most needed heads, which are changed together", "units": "1"},
        ),
        "screened_effect": (
            ("kind", "screening", "layer", "head"),
            screened,
            {"long_name": "change of the logit difference as one backward pass estimates it", "units": "logit"},
        ),
        "rank_correlation": (
            ("kind", "screening"),
            _rank_correlations(screened, by_head[..., 1, :].mean(-1)),
            {"long_name": "rank correlation of estimated and exact changes of the logit difference over heads", "units": "1"},
        ),
    }
    axes = {
        "kind": list(kinds),
        "screening": list(SCREENINGS),
        "layer": np.arange(by_head.shape[1]),
        "head": np.arange(by_head.shape[2]),
    }
    group = xr.Dataset(variables, coords=axes | {"prompt": np.arange(clean.shape[1])})
    return group.assign_attrs(metric=scoring.metric, higher_is_better=str(scoring.higher_is_better))


def _changes(
    scoring: Scoring,
    clean: Float[np.ndarray, "reading prompt"],
    by_head: Float[np.ndarray, "kind layer head reading prompt"],
    by_layer: Float[np.ndarray, "kind layer reading prompt"],
    by_set: Float[np.ndarray, "kind draw reading prompt"],
) -> dict[str, tuple]:
    """What is read of every prompt undisturbed, and how it changes, by name."""
    variables: dict[str, tuple] = {}
    texts = {
        "log_probability": ("log-probability of the answer, mean over its tokens", "nat"),
        "logit_difference": ("logit of the answer less that of the strongest other candidate", "logit"),
        "score": (scoring.metric, scoring.units),
    }
    for place, (name, (text, units)) in enumerate(texts.items()):

        def put(
            prefix: str, axes: tuple[str, ...], values: np.ndarray, whose: str, place=place, name=name, text=text, units=units
        ):
            attributes = {"long_name": f"change of the {text}, {whose}", "units": units}
            variables[f"{prefix}{name}_change"] = ((*axes, "prompt"), values[..., place, :], attributes)

        variables[f"clean_{name}"] = (("prompt",), clean[place], {"long_name": f"{text}, undisturbed", "units": units})
        put("", ("kind", "layer", "head"), by_head, "positions of one head changed")
        put("layer_", ("kind", "layer"), by_layer, "positions of all heads of a layer changed")
        put("set_", ("kind",), by_set[:, 0], "positions of the most needed heads changed together")
        put("control_", ("kind", "draw"), by_set[:, 1:], "positions of as many other heads, drawn at random, changed together")
    return variables


def _mean_changes(
    by_head: Float[np.ndarray, "kind layer head reading prompt"],
    by_layer: Float[np.ndarray, "kind layer reading prompt"],
    by_set: Float[np.ndarray, "kind draw reading prompt"],
) -> dict[str, tuple]:
    """Changes of the log-probability of the answer over prompts, by name."""
    heads, layers, nats = ("kind", "layer", "head"), ("kind", "layer"), {"units": "nat"}
    effect, of_layer = by_head[..., 0, :].mean(-1), by_layer[..., 0, :].mean(-1)
    spread = by_head[..., 0, :].std(-1, ddof=1) if by_head.shape[-1] > 1 else np.full_like(effect, np.nan)
    of_set = by_set[..., 0, :].mean(-1)
    change = "mean change of the log-probability of the answer"
    return {
        "effect": (heads, effect, {"long_name": change, **nats}),
        "effect_spread": (heads, spread, {"long_name": "standard deviation of the change over prompts", **nats}),
        "layer_effect": (layers, of_layer, {"long_name": f"{change}, all heads of a layer", **nats}),
        "interaction": (layers, of_layer - effect.sum(-1), {"long_name": "effect of a layer less the sum of its heads'", **nats}),
        "set_effect": (("kind",), of_set[:, 0], {"long_name": f"{change}, the most needed heads together", **nats}),
        "control_effect": (("kind", "draw"), of_set[:, 1:], {"long_name": f"{change}, as many other heads together", **nats}),
    }


def _rank_correlations(screened: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """[kind, screening]: Spearman's, over the heads that were measured; NaN where either is the same for all."""
    result = np.full(screened.shape[:2], np.nan)
    for kind, screening in np.ndindex(*result.shape):
        known = np.isfinite(exact[kind])
        pair = screened[kind, screening][known], exact[kind][known]
        if min(len(np.unique(values)) for values in pair) > 1:
            result[kind, screening] = spearmanr(*pair)[0]  # pyright: ignore[reportArgumentType]
    return result


@dataclass(frozen=True)
class Effects(Experiment):
    """The experiment `effects`: what the positions of heads cause."""

    kinds: tuple[PositionChange, ...] = ()
    """Changes of positions (`position_changes`); empty: linearised where positions are learned, frozen, permuted."""
    top: CountOrNone = 0
    """Heads that are measured exactly, with as many others; 0: all where there are few."""
    set_size: CountOrNone = 0
    """Most needed heads that are changed together; 0: as many as a layer has."""
    draws: Count = 8
    """Controls: sets of as many other heads."""
    scale: Finite = 0.5
    """Factor of the positions, for `scaled`."""
    step: Positive = 1.0
    """Positions are rounded to multiples of this."""
    shift: Finite = 0.5
    """How far a span is shifted, in ranges of the head's positions."""
    span: str = ""
    """Span whose tokens are shifted; empty: the needle, else the first span."""
    seed: Seed = 0
    """Seed of permutations and controls."""
    name: ClassVar[str] = "effects"

    def plan(self, model: PreTrainedModel, scoring: Scoring, prompts: Sequence[Prompt], training_length: int) -> Plan:
        """All kinds on `prompts`. Raises InputError for kinds, numbers, prompts and models that cannot be measured."""
        kinds = tuple(dict.fromkeys(self.kinds or default_kinds(model)))
        strength = Strength(self.scale, self.step, self.shift, self.span, self.seed)
        require_effects(model, scoring, prompts, kinds, strength, self.top, self.set_size, self.draws)
        lengths = tuple(len(prompt.tokens) for prompt in prompts)

        def run(batch_size: int, store: Store, progress: Progress | None) -> dict[str, xr.Dataset]:
            size = max(batch_size, PATH_TOKENS // max(lengths))
            options = (kinds, strength, self.top, self.set_size, self.draws)
            return {self.name: effects(model, scoring, prompts, *options, batch_size=size, progress=progress, store=store)}

        return Plan(self, lengths * whole_passes(model, len(kinds), self.top, self.draws), run)
