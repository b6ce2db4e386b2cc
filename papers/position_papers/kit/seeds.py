"""Seeds as an axis: an experiment on one checkpoint, repeated for every training seed with weights,
and one row for all seeds.

    seed      measured and judged by the experiment, with separate reasons why it cannot be judged
    row       mean and standard deviation over the seeds that can be judged; for a single seed its spread over prompts
    outcome   holds if the rule holds in all of these seeds, fails if it fails in one, else undecided

A seed is judged without Holm's correction, which is for the best of several: a rule that must hold
for all seeds is not more probable by chance than for one. Seeds that cannot be judged are not
measured, except the first; the same holds for checkpoints of the zoo without such seeds, except the
deciding one. The numbers that decide whether a seed can be judged (the spread of its positions, and
the loss without them) are kept with the first figure, next to `units`, the numbers of the
experiment by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import xarray as xr

from position_papers.kit.cache import Cache
from position_papers.kit.experiment import Drawing, Experiment, joined
from position_papers.kit.judge.claims import Evidence, unmeasured
from position_papers.kit.learned_positions import measured
from position_papers.kit.subjects import Subject, seeds_of

USE = {
    "range": "used_range",
    "from_token": "used_from_token",
    "plain": "used_loss",
    "frozen": "used_loss_frozen",
    "index": "used_loss_index",
    "layer": "used_layer",
    "head": "used_head",
    "prompt": "used_prompt",
}
"""Names of the numbers of `kit.learned_positions`, and of their axes, among those of an experiment.
"""


class Seed(NamedTuple):
    """One training seed of a checkpoint."""

    checkpoint: str
    data: Any
    """The measurement of the experiment; None for a seed, other than the first, that cannot be
    judged.
    """
    why_not: Sequence[str]
    use: xr.Dataset | None
    """The measurement of `kit.learned_positions`."""


def over_seeds(
    experiment: Experiment,
    units: Callable[[Any], xr.Dataset],
    across: Callable[[Mapping[int, Any]], Iterable[Evidence]] = lambda by_seed: (),
) -> Experiment:
    """Extend `experiment`, whose groups are single checkpoints, to all seeds.

    `across` makes evidence from the joint measurements of all seeds that can be judged.
    """

    def measure(subjects: Sequence[Subject], options: Any, cache: Cache) -> dict[int, Seed] | None:
        seeds: dict[int, Seed] = {}
        of_seeds = seeds_of(subjects[0])
        reasons = {
            seed: experiment.needs.why_not(own, options, cache) for seed, own in of_seeds.items()
        }
        if all(reasons.values()) and subjects[0].name in experiment.needs.zoo[1:]:
            return None
        for seed, own in of_seeds.items():
            data = None if reasons[seed] and seeds else experiment.measure([own], options, cache)
            if not seeds and data is None:
                return None
            seeds[seed] = Seed(own.name, data, reasons[seed], measured(own, options, cache))
        return seeds

    def tabulate(seeds: Mapping[int, Seed]) -> Iterator[Evidence]:
        rows: dict[Any, dict[int, Evidence]] = {}
        for seed, own in seeds.items():
            if own.data is not None:
                for each in experiment.tabulate(own.data):
                    rows.setdefault(each.claim, {})[seed] = each.without_a_number(*own.why_not)
        for claim, by_seed in rows.items():
            silent = {
                seed: unmeasured(claim, own.checkpoint, own.why_not)
                for seed, own in seeds.items()
                if own.data is None
            }
            for seed, own in sorted((by_seed | silent).items()):
                yield replace(own, seed=seed)
        yield from across({seed: own.data for seed, own in seeds.items() if not own.why_not})

    def draw(seeds: Mapping[int, Seed]) -> Iterator[Drawing]:
        own = next(iter(seeds.values()))
        silent = f" Not judged: {own.why_not[0]}." if own.why_not else ""
        drawn = [replace(each, caption=each.caption + silent) for each in experiment.draw(own.data)]
        by_seed = _joined(
            {seed: units(own.data) for seed, own in seeds.items() if own.data is not None}
        )
        use = _joined(
            {seed: own.use.rename(USE) for seed, own in seeds.items() if own.use is not None}
        )
        for first in drawn[:1]:
            yield replace(
                first,
                data=first.data.drop_vars(list(by_seed), errors="ignore").assign(by_seed | use),
            )
        yield from drawn[1:]

    return replace(
        experiment,
        needs=replace(experiment.needs, why_not=lambda *_: ()),
        measure=measure,
        tabulate=tabulate,
        draw=draw,
    )


def _joined(by_seed: Mapping[int, xr.Dataset]) -> dict[str, xr.DataArray]:
    """Join the variables of all seeds along a new first axis `seed`."""
    return (
        {str(name): array for name, array in joined(by_seed, "seed", "outer").items()}
        if by_seed
        else {}
    )
