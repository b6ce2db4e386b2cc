"""What is asked of a model: `Request`, checked as a whole before anything is computed.

    request = Request(bridge, prompts, measures, layers, heads, experiments, task,
    Execution(batch_size=8))

Brings together models, tasks, measures and experiments; computes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import xarray as xr
from torch import nn

from repo_interp.analysis.batches import structure_for
from repo_interp.analysis.coercion import Prompts, as_prompts
from repo_interp.analysis.defaults import default_experiments, default_prompts, origin_of
from repo_interp.analysis.room import batch_limit
from repo_interp.entry_points import EXPERIMENTS, MEASURES, OWN, VIEWS, called, require_once
from repo_interp.errors import InputError, one_line
from repo_interp.experiments.catalogue import experiments_named, planned
from repo_interp.experiments.experiment import Experiment, Plan
from repo_interp.files import path_of
from repo_interp.interventions.replacing import require_named_tokens
from repo_interp.measures.catalogue import measure_named
from repo_interp.measures.statistics import (
    Measure,
    as_measure,
    of_training_length,
    require_declared,
)
from repo_interp.measures.three_axis import ThreeAxis
from repo_interp.models.decoder import as_decoder, attentions_of
from repo_interp.models.reposition import observable
from repo_interp.positions.layouts import CONTEXTUAL, FIXED, ROTATED_BY_INDEX
from repo_interp.run import KEPT, require_name
from repo_interp.side_by_side import BatchSize, SideBySide
from repo_interp.store import Progress
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.task import Task
from repo_interp.values import PositiveOrZero, checked


@dataclass(frozen=True)
class Execution:
    """How a request is carried out: what goes through the model together, what is kept meanwhile,
    and who is told.
    """

    batch_size: BatchSize | Literal["auto"] = 1
    store: str | Path | None = None
    """A directory for finished work; None: nothing is kept."""
    store_every: float = 0.0
    """Seconds between writes to it; 0: each batch at once."""
    progress: Progress | None = None
    """Called with layers observed so far and in all."""
    experiment_progress: Callable[[str, int, int], None] | None = None
    """Called with the name of an experiment, and its points measured so far and in all."""
    measured: Callable[[xr.DataTree], None] | None = None
    """Takes the run of the measures alone, as soon as it is there, where experiments follow."""
    finished: Callable[[xr.DataTree], None] | None = None
    """Takes the run before what `store` keeps is thrown away."""

    def __post_init__(self) -> None:
        """Raises InputError for what is no directory, and for no number of seconds."""
        if self.store is not None:
            path_of(self.store, "the directory of a store")
        checked(self.store_every, PositiveOrZero, "store_every")

    @property
    def prompts_together(self) -> int:
        """Prompts that an experiment puts side by side at least."""
        return self.batch_size if isinstance(self.batch_size, int) else 1


class Request:
    """What is measured of which model, on which prompts: all fits together."""

    def __init__(
        self,
        bridge: nn.Module,
        prompts: Prompts | None = None,
        measures: Sequence[str | Measure] | None = None,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        experiments: Sequence[str | Experiment | Plan] | None = None,
        task: Task | None = None,
        execution: Execution = Execution(),
        prompts_from: str = "the caller",
    ) -> None:
        """The arguments of `analyze`, and where `prompts` come from, in words.

        Raises InputError where prompts, layers or heads do not fit the model, the measures or the
        experiments, and where an intervention is under way whose attention the measures cannot see.
        """
        # names first: the rest may take long
        chosen = None if measures is None else measures_named(measures)
        experiments = None if experiments is None else experiments_named(experiments)
        self.bridge, self.execution = observable(bridge), execution
        decoder = self.decoder = as_decoder(self.bridge)
        config = decoder.config
        if prompts is None:
            self.prompts, trained = default_prompts(self.bridge)
            prompts_from = origin_of(trained)
            task = trained if task is None else task
        else:
            self.prompts = as_prompts(prompts, self.bridge)
        if task is not None and not isinstance(task, Task):
            raise InputError(
                f"task is {one_line(repr(task), 80)}; wanted a task, as ri.tasks.make_task "
                "returns it"
            )
        self.prompts_from, self.task = prompts_from, task
        """What experiments score the prompts by."""
        if experiments is None:
            experiments = (
                default_experiments(self.bridge, self.prompts, task)
                if measures is None and layers is None
                else ()
            )
        schemes, length = decoder.schemes, decoder.training_length
        chosen = (
            measures_named(default_measures(self.prompts, schemes, layers))
            if chosen is None
            else chosen
        )
        self.measures = [of_training_length(as_measure(measure), length) for measure in chosen]
        self.layers = (
            list(decoder.by_layer) if layers is None else _within(layers, len(schemes), "layer")
        )
        attentions_of(self.bridge, self.layers)  # refuses a layer without attention
        self.heads = None if heads is None else _within(heads, config.num_attention_heads, "head")
        """None: all."""
        for measure in self.measures:
            require_declared(measure)
            _require_chosen(measure, self.layers, config.num_attention_heads)
        _require_seen(self.bridge, self.measures)
        _require_prompts(self.prompts, self.measures, decoder.vocabulary_size)
        self.experiments = planned(self.bridge, self.prompts, experiments, task)
        self._require_names()
        # refuses kinds of segments that are not known
        structure_for(self.prompts[:1], self.measures, decoder.tokenizer)
        require_named_tokens(
            self.bridge, len(self.prompts), [*(self.lengths if self.measures else ()), *self.passes]
        )

    def _require_names(self) -> None:
        """Raise InputError for a measure or an experiment whose results would stand in the place of
        others, or vanish.
        """
        kinds = {
            MEASURES: self.measures,
            EXPERIMENTS: [plan.experiment for plan in self.experiments],
        }
        taken = [*KEPT]
        for group, each in [(group, each) for group, several in kinds.items() for each in several]:
            ours = OWN[group].get(each.name) in [
                f"{kind.__module__}:{kind.__qualname__}" for kind in type(each).__mro__
            ]
            require_name(
                each.name, called(group, each.name), taken if ours else [*taken, *OWN[VIEWS]]
            )
            taken.append(each.name)

    @cached_property
    def structure(self) -> list[dict[str, tuple[int, ...]]] | None:
        """Separators and segments of every prompt, where a measure needs them."""
        return structure_for(self.prompts, self.measures, self.decoder.tokenizer)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every prompt."""
        return [len(prompt.tokens) for prompt in self.prompts]

    @property
    def passes(self) -> list[int]:
        """Tokens of every prompt that the experiments put through the model."""
        return [length for plan in self.experiments for length in plan.passes]

    @property
    def names(self) -> list[str]:
        """Of the measures, then of the experiments."""
        return [
            *(measure.name for measure in self.measures),
            *(plan.experiment.name for plan in self.experiments),
        ]

    @cached_property
    def size(self) -> SideBySide:
        """What goes through the model together."""
        return batch_limit(self.bridge, self.execution.batch_size)


