"""Perplexity at the training length and beyond (CoPE sec. 5.4, tables 5 and 8, fig. 3): C4 and C5.

    perplexity = exp of the mean of -log p over the tokens of held-out windows; compared as log perplexity, window by window

"Relative" in the paper is CoPE with every gate at 1: a learned vector per distance, the last for all from p_max - 1 on. The claims are
judged against a CoPE that was trained with open gates. RoPE is another comparison, which the paper makes on code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from position_papers.cope.errors import COPE, needs
from position_papers.kit.cache import Cache
from position_papers.kit.claims import Claim, Verdict, unmeasured, verdict
from position_papers.kit.experiment import Drawing, Experiment, trained_alike
from position_papers.kit.perplexities import (
    continued_caption,
    differences,
    differences_caption,
    errors_caption,
    on_the_same_windows,
    perplexity_table,
    shortest_and_longest,
)
from position_papers.kit.rules import Above, All, AtMost
from position_papers.kit.samples import MATERIAL, Sample, between, between_rises, in_words, numbers_of, rise
from position_papers.kit.scale import Scale
from position_papers.kit.scores import PLAIN, Scored, ScoreOptions, first_of, in_layers, missing, note, of_tasks, score_subject
from position_papers.kit.subjects import Subject
from repo_interp.plots.marks.perplexity import perplexity_by_length
from repo_interp.plots.marks.scores import layout_name

ROPE, ABSOLUTE, OPEN = "rope", "learned", "open"
CALLED = {
    ROPE: "RoPE",
    ABSOLUTE: "learned absolute positions",
    OPEN: "CoPE with every gate open (the paper's relative positions)",
}
AGAINST_ROPE = "against RoPE"
POSITIONS = 16
"""p_max of the paper's table 8."""
OWN = "CoPE's log perplexity at the training length"
RELATIVES = "the log perplexity of CoPE with every gate open at the training length"
RATIO = f"the perplexity, at the training length, of a CoPE with p_max = {POSITIONS} over that of the one with the largest p_max"
RISE = "the rise of CoPE's log perplexity from the training length to the longest"


def _below(quantity: str, rival: str) -> Above:
    return Above(quantity, (CALLED[rival],), more=MATERIAL, relation="below")


C4 = Claim(
    "C4",
    "perplexity: CoPE below relative (every gate open) below absolute",
    "CoPE table 5",
    "23.46 / 23.81 / 24.87",
    All(_below(OWN, OPEN), _below(RELATIVES, ABSOLUTE)),
)
C4_ROPE = Claim("C4", "perplexity: CoPE below RoPE", "CoPE table 5, code", "3.9 / 4.1", _below(OWN, ROPE), AGAINST_ROPE)
C4_POSITIONS = Claim("C4", f"p_max = {POSITIONS} suffices", "CoPE table 8", "23.22 / 23.46", AtMost(RATIO, 1.01), part="p_max")
C5 = Claim(  # absolute positions end at the training length
    "C5",
    "contexts longer than trained on: CoPE degrades less than relative positions (every gate open)",
    "CoPE fig. 3",
    "figure",
    _below(RISE, OPEN),
)
C5_ROPE = Claim(
    "C5", "contexts longer than trained on: CoPE degrades less than RoPE", "CoPE fig. 3", "none", _below(RISE, ROPE), AGAINST_ROPE
)


def measure(subjects: Sequence[Subject], options: ScoreOptions, cache: Cache) -> list[Scored]:
    """Log perplexities of `subjects` by length, of those whose windows are the same."""
    return on_the_same_windows([score_subject(subject, options, cache) for subject in subjects])


def judge(scored: Sequence[Scored]) -> Iterator[Verdict]:
    """The verdicts on C4, its p_max, and C5, where a checkpoint has CoPE in every layer: against open gates, and against RoPE."""
    gated = [each for each in scored if gates_of(each) != OPEN]
    cope = first_of(gated, COPE)
    rivals = {name: first_of(gated, name) for name in (ROPE, ABSOLUTE)}
    rivals[OPEN] = first_of([each for each in scored if gates_of(each) == OPEN], COPE)
    if cope is None:
        return
    yield _ordered(C4, cope, rivals, (OPEN, ABSOLUTE))
    yield _ordered(C4_ROPE, cope, rivals, (ROPE,))
    yield from _few_positions([each for each in gated if gates_of(each) == gates_of(cope)])
    yield _degrades(C5, cope, rivals, OPEN, scored)
    yield _degrades(C5_ROPE, cope, rivals, ROPE, scored)


