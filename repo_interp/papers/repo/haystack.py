"""Needle in a haystack (RePo table 1, fig. 1, 4, 5): R9 at the training length and beyond it, and over the layer that RePo starts at.

All checkpoints of one training length answer the same prompts, so that differences are taken prompt by prompt - or over seeds where
both have several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.measures.labels import described
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.checkpoint_scores import PLAIN
from repo_interp.papers.kit.claims import UNMEASURED, Verdict, judged
from repo_interp.papers.kit.recorded_scores import unequal_budgets
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.score_rules import above
from repo_interp.papers.kit.subjects import Options, Subject
from repo_interp.papers.repo import rules
from repo_interp.papers.repo.claims import R9, R9_LONGER, R9_START
from repo_interp.papers.repo.scores import YARN, Searched, search
from repo_interp.papers.repo.tables_figure import start_layers
from repo_interp.plots.marks.scores import method_panels, score_maps

METHODS = {PLAIN: "plain", YARN: "YaRN beyond L"}


def haystack(found: Sequence[Subject], options: Options, cache: Cache) -> list[Result]:
    """R9 and its figures, of checkpoints that are asked the same."""
    searched = [search(one, options, cache) for one in found]
    results = [_by_length(searched, options)]
    maps = _maps(searched, options)
    starts = [one for one in searched if _start(one.subject) is not None]
    results += [] if maps is None else [maps]
    if len({_start(one.subject) for one in starts}) > 1:
        results.append(_start_layers(starts, options))
    return results


def _by_length(searched: Sequence[Searched], options: Options) -> Result:
    first = searched[0]
    lengths, methods = first.lengths, list(METHODS)
    samples = {(one.subject.name, method, n): one.sample([n], method) for one in searched for method in methods for n in lengths}
    seeds = max(len(sample.seeds) for sample in samples.values())
    values = np.full((len(methods), len(searched), len(lengths), seeds), np.nan)
    errors = np.full(values.shape[:3], np.nan)
    for row, column, place in np.ndindex(errors.shape):
        sample = samples[searched[column].subject.name, methods[row], lengths[place]]
        values[row, column, place, : len(sample.seeds)] = sample.seeds
        errors[row, column, place] = sample.prompts.std(ddof=1) / np.sqrt(len(sample.prompts))
    coords = {
        "method": list(METHODS.values()),
        "checkpoint": [one.subject.name for one in searched],
        "test_set": lengths,
        "layout": ("checkpoint", [one.subject.layout for one in searched]),
    }
    axes = ("method", "checkpoint", "test_set")
    data = xr.Dataset(
        {
            "score": ((*axes, "seed"), values, {"long_name": "share of needles found", "units": "1"}),
            "standard_error": (axes, errors, {"long_name": "standard error over prompts", "units": "1"}),
        },
        coords,
        {"axis": "tokens", "training_length": first.subject.training_length},
    )
    rope = next((one for one in searched if one.subject.layout == "rope"), None)
    learned = [one for one in searched if one.subject.learned]
    verdicts = [] if rope is None else [verdict for one in learned for verdict in (_at_length(one, rope), _longer(one, rope))]
    return Result(
        f"haystack_by_length_{_group(first.subject)}",
        f"Needles found by context length (RePo table 1, fig. 1, 5), {options.score_prompts} prompts each. Plain: mean over seeds, "
        "band from the smallest to the largest; YaRN by the factor n / L beyond the training length L (dotted): one seed, "
        "standard error over prompts.",
        data,
        method_panels(data),
        tuple(verdicts),
    )


def _at_length(one: Searched, rope: Searched) -> Verdict:
    length = [one.subject.training_length]
    mine, theirs = one.sample(length, PLAIN), rope.sample(length, PLAIN)
    lead = above(mine, theirs)
    measured = f"share of needles found at {length[0]} tokens"
    if min(mine.mean, theirs.mean) >= rules.CEILING:
        note = f"{mine.mean:.3f} and {rope.subject.name} {theirs.mean:.3f}: both find all of them, so neither is above"
        return Verdict(R9, one.subject.name, UNMEASURED, measured, note=note)
    return Verdict(
        R9,
        one.subject.name,
        judged(lead.holds),
        measured,
        mine.mean,
        mine.spread,
        mine.over,
        mine.count,
        f"{rope.subject.name} {theirs.mean:.3f}",
        f"above by {lead.margin:+.3f} (standard error {lead.standard_error:.2g} over {lead.over}){_budgets(one, rope)}",
    )


def _longer(one: Searched, rope: Searched) -> Verdict:
    longer = [length for length in one.lengths if length > one.subject.training_length]
    pairs = {length: (one.sample([length], YARN), rope.sample([length], YARN)) for length in longer}
    leads = {length: above(*pair) for length, pair in pairs.items()}
    mine, theirs = one.sample(longer, YARN), rope.sample(longer, YARN)
    plain = {length: (one.sample([length], PLAIN).mean, rope.sample([length], PLAIN).mean) for length in longer}
    told_apart = [length for length in longer if min(sample.mean for sample in pairs[length]) < rules.CEILING]
    measured = f"share of needles found at {' and '.join(map(str, longer))} tokens with YaRN"
    bare = "; ".join(f"{length} without YaRN {plain[length][0]:.3f} and {plain[length][1]:.3f}" for length in longer)
    if not told_apart:
        note = f"{mine.mean:.3f} and {rope.subject.name} {theirs.mean:.3f}: both find all of them, so neither is above; {bare}"
        return Verdict(R9_LONGER, one.subject.name, UNMEASURED, measured, note=note)
    return Verdict(
        R9_LONGER,
        one.subject.name,
        judged(all(leads[length].holds for length in told_apart)),
        measured,
        mine.mean,
        mine.spread,
        mine.over,
        mine.count,
        f"{rope.subject.name} {theirs.mean:.3f}",
        "; ".join(
            f"{length}: {pairs[length][0].mean:.3f}, {rope.subject.name} {pairs[length][1].mean:.3f} ({lead.margin:+.3f}, standard error "
            f"{lead.standard_error:.2g})"
            for length, lead in leads.items()
        )
        + f"; {bare}{_budgets(one, rope)}",
    )


def _maps(searched: Sequence[Searched], options: Options) -> Result | None:
    kept = [one for one in searched if "map" in one.scores]
    if not kept:
        return None
    parts = []
    for one in kept:
        known = one.scores["map"]
        chosen = [known.sel({"method": name if name in known["method"].values else PLAIN}, drop=True) for name in METHODS]
        parts.append(xr.concat(chosen, dim=xr.IndexVariable("method", list(METHODS.values())), **_TOGETHER))
    maps: xr.DataArray = xr.concat(
        parts, dim=xr.IndexVariable("checkpoint", [one.subject.name for one in kept]), **_TOGETHER
    ).assign_coords(layout=("checkpoint", [one.subject.layout for one in kept]))
    length = kept[0].subject.training_length
    return Result(
        f"haystack_map_{_group(kept[0].subject)}",
        f"Needles found, per cent, by depth and context length (RePo fig. 1, 5), {options.score_prompts} prompts a length over all "
        "depths; empty: none there. "
        f"Right of the dotted line: beyond the training length, {length} tokens.",
        described(maps, "share of the needles found", "1").to_dataset(name="score"),
        score_maps(100 * maps, length),
    )


def _start_layers(starts: Sequence[Searched], options: Options) -> Result:
    order = sorted(starts, key=lambda one: (_start(one.subject) or 0, one.subject.name))
    lengths = order[0].lengths
    samples = [[[one.sample([length], method) for length in lengths] for one in order] for method in METHODS]
    scores = np.array([[[sample.mean for sample in row] for row in rows] for rows in samples])
    errors = np.array([[[sample.spread or 0.0 for sample in row] for row in rows] for rows in samples])
    axes = ("method", "checkpoint", "length")
    data = xr.Dataset(
        {
            "score": (axes, scores, {"long_name": "share of needles found", "units": "1"}),
            "standard_error": (axes, errors, {"long_name": "standard error over prompts", "units": "1"}),
        },
        {
            "method": list(METHODS.values()),
            "checkpoint": [one.subject.name for one in order],
            "length": lengths,
            "start": ("checkpoint", [_start(one.subject) for one in order]),
        },
        {"training_length": order[0].subject.training_length, "layers": len(order[0].subject.schemes)},
    )
    plain, extended = scores.mean(axis=2)
    at_length = scores[0, :, 0]
    names = ", ".join(one.subject.name for one in order)
    measured = "largest difference of the mean score over L, 2L, 4L between starting layers"
    seeds = [max(len(sample.seeds) for sample in row) for row in samples[0]]
    note = (
        "; ".join(
            f"from layer {_start(one.subject)}: {mean:.3f}, without YaRN {bare:.3f}"
            for one, mean, bare in zip(order, extended, plain, strict=True)
        )
        + f"; at L alone {at_length.min():.3f} to {at_length.max():.3f}; without YaRN {' to '.join(map(str, sorted(set(seeds))))} seeds, "
        "with it one"
    )
    verdict = (
        Verdict(R9_START, names, UNMEASURED, measured, note=f"all find all of them: {note}")
        if extended.min() >= rules.CEILING
        else Verdict(
            R9_START,
            names,
            judged(bool(np.ptp(extended) <= rules.ROBUST)),
            measured,
            float(np.ptp(extended)),
            n=options.score_prompts * len(lengths),
            note=note,
        )
    )
    return Result(
        f"haystack_start_layer_{_group(order[0].subject)}",
        f"Needles found by the layer (0-based) from which RePo replaces RoPE (RePo fig. 4), {options.score_prompts} prompts a length, "
        "without and with YaRN beyond the training length L; bar: standard deviation over seeds, or of one seed's mean its standard error.",
        data,
        start_layers(data),
        (verdict,),
    )


_TOGETHER: Any = {"join": "outer", "coords": "minimal", "compat": "override"}


def _start(subject: Subject) -> int | None:
    """The layer from which all layers are RePo, those below RoPE; None for other layouts."""
    if "repo" not in subject.schemes:
        return None
    start = subject.schemes.index("repo")
    expected = ("rope",) * start + ("repo",) * (len(subject.schemes) - start)
    return start if subject.schemes == expected else None


def _group(subject: Subject) -> str:
    return f"{subject.kind}_{subject.training_length}"


def _budgets(one: Searched, other: Searched) -> str:
    known = {searched.subject.name: searched.recorded.configuration for searched in (one, other) if searched.recorded is not None}
    said = unequal_budgets(dict(known)) if len(known) == 2 else ""
    return f"; {said}" if said else ""
