"""An experiment asked of every training seed whose weights are there: whether what one trained model shows is a matter of its seed.

    seeds         NAME, NAME/seed-1, ...: those of every checkpoint of a group; each seed is a group of its own
    one seed      measured and judged as the experiment does it, with its own reasons why nothing can be said
    every seed    holds where the claim's rule holds for all seeds that can be judged, of which there are at least two

A row of one checkpoint says what one model does, and its spread is one over prompts. Beside it stands a row of this, whose number is the
mean over seeds and whose spread is theirs. A seed is judged by itself, without Holm's correction, which is for the best of several: what
has to hold for all of them is no more probable by chance than for one. Knows nothing about any paper.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from position_papers.kit.cache import Cache
from position_papers.kit.claims import EVERY_SEED, FAILS, HOLDS, UNDECIDED, Claim, Kind, Reason, Verdict, unmeasured, verdict
from position_papers.kit.experiment import Drawing, Experiment, reasons_against
from position_papers.kit.experiment import judge as verdicts_of
from position_papers.kit.rules import AtLeast
from position_papers.kit.subjects import Subject, seeds_of, stem
from repo_interp.measures.labels import described
from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, style

LEAST = 2
"""Seeds that have to be judged for a row over them."""
LETTERS = 30
"""In a line of an axis's label."""
SHARE = "the share of the training seeds that can be judged for which the rule of {} holds"
BySeed = Mapping[int, Verdict]
"""The verdict on one claim of every seed alone."""
Rows = Mapping[tuple[Claim, str], BySeed]
"""By the claim about every seed, and the checkpoint; at least two seeds each."""


def over_seeds(experiment: Experiment) -> Experiment:
    """`experiment` on every training seed of its checkpoints; each of its claims becomes one about every seed."""
    claims = {claim: _of_every_seed(claim) for claim in experiment.claims}

    def measure(subjects: Sequence[Subject], options: Any, cache: Cache) -> Rows | None:
        by_subject = [seeds_of(subject) for subject in subjects]
        rows: dict[tuple[Claim, str], dict[int, Verdict]] = {}
        seeds = sorted({seed for of_subject in by_subject for seed in of_subject})
        for seed in seeds if len(seeds) >= LEAST else ():
            for group in experiment.needs.groups([of_subject[seed] for of_subject in by_subject if seed in of_subject]):
                data = experiment.measure(group, options, cache)
                if data is not None:
                    for own in verdicts_of(experiment, data, reasons_against(experiment, group, options, cache)):
                        rows.setdefault((claims[own.claim], own.checkpoint), {})[seed] = own
        return {row: by_seed for row, by_seed in rows.items() if len(by_seed) >= LEAST} or None

    def draw(rows: Rows) -> Iterator[Drawing]:
        known = {row: own for row, own in rows.items() if any(each.estimate.value is not None for each in own.values())}
        for checkpoint in dict.fromkeys(name for _, name in known):
            own = [by_seed for (_, name), by_seed in known.items() if name == checkpoint]
            yield _drawing(f"{experiment.name} {checkpoint}", checkpoint, _numbers(own))

    otherwise = f"needs the weights of at least {LEAST} training seeds"
    return Experiment(
        f"{experiment.name} over seeds",
        tuple(claims.values()),
        replace(experiment.needs, otherwise=otherwise, otherwise_of={}, why_not=lambda subject, options, cache: ""),
        measure,
        lambda rows: [_together(claim, checkpoint, by_seed) for (claim, checkpoint), by_seed in rows.items()],
        draw,
        experiment.scale,
    )


def _of_every_seed(claim: Claim) -> Claim:
    """The same claim about all seeds: a question of ours, whatever the claim itself is."""
    return replace(
        claim,
        statement=f"{claim.statement}, in {EVERY_SEED}",
        paper_number="none",
        rule=AtLeast(SHARE.format(claim.label), 1),
        part=claim.part_of_every_seed,
        also=(),
        cause="",
    )


def _together(claim: Claim, checkpoint: str, by_seed: BySeed) -> Verdict:
    """What the verdicts on single seeds come to, as one on `claim` about all of them."""
    numbers = [each.estimate.value for each in by_seed.values() if each.estimate.value is not None]
    first, listed = next(iter(by_seed.values())), _listed(by_seed)
    if len(numbers) < LEAST:
        why = f"{len(numbers)} of {len(by_seed)} training seeds can be judged"
        return unmeasured(claim, checkpoint, (why, *listed), first.estimate.measured)
    held, count = sum(each.outcome == HOLDS for each in by_seed.values()), len(numbers)
    values = {SHARE.format(first.claim.label): held / count}
    mean, spread = float(np.mean(numbers)), float(np.std(numbers, ddof=1))
    own = verdict(claim, checkpoint, first.estimate.measured, values, mean, spread, "training seeds", count, seeds=count)
    open_seeds = held < count and not any(each.outcome == FAILS for each in by_seed.values())
    reasons = (Reason(Kind.SEEDS, count=held, of=count), *(Reason(Kind.NOTE, each) for each in listed))
    return replace(own, outcome=UNDECIDED if open_seeds else own.outcome, reasons=reasons)


