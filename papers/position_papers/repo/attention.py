"""Where attention goes in a needle in a haystack (RePo sec. 5.1, table 4): R4, read in both ways.

    mass per token x 100 of needle, query and rest, mean over layers and heads, by prompt; every
    checkpoint gets the same prompts

The claim has two halves, the needle's and the query's, which are told apart: one can be decided by
fewer seeds than the other. Schemes are compared seed by seed: prompts of one pair of models say what
these two do. A model that
does not find the needles has nowhere to look: its seed is left out, and NoPE is a rival only where
it finds them. Where it finds nearly all, nothing is said: see `needles`. The rows of the generated
tokens themselves are the paper's words; the rows that produced them are where an answer is looked
up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from position_papers.kit import (
    PLAIN,
    Above,
    All,
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
    evidence,
    in_words,
    joined,
    mean_of,
    method_panels,
    paired_seeds,
    seeds_of,
    why_not,
)
from position_papers.repo.checkpoints import (
    HAYSTACKS,
    NO_HAYSTACK,
    OLMO,
    called,
    finds_needles,
    needles,
    needles_of,
    omits_positions,
)
from position_papers.repo.needles import NEEDS_POSITIONS, NOPE, found_without_positions, search
from position_papers.repo.options import Options
from repo_interp.analysis.analyze import analyze
from repo_interp.measures.attention_mass import ROWS, AttentionMass
from repo_interp.measures.labels import with_attrs
from repo_interp.models.load import load
from repo_interp.plots.marks.scores import layout_name

SPANS = ("needle", "query", "rest", "distractor")
"""Those of table 4, and the needles that are not asked for, where there are some."""
NEEDLE = "needle mass per token"
ROPE_NEEDLE = "RoPE's needle mass per token"
QUERY = "query mass per token"
ON_NEEDLE = All(Above(NEEDLE, ("RoPE",)), Above(ROPE_NEEDLE, ("NoPE",), required=()))
ON_QUERY = Above(QUERY, ("RoPE", "NoPE"), relation="below", required=("RoPE",))
NEEDLE_NUMBERS, QUERY_NUMBERS = "2.013 / 1.754 / 1.572", "1.046 / 1.123 / 1.135"
R4 = Claim(
    "R4",
    "attention mass per token from the generated tokens' own rows: needle RePo > RoPE > "
    "NoPE, query RePo lowest",
    "RePo table 4",
    f"needle {NEEDLE_NUMBERS}, query {QUERY_NUMBERS} x 0.01",
    Where(NEEDS_POSITIONS, All(*ON_NEEDLE.rules, ON_QUERY)),
    shows_control=True,
    apart=("needle", "query"),
)
R4_NEEDLE = Claim(
    "R4",
    "attention mass per token of the needle, from the generated tokens' own rows: RePo > RoPE > NoPE",
    R4.source,
    f"{NEEDLE_NUMBERS} x 0.01",
    Where(NEEDS_POSITIONS, ON_NEEDLE),
    part="needle",
)
R4_QUERY = Claim(
    "R4",
    "attention mass per token of the query, from the generated tokens' own rows: RePo lowest",
    R4.source,
    f"{QUERY_NUMBERS} x 0.01",
    Where(NEEDS_POSITIONS, ON_QUERY),
    part="query",
)
R4_PRODUCING = Claim(
    "R4",
    "the same from the rows that produced the generated tokens, one earlier",
    R4.source,
    R4.paper_number,
    R4.rule,
    part="producing rows",
)
EVENNESS = "the standard deviation of the mass per token over needle, query and rest"
R4_EVEN = Claim(
    "R4",
    "attention without positions varies less over needle, query and rest than RoPE's",
    "RePo table 4",
    "NoPE 0.81, RoPE 0.88 x 0.01: much lower variance",
    Above(EVENNESS, ("RoPE",), relation="below"),
    part="NoPE's variance",
)
CLAIMS: Mapping[str, Claim] = {"generated": R4, "producing": R4_PRODUCING}
"""By the rows that attention is read from."""
HALVES: Mapping[str, Mapping[str, Claim]] = {"generated": {"needle": R4_NEEDLE, "query": R4_QUERY}}
"""The halves of a claim, by the rows and the span that they are about."""
LEAST_FOUND = 0.5
"""Share of the needles that a checkpoint finds itself, below which its attention says nothing about
finding them.
"""


# ---- measured ------------------------------------------------------------------------------------


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset:
    """`mass_per_token [checkpoint, seed, rows, prompt, span]` in 0.01, on prompts of the training
    length, NaN of seeds that are not there or do not find the needles; `layout`, `label`,
    `learned_layers`.
    """
    by_seed = {subject.name: _of_seeds(subject, options, cache) for subject in subjects}
    mass = joined(by_seed, "checkpoint", "outer").assign_coords(
        layout=("checkpoint", [subject.layout for subject in subjects]),
        label=("checkpoint", [called(subject) for subject in subjects]),
        learned_layers=("checkpoint", [len(subject.learned) for subject in subjects]),
    )
    nope = [
        search(subject, options, cache) for subject in subjects if omits_positions(subject.layout)
    ]
    share, why_not = found_without_positions(nope)
    return mass.to_dataset(name="mass_per_token").assign_attrs(
        task=needles_of(subjects[0]),
        training_length=subjects[0].training_length,
        found_by_nope=share,
        silent=", ".join(called(each) for each in subjects if _why_not(each, options, cache)),
        why_not=why_not
        or next(
            (_lost(each.name, each, options, cache) for each in subjects if each.layout == "rope"),
            "",
        ),
    )


def _of_seeds(subject: Subject, options: Options, cache: Cache) -> xr.DataArray:
    """The mass of every training seed; NaN of one, but the first, of which nothing can be said."""
    parts: dict[int, xr.DataArray] = {}
    for seed, own in seeds_of(subject).items():
        mass = own.measured(cache, _mass, options, prompts=options.prompts)["mass"]
        parts[seed] = mass.where(own.path == subject.path or not _why_not(own, options, cache))
    return joined(parts, "seed")


def _mass(subject: Subject, options: Options) -> xr.Dataset:
    """`mass [rows, prompt, span]` in 0.01."""
    prompts = needles(subject, subject.training_length, options.prompts, options.seed)
    measures: list[Any] = [AttentionMass(rows=rows, name=rows) for rows in ROWS]
    run = analyze(
        load(subject.path, options.device), prompts, measures, batch_size=options.batch_size
    )
    by_rows = {
        rows: 100 * run[rows].to_dataset()["mass_per_token"].mean(("layer", "head"))
        for rows in ROWS
    }
    parts = {
        rows: part.reindex(span=[name for name in SPANS if name in part["span"].values])
        for rows, part in by_rows.items()
    }
    return with_attrs(joined(parts, "rows"), "attention mass per token", "0.01").to_dataset(
        name="mass"
    )


def _why_not(subject: Subject, options: Options, cache: Cache) -> tuple[str, ...]:
    """Why the attention of `subject` says nothing: it does not find the needles, or does not use
    the positions that it learns.
    """
    lost = _lost("it", subject, options, cache)
    return (lost,) if lost else why_not(subject, options, cache)


def _lost(called: str, subject: Subject, options: Options, cache: Cache) -> str:
    """Why the attention of `subject` says nothing on needles: it does not find them; "" where it
    does.
    """
    found = search(subject, options, cache).sample([subject.training_length], PLAIN).prompts.mean()
    few = (
        f"{called} finds {found:.3f} of the needles at its training length (wanted at "
        f"least {LEAST_FOUND:g})"
    )
    return few if found < LEAST_FOUND else ""


# ---- tabulated --------------------------------------------------------------------------------------


def tabulate(data: xr.Dataset) -> Iterator[Evidence]:
    """Every checkpoint with learned positions beside those of RoPE and NoPE, in both readings."""
    mass = data["mass_per_token"]
    layouts = mass["layout"].to_series().to_dict()
    rope = next((name for name, layout in layouts.items() if layout == "rope"), None)
    nope = next((name for name, layout in layouts.items() if omits_positions(layout)), None)
    if rope is not None and nope is not None:
        rivals = {"RoPE": rope, "NoPE": nope}
        for checkpoint in mass["checkpoint"].values[mass["learned_layers"].values > 0].tolist():
            for rows, claim in CLAIMS.items():
                both = _beside(mass.sel(rows=rows), checkpoint, rivals, claim, data.attrs)
                yield both
                for span, half in HALVES.get(rows, {}).items():
                    yield _half(both, half, mass.sel(rows=rows, checkpoint=checkpoint, span=span))
        yield _evenness(mass.sel(rows="generated"), rivals)


def _beside(
    mass: xr.DataArray,
    checkpoint: str,
    rivals: Mapping[str, str],
    claim: Claim,
    attributes: Mapping[str, Any],
) -> Evidence:
    def of(name: str, span: str) -> xr.DataArray:
        """By seed, mean over prompts; seeds of which something can be said."""
        return mass.sel(checkpoint=rivals.get(name, name), span=span).mean("prompt").dropna("seed")

    def above(first: str, second: str, span: str) -> Difference:
        one, other = xr.align(of(first, span), of(second, span), join="inner")
        return paired_seeds(one.values, other.values)

    def rival(name: str, span: str) -> float:
        """The mean of a rival over those of its seeds that `checkpoint` has too."""
        other, mine = of(name, span), of(checkpoint, span)
        return float(other.sel(seed=other["seed"].isin(mine["seed"])).mean())

    nope = ["NoPE"] if attributes["found_by_nope"] >= LEAST_FOUND else []
    values = {
        NEEDLE: {"RoPE": above(checkpoint, "RoPE", "needle")},
        ROPE_NEEDLE: {name: above("RoPE", name, "needle") for name in nope},
        QUERY: {name: above(name, checkpoint, "query") for name in ("RoPE", *nope)},
    }
    own = of(checkpoint, "needle")
    layouts = {
        name: layout_name(str(mass.sel(checkpoint=rival)["layout"].item()))
        for name, rival in rivals.items()
    }
    of_rivals = {
        span: ", ".join(f"{layout} {rival(name, span):.3f}" for name, layout in layouts.items())
        for span in ("needle", "query")
    }
    found = f"{100 * attributes['found_by_nope']:.2g} %"
    return evidence(
        claim,
        checkpoint,
        "needle mass per token, 0.01",
        {**values, NOPE: attributes["found_by_nope"]},
        **mean_of(own.values, f"{own.size} seeds", mass.sizes["prompt"]),
        control=of_rivals["needle"] + ("" if nope else f" (finds {found})"),
        note=(
            f"needle {in_words(values[NEEDLE], 'above', '')}; query "
            f"{float(of(checkpoint, 'query').mean()):.3f} ({of_rivals['query']}), "
            f"{in_words(values[QUERY], 'below', '')}; seeds "
            f"{', '.join(map(str, own['seed'].values))}",
            "" if nope else f"NoPE finds {found} of the needles, so its attention is no rival's",
        ),
        unmeasurable=attributes["why_not"],
        seeds=own.size,
    )


def _half(both: Evidence, claim: Claim, mass: xr.DataArray) -> Evidence:
    """The evidence on one half of R4, of a checkpoint's mass [seed, prompt] on its span."""
    own, span = mass.mean("prompt").dropna("seed"), str(mass["span"].item())
    values = both.estimate.values
    difference, word = (values[NEEDLE], "above") if span == "needle" else (values[QUERY], "below")
    return evidence(
        claim,
        both.checkpoint,
        f"{span} mass per token, 0.01",
        values,
        **mean_of(own.values, f"{own.size} seeds", mass.sizes["prompt"]),
        note=in_words(difference, word, ""),
        unmeasurable=both.why,
        seeds=own.size,
    )


