"""Needle in a haystack (RePo table 1, fig. 1, 5): R9 at the training length and beyond it, on what `needles` measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from position_papers.kit.cache import Cache
from position_papers.kit.claims import Claim, Verdict, unmeasured, verdict
from position_papers.kit.differences import Difference
from position_papers.kit.experiment import Drawing, Experiment, Needs, asked_the_same
from position_papers.kit.rules import Above, All, AtLeast, Below, Where
from position_papers.kit.samples import Sample, between, in_words, numbers_of
from position_papers.kit.scores import PLAIN, note
from position_papers.kit.subjects import Subject
from position_papers.repo.checkpoints import (
    HAYSTACKS,
    NO_HAYSTACK,
    OF_PAPER,
    OLMO,
    called,
    finds_needles,
    longest_trained,
    needles_of,
    omits_positions,
)
from position_papers.repo.needles import (
    CEILING,
    METHODS,
    NEEDS_POSITIONS,
    NOPE,
    TOGETHER,
    YARN,
    Searched,
    WithoutPositions,
    found_without_positions,
    search,
)
from position_papers.repo.options import Options
from repo_interp.measures.labels import described
from repo_interp.plots.marks.scores import method_panels, score_maps

ROOM = Below("RoPE's share of needles found (asked for after results were seen)", CEILING)
ABOVE = Above("the share of needles found", ("RoPE",))
ABOVE_AT_LONGER = Above(f"at every longer length where {ROOM.words}, {ABOVE.quantity}", ABOVE.rivals)
ABOVE_WITHOUT_YARN = Above("the share of needles found at all longer lengths", ABOVE.rivals)
CONVERGED = AtLeast("the lowest share that a seed of either finds at the training length", 0.9)
LEFT_OUT = {"niah_keys": "seed 2 is left out: its RoPE model, from which all others go on, did not learn the task in 5,000 steps"}
"""Seeds that were trained and are not in the zoo, by task."""

R9 = Claim(
    "R9",
    "needle in a haystack at the training length: RePo above RoPE",
    "RePo table 1",
    "91.3 against 85.9",
    Where(All(NEEDS_POSITIONS, ROOM), ABOVE),
)
R9_LONGER = Claim(
    "R9",
    "needle in a haystack at twice and four times the training length, with YaRN: RePo above RoPE",
    "RePo fig. 1, 5",
    "figure",
    Where(All(NEEDS_POSITIONS, CONVERGED), ABOVE_AT_LONGER),
    part="longer",
)
R9_WITHOUT_YARN = Claim(
    "R9",
    "needle in a haystack at twice and four times the training length, without YaRN: RePo above RoPE",
    "RePo fig. 1, 5",
    "none",
    Where(CONVERGED, ABOVE_WITHOUT_YARN),
    part="longer, without YaRN",
)


NO_ROOM = "RoPE finds nearly all of them, so nothing can be above it"

# ---- measured -------------------------------------------------------------------------------------------------------


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> list[Searched]:
    """The needles that every checkpoint found. Raises InputError for one that cannot be asked."""
    return [search(subject, options, cache) for subject in subjects]


# ---- judged ---------------------------------------------------------------------------------------------------------


def judge(searched: Sequence[Searched]) -> Iterator[Verdict]:
    """Checkpoints with learned positions beside RoPE at L and beyond."""
    rope = next((each for each in searched if each.subject.layout == "rope"), None)
    without = found_without_positions(searched)
    for each in searched:
        if rope is not None and each.subject.learned:
            yield _at_training_length(each, rope, without)
            yield _longer(each, rope, without)
            yield _without_yarn(each, searched, rope)


def _at_training_length(own: Searched, rope: Searched, without: WithoutPositions) -> Verdict:
    """R9: needles found at the training length, beside RoPE."""
    length = own.subject.training_length
    mine, theirs = own.sample([length], PLAIN), rope.sample([length], PLAIN)
    difference = between(mine, theirs)
    values = {NOPE: without.share, ROOM.quantity: theirs.mean, ABOVE.quantity: {"RoPE": difference}}
    left_out = LEFT_OUT.get(needles_of(own.subject))
    text = in_words({rope.name: difference}, "above", "")
    without_it = "holds" if difference.exceeds() else "does not hold"
    no_room = f"{NO_ROOM} ({left_out})" if left_out else NO_ROOM
    full = (no_room, f"{mine.mean:.3f} and {rope.name} {theirs.mean:.3f} (without this condition it {without_it})")
    has_room = ROOM.holds(values)
    why_not = without.why_not or (() if has_room else (*full, *_with_budgets(text, own, rope)))
    return _beside_rope(R9, own, rope, (mine, theirs), f"at {length} tokens", values, text, why_not)


def _longer(own: Searched, rope: Searched, without: WithoutPositions) -> Verdict:
    """R9 (longer): needles found at every longer length with YaRN, beside RoPE."""
    longer = _longer_lengths(own)
    if not longer:
        return unmeasured(R9_LONGER, own.name, _trained_on_longer(own))
    mine, theirs = own.sample(longer, YARN), rope.sample(longer, YARN)
    pairs = {length: (own.sample([length], YARN), rope.sample([length], YARN)) for length in longer}
    differences = {length: between(*pair) for length, pair in pairs.items()}
    with_room = [differences[length] for length, (_, of_rope) in pairs.items() if ROOM.holds({ROOM.quantity: of_rope.mean})]
    # Above at every one of them: above where it is most probable by chance.
    least = {"RoPE": max(with_room, key=Difference.p_value)} if with_room else {}
    bare = "; ".join(
        f"{length} without YaRN {own.sample([length], PLAIN).mean:.3f} and {rope.sample([length], PLAIN).mean:.3f}"
        for length in longer
    )
    by_length = "; ".join(
        f"{length}: {pairs[length][0].mean:.3f}, {rope.name} {pairs[length][1].mean:.3f} ({difference.margin:+.3f}, standard error "
        f"{difference.standard_error:.2g})"
        for length, difference in differences.items()
    )
    full = (NO_ROOM, f"{mine.mean:.3f} and {rope.name} {theirs.mean:.3f}; {bare}")
    where, values = (
        f"at {' and '.join(map(str, longer))} tokens with YaRN",
        {NOPE: without.share, ABOVE_AT_LONGER.quantity: least, CONVERGED.quantity: _lowest(own, rope)},
    )
    early = without.why_not or _unconverged(own, rope)
    why_not = (early, by_length, bare) if early else () if with_room else full
    return _beside_rope(R9_LONGER, own, rope, (mine, theirs), where, values, f"{by_length}; {bare}", why_not)


def _without_yarn(own: Searched, searched: Sequence[Searched], rope: Searched) -> Verdict:
    """R9 (longer, without YaRN): needles found beyond the training length with nothing extended, beside RoPE; NoPE's in the note."""
    longer = _longer_lengths(own)
    if not longer:
        return unmeasured(R9_WITHOUT_YARN, own.name, _trained_on_longer(own))
    mine, theirs = own.sample(longer, PLAIN), rope.sample(longer, PLAIN)
    difference = between(mine, theirs)
    compared = [own, rope, *(each for each in searched if omits_positions(each.subject.layout))]
    by_length = "; ".join(
        f"{length}: " + ", ".join(f"{each.name} {each.sample([length], PLAIN).mean:.3f}" for each in compared)
        for length in longer
    )
    text = f"{in_words({rope.name: difference}, 'above', '')}; {by_length}"
    where, values = (
        f"at {' and '.join(map(str, longer))} tokens without YaRN",
        {ABOVE_WITHOUT_YARN.quantity: {"RoPE": difference}, CONVERGED.quantity: _lowest(own, rope)},
    )
    early = _unconverged(own, rope)
    return _beside_rope(R9_WITHOUT_YARN, own, rope, (mine, theirs), where, values, text, (early, text) if early else ())


