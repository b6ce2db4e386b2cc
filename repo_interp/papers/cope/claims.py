"""The claims of CoPE's experiments (Golovneva et al. 2024, sec. 5), C1 to C6, each with the rule that judges it in words.

The thresholds are those of `cope_rules`. Knows nothing about what was measured.
"""

from __future__ import annotations

from repo_interp.papers.cope import rules
from repo_interp.papers.kit.claims import Claim
from repo_interp.papers.kit.score_rules import MATERIAL

_LOWER = "by more than 2 standard errors (over seeds where both have several, else over prompts)"

_LOWER_PERPLEXITY = f"{_LOWER} and by more than {100 * MATERIAL:g} %"

C1 = Claim(
    "C1",
    "flip-flop, out of distribution: CoPE below RoPE and absolute in error",
    "CoPE table 2, 7",
    "4.9 / 20.3 / 21.7 %",
    f"on the sparse test set (98 % ignored) CoPE's error is lower than that of RoPE and that of learned absolute positions, {_LOWER}",
)
C2 = Claim(
    "C2",
    "selective copy: CoPE makes no errors in and out of distribution, RoPE fails out",
    "CoPE table 2",
    "0 / 100 %",
    f"CoPE's error is at most {rules.SOLVED:g} % with as many, half and twice the blanks; RoPE's at least {rules.FAILED:g} % with half and "
    "with twice",
)
C3 = Claim(
    "C3",
    "counting 1, 3 and 5 variables: CoPE below the others in error",
    "CoPE table 3",
    "0.0 / 1.2 / 7.4 %",
    f"for a number of variables, CoPE's error is lower than that of RoPE and that of learned absolute positions, {_LOWER}; no verdict "
    f"where all are at most {rules.APART:g} %",
)
C3_CONTEXTS = Claim(
    "C3 (contexts)",
    "counting in longer and shorter contexts than trained on: CoPE below the others in error",
    "CoPE table 4",
    "0.0, 4.0 / 8.8, 34.1 %",
    f"with weights 100 and 10 of pass, each, CoPE's error is lower than that of RoPE and that of learned absolute positions, {_LOWER}; no "
    f"verdict where all are at most {rules.APART:g} %",
)
C4 = Claim(
    "C4",
    "perplexity: CoPE below relative below absolute",
    "CoPE table 5",
    "23.46 / 23.81 / 24.87",
    f"at the training length, CoPE's is lower than RoPE's (our relative one) and RoPE's lower than learned absolute positions', "
    f"{_LOWER_PERPLEXITY}",
)
C4_POSITIONS = Claim(
    "C4 (p_max)",
    "p_max = 16 suffices",
    "CoPE table 8",
    "23.22 / 23.46",
    f"a CoPE with p_max = {rules.POSITIONS} has at most {rules.SUFFICES:g} times the perplexity, at the training length, of the one with "
    "the largest p_max",
)
C5 = Claim(
    "C5",
    "contexts longer than trained on: CoPE degrades least",
    "CoPE fig. 3",
    "figure",
    f"from the training length to the longest, log perplexity rises less with CoPE than with RoPE (our relative one), "
    f"{_LOWER_PERPLEXITY}; absolute positions end at the training length",
)
C6 = Claim(
    "C6",
    "gates fall on separators",
    "CoPE fig. 6",
    "figure",
    f"in the head that stands out on half of the texts, on the other half separators have at least {rules.GATED:g} times the share of "
    f"the gates' sum of as many random tokens, which reach it in at most {rules.CHANCE:g} of the draws; and more times than with random "
    "weights",
)
C6_ATTENTION = Claim(
    "C6 (attention)",
    "attention from position alone stays within the last paragraph or section",
    "CoPE fig. 4",
    "figure",
    f"in the head and kind of segment that stand out on half of the texts, on the other half at least {rules.WITHIN:g} of it stays in the "
    f"query's own segment, as much as shuffled segments keep in at most {rules.CHANCE:g} of the draws, and further above them than with "
    "random weights",
)
CLAIMS = (C1, C2, C3, C3_CONTEXTS, C4, C4_POSITIONS, C5, C6, C6_ATTENTION)
