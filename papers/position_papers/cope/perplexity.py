"""Perplexity at the training length and beyond (CoPE sec. 5.4, tables 5 and 8, fig. 3): C4 and C5.

    perplexity = exp of the mean of -log p over the tokens of held-out windows; compared as log
    perplexity, window by window

"Relative" in the paper is CoPE with every gate at 1: a learned vector per distance, the last one for
all distances from p_max - 1 on. The claims are judged against a CoPE that was trained with open
gates. RoPE is a further comparison, which the paper makes on code.

All seeds are scored on the same windows, so errors over seeds do not include the effect of other
windows. C4 therefore requires a difference that other windows would not reverse. C5, for which the
paper only has a figure, requires no minimal difference, so its number depends on the windows
(`other_windows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from position_papers.cope.errors import COPE
from position_papers.kit import (
    MATERIAL,
    PLAIN,
    Above,
    All,
    AtMost,
    Cache,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Scale,
    Scored,
    ScoreOptions,
    Subject,
    between,
    between_rises,
    compared,
    evidence,
    first_of,
    in_legend,
    in_words,
    missing,
    note,
    numbers_of,
    of_tasks,
    on_the_same_windows,
    perplexity_table,
    rise,
    score_by_length,
    score_subject,
    shortest_and_longest,
    trained_alike,
    unmeasured,
)
from repo_interp.plots.marks.scores import layout_name

ROPE, ABSOLUTE, OPEN, KEYS, FEW = "rope", "learned", "open", "separate_keys", "few"
POSITIONS = 16
"""p_max of the paper's table 8."""
CALLED = {
    COPE: "CoPE",
    ROPE: "RoPE",
    ABSOLUTE: "learned absolute positions",
    OPEN: "CoPE with every gate open (the paper's relative positions)",
    KEYS: "CoPE whose gates have keys of their own",
    FEW: f"CoPE with p_max = {POSITIONS}",
}
AGAINST_ROPE = "against RoPE"
OWN = "the log perplexity of {} at the training length"
RATIO = (
    f"the perplexity, at the training length, of a CoPE with p_max = {POSITIONS} over "
    "that with more positions"
)
RISE = "the rise of CoPE's log perplexity from the training length to the longest"


def _below(quantity: str, rival: str) -> Above:
    return Above(quantity, (CALLED[rival],), more=MATERIAL, relation="below")


def _in_order(*models: str) -> All:
    """Return the rule that log perplexity rises from each of `models` to the next."""
    return All(*(_below(OWN.format(CALLED[own]), rival) for own, rival in pairwise(models)))


C4 = Claim(
    "C4",
    "perplexity: CoPE below relative (every gate open) below absolute",
    "CoPE table 5",
    "23.46 / 23.81 / 24.87",
    _in_order(COPE, OPEN, ABSOLUTE),
    shows_control=True,
)
C4_ROPE = Claim(
    "C4",
    "perplexity: CoPE below RoPE",
    "CoPE table 5, code",
    "3.9 / 4.1",
    _in_order(COPE, ROPE),
    AGAINST_ROPE,
)
C4_POSITIONS = Claim(
    "C4",
    f"p_max = {POSITIONS} suffices",
    "CoPE table 8",
    "23.22 / 23.46",
    AtMost(RATIO, 1.01),
    part="p_max",
)
C4_KEYS = Claim(
    "C4",
    "perplexity: keys of the gates' own (sep-keys) below the keys of attention",
    "CoPE table 8",
    "23.18 / 23.46",
    _in_order(KEYS, COPE),
    "sep-keys",
)
ORDERS = {
    C4: (COPE, OPEN, ABSOLUTE),
    C4_ROPE: (COPE, ROPE),
    C4_POSITIONS: (FEW, COPE),
    C4_KEYS: (KEYS, COPE),
}
C5 = Claim(  # absolute positions end at the training length
    "C5",
    "contexts longer than trained on: CoPE degrades less than relative positions (every gate open)",
    "CoPE fig. 3",
    "figure",
    Above(RISE, (CALLED[OPEN],), relation="below"),
    apart=("other windows",),
)
C5_ROPE = Claim(
    "C5",
    "contexts longer than trained on: CoPE degrades less than RoPE",
    "CoPE fig. 3",
    "none",
    Above(RISE, (CALLED[ROPE],), relation="below"),
    AGAINST_ROPE,
)


