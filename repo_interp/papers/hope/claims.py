"""The claims of HoPE's analysis (Chen et al. 2025, sec. 3), H1 to H5, each with the rule that judges it in words.

The thresholds are those of `hope_rules`. Knows nothing about what was measured.
"""

from __future__ import annotations

from repo_interp.papers.hope import rules
from repo_interp.papers.kit.claims import Claim

H1 = Claim(
    "H1",
    "mean logit by distance is U-shaped for learned APE, RoPE and KERPLE, no global decay",
    "HoPE fig. 2",
    "figure",
    f"smoothed over L/16 distances, the minimum lies strictly inside and the right end rises from it by at least {rules.RISE} of the "
    f"fall on the left, both above {rules.SIGNIFICANT:g} standard errors",
)
H2 = Claim(
    "H2",
    "components with theta in (pi/L, 2 pi/L) have outstanding VAF",
    "HoPE fig. 3b, 7",
    "figure",
    f"their mean VAF is at least {rules.OUTSTANDING:g} standard deviations above the mean of the other components, and further above "
    "than with random weights",
)
H3 = Claim(
    "H3",
    "the VAF of the activated components falls during training",
    "HoPE fig. 3b",
    "figure",
    f"rank correlation with the step at most {rules.FALLING}, and the last third of steps below the first by more than "
    f"{rules.SIGNIFICANT:g} standard errors",
)
H4 = Claim(
    "H4",
    "beyond L the activated components leave their training range in the first layer",
    "HoPE fig. 3c",
    "figure",
    f"at {rules.OUTSIDE} or more of the distances in [L, 2L) their value is outside the range within L, widened by {rules.TOLERANCE}",
)
H4_UPPER = Claim(
    "H4 (wording)",
    "beyond L the activated components are in the upper half-cycle in the first layer",
    "HoPE sec. 3.3.2 (2)",
    "figure",
    f"above the middle of their range at {rules.UPPER} or more of the distances in [L, 2L), and {rules.UPPER_MORE} more often than "
    "in the second half of [0, L)",
)
H5 = Claim(
    "H5",
    "components of lower frequency than the activated ones are near constant",
    "HoPE fig. 3a",
    "figure",
    f"peak to peak within L, their median is at most {rules.CONSTANT} of the mean of the activated components",
)
U_SHAPED = ("learned", "rope", "kerple")
"""The schemes that H1 is about."""
