"""The findings of a run, in sentences.

A finding states a number that passed its threshold or its null, and names the head, prompt and
token.

    finding = sentence + evidence (the numbers, the threshold and the null) + its place        `View.findings` returns those of one group

`findings` sorts the findings of all views of a run by `weight` and keeps a few per group, so that
no group hides another. Findings below `DETAIL` come last, and never on the first screen. Findings
of a comparison begin with the scores of the runs on their task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import count

import xarray as xr

from repo_interp.errors import InputError, warn
from repo_interp.plots.lacking import reading
from repo_interp.plots.marks import Finding, has_runs
from repo_interp.plots.view import View
from repo_interp.plots.view_catalogue import views_of
from repo_interp.values import CountOrNone, checked

MOST = 5
"""Findings of a first screen."""
MOST_OF_GROUP = 2
"""Most findings of one group before all other groups are listed."""
DETAIL = 0.3
"""Weight below which a finding is a detail of another finding."""
EVERY = 10_000
"""More findings than a run has."""
_OPENING = (
    "read the differences below with this in mind: heads of a model that fails at the task may "
    "differ because it fails"
)


class Findings(list[Finding]):
    """Findings in order, printed as sentences."""

    def __str__(self) -> str:
        return "\n".join(f"{place}. {finding}" for place, finding in enumerate(self, start=1))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The sentences as a list, each with its evidence below, for a notebook."""
        rows = (
            f"<li>{escape(str(finding))}<br><small>{escape(finding.evidence)}</small></li>"
            for finding in self
        )
        return f"<ol>{''.join(rows)}</ol>"


def findings(run: xr.DataTree, most: int | None = None) -> Findings:
    """Collect the findings of a run, the heaviest first.

    The two heaviest findings of every group precede all others. A warning names a variable that is
    missing in the run, and the group that loses its findings.

    Args:
        run: Tree of a run, a group per measure.
        most: Largest number of findings to return; None: five without details, for a first screen.

    Returns:
        Findings without a sentence twice; `print` shows sentences, a notebook the evidence too.
    """
    most, opening = None if most is None else checked(most, CountOrNone, "most"), []
    if has_runs(run) and "performance" in run.attrs:
        group = "predictions" if "predictions" in run.children else next(iter(run.children))
        opening = [Finding(str(run.attrs["performance"]), _OPENING, 1, group)]
    ranked: list[tuple[bool, bool, float, int, Finding]] = []
    order, views = count(), views_of(run)
    for view in views:
        if opening and view.group == opening[0].group == "predictions":
            continue  # the opening says it
        try:
            with reading(run, view.group):
                given = sorted(
                    (_completed(run, views, finding) for finding in view.findings(run)),
                    key=lambda finding: -finding.weight,
                )
        except InputError as error:
            # Of a run that lacks something the rest is found
            warn(f"no findings of {view.group}: {error}")
            continue
        ranked += [
            # Differences of runs are weighted only by their size. The count keeps the order of
            # views among equal weights, since findings cannot be compared.
            (
                not has_runs(run) and finding.weight < DETAIL,
                place >= MOST_OF_GROUP,
                -finding.weight,
                next(order),
                finding,
            )
            for place, finding in enumerate(given)
        ]
    ranked.sort(key=lambda entry: entry[:4])
    if most is None:
        most, ranked = MOST, [entry for entry in ranked if not entry[0]]
    by_sentence: dict[str, Finding] = {}
    for finding in (*opening, *(entry[-1] for entry in ranked)):
        by_sentence.setdefault(finding.sentence, finding)
    return Findings([*by_sentence.values()][:most])


def _completed(run: xr.DataTree, views: Sequence[View], finding: Finding) -> Finding:
    """The finding with the clauses that other groups of the run add to it."""
    clauses = "".join(view.clause(run, finding) for view in views if view.group != finding.group)
    return replace(finding, sentence=finding.sentence + clauses)