def _lowest(*compared: Searched) -> float:
    """The lowest share of the needles that a training seed finds at the training length."""
    return min(float(each.sample([each.subject.training_length], PLAIN).seeds.min()) for each in compared)


def _unconverged(own: Searched, rope: Searched) -> str:
    """That a seed did not learn the task, so that what it finds at longer lengths says nothing of positions; "" where all did."""
    found = {each.name: _lowest(each) for each in (own, rope)}
    few = [f"{name} {share:.3f}" for name, share in found.items() if share < CONVERGED.bound]
    return f"a training seed had not converged: it finds at the training length, of {', '.join(few)}" if few else ""


def _beside_rope(
    claim: Claim,
    own: Searched,
    rope: Searched,
    samples: tuple[Sample, Sample],
    where: str,
    values: Mapping[str, Any],
    text: str,
    why_not: str | Sequence[str] = (),
) -> Verdict:
    """The verdict on the share of needles that a checkpoint found, with RoPE's as the control; not measurable where `why_not` says so."""
    mine, theirs = samples
    return verdict(
        claim,
        own.name,
        f"share of needles found {where}",
        values,
        mine.mean,
        **numbers_of(mine),
        control=f"{rope.name} {theirs.mean:.3f}",
        note=_with_budgets(text, own, rope),
        unmeasurable=why_not,
    )


def _longer_lengths(own: Searched) -> list[int]:
    return [length for length in own.lengths if length > own.subject.training_length]


def _trained_on_longer(own: Searched) -> str:
    return f"it goes on from a model that was trained on {longest_trained(own.subject):,} tokens"


def _with_budgets(text: str, *compared: Searched) -> tuple[str, ...]:
    """`text` with what differs in the budgets of training of the checkpoints compared."""
    return note([searched.recorded for searched in compared if searched.recorded is not None], text)


# ---- drawn ----------------------------------------------------------------------------------------------------------


