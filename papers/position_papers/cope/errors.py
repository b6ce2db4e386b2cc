"""Errors of position schemes by test set: what CoPE's claims about flip-flop, selective copy and counting share (sec. 5.1 to 5.3).

    error = 100 (1 - score) per cent; score: share of reads that are right (flip-flop), exact match (the other two)

"Relative" in the paper is a learned vector per distance; RoPE stands for it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D

from position_papers.kit.cache import Cache
from position_papers.kit.claims import Claim, Verdict, unmeasured, verdict
from position_papers.kit.experiment import Needs, trained_alike
from position_papers.kit.rules import Above
from position_papers.kit.samples import Sample, between, in_words, numbers_of
from position_papers.kit.scores import (
    Scored,
    ScoreOptions,
    first_of,
    in_layers,
    missing,
    note,
    of_tasks,
    score_subject,
    score_table,
)
from position_papers.kit.subjects import Subject
from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.marks.scores import draw_scores, handles
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style

COPE = "cope"
RIVALS = {"rope": "RoPE", "learned": "learned absolute positions"}
"""Schemes that CoPE is compared with, and what rules call them."""
SCHEMES = (COPE, *RIVALS, "repo")
"""Of the zoo's checkpoints of each task."""
IN_DISTRIBUTION = "in_distribution"


@dataclass(frozen=True)
class LowerError(Above):
    """CoPE's error is below that of each rival; nothing is said where no error is large enough to tell them apart."""

    rivals: tuple[str, ...] = tuple(RIVALS.values())
    relation: str = "below"
    required: tuple[str, ...] | None = ()
    apart: float = 1.0
    """Per cent."""

    @property
    def words(self) -> str:
        """The rule in words."""
        return f"{super().words}; there is no verdict where all of these errors are at most {self.apart:g} %"

    def tells_apart(self, errors: Sequence[float]) -> bool:
        """Whether some of the `errors` in per cent is above `apart`."""
        return bool(np.round(errors, 9).max() > self.apart)  # 100 (1 - 0.99) is a little more than 1


def needs(task: str, names: Sequence[str], besides: Sequence[str] = ()) -> Needs:
    """The checkpoints of `task` whose options are the same together, `besides` those of that name; `names` are the zoo's."""
    otherwise = f"no checkpoint with CoPE in every layer, trained on {task}, was given"
    return Needs(trained_alike(of_tasks(task), besides), otherwise, tuple(f"{task}/{name}" for name in names), task)


def measure(subjects: Sequence[Subject], options: ScoreOptions, cache: Cache) -> list[Scored]:
    """The scores of `subjects` on the task that they were trained on."""
    return [score_subject(subject, options, cache) for subject in subjects]


def errors_of(scored: Scored, test_sets: Sequence[str]) -> Sample:
    """Errors as shares between 0 and 1, means over `test_sets`."""
    right = scored.sample(test_sets)
    return replace(right, seeds=1 - right.seeds, prompts=1 - right.prompts)


def lower_error(claim: Claim, scored: Sequence[Scored], test_set: str, measured: str) -> Verdict:
    """The verdict on whether CoPE's error on `test_set` is below those of its rivals.

    `claim` has a rule `LowerError`, and one of `scored` has CoPE in every layer.
    """
    cope, rule = first_of(scored, COPE), claim.rule
    assert cope is not None and isinstance(rule, LowerError)
    if test_set not in cope.test_sets:
        return unmeasured(claim, cope.name, f"{cope.name} was not scored on a test set {test_set}")
    candidates = {name: first_of(scored, name) for name in RIVALS}
    rivals = {name: rival for name, rival in candidates.items() if rival is not None and test_set in rival.test_sets}
    absent = _absent(candidates, test_set, cope.configuration.task)
    if not rivals:
        return unmeasured(claim, cope.name, absent)
    samples = {name: errors_of(checkpoint, [test_set]) for name, checkpoint in {COPE: cope, **rivals}.items()}
    errors = {name: 100 * sample.mean for name, sample in samples.items()}
    if not rule.tells_apart(list(errors.values())):
        shown = ", ".join(f"{name} {error:.3g} %" for name, error in errors.items())
        easy = f"{measured}: {shown}; all at most {rule.apart:g} %, so the task is too easy here to tell them apart"
        return unmeasured(claim, cope.name, easy)
    differences = {name: between(samples[name], samples[COPE]) for name in rivals}
    within = f"in distribution {100 * errors_of(cope, [IN_DISTRIBUTION]).mean:.3g} %" if test_set != IN_DISTRIBUTION else ""
    return verdict(
        claim,
        cope.name,
        measured,
        {rule.quantity: {RIVALS[name]: difference for name, difference in differences.items()}},
        errors[COPE],
        **numbers_of(samples[COPE], 100),
        control=", ".join(f"{name} {errors[name]:.3g} %" for name in rivals),
        note=note([cope, *rivals.values()], in_words(differences, "below", " points", 100), within, absent),
    )


