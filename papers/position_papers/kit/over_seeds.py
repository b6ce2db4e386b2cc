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
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from position_papers.kit.cache import Cache
from position_papers.kit.claims import EVERY_SEED, HOLDS, SEEN, Claim, Evidence, Verdict
from position_papers.kit.claims import judge as verdict_on
from position_papers.kit.experiment import Drawing, Experiment, evidence_of, reasons_against
from position_papers.kit.rules import AtLeast
from position_papers.kit.subjects import Subject, seeds_of, stem
from repo_interp.measures.labels import described
from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.style import COLUMN_WIDTH, PAGE_WIDTH, PaperFigure, paper_figure, style

LEAST = 2
"""Seeds that have to be judged for a row over them."""
LETTERS = 30
"""In a line of an axis's label."""
AROUND, LETTER = 0.6, 0.062
"""Inches of a panel's width that its axis takes, and that a letter of its title takes."""
BySeed = Mapping[int, Verdict]
"""The verdict on one claim of every seed alone."""


class OneSeed(NamedTuple):
    """What an experiment measured of the checkpoints of one training seed."""

    data: Any
    reasons: Mapping[str, str]
    """Why checkpoints say nothing, by name."""


MeasuredSeeds = Mapping[int, OneSeed]


def over_seeds(experiment: Experiment) -> Experiment:
    """`experiment` on every training seed of its checkpoints; each of its claims becomes one about every seed."""
    claims = {claim: _of_every_seed(claim) for claim in experiment.claims}

    def measure(subjects: Sequence[Subject], options: Any, cache: Cache) -> MeasuredSeeds | None:
        return _measure(experiment, subjects, options, cache)

    def judge(measured: MeasuredSeeds) -> Iterator[Evidence]:
        for (claim, checkpoint), by_seed in _rows(experiment, measured).items():
            yield _together(claims[claim], checkpoint, by_seed, _share_of(claim))

    def draw(measured: MeasuredSeeds) -> Iterator[Drawing]:
        rows = _rows(experiment, measured)
        told = {row: by_seed for row, by_seed in rows.items() if any(verdict.ours is not None for verdict in by_seed.values())}
        for checkpoint in dict.fromkeys(name for _, name in told):
            own = {claim: by_seed for (claim, name), by_seed in told.items() if name == checkpoint}
            yield _drawing(f"{experiment.name} {checkpoint}", checkpoint, _numbers(own))

    otherwise = f"needs the weights of at least {LEAST} training seeds"
    return Experiment(
        f"{experiment.name} over seeds",
        tuple(claims.values()),
        replace(experiment.needs, otherwise=otherwise, otherwise_of={}, why_not=lambda subject, options, cache: ""),
        measure,
        judge,
        draw,
        experiment.scale,
    )


def _of_every_seed(claim: Claim) -> Claim:
    """The same claim about all seeds: a question of ours, whatever the claim itself is."""
    statement = f"{claim.statement}, in {EVERY_SEED}"
    return replace(
        claim,
        statement=statement,
        paper_number="none",
        rule=AtLeast(_share_of(claim), 1),
        part=claim.part_of_every_seed,
        written=SEEN,
        also=(),
        cause="",
    )


def _share_of(claim: Claim) -> str:
    return f"the share of the training seeds that can be judged for which the rule of {claim.label} holds"


# ---- measured -------------------------------------------------------------------------------------------------------


def _measure(experiment: Experiment, subjects: Sequence[Subject], options: Any, cache: Cache) -> MeasuredSeeds | None:
    """What the experiment measures of every seed; None where fewer than two seeds have anything."""
    by_subject = [seeds_of(subject) for subject in subjects]
    seeds = sorted({seed for of_subject in by_subject for seed in of_subject})
    measured: dict[int, OneSeed] = {}
    for seed in seeds if len(seeds) >= LEAST else ():
        for group in experiment.needs.groups([of_subject[seed] for of_subject in by_subject if seed in of_subject]):
            data = experiment.measure(group, options, cache)
            if data is not None:
                measured[seed] = OneSeed(data, reasons_against(experiment, group, options, cache))
    return measured if len(measured) >= LEAST else None


# ---- judged ---------------------------------------------------------------------------------------------------------


def _rows(experiment: Experiment, measured: MeasuredSeeds) -> dict[tuple[Claim, str], BySeed]:
    """The verdicts on every claim and checkpoint that has at least two seeds."""
    rows: dict[tuple[Claim, str], dict[int, Verdict]] = {}
    for seed, (data, reasons) in measured.items():
        for evidence in evidence_of(experiment, data, reasons):
            rows.setdefault((evidence.claim, evidence.checkpoint), {})[seed] = verdict_on(evidence)
    return {row: by_seed for row, by_seed in rows.items() if len(by_seed) >= LEAST}


def _together(claim: Claim, checkpoint: str, by_seed: BySeed, share: str) -> Evidence:
    """What the verdicts on single seeds come to, as evidence on `claim` about all of them."""
    numbers = [verdict.ours for verdict in by_seed.values() if verdict.ours is not None]
    held = sum(verdict.verdict == HOLDS for verdict in by_seed.values())
    if len(numbers) < LEAST:
        why = f"{len(numbers)} of {len(by_seed)} training seeds can be judged; {_listed(by_seed)}"
        return Evidence(claim, checkpoint, _measured(by_seed), unmeasurable=why)
    return Evidence(
        claim,
        checkpoint,
        _measured(by_seed),
        {share: held / len(numbers)},
        float(np.mean(numbers)),
        float(np.std(numbers, ddof=1)),
        "training seeds",
        len(numbers),
        note=f"{held} of {len(numbers)} seeds; {_listed(by_seed)}",
        seeds=len(numbers),
    )


