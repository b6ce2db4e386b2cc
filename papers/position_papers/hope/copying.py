"""H6 and H7: copying from contexts longer than in training, by scheme (HoPE table 1) and by
ablation of HoPE (table 3).

    exact match    of the 4 tokens that followed 8 tokens seen before, by the number of sequences in the context
    AB1, AB2, AB3  RoPE with its activated, its low-frequency components replaced by none; both replaced by ones of high frequency

The paper's models were trained on text and tested on copying; ours are trained to copy. The paper's
AB2 is 0.67 points above RoPE, too little to distinguish them, so H7 only requires that AB2 is not
below RoPE. Both claims are judged beyond the training length; within it, all models that learned to
copy do so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from position_papers.hope.extended_scores import (
    HOPE,
    METHODS,
    RIVALS,
    ROPE,
    has_method,
    scores,
    side_by_side,
    with_methods,
)
from position_papers.kit import (
    NORMAL_95,
    PLAIN,
    Above,
    All,
    AtLeast,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    NotBelow,
    Sample,
    Scored,
    Values,
    Where,
    between,
    evidence,
    first_of,
    in_words,
    missing,
    note,
    numbers_of,
    of_tasks,
    score_panels,
    score_table,
    trained_alike,
    unmeasured,
)
from position_papers.training.trained import configured_task
from repo_interp.tasks.copying import Copying

ABLATIONS: Mapping[str, str] = {"hope_ab1": "AB1", "hope_ab2": "AB2", "hope_ab3": "AB3"}
"""The paper's names by layout."""
BEST = "the highest mean exact match of the schemes compared, beyond the training length,"
WORST = "the lowest of those that are judged, at lengths trained on,"
BEYOND = "mean exact match over the numbers of sequences that are longer than training"
AB1, AB2, AB3 = (f"{BEYOND}, of {name}," for name in ABLATIONS.values())
NO_LONGER = "no test set is longer than the training prompts"
EACH = "their lowest at any single length trained on (asked for after results were seen)"
COPIES = All(AtLeast(BEST, 0.05), AtLeast(WORST, 0.5), AtLeast(EACH, 0.5))
"""Condition for a comparison: without it no scheme copies, or one did not learn to copy."""


def extended_quantity(method: str) -> str:
    """The compared quantity for schemes that are extended with `method`."""
    return (
        f"{BEYOND}, both with {METHODS[method]} by the factor n / L,"
        if method in METHODS
        else BEYOND
    )


def _extended(method: str, name: str, paper_number: str) -> Claim:
    rule = Where(COPIES, Above(extended_quantity(method), (RIVALS[ROPE],)))
    return Claim(
        "H6",
        f"copy task beyond L with {name}: HoPE above RoPE",
        "HoPE table 1",
        paper_number,
        rule,
        METHODS[method],
    )


H6 = Claim(
    "H6",
    "copy task beyond L: HoPE above RoPE, ALiBi, KERPLE, FIRE",
    "HoPE table 1",
    "60.23 against 23.80",
    Where(COPIES, Above(BEYOND, tuple(RIVALS.values()), required=(RIVALS[ROPE],))),
    shows_control=True,
)
H6_EXTENDED = {
    "interpolation": _extended("interpolation", "position interpolation", "60.80 against 27.10"),
    "yarn": _extended("yarn", "YaRN", "68.63 against 54.20"),
}
"""H6 by the method that extends both schemes."""


def _halves(values: Values) -> str:
    """Describe for both halves of H7 whether they are shown or only not excluded."""
    (above,), (other,) = values[AB1].values(), values[AB2].values()
    low, high = (100 * limit for limit in other.limits(NORMAL_95))
    shown = f"AB1 is above AB2 by {100 * above.margin:.3g} points"
    told = f"{low:+.3g} to {high:+.3g} points (95 %)"
    if low > 0:
        return f"{shown}; AB2 is above RoPE, {told}"
    return f"{shown}; AB2 against RoPE {told}: that it is below is not shown, nor excluded"


H7 = Claim(
    "H7",
    "ablations: replacing the activated components alone > the low ones alone, not below neither",
    "HoPE table 3",
    "38.30 / 24.47 / 23.80",
    Where(COPIES, All(Above(AB1, ("AB2",)), NotBelow(AB2, (RIVALS[ROPE],)))),
    shows_control=True,
    says=_halves,
)
H7_REMOVED = Claim(
    "H7",
    "ablations: removing both kinds without position-independent ones in their place is worst",
    "HoPE table 3",
    "17.53 against 23.80",
    Where(COPIES, Above(AB3, ("AB1", "AB2", RIVALS[ROPE]), relation="below")),
    "removed",
)


