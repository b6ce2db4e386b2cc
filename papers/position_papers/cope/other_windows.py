"""Perplexity beyond the training length on other windows (CoPE fig. 3): C5 once more, from recorded
training runs.

    rise = log perplexity at the longest length - that at the training length
    number = CoPE's rise - that with every gate open, mean over training seeds, nats

Training scores every seed on windows of its own, the same for both schemes. Windows move the rises
of a seed by a tenth of a nat, both schemes' alike, so that only differences by seed say something;
their spread contains what other windows would change, which that of `perplexity`, where all seeds
have the same windows, does not. Nothing is scored anew.
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
    """What training recorded of every checkpoint and its seeds."""
    return [scored for scored in scores_on_record(subjects) if scored.recorded]


def tabulate(scored: Sequence[Scored]) -> Iterator[Evidence]:
    """C5 (other windows), of the first CoPE with gates from its keys beside the first with every
    gate open.
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
    """Nothing: two rises of a seed are no picture of their own."""
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