def _listed(by_seed: BySeed) -> str:
    """The seeds under their verdicts, each with its number, or with the reason why there is none."""
    listed: dict[str, list[str]] = {}
    for seed, verdict in by_seed.items():
        shown = verdict.note if verdict.ours is None else f"{verdict.ours:.3g}"
        listed.setdefault(verdict.verdict, []).append(f"{seed} ({shown})")
    return "; ".join(f"{verdict}: {', '.join(seeds)}" for verdict, seeds in listed.items())


def _measured(by_seed: BySeed) -> str:
    """What was measured of all seeds: the phrases that every seed's words begin with ("in layer 2" is one seed's)."""
    phrases = zip(*(verdict.measured.split(", ") for verdict in by_seed.values()), strict=False)
    return ", ".join(same[0] for same in takewhile(lambda same: len(set(same)) == 1, phrases))


# ---- drawn ----------------------------------------------------------------------------------------------------------


def _numbers(rows: Mapping[Claim, BySeed]) -> xr.Dataset:
    """`number`, `holds` [claim, seed]; NaN where nothing can be said."""
    seeds = sorted({seed for by_seed in rows.values() for seed in by_seed})
    number, holds = np.full((2, len(rows), len(seeds)), np.nan)
    for row, by_seed in enumerate(rows.values()):
        for seed, verdict in by_seed.items():
            if verdict.ours is not None:
                place = row, seeds.index(seed)
                number[place], holds[place] = verdict.ours, verdict.verdict == HOLDS
    coords = {
        "claim": [claim.label for claim in rows],
        "statement": ("claim", [claim.statement for claim in rows]),
        "seed": seeds,
        "measured": ("claim", [_measured(by_seed) for by_seed in rows.values()]),
    }
    return xr.Dataset(
        {
            "number": described(xr.DataArray(number, coords, ("claim", "seed")), "what the claim is judged by", "see measured"),
            "holds": described(xr.DataArray(holds, coords, ("claim", "seed")), "whether the claim's rule holds", "1"),
        }
    )


def _drawing(name: str, checkpoint: str, data: xr.Dataset) -> Drawing:
    """One dot per seed and claim."""
    numbers = "; ".join(
        f"{claim}, {statement}: {measured}"
        for claim, statement, measured in zip(*(data[name].values for name in ("claim", "statement", "measured")), strict=True)
    )
    return Drawing(
        f"every_seed_{stem(name)}",
        _figure(data),
        f"{checkpoint}: one dot per training seed. {numbers}. Filled: the claim's rule holds for that seed alone; open: it does not. "
        "Grey: seeds of which nothing can be said.",
        data,
    )


def _figure(data: xr.Dataset) -> PaperFigure:
    """One panel per claim. A seed of which nothing can be said is a grey stripe: a mark would stand at a number."""
    ink, grey = "#222222", "#E4E4E4"
    places = np.arange(data.sizes["seed"])
    width = PAGE_WIDTH if data.sizes["claim"] > 1 else COLUMN_WIDTH
    letters = int((width / data.sizes["claim"] - AROUND) / LETTER)
    titles = [
        textwrap.fill(f"{claim}: {statement}", letters)
        for claim, statement in zip(data["claim"].values, data["statement"].values, strict=True)
    ]
    with style():
        figure = paper_figure(width, 2.2 + 0.13 * max(title.count("\n") for title in titles))
        axes = figure.subplots(1, data.sizes["claim"], squeeze=False)[0]
        for row, ax in enumerate(axes):
            number, holds = (data[name].values[row] for name in ("number", "holds"))
            for dots, filling in ((holds == 1, ink), (holds == 0, "white")):
                ax.plot(places[dots], number[dots], "o", color=ink, markerfacecolor=filling, markersize=4, gid="seeds")
            for place in places[np.isnan(number)]:
                ax.axvspan(place - 0.4, place + 0.4, facecolor=grey, linewidth=0, gid="nothing")
            low, high = np.nanmin([0, *number]), np.nanmax([0, *number])
            room = 0.12 * ((high - low) or 1)
            ax.set(xlim=(-0.6, len(places) - 0.4), ylim=(low - room, high + room), xlabel="training seed")
            ax.set_xticks(places, [str(int(seed)) for seed in data["seed"].values])
            ax.set_ylabel(textwrap.fill(str(data["measured"].values[row]), LETTERS))
            ax.set_title(titles[row])
            ax.grid(axis="y")
        failed = "it does not" if (data["holds"] == 1).any() else "the rule does not hold"
        dot: Any = {"color": ink, "marker": "o", "linestyle": ""}
        marks: list[tuple[Any, Line2D | Patch]] = [
            (data["holds"] == 1, Line2D([], [], **dot, label="the rule holds")),
            (data["holds"] == 0, Line2D([], [], **dot, markerfacecolor="white", label=failed)),
            (data["number"].isnull(), Patch(facecolor=grey, label="nothing can be said")),
        ]
        shown = [mark for there, mark in marks if bool(there.any())]
        legend_below(figure, shown)
    return figure
