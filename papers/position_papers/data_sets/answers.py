"""Data sets that cannot come with the package, answered by checkpoints that know text: a table by checkpoint and data set.

    HybridQA       RePo table 2                      LongBench    RePo table 3, HoPE table 5
    MMLU-Pro       RePo table 5, HoPE table 4        GLUE         HoPE table 2             Qasper    Position Generalization table 1

A user names one file per data set; a row without one says so. Checkpoints trained on a task of ours with words of its own are left out.
What is measured stands in `questions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from position_papers.data_sets.questions import (
    GLUE,
    HYBRIDQA,
    LONGBENCH,
    MMLU_PRO,
    MOVED,
    PLAIN,
    QASPER,
    REORDERED,
    WITHIN,
    Answers,
    Questions,
    measure,
)
from position_papers.kit.claims import SEEN, Claim, Evidence
from position_papers.kit.differences import SIGNIFICANT
from position_papers.kit.experiment import Drawing, Experiment, Needs
from position_papers.kit.rules import Above, AtLeast, AtMost, NotBelow, Rule, Where
from position_papers.kit.samples import between, numbers_of
from position_papers.kit.scale import Scale
from position_papers.kit.subjects import Subject
from repo_interp.plots.marks.drawing import legend_below, number
from repo_interp.plots.marks.scores import handles, looks
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.positions.layouts import LEARNED
from repo_interp.tasks.data_sets import NAMES

REPO, HOPE, POSITION_GENERALIZATION = (
    Scale(16, 2048, 4096, "50B tokens, continuing 4T"),
    Scale(12, 768, 512, "50,000 steps of 512 sequences"),
    Scale(28, 3072),
)
"""The papers' models."""


SCORE = "the mean score on the same questions"
ANSWERED = AtLeast("the better of both mean scores", 0.02)
"""Below it nobody answers."""
ABOVE, AS_GOOD = Where(ANSWERED, Above(SCORE, ("RoPE",))), Where(ANSWERED, NotBelow(SCORE, ("RoPE",)))
F1, FALL = "F1 on the text in order", "the fall of F1"
READ = AtLeast(F1, 0.02)


class Comparison(NamedTuple):
    """A claim that some schemes answer a data set better than RoPE, or as well."""

    claim: Claim
    schemes: tuple[str, ...]
    questions: Questions


def _repo(part: str, says: str, source: str, number: str, questions: Questions, rule: Rule = ABOVE) -> Comparison:
    return Comparison(Claim("R9", says, source, number, rule, part, scale=REPO), tuple(LEARNED), questions)


def _hope(part: str, says: str, source: str, number: str, questions: Questions) -> Comparison:
    return Comparison(Claim("H6", says, source, number, ABOVE, part, scale=HOPE), ("hope",), questions)


COMPARISONS = (
    _repo("HybridQA", "tables: HybridQA exact match above RoPE", "RePo table 2", "26.70 against 24.43", HYBRIDQA),
    _repo("LongBench", "LongBench above RoPE, with YaRN beyond L", "RePo table 3", "27.86 against 20.93", LONGBENCH),
    _repo("MMLU-Pro", "short tasks as good as RoPE's: MMLU-Pro", "RePo table 5", "13.52 against 13.77", MMLU_PRO, AS_GOOD),
    _hope("few-shot", "few-shot following above RoPE: GLUE", "HoPE table 2", "79.20 against 54.10", GLUE),
    _hope("LongBench", "LongBench above RoPE", "HoPE table 5", "24.04 against 15.75 (mean of 6 tasks)", LONGBENCH),
    _hope("MMLU-Pro", "MMLU-Pro above RoPE", "HoPE table 4", "12.74 against 12.60", MMLU_PRO),
)
P6 = Claim(
    "P6",
    f"{100 * MOVED:.0f} % of tokens reordered within {WITHIN}: marginal effect on Qasper",
    "Position Generalization table 1",
    "42.53 -> 42.34",
    Where(READ, AtMost(FALL, 0.02, of=F1)),
    "Qasper",
    SEEN,
    POSITION_GENERALIZATION,
)


# ---- judged ---------------------------------------------------------------------------------------------------------


def judge(answers: Answers) -> Iterator[Evidence]:
    """Every comparison with RoPE, and what reordering changes."""
    for comparison in COMPARISONS:
        yield from _compared(comparison, answers)
    yield from _perturbed(answers)


