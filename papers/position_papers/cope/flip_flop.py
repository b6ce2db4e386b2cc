"""Flip-flop, in and out of distribution (CoPE sec. 5.1, table 2, 7): C1.

A sequence of bits that are written, ignored and read again; what is asked of a read is the bit that was written last. Out of
distribution more instructions (sparse) or fewer (dense) are ignored than in training. Our sparse test set of the training length is nearly
solved by every scheme; the longer one tells them apart, and is judged as a question of its own, after its scores were seen. Checkpoints
that were trained at another length are judged apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from position_papers.cope.errors import (
    COPE,
    SCHEMES,
    LowerError,
    error_table,
    errors_by_test_set,
    errors_caption,
    lower_error,
    measure,
    needs,
)
from position_papers.kit.claims import Claim, Verdict
from position_papers.kit.experiment import Drawing, Experiment
from position_papers.kit.scale import Scale
from position_papers.kit.scores import Scored, first_of
from position_papers.tasks.flip_flop import FlipFlop
from position_papers.training.trained import configured_task

SPARSE, LONG_SPARSE = "sparse", "long_sparse"

C1 = Claim(
    "C1",
    "flip-flop, out of distribution: CoPE below RoPE and absolute in error",
    "CoPE table 2, 7",
    "4.9 / 20.3 / 21.7 %",
    LowerError("CoPE's error on the sparse test set (98 % ignored)"),
)
C1_LONG = Claim(
    "C1",
    "flip-flop, longer and out of distribution: CoPE below RoPE in error (absolute positions end at the training length)",
    C1.source,
    "none",  # the paper's sequences are as long as those of training
    LowerError("CoPE's error on the long sparse test set"),
    "longer",
)


def judge(scored: Sequence[Scored]) -> Iterator[Verdict]:
    """The verdicts on C1, where a checkpoint has CoPE in every layer."""
    if first_of(scored, COPE) is not None:
        yield lower_error(C1, scored, SPARSE, f"error of reads on {SPARSE} test sequences, %")
        yield lower_error(C1_LONG, scored, LONG_SPARSE, "error of reads on long sparse test sequences, %")


def draw(scored: Sequence[Scored]) -> Iterator[Drawing]:
    """Errors by test set (table 2, left)."""
    task = configured_task(scored[0].configuration)
    assert isinstance(task, FlipFlop)
    table = error_table(scored)
    caption = (
        f"Flip-flop: error of reads by test set (CoPE table 2, left). {100 * task.ignore:g} % of instructions are ignored in training, "
        f"{100 * task.sparse:g} % in sparse and {100 * task.dense:g} % in dense test sets; sequences have {task.length} tokens, in long "
        f"test sets {task.longest_test}. {errors_caption(scored)}"
    )
    yield Drawing(f"flip_flop_{task.length}", errors_by_test_set({f"Flip-flop, {task.length} tokens": table}), caption, table)


FLIP_FLOP = Experiment(
    "flip-flop",
    (C1, C1_LONG),
    needs("flip_flop", [f"{scheme}{length}" for length in ("_256", "") for scheme in SCHEMES]),
    measure,
    judge,
    draw,
    Scale(4, 256, None, "10,000 steps of 16 sequences"),  # sec. 5.1, appendix C
)
