"""H6 in perplexity: beyond the training length, HoPE has a lower perplexity than RoPE (HoPE fig.
5).

As in the paper, the claim is judged at the longest length on the last 256 tokens of every window
(`end_of_text`). This needs checkpoints with weights, because training recorded only means over all
tokens. ALiBi and KERPLE have a lower perplexity than both; the paper calls this pseudo
extrapolation (sec. 4.2.2). They are reported, but not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from position_papers.hope.end_of_text import LAST, EndOfText
from position_papers.hope.extended_scores import (
    HOPE,
    METHODS,
    RIVALS,
    ROPE,
    has_method,
    label,
    scores,
    side_by_side,
    with_methods,
)
from position_papers.kit import (
    MATERIAL,
    PLAIN,
    Above,
    Cache,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Scored,
    ScoreOptions,
    Subject,
    between,
    compared,
    evidence,
    first_of,
    in_words,
    missing,
    note,
    numbers_of,
    of_tasks,
    perplexity_table,
    score_panels,
    seeds_of,
    shortest_and_longest,
    trained_alike,
    unmeasured,
)

LOG_PERPLEXITY = (
    f"log perplexity of the last {LAST} tokens at the longest length, in nats per token,"
)

H6_PERPLEXITY = Claim(
    "H6",
    "perplexity beyond L: HoPE below RoPE",
    "HoPE fig. 5",
    "figure; HoPE 8.52 at L, 13.03 at 8 L",
    Above(LOG_PERPLEXITY, (RIVALS[ROPE],), MATERIAL, relation="below"),
    "perplexity",
)


def measure(
    subjects: Sequence[Subject], options: ScoreOptions, cache: Cache
) -> list[Scored] | None:
    """Score the language models with weights on the end of the same windows; None if there are
    none.
    """
    ended = [
        replace(subject, task=EndOfText(**subject.task.options()))
        for subject in subjects
        if subject.has_weights and subject.task is not None
    ]
    if not ended:
        return None
    return [
        replace(each, recorded=tuple(run for run in each.recorded if run.seed in seeds_of(subject)))
        for subject, each in zip(ended, scores(ended, options, cache), strict=True)
    ]


def tabulate(scored: Sequence[Scored]) -> Iterable[Evidence]:
    """Yield evidence on the first checkpoint with HoPE, if there is one."""
    hope, rope = first_of(scored, HOPE), first_of(scored, ROPE)
    if hope is None:
        return
    short, long = shortest_and_longest(hope)
    if rope is None or short == long or long not in rope.test_sets:
        why = (
            missing([ROPE], "language")
            if rope is None
            else "no checkpoint was scored beyond the training length"
        )
        yield unmeasured(H6_PERPLEXITY, hope.name, why)
        return
    samples = {each.name: each.sample((long,)) for each in scored if long in each.test_sets}
    mine = samples[hope.name]
    below, ours = between(samples[rope.name], mine), float(np.exp(mine.mean))
    extended = [
        f"{label(each, method, scored)} {np.exp(each.sample((long,), method).mean):.4g}"
        for each in (rope, hope)
        for method in METHODS
        if has_method(each, method)
    ]
    yield evidence(
        H6_PERPLEXITY,
        hope.name,
        f"perplexity of the last {LAST} of {long} tokens",
        {LOG_PERPLEXITY: {RIVALS[ROPE]: below}},
        **numbers_of(mine, ours, ours),
        control=", ".join(
            f"{name} {np.exp(sample.mean):.4g}"
            for name, sample in samples.items()
            if name != hope.name
        ),
        note=note(
            [hope, rope],
            f"log perplexity {in_words({rope.name: below}, 'below', ' nats')}",
            f"at {short} tokens {np.exp(hope.sample((short,)).mean):.4g}, {rope.name} "
            f"{np.exp(rope.sample((short,)).mean):.4g}",
            ", ".join(extended),
        ),
    )


def draw(scored: Sequence[Scored]) -> Iterator[Drawing]:
    """Draw figure 5: perplexity by length."""
    length, windows = scored[0].training_length, scored[0].sample(scored[0].test_sets[:1]).count
    rows = with_methods(scored)
    table, said = compared(
        rows, side_by_side(rows, perplexity_table), first_of(scored, ROPE), RIVALS[ROPE]
    )
    extended = [label(each, method, scored) for each, method in rows if each.layout in (ROPE, HOPE)]
    panels = {
        f"trained at {length} tokens": table.sel(
            checkpoint=[label(each, PLAIN, scored) for each in scored]
        )
    }
    if any(method != PLAIN for _, method in rows):
        panels[f"with PI and YaRN beyond {length} tokens"] = table.sel(checkpoint=extended)
    caption = (
        f"Perplexity of the last {LAST} tokens by length of the context (HoPE fig. 5), {windows} "
        "windows of held-out text of each length. Dotted: the training "
        f"length, {length} tokens. PI and YaRN by the factor n / L beyond it. {said}"
    )
    yield Drawing("perplexity_by_length", partial(score_panels, panels), caption, table)


PERPLEXITY = Experiment(
    "perplexity",
    (H6_PERPLEXITY,),
    Needs(
        trained_alike(of_tasks("language")),
        "no checkpoints of HoPE trained on language were given",
        tuple(f"language/{layout}" for layout in (HOPE, *RIVALS)),
        "language",
    ),
    measure,
    tabulate,
    draw,
)