def default_measures(
    prompts: Sequence[Prompt], schemes: Sequence[str] = (), layers: Sequence[int] | None = None
) -> tuple[str, ...]:
    """What is measured on `prompts` when no measure is named: what the positions say, where tokens
    look, and what the model expects next.

    `schemes`: those of a checkpoint's layers, where the measures are to follow them: of gates, what
    they count; where every layer's positions are the token index, or none, they say nothing, and
    what they do to the logits is measured instead. `layers`: those that are measured; where these
    are some, predictions would need the others too.
    """
    mass = ("attention_mass",) if all(prompt.generated for prompt in prompts) else ()
    tokens = ("attention_rows", *(("predictions",) if layers is None else ()))
    if schemes and set(schemes) <= set(FIXED):
        # the fit of a sum is exact by construction, so fake_distance and rotation are of rotated
        # layers alone
        rotated = ("fake_distance", "rotation") if set(schemes) & set(ROTATED_BY_INDEX) else ()
        return ("components", "three_axis", *rotated, *mass, *tokens)
    of_positions = (
        ("positions", "patterns", "position_sources")
        if not schemes or set(schemes) - {*FIXED, *CONTEXTUAL}
        else ()
    )
    of_gates = ("position_sources", "gates") if set(schemes) & set(CONTEXTUAL) else ()
    return tuple(dict.fromkeys((*of_positions, *of_gates, *mass, *tokens)))


