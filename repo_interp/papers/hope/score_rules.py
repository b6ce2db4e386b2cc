"""The rules by which claims H6 and H7 about HoPE's scores are judged, on plain numbers. Written before anything was measured.

    above       a difference is more than 2 standard errors (`score_rules`)
    beyond L    test sets whose prompts are longer than those of training

H6  copying: mean exact match beyond L of HoPE is above that of RoPE, ALiBi, KERPLE and FIRE, each that is there; RoPE must be.
    perplexity: log perplexity at the longest length of HoPE is below RoPE's, by more than half a per cent too. (In perplexity the paper
    sees ALiBi and KERPLE ahead, and calls this pseudo extrapolation, sec. 4.2.2; they are named, not judged.)
    with PI, with YaRN: the first rule for HoPE and RoPE, both extended.
H7  over all test sets, mean exact match: AB1 (activated replaced) above AB2 (low replaced), and AB2 not below RoPE by more than 2
    standard errors (the paper's own AB2 is 0.67 points above RoPE: no difference that could be told).
    removed: AB3 (both replaced by high frequencies, nothing independent of position) is below AB1, AB2 and RoPE.

A verdict on copying needs a best mean of at least `LEARNED`: below it nobody copies, and nothing can be compared.
Knows arrays only; nothing about checkpoints or figures.
"""

from __future__ import annotations

from collections.abc import Iterable

from repo_interp.papers.kit.lead import SIGNIFICANT, Lead

LEARNED = 0.05
"""Exact match."""
RIVALS = ("rope", "alibi", "kerple", "fire")
"""The schemes that HoPE is compared with, as layouts."""
ABLATIONS = ("hope_ab1", "hope_ab2", "hope_ab3")


def learned(means: Iterable[float]) -> bool:
    """Whether anybody copies at all."""
    return max(means) >= LEARNED


def not_below(lead: Lead) -> bool:
    """Whether one thing is above another, or below it by no more than chance."""
    return bool(lead.margin >= -SIGNIFICANT * lead.standard_error)


def ablations_in_order(activated_above_low: Lead, low_above_neither: Lead) -> bool:
    """H7: activated only > low only > neither."""
    return activated_above_low.holds and not_below(low_above_neither)
