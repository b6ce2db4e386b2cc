"""Selective copy, in and out of distribution (CoPE sec. 5.2, table 2): C2.

Symbols are copied in order, the blanks between them left out. Out of distribution there are half (dense) or twice (sparse) as many
blanks as in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from position_papers.cope.errors import (
    COPE,
    IN_DISTRIBUTION,
    SCHEMES,
    error_table,
    errors_by_test_set,
    errors_caption,
    errors_of,
    measure,
    needs,
)
from position_papers.kit.claims import Claim, Verdict, unmeasured, verdict
from position_papers.kit.experiment import Drawing, Experiment
from position_papers.kit.rules import All, AtLeast, AtMost
from position_papers.kit.samples import numbers_of
from position_papers.kit.scale import Scale
from position_papers.kit.scores import Scored, first_of, missing, note
from position_papers.tasks.selective_copy import SelectiveCopy
from position_papers.training.trained import configured_task

OUTSIDE = ("dense", "sparse")
LARGEST = "CoPE's largest error with as many, half and twice the blanks"
SMALLEST = "RoPE's smaller error with half and with twice the blanks"

C2 = Claim(
    "C2",
    "selective copy: CoPE makes no errors in and out of distribution, RoPE fails out",
    "CoPE table 2",
    "0 / 100 %",
    All(AtMost(LARGEST, 1.0, " %"), AtLeast(SMALLEST, 50.0, " %")),
)


def judge(scored: Sequence[Scored]) -> Iterator[Verdict]:
    """The verdicts on C2, where a checkpoint has CoPE in every layer."""
    cope, rope = first_of(scored, COPE), first_of(scored, "rope")
    if cope is None:
        return
    if rope is None:
        yield unmeasured(C2, cope.name, missing(["rope"], "selective_copy"))
        return
    sets = (IN_DISTRIBUTION, *OUTSIDE)
    # 100 (1 - 0.99) is a little more than 1, so errors are rounded before they are compared.
    own, other = (np.round([100 * errors_of(checkpoint, [name]).mean for name in sets], 9) for checkpoint in (cope, rope))
    worst = errors_of(cope, [sets[int(own.argmax())]])
    yield verdict(
        C2,
        cope.name,
        "largest error of the three test sets, %",
        {LARGEST: own.max(), SMALLEST: other[1:].min()},
        100 * worst.mean,
        **numbers_of(worst, 100),
        control="rope " + ", ".join(f"{error:.3g} %" for error in other),
        note=note(
            [cope, rope],
            f"in distribution, {' and '.join(OUTSIDE)}: CoPE {', '.join(f'{error:.3g}' for error in own)} %, "
            f"RoPE {', '.join(f'{error:.3g}' for error in other)} %",
        ),
    )


def draw(scored: Sequence[Scored]) -> Iterator[Drawing]:
    """Errors by test set (table 2, right)."""
    task = configured_task(scored[0].configuration)
    assert isinstance(task, SelectiveCopy)
    table = error_table(scored)
    caption = (
        f"Selective copy: share of sequences that are not copied exactly (CoPE table 2, right). {task.copied} of {task.symbols} symbols "
        f"are copied, with as many blanks as in training ({task.blanks}), half as many (dense) and twice as many (sparse). "
        f"{errors_caption(scored)}"
    )
    yield Drawing("selective_copy", errors_by_test_set({"Selective copy": table}), caption, table)


SELECTIVE_COPY = Experiment(
    "selective copy",
    (C2,),
    needs("selective_copy", SCHEMES),
    measure,
    judge,
    draw,
    Scale(2, 64, None, "100,000 steps"),  # sec. 5.2
)
