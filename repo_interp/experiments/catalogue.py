"""The experiments that an analysis can hold beside its measures, by name, with their parameters.

    perturbation     the prompts of the analysis, for every kind, share and reach of a disturbance       group perturbation
    extrapolation    prompts of the training length and longer ones, by every method                     groups extrapolation, output_traces
    effects          the prompts of the analysis, with positions of heads, layers and sets changed       group effects
    saliency         the prompts of the analysis: derivatives by positions, and integrals of them        group saliency
    atlas            prompts of the analysis and repeated random tokens, with twins of random weights    group atlas

An experiment plans first: what cannot work is refused before anything is run, and the passes it needs are known. Its prompts and
scores are a task's; prompts that were given are scored as `scoring_of` says. Knows nothing about how an experiment works.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

import xarray as xr
from annotated_types import Interval, MinLen
from torch import nn
from transformers import PreTrainedModel

from repo_interp.errors import InputError
from repo_interp.experiments.atlas import SHORTEST_HALF, Asked, atlas, default_twins, repeated_half
from repo_interp.experiments.effects import effects, require_effects, whole_passes
from repo_interp.experiments.extrapolation import GLOBAL_TOKENS, METHODS, Method, allowed_methods, extrapolation, output_traces
from repo_interp.experiments.perturbation import GAMMAS, L_MAX, PAPER_KINDS, Kind, OffsetUnit, perturbation, require_grid
from repo_interp.experiments.position_changes import PositionChange, Strength, default_kinds
from repo_interp.experiments.prompt_sets import LEAST, prompts_by_length, scoring_of
from repo_interp.experiments.resumable_grid import ResumableGrid
from repo_interp.experiments.saliency import Baseline, require_positions, saliency
from repo_interp.models.bridge import model_of
from repo_interp.models.provenance import length_trained
from repo_interp.models.reposition import attentions, longest_prompt
from repo_interp.tasks import Prompt, Task
from repo_interp.tasks.task import Scoring
from repo_interp.values import Count, CountOrNone, Finite, Positive, Seed, Share, Tokens, TokensOrNone, check_fields

TOKENS = 2048
"""Tokens that are run side by side, at least."""
PATH_TOKENS = 512
"""The same where activations are kept for a backward pass."""
BACKWARD = 3
"""Forward passes that a pass forward and back takes as long as."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Plan:
    """What an experiment will do on one model and its prompts."""

    experiment: Experiment
    passes: tuple[int, ...]
    """Tokens of every prompt of every forward pass."""
    run: Callable[[int, ResumableGrid, Progress | None], dict[str, xr.Dataset]]
    """Returns groups of a run; takes the number of prompts side by side, the grid of finished points, and a function of progress."""


class Experiment(ABC):
    """A measurement that needs several forward passes: a frozen dataclass whose fields are its parameters."""

    name: ClassVar[str]
    """Its name, and that of its main group."""

    def __post_init__(self) -> None:
        """Raises InputError for a field that is not of the type and range that it states."""
        check_fields(self, self.name)  # pyright: ignore[reportArgumentType]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Values of the fields by name, as the attributes of its groups record them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # pyright: ignore[reportArgumentType]

    @abstractmethod
    def plan(self, model: PreTrainedModel, scoring: Scoring, prompts: Sequence[Prompt], training_length: int) -> Plan:
        """What it will do. Raises InputError where it cannot."""


@dataclass(frozen=True)
class Perturbation(Experiment):
    """The experiment `perturbation` (Position Generalization sec. 4.1)."""

    kinds: Annotated[tuple[Kind, ...], MinLen(1)] = PAPER_KINDS
    gammas: Annotated[tuple[Share, ...], MinLen(1)] = GAMMAS
    """Shares of tokens that are moved; none is always among them."""
    l_maxes: Annotated[tuple[Tokens, ...], MinLen(1)] = L_MAX
    """Farthest moves, in tokens."""
    layers: tuple[CountOrNone, ...] = ()
    """Where features and positions are disturbed; empty: everywhere."""
    offset_unit: OffsetUnit = "positions"
    seed: Seed = 0
    name: ClassVar[str] = "perturbation"

    def plan(self, model: PreTrainedModel, scoring: Scoring, prompts: Sequence[Prompt], training_length: int) -> Plan:
        """The grid over `prompts`. Raises InputError for a grid that is none, and prompts without anything to predict."""
        layers = self.layers or None
        require_grid(model, prompts, self.kinds, self.gammas, self.l_maxes, layers, self.offset_unit)
        _require_targets(self.name, scoring, prompts)
        points = len(self.kinds) * len(set(self.gammas) - {0.0}) * len(self.l_maxes)
        lengths = tuple(len(prompt.tokens) for prompt in prompts)

        def run(batch_size: int, grid: ResumableGrid, progress: Progress | None) -> dict[str, xr.Dataset]:
            size = _side_by_side(batch_size, max(lengths))
            options = (self.kinds, self.gammas, self.l_maxes, layers, self.offset_unit, self.seed)
            return {self.name: perturbation(model, scoring, prompts, *options, batch_size=size, progress=progress, grid=grid)}

        return Plan(self, lengths * (1 + points), run)


