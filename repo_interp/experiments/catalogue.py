"""Experiments by name, with their default parameters, and what several will do together.

Ours and those of other packages are entry points of the group `repo_interp.experiments`
(`entry_points`): a callable without arguments that returns an `experiment.Experiment`. Knows
nothing about how an experiment works.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from repo_interp.entry_points import EXPERIMENTS, called, named, names, require_once
from repo_interp.errors import InputError, one_line
from repo_interp.experiments.experiment import Experiment, Plan
from repo_interp.experiments.prompt_sets import scoring_of
from repo_interp.models.decoder import as_decoder
from repo_interp.models.wrapped import model_of
from repo_interp.tasks import Prompt, Task


def experiment_names() -> tuple[str, ...]:
    """Every experiment that `experiment_named` knows: ours, then those of other packages."""
    return names(EXPERIMENTS)


def experiment_named(name: str) -> Experiment:
    """The experiment `name` with its default parameters.

    Raises InputError naming those there are.
    """
    wanted = "a repo_interp.experiments.Experiment of that name"
    return named(EXPERIMENTS, name, lambda made: isinstance(made, Experiment), wanted)


def experiments_named(experiments: Sequence[str | Experiment | Plan]) -> list[Experiment | Plan]:
    """Names, objects, or plans already made, as objects.

    Raises InputError for what is none of these, and for one that comes twice.
    """
    if not isinstance(experiments, str | Iterable):
        raise InputError(
            f"experiments are {one_line(repr(experiments), 160)}; wanted names, or objects "
            "like an Experiment"
        )
    given = [experiments] if isinstance(experiments, str) else list(experiments)
    for each in given:
        if isinstance(each, type):
            raise InputError(
                f"the experiment {each.__name__} is a class; make one, {each.__name__}(), or "
                "give its name"
            )
        if not isinstance(each, str | Experiment | Plan):
            raise InputError(
                f"{one_line(repr(each), 160)} is no experiment; wanted names, or objects "
                "like an Experiment"
            )
    objects = [experiment_named(each) if isinstance(each, str) else each for each in given]
    require_once(
        EXPERIMENTS,
        [each.experiment.name if isinstance(each, Plan) else each.name for each in objects],
    )
    return objects


def planned(
    bridge: nn.Module,
    prompts: Sequence[Prompt],
    experiments: Sequence[str | Experiment | Plan],
    task: Task | None = None,
) -> list[Plan]:
    """What `experiments` - names, objects, or plans already made - will do on `prompts` of `task`;
    None: as `scoring_of` scores them.

    Raises InputError as `experiments_named`, where one cannot work on the prompts, and for a task
    in other tokens than the model's.
    """
    objects = experiments_named(experiments)
    if not objects:
        return []
    decoder = as_decoder(bridge)
    vocabulary = decoder.vocabulary_size
    if task is not None and task.vocabulary_size > vocabulary:
        raise InputError(
            f"the task {task.name} has {task.vocabulary_size} tokens, the model {vocabulary}; "
            "wanted a model trained on it, or another task"
        )
    scoring, model, length = (
        scoring_of(prompts) if task is None else task,
        model_of(bridge),
        decoder.training_length,
    )

    def plan_of(experiment: Experiment) -> Plan:
        plan = experiment.plan(model, scoring, prompts, length)
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

    return [each if isinstance(each, Plan) else plan_of(each) for each in objects]
