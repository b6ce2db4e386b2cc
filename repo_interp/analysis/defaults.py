"""Defaults of an analysis: prompts, measures and experiments, for the command and for Python.

    prompts        prompts of the task that the checkpoint was trained on, else one short text
    measures       all measures that fit the layers and the prompts
    experiments    all experiments whose `unasked` offers a run with few passes: tokens times
                   parameters at most the limit that the experiment states

This module asks all installed measures and experiments. It knows none by name, and nothing about
commands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from repo_interp.analysis.gaps import Gaps
from repo_interp.analysis.training_record import task_of_record
from repo_interp.entry_points import MEASURES, require_once
from repo_interp.errors import InputError, quoted, warn
from repo_interp.experiments.experiment import Experiment, Plan
from repo_interp.experiments.experiment_catalogue import experiment_named, experiment_names, planned
from repo_interp.measures.border import as_measure
from repo_interp.measures.fitting import Layers
from repo_interp.measures.measure_catalogue import measure_named, measure_names
from repo_interp.measures.statistics import Measure
from repo_interp.measures.topics import expand_topics
from repo_interp.models.decoder import Decoder
from repo_interp.positions.assigners import TokenIndex
from repo_interp.positions.layouts import SCHEMES
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.short_text import TOKENS, short_text
from repo_interp.tasks.task import Task

COUNT = 20
"""Prompts of a task."""

ANY = Layers()
"""Unknown layers."""
Offer = TypeVar("Offer")


def default_prompts(
    decoder: Decoder, count: int = COUNT, **options: Any
) -> tuple[list[Prompt], Task | None]:
    """Return prompts of the task that a model was trained on, else one short text.

    Args:
        decoder: Decoder of the model.
        count: Number of prompts of the task.
        **options: Options of the task, which precede the recorded ones.

    Returns:
        The prompts; and the task, or None for the short text.

    Raises:
        InputError: The model has neither such a task nor a tokenizer, or the task would read a file
            that the user did not give.
    """
    source, tokenizer = decoder.origin, decoder.tokenizer
    task = (
        None
        if source is None
        else task_of_record(source.directory, lambda: source.tokenizer_file, **options)
    )
    if task is not None:
        return task.prompts(count), task
    if tokenizer is None:
        raise InputError(
            "this model has no tokenizer, so no prompts can be made for it; give prompts as "
            "tokens, or load it: repo_interp.load(path)"
        )
    return [short_text(tokenizer, min(TOKENS, decoder.training_length))], None


def origin_of(task: Task | None) -> str:
    """Return the origin of default prompts in words.

    Args:
        task: Task of the prompts; None: the short text.

    Returns:
        Text for a sentence that begins "prompts from".
    """
    return "Python's documentation" if task is None else f"{task.origin}, that of its training"


def default_experiments(
    decoder: Decoder, prompts: Sequence[Prompt], task: Task | None
) -> list[Experiment]:
    """Return the experiments that run without being named (`Experiment.unasked`).

    One that cannot work on the model or its prompts, or takes more work than it allows itself, is
    left out.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts of the analysis.
        task: Task of the prompts; None: none.

    Returns:
        Experiments; a warning names experiments that are left out because they take long.
    """
    if any(prompt.position_ids is not None for prompt in prompts):
        warn("without experiments, whose positions are the token index: prompts have position ids")
        return []
    layers = measured_layers(decoder)
    parameters = sum(parameter.numel() for parameter in decoder.owner.parameters())
    quick: list[Experiment] = []
    dear: list[str] = []
    for name in experiment_names():
        if (
            offered := _offered(lambda name=name: experiment_named(name).unasked(layers, task))
        ) is None:
            continue
        try:
            # A plan lists its passes without making any, so the cost is known beforehand
            (plan,) = planned(decoder, prompts, [offered.experiment], task)
        except InputError as error:
            if offered.work == math.inf:
                warn(f"without the {name}: {error}")
            continue
        if parameters * sum(plan.passes) <= offered.work:
            quick.append(offered.experiment)
        else:
            dear.append(name)
    if dear:
        warn(
            f"left out, since they take many passes of this model: {', '.join(dear)}; "
            f"--experiments {','.join(dear)} makes them"
        )
    return quick


def _offered(ask: Callable[[], Offer | None]) -> Offer | None:
    """Return the offer of a measure or experiment; None, with a warning, if a package is broken."""
    try:
        return ask()
    except InputError as error:
        warn(f"left out: {error}")
        return None


def choose(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    measures: Sequence[str | Measure] | None,
    layers: Sequence[int] | None,
    experiments: Sequence[str | Experiment | Plan] | None,
    task: Task | None,
) -> tuple[Sequence[str | Measure], Sequence[str | Experiment | Plan]]:
    """Choose default measures and experiments.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts to measure.
        measures: Measures that were named; None: `default_measures`.
        layers: Layers that were named; None: all.
        experiments: Experiments that were named; None: `default_experiments` where neither
            measures nor layers were named, else none.
        task: Task of the prompts.

    Returns:
        Measures and experiments; named ones are unchanged.
    """
    if experiments is None:
        unasked = measures is None and layers is None
        experiments = default_experiments(decoder, prompts, task) if unasked else ()
    if measures is None:
        measures = default_measures(prompts, measured_layers(decoder, layers))
        if any(prompt.document_count > 1 for prompt in prompts):
            fitting = [name for name in measures if measure_named(name).needs.documents]
            left = [name for name in measures if name not in fitting]
            warn(
                f"left out, since they take all tokens for one text and position ids of the "
                f"prompts begin documents: {', '.join(left)}"
            )
            measures = fitting
        named = [as_measure(measure_named(name)) for name in measures]
        with suppress(InputError, TypeError):  # layers that no model has, which the job refuses
            silent = Gaps(decoder, named, (), layers).silent
            measures = [name for name in measures if name not in silent]
    return measures, experiments


def measured_layers(decoder: Decoder, layers: Sequence[int] | None = None) -> Layers:
    """Describe the layers of a model for measures and experiments.

    Args:
        decoder: Decoder of the model.
        layers: Layers to measure; None: all.

    Returns:
        Schemes of all layers with attention. A scheme of another package with the token index as
        position, or without positions, counts as one of ours.
    """
    schemes = []
    for attention in decoder.layers:
        name = attention.scheme
        if name not in SCHEMES and isinstance(attention.assigner, TokenIndex | None):
            name = "alibi" if attention.frequencies is None else "rope"
        schemes.append(name)
    return Layers(tuple(schemes), layers is None)


def default_measures(prompts: Sequence[Prompt], layers: Layers = ANY) -> tuple[str, ...]:
    """Return the measures that fit (`Measure.fits`), of an analysis that names none.

    Args:
        prompts: Prompts of the analysis.
        layers: Layers that are measured.

    Returns:
        Names of measures.
    """
    fitting = []
    for name in measure_names():
        made = _offered(lambda name=name: as_measure(measure_named(name)))
        if made is not None and made.fits(layers, prompts):
            fitting.append(name)
    return tuple(fitting)


def resolve_measures(measures: Sequence[str | Measure]) -> list[Measure]:
    """Return measures as objects.

    A measure given by name may adapt to the others (`Measure.beside`); a topic, such as
    "generalization", stands for all measures with this topic.

    Args:
        measures: Names, topics and objects; a single name is a list of one.

    Returns:
        Measures, in order.

    Raises:
        InputError: A name is unknown or given twice, or an object is no measure.
    """
    if not isinstance(measures, str | Iterable):
        raise InputError(
            f"measures are {quoted(measures)}; wanted names, or objects like a Measure"
        )
    given = expand_topics(MEASURES, [measures] if isinstance(measures, str) else measures)
    objects = [measure_named(measure) if isinstance(measure, str) else measure for measure in given]
    for measure in objects:
        if isinstance(measure, type):
            raise InputError(
                f"the measure {measure.__name__} is a class; make one, {measure.__name__}(), "
                "or give its name"
            )
        if not all(hasattr(measure, part) for part in ("name", "observe", "conclude")):
            raise InputError(
                f"{quoted(measure)} is no measure; wanted names, or objects like a Measure"
            )
    names = [measure.name for measure in objects]
    require_once(MEASURES, names)
    # An object is measured as it was given
    return [
        measure.beside(names)
        if isinstance(asked, str) and isinstance(measure, Measure)
        else measure
        for asked, measure in zip(given, objects, strict=True)
    ]
