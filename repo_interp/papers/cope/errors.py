"""Errors of position schemes by test set: what CoPE's claims about flip-flop, selective copy and counting share (sec. 5.1 to 5.3).

    error = 100 (1 - score) per cent; score: share of reads that are right (flip-flop), exact match (the other two)

"Relative" in the paper is a learned vector per distance; RoPE stands for it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import Claim, Evidence
from repo_interp.papers.kit.experiment import Needs, trained_alike
from repo_interp.papers.kit.legends import in_layers
from repo_interp.papers.kit.rules import Above
from repo_interp.papers.kit.samples import Sample, between, in_words, numbers_of
from repo_interp.papers.kit.scores import Scored, ScoreOptions, first_of, missing, note, of_tasks, score_subject, score_table
from repo_interp.papers.kit.subjects import Subject
from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.marks.scores import looks
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, style

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
    return Sample(1 - right.seeds, 1 - right.prompts, right.recorded, right.share)


def lower_error(claim: Claim, scored: Sequence[Scored], test_set: str, measured: str) -> Evidence:
    """What there is on whether CoPE's error on `test_set` is below those of its rivals.

    `claim` has a rule `LowerError`, and one of `scored` has CoPE in every layer.
    """
    cope, rule = first_of(scored, COPE), claim.rule
    assert cope is not None and isinstance(rule, LowerError)
    if test_set not in cope.test_sets:
        return Evidence(claim, cope.name, "", unmeasurable=f"{cope.name} was not scored on a test set {test_set}")
    candidates = {name: first_of(scored, name) for name in RIVALS}
    rivals = {name: rival for name, rival in candidates.items() if rival is not None and test_set in rival.test_sets}
    absent = missing([name for name in RIVALS if name not in rivals], cope.configuration.task)
    if not rivals:
        return Evidence(claim, cope.name, "", unmeasurable=absent)
    samples = {name: errors_of(checkpoint, [test_set]) for name, checkpoint in {COPE: cope, **rivals}.items()}
    errors = {name: 100 * sample.mean for name, sample in samples.items()}
    if not rule.tells_apart(list(errors.values())):
        shown = ", ".join(f"{name} {error:.3g} %" for name, error in errors.items())
        easy = f"{measured}: {shown}; all at most {rule.apart:g} %, so the task is too easy here to tell them apart"
        return Evidence(claim, cope.name, "", unmeasurable=easy)
    differences = {name: between(samples[name], samples[COPE]) for name in rivals}
    within = f"in distribution {100 * errors_of(cope, [IN_DISTRIBUTION]).mean:.3g} %" if test_set != IN_DISTRIBUTION else ""
    return Evidence(
        claim,
        cope.name,
        measured,
        {rule.quantity: {RIVALS[name]: difference for name, difference in differences.items()}},
        errors[COPE],
        **numbers_of(samples[COPE], 100),
        control=", ".join(f"{name} {errors[name]:.3g} %" for name in rivals),
        note=note([cope, *rivals.values()], in_words(differences, "below", " points", 100), within, absent),
    )


def error_table(scored: Sequence[Scored], test_sets: Sequence[str] = ()) -> xr.Dataset:
    """Errors [checkpoint, test_set, seed] in per cent, with their standard errors over prompts, as `error_bars` draws them.

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


def errors_caption(scored: Sequence[Scored]) -> str:
    """What a caption says of the training seeds and prompts behind the bars."""
    samples = {checkpoint.name: checkpoint.sample(checkpoint.test_sets[:1]) for checkpoint in scored}
    seeds = {name: len(sample.seeds) for name, sample in samples.items()}
    same = len(set(seeds.values())) == 1
    over = str(next(iter(seeds.values()))) if same else ", ".join(f"{name} {count}" for name, count in seeds.items())
    prompts = sorted({sample.count for sample in samples.values()})
    return (
        f"Bars: means over training seeds ({over}); dots: seeds; whiskers of a single seed: standard error over prompts, at most where "
        "its mean alone is recorded; "
        f"{' to '.join(str(count) for count in dict.fromkeys((prompts[0], prompts[-1])))} prompts each."
    )


# ---- bars: one per scheme, a dot per seed, the mean above it (tables 2 to 4) ------------------------------------------

_HATCHES = ("", "////", "....", "xxxx")
_GROUP = 0.84
"""Width of the bars of one test set; test sets are 1 apart."""
_PAGE_FROM = 12
"""Bars from which a figure is as wide as a page."""


