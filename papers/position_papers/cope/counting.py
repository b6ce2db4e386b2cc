"""Counting the values of variables, in contexts as in training, longer and shorter (CoPE sec. 5.3, tables 3 and 4): C3.

Variables are set to zero, incremented and passed over; what is asked is the value of one. The more is passed over, the longer the context
that a count has to reach across.

    floor = 100 (1 - share of the most frequent value) per cent: the error of a model that always says that one

Beside every error stands its floor, and there is no verdict where no scheme is below it. In balanced test sets all values are as frequent,
so that the floor is high and what counts is counting.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import xarray as xr

from position_papers.cope.errors import (
    COPE,
    IN_DISTRIBUTION,
    RIVALS,
    SCHEMES,
    LowerError,
    error_table,
    errors_by_test_set,
    errors_caption,
    errors_of,
    lower_error,
    needs,
)
from position_papers.cope.errors import measure as measure_errors
from position_papers.kit.cache import Cache
from position_papers.kit.claims import UNMEASURABLE, Claim, Verdict, unmeasured
from position_papers.kit.differences import share_difference
from position_papers.kit.experiment import Drawing, Experiment
from position_papers.kit.samples import Sample
from position_papers.kit.scale import Scale
from position_papers.kit.scores import Scored, ScoreOptions, first_of
from position_papers.kit.subjects import Subject
from position_papers.tasks.counting import BALANCED, Counting, majority
from position_papers.training.trained import configured_task
from repo_interp.errors import InputError
from repo_interp.tasks import Task
from repo_interp.values import Count

CONTEXTS = ("longer", "shorter")


@dataclass(frozen=True)
class LowerCountingError(LowerError):
    """CoPE's error is below that of each rival; nothing is said where nobody counts."""

    @property
    def words(self) -> str:
        """The rule in words."""
        return (
            f"{super().words}, nor where none is below that of always saying the most frequent value by more than {self.errors:g} standard "
            f"errors and {self.apart:g} %"
        )

    def counts(self, errors: Iterable[Sample], floor: float, prompts: int) -> bool:
        """Whether one of the `errors` is that far below the `floor`, the error of always saying the most frequent of `prompts` values."""
        below = (share_difference(floor, sample.mean, (prompts, sample.count)) for sample in errors)
        return any(difference.exceeds(self.apart / 100, self.errors) for difference in below)


_BY_VARIABLES = tuple((f"counting/cope{variables}_256", f"counting/cope{variables}") for variables in ("", "_3", "_5"))
"""Where both are there, those trained with 256 operations decide: with 64, longer contexts are hardly longer."""
C3 = Claim(
    "C3",
    "counting 1, 3 and 5 variables: CoPE below the others in error",
    "CoPE table 3",
    "0.0 / 1.2 / 7.4 %",
    LowerCountingError("CoPE's error for a number of variables"),
    about=_BY_VARIABLES,
)
C3_CONTEXTS = Claim(
    "C3",
    "counting in longer and shorter contexts than trained on: CoPE below the others in error",
    "CoPE table 4",
    "0.0, 4.0 / 8.8, 34.1 %",
    LowerCountingError("with weights 100 (longer contexts) and 10 (shorter ones) of pass, each, CoPE's error"),
    part="contexts",
    about=_BY_VARIABLES,
)
C3_BALANCED = Claim(
    "C3",
    "counting, all values as frequent: CoPE below the others in error",
    C3.source,
    "none",
    LowerCountingError(
        "with values that are equally frequent, CoPE's error in contexts as in training, longer and shorter, each,"
    ),
    part="balanced",
)


