"""The rules by which claims C1 to C6 about CoPE are judged, on plain numbers. Written before anything was measured.

    lower       a difference is more than 2 standard errors (`score_rules`); of log perplexities also half a per cent
    apart       some compared error is above `APART`: where all are below, the task tells nothing apart, and no verdict is given

C1  flip-flop, sparse test set: CoPE's error is lower than RoPE's and absolute positions'.
C2  selective copy: CoPE's error is at most `SOLVED` on every test set; RoPE's is at least `FAILED` on both that it was not trained on.
C3  counting, as many variables as a checkpoint was trained with: CoPE's error is lower than that of every other of RoPE and absolute;
    in distribution, and, as a claim of its own, with longer and with shorter contexts, each of them.
C4  perplexity at the training length: CoPE's lower than RoPE's ("relative"), RoPE's lower than absolute's.
    p_max: a CoPE with 16 positions has at most `SUFFICES` of the perplexity more than the one with the most.
C5  perplexity's rise from the training length to the longest: CoPE's is smaller than that of every other of the paper's kinds.
C6  gates: of all heads the one whose separators' share of the gates is furthest above that of as many random tokens is chosen on one
    half of the texts; on the other half this share is at least `GATED` times theirs, they reach it in at most `CHANCE` of the draws,
    and the ratio is above that of a twin with random weights, its head chosen in the same way.
    attention: likewise the head, and kind of segment, whose attention from position alone stays in the query's own segment furthest
    above what shuffled segments keep. At least `WITHIN` of it stays there, shuffled segments reach it in at most `CHANCE` of the
    draws, and it is further above them than in the twin. (No ratio here: a head that never left its segment would keep most of its
    attention in a shuffled one too, as both hold the nearest tokens.)

Knows arrays only; nothing about checkpoints or figures.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

APART = 1.0
"""Per cent."""
SOLVED = 1.0
"""Per cent of error that counts as none."""
FAILED = 50.0
"""Per cent of error that counts as failing."""
SUFFICES = 1.01
GATED = 2.0
CHANCE = 0.05
WITHIN = 0.5
POSITIONS = 16
"""p_max of the paper's table 8."""


def apart(errors: Float[np.ndarray, " checkpoint"]) -> bool:
    """Whether errors in per cent are not all so small that nothing can be compared."""
    return bool(np.round(errors, 9).max() > APART)  # 100 (1 - 0.99) is a little more than 1


def solved_where_other_fails(cope: Float[np.ndarray, " test_set"], other_outside: Float[np.ndarray, " test_set"]) -> bool:
    """C2: whether errors in per cent are none for one and failures for the other, out of distribution."""
    return bool((np.round(cope, 9) <= SOLVED).all() and (np.round(other_outside, 9) >= FAILED).all())


class Chosen(NamedTuple):
    """What stood out on one half of the prompts, on the other half."""

    place: tuple[int, ...]
    """Where it is: layer, head, and kind where there are kinds."""
    observed: float
    """Mean over the other half."""
    control: float
    """The same for random separators or shuffled segments."""
    chance: float
    """Share of their draws that are at least as high, mean over the other half."""
    by_prompt: Float[np.ndarray, " prompt"]

    @property
    def ratio(self) -> float:
        """Over its control; 0 where the control is 0."""
        return self.observed / self.control if self.control > 0 else 0.0

    @property
    def margin(self) -> float:
        """Above its control."""
        return self.observed - self.control


def stands_out(
    observed: Float[np.ndarray, "prompt *place"],
    control: Float[np.ndarray, "prompt *place"],
    chance: Float[np.ndarray, "prompt *place"],
) -> Chosen | None:
    """The place whose observed value is furthest above its control on even prompts, measured on odd ones.

    A prompt without separators or segments has NaN; a place needs two prompts with values in each half. None where none has.
    """
    lead = observed - control
    enough = np.isfinite(lead[::2]).sum(0) >= 2
    enough &= np.isfinite(lead[1::2]).sum(0) >= 2
    if not enough.any():
        return None
    means = np.where(np.isfinite(lead[::2]), lead[::2], 0.0).sum(0) / np.maximum(np.isfinite(lead[::2]).sum(0), 1)
    place = np.unravel_index(np.where(enough, means, -np.inf).argmax(), enough.shape)
    other = [array[(slice(1, None, 2), *place)] for array in (observed, control, chance)]
    known = np.isfinite(other[0])
    value, expected, reached = (float(array[known].mean()) for array in other)
    return Chosen(tuple(int(index) for index in place), value, expected, reached, other[0][known])


def gated(trained: Chosen, random: Chosen | None) -> bool:
    """C6: whether gates fall on separators."""
    return trained.ratio >= GATED and trained.chance <= CHANCE and (random is None or trained.ratio > random.ratio)


def stays_within(trained: Chosen, random: Chosen | None) -> bool:
    """C6: whether attention from position alone stays in the last segment."""
    apart_from_random = random is None or trained.margin > random.margin
    return trained.observed >= WITHIN and trained.chance <= CHANCE and apart_from_random
