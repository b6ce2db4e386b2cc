"""HoPE's scores and ablations (Chen et al. 2025, sec. 4 and 5, tables 1 and 3, fig. 5), on trained checkpoints: claims H6 and H7.

Copying checkpoints are scored by exact match over numbers of sequences, language models by perplexity over lengths; RoPE and HoPE with
position interpolation (PI) and YaRN too, by the factor n / L beyond the training length L, and by none within it. (The paper's models
were trained on text and asked to copy; ours are trained to copy.) These figures belong to the paper `hope`. Thresholds are in
`hope_score_rules`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import xarray as xr

from repo_interp.papers.cope.language import bands, on_the_same_windows, perplexity_table, shortest_and_longest
from repo_interp.papers.hope import score_rules as rules
from repo_interp.papers.hope.score_claims import CLAIMS, H6, H6_PERPLEXITY, H6_PI, H6_YARN, H7, H7_REMOVED
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.checkpoint_scores import (
    PLAIN,
    Scored,
    ScoreOptions,
    first_of,
    of_tasks,
    score_checkpoint,
    score_table,
)
from repo_interp.papers.kit.claims import UNMEASURED, Claim, Verdict, judged
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.score_rules import Sample, above, all_hold, lower_perplexity
from repo_interp.papers.kit.score_words import common, missing, no_verdict, noted, said
from repo_interp.plots.marks.scores import copying_by_sequences, layout_name, perplexity_by_length

__all__ = ["CLAIMS", "SCORE_ZOO", "ScoreOptions", "score_figures", "unmeasured_scores"]

HOPE, ROPE = "hope", "rope"
METHODS: Mapping[str, str] = {"interpolation": "PI", "yarn": "YaRN"}
"""How a model is extended, and what the paper calls it."""
EXTENDED = (ROPE, HOPE)
SCORE_ZOO = (
    *(f"copying/{scheme}" for scheme in (HOPE, *rules.RIVALS, *rules.ABLATIONS, "rope_high")),
    *(f"language/{scheme}" for scheme in (HOPE, *rules.RIVALS)),
)
"""Checkpoints that H6 and H7 are about."""
_TOGETHER = {"join": "outer", "coords": "minimal", "compat": "override"}


def score_figures(
    checkpoints: Mapping[str, str | os.PathLike[str]], options: ScoreOptions, progress: Callable[[str], None], cache: Cache
) -> list[Result]:
    """The figures of H6 and H7 that the checkpoints (name -> path) allow; those trained on other tasks are left out.

    Raises InputError for a checkpoint that cannot be read.
    """
    found: dict[str, list[Scored]] = {}
    for task in ("copying", "language"):
        for name, path in of_tasks(checkpoints, [task]).items():
            progress(f"scoring {name}")
            one = score_checkpoint(name, path, options, cache, lambda layout: tuple(METHODS) if layout in EXTENDED else ())
            found.setdefault(task, []).append(one)
    results = [copying(found["copying"])] if "copying" in found else []
    return results + ([perplexity(found["language"])] if "language" in found else [])


def unmeasured_scores(results: Sequence[Result]) -> list[Verdict]:
    """A verdict "not measurable here" for each of these claims that nothing was found about."""
    found = {verdict.claim.id for result in results for verdict in result.verdicts}
    needed = {claim: ("language" if claim is H6_PERPLEXITY else "copying") for claim in CLAIMS}
    return [
        Verdict(claim, task, UNMEASURED, "", note=f"no checkpoints of HoPE{' and its ablations' if claim.id.startswith('H7') else ''} "
                f"trained on {task} were given")
        for claim, task in needed.items()
        if claim.id not in found
    ]  # fmt: skip


def copying(scored: Sequence[Scored]) -> Result:
    """H6 on the copy task, and H7: tables 1 and 3."""
    ablations = [one for one in scored if one.layout in (*rules.ABLATIONS, "rope_high")]
    schemes = [one for one in scored if one not in ablations]
    twins = [one for layout in EXTENDED if (one := first_of(schemes, layout)) is not None]
    panels = {"schemes": _table([(one, PLAIN) for one in schemes])} if schemes else {}
    extended = [(one, method) for one in twins for method in (PLAIN, *METHODS) if method == PLAIN or _has(one, method)]
    if len(extended) > len(twins):
        panels["with PI and YaRN"] = _table(extended)
    if ablations:
        panels["ablations"] = _table([(one, PLAIN) for one in [*twins, *ablations]])
    whole = _table([(one, method) for one in scored for method in (PLAIN, *METHODS) if method == PLAIN or _has(one, method)])
    end = _training_end(scored)
    panels = {title: table.assign_attrs(axis="sequences", **end) for title, table in panels.items()}
    prompts = scored[0].sample(scored[0].test_sets[:1]).count
    return Result(
        "copying",
        "Copying: exact match of the 4 tokens that followed 8 tokens seen before, by the number of sequences in the context (HoPE table 1 "
        f"and 3), {prompts} prompts each, targets teacher-forced (exact match is the same as when generated). Dotted: the longest training "
        "prompts. PI and YaRN by the factor n / L beyond them. Band: seeds; bars: standard error over prompts.",
        whole,
        copying_by_sequences(panels),
        tuple(_copying_verdicts(scored)),
    )


def perplexity(scored: Sequence[Scored]) -> Result:
    """H6 in perplexity: fig. 5."""
    scored = on_the_same_windows(scored)
    rows = [(one, method) for one in scored for method in (PLAIN, *METHODS) if method == PLAIN or _has(one, method)]
    tables = [perplexity_table([one], method).assign_coords(checkpoint=[_label(one, method, scored)]) for one, method in rows]
    table = xr.concat(tables, dim="checkpoint", **_TOGETHER).sortby("test_set")  # pyright: ignore[reportArgumentType, reportCallIssue]
    length = scored[0].training_length
    table = table.assign_attrs(axis="tokens", training_length=length)
    hope = first_of(scored, HOPE)
    return Result(
        "perplexity_by_length",
        f"Perplexity by length of the context (HoPE fig. 5), {scored[0].sample(scored[0].test_sets[:1]).count} windows of held-out text of "
        f"each length. Dotted: the training length, {length} tokens. PI and YaRN by the factor n / L beyond it. "
        f"{bands(table)}",
        table,
        perplexity_by_length(table, f"trained at {length} tokens"),
        () if hope is None else (_perplexity_verdict(hope, scored),),
    )


def beyond(one: Scored) -> tuple[str, ...]:
    """Test sets of a checkpoint whose prompts are longer than those of training, ascending."""
    longest = one.training_length
    return tuple(sorted((name for name in one.test_sets if _tokens(one, name) > longest), key=int))


def _tokens(one: Scored, test_set: str) -> int:
    """Tokens of a copying prompt with as many sequences as `test_set` says: <bos>, 12 a sequence, 12 of the question."""
    return one.tokens(test_set) if one.live is not None else 1 + 12 * (int(test_set) + 1)


def _copying_verdicts(scored: Sequence[Scored]) -> list[Verdict]:
    hope, rope = first_of(scored, HOPE), first_of(scored, ROPE)
    verdicts = []
    if hope is not None:
        rivals = [one for layout in rules.RIVALS if (one := first_of(scored, layout)) is not None]
        verdicts.append(
            _ahead(H6, hope, rivals, PLAIN) if rope is not None else no_verdict(H6, hope.name, missing([ROPE], "copying"))
        )
        for claim, method in ((H6_PI, "interpolation"), (H6_YARN, "yarn")):
            if rope is None or not (_has(hope, method) and _has(rope, method)):
                verdicts.append(
                    no_verdict(claim, hope.name, "needs the weights of a HoPE and a RoPE checkpoint trained on copying")
                )
            else:
                verdicts.append(_ahead(claim, hope, [rope], method))
    first, second, third = (first_of(scored, layout) for layout in rules.ABLATIONS)
    if rope is not None and first is not None and second is not None:
        verdicts += _ablations(rope, first, second, third)
    return verdicts


def _ahead(claim: Claim, hope: Scored, rivals: Sequence[Scored], method: str) -> Verdict:
    """Whether HoPE copies more than each rival beyond the training length."""
    sets = beyond(hope)
    if not sets:
        return no_verdict(claim, hope.name, "no test set is longer than the training prompts")
    samples = {one.name: one.sample(sets, method) for one in (hope, *rivals)}
    if not rules.learned(sample.mean for sample in samples.values()):
        return no_verdict(claim, hope.name, f"nobody copies {sets[0]} to {sets[-1]} sequences: {_means(samples)}")
    leads = {one.name: above(samples[hope.name], samples[one.name]) for one in rivals}
    mine = samples[hope.name]
    inside = [name for name in hope.test_sets if name not in sets]
    within = {one.name: one.sample(inside, method) for one in (hope, *rivals)} if inside else {}
    absent = [layout for layout in rules.RIVALS if layout not in {one.layout for one in rivals}] if claim is H6 else []
    return Verdict(
        claim,
        hope.name,
        judged(all_hold(leads.values())),
        f"exact match at {sets[0]} to {sets[-1]} sequences, beyond L, %"
        + (f", with {METHODS[method]}" if method in METHODS else ""),
        100 * mine.mean,
        **common(mine, 100),
        control=_means({name: sample for name, sample in samples.items() if name != hope.name}),
        note=noted(
            [hope, *rivals],
            said(leads, "above", " points", 100),
            f"within L: {_means(within)}" if within else "",
            missing(absent, "copying"),
        ),
    )


def _ablations(rope: Scored, first: Scored, second: Scored, third: Scored | None) -> list[Verdict]:
    ran = [one for one in (first, second, third, rope) if one is not None]
    sets = [name for name in rope.test_sets if all(name in one.test_sets for one in ran)]
    samples = {one.layout: one.sample(sets) for one in ran}
    means = _means(samples)
    if not rules.learned(sample.mean for sample in samples.values()):
        return [
            no_verdict(claim, one.name, f"nobody copies: {means}") for claim, one in ((H7, first), (H7_REMOVED, third or first))
        ]
    one, two, without = (samples[name] for name in ("hope_ab1", "hope_ab2", ROPE))
    leads = {"AB1 above AB2": above(one, two), "AB2 above RoPE": above(two, without)}
    measured = f"exact match at {sets[0]} to {sets[-1]} sequences, %"
    verdicts = [
        Verdict(
            H7,
            first.name,
            judged(rules.ablations_in_order(*leads.values())),
            f"{measured} (AB1)",
            100 * one.mean,
            **common(one, 100),
            control=_means({name: samples[name] for name in ("hope_ab2", ROPE)}),
            note=noted([first, second, rope], said(leads, "", " points", 100).strip()),
        )
    ]
    if third is None:
        return [*verdicts, no_verdict(H7_REMOVED, rope.name, missing(["hope_ab3"], "copying"))]
    removed = samples["hope_ab3"]
    below = {layout: above(sample, removed) for layout, sample in samples.items() if sample is not removed}
    verdicts.append(
        Verdict(
            H7_REMOVED,
            third.name,
            judged(all_hold(below.values())),
            f"{measured} (AB3)",
            100 * removed.mean,
            **common(removed, 100),
            control=_means({name: sample for name, sample in samples.items() if sample is not removed}),
            note=noted([third, first, second, rope], said(below, "below", " points", 100)),
        )
    )
    return verdicts


def _perplexity_verdict(hope: Scored, scored: Sequence[Scored]) -> Verdict:
    rope, (short, long) = first_of(scored, ROPE), shortest_and_longest(hope)
    if rope is None or short == long or long not in rope.test_sets:
        why = missing([ROPE], "language") if rope is None else "no checkpoint was scored beyond the training length"
        return no_verdict(H6_PERPLEXITY, hope.name, why)
    longer = [one for one in scored if long in one.test_sets]
    samples = {one.name: one.sample((long,)) for one in longer}
    mine = samples[hope.name]
    extended = [
        f"{_label(one, method, scored)} {np.exp(one.sample((long,), method).mean):.4g}"
        for one in (rope, hope)
        for method in METHODS
        if _has(one, method)
    ]
    return Verdict(
        H6_PERPLEXITY,
        hope.name,
        judged(lower_perplexity(above(samples[rope.name], mine))),
        f"perplexity at {long} tokens",
        float(np.exp(mine.mean)),
        **common(mine, float(np.exp(mine.mean))),
        control=", ".join(f"{name} {np.exp(sample.mean):.4g}" for name, sample in samples.items() if name != hope.name),
        note=noted(
            [hope, rope],
            said({rope.name: above(samples[rope.name], mine)}, "log perplexity below", " nats"),
            f"at {short} tokens {np.exp(hope.sample((short,)).mean):.4g}, {rope.name} {np.exp(rope.sample((short,)).mean):.4g}",
            ", ".join(extended),
        ),
    )


def _table(rows: Sequence[tuple[Scored, str]]) -> xr.Dataset:
    """Scores of checkpoints, some of them extended, by the number of sequences."""
    checkpoints = [one for one, _ in rows]
    tables = [
        score_table([one], method=method).assign_coords(checkpoint=[_label(one, method, checkpoints)]) for one, method in rows
    ]
    table = xr.concat(tables, dim="checkpoint", **_TOGETHER)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return table.assign_coords(test_set=table["test_set"].astype(int)).sortby("test_set")


def _label(one: Scored, method: str, among: Sequence[Scored]) -> str:
    """What a legend calls a checkpoint: its scheme, or its name where two have this scheme; and how it is extended."""
    several = len({other.name for other in among if other.layout == one.layout}) > 1
    name = one.name if several else layout_name(one.layout)
    return f"{name} + {METHODS[method]}" if method in METHODS else name


def _has(one: Scored, method: str) -> bool:
    return one.live is not None and method in one.live["method"].values


def _training_end(scored: Sequence[Scored]) -> dict[str, float]:
    """Sequences of a test prompt as long as the longest in training, where all checkpoints have the same."""
    lengths = {one.training_length for one in scored}
    return {"training_length": (lengths.pop() - 1) / 12 - 1} if len(lengths) == 1 else {}


def _means(samples: Mapping[str, Sample]) -> str:
    return ", ".join(f"{name} {100 * sample.mean:.3g} %" for name, sample in samples.items())