@dataclass(frozen=True)
class Extrapolation(Experiment):
    """The experiment `extrapolation` (Position Generalization sec. 4.2)."""

    methods: tuple[Method, ...] = ()
    """Empty: all that the model's positions allow."""
    lengths: tuple[Tokens, ...] = ()
    """In tokens; empty: the training length and its doublings up to four times it, or test sets of the task."""
    sequences: Annotated[int, Interval(ge=LEAST, le=1_000_000)] = 32
    """Prompts of each length; half of those of the training length are the reference."""
    judged: TokensOrNone = 0
    """Last tokens of a prompt that are judged; 0: a quarter of the training length."""
    global_tokens: Tokens = GLOBAL_TOKENS
    """First tokens that LM-Infinite always shows."""
    traced_layer: Annotated[int, Interval(ge=-1, le=1_000_000)] = -1
    """Whose outputs are traced over sliding windows; -1: the middle one."""
    traced_queries: Count = 4
    seed: Seed = 0
    name: ClassVar[str] = "extrapolation"

    def plan(self, model: PreTrainedModel, scoring: Scoring, prompts: Sequence[Prompt], training_length: int) -> Plan:
        """Every method at every length. Raises InputError for methods and lengths that the model or the task lacks."""
        table, allowed = longest_prompt(model), allowed_methods(model)
        if table is not None and table <= training_length:
            raise InputError(
                f"extrapolation needs longer prompts than the {table} tokens of this model's learned table; leave it out"
            )
        wrong = [method for method in self.methods if method not in allowed]
        if wrong:
            raise InputError(
                f"extrapolation by {wrong[0]!r}: this model's positions allow {', '.join(allowed)}"
                if wrong[0] in METHODS
                else f"methods of extrapolation are {', '.join(METHODS)}, not {wrong[0]!r}"
            )
        methods, layers = self.methods or allowed, len(list(attentions(model)))
        if not -1 <= self.traced_layer < layers:
            raise InputError(f"layer {self.traced_layer} was asked for; the model's are 0 to {layers - 1}")
        judge, by_length = prompts_by_length(scoring, prompts, training_length, self.lengths, self.sequences, self.seed)
        first, last = min(by_length), max(by_length)
        half = [len(prompt.tokens) for some in by_length.values() for prompt in some[1::2]]
        reference = [len(prompt.tokens) for prompt in by_length[first]]
        traced = "lm_infinite" in allowed

        def run(batch_size: int, grid: ResumableGrid, progress: Progress | None) -> dict[str, xr.Dataset]:
            size = _side_by_side(batch_size, last)
            divergences = extrapolation(
                model, judge, by_length, first, methods, self.judged or None, self.global_tokens, size, progress, grid
            )
            groups = {self.name: divergences}
            if traced:
                layer = layers // 2 if self.traced_layer < 0 else self.traced_layer
                longer = max(by_length[last], key=lambda prompt: len(prompt.tokens))
                step = max(1, first // 8)
                shorter = [prompt for prompt in by_length[first] if len(prompt.tokens) == first]
                traces = output_traces(
                    model, shorter, longer, first, layer, self.traced_queries, step, "lm_infinite", self.global_tokens
                )
                groups["output_traces"] = traces
            return groups

        return Plan(self, (*reference[::2], *half * len(methods), *(reference if traced else ()), last), run)


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
    step: Positive = 1.0
    """What positions are rounded to multiples of."""
    shift: Finite = 0.5
    """How far a span is shifted, in ranges of the head's positions."""
    span: str = ""
    """Whose tokens are shifted; empty: the needle, else the first span."""
    seed: Seed = 0
    name: ClassVar[str] = "effects"

    def plan(self, model: PreTrainedModel, scoring: Scoring, prompts: Sequence[Prompt], training_length: int) -> Plan:
        """All kinds on `prompts`. Raises InputError for kinds, numbers, prompts and models that cannot be measured."""
        kinds = tuple(dict.fromkeys(self.kinds or default_kinds(model)))
        strength = Strength(self.scale, self.step, self.shift, self.span, self.seed)
        require_effects(model, scoring, prompts, kinds, strength, self.top, self.set_size, self.draws)
        lengths = tuple(len(prompt.tokens) for prompt in prompts)

        def run(batch_size: int, grid: ResumableGrid, progress: Progress | None) -> dict[str, xr.Dataset]:
            size = max(batch_size, PATH_TOKENS // max(lengths))
            options = (kinds, strength, self.top, self.set_size, self.draws)
            return {self.name: effects(model, scoring, prompts, *options, batch_size=size, progress=progress, grid=grid)}

        return Plan(self, lengths * whole_passes(model, len(kinds), self.top, self.draws), run)


@dataclass(frozen=True)
class Saliency(Experiment):
    """The experiment `saliency` (ours; integrated gradients: Sundararajan, Taly and Yan 2017)."""

    baseline: Baseline = "constant"
    """Where the path of integrated gradients begins: `constant`, the mean of a head's positions over the prompt, or `index`."""
    steps: CountOrNone = 64
    """Points of the path; 0: derivatives at the model's own positions alone."""
    name: ClassVar[str] = "saliency"

    def plan(self, model: PreTrainedModel, scoring: Scoring, prompts: Sequence[Prompt], training_length: int) -> Plan:
        """Every step of every prompt, forward and back. Raises InputError where no layer rotates, or nothing is to be predicted."""
        require_positions(model, self.baseline, self.steps)
        _require_targets(self.name, scoring, prompts)

        def run(batch_size: int, grid: ResumableGrid, progress: Progress | None) -> dict[str, xr.Dataset]:
            at_once = max(PATH_TOKENS, batch_size * max(len(prompt.tokens) for prompt in prompts))
            return {self.name: saliency(model, scoring, prompts, self.baseline, self.steps, at_once, progress, grid)}

        return Plan(self, tuple(len(prompt.tokens) for prompt in prompts) * (BACKWARD * (1 + self.steps)), run)


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
    """Of the twins' largest scores, below which no head has a name."""
    seed: Seed = 0
    name: ClassVar[str] = "atlas"

    def plan(self, model: PreTrainedModel, scoring: Scoring, prompts: Sequence[Prompt], training_length: int) -> Plan:
        """The scores of the model and its twins. Raises InputError where two repeated tokens do not fit into the training length."""
        half, twins = repeated_half(model, training_length), self.twins or default_twins(model)
        if half < SHORTEST_HALF:
            raise InputError(f"atlas repeats random tokens, which a training length of {training_length} tokens has no room for")
        chosen = list(prompts[: self.prompts])
        asked = Asked(chosen, self.sequences, half, self.rows, self.top, twins, self.quantile, self.seed)
        lengths = (*(len(prompt.tokens) for prompt in chosen), *[1 + 2 * half] * self.sequences)

        def run(batch_size: int, grid: ResumableGrid, progress: Progress | None) -> dict[str, xr.Dataset]:
            return {self.name: atlas(model, asked, progress, grid)}

        return Plan(self, lengths * (1 + twins), run)


EXPERIMENTS: Mapping[str, type[Experiment]] = {
    kind.name: kind for kind in (Perturbation, Extrapolation, Effects, Saliency, Atlas)
}


def experiment_names() -> tuple[str, ...]:
    """Every experiment that `experiment_named` knows."""
    return tuple(EXPERIMENTS)


def experiment_named(name: str) -> Experiment:
    """The experiment `name` with its default parameters. Raises InputError naming those there are."""
    if name not in EXPERIMENTS:
        raise InputError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]()


def planned(
    bridge: nn.Module, prompts: Sequence[Prompt], experiments: Sequence[str | Experiment | Plan], task: Task | None = None
) -> list[Plan]:
    """What `experiments` - names, objects, or plans already made - will do on `prompts` of `task`; None: as `scoring_of` scores them.

    Raises InputError where one cannot work on them, and for a task in other tokens than the model's.
    """
    if not experiments:
        return []
    vocabulary = int(next(attentions(bridge)).config.vocab_size)
    if task is not None and task.vocabulary_size > vocabulary:
        raise InputError(
            f"the task {task.name} has {task.vocabulary_size} tokens, the model {vocabulary}; "
            "wanted a model trained on it, or another task"
        )
    scoring, model, length = scoring_of(prompts) if task is None else task, model_of(bridge), length_trained(bridge)
    plans = []
    for chosen in experiments:
        if not isinstance(chosen, Plan):
            experiment = experiment_named(chosen) if isinstance(chosen, str) else chosen
            chosen = experiment.plan(model, scoring, prompts, length)
        plans.append(chosen)
    return plans


def _require_targets(experiment: str, scoring: Scoring, prompts: Sequence[Prompt]) -> None:
    """Raise InputError for the first of `prompts` that has nothing to predict."""
    for number, prompt in enumerate(prompts):
        if not scoring.targets(prompt):
            raise InputError(
                f"{experiment} judges what is predicted, but prompt {number} has nothing to predict for {scoring.name}"
            )


def _side_by_side(batch_size: int, longest: int) -> int:
    return max(batch_size, TOKENS // longest)