def measure(subjects: Sequence[Subject], options: ScoreOptions, cache: Cache) -> list[Scored]:
    """Measure log perplexities by length, and keep the `subjects` with the same windows."""
    return on_the_same_windows([score_subject(subject, options, cache) for subject in subjects])


def tabulate(scored: Sequence[Scored]) -> Iterator[Evidence]:
    """Yield the evidence on C4, its parts, and C5 against open gates and against RoPE, if a
    checkpoint has CoPE in every layer.
    """
    by_gates = {
        gates: [each for each in scored if gates_of(each) == gates]
        for gates in (FEW, COPE, OPEN, KEYS)
    }
    models = {name: first_of(own, COPE) for name, own in by_gates.items()}
    models |= {name: first_of(scored, name) for name in (ROPE, ABSOLUTE)}
    given = {name: each for name, each in models.items() if each is not None}
    if COPE not in given:
        return
    for claim, order in ORDERS.items():
        yield _ordered(claim, given, order)
    for claim, against in ((C5, OPEN), (C5_ROPE, ROPE)):
        yield _degrades(claim, given, against, scored)


def gates_of(scored: Scored) -> str:
    """Return the input of the gates of a checkpoint with CoPE: `COPE` for keys, which is the
    default without a record, or `FEW` for keys with few positions.
    """
    options = scored.configuration.scheme_options
    gates = str(options.get("gates", "keys"))
    return gates if gates != "keys" else FEW if options.get("p_max") == POSITIONS else COPE


def draw(scored: Sequence[Scored]) -> Iterator[Drawing]:
    """Draw perplexity by length (fig. 3): all schemes compared with RoPE, and the variants of CoPE
    compared with open gates.
    """
    variants = [each for each in scored if each.layout == COPE]
    opened = first_of([each for each in variants if gates_of(each) == OPEN], COPE)
    yield _drawn("perplexity", scored, first_of(scored, ROPE), layout_name(ROPE))
    if opened is not None:
        yield _drawn("perplexity_variants", variants, opened, "open gates")


def _drawn(name: str, scored: Sequence[Scored], reference: Scored | None, called: str) -> Drawing:
    """Return the figure `name`. With a `reference`, it has the differences from it, which is named
    `called`.
    """
    table, said = compared(
        [(each, PLAIN) for each in scored], perplexity_table(scored), reference, called
    )
    length, windows = scored[0].training_length, scored[0].sample(scored[0].test_sets[:1]).count
    caption = (
        f"Perplexity by length of the context (CoPE fig. 3, tables 5 and 8), {windows} windows of "
        "held-out text of each length. Windows of two lengths are other texts: compare checkpoints "
        "at one length, and their differences between lengths. Dotted: the training length, "
        f"{length} tokens, where learned absolute positions end. {said}"
    )
    table = table.assign_coords(label=("checkpoint", [_label(each, scored) for each in scored]))
    chart = partial(score_by_length, table, f"trained at {length} tokens")
    return Drawing(name, chart, caption, table)


def _absent(claim: Claim, given: Mapping[str, Scored], wanted: Sequence[str]) -> Evidence | None:
    """Return the evidence that some of the models `wanted` were not given; None if all were."""
    names = [CALLED[name] for name in wanted if name not in given]
    return unmeasured(claim, given[COPE].name, missing(names, "language")) if names else None


