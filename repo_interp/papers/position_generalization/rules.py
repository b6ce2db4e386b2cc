"""Claims P1 to P7 of Position Generalization, and the numbers by which they are judged.

Not blind: when the thresholds were written, an exploratory run on one half-trained checkpoint had been seen (P1, P2, P5, P6, early KL).
The paper speaks of approximations and marginal effects; each threshold below is the weakest reading of its own words:
"the great majority of the variance" is half of it, "a few" a quarter of the components, "marginal" two per cent of log perplexity.
The rules of P6 on other tasks' scores, and of learned absolute positions against RoPE, were written when ten prompts of niah/repo and
eight of language/rope had been seen, and nothing of their twins. Twins: checkpoints of the same task; what is compared is in the same
unit for both, nats a target over targets that no move touched, the same tokens moving in both, draw by draw.
At short lengths random weights are fitted by chance: 3 n axes for n^2 / 2 pairs give r of about sqrt(6 / n).

Knows nothing about models, runs or figures.
"""

from __future__ import annotations

import math

from repo_interp.papers.kit.claims import Claim

MAJORITY = math.sqrt(0.5)
"""r of a fit that explains half of the variance."""
LAW = 0.9
CLOSED = 0.9
CHANCE = 0.2
FEW = 0.25
HEADS = 0.5
MARGINAL = 0.02
KEPT = 0.5
SIGNIFICANT = 2.0
TEXT = (0.05, 5)
"""Share of tokens and distance at which text order is judged; the same for the order of features."""
OFFSET = (0.1, 10)

SOURCE = "Position Generalization"
P1 = Claim(
    "P1",
    "logits are a sum of a distance, a query and a key axis",
    f"{SOURCE} sec. 3.1",
    "0.8650",
    f"mean r over heads and prompts at least {MAJORITY:.3f}: most of the variance",
)
P2 = Claim(
    "P2",
    "fake-distance logits are a sum of a position and a semantic axis, in every layer",
    f"{SOURCE} sec. 3.2",
    "0.9470 (0.914 - 0.967 over layers)",
    f"mean r over heads and prompts at least {LAW} in every layer that rotates; others are 1 by construction and do not count",
)
P3 = Claim(
    "P3",
    "... and near 0 for random weights: learned, not built in",
    f"{SOURCE} sec. 3.2",
    "0.028",
    f"three-axis r of the same decoder with random weights at most {CHANCE}, and at most half of the trained one's",
)
P4 = Claim(
    "P4",
    "a few slow dominating components with large, stable means",
    f"{SOURCE} sec. 3.4, fig. 4",
    "figure",
    f"at least {100 * HEADS:.0f} % of heads have some, and no more than {100 * FEW:.0f} % of their components, and more heads than with "
    "random weights",
)
P5 = Claim(
    "P5",
    "the closed form f + g from those components alone gives the logits",
    f"{SOURCE} theorem 2",
    "0.959",
    f"mean r over the heads and prompts that have slow dominating components at least {CLOSED}",
)
P6_TEXT = Claim(
    "P6",
    "5 % of tokens reordered within 5: marginal effect",
    f"{SOURCE} fig. 5a, table 1",
    "42.53 -> 42.34 (accuracy)",
    f"log perplexity rises by at most {100 * MARGINAL:.0f} %",
)
P6_FEATURE = Claim(
    "P6 (features)",
    "5 % of keys exchanged within 5 in every layer: marginal effect",
    f"{SOURCE} fig. 5b, table 1",
    "42.53 -> 41.98 (accuracy)",
    f"log perplexity rises by at most {100 * MARGINAL:.0f} %",
)
P6_OFFSET = Claim(
    "P6 (positions)",
    "10 % of positions off by up to 10 in every layer: marginal effect",
    f"{SOURCE} fig. 5c, table 1",
    "42.53 -> 42.44 (accuracy)",
    f"log perplexity rises by at most {100 * MARGINAL:.0f} %",
)
_SCORE = f"the score falls by at most {100 * MARGINAL:.0f} % of itself"
P6_TASK = Claim("P6 (task)", f"{P6_TEXT.statement} on a task's score", P6_TEXT.source, P6_TEXT.paper_number, _SCORE)
P6_TASK_FEATURE = Claim(
    "P6 (task, features)", f"{P6_FEATURE.statement} on a task's score", P6_FEATURE.source, P6_FEATURE.paper_number, _SCORE
)
P6_TASK_OFFSET = Claim(
    "P6 (task, positions)", f"{P6_OFFSET.statement} on a task's score", P6_OFFSET.source, P6_OFFSET.paper_number, _SCORE
)
P6_LEARNED = Claim(
    "P6 (learned)",
    "a model with learned positions is more tolerant of reordered text than its RoPE twin",
    "ours",
    "none",
    f"{100 * TEXT[0]:.0f} % of tokens reordered within {TEXT[1]}: log perplexity of targets that no move touched rises less than that of a "
    f"RoPE model of the same task, by more than {SIGNIFICANT:g} standard errors over draws",
)
P7 = Claim(
    "P7",
    "attention outputs stay in distribution at longer lengths with LM-Infinite, not without",
    f"{SOURCE} table 2, fig. 6",
    "KL 1.2 against 6.5 at 5120",
    f"at the longest length, KL above that at the training length is at most {KEPT:g} of the plain model's, which is above 0, and log "
    "perplexity is lower",
)
CLAIMS = (P1, P2, P3, P4, P5, P6_TEXT, P6_FEATURE, P6_OFFSET, P6_TASK, P6_TASK_FEATURE, P6_TASK_OFFSET, P6_LEARNED, P7)
