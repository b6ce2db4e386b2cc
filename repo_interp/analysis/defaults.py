"""Defaults of an analysis: prompts, measures and experiments, for the command and for Python.

    prompts        those of the task that the checkpoint was trained on, else one short text
    experiments    where every layer's positions are the token index, or none: the atlas of heads,
                   quickly; elsewhere, where their passes are few (tokens times parameters at most
                   FEW or QUICK): kinds of heads, and, on prompts of a task, effects of changed
                   positions and the atlas

Brings together tasks, experiments and where a model came from; knows nothing about commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from repo_interp.analysis.gaps import Gaps
from repo_interp.analysis.trained_task import trained_task
from repo_interp.entry_points import MEASURES, require_once
from repo_interp.errors import InputError, quoted, warn
from repo_interp.experiments.catalogue import planned
from repo_interp.experiments.experiment import Experiment, Plan
from repo_interp.measures.catalogue import measure_named
from repo_interp.measures.statistics import Measure, as_measure
from repo_interp.models.decoder import Decoder
from repo_interp.positions.assigners import TokenIndex
from repo_interp.positions.layouts import CONTEXTUAL, FIXED, ROTATED_BY_INDEX, SCHEMES
from repo_interp.tasks.prompt import Prompt
from repo_interp.tasks.short_text import TOKENS, short_text
from repo_interp.tasks.task import Task

COUNT = 20
"""Prompts of a task."""

QUICK = 2e11
"""Tokens times parameters of an experiment that is made unasked: about half a minute on one core.
"""
FEW = 1e11
"""The same of `kinds`, whose passes are long, so that a model of 1e8 parameters is not analyzed for
twice as long unasked.
"""


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
    task = None if source is None else trained_task(source.directory, **options)
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
    return (
        "Python's documentation"
        if task is None
        else f"{task.origin}, as the checkpoint says that it was trained"
    )


def default_experiments(
    decoder: Decoder, prompts: Sequence[Prompt], task: Task | None
) -> list[Experiment]:
    """Choose the experiments that are quick and tell most.

    The atlas, where no layer learns positions or counts gates. Else kinds and, on prompts of a
    task, effects and the atlas, where they are quick. An experiment that cannot work on the model
    or its prompts is left out.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts of the analysis.
        task: Task of the prompts; None: none.

    Returns:
        Experiments; a warning names those that are left out since they take long.
    """
    if any(prompt.position_ids is not None for prompt in prompts):
        warn("without experiments, whose positions are the token index: prompts have position ids")
        return []
    # Imported here: analyses that name their measures need no experiment
    from repo_interp.experiments.atlas import Atlas
    from repo_interp.experiments.effects import Effects
    from repo_interp.experiments.kinds import Kinds

    # Fewer than the atlas makes when it is asked for: it must be quick here
    atlas = Atlas(sequences=2, twins=2)
    if set(_schemes_by_positions(decoder)) <= set(FIXED):
        try:
            planned(decoder, prompts, [atlas], task)
        except InputError as error:
            warn(f"without the atlas: {error}")
            return []
        return [atlas]
    parameters = sum(parameter.numel() for parameter in decoder.owner.parameters())
    quick: list[Experiment] = []
    dear: list[str] = []
    for experiment, most in (
        (Kinds(), FEW),
        # They score an answer, and only the prompts of a task surely have one
        *((experiment, QUICK) for experiment in (Effects(), atlas) if task is not None),
    ):
        with suppress(InputError):
            # A plan lists its passes without making any, so the cost is known beforehand
            (plan,) = planned(decoder, prompts, [experiment], task)
            if parameters * sum(plan.passes) <= most:
                quick.append(experiment)
            else:
                dear.append(experiment.name)
    if dear:
        warn(
            f"left out, since they take many passes of this model: {', '.join(dear)}; "
            f"--experiments {','.join(dear)} makes them"
        )
    return quick


def choose(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    measures: Sequence[str | Measure] | None,
    layers: Sequence[int] | None,
    experiments: Sequence[str | Experiment | Plan] | None,
    task: Task | None,
) -> tuple[Sequence[str | Measure], Sequence[str | Experiment | Plan]]:
    """Choose the measures and experiments that nobody named.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts to measure.
        measures: Measures that were named; None: `default_measures`.
        layers: Layers that were named; None: all.
        experiments: Experiments that were named; None: `default_experiments` where neither
            measures nor layers were named, else none.
        task: Task of the prompts.

    Returns:
        Measures and experiments; those that were named as they are.
    """
    if experiments is None:
        unasked = measures is None and layers is None
        experiments = default_experiments(decoder, prompts, task) if unasked else ()
    if measures is None:
        measures = default_measures(prompts, _schemes_by_positions(decoder), layers)
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


def _schemes_by_positions(decoder: Decoder) -> list[str]:
    """Schemes of the layers that attend.

    One of another package whose positions are the token index, or none, counts as one of ours.
    """
    schemes = []
    for attention in decoder.layers:
        name = attention.scheme
        if name not in SCHEMES and isinstance(attention.assigner, TokenIndex | None):
            name = "alibi" if attention.frequencies is None else "rope"
        schemes.append(name)
    return schemes


def default_measures(
    prompts: Sequence[Prompt], schemes: Sequence[str] = (), layers: Sequence[int] | None = None
) -> tuple[str, ...]:
    """Choose the measures of an analysis that names none.

    They measure positions, attention and predictions. Where all positions are the token index, or
    none, their effect on the logits is measured instead.

    Args:
        prompts: Prompts of the analysis.
        schemes: Schemes of the layers, which the choice follows; empty: any.
        layers: Layers to measure; None: all, without which predictions are left out.

    Returns:
        Names of measures.
    """
    # The measure reads the rows that produce the answer, so every prompt must have one
    mass = ("attention_mass",) if all(prompt.generated for prompt in prompts) else ()
    tokens = ("attention_rows", "octaves", *(("predictions",) if layers is None else ()))
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
    # Both lists may name position_sources: the first mention stays
    return tuple(dict.fromkeys((*of_positions, *of_gates, *mass, *tokens)))


def resolve_measures(measures: Sequence[str | Measure]) -> list[Measure]:
    """Return measures as objects.

    Beside `maps`, a `three_axis` that is given by name keeps the axes that its figure shows.

    Args:
        measures: Names and objects; one name alone is a list of one.

    Returns:
        Measures, in order.

    Raises:
        InputError: A name is unknown or given twice, or an object is no measure.
    """
    if not isinstance(measures, str | Iterable):
        raise InputError(
            f"measures are {quoted(measures)}; wanted names, or objects like a Measure"
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
                f"{quoted(measure)} is no measure; wanted names, or objects like a Measure"
            )
    names = [measure.name for measure in objects]
    require_once(MEASURES, names)
    if "maps" in names and "three_axis" in given:
        place = given.index("three_axis")
        objects[place] = replace(objects[place], axes="first_prompt")  # pyright: ignore[reportArgumentType, reportCallIssue]
    return objects