def _compared(comparison: Comparison, answers: Answers) -> Iterator[Evidence]:
    """What there is on one comparison: every checkpoint with one of its schemes beside RoPE, or why there is nothing."""
    claim, data_set = comparison.claim, comparison.questions.data_set
    rivals = [subject for subject in answers.subjects if subject.layout == "rope"]
    own = [subject for subject in answers.subjects if set(subject.schemes) & set(comparison.schemes)]
    if data_set in answers.absent:
        yield _without(claim, _needed(data_set))
    elif not own or not rivals:
        yield _without(claim, f"no checkpoints of {comparison.schemes[0]} and rope that know text were given")
    else:
        yield from (_beside_rope(comparison, subject, rivals, answers) for subject in own)


def _beside_rope(comparison: Comparison, subject: Subject, rivals: Sequence[Subject], answers: Answers) -> Evidence:
    """The mean score of one checkpoint above that of RoPE trained at the same length."""
    claim, metrics = comparison.claim, comparison.questions.metrics
    rival = next((known for known in rivals if known.training_length == subject.training_length), None)
    if rival is None:
        return _without(claim, "no checkpoint of rope with the same training length was given", subject.name)
    mine, theirs = (answers.sample(name, comparison.questions) for name in (subject.name, rival.name))
    if mine.count < 2:
        return _without(claim, "there is one question alone, so nothing to take an error over", subject.name)
    difference = between(mine, theirs)
    values = {ANSWERED.quantity: max(mine.mean, theirs.mean), SCORE: {"RoPE": difference}}
    if not ANSWERED.holds(values):
        return _without(claim, f"no checkpoint answers: {mine.mean:.3f}, {rival.name} {theirs.mean:.3f}", subject.name)
    return Evidence(
        claim,
        subject.name,
        f"{metrics[0] if len(metrics) == 1 else 'mean score'} on {comparison.questions.data_set}, %",
        values,
        100 * mine.mean,
        **numbers_of(mine, 100),
        control=f"{rival.name} {100 * theirs.mean:.3g} %",
        note=f"above by {100 * difference.margin:+.3g} points (standard error {100 * difference.standard_error:.2g} over "
        f"{difference.over})",
    )


def _perturbed(answers: Answers) -> Iterator[Evidence]:
    """P6: the fall of F1 on Qasper when tokens are reordered, of every checkpoint."""
    if QASPER.data_set in answers.absent or not answers.subjects:
        yield _without(
            P6, _needed(QASPER.data_set) if QASPER.data_set in answers.absent else "no checkpoint that knows text was given"
        )
        return
    for subject in answers.subjects:
        plain, reordered = (answers.sample(subject.name, QASPER, order) for order in (PLAIN, REORDERED))
        fall = between(plain, reordered)
        values = {F1: plain.mean, FALL: fall.margin}
        if not READ.holds(values):
            yield _without(P6, f"it does not answer: F1 {plain.mean:.3f}", subject.name)
            continue
        yield Evidence(
            P6,
            subject.name,
            "F1 with tokens reordered, %",
            values,
            100 * reordered.mean,
            **numbers_of(reordered, 100),
            control=f"in order {100 * plain.mean:.3g} %",
            note=f"falls by {100 * fall.margin:.3g} points (standard error {100 * fall.standard_error:.2g} over {fall.over})",
        )


def _without(claim: Claim, why: str, checkpoint: str = "none") -> Evidence:
    """Evidence that a claim cannot be measured, and why."""
    return Evidence(claim, checkpoint, "", unmeasurable=why)


def _needed(name: str) -> str:
    """What a user has to give for a row that has no data."""
    return f"needs data: give --data {name}=FILE"


# ---- drawn ----------------------------------------------------------------------------------------------------------


def draw(answers: Answers) -> Iterator[Drawing]:
    """The table."""
    options, data = answers.options, table(answers)
    length = "each checkpoint's training length" if not options.length else f"{options.length} tokens"
    yield Drawing(
        "data_sets",
        _figure(data),
        "Data sets that cannot come with the package (RePo table 2, 3, 5; HoPE table 2, 4, 5; Position Generalization table 1): mean "
        f"score, generated greedily, of up to {options.questions} questions per part (n), prompts and answers within {length}, the middle "
        "of longer ones cut out; bar: 2 standard errors over questions.",
        data,
    )


