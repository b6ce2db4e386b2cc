"""The claims of the RePo paper (Li et al. 2026), R1 to R9, each with the rule that judges it in words.

A claim of several parts that can come out differently has a row a part. The thresholds are those of `repo_rules`. Knows nothing about
what was measured.
"""

from __future__ import annotations

from repo_interp.papers.kit.claims import Claim
from repo_interp.papers.kit.lead import SIGNIFICANT
from repo_interp.papers.repo import rules

_ERRORS = f"{SIGNIFICANT:g} standard errors (over seeds where there are several of both, else over the same prompts)"

R1 = Claim(
    "R1",
    "text reversal, longer texts than trained on (21-30 words): RePo above RoPE and NoPE",
    "RePo app. C, fig. 7",
    "figure",
    f"mean exact match over these lengths is above that of RoPE and of NoPE by more than {_ERRORS}",
)
R1_TRAINED = Claim(
    "R1 (trained lengths)",
    "text reversal, lengths trained on (to 20 words): all schemes near perfect",
    "RePo app. C, fig. 7",
    "figure",
    f"mean exact match over these lengths, and over seeds, is at least {rules.NEAR_PERFECT}",
)
R2 = Claim(
    "R2",
    "mirror effect: a word and its reversed copy get the same position",
    "RePo fig. 6",
    "layers 0, 2, 3 of 4",
    f"in a layer other than 0, |dz| of copies is at most {rules.MIRROR_RANDOM} of that to other words, at most {rules.MIRROR_WORD} of "
    f"that to the same word elsewhere, and the two positions correlate by {rules.MIRROR_CORRELATION} or more",
)
R3 = Claim(
    "R3",
    "opening instruction tokens get near-constant positions",
    "RePo fig. 6",
    "layers 1 to 3 of 4",
    f"the median over layers other than 0 of their range is at most {rules.FLAT} of the range of equally many consecutive words",
)
R4 = Claim(
    "R4",
    "attention mass per token from the generated tokens' own rows: needle RePo > RoPE > NoPE, query RePo lowest",
    "RePo table 4",
    "needle 2.013 / 1.754 / 1.572, query 1.046 / 1.123 / 1.135 x 0.01",
    f"each of the four differences is above {SIGNIFICANT:g} standard errors over the same prompts",
)
R4_PRODUCING = Claim(
    "R4 (producing rows)",
    "the same from the rows that produced the generated tokens, one earlier",
    "RePo table 4",
    R4.paper_number,
    R4.rule,
)
R5 = Claim(
    "R5",
    "the range of positions grows with the context but stays far below its length; it is uneven over heads",
    "RePo fig. 2",
    "figure",
    f"from half the training length to all of it the mean range grows by more than {SIGNIFICANT:g} standard errors; "
    f"no head's range is above {rules.FAR_BELOW} of the length; standard deviation over mean of the heads is at least {rules.UNEVEN}",
)
R6 = Claim(
    "R6",
    "chunks of positions: hybrid dominates, mono is rare, constant more frequent than mono",
    "RePo fig. 3",
    "constant 22 %, mono 4 %",
    f"at least {100 * rules.HYBRID:g} % hybrid, at most {100 * rules.RARE:g} % mono, more constant than mono (chunks of 16, epsilon 0.2)",
)
R7 = Claim(
    "R7",
    "RePo adds few parameters",
    "RePo sec. 5.4",
    "0.9 %",
    f"at the paper's size (OLMo-2 1B, from layer 5) at most {100 * rules.PARAMETERS:g} % of the parameters beside the input embedding",
)
R7_TIME = Claim(
    "R7 (time)",
    "generating a token takes about as long with RePo as with RoPE",
    "RePo table 6",
    "0.0182 s against 0.0176 s: +3.4 %",
    f"on fresh models of equal size, measured in turns, the median ratio of times is at most {rules.SLOWER}",
)
R8 = Claim(
    "R8",
    "positions align with the examples of a few-shot prompt",
    "RePo fig. 8",
    "figure",
    f"mean over the learned heads, both the share of position variance between segments and the boundary F1 of position jumps are "
    f"above those of shuffled segment edges by more than {SIGNIFICANT:g} standard errors over prompts",
)
R8_CODE = Claim("R8 (lines of code)", "positions align with the lines of code", R8.source, R8.paper_number, R8.rule)
R9 = Claim(
    "R9",
    "needle in a haystack at the training length: RePo above RoPE",
    "RePo table 1",
    "91.3 against 85.9",
    f"RePo is above by more than {_ERRORS}; not measurable where both are at {rules.CEILING} or more",
)
R9_LONGER = Claim(
    "R9 (longer)",
    "needle in a haystack at twice and four times the training length, with YaRN: RePo above RoPE",
    "RePo fig. 1, 5",
    "figure",
    f"RePo is above by more than {SIGNIFICANT:g} standard errors over the same prompts at every length where not both are at "
    f"{rules.CEILING} or more; not measurable where there is none",
)
R9_START = Claim(
    "R9 (start layer)",
    "needle in a haystack: robust to the layer that RePo starts at",
    "RePo fig. 4",
    "figure",
    f"the mean score over L, 2L and 4L (YaRN beyond L) differs by at most {rules.ROBUST} over the starting layers; not measurable where "
    f"all are at {rules.CEILING} or more",
)
CLAIMS = (R1, R1_TRAINED, R2, R3, R4, R4_PRODUCING, R5, R6, R7, R7_TIME, R8, R8_CODE, R9, R9_LONGER, R9_START)
"""All of them, in the paper's order."""
