"""Verdicts of an experiment as a page has them: from a table of evidence that was written and read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from position_papers.kit.cache import Cache
from position_papers.kit.experiment import Experiment, Result, run
from position_papers.kit.judge import table
from position_papers.kit.judge.claims import Evidence, Verdict, corrected_together
from position_papers.kit.judge.claims import evidence as evidence_of
from position_papers.kit.judge.claims import unmeasured as silent_evidence


def judged(evidence: Iterable[Evidence]) -> list[Verdict]:
    """Each by itself, without Holm's correction; several seeds of a claim are one verdict."""
    told = list(evidence)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / table.EVIDENCE
        table.write_evidence(table.evidence_table(told, [""] * len(told)), file)
        read = table.read_evidence(file)
    claims = {own.claim.label: own.claim for own in told}
    rows = read.groupby("row", sort=False)
    return [table.judge(claims[part["claim"].iloc[0]], part) for _, part in rows]


def verdict(*given, **named) -> Verdict:
    """The verdict on what `evidence` takes."""
    (found,) = judged([evidence_of(*given, **named)])
    return found


def verdicts_of(*results: Result) -> list[Verdict]:
    """Those of results, rows of one experiment corrected together."""
    found: list[Verdict] = []
    for place, result in enumerate(results):
        if any(each.experiment is result.experiment for each in results[:place]):
            continue
        alike = [each for each in results if each.experiment is result.experiment]
        told = [own for each in alike for own in each.evidence]
        found += corrected_together(judged(told), result.experiment.needs.zoo)
    return found


def unmeasured(*given, **named) -> Verdict:
    """The verdict that a claim cannot be measured."""
    (found,) = judged([silent_evidence(*given, **named)])
    return found


def results_of(
    experiment: Experiment, subjects: Iterable[Any], options: Any = None, cache: Cache | None = None
) -> list[Result]:
    """The results of an experiment, whose progress nobody reads; without a cache nothing is kept."""
    kept = Cache() if cache is None else cache
    return list(run(experiment, list(subjects), options, kept, lambda text: None))


def notes_of(verdict: Verdict) -> str:
    """What is noted beside a verdict, as one text."""
    return "; ".join(verdict.notes)