def _evenness(mass: xr.DataArray, rivals: Mapping[str, str]) -> Evidence:
    """R4 (NoPE's variance), seed by seed; it needs a NoPE that finds the needles, not needles that
    take positions.
    """
    spread = mass.sel(span=list(SPANS[:3])).mean("prompt").std("span", ddof=1)
    rope, nope = xr.align(
        *(spread.sel(checkpoint=rivals[name]).dropna("seed") for name in ("RoPE", "NoPE")),
        join="inner",
    )
    return evidence(
        R4_EVEN,
        rivals["NoPE"],
        f"{EVENNESS}, 0.01",
        {EVENNESS: {"RoPE": paired_seeds(rope.values, nope.values)}},
        **mean_of(nope.values, f"{nope.size} seeds", mass.sizes["prompt"]),
        control=f"RoPE {float(rope.mean()):.3g}",
        note=f"RoPE {float(rope.mean()):.3g}",
        seeds=nope.size,
    )


# ---- drawn ---------------------------------------------------------------------------------------

TITLES = {"producing": "Producing rows", "generated": "Own rows"}


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Table 4."""
    length, silent = data.attrs["training_length"], data.attrs["silent"]
    mass = data["mass_per_token"].sel(rows=list(TITLES)).rename(rows="method", span="test_set")
    mass = mass.assign_coords(method=list(TITLES.values()))
    score = with_attrs(
        mass.mean("prompt").transpose(..., "seed"), "attention mass per token", "0.01"
    ).to_dataset(name="score")
    error = mass.isel(seed=0).std("prompt", ddof=1) / np.sqrt(mass.sizes["prompt"])
    yield Drawing(
        f"attention_mass_{data.attrs['task']}_{length}",
        partial(method_panels, score.assign(standard_error=error)),
        "Attention mass per token on parts of the context (RePo table 4), mean over "
        f"{data.sizes['prompt']} prompts of {length} tokens, all layers and heads; dots: training "
        "seeds; bar of a single one: standard error over prompts. Left: the rows that produced the "
        "generated tokens, one earlier; right: rows of the generated tokens themselves, as the "
        f"paper puts it. Even attention: {100 / length:.3g}."
        + (
            f" Not judged, for they do not find the needles or use their positions: {silent}."
            if silent
            else ""
        ),
        data,
    )


ATTENTION = Experiment(
    "attention mass",
    (R4, R4_NEEDLE, R4_QUERY, R4_PRODUCING, R4_EVEN),
    Needs(asked_the_same(finds_needles), NO_HAYSTACK, HAYSTACKS, why_not=_why_not),
    measure,
    tabulate,
    draw,
    OLMO,
)
