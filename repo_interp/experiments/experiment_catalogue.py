"""Experiments by name, with default parameters, and joint plans of several experiments.

Ours and those of other packages are entry points of the group `repo_interp.experiments`
(`entry_points`): a callable without arguments that returns an `experiment.Experiment`. This module
knows nothing about how an experiment works.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from repo_interp.entry_points import EXPERIMENTS, called, named, names, require_once
from repo_interp.errors import InputError, quoted
from repo_interp.experiments.experiment import Experiment, Plan
from repo_interp.experiments.prompt_sets import scoring_of
from repo_interp.models.capture import layers_by_pair
from repo_interp.models.decoder import Decoder
from repo_interp.tasks import Prompt, Task
from repo_interp.tasks.prompt import require_index
from repo_interp.values import format_ranges


def experiment_names() -> tuple[str, ...]:
    """List the experiments that `experiment_named` knows.

    Returns:
        Our names, then names from other packages.
    """
    return names(EXPERIMENTS)


def experiment_named(name: str) -> Experiment:
    """Make the experiment of a name with its default parameters.

    Args:
        name: One of `experiment_names`.

    Returns:
        The experiment.

    Raises:
        InputError: No package has this name; the message lists the names.
    """
    wanted = "a repo_interp.experiments.Experiment of that name"
    return named(EXPERIMENTS, name, lambda made: isinstance(made, Experiment), wanted)


def experiments_named(experiments: Sequence[str | Experiment | Plan]) -> list[Experiment | Plan]:
    """Make experiments from names.

    Args:
        experiments: Names, experiments, or plans; a single name is allowed too.

    Returns:
        Experiments and plans, in the same order.

    Raises:
        InputError: An item is none of these, or an experiment is repeated.
    """
    if not isinstance(experiments, str | Iterable):
        raise InputError(
            f"experiments are {quoted(experiments)}; wanted names, or objects like an Experiment"
        )
    given = [experiments] if isinstance(experiments, str) else list(experiments)
    for item in given:
        # A class has all attributes of an experiment and would fail
        # later, in words that do not help.
        if isinstance(item, type):
            raise InputError(
                f"the experiment {item.__name__} is a class; make one, {item.__name__}(), or "
                "give its name"
            )
        if not isinstance(item, str | Experiment | Plan):
            raise InputError(
                f"{quoted(item)} is no experiment; wanted names, or objects like an Experiment"
            )
    # Names become objects before the check, so that a name and an
    # object of that name count as twice.
    objects = [experiment_named(item) if isinstance(item, str) else item for item in given]
    require_once(
        EXPERIMENTS,
        [item.experiment.name if isinstance(item, Plan) else item.name for item in objects],
    )
    return objects


def planned(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    experiments: Sequence[str | Experiment | Plan],
    task: Task | None = None,
) -> list[Plan]:
    """Plan experiments on prompts.

    Args:
        decoder: Decoder of the model.
        prompts: Prompts to measure on.
        experiments: Names, experiments, or plans, which are returned unchanged.
        task: Task of the prompts; None: `scoring_of` decides how they are scored.

    Returns:
        One plan per experiment.

    Raises:
        InputError: An experiment is unknown, cannot work on the prompts or returns no plan, a
            prompt has position ids, the task has more tokens than the model, or an experiment
            needs one position per token but positions differ by rotary pair.
    """
    objects = experiments_named(experiments)
    if not objects:
        return []
    # Experiments assume that positions begin as the token index, so prompts must not have others.
    require_index(prompts)
    vocabulary = decoder.vocabulary_size
    # Token ids beyond the embedding would fail deep in the first pass, with an error of torch.
    if task is not None and task.vocabulary_size > vocabulary:
        raise InputError(
            f"the task {task.name} has {task.vocabulary_size} tokens, the model {vocabulary}; "
            "wanted a model trained on it, or another task"
        )
    scoring = scoring_of(prompts) if task is None else task
    by_pair = layers_by_pair(decoder)

    def plan_of(experiment: Experiment) -> Plan:
        if by_pair and not experiment.by_pair:
            raise InputError(
                f"{experiment.name} is about one position per token, and every rotary pair, or "
                f"query and key, has its own in layers {format_ranges(by_pair)}; leave it out"
            )
        plan = experiment.plan(decoder.owner, scoring, prompts, decoder.training_length)
        # Plans of other packages are checked: memory and the announced
        # cost are computed from `passes`.
        passes = plan.passes if isinstance(plan, Plan) else None
        if not isinstance(passes, Sequence) or not all(
            isinstance(tokens, int) for tokens in passes
        ):
            raise InputError(
                f"{called(EXPERIMENTS, experiment.name)} plans a {type(plan).__name__}; "
                "wanted a repo_interp.experiments.Plan, "
                "with the tokens of every prompt of every pass as whole numbers"
            )
        return plan

    # A given plan is for this model and its prompts already.
    return [item if isinstance(item, Plan) else plan_of(item) for item in objects]
