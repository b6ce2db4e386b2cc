"""Perplexity beyond the training length on other windows (CoPE fig. 3): C5 again, from recorded
training runs.

    rise = log perplexity at the longest length - log perplexity at the training length
    number = CoPE's rise - the rise with every gate open, mean over training seeds, nats

Training scores every seed on different windows, which are the same for both schemes. The windows
change the rises of a seed by about a tenth of a nat for both schemes alike, so only differences by
seed are informative. The spread of these differences includes the effect of other windows, unlike
the spread in `perplexity`, where all seeds have the same windows. Nothing is scored again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from position_papers.cope.errors import COPE
from position_papers.cope.perplexity import C5, CALLED, LANGUAGE, OPEN, RISE, gates_of
from position_papers.kit import (
    NORMAL_95,
    Cache,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Scored,
    ScoreOptions,
    Subject,
    between_rises,
    evidence,
    in_words,
    missing,
    note,
    of_tasks,
    scores_on_record,
    trained_alike,
    unmeasured,
)

C5_WINDOWS = Claim(
    "C5",
    "the same on other windows, which every seed has of its own",
    "CoPE fig. 3",
    "figure",
    C5.rule,
    "other windows",
)


def measure(subjects: Sequence[Subject], options: ScoreOptions, cache: Cache) -> list[Scored]:
    """Read the scores that training recorded for every checkpoint and its seeds."""
    return [scored for scored in scores_on_record(subjects) if scored.recorded]


def tabulate(scored: Sequence[Scored]) -> Iterator[Evidence]:
    """Yield the evidence on C5 (other windows): the first CoPE with gates from its keys compared
    with the first with every gate open.
    """
    variants = {gates_of(each): each for each in reversed(scored) if each.layout == COPE}
    own, rival = variants.get(COPE), variants.get(OPEN)
    if own is None:
        return
    if rival is None:
        yield unmeasured(C5_WINDOWS, own.name, missing([CALLED[OPEN]], "language"))
        return
    short, long = own.training_length, max(int(name) for name in own.test_sets)
    samples = [(each.sample((str(short),)), each.sample((str(long),))) for each in (rival, own)]
    difference = between_rises(*samples)
    yield evidence(
        C5_WINDOWS,
        own.name,
        f"change of log perplexity from {short} to {long} tokens less that of {rival.name}, nats",
        {RISE: {CALLED[OPEN]: difference}},
        -difference.margin,
        float(np.ptp(difference.limits(NORMAL_95))) / 2,
        f"{difference.over}, half of the 95 % interval",
        sum(run.prompts for run in own.recorded),
        seeds=len(own.recorded),
        note=note([own, rival], in_words({rival.name: difference}, "less than", " nats")),
    )


def draw(scored: Sequence[Scored]) -> Iterator[Drawing]:
    """Draw nothing: two rises per seed are too few for a figure."""
    return iter(())


OTHER_WINDOWS = Experiment(
    "other windows",
    (C5_WINDOWS,),
    Needs(
        trained_alike(of_tasks("language")),
        "no checkpoint with CoPE in every layer and gates from its keys, trained on language, was "
        "given",
        ("language/cope", "language/cope_open"),
        "language",
    ),
    measure,
    tabulate,
    draw,
    LANGUAGE,
)
