"""The atlas of a model: scores of all heads, their names, and controls with random weights.

    scores [layer, head]                     `head_scores`
    null [label, twin]                       largest score over the heads of a control to which the
                                             rule applies
    threshold [label]                        max(at_least, Q + 0.25 |Q|), Q the `quantile` of the
                                             nulls
    named [label, layer, head], name         whether a head has the name; all names of a head as
                                             text (`head_names`)

Random tokens are drawn once, for the model and all controls. Controls have the seeds seed,
seed + 1, ..., and `twins` caches their scores for later analyses. This module knows neither how
scores are computed nor what names mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import xarray as xr
from transformers import PretrainedConfig, PreTrainedModel

from repo_interp.errors import InputError, quoted
from repo_interp.experiments.experiment import QUICK, Experiment, Plan, Progress, Unasked
from repo_interp.experiments.grid import Grid
from repo_interp.measures.fitting import Layers
from repo_interp.measures.labels import described_group
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.fresh_weights import fresh_twin
from repo_interp.plugins.head_tables.head_columns import add_columns
from repo_interp.plugins.heads.head_names import RULES, Scores, join_head_names, name_heads, null_of
from repo_interp.plugins.heads.head_scores import (
    OF_ANSWERS,
    ON_RANDOM,
    SCORES,
    answers_of,
    prompt_scores,
    random_scores,
    repeated_tokens,
)
from repo_interp.plugins.heads.twins import kept_scores
from repo_interp.run import with_schemes
from repo_interp.storage.store import Store
from repo_interp.tasks.prompt import SPECIAL, Prompt, digest
from repo_interp.tasks.task import Scoring
from repo_interp.values import Count, CountOrNone, Seed, Share

HALF = 128
"""Most random tokens that are repeated."""
# With one token, the token after the copy would be the row itself, so induction has no pattern.
SHORTEST_HALF = 2
MANY, FEW, SMALL = 10, 3, 30_000_000
"""`MANY` twins for a model of up to `SMALL` parameters, `FEW` for a larger one."""
_NAMES = {
    "name": "what the head is called, by rules",
    "named": "whether a head has the name",
    "null": "largest score of a head of a twin with random weights",
    "threshold": "score above which a head has the name",
}


def default_twins(decoder: Decoder) -> int:
    """Choose the number of twins, models with random weights, by the size of the model.

    Args:
        decoder: Decoder of the model.

    Returns:
        `MANY`, or `FEW` above `SMALL` parameters.
    """
    # A control costs as much as the model itself, so a large model gets few.
    return (
        MANY if sum(parameter.numel() for parameter in decoder.owner.parameters()) <= SMALL else FEW
    )


def repeated_half(decoder: Decoder, training_length: int) -> int:
    """Count the random tokens that fit twice after a first token.

    Args:
        decoder: Decoder of the model.
        training_length: Tokens of the longest training sequence.

    Returns:
        Number of tokens, `HALF` at most.
    """
    longest = decoder.longest_prompt
    # One place for the first token, the other places for two copies of the random tokens.
    return min(HALF, (min(training_length, longest or training_length) - 1) // 2)


def first_token(decoder: Decoder, prompts: Sequence[Prompt]) -> int | None:
    """Find the token that sequences of this model begin with.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts to read a common special token from.

    Returns:
        The BOS that the tokenizer prepends, else the special token at the start of all prompts,
        else None.
    """
    begins = {prompt.tokens[0] for prompt in prompts}
    if (bos := decoder.prepended) is not None or len(begins) > 1:
        return bos
    # Prompts may share an ordinary first word, so the token must also look like a special one.
    first = begins.pop()
    text = prompts[0].token_text
    return (
        first
        if (text and SPECIAL.fullmatch(text[0]))
        or first == getattr(decoder.owner.config, "bos_token_id", None)
        else None
    )


def _special(config: PretrainedConfig) -> list[int]:
    """The BOS, EOS and padding tokens that the configuration names."""
    named = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    return [
        token
        for some in named
        if some is not None
        # Families with several EOS tokens, such as Llama 3, have a list.
        for token in (some if isinstance(some, list) else [some])
    ]


@dataclass(frozen=True)
class Atlas(Experiment):
    """The experiment `atlas`: scores and names of every head (ours)."""

    prompts: Count = 16
    """Most prompts that are used: the first ones of the analysis."""
    sequences: Count = 8
    """Sequences of random tokens, repeated once."""
    rows: Count = 512
    """Most rows of attention of a prompt; a longer one has the middles of as many equal parts."""
    top: Count = 1
    """Strongest keys of a row that count for retrieval."""
    twins: CountOrNone | None = None
    """Models with random weights that set thresholds of names; 0: no such models; none: 10, or 3
    beyond 30 million parameters.
    """
    quantile: Share = 0.95
    """Quantile of the random models' largest scores; no head below it has a name."""
    seed: Seed = 0
    """Seed of the random tokens and the random models."""
    scores: tuple[str, ...] = ()
    """Scores to measure, such as retrieval,induction, and the names that depend on them; empty:
    all.
    """
    name: ClassVar[str] = "atlas"
    describes: ClassVar[str] = "the behavior and the name of every head"
    by_pair: ClassVar[bool] = True

    def unasked(self, layers: Layers, task: Scoring | None) -> Unasked | None:
        """Return a quick one where positions are fixed, or prompts of a task have answers."""
        quick = replace(self, sequences=2, twins=2)
        if layers.fixed:
            return Unasked(quick)
        return None if task is None else Unasked(quick, QUICK)

    def completed(self, groups: Mapping[str, xr.Dataset]) -> Mapping[str, xr.Dataset]:
        """Return the atlas with the numbers of heads that other groups have."""
        return {self.name: add_columns(groups)} if self.name in groups else {}

    def __post_init__(self) -> None:
        """Raises InputError for a field out of range and for an unknown score."""
        super().__post_init__()
        for score in self.scores:
            if score not in SCORES:
                raise InputError(
                    f"atlas.scores has {quoted(score)}; wanted some of {', '.join(SCORES)}"
                )

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The fields; scores as one text."""
        return {**super().parameters, "scores": ",".join(self.scores) or "all"}

    @property
    def _asked(self) -> frozenset[str]:
        return frozenset(self.scores or SCORES)

    def plan(
        self,
        model: PreTrainedModel,
        scoring: Scoring,
        prompts: Sequence[Prompt],
        training_length: int,
    ) -> Plan:
        """Plan the scores of the model and its controls.

        Raises InputError if two repeated tokens do not fit into the training length.
        """
        decoder = as_decoder(model)
        _ = decoder.heads  # refuses layers with different numbers of heads
        half, twins = (
            repeated_half(decoder, training_length),
            default_twins(decoder) if self.twins is None else self.twins,
        )
        if half < SHORTEST_HALF and ON_RANDOM & self._asked:
            raise InputError(
                f"atlas repeats random tokens, which a training length of {training_length} "
                "tokens has no room for"
            )
        chosen = list(prompts[: self.prompts])
        # Only where no other score is asked for. Otherwise prompts without answers have NaN here.
        if self._asked <= OF_ANSWERS and not any(map(answers_of, chosen)):
            raise InputError(
                f"{', '.join(self.scores)} are of answers, and no prompt marks a generated "
                "token and its source; mark them, as in "
                "ri.prompt(text, bridge, needle=..., generated=...)"
            )
        lengths = (
            *(len(prompt.tokens) for prompt in chosen if not self._asked <= ON_RANDOM),
            *([1 + 2 * half] * self.sequences if ON_RANDOM & self._asked else ()),
        )

        return Plan(
            self,
            # Controls take the same passes as the model.
            lengths * (1 + twins),
            lambda batch_size, store, progress: {
                self.name: self._measured(decoder, chosen, half, twins, progress, store)
            },
        )

    def _measured(
        self,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        half: int,
        twins: int,
        progress: Progress | None,
        store: Store,
    ) -> xr.Dataset:
        """Measure the group `atlas` of a run.

        Returns:
            Every score [layer, head] of `head_scores.SCORES`, `name`, `named [label, layer, head]`,
            `null [label, twin]` and `threshold [label]`, which is NaN for a rule without a finite
            score in this run.
        """
        config, asked = decoder.owner.config, self._asked
        learned = np.isin(np.arange(decoder.layer_count), decoder.learned_layers)
        first = first_token(decoder, prompts)
        tokens = repeated_tokens(
            self.sequences, half, config.vocab_size, _special(config), first, self.seed
        )

        of_prompts = {
            "prompts": digest(prompts),
            # The digest covers tokens, spans and generated places, but not sources, which affect
            # scores too.
            "sources": [prompt.sources for prompt in prompts],
            "rows": self.rows,
            "top": self.top,
        }
        parts: tuple[tuple[frozenset[str], dict[str, Any], Callable[[Decoder], Scores]], ...] = (
            (
                asked & ON_RANDOM,
                # Separate, since scores on random tokens do not depend on the prompts and can be
                # reused.
                {"tokens": tokens.tolist()},
                lambda one: random_scores(one, tokens, asked),
            ),
            (
                asked - ON_RANDOM,
                of_prompts,
                lambda one: prompt_scores(one, prompts, self.rows, self.top, asked),
            ),
        )

        def measured() -> dict[str, Any]:
            # Lists, because the store keeps points as JSON
            scores = {
                name: values.tolist()
                for *_, measure in parts
                for name, values in measure(decoder).items()
            }
            if not scores:
                raise InputError(
                    f"no layer of this model has {', '.join(self.scores)} on these prompts; "
                    "name other atlas.scores"
                )
            # In the order of `SCORES`
            return {name: scores[name] for name in SCORES if name in scores}

        def of_twin(seed: int) -> dict[str, float]:
            # The twin is drawn only if some of its scores are not cached
            twin, found = cache(lambda: fresh_twin(decoder, seed)), {}
            for names, question, measure in parts:
                rules = [rule for rule in RULES if rule.score in names]

                # The defaults bind the values of this iteration; a closure would see the last.
                def largest(measure=measure, rules=rules) -> dict[str, float]:
                    scores = measure(as_decoder(twin()))
                    return {rule.name: rule.largest(scores, learned) for rule in rules}

                found |= kept_scores(
                    decoder,
                    seed,
                    question | {"scores": sorted(names)},
                    [rule.name for rule in rules],
                    largest,
                )
            # Without its score a rule has no null.
            return {rule.name: found.get(rule.name, np.nan) for rule in RULES}

        of_head, seeds = ("layer", "head"), range(self.seed, self.seed + twins)
        # A grid without axes is one point, stored and counted like a control.
        of_model = Grid({}, measured, dict.fromkeys(SCORES, of_head), name="model")
        found = of_model.compute(store, progress, 0, 1 + twins)
        scores = {str(name): values.values for name, values in found.items()}
        largest = Grid({"twin": seeds}, of_twin, name="twin").compute(store, progress, 1, 1 + twins)
        nulls = (
            np.array([largest[rule.name] for rule in RULES], dtype=np.float64)
            if twins
            else np.empty((len(RULES), 0))
        )
        limits = {
            rule.name: null_of(of_rule, self.quantile)
            for rule, of_rule in zip(RULES, nulls, strict=True)
        }
        named = name_heads(scores, learned, limits)
        thresholds = [
            # fmax ignores NaN, the null without controls.
            np.fmax(rule.at_least, limits[rule.name])
            if np.isfinite(rule.largest(scores, learned))
            else np.nan
            for rule in RULES
        ]
        values = {name: (of_head, of_score) for name, of_score in scores.items()} | {
            "name": (of_head, join_head_names(named)),
            "named": (("label", *of_head), np.stack(list(named.values())).astype(np.int8)),
            "null": (("label", "twin"), nulls),
            "threshold": (("label",), np.array(thresholds)),
        }
        coordinates = {axis: np.arange(found.sizes[axis]) for axis in of_head} | {
            "label": [rule.name for rule in RULES],
            "rule": ("label", [rule.words for rule in RULES]),
            "twin": np.array(seeds, dtype=np.int64),
        }
        group = described_group(values, {**SCORES, **_NAMES}, coordinates)
        # Arrays have all layers; layers without attention are dropped here.
        layers = list(decoder.by_layer)
        group = group if len(layers) == len(group.layer) else group.sel(layer=layers)
        group = with_schemes(group, decoder.schemes, decoder.learned_schemes)
        attention = decoder.layers[0]
        sizes = {"heads": attention.heads, "kv_heads": attention.kv_heads}
        begins = {} if first is None else {"first_token": first}
        return group.assign_attrs(
            twins=twins, repeated_tokens=half, prompts=len(prompts), **sizes, **begins
        )