# ---- measured -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountingOptions(ScoreOptions):
    """How much is scored. Raises InputError for too few prompts."""

    counting_count: Count = 2000
    """Prompts of every test set of counting."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.counting_count < 2:
            raise InputError(f"counting_count is {self.counting_count}; wanted at least 2 prompts, for an error")


@dataclass(frozen=True)
class Counted:
    """Checkpoints that were trained alike but for the number of variables, with the floor of every error."""

    scored: Sequence[Scored]
    floors: xr.DataArray
    """`[variables, test_set]` in per cent; attribute `prompts`, how many each is taken over."""


def measure(subjects: Sequence[Subject], options: CountingOptions, cache: Cache) -> Counted:
    """The scores of `subjects`, and the floors of the test sets of their tasks."""
    scored = measure_errors(subjects, replace(options, count=options.counting_count), cache)
    floors: list[xr.DataArray] = []
    for count, group in by_variables(scored).items():
        task = configured_task(group[0].configuration)
        given = {"count": options.counting_count, "seed": options.seed}
        depends = {"task": json.dumps(task.options(), sort_keys=True), **given}
        floors.append(cache.dataset(measure_floors, depends, task, *given.values())["floor"].assign_coords(variables=count))
    together: xr.DataArray = xr.concat(floors, dim="variables", join="outer", coords="minimal", compat="override")
    return Counted(scored, together.assign_attrs(prompts=options.counting_count))


def measure_floors(task: Task, count: int, seed: int) -> xr.Dataset:
    """`floor [test_set]` in per cent, of `count` prompts each."""
    shares = [majority(task.prompts(count, seed, name)) for name in task.test_sets]
    described = {"long_name": "error of always saying the most frequent value", "units": "%"}
    return xr.Dataset(
        {"floor": ("test_set", [100 * (1 - share) for share in shares], described)}, {"test_set": list(task.test_sets)}
    )


# ---- judged ---------------------------------------------------------------------------------------------------------


def judge(counted: Counted) -> Iterator[Verdict]:
    """The verdicts on C3, its contexts and balanced values, for each number of variables that a checkpoint with CoPE in every layer was
    trained with.
    """
    for count, group in by_variables(counted.scored).items():
        if (cope := first_of(group, COPE)) is None:
            continue
        floors, measured = counted.floors.sel(variables=count), f"error with {_variables(count)}, %"
        yield _beside_floor(C3, group, IN_DISTRIBUTION, measured, floors)
        for name in CONTEXTS:
            yield _beside_floor(C3_CONTEXTS, group, name, f"{measured}, {name} contexts", floors)
        for name in (IN_DISTRIBUTION, *CONTEXTS):
            if f"{BALANCED}{name}" in cope.test_sets:
                contexts = f"{measured}, values equally frequent" + (f", {name} contexts" if name in CONTEXTS else "")
                yield _beside_floor(C3_BALANCED, group, f"{BALANCED}{name}", contexts, floors)


def _beside_floor(claim: Claim, group: Sequence[Scored], test_set: str, measured: str, floors: xr.DataArray) -> Verdict:
    """Whether CoPE's error is below its rivals', with the floor beside it; not measurable where nobody is below the floor."""
    judged, floor = lower_error(claim, group, test_set, measured), float(floors.sel(test_set=test_set))
    always = f"always the most frequent value {floor:.3g} %"
    if judged.outcome == UNMEASURABLE:
        return unmeasured(claim, judged.checkpoint, (*judged.notes, always))
    compared = [each for name in (COPE, *RIVALS) if (each := first_of(group, name)) is not None and test_set in each.test_sets]
    errors = {each.name: errors_of(each, [test_set]) for each in compared}
    assert isinstance(claim.rule, LowerCountingError)
    if not claim.rule.counts(errors.values(), floor / 100, floors.attrs["prompts"]):
        shown = ", ".join(f"{name} {100 * sample.mean:.3g} %" for name, sample in errors.items())
        return judged.without_a_number("nobody counts", always, shown)
    return replace(judged, estimate=replace(judged.estimate, control=f"{judged.estimate.control}; {always}"))


# ---- drawn ----------------------------------------------------------------------------------------------------------


def draw(counted: Counted) -> Iterator[Drawing]:
    """Errors by context, one panel per number of variables (table 3, 4)."""
    scored = counted.scored
    task = configured_task(scored[0].configuration)
    assert isinstance(task, Counting)
    groups = by_variables(scored)
    shown = [name for name in task.test_sets if all(name in each.test_sets for each in scored)]
    tables = {
        count: error_table(group, shown).assign(floor=counted.floors.sel(variables=count, test_set=shown).reset_coords(drop=True))
        for count, group in groups.items()
    }
    together = xr.concat(
        [table.drop_vars("floor") for table in tables.values()],
        dim="checkpoint",
        join="outer",
        coords="minimal",
        compat="override",
    )
    numbers = [count for count, group in groups.items() for _ in group]
    caption = (
        f"Counting, up to {task.operations} operations: share of sequences whose value is wrong (CoPE table 3, 4), where the operation "
        f"pass, which changes no value, is drawn as often as in training (weight {task.pass_weight:g}), more often, so that contexts are "
        f"longer ({task.longer_pass_weight:g}), or less often, so that they are shorter ({task.shorter_pass_weight:g}); balanced: all "
        f"values equally frequent. Dashed: the error of always saying the most frequent value. {errors_caption(scored)}"
    )
    figure = errors_by_test_set({_variables(count): table for count, table in tables.items()})
    data = together.assign_coords(variables=("checkpoint", numbers))
    yield Drawing(f"counting_{task.operations}", figure, caption, data.assign(floor=counted.floors.rename(variables="number")))


def by_variables(scored: Sequence[Scored]) -> dict[int, list[Scored]]:
    """Checkpoints by the number of variables that they were trained with, ascending."""
    groups: dict[int, list[Scored]] = {}
    for checkpoint in scored:
        groups.setdefault(int(checkpoint.configuration.task_options.get("variables", 1)), []).append(checkpoint)
    return dict(sorted(groups.items()))


def _variables(count: int) -> str:
    return f"{count} variable" if count == 1 else f"{count} variables"


COUNTING = Experiment(
    "counting",
    (C3, C3_CONTEXTS, C3_BALANCED),
    needs(
        "counting",
        [f"{scheme}{variables}{size}" for size in ("_256", "") for variables in ("", "_3", "_5") for scheme in SCHEMES],
        besides=("variables",),
    ),
    measure,
    judge,
    draw,
    Scale(training="10,000 sequences of up to 512 operations"),  # sec. 5.3
)
