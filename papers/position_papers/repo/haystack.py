"""Needle in a haystack (RePo table 1, fig. 1, 4, 5): R9 at the training length and beyond it, from
the measurements of `needles`.

    hybrids       R2N1 and N2R1 at the training length L
    start layer   difference between starting layers of RePo in the mean share over L, 2 L and 4 L
    later start   change of the share at L per layer of a later start, seed by seed, without a start
                  at layer 0, which the paper does not have
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from position_papers.kit import (
    NORMAL_95,
    PLAIN,
    Above,
    All,
    AtLeast,
    AtMost,
    Below,
    Cache,
    Claim,
    Difference,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Subject,
    Where,
    asked_the_same,
    between,
    evidence,
    in_words,
    joined,
    mean_of,
    method_panels,
    note,
    numbers_of,
    paired_seeds,
    sample_table,
    unmeasured,
    why_not,
)
from position_papers.repo.checkpoints import (
    HAYSTACKS,
    NO_HAYSTACK,
    OF_PAPER,
    OLMO,
    called,
    finds_needles,
    longest_trained,
    needles_of,
    starting_layer,
)
from position_papers.repo.needles import (
    CEILING,
    METHODS,
    NEEDS_POSITIONS,
    NOPE,
    YARN,
    Searched,
    found_without_positions,
    search,
)
from position_papers.repo.options import Options

ROOM = Below("RoPE's share of needles found (asked for after results were seen)", CEILING)
ABLE = AtLeast("RoPE's share of needles found, without which the task cannot be done at all", 0.1)
FINDS = AtLeast("its own share of them, without which it says nothing on needles", 0.1)
ABOVE = Above("the share of needles found", ("RoPE",))
ABOVE_AT_LONGER = Above(
    f"at every longer length where {ROOM.words}, {ABOVE.quantity}", ABOVE.rivals
)
CONVERGED = AtLeast("the lowest share that a seed of either finds at the training length", 0.9)
ORDER = (
    Above("R2N1's share of needles found", ("N2R1", "RoPE"), required=("RoPE",)),
    Above("N2R1's share of needles found", ("RoPE",), required=()),
)
TOLD_APART = Below("the lowest of these means", CEILING)
ROBUST = AtMost(
    "the largest difference between starting layers of the mean share over L, 2L and 4L "
    "(YaRN beyond L)",
    0.05,
)
FEWER = Above(
    "the change of the share of needles found by layer that RePo starts later",
    ("0",),
    relation="below",
)
LEFT_OUT = {
    "niah_keys": "seeds 2 and 8 are left out: their RoPE models, which all others continue, "
    "had not learned the task after 5,000 and "
    "6,000 steps (8, whose RoPE model found .86, after its scores were seen)"
}
"""Seeds that were trained but are not in the zoo, by task."""
UNUSED = "is not shown to use learned positions to its advantage, which the paper's models do"
UNABLE = "RoPE finds hardly any of them, so the model cannot do the task"
NO_ROOM = "RoPE finds nearly all of them, so nothing can be above it"

R9 = Claim(
    "R9",
    "needle in a haystack at the training length: RePo above RoPE",
    "RePo table 1",
    "91.3 against 85.9",
    Where(All(NEEDS_POSITIONS, ROOM, ABLE, FINDS), ABOVE),
    shows_control=True,
)
R9_LONGER = Claim(
    "R9",
    "needle in a haystack at twice and four times the training length, with YaRN: RePo above RoPE",
    "RePo fig. 1, 5",
    "figure",
    Where(All(NEEDS_POSITIONS, CONVERGED), ABOVE_AT_LONGER),
    part="longer",
)
R9_HYBRIDS = Claim(
    "R9",
    "needle in a haystack at the training length: R2N1 above N2R1 above RoPE",
    "RePo table 1",
    "90.5 / 88.3 / 85.9",
    Where(All(NEEDS_POSITIONS, ROOM), All(*ORDER)),
    part="hybrids",
)
R9_START = Claim(
    "R9",
    "needle in a haystack: robust to the layer that RePo starts at",
    "RePo fig. 4",
    "figure",
    Where(All(NEEDS_POSITIONS, TOLD_APART), ROBUST),
    part="start layer",
)
R9_LATER = Claim(
    "R9",
    "needle in a haystack at the training length: the later RePo starts, the fewer needles "
    "it finds",
    "RePo fig. 4, app. B.5",
    "figure",
    Where(NEEDS_POSITIONS, FEWER),
    part="later start",
)

# ---- measured ------------------------------------------------------------------------------------


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> list[Searched]:
    """Measure the needles that every checkpoint finds. Raises InputError for a checkpoint that has
    no needle task.
    """
    searched = [search(subject, options, cache) for subject in subjects]
    return [
        replace(each, is_unused=bool(why_not(each.subject, options, cache))) for each in searched
    ]


# ---- tabulated --------------------------------------------------------------------------------------


def tabulate(searched: Sequence[Searched]) -> Iterator[Evidence]:
    """Compare checkpoints with learned positions with RoPE at L and beyond; judge the hybrids and
    the starting layers of RePo.
    """
    by_layout = {each.subject.layout.partition("@")[0]: each for each in reversed(searched)}
    rope, (nope, why_not) = by_layout.get("rope"), found_without_positions(searched)
    for own in searched:
        if rope is not None and own.subject.learned:
            reason = why_not or (f"{own.name} {UNUSED}" if own.is_unused else "")
            yield at_training_length(own, rope, nope, reason)
            yield _longer(own, rope, nope, reason)
    if rope is not None and "r2n1" in by_layout:
        yield _hybrids(by_layout["r2n1"], by_layout.get("n2r1"), rope, nope, why_not)
    starts = {
        start: each for each in searched if (start := starting_layer(each.subject)) is not None
    }
    if len(starts) > 1:
        yield from _start_layers(dict(sorted(starts.items())), nope, why_not)


def at_training_length(own: Searched, rope: Searched, nope: float, why_not: str) -> Evidence:
    """R9: needles found at the training length, compared with RoPE."""
    length = own.subject.training_length
    mine, theirs = own.sample([length], PLAIN), rope.sample([length], PLAIN)
    difference = {"RoPE": between(mine, theirs)}
    values = {
        NOPE: nope,
        ROOM.quantity: theirs.mean,
        ABLE.quantity: theirs.mean,
        FINDS.quantity: mine.mean,
        ABOVE.quantity: difference,
    }
    left_out = LEFT_OUT.get(needles_of(own.subject))
    no_room = f"{NO_ROOM} ({left_out})" if left_out else NO_ROOM
    lost = f"it finds {mine.mean:.3f} of them, so it has not the task (wanted at least {FINDS.bound:g})"
    reason = why_not or next(
        (
            text
            for rule, text in ((ROOM, no_room), (ABLE, UNABLE), (FINDS, lost))
            if not rule.holds(values)
        ),
        "",
    )
    low, high = difference["RoPE"].limits(NORMAL_95)
    interval = f"; 95 %: {low:+.3f} to {high:+.3f}" if np.isfinite([low, high]).all() else ""
    above = in_words(difference, "above", "")
    text = f"{mine.mean:.3f} and {rope.name} {theirs.mean:.3f}; {above}{interval}"
    return _beside_rope(R9, own, rope, [length], PLAIN, values, text, reason)


def _longer(own: Searched, rope: Searched, nope: float, why_not: str) -> Evidence:
    """R9 (longer): needles found at every longer length with YaRN, compared with RoPE."""
    longer = [length for length in own.lengths if length > own.subject.training_length]
    if not longer:
        trained = (
            f"it goes on from a model that was trained on {longest_trained(own.subject):,} tokens"
        )
        return unmeasured(R9_LONGER, own.name, trained)
    pairs = {length: (own.sample([length], YARN), rope.sample([length], YARN)) for length in longer}
    differences = {length: between(*pair) for length, pair in pairs.items()}
    with_room = [
        differences[length]
        for length, (_, of_rope) in pairs.items()
        if ROOM.holds({ROOM.quantity: of_rope.mean})
    ]
    # RePo is above at every length if it is at the length with the largest p-value.
    least = {"RoPE": max(with_room, key=Difference.p_value)} if with_room else {}
    lowest = {
        each.name: float(each.sample([each.subject.training_length], PLAIN).seeds.min())
        for each in (own, rope)
    }
    values = {NOPE: nope, ABOVE_AT_LONGER.quantity: least, CONVERGED.quantity: min(lowest.values())}
    few = [f"{name} {share:.3f}" for name, share in lowest.items() if share < CONVERGED.bound]
    unconverged = (
        f"a training seed had not converged: it finds at the training length, of {', '.join(few)}"
        if few
        else ""
    )
    text = "; ".join(
        f"{length}: {mine.mean:.3f}, {rope.name} {theirs.mean:.3f} "
        f"({differences[length].margin:+.3f}, standard error "
        f"{differences[length].standard_error:.2g}; without YaRN "
        f"{own.sample([length], PLAIN).mean:.3f} and {rope.sample([length], PLAIN).mean:.3f})"
        for length, (mine, theirs) in pairs.items()
    )
    return _beside_rope(
        R9_LONGER,
        own,
        rope,
        longer,
        YARN,
        values,
        text,
        why_not or unconverged or ("" if with_room else NO_ROOM),
    )


def _beside_rope(
    claim: Claim,
    own: Searched,
    rope: Searched,
    lengths: Sequence[int],
    method: str,
    values: Mapping[str, Any],
    text: str,
    reason: str,
) -> Evidence:
    """The evidence on the share of needles that a checkpoint found, with the share of RoPE as the
    control. With a `reason` the claim is not measurable.
    """
    mine, theirs = own.sample(lengths, method), rope.sample(lengths, method)
    told = note([each.recorded for each in (own, rope) if each.recorded is not None], text)
    return evidence(
        claim,
        own.name,
        f"share of needles found at {' and '.join(map(str, lengths))} "
        f"tokens{' with YaRN' if method == YARN else ''}",
        values,
        **numbers_of(mine),
        control=f"{rope.name} {theirs.mean:.3f}",
        note=told,
        unmeasurable=(reason, *told) if reason else (),
    )


def _hybrids(
    own: Searched, other: Searched | None, rope: Searched, nope: float, why_not: str
) -> Evidence:
    """R9 (hybrids): R2N1, N2R1 if it was given, and RoPE; the note also has longer lengths."""
    compared = [own, *([other] if other else []), rope]
    mine, *others = (each.sample([own.subject.training_length], PLAIN) for each in compared)
    rivals = dict(zip(("N2R1", "RoPE")[-len(others) :], others, strict=True))
    values = {
        NOPE: nope,
        ROOM.quantity: others[-1].mean,
        ORDER[0].quantity: {name: between(mine, sample) for name, sample in rivals.items()},
        ORDER[1].quantity: {"RoPE": between(*others)} if other else {},
    }
    text = "without YaRN " + "; ".join(
        f"{length}: "
        + ", ".join(f"{each.name} {each.sample([length], PLAIN).mean:.3f}" for each in compared)
        for length in own.lengths
    )
    reason = why_not or ("" if ROOM.holds(values) else NO_ROOM)
    return _beside_rope(
        R9_HYBRIDS, own, rope, [own.subject.training_length], PLAIN, values, text, reason
    )


def _start_layers(starts: Mapping[int, Searched], nope: float, why_not: str) -> Iterator[Evidence]:
    """R9 (start layer) and (later start), for checkpoints by the first layer with RePo."""
    first = next(iter(starts.values()))
    names = ", ".join(each.name for each in starts.values())
    means = {start: each.sample(each.lengths, YARN).mean for start, each in starts.items()}
    plain = {
        start: each.sample([first.subject.training_length], PLAIN) for start, each in starts.items()
    }
    text = "; ".join(
        f"from layer {start}: {mean:.3f}, at L {plain[start].mean:.3f}"
        for start, mean in means.items()
    )
    differ = float(np.ptp(list(means.values())))
    values = {NOPE: nope, TOLD_APART.quantity: min(means.values()), ROBUST.quantity: differ}
    unused = ", ".join(each.name for each in starts.values() if each.is_unused)
    reason = why_not or (unused and f"{unused} {UNUSED}")
    reason = reason or (
        ""
        if TOLD_APART.holds(values)
        else "all find nearly all of them, so they cannot be told apart"
    )
    yield evidence(
        R9_START,
        names,
        "largest difference of the mean score over L, 2L, 4L between starting layers",
        values,
        differ,
        n=sum(first.scores["score"].sizes[axis] for axis in ("prompt", "length")),
        note=text,
        unmeasurable=(reason, text) if reason else (),
    )
    later = [start for start in starts if start > 0]
    if len(later) < 2:
        return
    seeds = sorted(set.intersection(*({*plain[start].numbers} for start in later)))
    shares = np.array(
        [
            [plain[start].seeds[plain[start].numbers.index(seed)] for seed in seeds]
            for start in later
        ]
    )
    changes = np.polyfit(later, shares, 1)[0]
    yield evidence(
        R9_LATER,
        names,
        "change of the share of needles found at L by layer that RePo starts later, from "
        f"layer {later[0]} to {later[-1]}",
        {NOPE: nope, FEWER.quantity: {"0": paired_seeds(np.zeros(len(seeds)), changes)}},
        **mean_of(changes, f"{len(seeds)} seeds"),
        note=text,
        unmeasurable=why_not,
        seeds=len(seeds),
    )


# ---- drawn ---------------------------------------------------------------------------------------


def draw(searched: Sequence[Searched]) -> Iterator[Drawing]:
    """Draw figures 1, 4 and 5, and table 1 by length."""
    first = searched[0].subject
    length, count = first.training_length, searched[0].scores.sizes["prompt"]
    data = _by_length(searched)
    recorded = all(each.recorded is not None and each.recorded.live is None for each in searched)
    told = [
        "; YaRN by the factor n / L beyond the training length L (dotted), of seeds whose weights "
        "are at hand; bars of a single seed: standard error over prompts"
        if YARN in _methods(searched)
        else "",
        "; as recorded when training ended" if recorded else "",
        f"; {left_out}" if (left_out := LEFT_OUT.get(needles_of(first))) else "",
    ]
    yield Drawing(
        f"haystack_by_length_{needles_of(first)}_{length}",
        partial(method_panels, data),
        f"Needles found by context length (RePo table 1, fig. 1, 4, 5), {count} prompts "
        f"each. Mean over seeds, small dots: each{''.join(told)}. {OF_PAPER} Marks of one length "
        "stand beside each other so that equal ones can be seen.",
        data,
    )


def _by_length(searched: Sequence[Searched]) -> xr.Dataset:
    """`score [method, checkpoint, test_set, seed]` and `standard_error`, in the form that
    `plots.marks.scores` draws.
    """
    lengths, methods = searched[0].lengths, _methods(searched)
    samples = {
        title: {
            each.name: [each.sample([length], method) for length in lengths] for each in searched
        }
        for method, title in methods.items()
    }
    tables = {
        title: sample_table(rows, lengths, "share of needles found")
        for title, rows in samples.items()
    }
    return (
        joined(tables, "method", "outer")
        .assign_coords(
            layout=("checkpoint", [each.subject.layout for each in searched]),
            label=("checkpoint", [called(each.subject) for each in searched]),
        )
        .assign_attrs(axis="tokens", training_length=searched[0].subject.training_length)
    )


def _methods(searched: Sequence[Searched]) -> dict[str, str]:
    """Titles of the drawn methods. YaRN is drawn if it was measured and there are lengths beyond
    training.
    """
    longer = searched[0].lengths[-1] > searched[0].subject.training_length
    measured = {name for each in searched if longer for name in each.scores["method"].values}
    return {name: title for name, title in METHODS.items() if name in {PLAIN, *measured}}


HAYSTACK = Experiment(
    "needles in a haystack",
    (R9, R9_LONGER, R9_HYBRIDS, R9_START, R9_LATER),
    Needs(
        asked_the_same(finds_needles),
        NO_HAYSTACK,
        HAYSTACKS,
        otherwise_of={
            R9_HYBRIDS.label: "no R2N1 that finds needles was given beside RoPE",
            **dict.fromkeys(
                (R9_START.label, R9_LATER.label),
                "checkpoints with RePo from several layers on were not given",
            ),
        },
    ),
    measure,
    tabulate,
    draw,
    OLMO,
)