def draw(scored: Sequence[Scored]) -> Iterator[Drawing]:
    """Perplexity by length (fig. 3)."""
    table, length = perplexity_table(scored), scored[0].training_length
    windows = scored[0].sample(scored[0].test_sets[:1]).count
    caption = (
        f"Perplexity by length of the context (CoPE fig. 3, table 5), {windows} windows of held-out text of each length. Dotted: the "
        f"training length, {length} tokens, where learned absolute positions end. {errors_caption(table)}{continued_caption(scored)}"
    )
    rope = first_of(scored, "rope")
    if rope is not None:
        table = table.assign(differences([(each, PLAIN) for each in scored], rope, layout_name("rope"), table))
        caption += f" {differences_caption(layout_name('rope'))}"
    table = table.assign_attrs(axis="tokens", training_length=length).assign_coords(label=("checkpoint", _labels(scored)))
    yield Drawing("perplexity", perplexity_by_length(table, f"trained at {length} tokens"), caption, table)


def _ordered(claim: Claim, cope: Scored, rivals: Mapping[str, Scored | None], order: Sequence[str]) -> Verdict:
    """Whether log perplexity at the training length is lower with CoPE than with the first of `order`, and so on along it."""
    given = {name: rivals[name] for name in order}
    absent = _absent(given)
    if absent:
        return unmeasured(claim, cope.name, absent)
    compared = {COPE: cope, **{name: each for name, each in given.items() if each is not None}}
    samples = {name: each.sample(shortest_and_longest(each)[:1]) for name, each in compared.items()}
    pairs = list(zip((COPE, *order), order, strict=False))
    below = [between(samples[second], samples[first]) for first, second in pairs]
    told = [
        f"{compared[pair[0]].name} {in_words({compared[pair[1]].name: each}, 'below', '')}"
        for pair, each in zip(pairs, below, strict=True)
    ]
    values = {quantity: {CALLED[pair[1]]: each} for quantity, pair, each in zip((OWN, RELATIVES), pairs, below, strict=False)}
    mine, perplexity = samples[COPE], float(np.exp(samples[COPE].mean))
    return verdict(
        claim,
        cope.name,
        "perplexity at the training length",
        values,
        perplexity,
        **numbers_of(mine, perplexity),  # the error of a logarithm is relative
        control=", ".join(f"{compared[name].name} {np.exp(samples[name].mean):.4g}" for name in order),
        note=note(list(compared.values()), f"log perplexity, {'; '.join(told)}"),
    )


def _absent(rivals: Mapping[str, Scored | None]) -> str:
    names = {name: "CoPE with open gates" if name == OPEN else name for name, each in rivals.items() if each is None}
    return missing(names.values(), "language")


def gates_of(scored: Scored) -> str:
    """What a checkpoint's gates look at, where it has CoPE: "keys" where its training record does not say."""
    return str(scored.configuration.scheme_options.get("gates", "keys"))


def _few_positions(scored: Sequence[Scored]) -> Iterator[Verdict]:
    """The verdict on p_max, where two CoPE checkpoints differ in it."""
    by_positions = {p_max(checkpoint): checkpoint for checkpoint in reversed(scored) if checkpoint.layout == COPE}
    few, most = by_positions.get(POSITIONS), by_positions[max(by_positions)]
    if few is None or few is most:
        return
    samples = [checkpoint.sample(shortest_and_longest(checkpoint)[:1]) for checkpoint in (few, most)]
    ratio = float(np.exp(samples[0].mean - samples[1].mean))
    difference = between(*samples)
    yield verdict(
        C4_POSITIONS,
        few.name,
        f"perplexity with p_max = {POSITIONS} over that with {p_max(most)}",
        {RATIO: ratio},
        ratio,
        ratio * difference.standard_error if np.isfinite(difference.standard_error) else None,
        f"{difference.over} (standard error)",
        samples[0].count,
        note=note([few, most], f"perplexity {np.exp(samples[0].mean):.4g} and {np.exp(samples[1].mean):.4g} ({most.name})"),
        seeds=min(len(sample.seeds) for sample in samples),
    )


