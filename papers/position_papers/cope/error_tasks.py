"""The tasks of CoPE's claims about errors, as data: flip-flop (C1), selective copy (C2) and
counting (C3).

Flip-flop: a read repeats the bit that was written last. Out of distribution, more instructions
(sparse) or fewer (dense) are ignored than in training. Our sparse sequences of the training length
are easier than the paper's. Longer sequences are judged as a separate part, which was added after
their scores were seen.

Selective copy: symbols are copied in order, without the blanks between them. Out of distribution
there are half (dense) or twice (sparse) as many blanks.

Counting: variables are set to zero, incremented and passed over; the answer is the value of one
variable. The more operations pass, the longer the context that the count depends on. In balanced
test sets all values are equally frequent, so that a constant answer has a high error. The condition
that a scheme has learned the task (`errors.LEARNED`) was added after the scores were seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from position_papers.cope.errors import (
    COPE,
    IN_DISTRIBUTION,
    RIVALS,
    Alike,
    ErrorTask,
    LowerError,
    errors_of,
    experiment,
    lower_error,
)
from position_papers.kit import (
    All,
    AtLeast,
    AtMost,
    Claim,
    Evidence,
    Scale,
    ScoreOptions,
    evidence,
    missing,
    note,
    numbers_of,
    unmeasured,
)
from position_papers.tasks.counting import BALANCED
from repo_interp.errors import InputError
from repo_interp.values import Count

SCHEMES = (COPE, *RIVALS, "repo")
"""The schemes of the zoo's checkpoints for each task."""

# ---- flip-flop -----------------------------------------------------------------------------------

C1 = Claim(
    "C1",
    "flip-flop, out of distribution: CoPE below RoPE and absolute in error",
    "CoPE table 2, 7",
    "4.9 / 20.3 / 21.7 %",
    LowerError("CoPE's error on the sparse test set (98 % ignored)"),
    shows_control=True,
)
C1_LONG = Claim(
    "C1",
    "flip-flop, longer and out of distribution: CoPE below RoPE in error (absolute positions "
    "end at the training length)",
    C1.source,
    "none",  # the paper's sequences are as long as those of training
    LowerError("CoPE's error on the long sparse test set"),
    "longer",
)
FLIP_FLOP = experiment(
    ErrorTask(
        "flip_flop",
        [f"{scheme}{length}" for length in ("_256", "") for scheme in SCHEMES],
        ((C1, "sparse"), (C1_LONG, "long_sparse")),
        title=lambda task: f"flip-flop, {task.length} tokens",
        figure=lambda task: f"flip_flop_{task.length}",
        caption=lambda task: (
            f"Flip-flop: error of reads by test set (CoPE table 2, left). {100 * task.ignore:g} % "
            f"of instructions are ignored in training, {100 * task.sparse:g} % in sparse and "
            f"{100 * task.dense:g} % in dense test sets; sequences have {task.length} tokens, in "
            f"long test sets {task.longest_test}."
        ),
        scale=Scale(4, 256, None, "10,000 steps of 16 sequences"),  # sec. 5.1, appendix C
    ),
    "flip-flop",
)

# ---- selective copy ------------------------------------------------------------------------------

OUTSIDE = ("dense", "sparse")
LARGEST = "CoPE's largest error with as many, half and twice the blanks"
SMALLEST = "RoPE's smaller error with half and with twice the blanks"
C2 = Claim(
    "C2",
    "selective copy: CoPE makes no errors in and out of distribution, RoPE fails out",
    "CoPE table 2",
    "0 / 100 %",
    All(AtMost(LARGEST, 1.0, " %"), AtLeast(SMALLEST, 50.0, " %")),
    shows_control=True,
)
C2_ABSOLUTE = Claim(
    "C2",
    "selective copy, half and twice the blanks: CoPE below absolute positions in error",
    "CoPE table 2",
    "0, 0 / 25.6, 85.2 %",
    LowerError("CoPE's error with half and with twice the blanks, each,", (RIVALS["learned"],)),
    "absolute",
)


