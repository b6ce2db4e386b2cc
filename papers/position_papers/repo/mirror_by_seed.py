"""Whether a stronger mirror goes with better reversal of longer texts, over training seeds: a question of ours to R2.

    strength    mean |z_copy - z_other word| over mean |z_copy - z_word|, in the layer other than 0 where it is largest
    score       mean exact match at the lengths beyond those trained on
    null        Spearman's correlation of both over every order of the seeds (a random 20,000 of them where there are more)

Training with different seeds ends in two kinds of models: some reverse texts of thirty words, some no more than NoPE does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy.stats import rankdata, spearmanr

from position_papers.kit.cache import Cache
from position_papers.kit.claims import Claim, Verdict, verdict
from position_papers.kit.experiment import Drawing, Experiment, Needs, each
from position_papers.kit.rules import BeyondNull, Observed, beside_null
from position_papers.kit.subjects import Subject, records_of, seeds_of
from position_papers.repo.checkpoints import GPT2, can_mirror, reversal_of
from position_papers.repo.mirror import MIRRORS, QUANTITIES, R2
from position_papers.repo.mirror import measure as measure_mirror
from position_papers.repo.options import Options
from position_papers.training.trained import recorded_scores
from repo_interp.measures.labels import described
from repo_interp.plots.style import COLUMN_WIDTH, PaperFigure, paper_figure, scheme_colour, style

LEAST = 5
"""Seeds: of four, the rarest order is not rarer than 4 %."""
ORDERS = 20_000
"""Most orders of the null."""
TOGETHER = "the rank correlation, over seeds, of the mirror's strength with the exact match of longer texts"
R2_STRENGTH = Claim(
    "R2",
    "the stronger the mirror that a training seed found, the better it reverses longer texts",
    R2.source,
    "none",
    BeyondNull(TOGETHER, 0.95, "orders of the seeds"),
    "strength by seed",
)


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset | None:
    """`mirror [seed, layer, kind]`, mean over texts, and `score [seed]`; None where fewer than five seeds have weights."""
    (own,) = subjects
    scores = {run.seed: run for run in recorded_scores(records_of(own))}
    of_seeds = seeds_of(own)
    seeds = sorted(set(of_seeds) & set(scores))
    if len(seeds) < LEAST:
        return None
    task = reversal_of(own)
    beyond = [str(length) for length in range(task.longest + 1, task.longest_test + 1)]
    mirrors = [mirror_means(of_seeds[seed], options, cache) for seed in seeds]
    score = [float(np.mean([scores[seed].means[length] for length in beyond])) for seed in seeds]
    data = xr.concat(mirrors, dim=xr.IndexVariable("seed", seeds))
    data = data.assign(
        score=described(xr.DataArray(score, dims="seed"), f"mean exact match, {beyond[0]} to {beyond[-1]} words", "1")
    )
    return data.assign_attrs(
        checkpoint=own.name, stem=own.stem, lengths=f"{beyond[0]} to {beyond[-1]} words", texts=options.prompts
    )


def mirror_means(subject: Subject, options: Options, cache: Cache) -> xr.Dataset:
    """`mirror [layer, kind]` of the trained weights, mean over texts as long as the longest trained on."""
    data = measure_mirror([subject], options, cache)[["mirror"]].sel(weights="trained", drop=True)
    return data.mean("prompt", keep_attrs=True)


def strengths(data: xr.Dataset) -> Float[np.ndarray, " seed"]:
    """How many times nearer copies are to their source than to other words, by seed, in the layer other than 0 where that is most."""
    return strengths_by_layer(data).max("layer").values


def strengths_by_layer(data: xr.Dataset) -> xr.DataArray:
    """How many times nearer copies are to their source than to other words, in every layer other than 0."""
    means = data["mirror"].sel(layer=data["layer"] > 0)
    return described(means.sel(kind="random") / means.sel(kind="copies"), "strength of the mirror", "1")


def judge(data: xr.Dataset) -> Iterator[Verdict]:
    """R2 (strength by seed), with the layers that mirror in every seed."""
    score, strength = data["score"].values, strengths(data)
    observed = Observed(rank_correlation(strength, score), _null(strength, score))
    of_seed = [
        f"seed {int(seed)}: strength {own:.1f}, exact match {share:.2f}, mirrors in layers "
        f"{', '.join(map(str, _mirroring(data.sel(seed=seed)))) or 'none'}"
        for seed, own, share in zip(data["seed"].values, strength, score, strict=True)
    ]
    yield verdict(
        R2_STRENGTH,
        data.attrs["checkpoint"],
        f"rank correlation over seeds of the mirror's strength with the mean exact match at {data.attrs['lengths']}",
        {TOGETHER: observed},
        observed.value,
        n=data.sizes["seed"],
        seeds=data.sizes["seed"],
        control=beside_null(observed, ".2f"),
        note="; ".join(of_seed),
    )


def rank_correlation(first: Float[np.ndarray, " seed"], second: Float[np.ndarray, " seed"]) -> float:
    """Spearman's correlation."""
    return float(spearmanr(first, second).statistic)  # pyright: ignore[reportAttributeAccessIssue]