def p_max(scored: Scored) -> int:
    """Whole positions that a CoPE checkpoint can tell apart; its training length where its training record does not say."""
    return int(scored.configuration.scheme_options.get("p_max", 0)) or scored.training_length


def _degrades(claim: Claim, cope: Scored, rivals: Mapping[str, Scored | None], against: str, scored: Sequence[Scored]) -> Verdict:
    """Whether CoPE's log perplexity rises less from the training length to the longest than that of the rival called `against`."""
    short, long = shortest_and_longest(cope)
    rival = rivals[against]
    longer = {each.name: each for each in scored if each is cope or {short, long} <= set(each.test_sets)}
    if short == long or rival is None or rival.name not in longer:
        why = _absent({against: rival}) or "no two checkpoints were scored beyond the training length"
        return unmeasured(claim, cope.name, why)
    rises = {name: (each.sample((short,)), each.sample((long,))) for name, each in longer.items()}
    difference = between_rises(rises[rival.name], rises[cope.name])
    changes = {name: after.mean - before.mean for name, (before, after) in rises.items()}
    smaller = [name for name, change in changes.items() if name != rival.name and change < changes[cope.name]]
    return verdict(
        claim,
        cope.name,
        f"change of log perplexity from {short} to {long} tokens, nats",
        {RISE: {CALLED[against]: difference}},
        changes[cope.name],
        **_numbers_of_rise(*rises[cope.name]),
        control=", ".join(f"{name} {change:+.3g}" for name, change in changes.items() if name != cope.name),
        note=note(
            [cope, rival],
            in_words({rival.name: difference}, "less than", " nats"),
            f"rising less than {cope.name}: {', '.join(smaller)} (not compared in the paper)" if smaller else "",
        ),
    )


def _numbers_of_rise(short: Sample, long: Sample) -> dict[str, Any]:
    """Spread, over what, and n of a rise: the windows of two lengths differ, so their errors add."""
    if min(len(short.seeds), len(long.seeds)) > 1 or short.spread is None or long.spread is None:
        return numbers_of(rise(short, long))
    return {"spread": float(np.hypot(short.spread, long.spread)), "spread_over": long.over, "n": long.count}


LANGUAGE = Scale(12, 768, 1024, "100 epochs of 100M tokens")  # sec. 5.4


_GATES = {"separate_keys": "keys of the gates' own", OPEN: "open gates", "values": "gates from values"}


def _labels(scored: Sequence[Scored]) -> list[str]:
    """What a legend calls each checkpoint: its layout, with its gates and number of positions where several have CoPE; else "", for its
    name.
    """
    layouts = [in_layers(each) for each in scored]
    return [
        _cope_label(each)
        if layout == COPE and layouts.count(layout) > 1
        else layout_name(layout)
        if layout == COPE or layouts.count(layout) == 1
        else ""
        for each, layout in zip(scored, layouts, strict=True)
    ]


def _cope_label(scored: Scored) -> str:
    """What a legend calls a checkpoint with CoPE: its number of positions and what its gates look at, where they are recorded."""
    positions = scored.configuration.scheme_options.get("p_max")
    parts = [layout_name(COPE), f"{positions} positions" if positions else "", _GATES.get(gates_of(scored), "")]
    return ", ".join(filter(None, parts))


PERPLEXITY = Experiment(
    "perplexity",
    (C4, C4_ROPE, C4_POSITIONS, C5, C5_ROPE),
    replace(
        needs(
            "language",
            (COPE, ROPE, ABSOLUTE, "cope_16", "cope_open", "cope_sep_keys", "alibi", "kerple", "fire", "hope", "repo"),
        ),
        groups=trained_alike(of_tasks("language")),
        otherwise_of={
            C4_POSITIONS.label: f"no two CoPE checkpoints trained on language, one with p_max = {POSITIONS} and one with more, were given",
        },
    ),
    measure,
    judge,
    draw,
    LANGUAGE,
)
