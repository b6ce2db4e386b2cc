"""What verdicts on scores have in common: how a comparison is said, and what is noted beside it.

Knows samples and leads; nothing about any paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from repo_interp.papers.kit.checkpoint_scores import Scored
from repo_interp.papers.kit.claims import UNMEASURED, Claim, Verdict
from repo_interp.papers.kit.lead import Lead
from repo_interp.papers.kit.recorded_scores import unequal_budgets
from repo_interp.papers.kit.score_rules import Sample


def common(sample: Sample, scale: float = 1.0) -> dict[str, Any]:
    """Spread, over what, and n of a verdict on `sample`, whose numbers are given times `scale`."""
    spread = None if sample.spread is None else scale * sample.spread
    return {"spread": spread, "spread_over": sample.over, "n": sample.count}


def said(leads: Mapping[str, Lead], word: str, unit: str, scale: float = 1.0) -> str:
    """Margins with their errors: "below rope by 3.1 (standard error 0.4 over 3 and 3 seeds)"."""
    return "; ".join(
        f"{word} {name} by {scale * lead.margin:.3g}{unit} (standard error {scale * lead.standard_error:.2g} over {lead.over})"
        for name, lead in leads.items()
    )


def noted(compared: Sequence[Scored], *texts: str) -> str:
    """`texts` that are not empty, with what differs in the budgets of the checkpoints that are compared."""
    budgets = unequal_budgets({one.name: one.configuration for one in compared})
    return "; ".join(text for text in (*texts, budgets) if text)


def no_verdict(claim: Claim, checkpoint: str, why: str) -> Verdict:
    """ "Not measurable here", and why."""
    return Verdict(claim, checkpoint, UNMEASURED, "", note=why)


def missing(wanted: Iterable[str], task: str) -> str:
    """That there is no checkpoint of some schemes of a task; "" where none is wanted."""
    names = ", ".join(wanted)
    return f"no checkpoint of {names} trained on {task} was given" if names else ""
