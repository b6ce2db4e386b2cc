"""The atlas of a model: the scores of every head, names for what heads do, and the random-weight controls behind the names.

    scores [layer, head]                     `head_scores`
    null [label, twin]                       the largest score of a head of a control, among those that the rule is about
    threshold [label]                        max(at_least, 1.25 times the `quantile` of its nulls)
    named [label, layer, head], name         which heads have the name; all names of a head as text            `head_names`

Random tokens are drawn once, for the model and every control; the weights of controls have the seeds seed, seed + 1, ... Knows
nothing about how scores are computed and what names mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import xarray as xr
from transformers import PretrainedConfig, PreTrainedModel

from repo_interp.errors import InputError
from repo_interp.experiments.experiment import Experiment, Plan, Progress, with_attention
from repo_interp.experiments.head_names import RULES, joined, name_heads, null_of
from repo_interp.experiments.head_scores import SCORES, head_scores, repeated_tokens
from repo_interp.measures.labels import described_group
from repo_interp.models.bridge import prepended_token
from repo_interp.models.load import fresh_twin
from repo_interp.models.reposition import attentions, layout, longest_prompt
from repo_interp.store import Store
from repo_interp.tasks.prompt import SPECIAL, Prompt
from repo_interp.tasks.task import Scoring
from repo_interp.values import Count, CountOrNone, Seed, Share

HALF = 128
"""Random tokens that are repeated, at most."""
SHORTEST_HALF = 2
MANY, FEW, SMALL = 10, 3, 30_000_000
"""Twins of a model of up to `SMALL` parameters, and of a larger one."""
_NAMES = {
    "name": ("what the head is called, by rules", "1"),
    "named": ("whether a head has the name", "1"),
    "null": ("largest score of a head of a twin with random weights", "1"),
    "threshold": ("score above which a head has the name", "1"),
}


def default_twins(model: PreTrainedModel) -> int:
    """How many random-weight controls a model has by default."""
    return MANY if sum(parameter.numel() for parameter in model.parameters()) <= SMALL else FEW


def repeated_half(model: PreTrainedModel, training_length: int) -> int:
    """Random tokens that fit twice into the training length, and into a learned table, after a first one."""
    longest = longest_prompt(model)
    return min(HALF, (min(training_length, longest or training_length) - 1) // 2)


def first_token(model: PreTrainedModel, prompts: Sequence[Prompt]) -> int | None:
    """The BOS that the model's tokenizer puts before a text, else the special token that all prompts begin with; None without either."""
    begins = {prompt.tokens[0] for prompt in prompts}
    if (bos := prepended_token(model)) is not None or len(begins) > 1:
        return bos
    first = begins.pop()
    text = prompts[0].token_text
    return first if (text and SPECIAL.fullmatch(text[0])) or first == getattr(model.config, "bos_token_id", None) else None


def _special(config: PretrainedConfig) -> list[int]:
    """The tokens that begin, end and pad texts, as far as the configuration names them."""
    named = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    return [token for some in named if some is not None for token in (some if isinstance(some, list) else [some])]


@dataclass(frozen=True)
class Atlas(Experiment):
    """The experiment `atlas`: what every head does, in numbers and by name (ours)."""

    prompts: Count = 16
    """Most prompts of the analysis that are taken, its first ones."""
    sequences: Count = 8
    """Sequences of random tokens, repeated once."""
    rows: Count = 512
    """Most rows of attention of a prompt, evenly spread."""
    top: Count = 1
    """Strongest keys of a row that count for retrieval."""
    twins: CountOrNone = 0
    """Models with random weights that set the thresholds of names; 0: 10, or 3 where a model has more than 30 million parameters."""
    quantile: Share = 0.95
    """Quantile of the random models' largest scores; no head below it has a name."""
    seed: Seed = 0
    """Seed of the random tokens and the random models."""
    name: ClassVar[str] = "atlas"

    def plan(self, model: PreTrainedModel, scoring: Scoring, prompts: Sequence[Prompt], training_length: int) -> Plan:
        """The scores of the model and its controls. Raises InputError where two repeated tokens do not fit into the training length."""
        half, twins = repeated_half(model, training_length), self.twins or default_twins(model)
        if half < SHORTEST_HALF:
            raise InputError(f"atlas repeats random tokens, which a training length of {training_length} tokens has no room for")
        chosen = list(prompts[: self.prompts])
        lengths = (*(len(prompt.tokens) for prompt in chosen), *[1 + 2 * half] * self.sequences)

        def run(batch_size: int, store: Store, progress: Progress | None) -> dict[str, xr.Dataset]:
            return {self.name: self._measured(model, chosen, half, twins, progress, store)}

        return Plan(self, lengths * (1 + twins), run)

    def _measured(
        self, model: PreTrainedModel, prompts: Sequence[Prompt], half: int, twins: int, progress: Progress | None, store: Store
    ) -> xr.Dataset:
        """The group `atlas` of a run: every score over [layer, head] as `head_scores.SCORES` describes it, `name`, and

        `named [label, layer, head]`, `null [label, twin]`, `threshold [label]`, NaN for names whose rule no head of this run can meet.
        """
        schemes, config = layout(model), model.config
        first = first_token(model, prompts)
        tokens = repeated_tokens(self.sequences, half, config.vocab_size, _special(config), first, self.seed)

        def measured(one: PreTrainedModel) -> dict[str, np.ndarray]:
            return head_scores(one, prompts, tokens, self.rows, self.top)

        def of_twin(seed: int) -> dict[str, float]:
            scores = measured(fresh_twin(model, seed))
            return {rule.name: rule.largest(scores, schemes) for rule in RULES}

        points: dict[str, Callable[[], dict[str, Any]]] = {
            "model": lambda: {name: values.tolist() for name, values in measured(model).items()}
        }
        points |= {f"twin-{twin}": partial(of_twin, self.seed + twin) for twin in range(twins)}
        computed = store.get_or_compute(points, progress)
        scores = {name: np.array(values, dtype=np.float64) for name, values in computed.pop("model").items()}
        nulls = np.array([[largest[rule.name] for largest in computed.values()] for rule in RULES], dtype=np.float64)
        limits = {rule.name: null_of(of_rule, self.quantile) for rule, of_rule in zip(RULES, nulls, strict=True)}
        named = name_heads(scores, schemes, limits)
        thresholds = [
            np.fmax(rule.at_least, limits[rule.name]) if np.isfinite(rule.largest(scores, schemes)) else np.nan for rule in RULES
        ]
        of_head = ("layer", "head")
        values = {name: (of_head, each) for name, each in scores.items()} | {
            "name": (of_head, joined(named)),
            "named": (("label", *of_head), np.stack(list(named.values())).astype(np.int8)),
            "null": (("label", "twin"), nulls),
            "threshold": (("label",), np.array(thresholds)),
        }
        coordinates = {axis: np.arange(size) for axis, size in zip(of_head, next(iter(scores.values())).shape, strict=True)} | {
            "scheme": ("layer", list(schemes)),
            "label": [rule.name for rule in RULES],
            "rule": ("label", [rule.words for rule in RULES]),
            "twin": np.arange(self.seed, self.seed + twins),
        }
        group = with_attention(described_group(values, {**SCORES, **_NAMES}, coordinates), model)
        attention = next(attentions(model))
        sizes = {"heads": attention.heads, "kv_heads": attention.kv_heads}
        begins = {} if first is None else {"first_token": first}
        return group.assign_attrs(twins=twins, repeated_tokens=half, prompts=len(prompts), **sizes, **begins)