def draw(searched: Sequence[Searched]) -> Iterator[Drawing]:
    """Fig. 1, 5 and table 1 by length, and as maps."""
    first = searched[0].subject
    length, count = first.training_length, searched[0].scores.sizes["prompt"]
    group = f"{needles_of(first)}_{length}"
    by_length, extended = _by_length(searched), ""
    if YARN in _methods(searched):
        extended = (
            "; YaRN by the factor n / L beyond the training length L (dotted), of seeds whose weights are at hand; bars of a single seed: "
            "standard error over prompts"
        )
    yield Drawing(
        f"haystack_by_length_{group}",
        method_panels(by_length),
        f"Needles found by context length (RePo table 1, fig. 1, 5), {count} prompts each. Mean over seeds, small dots: "
        f"each{extended}{_left_out(first)}. {OF_PAPER} Marks of one length stand beside each other so that equal ones can be seen.",
        by_length,
    )
    maps = _maps(searched)
    if maps is not None:
        counts = first_counts.reindex_like(maps[0, 0]) if (first_counts := searched[0].counts) is not None else None
        known = {} if counts is None else {"prompts": described(counts, "prompts behind a cell", "1")}
        yield Drawing(
            f"haystack_map_{group}",
            score_maps((100 * maps).assign_attrs(long_name="needles found", units="% of the cell's prompts"), length, counts),
            f"Needles found, per cent, by depth and context length (RePo fig. 1, 5), {count} prompts per length over all depths"
            + (
                ", so that a cell has few"
                if counts is None
                else "; the last column says how many a cell has, the same for all checkpoints"
            )
            + "; grey: none there."
            + (f" Right of the dotted line: beyond the training length, {length} tokens." if extended else ""),
            described(maps, "share of the needles found", "1").to_dataset(name="score").assign(known),
        )


def _left_out(subject: Subject) -> str:
    known = LEFT_OUT.get(needles_of(subject))
    return f"; {known}" if known else ""


def _by_length(searched: Sequence[Searched]) -> xr.Dataset:
    """`score [method, checkpoint, test_set, seed]` and `standard_error`, as `plots.marks.scores` draws them."""
    lengths = searched[0].lengths
    methods = _methods(searched)
    samples = [[[each.sample([length], method) for length in lengths] for each in searched] for method in methods]
    seeds = max(len(sample.seeds) for rows in samples for row in rows for sample in row)
    values = np.full((len(methods), len(searched), len(lengths), seeds), np.nan)
    errors = np.full(values.shape[:3], np.nan)
    for method, row, place in np.ndindex(errors.shape):
        sample = samples[method][row][place]
        values[method, row, place, : len(sample.seeds)] = sample.seeds
        errors[method, row, place] = sample.prompts.std(ddof=1) / np.sqrt(len(sample.prompts))
    axes = ("method", "checkpoint", "test_set")
    return xr.Dataset(
        {
            "score": ((*axes, "seed"), values, {"long_name": "share of needles found", "units": "1"}),
            "standard_error": (axes, errors, {"long_name": "standard error over prompts", "units": "1"}),
        },
        {
            "method": list(methods.values()),
            "checkpoint": [each.name for each in searched],
            "test_set": lengths,
            "layout": ("checkpoint", [each.subject.layout for each in searched]),
            "label": ("checkpoint", [called(each.subject) for each in searched]),
        },
        {"axis": "tokens", "training_length": searched[0].subject.training_length},
    )


def _methods(searched: Sequence[Searched]) -> dict[str, str]:
    """Titles of the methods that are drawn: YaRN where there are lengths that it is for."""
    longer = searched[0].lengths[-1] > searched[0].subject.training_length
    return {name: title for name, title in METHODS.items() if longer or name == PLAIN}


def _maps(searched: Sequence[Searched]) -> xr.DataArray | None:
    """`[checkpoint, method, depth, length]`; None where no prompts have a depth."""
    mapped = [each for each in searched if "map" in each.scores]
    if not mapped:
        return None
    methods, parts = _methods(searched), []
    for each in mapped:
        known = each.scores["map"]
        chosen = [known.sel({"method": name if name in known["method"].values else PLAIN}, drop=True) for name in methods]
        parts.append(xr.concat(chosen, dim=xr.IndexVariable("method", list(methods.values())), **TOGETHER))
    maps: xr.DataArray = xr.concat(parts, dim=xr.IndexVariable("checkpoint", [each.name for each in mapped]), **TOGETHER)
    labels = ("checkpoint", [called(each.subject) for each in mapped])
    return maps.assign_coords(layout=("checkpoint", [each.subject.layout for each in mapped]), label=labels)


HAYSTACK = Experiment(
    "needles in a haystack",
    (R9, R9_LONGER, R9_WITHOUT_YARN),
    Needs(asked_the_same(finds_needles), NO_HAYSTACK, HAYSTACKS),
    measure,
    judge,
    draw,
    OLMO,
)
