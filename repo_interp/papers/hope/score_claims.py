"""The claims of HoPE's experiments (Chen et al. 2025, sec. 4 and 5), H6 and H7, each with the rule that judges it in words.

The thresholds are those of `hope_score_rules`. Knows nothing about what was measured.
"""

from __future__ import annotations

from repo_interp.papers.hope import score_rules as rules
from repo_interp.papers.kit.claims import Claim
from repo_interp.papers.kit.score_rules import MATERIAL

_MORE = "by more than 2 standard errors (over seeds where both have several, else over prompts)"

H6 = Claim(
    "H6",
    "copy task beyond L: HoPE above RoPE, ALiBi, KERPLE, FIRE",
    "HoPE table 1",
    "60.23 against 23.80",
    "mean exact match over the numbers of sequences that are longer than training is above that of RoPE and of each of ALiBi, KERPLE, "
    f"FIRE that is there, {_MORE}; no verdict where no scheme reaches {100 * rules.LEARNED:g} %",
)
H6_PERPLEXITY = Claim(
    "H6 (perplexity)",
    "perplexity beyond L: HoPE below RoPE",
    "HoPE fig. 5",
    "figure; HoPE 8.52 at L, 13.03 at 8 L",
    f"log perplexity at the longest length is below RoPE's, {_MORE} and by more than "
    f"{100 * MATERIAL:g} %; the paper itself sees ALiBi and KERPLE ahead in perplexity",
)
H6_PI = Claim(
    "H6 (PI)",
    "copy task beyond L with position interpolation: HoPE above RoPE",
    "HoPE table 1",
    "60.80 against 27.10",
    f"as H6, both with position interpolation by the factor n / L, {_MORE}",
)
H6_YARN = Claim(
    "H6 (YaRN)",
    "copy task beyond L with YaRN: HoPE above RoPE",
    "HoPE table 1",
    "68.63 against 54.20",
    f"as H6, both with YaRN by the factor n / L, {_MORE}",
)
H7 = Claim(
    "H7",
    "ablations: replacing the activated components alone > the low ones alone > neither",
    "HoPE table 3",
    "38.30 / 24.47 / 23.80",
    f"mean exact match of the copy task over all test sets: AB1 above AB2, {_MORE}, and AB2 not below RoPE by as much; no verdict where "
    f"no scheme reaches {100 * rules.LEARNED:g} %",
)
H7_REMOVED = Claim(
    "H7 (removed)",
    "ablations: removing both kinds without position-independent ones in their place is worst",
    "HoPE table 3",
    "17.53 against 23.80",
    f"mean exact match of the copy task over all test sets: AB3 below AB1, AB2 and RoPE, each, {_MORE}; no verdict where no scheme reaches "
    f"{100 * rules.LEARNED:g} %",
)
CLAIMS = (H6, H6_PERPLEXITY, H6_PI, H6_YARN, H7, H7_REMOVED)
