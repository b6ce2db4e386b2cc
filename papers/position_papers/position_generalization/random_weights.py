"""Where the three axes fit random weights near 0 (ours, to Position Generalization sec. 3.2): P3 by
layer, length and text.

    r of the three-axis fit with random weights      by layer, tokens n of a sequence, and how its tokens are drawn
    uniform    t_i uniform over the vocabulary        Zipf    P(t_i = the k-th id) ~ 1 / k, as words of text are
    sqrt(6 / n)    about the r of independent logits: 3 n axes for n^2 / 2 pairs

In the first layer a key is a function of its token alone. Where every token is as rare as another,
queries point nowhere on average and no axis has anything to fit beyond chance; where few tokens make
up most of a text, the mean query points to them, and the key axis fits that. In later layers hidden
states share what earlier ones added to all. So the paper's number can be had nowhere but in a first
layer on tokens that no text has, and lies below chance at its 4,096 tokens even there. The rule was
written after numbers had been seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import xarray as xr

from position_papers.kit import (
    All,
    AtLeast,
    AtMost,
    Cache,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Subject,
    evidence,
)
from position_papers.position_generalization.fits import by_chance
from position_papers.position_generalization.measured import MODEL, SOURCE, Options
from repo_interp.analysis.analyze import analyze
from repo_interp.measures.labels import with_attrs
from repo_interp.models.decoder import as_decoder
from repo_interp.models.fresh_weights import load_fresh
from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, style
from repo_interp.plugins.three_axis.three_axis import ThreeAxis
from repo_interp.tasks import Prompt

LENGTHS = (256, 1024, 4096)
DRAWS = 2
"""Draws of weights, each with a sequence of its own."""
TEXTS = ("uniform", "Zipf")
UNIFORM = "r in the first layer on uniform tokens over sqrt(6 / n), the largest of all lengths,"
ELSEWHERE = (
    "r in later layers and on tokens by Zipf's law over sqrt(6 / n), the least of all lengths,"
)
APART = 1.1
P3_BY_LENGTH = Claim(
    "P3",
    "random weights are fitted no better than by chance in the first layer on tokens that are all as "
    "rare, and nowhere else",
    f"{SOURCE} sec. 3.2",
    "none",
    All(AtMost(UNIFORM, APART), AtLeast(ELSEWHERE, APART)),
    part="by layer, length and text",
)


def random_text(vocabulary: int, length: int, text: str, seed: Sequence[int]) -> Prompt:
    """A sequence of random token ids from 1, since 0 may pad, to `vocabulary`, drawn as `text` says."""
    ids = np.arange(1, vocabulary)
    weights = np.ones(len(ids)) if text == "uniform" else 1 / ids
    chosen = np.random.default_rng(list(seed)).choice(ids, length, p=weights / weights.sum())
    return Prompt(tokens=tuple(chosen.tolist()))


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset:
    """`r [text, length, draw, layer]` of one decoder with random weights, mean over heads."""
    (subject,) = subjects
    lengths = str(LENGTHS)
    data = subject.measured(cache, measure_random, options, lengths=lengths, draws=DRAWS)
    return data.assign_attrs(checkpoint=subject.name, stem=subject.stem)


def measure_random(subject: Subject, options: Options) -> xr.Dataset:
    """What `measure` gives, without names."""
    r = np.full((len(TEXTS), len(LENGTHS), DRAWS, len(subject.schemes)), np.nan)
    for draw in range(DRAWS):
        bridge = load_fresh(subject.path, draw, options.device)
        vocabulary = as_decoder(bridge).vocabulary_size
        for row, text in enumerate(TEXTS):
            for column, length in enumerate(LENGTHS):
                prompt = random_text(vocabulary, length, text, [options.seed, draw, length])
                run = analyze(bridge, [prompt], [ThreeAxis()])
                values = run["three_axis"].to_dataset()["r"].mean(("prompt", "head"))
                r[row, column, draw] = values.values
    coords = {
        "text": list(TEXTS),
        "length": list(LENGTHS),
        "draw": np.arange(DRAWS),
        "layer": np.arange(len(subject.schemes)),
    }
    array = xr.DataArray(r, coords, tuple(coords))
    return with_attrs(
        array, "r of the three-axis fit with random weights, mean over heads", "1"
    ).to_dataset(name="r")


def tabulate(data: xr.Dataset) -> Iterator[Evidence]:
    """P3 by layer, length and text: means over draws beside what the fit has by chance."""
    means = data["r"].mean("draw").transpose("text", "layer", "length")
    lengths = data["length"].values.tolist()
    above = means / xr.DataArray([by_chance(n) for n in lengths], {"length": lengths}, ("length",))
    first = above.isel(layer=0)
    elsewhere = min(above.isel(layer=slice(1, None)).min(), first.sel(text="Zipf").min())
    told = [
        f"{text} tokens, r at {', '.join(f'{n:,}' for n in lengths)} a sequence: "
        + "; ".join(
            f"layer {int(own['layer'])} {', '.join(f'{r:.3f}' for r in own.values.tolist())}"
            for own in means.sel(text=text)
        )
        for text in TEXTS
    ]
    longest = data["r"].sel(text="uniform", length=lengths[-1]).isel(layer=0).values
    yield evidence(
        P3_BY_LENGTH,
        data.attrs["checkpoint"],
        f"r of the first layer on {lengths[-1]:,} uniform tokens, random weights",
        {UNIFORM: float(first.sel(text="uniform").max()), ELSEWHERE: float(elsewhere)},
        longest.mean(),
        longest.std(ddof=1),
        "draws of weights",
        DRAWS,
        f"by chance {by_chance(lengths[-1]):.3f}",
        told,
    )


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """r by length, a line per layer, beside its chance level."""
    means = data["r"].mean("draw", keep_attrs=True).to_dataset()
    yield Drawing(
        f"random_weights_{data.attrs['stem']}",
        partial(r_by_length, means),
        f"{data.attrs['checkpoint']} with random weights: correlation of the logits and the "
        f"three-axis fit (sec. 3.1) by layer and length, mean over heads and {DRAWS} draws of weights "
        "with a sequence each. Dashed: what the fit has by chance, sqrt(6 / n). The paper's number "
        "is 0.028.",
        data,
    )


def r_by_length(means: xr.Dataset) -> PaperFigure:
    """Draw `r [text, length, layer]`, a panel per text and a line per layer."""
    lengths = means["length"].values
    with style():
        figure = paper_figure(PAGE_WIDTH, 2.3)
        axes, lines = figure.subplots(1, means.sizes["text"], sharey=True), []
        for ax, text in zip(axes, means["text"].values, strict=True):
            shown = means["r"].sel(text=text).transpose("layer", "length")
            lines = [
                ax.plot(
                    lengths, own.values, "o-", markersize=3, label=f"layer {int(own['layer'])}"
                )[0]
                for own in shown
            ]
            lines += ax.plot(
                lengths,
                np.sqrt(6 / lengths),
                color="#222222",
                linestyle="--",
                linewidth=0.8,
                label="by chance",
            )
            ax.set(xscale="log", xlabel="tokens of a sequence", title=f"{text} tokens")
            ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
            ax.minorticks_off()
            ax.grid(axis="y")
        axes[0].set(ylabel="r of the three-axis fit", ylim=(0, 1))
        legend_below(figure, lines)
    return figure


def first_that_rotates(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """The first decoder with RoPE alone that was trained on text of ours: others of its size have
    the same random weights.
    """
    fitting = [
        [subject]
        for subject in subjects
        if subject.has_weights and subject.kind == "language" and set(subject.schemes) == {"rope"}
    ]
    return fitting[:1]


RANDOM_WEIGHTS = Experiment(
    "random weights",
    (P3_BY_LENGTH,),
    Needs(
        first_that_rotates,
        "needs a small language model with RoPE in every layer, such as language/rope: of a large "
        "one a fit of 4,096 tokens takes minutes per draw",
        ("language/rope",),
    ),
    measure,
    tabulate,
    draw,
    MODEL,
)
