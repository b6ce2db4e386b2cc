"""Causal effects of the positions of heads on the answer.

The experiment changes a head's positions during a forward pass and reads the answer again:

    effect [kind, layer, head]    mean over prompts, in nats, of
                                  log p(answer | positions of that head changed) - log p(answer)
    interaction [kind, layer]     effect of all heads of a layer - sum of the effects of its heads
    control [kind, draw]          effect of changing together a random set of other heads, as many
                                  as the most needed heads; all sets differ
    set_less_controls [kind]      effect of the most needed heads - mean effect of the controls,
                                  paired by prompt, with a 95 % interval over prompts

`readings` takes three numbers of every prompt: the log-probability of the answer; its logit
difference, the answer's logit minus the logit of the strongest other candidate; and the task's
score. The candidates are the values of other needles if the prompt marks a `distractor`, else all
other tokens.

Exact effects cost little: one undisturbed pass keeps the inputs of all layers, and each further
pass starts at the first changed layer (`models.resuming`, equal to the whole pass to the last bit).
If more than `ALL` heads use positions, one backward pass screens all of them (`attribution`). The
`top` heads with the largest estimates are then measured, and as many others at random; the rank
correlation of estimates and exact effects says how far the screening can be trusted. Screening
estimates the logit difference, because a log-probability is flat where a model is sure. NaN marks
heads that were not measured and layers without positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Float
from transformers import PreTrainedModel

from repo_interp.errors import InputError
from repo_interp.experiments.attribution import SCREENINGS
from repo_interp.experiments.draws import drawn_sets
from repo_interp.experiments.experiment import (
    PATH_TOKENS,
    QUICK,
    Experiment,
    Plan,
    Progress,
    Unasked,
    require_targets,
)
from repo_interp.experiments.grid import Grid
from repo_interp.experiments.position_changes import (
    KINDS,
    EditedPrompts,
    PositionChange,
    Strength,
    default_kinds,
)
from repo_interp.experiments.readings import READINGS, Heads, Measurement
from repo_interp.experiments.responses import batches_by_length
from repo_interp.intervals import half_interval
from repo_interp.measures.fitting import Layers
from repo_interp.measures.labels import described_group
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.run import with_schemes
from repo_interp.storage.store import NOT_KEPT, Store
from repo_interp.tasks import Prompt
from repo_interp.tasks.task import Scoring
from repo_interp.values import Count, CountOrNone, Finite, Positive, Seed

ALL = 64
"""Largest number of heads of a model for which all heads are measured exactly by default."""
TOP = 16
"""Number of heads with the largest estimates that are measured exactly in larger models, in
addition to the same number at random.
"""


def whole_passes(decoder: Decoder, kinds: int, top: int, draws: int) -> int:
    """Count the forward passes that `effects` costs per prompt, rounded up.

    Two undisturbed passes and one with its gradient (three); attention of all layers per kind (a
    third); from layer l on, the share (L - l) / L for every layer and every measured head.

    Args:
        decoder: Decoder of the model.
        kinds: Number of changes of positions.
        top: Heads that are measured exactly, see `Effects.top`.
        draws: Control sets.

    Returns:
        Number of whole passes.
    """
    heads = decoder.positioned_heads
    count = decoder.layer_count
    # A pass resumes at the first changed layer, so it costs the share of layers from there on.
    share = {layer: (count - layer) / count for layer, _ in heads}
    measured = _confirmed(len(heads), top)
    mean = sum(share[layer] for layer, _ in heads) / len(heads)
    return int(
        np.ceil(
            6
            + kinds
            * (1 / 3 + sum(share.values()) + measured * mean + (1 + draws) * max(share.values()))
        )
    )


def _confirmed(heads: int, top: int) -> int:
    # If not all heads are measured, as many random ones are added: they test the screening.
    wanted = top or (heads if heads <= ALL else TOP)
    return min(heads, wanted if wanted >= heads else 2 * wanted)


def to_confirm(
    screened: Float[np.ndarray, "screening layer head prompt"], heads: Heads, top: int, seed: int
) -> Heads:
    """Choose the heads that are measured exactly.

    Args:
        screened: Estimated effects.
        heads: All heads with positions.
        top: Number of largest estimates; 0: all heads if they are at most `ALL`, else `TOP`.
        seed: Seed of the heads drawn at random.

    Returns:
        All heads, or the heads with the `top` largest estimates and the same number of others at
        random, sorted.
    """
    count = _confirmed(len(heads), top)
    if count == len(heads):
        return heads
    # Ranked by the estimate after the softmax: the other one is blind where attention is sure.
    sizes = np.abs(screened[SCREENINGS.index("output")].mean(-1))
    ranked = sorted(heads, key=lambda head: -sizes[head])
    # Ranks after the heads chosen for their size. The seed includes the number of heads.
    others = np.random.default_rng([seed, len(heads)]).permutation(len(heads) - count // 2)[
        : count - count // 2
    ]
    # Sorted by layer, since the grid measures the heads of one layer at a time
    return sorted(ranked[: count // 2] + [ranked[count // 2 + int(other)] for other in others])


def sets_of_heads(
    effect: Float[np.ndarray, "layer head"], heads: Heads, size: int, draws: int, seed: int
) -> list[Heads]:
    """Choose the most needed heads, and control sets of as many other heads.

    Args:
        effect: Mean effect of every head; NaN where it was not measured.
        heads: All heads with positions.
        size: Heads of a set, half of all heads at most.
        draws: Number of control sets.
        seed: Seed of the control sets.

    Returns:
        The `size` measured heads with the lowest effect, then up to `draws` different control sets.
    """
    # Lowest first: a head is needed where changing it lowers log p. Ties go to the earlier head.
    known = sorted(
        (head for head in heads if np.isfinite(effect[head])), key=lambda head: (effect[head], head)
    )
    # At most half: a control needs as many other heads.
    size = min(size, len(known), max(1, len(heads) // 2))
    others = [head for head in heads if head not in known[:size]]
    return [known[:size], *drawn_sets(others, size, draws, seed)]


# The empty prefix belongs to single heads: `log_probability_change` and so on.
_CHANGED = {
    "": "positions of one head changed",
    "layer_": "positions of all heads of a layer changed",
    "set_": "positions of the most needed heads changed together",
    "control_": "positions of as many other heads, drawn at random, changed together",
}
"""Prefixes of the names of changes, and the heads that were changed."""
_MEAN = "mean change of the log-probability of the answer"
_MEANS = {
    "effect": f"{_MEAN} [nat]",
    "effect_spread": "standard deviation of the change over prompts [nat]",
    "layer_effect": f"{_MEAN}, all heads of a layer [nat]",
    "interaction": "effect of a layer less the sum of its heads' [nat]",
    "set_effect": f"{_MEAN}, the most needed heads together [nat]",
    "control_effect": f"{_MEAN}, as many other heads together [nat]",
    "set_less_controls_change": (
        "change of the log-probability of the answer, the most needed heads together less the "
        "mean of as many others [nat]"
    ),
    "set_less_controls": "mean of `set_less_controls_change` over prompts [nat]",
    "set_less_controls_low": "lower end of the 95 % interval of the mean over prompts [nat]",
    "set_less_controls_high": "upper end of that interval [nat]",
    "in_set": "1 for the most needed heads, which are changed together",
    "screened_effect": "change of the logit difference as one backward pass estimates it [logit]",
    "rank_correlation": (
        "rank correlation of estimated and exact changes of the logit difference over heads"
    ),
}


def _changes(scoring: Scoring, clean: xr.DataArray, changed: xr.Dataset) -> xr.Dataset:
    """Name readings of undisturbed prompts (`clean`) and their changes (prefixes of `_CHANGED`)."""
    known = {
        "log_probability": ("log-probability of the answer, mean over its tokens", "nat"),
        "logit_difference": (
            "logit of the answer less that of the strongest other candidate",
            "logit",
        ),
        "score": (scoring.metric, scoring.units),
    }
    values, texts = dict[str, xr.DataArray](), dict[str, str]()
    for reading, (text, units) in known.items():
        name = f"clean_{reading}"
        values[name] = clean.sel(reading=reading, drop=True)
        texts[name] = f"{text}, undisturbed [{units}]"
        for prefix, whose in _CHANGED.items():
            name = f"{prefix}{reading}_change"
            values[name] = changed[prefix].sel(reading=reading, drop=True)
            texts[name] = f"change of the {text}, {whose} [{units}]"
    return described_group(values, texts)


def _means(changed: xr.Dataset) -> dict[str, xr.DataArray]:
    """Mean changes of the answer's log-probability over prompts, by name."""
    nats = changed.sel(reading="log_probability", drop=True)
    # skipna=False: means over different prompts would not be comparable.
    means = {name: nats[name].mean("prompt", skipna=False) for name in nats}
    spread = (
        nats[""].std("prompt", ddof=1, skipna=False)
        # One prompt has no spread, and numpy would warn about the division by 0.
        if nats.sizes["prompt"] > 1
        else xr.full_like(means[""], np.nan)
    )
    # Paired, so that the spread between easy and hard prompts is not in the interval.
    paired = (nats["set_"] - nats["control_"].mean("draw")).transpose("kind", "prompt")
    mean, reach = paired.mean("prompt", skipna=False), half_interval(paired.values)
    return {
        "effect": means[""],
        "effect_spread": spread,
        "layer_effect": means["layer_"],
        "interaction": means["layer_"] - means[""].sum("head", skipna=False),
        "set_effect": means["set_"],
        "control_effect": means["control_"],
        "set_less_controls_change": paired,
        "set_less_controls": mean,
        "set_less_controls_low": mean - reach,
        "set_less_controls_high": mean + reach,
    }