def error_bars(panels: Mapping[str, xr.Dataset]) -> PaperFigure:
    """Bars of every error table of `panels`, by its title, one row each. Whiskers: standard error over prompts, for a single seed; dashed:
    `floor [test_set]`, where there is one.
    """
    count = max(data.sizes["checkpoint"] * data.sizes["test_set"] for data in panels.values())
    with style():
        figure = paper_figure(PAGE_WIDTH if count >= _PAGE_FROM else COLUMN_WIDTH, 0.45 + 1.55 * len(panels))
        axes = figure.subplots(len(panels), 1, squeeze=False, sharey=True)[:, 0]
        entries: dict[str, Patch] = {}
        for ax, (title, data) in zip(axes, panels.items(), strict=True):
            for patch in _draw_errors(ax, data):
                entries.setdefault(str(patch.get_label()), patch)
            ax.set_title(f"{title}; number: mean")
        axes[0].set_ylim(0, max(_top(data) for data in panels.values()))
        legend_below(figure, list(entries.values()))
    return figure


def _draw_errors(ax: Axes, data: xr.Dataset) -> list[Patch]:
    """Draw the bars of one table on `ax` and return the legend entries of its checkpoints."""
    values = data["score"].transpose("checkpoint", "test_set", "seed").values
    errors = data["standard_error"].transpose("checkpoint", "test_set").values
    width = _GROUP / len(values)
    dot = {"markersize": 2.2, "color": "#222222", "markeredgecolor": "white", "markeredgewidth": 0.4, "clip_on": False}
    # The numbers stand in a row below the bars, where no dot is.
    below: Any = {
        "xytext": (0, -2.5),
        "textcoords": "offset points",
        "ha": "center",
        "va": "top",
        "fontsize": 5,
        "annotation_clip": False,
    }
    entries, bars_by_colour = [], dict[str, int]()
    for row, (name, look) in enumerate(looks(data).items()):
        hatch = _HATCHES[bars_by_colour.setdefault(look["color"], 0) % len(_HATCHES)]
        bars_by_colour[look["color"]] += 1
        bar = {"facecolor": look["color"], "hatch": hatch, "edgecolor": "white" if hatch else look["color"], "linewidth": 0.4}
        entries.append(Patch(**bar, label=look["label"]))
        for column, seeds in enumerate(values[row]):
            seeds = seeds[np.isfinite(seeds)]
            x = column - _GROUP / 2 + (row + 0.5) * width
            if not seeds.size:
                ax.annotate("n/a", (x, 0), **below, color="#8A8A8A", gid=f"absent {name}")
                continue
            mean, error = float(seeds.mean()), float(np.nan_to_num(errors[row, column]))
            ax.bar(x, mean, 0.9 * width, **bar, gid=f"error {name} {data['test_set'].values[column]}")
            if seeds.size > 1:
                ax.plot(x + width * np.linspace(-0.22, 0.22, seeds.size), seeds, "o", **dot)
            elif error > 0:
                ax.vlines(x, max(0.0, mean - error), mean + error, color="#222222", linewidth=0.7)
            ax.annotate(_number(mean), (x, 0), **below, color="#222222", gid=f"mean {name}")
    if "floor" in data:
        for column, floor in enumerate(data["floor"].sel(test_set=data["test_set"]).values):
            ax.hlines(
                floor, column - _GROUP / 2, column + _GROUP / 2, color="#222222", linewidth=0.7, linestyle="--", gid="floor"
            )
    names = [str(name).replace("in_distribution", "in distribution").replace("_", " ") for name in data["test_set"].values]
    ax.set_xticks(range(len(names)), names)
    ax.set(xlim=(-0.5, len(names) - 0.5), ylabel="error (%)")
    ax.tick_params(axis="x", length=0, pad=9)
    ax.grid(axis="y")
    return entries


def _top(data: xr.Dataset) -> float:
    """Where an axis ends that shows all bars, dots and whiskers of `data`."""
    tips = data["score"].max("seed").fillna(0) + data["standard_error"].fillna(0)
    floor = float(data["floor"].max()) if "floor" in data else 0.0
    return max(1.08 * max(float(tips.max()), floor), 1.0)


def _number(value: float) -> str:
    if value == 0 or value >= 99.95:
        return f"{value:.0f}"
    return "<0.1" if value < 0.05 else f"{value:.1f}"
