"""The layers that learn positions (summary of RePo, method 3): R11, from recorded training runs.

    upper    RoPE below, RePo from layer L/3 on, as in the paper
    few      RePo only in the last quarter of the layers; claimed to fall back to RoPE
    lower    RePo in the first third of the layers, RoPE above; claimed to be unstable in training

A model is like RoPE if the share of needles found, averaged over L, 2 L and 4 L, differs by less
than `TOLERANCE`. Training is unstable if the final loss, over training seeds, is above that of RoPE
and that of RePo in the upper layers; the sources name no measure of stability.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from position_papers.kit import (
    Above,
    Cache,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Sample,
    Scored,
    Significant,
    Subject,
    between,
    evidence,
    in_legend,
    in_words,
    missing,
    note,
    numbers_of,
    of_tasks,
    score_by_length,
    score_table,
    scores_on_record,
    trained_alike,
    unmeasured,
)
from position_papers.repo.checkpoints import OLMO
from position_papers.repo.options import Options
from repo_interp.positions.layouts import parse_layout

TASK = "niah_keys"
TOLERANCE = 0.1
"""Largest difference in the share of needles. The sources name no number."""
AS_ROPE = (
    f"{TOLERANCE:g} less the difference to RoPE of the mean share of needles over L, 2L and 4L"
)
FINAL_LOSS = "the loss that training ends with"
RIVALS = ("RoPE", "RePo in the upper layers")
R11_FEW = Claim(
    "R11",
    "RePo in the last quarter of the layers alone falls back to RoPE",
    "RePo, summary, method 3",
    "in words",
    Significant(AS_ROPE),
    "few layers",
)
R11_LOWER = Claim(
    "R11",
    "RePo in the lower layers and RoPE in the upper ones is unstable in training",
    R11_FEW.source,
    "in words",
    Above(FINAL_LOSS, RIVALS),
    "lower layers",
)


def place_of(scored: Scored) -> str:
    """The layers of a model that learn positions: "upper", "few", "lower", or "rope" if none do; ""
    for other layouts.
    """
    layers = scored.configuration.layers
    schemes = parse_layout(scored.layout, layers)
    third = min(-(-layers // 3), layers - 1)
    # equal layouts, as with fewer than four layers, get the last of their names
    by_name = {"few": layers // 4, "upper": layers - layers // 3, "rope": 0}
    places = {
        ("rope",) * (layers - learned) + ("repo",) * learned: name
        for name, learned in by_name.items()
    } | {("repo",) * count + ("rope",) * (layers - count): "lower" for count in range(1, third + 1)}
    return places.get(tuple(schemes), "")


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> list[Scored]:
    """Read the scores that training recorded for every checkpoint and its seeds, without scoring
    again.
    """
    return scores_on_record(subjects)


def tabulate(scored: Sequence[Scored]) -> Iterator[Evidence]:
    """R11, for the first model with each name of `place_of`."""
    placed = {place_of(each): each for each in reversed(scored)}
    rope, upper = placed.get("rope"), placed.get("upper")
    if few := placed.get("few"):
        if rope is None:
            yield unmeasured(R11_FEW, few.name, missing(["RoPE"], TASK))
        else:
            yield _as_rope(few, rope)
    if lower := placed.get("lower"):
        # With the same seeds, differences are computed seed by seed
        alike = (
            each for each in scored if place_of(each) == "rope" and _seeds(each) == _seeds(lower)
        )
        rivals = dict(zip(RIVALS, (next(alike, rope), upper), strict=True))
        if absent := [name for name, each in rivals.items() if each is None]:
            yield unmeasured(R11_LOWER, lower.name, missing(absent, TASK))
        else:
            yield _unstable(lower, {name: each for name, each in rivals.items() if each})


def _seeds(scored: Scored) -> set[int]:
    return {run.seed for run in scored.recorded}


def _as_rope(few: Scored, rope: Scored) -> Evidence:
    sets = _test_sets([few, rope])
    mine, theirs = few.sample(sets), rope.sample(sets)
    difference = between(mine, theirs)
    return evidence(
        R11_FEW,
        few.name,
        f"mean share of needles found at {', '.join(sets)} tokens",
        # Equivalence by two one-sided tests: the nearer limit decides
        {AS_ROPE: replace(difference, margin=TOLERANCE - abs(difference.margin), samples=None)},
        **numbers_of(mine),
        control=f"{rope.name} {theirs.mean:.3f}",
        note=note([few, rope], in_words({rope.name: difference}, "above", "")),
    )


def _unstable(lower: Scored, rivals: dict[str, Scored]) -> Evidence:
    own = _losses(lower)
    differences = {name: between(own, _losses(each)) for name, each in rivals.items()}
    shares = "; ".join(
        f"{each.name} finds {each.sample(_test_sets([lower])[:1]).mean:.3f} at the training length"
        for each in (lower, *rivals.values())
    )
    return evidence(
        R11_LOWER,
        lower.name,
        "final training loss, nats per target",
        {FINAL_LOSS: differences},
        **numbers_of(own),
        control=", ".join(f"{each.name} {_losses(each).mean:.3g}" for each in rivals.values()),
        note=note([lower, *rivals.values()], in_words(differences, "above", " nats"), shares),
    )


def _losses(scored: Scored) -> Sample:
    runs = [run for run in scored.recorded if np.isfinite(run.loss)]
    return Sample(
        np.array([run.loss for run in runs]),
        np.empty(0),
        0,
        share=False,
        numbers=tuple(run.seed for run in runs),
    )


def _test_sets(scored: Sequence[Scored]) -> list[str]:
    """The lengths, from the training length on, at which every checkpoint has scores; ascending."""
    shared = set.intersection(*({*each.test_sets} for each in scored))
    return sorted((name for name in shared if int(name) >= scored[0].training_length), key=int)


def draw(scored: Sequence[Scored]) -> Iterator[Drawing]:
    """Draw the share of needles by length for RoPE and for RePo in some layers, if there is a model
    with "few" or "lower".
    """
    if not {place_of(each) for each in scored} & {"few", "lower"}:
        return
    sets = _test_sets(scored)
    table = score_table(scored, sets)
    labels = [
        "RePo below RoPE" if place_of(each) == "lower" else in_legend(each, scored)
        for each in scored
    ]
    data = table.assign_coords(
        test_set=[int(name) for name in sets], label=("checkpoint", labels)
    ).assign_attrs(axis="tokens", training_length=scored[0].training_length)
    yield Drawing(
        "placement",
        partial(score_by_length, data),
        "Needles found by context length, of RoPE and of RePo in some of the layers (summary of "
        f"RePo, method 3), {scored[0].sample(sets[:1]).count} prompts each, as recorded when "
        "training ended. Line: mean over seeds; small dots: each seed. Dotted: the training length.",
        data,
    )


def _goes_on_from_rope(subject: Subject) -> bool:
    configuration = subject.configuration
    return (
        of_tasks(TASK)(subject)
        and configuration is not None
        and bool(configuration.continue_from)
        and {*parse_layout(subject.layout, configuration.layers)} <= {"rope", "repo"}
    )


PLACEMENT = Experiment(
    "layers that learn positions",
    (R11_FEW, R11_LOWER),
    Needs(
        trained_alike(_goes_on_from_rope),
        "no checkpoints of needles in a haystack with RePo in some of the layers were given",
        tuple(
            f"{TASK}/{name}"
            for name in (
                *("rope", "repo", "repo_from_0", "repo_from_2", "repo_from_3"),
                *("repo_bottom", "rope_again"),
            )
        ),
        TASK,
    ),
    measure,
    tabulate,
    draw,
    OLMO,
)