def measures_named(measures: Sequence[str | Measure]) -> list[Measure]:
    """`measures` as objects.

    Beside `maps`, a `three_axis` that is only named keeps the axes that its figure shows.
    """
    if not isinstance(measures, str | Iterable):
        raise InputError(
            f"measures are {one_line(repr(measures), 160)}; wanted names, or objects like a Measure"
        )
    given = [measures] if isinstance(measures, str) else list(measures)
    objects = [measure_named(measure) if isinstance(measure, str) else measure for measure in given]
    for measure in objects:
        if isinstance(measure, type):
            raise InputError(
                f"the measure {measure.__name__} is a class; make one, {measure.__name__}(), "
                "or give its name"
            )
        if not all(hasattr(measure, part) for part in ("name", "observe", "conclude")):
            raise InputError(
                f"{one_line(repr(measure), 160)} is no measure; wanted names, or objects "
                "like a Measure"
            )
    names = [measure.name for measure in objects]
    require_once(MEASURES, names)
    if "maps" in names and "three_axis" in given:
        objects[given.index("three_axis")] = ThreeAxis(axes="first_prompt")
    return objects


def _require_seen(bridge: nn.Module, measures: Sequence[Measure]) -> None:
    """Raise InputError where an intervention is under way whose attention one of `measures` cannot
    see.
    """
    changed = [
        attention.layer_idx
        for attention in as_decoder(bridge).layers
        if not attention.attends_unchanged
    ]
    blind = [
        each.name
        for each in measures
        if {"queries", "keys"} & set(each.needs.tensors) and not each.needs.predictions
    ]
    if changed and blind:
        raise InputError(
            f"layer {changed[0]} attends otherwise while an intervention lasts "
            f"(LM-Infinite), which {blind[0]} cannot see; measure outside "
            "of it, or read blocks.N.attn.hook_pattern under run_with_cache"
        )


def _require_chosen(measure: Measure, layers: Sequence[int], heads: int) -> None:
    for layer, chosen in (measure.needs.heads or {}).items():
        if layer not in layers:
            measured = (
                ", ".join(map(str, layers))
                if len(layers) <= 8
                else f"{len(layers)} of {layers[0]} to {layers[-1]}"
            )
            raise InputError(
                f"{measure.name} was asked for in layer {layer}; the layers that are "
                f"measured: {measured}"
            )
        _within(chosen, heads, f"{measure.name} in layer {layer}: head")


def _within(chosen: Sequence[int] | None, count: int, what: str) -> list[int]:
    """The numbers `chosen` (None: all), sorted.

    Raises InputError for what is no number below `count`.
    """
    if chosen is None:
        return list(range(count))
    try:
        chosen = list(chosen)
        if any(isinstance(number, bool | np.bool_) for number in chosen):
            raise TypeError("a mask")
        chosen = [operator.index(number) for number in chosen]
    except TypeError:
        raise InputError(
            f"{what} {chosen!r} was asked for; wanted whole numbers from 0 to {count - 1}"
        ) from None
    for number in chosen:
        if not 0 <= number < count:
            raise InputError(f"{what} {number} was asked for; the model's are 0 to {count - 1}")
    if not chosen:
        raise InputError(f"no {what} was asked for; the model's are 0 to {count - 1}")
    return sorted(set(chosen))


def _require_prompts(
    prompts: Sequence[Prompt], measures: Sequence[Measure], vocabulary: int
) -> None:
    if not prompts:
        raise InputError("there are no prompts to analyse")
    for number, prompt in enumerate(prompts):
        if max(prompt.tokens) >= vocabulary:
            raise InputError(
                f"prompt {number} has token {max(prompt.tokens)}; the model's tokens are 0 "
                f"to {vocabulary - 1}"
            )
        for measure in measures:
            if len(prompt.tokens) < measure.needs.tokens:
                raise InputError(
                    f"prompt {number} has {len(prompt.tokens)} tokens, and {measure.name} "
                    "with these parameters needs "
                    f"{measure.needs.tokens}; give longer prompts, or other parameters"
                )
            absent = [name for name in measure.needs.spans if not prompt.all_spans().get(name)]
            if absent:
                raise InputError(
                    f"prompt {number} has no span {absent[0]!r}, which the measure "
                    f"{measure.name!r} needs; "
                    f"mark it in the prompt or leave the measure out"
                )
