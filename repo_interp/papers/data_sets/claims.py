"""What the papers say about data sets that cannot come with the package, and the rules; written before anything was measured.

above(a, b)     mean score of a - mean score of b > 2 standard errors, of the differences question by question
learned         the better of two scores is at least `FLOOR`; below it nobody answers, and nothing can be said
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from repo_interp.papers.kit.claims import Claim
from repo_interp.papers.position_generalization.rules import MARGINAL, TEXT
from repo_interp.positions.layouts import LEARNED

FLOOR = 0.02
"""Score, from 0 to 1."""
_ABOVE = "mean score above RoPE's on the same questions by more than 2 standard errors"
_REPO, _HOPE = tuple(LEARNED), ("hope",)


@dataclass(frozen=True)
class Comparison:
    """A claim that some schemes answer a data set better than RoPE, or as well."""

    claim: Claim
    data_set: str
    schemes: tuple[str, ...]
    metrics: tuple[str, ...]
    """Which of the data set's metrics; the mean over all rows with one of them."""
    equal: str = "above"
    """ "above": above RoPE. "not below": RoPE is not above."""


_LONG = ("F1", "ROUGE-L", "classification", "retrieval", "count", "edit similarity")
COMPARISONS = (
    Comparison(
        Claim("R9 (HybridQA)", "tables: HybridQA exact match above RoPE", "RePo table 2", "26.70 against 24.43", _ABOVE),
        "hybridqa",
        _REPO,
        ("exact match",),
    ),
    Comparison(
        Claim("R9 (LongBench)", "LongBench above RoPE, with YaRN beyond L", "RePo table 3", "27.86 against 20.93", _ABOVE),
        "longbench",
        _REPO,
        _LONG,
    ),
    Comparison(
        Claim(
            "R9 (MMLU-Pro)",
            "short tasks as good as RoPE's: MMLU-Pro",
            "RePo table 5",
            "13.52 against 13.77",
            "RoPE's mean accuracy on the same questions is not above by more than 2 standard errors",
        ),
        "mmlu_pro",
        _REPO,
        ("accuracy",),
        "not below",
    ),
    Comparison(
        Claim("H6 (few-shot)", "few-shot following above RoPE: GLUE", "HoPE table 2", "79.20 against 54.10", _ABOVE),
        "glue",
        _HOPE,
        ("following",),
    ),
    Comparison(
        Claim("H6 (LongBench)", "LongBench above RoPE", "HoPE table 5", "24.04 against 15.75 (mean of 6 tasks)", _ABOVE),
        "longbench",
        _HOPE,
        _LONG,
    ),
    Comparison(
        Claim("H6 (MMLU-Pro)", "MMLU-Pro above RoPE", "HoPE table 4", "12.74 against 12.60", _ABOVE),
        "mmlu_pro",
        _HOPE,
        ("accuracy",),
    ),
)
P6_QASPER = Claim(
    "P6 (Qasper)",
    f"{100 * TEXT[0]:.0f} % of tokens reordered within {TEXT[1]}: marginal effect on Qasper",
    "Position Generalization table 1",
    "42.53 -> 42.34",
    f"F1 falls by at most {100 * MARGINAL:.0f} % of itself",
)
CLAIMS = (*(one.claim for one in COMPARISONS), P6_QASPER)
CLAIMS_OF: Mapping[str, tuple[Claim, ...]] = {
    "repo": tuple(claim for claim in CLAIMS if claim.id.startswith("R")),
    "hope": tuple(claim for claim in CLAIMS if claim.id.startswith("H")),
    "position-generalization": (P6_QASPER,),
}
"""By paper, as `papers.catalogue` names them."""


def needed(name: str) -> str:
    """What a user has to give for a row that has no data."""
    return f"needs data: give --data {name}=FILE"
