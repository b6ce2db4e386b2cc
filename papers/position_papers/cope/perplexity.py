"""Perplexity at the training length and beyond (CoPE sec. 5.4, tables 5 and 8, fig. 3): C4 and C5.

    perplexity = exp of the mean of -log p over the tokens of held-out windows; compared as log perplexity, window by window

"Relative" in the paper is CoPE with every gate at 1: a learned vector per distance, the last for all from p_max - 1 on. RoPE stands for it
in the claims themselves, whose rules were written first; a CoPE that was trained with open gates is judged beside them, and the claims
stand only where they hold against it too.
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
    BEYOND_SEEDS,
    beyond_seeds,
    continued_caption,
    differences,
    differences_caption,
    errors_caption,
    judged_beyond_seeds,
    on_the_same_windows,
    perplexity_table,
    seed_spread,
    shortest_and_longest,
)
from position_papers.kit.rules import Above, All, AtMost
from position_papers.kit.samples import MATERIAL, Sample, between, between_rises, in_words, numbers_of
from position_papers.kit.scale import Scale
from position_papers.kit.scores import PLAIN, Scored, ScoreOptions, first_of, in_layers, missing, note, of_tasks, score_subject
from position_papers.kit.subjects import Subject
from repo_interp.plots.marks.perplexity import perplexity_by_length
from repo_interp.plots.marks.scores import layout_name

RELATIVE, ABSOLUTE = "rope", "learned"
RIVALS = {RELATIVE: "RoPE (our relative positions)", ABSOLUTE: "learned absolute positions"}
OPEN, OPEN_GATES = "open", "CoPE with every gate open"
AGAINST_OPEN = "against open gates"
POSITIONS = 16
"""p_max of the paper's table 8."""
OWN = "CoPE's log perplexity at the training length"
RELATIVES = "RoPE's log perplexity at the training length"
RATIO = f"the perplexity, at the training length, of a CoPE with p_max = {POSITIONS} over that of the one with the largest p_max"
RISE = "the rise of CoPE's log perplexity from the training length to the longest"

C4 = Claim(
    "C4",
    "perplexity: CoPE below relative below absolute",
    "CoPE table 5",
    "23.46 / 23.81 / 24.87",
    All(
        Above(OWN, (RIVALS[RELATIVE],), more=MATERIAL, relation="below"),
        Above(RELATIVES, (RIVALS[ABSOLUTE],), more=MATERIAL, relation="below"),
    ),
    also=(BEYOND_SEEDS, AGAINST_OPEN),
)
C4_SEEDS = beyond_seeds(C4)
C4_OPEN = Claim(
    "C4",
    "perplexity: CoPE below the paper's relative positions, CoPE with every gate open",
    "CoPE table 5",
    "23.46 / 23.81",
    Above(OWN, (OPEN_GATES,), more=MATERIAL, relation="below"),
    part=AGAINST_OPEN,
)
C4_POSITIONS = Claim("C4", f"p_max = {POSITIONS} suffices", "CoPE table 8", "23.22 / 23.46", AtMost(RATIO, 1.01), part="p_max")
C5 = Claim(  # absolute positions end at the training length
    "C5",
    "contexts longer than trained on: CoPE degrades least",
    "CoPE fig. 3",
    "figure",
    Above(RISE, (RIVALS[RELATIVE],), more=MATERIAL, relation="below"),
    also=(BEYOND_SEEDS, AGAINST_OPEN),
)
C5_SEEDS = beyond_seeds(C5)
C5_OPEN = Claim(
    "C5",
    "contexts longer than trained on: CoPE degrades less than with every gate open",
    "CoPE fig. 3",
    "figure",
    Above(RISE, (OPEN_GATES,), more=MATERIAL, relation="below"),
    part=AGAINST_OPEN,
)


def measure(subjects: Sequence[Subject], options: ScoreOptions, cache: Cache) -> list[Scored]:
    """Log perplexities of `subjects` by length, of those whose windows are the same."""
    return on_the_same_windows([score_subject(subject, options, cache) for subject in subjects])


def judge(scored: Sequence[Scored]) -> Iterator[Verdict]:
    """The verdicts on C4, its p_max, and C5, where a checkpoint has CoPE in every layer."""
    gated = [each for each in scored if gates_of(each) != OPEN]
    cope, opened = first_of(gated, COPE), first_of([each for each in scored if gates_of(each) == OPEN], COPE)
    if cope is not None:
        ordered, degrades = _ordered(cope, gated), _degrades(cope, gated)
        yield ordered
        yield judged_beyond_seeds(ordered, C4_SEEDS, seed_spread(scored, lambda each: _of_seeds(each)[0]))
        yield from _few_positions([each for each in gated if gates_of(each) == gates_of(cope)])
        yield degrades
        yield judged_beyond_seeds(degrades, C5_SEEDS, seed_spread(scored, lambda each: np.subtract(*reversed(_of_seeds(each)))))
    if cope is not None and opened is not None:
        yield _below_open(cope, opened)
        yield _degrades_less(cope, opened)


def _of_seeds(scored: Scored) -> tuple[np.ndarray, np.ndarray]:
    """Log perplexity of every training seed at the training length and at the longest."""
    short, long = (scored.sample((name,)).seeds for name in shortest_and_longest(scored))
    return short, long


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