def table(answers: Answers) -> xr.Dataset:
    """`score`, `standard_error` [row, checkpoint]; `questions`, `cut` [row]; what is needed where there is no data."""
    rows: dict[str, tuple[int, float, str]] = {}
    for name in NAMES:
        if name in answers.absent:
            rows[name] = (0, np.nan, _needed(name))
        for (_, data_set), scores in answers.scores.items():
            if data_set == name:
                plain = scores.sel(order=PLAIN)
                known = zip(plain["test_set"].values.astype(str), plain["questions"].values, plain["cut"].values, strict=True)
                for row, count, cut in known:
                    before = rows.get(row, (0, 0.0, ""))
                    rows[row] = (max(before[0], int(count)), max(before[1], float(cut)), "")
    names = [subject.name for subject in answers.subjects]
    values = np.full((2, len(rows), len(names)), np.nan)
    for (checkpoint, _), scores in answers.scores.items():
        for place, row in enumerate(rows):
            if row in scores["test_set"].values:
                here = scores.sel({"order": PLAIN, "test_set": row})
                values[:, place, names.index(checkpoint)] = float(here["mean_score"]), float(here["standard_error"])
    axes = ("row", "checkpoint")
    largest_cut = {"long_name": "largest share of prompts that lost their middle", "units": "1"}
    return xr.Dataset(
        {
            "score": (axes, values[0], {"long_name": "mean score", "units": "1"}),
            "standard_error": (axes, values[1], {"long_name": "standard error over questions", "units": "1"}),
            "questions": ("row", [count for count, _, _ in rows.values()], {"long_name": "questions", "units": "1"}),
            "cut": ("row", [cut for _, cut, _ in rows.values()], largest_cut),
        },
        {
            "row": list(rows),
            "needs": ("row", [needs for _, _, needs in rows.values()]),
            "checkpoint": names,
            "layout": ("checkpoint", [subject.layout for subject in answers.subjects]),
        },
    )


def _figure(data: xr.Dataset) -> PaperFigure:
    """One row per part of a data set: one dot per checkpoint with its error, and what is missing said in words."""
    scores, errors = (100 * data[name].transpose("row", "checkpoint").values for name in ("score", "standard_error"))
    known = [not str(needs) for needs in data["needs"].values]
    tall = np.array([0.5 * max(scores.shape[1], 1) + 0.5 if there else 1.0 for there in known])
    heights = np.cumsum(tall) - tall / 2
    by_checkpoint = looks(data) if data.sizes["checkpoint"] else {}
    with style():
        figure = paper_figure(PAGE_WIDTH, 0.75 + 0.17 * tall.sum())
        ax = figure.subplots()
        for place, (name, look) in enumerate(by_checkpoint.items()):
            y = heights + 0.5 * (place - (len(by_checkpoint) - 1) / 2)
            there = np.isfinite(scores[:, place])
            spread = SIGNIFICANT * np.nan_to_num(errors[:, place])
            low, high = scores[:, place] - spread, scores[:, place] + spread
            dots: Any = {"color": look["color"], "markersize": 3, "markeredgewidth": 0}
            ax.hlines(y[there], low[there], high[there], color=look["color"], linewidth=0.9)
            ax.plot(scores[there, place], y[there], look["marker"], gid=f"score {name}", **dots)
            beside: Any = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": 5, "color": "#333333"}
            for row in np.flatnonzero(there):
                ax.annotate(number(scores[row, place]), (high[row], y[row]), **beside)
        for height, needs in zip(heights, data["needs"].values, strict=True):
            if str(needs):
                along = ax.get_yaxis_transform()
                ax.text(0.02, height, str(needs), va="center", fontsize=6, color="#5A5A5A", transform=along, gid="needs data")
        for edge in np.cumsum(tall)[:-1]:
            ax.axhline(edge, color="#DDDDDD", linewidth=0.5)
        labels = [
            f"{row}, n = {int(count)}" if there else str(row)
            for row, count, there in zip(data["row"].values, data["questions"].values, known, strict=True)
        ]
        ax.set_yticks(heights, labels)
        ax.set_ylim(tall.sum(), 0)
        largest = 100 if not np.isfinite(scores).any() else max(10.0, 1.15 * float(np.nanmax(scores + np.nan_to_num(errors))))
        ax.set_xlim(0, largest)
        ax.set_xlabel("score (%)")
        ax.grid(axis="x")
        legend_below(figure, handles(data) if by_checkpoint else [])
    return figure


def _know_text(subjects: Sequence[Subject]) -> Sequence[Sequence[Subject]]:
    """One group, also of none: checkpoints that were trained on no task of ours, or on text."""
    return [[subject for subject in subjects if subject.has_weights and subject.kind in ("text", "language")]]


ANSWERS = Experiment(
    "data sets",
    (*(comparison.claim for comparison in COMPARISONS), P6),
    Needs(_know_text, "no data set was given", ("language/repo", "language/rope")),
    measure,
    judge,
    draw,
)