def tabulate(scored: Sequence[Scored]) -> Iterable[Evidence]:
    """Yield evidence on the first checkpoint with HoPE, and on the ablations if there are any."""
    hope, rope = first_of(scored, HOPE), first_of(scored, ROPE)
    rivals = [each for layout in RIVALS if (each := first_of(scored, layout)) is not None]
    if hope is not None:
        for method, claim in ({PLAIN: H6} | H6_EXTENDED).items():
            if rope is not None and has_method(hope, method) and has_method(rope, method):
                yield _ahead(claim, hope, rivals if method == PLAIN else [rope], method)
            else:
                weights = "needs the weights of a HoPE and a RoPE checkpoint trained on copying"
                yield unmeasured(
                    claim, hope.name, missing([ROPE], "copying") if method == PLAIN else weights
                )
    ablations = {
        layout: each for layout in ABLATIONS if (each := first_of(scored, layout)) is not None
    }
    if rope is not None and {"hope_ab1", "hope_ab2"} <= set(ablations):
        yield from _ablations(rope, ablations)


def draw(scored: Sequence[Scored]) -> Iterator[Drawing]:
    """Draw tables 1 and 3: exact match by the number of sequences for the schemes, for RoPE and
    HoPE with PI and YaRN, and for the ablations.
    """
    ablations = [each for each in scored if each.layout in (*ABLATIONS, "rope_high")]
    schemes = [each for each in scored if each not in ablations]
    twins = [each for layout in (ROPE, HOPE) if (each := first_of(schemes, layout)) is not None]
    rows = {
        "schemes": [(each, PLAIN) for each in schemes],
        "with PI and YaRN": extended if len(extended := with_methods(twins)) > len(twins) else [],
        "ablations": [(each, PLAIN) for each in [*twins, *ablations]] if ablations else [],
    }
    lengths, task = {each.training_length for each in scored}, _task(scored[0])
    # The number of sequences of a test prompt that is as long as the longest in training, if this
    # length is the same for all checkpoints.
    end = (
        {"training_length": (lengths.pop() - task.tokens(0)) / (task.tokens(1) - task.tokens(0))}
        if len(lengths) == 1
        else {}
    )
    panels = {
        title: side_by_side(panel, score_table).assign_attrs(axis="sequences", **end)
        for title, panel in rows.items()
        if panel
    }
    caption = (
        "Copying: exact match of the 4 tokens that followed 8 tokens seen before, by the number of "
        "sequences in the context (HoPE table 1 and 3), "
        f"{scored[0].sample(scored[0].test_sets[:1]).count} prompts each, targets teacher-forced "
        "(exact match is the same as when generated). Dotted: the longest training prompts. PI and "
        "YaRN by the factor n / L beyond them. Lines: means over seeds; small dots: each; bars: of "
        "a single seed the standard error over prompts."
    )
    yield Drawing(
        f"copying_{task.training_length}",
        partial(score_panels, panels),
        caption,
        side_by_side(with_methods(scored), score_table),
    )


COPYING = Experiment(
    "copying",
    (H6, *H6_EXTENDED.values(), H7, H7_REMOVED),
    Needs(
        trained_alike(of_tasks("copying")),
        "no checkpoints of HoPE trained on copying were given",
        (
            *(f"copying/{layout}_scattered" for layout in (HOPE, *RIVALS, *ABLATIONS)),
            *(
                f"copying/{layout}{kind}"
                for kind in ("_varied", "")
                for layout in (HOPE, *RIVALS, *ABLATIONS, "rope_high")
            ),
        ),
        "copying",
        dict.fromkeys(
            (H7.label, H7_REMOVED.label),
            "no checkpoints of HoPE and its ablations trained on copying were given",
        ),
    ),
    scores,
    tabulate,
    draw,
)


def _ahead(claim: Claim, hope: Scored, rivals: Sequence[Scored], method: str) -> Evidence:
    """Return the evidence that HoPE copies more than each rival beyond the training length."""
    compared = {each.name: each for each in (hope, *rivals)}
    beyond, within = _lengths(hope, *rivals)
    if not beyond:
        return unmeasured(claim, hope.name, NO_LONGER)
    judged = [each.name for each in compared.values() if each.layout in (HOPE, ROPE)]
    copying, nobody = _copying(compared, judged, beyond, within, method)
    if nobody:
        return unmeasured(claim, hope.name, note([hope, *rivals], nobody))
    samples, trained = (_samples(compared, lengths, method) for lengths in (beyond, within))
    mine = samples.pop(hope.name)
    above = {each.name: between(mine, samples[each.name]) for each in rivals}
    # the rival that contradicts the claim most comes first
    above = dict(sorted(above.items(), key=lambda each: each[1].margin))
    absent = (
        [layout for layout in RIVALS if layout not in [each.layout for each in rivals]]
        if method == PLAIN
        else []
    )
    return evidence(
        claim,
        hope.name,
        _measured(beyond) + (f", with {METHODS[method]}" if method in METHODS else ""),
        {
            **copying,
            extended_quantity(method): {RIVALS[each.layout]: above[each.name] for each in rivals},
        },
        **numbers_of(mine, 100),
        control=_means(samples),
        note=note(
            [hope, *rivals],
            in_words(above, "above", " points", 100),
            f"within L: {_means(trained)}" if trained else "",
            missing(absent, "copying"),
        ),
    )


