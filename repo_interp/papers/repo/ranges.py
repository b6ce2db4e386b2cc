"""How far learned positions spread, and how they run in chunks (RePo sec. 5.2, fig. 2, 3): R5 and R6.

Ranges of every learned head on prompts of L/4, L/2, L, 2L and 4L tokens, L the training length; the claim is judged within L, as in the
paper. Chunks of 16 tokens at L, with a grid of other chunk sizes and tolerances, and on twins with random weights.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import xarray as xr

from repo_interp.analysis.analyze import analyze
from repo_interp.errors import InputError
from repo_interp.measures.labels import described
from repo_interp.models.load import load, load_fresh
from repo_interp.papers.kit.cache import Cache
from repo_interp.papers.kit.claims import Verdict, judged
from repo_interp.papers.kit.result import Result
from repo_interp.papers.kit.subjects import Options, Subject
from repo_interp.papers.repo.claims import R5, R6
from repo_interp.papers.repo.rules import grid_agreement, hybrid_dominates, spreading
from repo_interp.papers.repo.tables_figure import ranges_by_context
from repo_interp.plots.views.patterns import pattern_sensitivity, pattern_shares
from repo_interp.run import make_run

SHARES = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4))
"""Context lengths, in training lengths."""


def ranges(one: Subject, options: Options, cache: Cache) -> Result | None:
    """R5, fig. 2; None where prompts of half the training length cannot be made."""
    data = one.measured(cache, "ranges", options, lambda: _ranges(one, options), prompts=options.prompts)
    long, short = one.training_length, one.training_length // 2
    if not {long, short} <= set(data["length"].values.tolist()):
        return None
    of_length = data["range"].transpose("length", "prompt", "unit")
    judgement = spreading(of_length.sel(length=short).values, of_length.sel(length=long).values, short, long)
    means = of_length.mean(("prompt", "unit"))
    said = {"grows": judgement.grows, "stays far below": judgement.below, "uneven": judgement.uneven}
    verdict = Verdict(
        R5,
        one.name,
        judged(judgement.holds),
        f"largest range of a head over the context length, {short} and {long} tokens",
        judgement.largest,
        float((of_length.sel(length=long).max("unit") / long).std("prompt", ddof=1)),
        f"prompts of {long} tokens",
        2 * options.prompts,
        "RoPE: 1, the same in every head",
        "; ".join(f"{part}: {'yes' if holds else 'no'}" for part, holds in said.items())
        + f"; growth {judgement.growth.margin:+.3g} positions (standard error {judgement.growth.standard_error:.2g}); over heads, "
        f"deviation over mean {judgement.variation:.2f}; mean range "
        + ", ".join(
            f"{float(mean):.3g} at {int(length)}" for length, mean in zip(means["length"].values, means.values, strict=True)
        ),
    )
    return Result(
        f"ranges_{one.stem}",
        f"{one.name}: range of positions of every learned head by context length (RePo fig. 2), mean over {options.prompts} prompts each, "
        f"and its share of the length. The claim is judged at {short} and {long} tokens.",
        data.assign_attrs(training_length=long),
        ranges_by_context(data.assign_attrs(training_length=long), one.name),
        (verdict,),
    )


def chunks(one: Subject, options: Options, cache: Cache) -> list[Result]:
    """R6, fig. 3, and its sensitivity (footnote 5)."""
    data = one.measured(
        cache, "chunks", options, lambda: _chunks(one, options), prompts=options.prompts, controls=options.controls
    )
    run = make_run({"patterns": data.drop_vars("random_share")}, {})
    share = {str(name): float(data["pattern_share_all"].sel(pattern=name)) for name in data["pattern"].values}
    by_prompt = _by_prompt(data, one)
    agreement = grid_agreement(data["sensitivity"].transpose("chunk_size", "epsilon", "pattern").values.reshape(-1, 3))
    random = data["random_share"].transpose("weights", "pattern").values
    verdict = Verdict(
        R6,
        one.name,
        judged(hybrid_dominates(share["constant"], share["mono"], share["hybrid"])),
        "share of hybrid chunks, per cent",
        100 * share["hybrid"],
        100 * float(by_prompt.std(ddof=1)),
        "prompts",
        options.prompts,
        "random weights: "
        + ", ".join(f"constant {100 * c:.0f}, mono {100 * m:.0f}, hybrid {100 * h:.0f} %" for c, m, h in random),
        f"constant {100 * share['constant']:.1f} %, mono {100 * share['mono']:.1f} %; the same is seen with {int(agreement.sum())} of "
        f"{len(agreement)} pairs of chunk size and epsilon",
    )
    said = f"{options.prompts} prompts of {one.training_length} tokens"
    return [
        Result(
            f"patterns_{one.stem}",
            f"{one.name}: patterns of chunks (RePo fig. 3), {said}.",
            data,
            pattern_shares(run),
            (verdict,),
        ),
        Result(
            f"pattern_sensitivity_{one.stem}",
            f"{one.name}: the same with other chunk sizes and tolerances (RePo footnote 5), {said}; framed: the paper's.",
            data[["sensitivity"]],
            pattern_sensitivity(run),
        ),
    ]


def _ranges(one: Subject, options: Options) -> xr.Dataset:
    bridge = load(one.path, options.device)
    parts, lengths = [], []
    for share in SHARES:
        length = int(one.training_length * share)
        try:
            prompts = one.prompts(length, options.prompts, options.seed)
        except InputError:  # shorter than a prompt of this task can be, or longer than a document of its corpus
            continue
        run = analyze(bridge, prompts, ("positions",), one.learned, batch_size=options.batch_size)
        parts.append(run["positions"].to_dataset()["position_range"].transpose("prompt", "layer", "head"))
        lengths.append(length)
    if not parts:
        raise InputError(
            f"{one.name}: no prompts could be made of {one.training_length // 4} to {4 * one.training_length} tokens"
        )
    units = [f"layer {layer} head {head}" for layer in parts[0]["layer"].values for head in parts[0]["head"].values]
    values = np.stack([part.values.reshape(part.shape[0], -1) for part in parts]).astype(float)
    array = xr.DataArray(values, {"length": lengths, "unit": units}, ("length", "prompt", "unit"))
    return described(array, "largest minus smallest position of a prompt", "positions").to_dataset(name="range")


def _chunks(one: Subject, options: Options) -> xr.Dataset:
    prompts = one.prompts(one.training_length, options.prompts, options.seed)
    bridges = [load(one.path, options.device)]
    bridges += [load_fresh(one.path, seed, options.device) for seed in range(options.controls)]
    found = [
        analyze(bridge, prompts, ("patterns",), batch_size=options.batch_size)["patterns"].to_dataset() for bridge in bridges
    ]
    random = xr.concat([twin["pattern_share_all"] for twin in found[1:]], dim="weights")
    return found[0].assign(random_share=described(random, "the same with random weights", "1"))


def _by_prompt(data: xr.Dataset, one: Subject) -> np.ndarray:
    """Share of hybrid chunks of every prompt over the layers that learn positions."""
    labels = data["chunk_pattern"].sel(layer=list(one.learned))
    axes = ("layer", "head", "chunk")
    return ((labels == 2).sum(axes) / (labels >= 0).sum(axes)).values