def _absent(candidates: Mapping[str, Scored | None], test_set: str, task: str) -> str:
    """Which of the rivals were not given, and which were given without a score on `test_set`; "" where all have one."""
    unscored = [each.name for each in candidates.values() if each is not None and test_set not in each.test_sets]
    parts = (
        missing([name for name, each in candidates.items() if each is None], task),
        f"{', '.join(unscored)} without a score on these sequences" if unscored else "",
    )
    return "; ".join(filter(None, parts))


def error_table(scored: Sequence[Scored], test_sets: Sequence[str] = ()) -> xr.Dataset:
    """Errors [checkpoint, test_set, seed] in per cent, with their standard errors over prompts, as `errors_by_test_set` draws them.

    `test_sets`: all that a checkpoint has where none are named.
    """
    table = score_table(scored, test_sets).assign_coords(layout=("checkpoint", [in_layers(each) for each in scored]))
    recorded = [[_error_of_recorded(each, name) for name in table["test_set"].values] for each in scored]
    described = {"long_name": f"error (1 - {scored[0].metric})", "units": "%"}
    errors = (100 * table["standard_error"].fillna(np.array(recorded))).assign_attrs(
        long_name="standard error over prompts", units="%"
    )
    return table.assign(score=(100 * (1 - table["score"])).assign_attrs(described), standard_error=errors)


def _error_of_recorded(scored: Scored, test_set: str) -> float:
    """The standard error over prompts that a recorded mean of one seed has at most; NaN where there are other seeds, or none."""
    sample = scored.sample([test_set]) if test_set in scored.test_sets else None
    return np.nan if sample is None or len(sample.seeds) != 1 or sample.spread is None else sample.spread


# ---- drawn ----------------------------------------------------------------------------------------------------------

_FLOOR: Mapping[str, Any] = {"color": "#222222", "linewidth": 0.7, "linestyle": "--"}


@style()
def errors_by_test_set(panels: Mapping[str, xr.Dataset]) -> PaperFigure:
    """Every error table of `panels`, by its title, one row each (CoPE tables 2 to 4); dashed: `floor [test_set]`, where there is one."""
    figure = paper_figure(PAGE_WIDTH, 0.45 + 1.55 * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False, sharey=True)[:, 0]
    entries: dict[str, Line2D] = {}
    for ax, (title, data) in zip(axes, panels.items(), strict=True):
        draw_scores(ax, data).set_title(title)
        entries |= {str(entry.get_label()): entry for entry in handles(data)}
        for place, floor in enumerate(data["floor"].values if "floor" in data else ()):
            ax.hlines(floor, place - 0.4, place + 0.4, **_FLOOR, gid="floor")
            entries["floor"] = Line2D([], [], **_FLOOR, label="always the most frequent answer")
    axes[0].set_ylim(bottom=-2)  # marks at 0 are seen whole
    legend_below(figure, list(entries.values()))
    return figure


def errors_caption(scored: Sequence[Scored]) -> str:
    """The sentence of a caption on the training seeds and prompts behind the errors."""
    samples = {checkpoint.name: checkpoint.sample(checkpoint.test_sets[:1]) for checkpoint in scored}
    seeds = {name: len(sample.seeds) for name, sample in samples.items()}
    same = len(set(seeds.values())) == 1
    over = str(next(iter(seeds.values()))) if same else ", ".join(f"{name} {count}" for name, count in seeds.items())
    prompts = sorted({sample.count for sample in samples.values()})
    return (
        f"Marks: means over training seeds ({over}); small dots: seeds; bars of a single seed: standard error over prompts, at most where "
        "its mean alone is recorded; "
        f"{' to '.join(str(count) for count in dict.fromkeys((prompts[0], prompts[-1])))} prompts each."
    )