def _ordered(claim: Claim, given: Mapping[str, Scored], order: Sequence[str]) -> Evidence:
    """Return the evidence that log perplexity at the training length rises from each model in
    `order` to the next.
    """
    if absent := _absent(claim, given, order):
        return absent
    models = [given[name] for name in order]
    samples = [each.sample(shortest_and_longest(each)[:1]) for each in models]
    perplexities = [float(np.exp(sample.mean)) for sample in samples]
    values: dict[str, Any] = {RATIO: perplexities[0] / perplexities[1]}
    told: list[str] = []
    for (own, rival), called, (first, second) in zip(
        pairwise(models), pairwise(order), pairwise(samples), strict=True
    ):
        below = between(second, first)
        values[OWN.format(CALLED[called[0]])] = {CALLED[called[1]]: below}
        told.append(f"{own.name} {in_words({rival.name: below}, 'below', '')}")
    return evidence(
        claim,
        models[0].name,
        "perplexity at the training length",
        values,
        # the error of a logarithm is a relative error
        **numbers_of(samples[0], perplexities[0], perplexities[0]),
        control=", ".join(
            f"{each.name} {own:.4g}" for each, own in zip(models[1:], perplexities[1:], strict=True)
        ),
        note=note(models, f"log perplexity, {'; '.join(told)}"),
    )


def _degrades(
    claim: Claim, given: Mapping[str, Scored], against: str, scored: Sequence[Scored]
) -> Evidence:
    """Return the evidence that CoPE's log perplexity rises less from the training length to the
    longest length than that of the rival `against`.
    """
    if absent := _absent(claim, given, (against,)):
        return absent
    cope, rival = given[COPE], given[against]
    short, long = shortest_and_longest(cope)
    longer = {each.name: each for each in scored if {short, long} <= set(each.test_sets)}
    if short == long or rival.name not in longer:
        return unmeasured(
            claim, cope.name, "no two checkpoints were scored beyond the training length"
        )
    rises = {name: (each.sample((short,)), each.sample((long,))) for name, each in longer.items()}
    difference = between_rises(rises[rival.name], rises[cope.name])
    changes = {name: after.mean - before.mean for name, (before, after) in rises.items()}
    smaller = [
        name
        for name, change in changes.items()
        if name != rival.name and change < changes[cope.name]
    ]
    return evidence(
        claim,
        cope.name,
        f"change of log perplexity from {short} to {long} tokens, nats",
        {RISE: {CALLED[against]: difference}},
        **numbers_of(rise(*rises[cope.name])),
        control=", ".join(
            f"{name} {change:+.3g}" for name, change in changes.items() if name != cope.name
        ),
        note=note(
            [cope, rival],
            in_words({rival.name: difference}, "less than", " nats"),
            f"rising less than {cope.name}: {', '.join(smaller)} (not compared in the paper)"
            if smaller
            else "",
        ),
    )


LANGUAGE = Scale(12, 768, 1024, "100 epochs of 100M tokens")  # sec. 5.4


_GATES = {KEYS: "keys of the gates' own", OPEN: "open gates", "values": "gates from values"}


def _label(scored: Scored, among: Sequence[Scored]) -> str:
    """Return the name of a checkpoint in a legend: for CoPE with its number of positions and its
    gates, for others as in `in_legend`.
    """
    positions = scored.configuration.scheme_options.get("p_max")
    parts = [
        layout_name(COPE),
        f"{positions} positions" if positions else "",
        _GATES.get(gates_of(scored), ""),
    ]
    return ", ".join(filter(None, parts)) if scored.layout == COPE else in_legend(scored, among)


_ZOO = (
    COPE,
    ROPE,
    ABSOLUTE,
    "cope_16",
    "cope_open",
    "cope_sep_keys",
    "alibi",
    "kerple",
    "fire",
    "hope",
    "repo",
)
PERPLEXITY = Experiment(
    "perplexity",
    (*ORDERS, C5, C5_ROPE),
    Needs(
        trained_alike(of_tasks("language")),
        "no checkpoint with CoPE in every layer and gates from its keys, trained on "
        "language, was given",
        tuple(f"language/{name}" for name in _ZOO),
        "language",
        {
            C4_POSITIONS.label: "no two CoPE checkpoints trained on language, one with "
            f"p_max = {POSITIONS} and one with more, were given"
        },
    ),
    measure,
    tabulate,
    draw,
    LANGUAGE,
)
