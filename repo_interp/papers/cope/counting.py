"""Counting the values of variables, in contexts as in training, longer and shorter (CoPE sec. 5.3, tables 3 and 4): C3.

Variables are set to zero, incremented and passed over; what is asked is the value of one. The more is passed over, the longer the context
that a count has to reach across.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xarray as xr

from repo_interp.papers.cope.errors import (
    COPE,
    IN_DISTRIBUTION,
    SCHEMES,
    LowerError,
    bars,
    error_bars,
    error_table,
    lower_error,
    measure,
    needs,
)
from repo_interp.papers.kit.claims import Claim, Evidence
from repo_interp.papers.kit.experiment import Drawing, Experiment
from repo_interp.papers.kit.scale import Scale
from repo_interp.papers.kit.scores import Scored, first_of
from repo_interp.tasks.counting import Counting
from repo_interp.training.trained import configured_task

CONTEXTS = ("longer", "shorter")

C3 = Claim(
    "C3",
    "counting 1, 3 and 5 variables: CoPE below the others in error",
    "CoPE table 3",
    "0.0 / 1.2 / 7.4 %",
    LowerError("CoPE's error for a number of variables"),
)
C3_CONTEXTS = Claim(
    "C3",
    "counting in longer and shorter contexts than trained on: CoPE below the others in error",
    "CoPE table 4",
    "0.0, 4.0 / 8.8, 34.1 %",
    LowerError("with weights 100 (longer contexts) and 10 (shorter ones) of pass, each, CoPE's error"),
    part="contexts",
)


def judge(scored: Sequence[Scored]) -> Iterator[Evidence]:
    """What there is on C3 and its contexts, for each number of variables that a checkpoint with CoPE in every layer was trained with."""
    for count, group in by_variables(scored).items():
        if first_of(group, COPE) is not None:
            measured = f"error with {_variables(count)}, %"
            yield lower_error(C3, group, IN_DISTRIBUTION, measured)
            for name in CONTEXTS:
                yield lower_error(C3_CONTEXTS, group, name, f"{measured}, {name} contexts")


def draw(scored: Sequence[Scored]) -> Iterator[Drawing]:
    """Errors by context, one panel per number of variables (table 3, 4)."""
    task = configured_task(scored[0].configuration)
    assert isinstance(task, Counting)
    groups = by_variables(scored)
    tables = {count: error_table(group) for count, group in groups.items()}
    together = xr.concat(list(tables.values()), dim="checkpoint", join="outer", coords="minimal", compat="override")
    numbers = [count for count, group in groups.items() for _ in group]
    caption = (
        f"Counting: share of sequences whose value is wrong (CoPE table 3, 4), with the weight of pass of training ({task.pass_weight:g}), "
        f"longer contexts ({task.longer_pass_weight:g}) and shorter ones ({task.shorter_pass_weight:g}). {bars(scored)}"
    )
    figure = error_bars({_variables(count): table for count, table in tables.items()})
    yield Drawing("counting", figure, caption, together.assign_coords(variables=("checkpoint", numbers)))


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
    (C3, C3_CONTEXTS),
    needs("counting", [f"{scheme}{variables}" for variables in ("", "_3", "_5") for scheme in SCHEMES]),
    measure,
    judge,
    draw,
    Scale(training="10,000 sequences of up to 512 operations"),  # sec. 5.3
)