def _rank_correlations(screened: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Spearman's correlation over measured heads [kind, screening]; NaN if a side is constant."""
    # Imported here: every analysis imports this file, and scipy.stats takes as long as a short run
    from scipy.stats import spearmanr

    result = np.full(screened.shape[:2], np.nan)
    for kind, screening in np.ndindex(*result.shape):
        # NaN: heads that were not measured exactly
        known = np.isfinite(exact[kind])
        pair = screened[kind, screening][known], exact[kind][known]
        # spearmanr warns about constant input
        if min(len(np.unique(values)) for values in pair) > 1:
            result[kind, screening] = spearmanr(*pair)[0]  # pyright: ignore[reportArgumentType]
    return result


@dataclass(frozen=True)
class Effects(Experiment):
    """The experiment `effects`: causal effects of the positions of heads."""

    kinds: tuple[PositionChange, ...] = ()
    """Changes of positions (`position_changes`); empty: linearised where positions are learned,
    frozen, permuted.
    """
    top: CountOrNone = 0
    """Number of heads with the largest estimates to measure exactly, plus the same number at
    random; 0: all heads if there are few.
    """
    set_size: CountOrNone = 0
    """Number of most needed heads that are changed together, at most half of the heads with
    positions; 0: the number of heads of a layer.
    """
    draws: Count = 8
    """Largest number of controls; each is a different random set of the same number of other heads.
    """
    scale: Finite = 0.5
    """Factor of the positions, for `scaled`."""
    step: Positive = 1.0
    """Positions are rounded to multiples of this."""
    shift: Finite = 0.5
    """Shift of a span, in ranges of the head's positions."""
    span: str = ""
    """Span whose tokens are shifted; empty: the needle, else the first span."""
    seed: Seed = 0
    """Seed of permutations and controls."""
    name: ClassVar[str] = "effects"
    describes: ClassVar[str] = "of changed positions of heads, on these prompts"
    performance: ClassVar[str] = (
        "clean_log_probability: log p of the answer (nats per token); clean_score: {metric}"
    )

    def unasked(self, layers: Layers, task: Scoring | None) -> Unasked | None:
        """Return it if positions are learned or counted, and prompts of a task have answers."""
        return None if layers.fixed or task is None else Unasked(self, QUICK)

    @property
    def strength(self) -> Strength:
        """The strength of the changes of positions."""
        return Strength(self.scale, self.step, self.shift, self.span, self.seed)

    def plan(
        self,
        model: PreTrainedModel,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        training_length: int,
    ) -> Plan:
        """Plan all kinds of changes on `prompts`.

        Raises InputError for prompts and models that cannot be measured.
        """
        decoder = as_decoder(model)
        _ = decoder.heads  # refuses layers with different numbers of heads
        kinds = self._kinds(decoder, scoring, prompts)
        lengths = tuple(len(prompt.tokens) for prompt in prompts)

        return Plan(
            self,
            lengths * whole_passes(decoder, len(kinds), self.top, self.draws),
            lambda batch_size, store, progress: {
                self.name: self.measured(
                    decoder,
                    scoring,
                    prompts,
                    # A screening keeps activations for its backward pass, so the
                    # batch is counted in `PATH_TOKENS`.
                    max(batch_size, PATH_TOKENS // max(lengths)),
                    progress,
                    store,
                )
            },
        )

    def _kinds(
        self, decoder: Decoder, scoring: Scoring, prompts: Sequence[Prompt]
    ) -> tuple[str, ...]:
        """Return the kinds of changes without duplicates.

        Raises InputError if they cannot be measured on the model.
        """
        if not decoder.positioned_heads:
            schemes = dict.fromkeys(attention.scheme for attention in decoder.layers)
            raise InputError(
                f"no layer of this model ({', '.join(schemes)}) assigns positions, so none "
                "can be changed; leave effects out"
            )
        heads = len(decoder.positioned_heads)
        # Controls need as many other heads, and only measured heads can be ranked.
        most = max(1, min(_confirmed(heads, self.top), heads // 2))
        if self.set_size > most:
            raise InputError(
                f"effects.set_size is {self.set_size}; wanted {most} at most: of the heads "
                "that are measured, half of the "
                f"{heads} heads with positions, so that as many others are left to compare with"
            )
        kinds = tuple(dict.fromkeys(self.kinds or default_kinds(decoder)))
        require_targets(self.name, scoring, prompts)
        EditedPrompts(decoder, prompts, range(len(prompts)), self.strength).require(kinds)
        return kinds

    def measured(
        self,
        decoder: Decoder,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        batch_size: int = 16,
        progress: Progress | None = None,
        store: Store = NOT_KEPT,
    ) -> xr.Dataset:
        """Measure changes of log-probability, logit difference and score by head, layer and set.

        Args:
            decoder: Decoder of the model.
            scoring: Names the targets of a prompt and scores the answers.
            prompts: Prompts.
            batch_size: Prompts side by side.
            progress: Called with finished points and all points.
            store: Keeps finished points.

        Returns:
            The group `effects` of a run.

        Raises:
            InputError: The model or the prompts cannot be measured.
        """
        kinds = self._kinds(decoder, scoring, prompts)
        heads = decoder.positioned_heads
        layers, head_count = sorted({layer for layer, _ in heads}), decoder.shape[1]
        # Tuples, because `Measurement` caches the batch by its numbers
        cut = [tuple(numbers) for numbers in batches_by_length(decoder, prompts, batch_size)]
        # Points of all three stages (screening, layers, sets), so that progress is one bar
        points = [len(cut) * count for count in (1, len(kinds) * len(layers), len(kinds))]
        measurement = Measurement(decoder, scoring, prompts, self.strength)
        read = ("reading", "prompt")

        def computed(stage: int, name: str, *grid: Any) -> xr.Dataset:
            whole = Grid(*grid, batches=cut, name=name)
            return whole.compute(store, progress, sum(points[:stage]), sum(points))

        screening = computed(
            0,
            "screening",
            # Batches are the only axis: one backward pass gives all kinds.
            {},
            lambda numbers: measurement.screen(numbers, kinds),
            {"clean": read, "screened": ("kind", "screening", "layer", "head", "prompt")},
        )
        screened = screening["screened"].values
        confirmed = {
            kind: to_confirm(of_kind, heads, self.top, self.seed)
            for kind, of_kind in zip(kinds, screened, strict=True)
        }

        def of_layer(numbers: tuple[int, ...], kind: str, layer: int) -> dict[str, Any]:
            single = [head for head in confirmed[kind] if head[0] == layer]
            together = [head for head in heads if head[0] == layer]
            # Passes for the heads of one layer resume at the same layer, so many sets share a
            # pass.
            *readings, whole = measurement.read(
                numbers, kind, [*([head] for head in single), together]
            )
            by_head = np.full((head_count, len(READINGS), len(numbers)), np.nan)
            for (_, head), reading in zip(single, readings, strict=True):
                by_head[head] = reading
            return {"": by_head.tolist(), "layer_": whole}

        # Reindexed below over all layers; layers without positions get NaN.
        found = computed(
            1,
            "layer",
            {"kind": kinds, "layer": layers},
            of_layer,
            {"": ("head", *read), "layer_": read},
        ).reindex(layer=range(decoder.layer_count))
        clean = screening["clean"]
        # Reading 0 is the log-probability: [kind, layer, head].
        means = (found[""] - clean).values[..., 0, :].mean(-1)
        chosen = {
            kind: sets_of_heads(mean, heads, self.set_size or head_count, self.draws, self.seed)
            for kind, mean in zip(kinds, means, strict=True)
        }
        by_set = computed(
            2,
            "sets",
            {"kind": kinds},
            # Sets of a kind are along one axis: the needed heads first, then the controls.
            lambda numbers, kind: {"sets": measurement.read(numbers, kind, chosen[kind])},
            {"sets": ("draw", *read)},
        )["sets"]
        # NaN where there are fewer different sets than draws
        by_set = by_set.pad(draw=(0, 1 + self.draws - by_set.sizes["draw"]))
        found = found.assign(set_=by_set.isel(draw=0), control_=by_set.isel(draw=slice(1, None)))
        changed = (found - clean).assign_coords(
            head=np.arange(head_count), reading=list(READINGS), prompt=np.arange(len(prompts))
        )
        in_set = np.zeros((len(kinds), *decoder.shape), dtype=np.int8)
        for place, sets in zip(in_set, chosen.values(), strict=True):
            # A set is a list of (layer, head); transposed it is an index of both axes.
            place[tuple(np.transpose(sets[0]))] = 1
        estimates, of_heads = screened.mean(-1), ("layer", "head")
        exact = changed[""].sel(reading="logit_difference").values.mean(-1)
        over_prompts = _means(changed) | {
            "in_set": (("kind", *of_heads), in_set),
            "screened_effect": (("kind", "screening", *of_heads), estimates),
            "rank_correlation": (("kind", "screening"), _rank_correlations(estimates, exact)),
        }
        group = _changes(scoring, clean.assign_coords(reading=list(READINGS)), changed).assign(
            described_group(over_prompts, _MEANS, {"screening": list(SCREENINGS)})
        )
        group = group.assign_attrs(
            scoring.attributes,
            prompts=len(prompts),
            set_heads=len(chosen[kinds[0]][0]),
            # The minimum over kinds: kinds may measure different heads, and so may have
            # different numbers of controls.
            control_sets=min(len(sets) - 1 for sets in chosen.values()),
        )
        # Words for tables and charts, which do not know the kinds
        for kind in kinds:
            group["kind"].attrs |= {
                f"become_{kind}": KINDS[kind].become,
                f"does_{kind}": KINDS[kind].does,
            }
        # Select layers with attention; up to here the axis has all layers of the model.
        return with_schemes(
            group.sel(layer=list(decoder.by_layer)), decoder.schemes, decoder.learned_schemes
        )