def _ablations(rope: Scored, ablations: Mapping[str, Scored]) -> Iterator[Evidence]:
    """Yield the evidence that the ablations are in the paper's order, over the test sets beyond L
    that all of them have.

    The condition `COPIES` applies to all except AB3, because the second claim says that AB3 copies
    worst.
    """
    every = {**ablations, ROPE: rope}
    compared = {layout: each for layout, each in every.items() if layout != "hope_ab3"}
    beyond, within = _lengths(rope, *ablations.values())
    if not beyond:
        yield from (unmeasured(claim, rope.name, NO_LONGER) for claim in (H7, H7_REMOVED))
        return
    samples = _samples(every, beyond)
    copying, nobody = _copying(compared, list(compared), beyond, within)

    def row(
        claim: Claim,
        layout: str,
        values: Mapping[str, Any],
        budgets: Mapping[str, Scored],
        *told: str,
    ) -> Evidence:
        return evidence(
            claim,
            every[layout].name,
            f"{_measured(beyond)} ({ABLATIONS[layout]})",
            {**copying, **values},
            **numbers_of(samples[layout], 100),
            control=_means({name: samples[name] for name in compared if name != layout}),
            note=note(list(budgets.values()), *told),
            unmeasurable=nobody and note(list(compared.values()), nobody),
        )

    above = {"AB2": between(samples["hope_ab1"], samples["hope_ab2"])}
    not_below = {RIVALS[ROPE]: between(samples["hope_ab2"], samples[ROPE])}
    steps = sorted(
        (("AB1", above), ("AB2", not_below)),
        key=lambda step: min(each.margin for each in step[1].values()),
    )
    told = [
        f"{name} {in_words(each, 'above', ' points', 100)}" for name, each in steps
    ]  # in the order of `above`
    yield row(H7, "hope_ab1", {AB1: above, AB2: not_below}, compared, *told)
    if "hope_ab3" not in every:
        yield unmeasured(H7_REMOVED, rope.name, missing(["hope_ab3"], "copying"))
        return
    below = {
        ABLATIONS.get(layout, RIVALS[ROPE]): between(samples[layout], samples["hope_ab3"])
        for layout in compared
    }
    yield row(H7_REMOVED, "hope_ab3", {AB3: below}, every, in_words(below, "below", " points", 100))


def _lengths(first: Scored, *others: Scored) -> tuple[list[str], list[str]]:
    """Return the test sets that all checkpoints have, in ascending order: first the sets whose
    prompts are longer than the training prompts of `first`, then the others.
    """
    shared = [
        name
        for name in sorted(first.test_sets, key=int)
        if all(name in each.test_sets for each in others)
    ]
    tokens = _task(first).tokens
    beyond = [name for name in shared if tokens(int(name)) > first.training_length]
    return beyond, [name for name in shared if name not in beyond]


def _copying(
    compared: Mapping[str, Scored],
    judged: Sequence[str],
    beyond: Sequence[str],
    within: Sequence[str],
    method: str = PLAIN,
) -> tuple[dict[str, float], str]:
    """Return the values for `COPIES`, those within the training length for the `judged` checkpoints
    only; and the reason why it does not hold, or "".

    Without trained lengths it does not hold.
    """
    longer, trained = _samples(compared, beyond, method), _samples(compared, within, method)
    copying = {
        BEST: max(sample.mean for sample in longer.values()),
        WORST: min((trained[name].mean for name in judged if within), default=0.0),
        EACH: min(
            (compared[name].sample([each], method).mean for name in judged for each in within),
            default=0.0,
        ),
    }
    nobody = (
        f"nobody copies {', '.join(beyond)} sequences, or one that is judged did not learn to copy "
        f"{', '.join(within) or 'fewer'}; {_means(longer)}; {_means(trained)}"
    )
    return copying, "" if COPIES.holds(copying) else nobody


def _samples(
    scored: Mapping[str, Scored], test_sets: Sequence[str], method: str = PLAIN
) -> dict[str, Sample]:
    """Return scores as means over `test_sets`; empty without test sets."""
    return {name: each.sample(test_sets, method) for name, each in scored.items() if test_sets}


def _measured(beyond: Sequence[str]) -> str:
    return f"exact match at {beyond[0]} to {beyond[-1]} sequences, beyond L, %"


def _task(scored: Scored) -> Copying:
    task = configured_task(scored.configuration)
    assert isinstance(task, Copying), scored.name
    return task


def _means(samples: Mapping[str, Sample]) -> str:
    return ", ".join(f"{name} {100 * sample.mean:.3g} %" for name, sample in samples.items())