def _null(first: Float[np.ndarray, " seed"], second: Float[np.ndarray, " seed"]) -> list[float]:
    """The correlation with the seeds in every order, or in many random ones."""
    count = len(first)
    if np.prod(np.arange(1, count + 1, dtype=float)) <= ORDERS:
        orders = np.array(list(itertools.permutations(range(count))))
    else:
        random = np.random.default_rng(0)
        orders = np.array([random.permutation(count) for _ in range(ORDERS)])
    ranks, others = (rankdata(values) - (count + 1) / 2 for values in (first, second))
    return (ranks[orders] @ others / np.sqrt((ranks**2).sum() * (others**2).sum())).tolist()


def _mirroring(data: xr.Dataset) -> list[int]:
    """Layers other than 0 of one seed where the rule of R2 holds."""
    layers = [int(layer) for layer in data["layer"].values if layer > 0]
    return [
        layer
        for layer in layers
        if MIRRORS.holds({name: float(data["mirror"].sel(layer=layer, kind=kind)) for kind, name in QUANTITIES.items()})
    ]


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """One dot per seed: how strong the mirror is, and how well longer texts are reversed."""
    yield Drawing(
        f"mirror_by_seed_{data.attrs['stem']}",
        _figure(data),
        f"{data.attrs['checkpoint']}: one dot per training seed. Across: how many times nearer a copy's position is to its word's than to "
        f"other words', in the layer other than 0 where that is most, on {data.attrs['texts']} texts. Up: mean exact match at "
        f"{data.attrs['lengths']}, longer than trained on.",
        data,
    )


def _figure(data: xr.Dataset) -> PaperFigure:
    strength, score = strengths(data), data["score"].values
    with style():
        figure = paper_figure(COLUMN_WIDTH, 2.4)
        ax = figure.subplots()
        ax.plot(strength, score, "o", color=scheme_colour("repo"), markersize=4, markeredgewidth=0, gid="seeds")
        for seed, x, y in zip(data["seed"].values, strength, score, strict=True):
            ax.annotate(str(int(seed)), (x, y), xytext=(3.5, 2), textcoords="offset points", fontsize=6)
        ax.set(xlabel="strength of the mirror (numbers: seeds)", ylabel="exact match, longer texts", ylim=(-0.03, 1.03))
        ax.grid()
    return figure


MIRROR_BY_SEED = Experiment(
    "mirror by seed",
    (R2_STRENGTH,),
    Needs(
        each(can_mirror),
        f"needs the weights of at least {LEAST} seeds of a checkpoint with learned positions trained on text reversal",
        ("reversal/repo",),
    ),
    measure,
    judge,
    draw,
    GPT2,
)