def copies_without_errors(claim: Claim, alike: Alike, test_set: str) -> Evidence:
    """Return the evidence on C2 over all test sets, or on its part about absolute positions on
    `test_set`.
    """
    if claim is not C2:
        return lower_error(claim, alike, test_set)
    cope, rope = alike.given[COPE], alike.given.get("rope")
    if rope is None:
        return unmeasured(claim, cope.name, missing(["rope"], cope.configuration.task))
    sets = (IN_DISTRIBUTION, *OUTSIDE)
    # In floating point, 100 (1 - 0.99) is slightly more than 1, so round before comparing.
    own, other = (
        np.round([100 * errors_of(each, name).mean for name in sets], 9) for each in (cope, rope)
    )
    worst = errors_of(cope, sets[int(own.argmax())])
    shown = [
        f"{name} {', '.join(f'{error:.3g}' for error in errors)} %"
        for name, errors in (("CoPE", own), ("RoPE", other))
    ]
    return evidence(
        claim,
        cope.name,
        "largest error of the three test sets, %",
        {LARGEST: own.max(), SMALLEST: other[1:].min()},
        **numbers_of(worst, 100),
        control="rope " + ", ".join(f"{error:.3g} %" for error in other),
        note=note([cope, rope], f"in distribution, {' and '.join(OUTSIDE)}: {', '.join(shown)}"),
    )


SELECTIVE_COPY = experiment(
    ErrorTask(
        "selective_copy",
        SCHEMES,
        ((C2, ""), *((C2_ABSOLUTE, name) for name in OUTSIDE)),
        title=lambda task: "selective copy",
        figure=lambda task: "selective_copy",
        caption=lambda task: (
            "Selective copy: share of sequences that are not copied exactly (CoPE table 2, right). "
            f"{task.copied} symbols out of an alphabet of {task.symbols} are copied, with as many "
            f"blanks as in training ({task.blanks}), half as many (dense) and twice as many "
            "(sparse)."
        ),
        scale=Scale(2, 64, None, "100,000 steps"),  # sec. 5.2
        tabulate=copies_without_errors,
    ),
    "selective copy",
)

# ---- counting ------------------------------------------------------------------------------------

CONTEXTS = ("longer", "shorter")
_BY_VARIABLES = {
    called: (f"counting/cope{variables}_256", f"counting/cope{variables}")
    for called, variables in (("1 variable", ""), ("3", "_3"), ("5", "_5"))
}
"""Checkpoints that decide, by number of variables. If both exist, those trained with 256 operations
come first: with 64, longer contexts are hardly longer.
"""
C3 = Claim(
    "C3",
    "counting 1, 3 and 5 variables: CoPE below the others in error",
    "CoPE table 3",
    "0.0 / 1.2 / 7.4 %",
    LowerError("CoPE's error for a number of variables"),
    shows_control=True,
    about=_BY_VARIABLES,
)
C3_CONTEXTS = Claim(
    "C3",
    "counting in longer and shorter contexts than trained on: CoPE below the others in error",
    "CoPE table 4",
    "0.0, 4.0 / 8.8, 34.1 %",
    LowerError(
        "with weights 100 (longer contexts) and 10 (shorter ones) of pass, each, CoPE's error"
    ),
    part="contexts",
    about=_BY_VARIABLES,
)
C3_BALANCED = Claim(
    "C3",
    "counting, all values as frequent: CoPE below the others in error",
    C3.source,
    "none",
    LowerError(
        "with values that are equally frequent, CoPE's error in contexts as in training, "
        "longer and shorter, each,"
    ),
    part="balanced",
)


@dataclass(frozen=True)
class CountingOptions(ScoreOptions):
    """The amount of scoring. Raises InputError for too few prompts."""

    counting_count: Count = 2000
    """Number of prompts in every test set of counting."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.counting_count < 2:
            raise InputError(
                f"counting_count is {self.counting_count}; wanted at least 2 prompts, for an error"
            )


COUNTING = experiment(
    ErrorTask(
        "counting",
        [
            f"{scheme}{variables}{size}"
            for size in ("_256", "")
            for variables in ("", "_3", "_5")
            for scheme in SCHEMES
        ],
        (
            (C3, IN_DISTRIBUTION),
            *((C3_CONTEXTS, name) for name in CONTEXTS),
            *((C3_BALANCED, f"{BALANCED}{name}") for name in (IN_DISTRIBUTION, *CONTEXTS)),
        ),
        title=lambda task: f"counting {task.variables} variable{'s' if task.variables > 1 else ''}",
        figure=lambda task: f"counting_{task.operations}",
        caption=lambda task: (
            f"Counting, up to {task.operations} operations: share of sequences whose value is "
            "wrong (CoPE table 3, 4), where the operation pass, which changes no value, is drawn "
            f"as often as in training (weight {task.pass_weight:g}), more often, so that contexts "
            f"are longer ({task.longer_pass_weight:g}), or less often, so that they are shorter "
            f"({task.shorter_pass_weight:g}); balanced: all values equally frequent."
        ),
        scale=Scale(training="10,000 sequences of up to 512 operations"),  # sec. 5.3
        besides=("variables",),
        count=lambda options: options.counting_count,
    ),
    "counting",
)
