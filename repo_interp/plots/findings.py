"""The findings of a run, in sentences.

A finding states a number that passed its threshold or its null, and names the head, prompt and
token.

    finding = sentence + evidence (the numbers, the threshold and the null) + where to look        `View.findings` gives those of one group

`findings` orders those of all views of a run by `weight` and keeps a few of every group, so that no
group hides another. Those of a comparison begin with how well the runs do their task.
"""

from __future__ import annotations

from itertools import count

import xarray as xr

from repo_interp.errors import InputError, warn
from repo_interp.plots.lacking import reading
from repo_interp.plots.marks import Finding, has_runs
from repo_interp.plots.view_catalogue import views_of
from repo_interp.values import CountOrNone, checked

MOST = 8
"""Findings of a run."""
MOST_OF_GROUP = 4
"""Findings of one group, while other groups have some."""
_OPENING = (
    "read the differences below with this in mind: heads of a model that fails at the task may "
    "differ because it fails"
)


def findings(run: xr.DataTree, most: int = MOST) -> list[Finding]:
    """Collect the findings of a run, the heaviest first.

    The four heaviest of every group precede all others. A warning names a variable that the run
    lacks, and the group whose findings it costs.

    Args:
        run: Tree of a run, a group per measure.
        most: Largest number of findings to return.

    Returns:
        At most `most` findings.
    """
    most, opening = checked(most, CountOrNone, "most"), []
    if has_runs(run) and "performance" in run.attrs:
        group = "predictions" if "predictions" in run.children else next(iter(run.children))
        opening = [Finding(str(run.attrs["performance"]), _OPENING, 1, group)]
    ranked: list[tuple[bool, float, int, Finding]] = []
    order = count()
    for view in views_of(run):
        if opening and view.group == opening[0].group == "predictions":
            continue  # the opening says it
        try:
            with reading(run, view.group):
                given = sorted(view.findings(run), key=lambda finding: -finding.weight)
        except InputError as error:
            # Of a run that lacks something the rest is found
            warn(f"no findings of {view.group}: {error}")
            continue
        ranked += [
            # The count keeps the order of views among equal weights, since findings themselves do
            # not compare.
            (place >= MOST_OF_GROUP, -finding.weight, next(order), finding)
            for place, finding in enumerate(given)
        ]
    rest = [finding for *_, finding in sorted(ranked, key=lambda entry: entry[:3])]
    return [*opening, *rest][:most]
