"""Perplexity at the training length and beyond (CoPE sec. 5.4, tables 5 and 8, fig. 3): C4 and C5.

    perplexity = exp of the mean of -log p over the tokens of held-out windows; compared as log perplexity, window by window

"Relative" of the paper is a learned vector a distance; RoPE stands for it here. Thresholds are in `cope_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.papers.cope import rules
from repo_interp.papers.cope.claims import C4, C4_POSITIONS, C5
from repo_interp.papers.kit.checkpoint_scores import Scored, first_of, score_table
from repo_interp.papers.kit.claims import Verdict, judged
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.score_rules import Sample, above, above_in_rise, lower_perplexity
from repo_interp.papers.kit.score_words import common, missing, no_verdict, noted, said
from repo_interp.plots.marks.scores import perplexity_by_length

COPE, RELATIVE, ABSOLUTE = "cope", "rope", "learned"


def perplexity(scored: Sequence[Scored]) -> Result:
    """C4 and C5: perplexity of language models by length."""
    scored = on_the_same_windows(scored)
    table = perplexity_table(scored)
    prompts = scored[0].sample(scored[0].test_sets[:1]).count
    length = scored[0].training_length
    cope = first_of(scored, COPE)
    return Result(
        "perplexity",
        f"Perplexity by length of the context (CoPE fig. 3, table 5), {prompts} windows of held-out text of each length. Dotted: the "
        f"training length, {length} tokens, where learned absolute positions end. {bands(table)}",
        table.assign_attrs(axis="tokens", training_length=length),
        perplexity_by_length(table.assign_attrs(axis="tokens", training_length=length), f"trained at {length} tokens"),
        ()
        if cope is None
        else tuple(one for one in (_ordered(cope, scored), _positions(scored), _degrades(cope, scored)) if one is not None),
    )


def on_the_same_windows(scored: Sequence[Scored]) -> list[Scored]:
    """Those of `scored` whose perplexities can stand side by side: those with weights, where any have them.

    Windows differ far more than models do, and what a run without weights has recorded is a mean over other windows than are measured now.
    """
    return [one for one in scored if one.live is not None] or list(scored)


def perplexity_table(scored: Sequence[Scored], method: str = "plain") -> xr.Dataset:
    """Perplexity [checkpoint, test_set, seed] by length in tokens, ascending, as `plots.scores` draws scores."""
    table = score_table(scored, method=method)
    values = xr.apply_ufunc(np.exp, table["score"])
    table = table.assign(
        score=values.assign_attrs(long_name="perplexity", units="1"),
        standard_error=(values.mean("seed") * table["standard_error"]).assign_attrs(
            long_name="standard error of the perplexity over windows", units="1"
        ),
    )
    return table.assign_coords(test_set=table["test_set"].astype(int)).sortby("test_set")


def bands(table: xr.Dataset) -> str:
    """What a caption says of seeds and windows."""
    errors = (table["standard_error"] / table["score"].mean("seed")).values
    known = errors[np.isfinite(errors)]
    windows = (
        f" Standard error over windows: up to {100 * known.max():.2g} %; all have the same, and are compared on each."
        if known.size
        else ""
    )
    count = table.sizes["seed"]
    seeds = "One training seed." if count == 1 else f"Mean over up to {count} training seeds; band: smallest to largest."
    return seeds + windows


def shortest_and_longest(one: Scored) -> tuple[str, str]:
    """The training length, and the longest that there are scores of, as names of test sets."""
    lengths = sorted(int(name) for name in one.test_sets)
    return str(min(lengths, key=lambda length: abs(length - one.training_length))), str(lengths[-1])


def _ordered(cope: Scored, scored: Sequence[Scored]) -> Verdict:
    rivals = {name: one for name in (RELATIVE, ABSOLUTE) if (one := first_of(scored, name)) is not None}
    absent = missing([name for name in (RELATIVE, ABSOLUTE) if name not in rivals], "language")
    if absent:
        return no_verdict(C4, cope.name, absent)
    compared = {COPE: cope, **rivals}
    samples = {name: one.sample(shortest_and_longest(one)[:1]) for name, one in compared.items()}
    leads = {
        f"{one} below {other}": above(samples[other], samples[one]) for one, other in ((COPE, RELATIVE), (RELATIVE, ABSOLUTE))
    }
    return Verdict(
        C4,
        cope.name,
        judged(all(lower_perplexity(lead) for lead in leads.values())),
        "perplexity at the training length",
        float(np.exp(samples[COPE].mean)),
        **_of_log(samples[COPE]),
        control=", ".join(f"{name} {np.exp(samples[name].mean):.4g}" for name in rivals),
        note=noted(list(compared.values()), said(leads, "log perplexity,", "")),
    )


def _positions(scored: Sequence[Scored]) -> Verdict | None:
    """p_max; None where no two CoPE checkpoints differ in it."""
    found = {p_max(one): one for one in reversed(scored) if one.layout == COPE}
    few, most = found.get(rules.POSITIONS), found[max(found)]
    if few is None or few is most:
        return None
    samples = [one.sample(shortest_and_longest(one)[:1]) for one in (few, most)]
    ratio = float(np.exp(samples[0].mean - samples[1].mean))
    lead = above(*samples)
    return Verdict(
        C4_POSITIONS,
        few.name,
        judged(ratio <= rules.SUFFICES),
        f"perplexity with p_max = {rules.POSITIONS} over that with {p_max(most)}",
        ratio,
        ratio * lead.standard_error if np.isfinite(lead.standard_error) else None,
        f"{lead.over} (standard error)",
        samples[0].count,
        note=noted([few, most], f"perplexity {np.exp(samples[0].mean):.4g} and {np.exp(samples[1].mean):.4g} ({most.name})"),
    )


def p_max(one: Scored) -> int:
    """Whole positions that a CoPE checkpoint can tell apart; its training length where nothing else was said."""
    return int(one.configuration.scheme_options.get("p_max", 0)) or one.training_length


def _degrades(cope: Scored, scored: Sequence[Scored]) -> Verdict:
    short, long = shortest_and_longest(cope)
    longer = {one.name: one for one in scored if one is not cope and {short, long} <= set(one.test_sets)}
    rope = first_of(scored, RELATIVE)
    if short == long or rope is None or rope.name not in longer:
        why = missing([RELATIVE], "language") if rope is None else "no checkpoint was scored beyond the training length"
        return no_verdict(C5, cope.name, why)
    rises = {one.name: (one.sample((short,)), one.sample((long,))) for one in (cope, *longer.values())}
    lead = above_in_rise(*rises[rope.name], *rises[cope.name])
    changes = {name: after.mean - before.mean for name, (before, after) in rises.items()}
    smaller = [name for name, one in longer.items() if changes[name] < changes[cope.name] and one not in (rope, cope)]
    return Verdict(
        C5,
        cope.name,
        judged(lower_perplexity(lead)),
        f"change of log perplexity from {short} to {long} tokens, nats",
        changes[cope.name],
        **_of_rise(*rises[cope.name]),
        control=", ".join(f"{name} {change:+.3g}" for name, change in changes.items() if name != cope.name),
        note=noted(
            [cope, rope],
            said({rope.name: lead}, "less than", " nats"),
            f"rising less than {cope.name}: {', '.join(smaller)} (not compared in the paper)" if smaller else "",
        ),
    )


def _of_rise(short: Sample, long: Sample) -> dict[str, Any]:
    """Spread, over what, and n of a rise: the windows of two lengths differ, so their errors add."""
    if min(len(short.seeds), len(long.seeds)) > 1 or short.spread is None or long.spread is None:
        return common(Sample(long.seeds - short.seeds, np.empty(0), long.recorded, False))
    return {"spread": float(np.hypot(short.spread, long.spread)), "spread_over": long.over, "n": long.count}


def _of_log(sample: Sample) -> dict[str, Any]:
    """`common` of log perplexities, with the spread of the perplexity."""
    return common(sample, float(np.exp(sample.mean)))