def _listed(by_seed: BySeed) -> list[str]:
    """The seeds by their outcome, each with its number, or with the reason why there is none."""
    listed: dict[str, list[str]] = {}
    for seed, own in by_seed.items():
        shown = ", ".join(own.notes) if own.estimate.value is None else f"{own.estimate.value:.3g}"
        listed.setdefault(own.outcome.value, []).append(f"{seed} ({shown})")
    return [f"{outcome}: {', '.join(seeds)}" for outcome, seeds in listed.items()]


# ---- drawn ----------------------------------------------------------------------------------------------------------


def _numbers(rows: Sequence[BySeed]) -> xr.Dataset:
    """`number`, `holds` [claim, seed]; NaN where nothing can be said."""
    seeds = sorted({seed for by_seed in rows for seed in by_seed})
    number, holds = np.full((2, len(rows), len(seeds)), np.nan)
    for row, by_seed in enumerate(rows):
        for seed, own in by_seed.items():
            if own.estimate.value is not None:
                place = row, seeds.index(seed)
                number[place], holds[place] = own.estimate.value, own.outcome == HOLDS
    firsts = [next(iter(by_seed.values())) for by_seed in rows]
    coords = {
        "claim": [first.claim.label for first in firsts],
        "statement": ("claim", [first.claim.statement for first in firsts]),
        "seed": seeds,
        "measured": ("claim", [first.estimate.measured for first in firsts]),
    }
    return xr.Dataset(
        {
            "number": described(xr.DataArray(number, coords, ("claim", "seed")), "what the claim is judged by", "see measured"),
            "holds": described(xr.DataArray(holds, coords, ("claim", "seed")), "whether the claim's rule holds", "1"),
        }
    )


def _drawing(name: str, checkpoint: str, data: xr.Dataset) -> Drawing:
    """One dot per seed and claim."""
    columns = (data[name].values for name in ("claim", "statement", "measured"))
    numbers = "; ".join(f"{claim}, {statement}: {measured}" for claim, statement, measured in zip(*columns, strict=True))
    caption = (
        f"{checkpoint}: one dot per training seed. {numbers}. Filled: the claim's rule holds for that seed alone; open: it does not. "
        "Grey: seeds of which nothing can be said."
    )
    return Drawing(f"every_seed_{stem(name)}", _figure(data), caption, data)


@style()
def _figure(data: xr.Dataset) -> PaperFigure:
    """One panel per claim. A seed of which nothing can be said is a grey stripe: a mark would stand at a number."""
    ink, grey, places = "#222222", "#E4E4E4", np.arange(data.sizes["seed"])
    dot: Any = {"color": ink, "marker": "o", "linestyle": "", "markersize": 4}
    figure = paper_figure(PAGE_WIDTH if data.sizes["claim"] > 1 else COLUMN_WIDTH, 2.3)
    axes = figure.subplots(1, data.sizes["claim"], squeeze=False)[0]
    for row, ax in enumerate(axes):
        number, holds = (data[name].values[row] for name in ("number", "holds"))
        for dots, filling in ((holds == 1, ink), (holds == 0, "white")):
            ax.plot(places[dots], number[dots], **dot, markerfacecolor=filling, gid="seeds")
        for place in places[np.isnan(number)]:
            ax.axvspan(place - 0.4, place + 0.4, facecolor=grey, linewidth=0, gid="nothing")
        ax.margins(y=0.12)
        ax.axhline(0, linewidth=0)  # zero is in every panel
        ax.set(xlim=(-0.6, len(places) - 0.4), xlabel="training seed", title=str(data["claim"].values[row]))
        ax.set_ylabel(textwrap.fill(str(data["measured"].values[row]), LETTERS))
        ax.set_xticks(places, [str(int(seed)) for seed in data["seed"].values])
        ax.grid(axis="y")
    marks: list[tuple[Any, Line2D | Patch]] = [
        (data["holds"] == 1, Line2D([], [], **dot, label="the rule holds")),
        (data["holds"] == 0, Line2D([], [], **dot, markerfacecolor="white", label="the rule does not hold")),
        (data["number"].isnull(), Patch(facecolor=grey, label="nothing can be said")),
    ]
    legend_below(figure, [mark for there, mark in marks if bool(there.any())])
    return figure