def _ordered(cope: Scored, scored: Sequence[Scored]) -> Verdict:
    """C4: whether log perplexity at the training length is lower with CoPE than with RoPE, and with RoPE than with learned positions."""
    given = {name: first_of(scored, name) for name in RIVALS}
    rivals = {name: rival for name, rival in given.items() if rival is not None}
    absent = missing([name for name in RIVALS if name not in rivals], "language")
    if absent:
        return unmeasured(C4, cope.name, absent)
    compared = {COPE: cope, **rivals}
    samples = {name: checkpoint.sample(shortest_and_longest(checkpoint)[:1]) for name, checkpoint in compared.items()}
    below_relative = between(samples[RELATIVE], samples[COPE])
    below_absolute = between(samples[ABSOLUTE], samples[RELATIVE])
    differences = {f"{COPE} below {RELATIVE}": below_relative, f"{RELATIVE} below {ABSOLUTE}": below_absolute}
    values = {OWN: {RIVALS[RELATIVE]: below_relative}, RELATIVES: {RIVALS[ABSOLUTE]: below_absolute}}
    others = {name: samples[name] for name in rivals}
    return _perplexity(C4, compared, samples[COPE], values, others, in_words(differences, "log perplexity,", ""))


def _below_open(cope: Scored, opened: Scored) -> Verdict:
    """C4 (against open gates): whether CoPE's log perplexity at the training length is below that of CoPE with every gate open."""
    mine, theirs = (each.sample(shortest_and_longest(each)[:1]) for each in (cope, opened))
    difference = between(theirs, mine)
    text = in_words({opened.name: difference}, "log perplexity, below", "")
    compared, others = {COPE: cope, OPEN: opened}, {opened.name: theirs}
    return _perplexity(C4_OPEN, compared, mine, {OWN: {OPEN_GATES: difference}}, others, text)


def _perplexity(
    claim: Claim,
    compared: Mapping[str, Scored],
    mine: Sample,
    values: Mapping[str, Any],
    others: Mapping[str, Sample],
    text: str,
) -> Verdict:
    """The verdict on CoPE's perplexity at the training length, `mine`, with those of `others` as the control."""
    perplexity = float(np.exp(mine.mean))
    return verdict(
        claim,
        compared[COPE].name,
        "perplexity at the training length",
        values,
        perplexity,
        **numbers_of(mine, perplexity),  # the error of a logarithm is relative
        control=", ".join(f"{name} {np.exp(sample.mean):.4g}" for name, sample in others.items()),
        note=note(list(compared.values()), text),
    )


def _degrades_less(cope: Scored, opened: Scored) -> Verdict:
    """C5 (against open gates): whether CoPE's log perplexity rises less with the length than that of CoPE with every gate open."""
    short, long = shortest_and_longest(cope)
    if short == long or not {short, long} <= set(opened.test_sets):
        return unmeasured(C5_OPEN, cope.name, "no two checkpoints were scored beyond the training length")
    return _smaller_rise(C5_OPEN, OPEN_GATES, cope, opened, [opened], (short, long))


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


def _degrades(cope: Scored, scored: Sequence[Scored]) -> Verdict:
    """C5: whether CoPE's log perplexity rises less than RoPE's from the training length to the longest."""
    short, long = shortest_and_longest(cope)
    longer = {other.name: other for other in scored if other is not cope and {short, long} <= set(other.test_sets)}
    rope = first_of(scored, RELATIVE)
    if short == long or rope is None or rope.name not in longer:
        why = missing([RELATIVE], "language") if rope is None else "no checkpoint was scored beyond the training length"
        return unmeasured(C5, cope.name, why)
    return _smaller_rise(C5, RIVALS[RELATIVE], cope, rope, list(longer.values()), (short, long))


def _smaller_rise(
    claim: Claim, called: str, cope: Scored, rival: Scored, others: Sequence[Scored], lengths: tuple[str, str]
) -> Verdict:
    """The verdict on whether CoPE's log perplexity rises less between two lengths than that of `rival`, one of the `others`."""
    short, long = lengths
    rises = {each.name: (each.sample((short,)), each.sample((long,))) for each in (cope, *others)}
    difference = between_rises(rises[rival.name], rises[cope.name])
    changes = {name: after.mean - before.mean for name, (before, after) in rises.items()}
    smaller = [each.name for each in others if each is not rival and changes[each.name] < changes[cope.name]]
    return verdict(
        claim,
        cope.name,
        f"change of log perplexity from {short} to {long} tokens, nats",
        {RISE: {called: difference}},
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
        return numbers_of(Sample(long.seeds - short.seeds, np.empty(0), long.recorded, False))
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
    (C4, C4_SEEDS, C4_OPEN, C4_POSITIONS, C5, C5_SEEDS, C5_OPEN),
    replace(
        needs(
            "language",
            (COPE, RELATIVE, ABSOLUTE, "cope_16", "cope_open", "cope_sep_keys", "alibi", "kerple", "fire", "hope", "repo"),
        ),
        groups=trained_alike(of_tasks("language")),
        otherwise_of={
            **dict.fromkeys(
                (C4_OPEN.label, C5_OPEN.label), "no CoPE with open gates beside another one, trained on language, was given"
            ),
            C4_POSITIONS.label: f"no two CoPE checkpoints trained on language, one with p_max = {POSITIONS} and one with more, were given",
        },
    ),
    measure,
    judge,
    draw,
    LANGUAGE,
)
