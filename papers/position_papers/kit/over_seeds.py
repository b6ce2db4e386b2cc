"""An experiment asked of every training seed whose weights are there: whether what one trained model shows is a matter of its seed.

    seeds         NAME, NAME/seed-1, ...: those of every checkpoint of a group; each seed is a group of its own
    one seed      measured and judged as the experiment does it, with its own reasons why nothing can be said
    every seed    holds where the claim's rule holds for all seeds that can be judged, of which there are at least two

A row of one checkpoint says what one model does, and its spread is one over prompts. Beside it stands a row of this, whose number is the
mean over seeds and whose spread is theirs; its reasons list the number of every seed. A seed is judged by itself, without Holm's
correction, which is for the best of several: what has to hold for all of them is no more probable by chance than for one. Knows nothing
about any paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from position_papers.kit.cache import Cache
from position_papers.kit.claims import EVERY_SEED, FAILS, HOLDS, UNDECIDED, Claim, Kind, Reason, Verdict, unmeasured, verdict
from position_papers.kit.experiment import Experiment, reasons_against
from position_papers.kit.experiment import judge as verdicts_of
from position_papers.kit.rules import AtLeast
from position_papers.kit.subjects import Subject, seeds_of

LEAST = 2
"""Seeds that have to be judged for a row over them."""
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

    otherwise = f"needs the weights of at least {LEAST} training seeds"
    return Experiment(
        f"{experiment.name} over seeds",
        tuple(claims.values()),
        replace(experiment.needs, otherwise=otherwise, otherwise_of={}, why_not=lambda subject, options, cache: ()),
        measure,
        lambda rows: [_together(claim, checkpoint, by_seed) for (claim, checkpoint), by_seed in rows.items()],
        lambda rows: iter(()),
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
