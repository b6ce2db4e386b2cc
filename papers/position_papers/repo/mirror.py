"""The mirror effect in text reversal (RePo app.

C, fig. 6): R2 and R3, from the positions of texts as long as the longest trained on.

    mirror    mean |z_copy - z_word| over mean |z_copy - z_other word|, and over |z_copy - z_same word elsewhere|; correlation of the pairs
    flat      range of the instruction's tokens over that of equally many consecutive words
    reversed  share of the answer's tokens that are likeliest, teacher-forced

    strength    |z_copy - z_other word| over |z_copy - z_word|, in the layer other than 0 where it is largest: whether seeds that mirror
                more reverse longer texts better, by Spearman's correlation beside every order of
                the seeds, or 20,000 of them

A position that depends on the word alone is the same for a copy and its source, but for the same
word elsewhere too: the second ratio tells a mirror from that. A layer's numbers are means over its
heads. Layer 0 is shown, but is no finding: its position depends on the word alone. A model that
reads text is asked to reverse texts as long as those of the paper's models, in its own tokens. R2
and R3 are not judged of one that does not reverse texts: its positions say nothing about how that is
done. "Near-constant" has two readings, told side by side: beside as many consecutive words, and
beside the whole text, on which scale the paper draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy import stats

from position_papers.kit import (
    All,
    AtLeast,
    AtMost,
    BeyondNull,
    Cache,
    Claim,
    Custom,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Observed,
    Subject,
    beside_null,
    each,
    evidence,
    joined,
    over_seeds,
    records_of,
    unmeasured,
    why_not,
)
from position_papers.repo.checkpoints import GPT2, can_be_asked_to_mirror, reversal_of, reversals
from position_papers.repo.options import Options
from position_papers.training.trained import recorded_scores
from repo_interp.analysis.analyze import analyze
from repo_interp.experiments.prompt_sets import Answers
from repo_interp.experiments.responses import forced_responses
from repo_interp.measures.kernels.mirror import Mirror, mirror
from repo_interp.measures.labels import with_attrs
from repo_interp.models.checkpoints import load_model
from repo_interp.models.load import load
from repo_interp.plots.marks.drawing import contiguous, legend_below
from repo_interp.plots.marks.token_axis import token_label
from repo_interp.plots.style import (
    PAGE_WIDTH,
    PaperFigure,
    paper_figure,
    scheme_colour,
    span_colours,
    style,
)

LATER_LAYERS = "layers other than 0"
QUANTITIES = {
    "copies": "|dz| of copies to their source",
    "random": "that to other words",
    "elsewhere": "that to the same word elsewhere",
    "correlation": "the correlation of the two positions",
}
"""What is measured of a layer, and how rules call it."""
MIRRORS = All(
    AtMost(QUANTITIES["copies"], 0.25, of=QUANTITIES["random"]),
    AtMost(QUANTITIES["copies"], 0.5, of=QUANTITIES["elsewhere"]),
    AtLeast(QUANTITIES["correlation"], 0.9),
)
FLATNESS = (
    "the instruction's range over that of equally many consecutive words, median "
    f"over {LATER_LAYERS},"
)
R2 = Claim(
    "R2",
    "mirror effect: a word and its reversed copy get the same position",
    "RePo fig. 6",
    "layers 0, 2, 3 of 4",
    Custom(
        lambda values: any(map(MIRRORS.holds, values[LATER_LAYERS])),
        f"in one of the {LATER_LAYERS}: {MIRRORS.words}",
    ),
    also=("needed",),
)
R3 = Claim(
    "R3",
    "opening instruction tokens get near-constant positions",
    R2.source,
    "layers 1 to 3 of 4",
    AtMost(FLATNESS, 0.25),
    apart=("over all words and copies",),
)
LEAST_REVERSED = 0.5
"""Share of the answer's tokens that a model predicts, below which it does not reverse texts."""
BESIDE_TWINS = "this share"
FLATNESS_OF_ALL = (
    f"the instruction's range over that of words and copies, median over {LATER_LAYERS},"
)
R3_OF_ALL = Claim(
    "R3",
    "opening instruction tokens get positions in a small part of the text's range",
    R2.source,
    "layers 1 to 3 of 4",
    All(AtMost(FLATNESS_OF_ALL, 0.25), BeyondNull(BESIDE_TWINS, 0.95, relation="below")),
    "over all words and copies",
    also=("needed",),
)
FEWEST, ORDERS = 5, 20_000
"""Seeds: of four, the rarest order is not rarer than 4 %. Orders of the null."""
STRENGTH = (
    "the rank correlation, over seeds, of the mirror's strength with the exact match "
    "of longer texts"
)
R2_STRENGTH = Claim(
    "R2",
    "the stronger the mirror that a training seed found, the better it reverses longer texts",
    R2.source,
    "none",
    BeyondNull(STRENGTH, 0.95, "orders of the seeds"),
    "strength by seed",
)


# ---- measured ------------------------------------------------------------------------------------


def flatness(
    positions: Float[np.ndarray, " token"], instruction: Sequence[int], words: Sequence[int]
) -> float:
    """Range over the instruction's tokens over the mean range of windows of equally many
    consecutive words; NaN for constant words.
    """
    z = np.asarray(positions, dtype=float)
    width = min(len(instruction), len(words))
    windows = np.lib.stride_tricks.sliding_window_view(z[list(words)], width)
    of_words = float(np.ptp(windows, axis=1).mean())
    return float(np.ptp(z[list(instruction)])) / of_words if of_words > 0 else np.nan


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset:
    """What `_of_texts` measures of one checkpoint; attributes: its name and number of layers, and
    the lengths of the texts.
    """
    (subject,) = subjects
    data = subject.measured(
        cache,
        _of_texts,
        options,
        prompts=options.prompts,
        controls=options.controls,
        example=options.example_words,
    )
    task = reversal_of(subject)
    beyond = [str(length) for length in range(task.longest + 1, task.longest_test + 1)]
    seed = None if subject.configuration is None else subject.configuration.seed
    known = (
        run.means
        for run in recorded_scores(records_of(subject))
        if run.seed == seed and set(beyond) <= set(run.means)
    )
    longer = next((float(np.mean([means[length] for length in beyond])) for means in known), np.nan)
    return data.assign(
        longer=with_attrs(
            xr.DataArray(longer), f"exact match, {beyond[0]} to {beyond[-1]} words", "1"
        )
    ).assign_attrs(
        checkpoint=subject.name,
        stem=subject.stem,
        layers=len(subject.schemes),
        longest=task.longest,
        example_words=options.example_words,
    )


def _of_texts(subject: Subject, options: Options) -> xr.Dataset:
    """`mirror [weights, layer, prompt, kind]`; `flatness`, `instruction_range`, `text_range
    [weights, layer, prompt]`; from the trained weights `reversed [prompt]`, and `example [layer,
    token]` with `example_part`, `example_text` and `example_source`, the token that each copies, or
    -1.
    """
    prompts = reversals(subject, reversal_of(subject).longest, options.prompts, options.seed)
    by_weights = {}
    for name, bridge in subject.bridges(options):
        run = analyze(
            bridge, prompts, ("positions",), subject.learned, batch_size=options.batch_size
        )
        by_weights[name] = _of_positions(run["positions"].to_dataset()["position"], prompts)
    data = joined(by_weights, "weights")
    (example,) = reversals(subject, options.example_words, 1, options.seed)
    trained = load(subject.path, options.device)
    shown = analyze(trained, [example], ("positions",), subject.learned)["positions"].to_dataset()[
        "position"
    ]
    places = np.arange(len(example.tokens))
    parts = np.where(
        np.isin(places, example.spans["words"]),
        "words",
        np.where(np.isin(places, example.generated), "copies", "other"),
    )
    sources = np.full(len(places), -1)
    sources[list(example.generated)] = example.attributes["source"]
    answers = forced_responses(
        load_model(subject.path, options.device), Answers(), prompts, options.batch_size
    )
    right = [predicted.mean() for predicted in Answers().right(answers, prompts)]
    of_example = {
        "part": (parts, "part of the text"),
        "text": (list(example.token_text or ()), "word"),
        "source": (sources, "token that a copy copies, else -1"),
    }
    return data.assign(
        reversed=with_attrs(
            xr.DataArray(right, dims="prompt"),
            "share of the answer's tokens that are likeliest",
            "1",
        ),
        example=with_attrs(
            shown.isel(prompt=0, drop=True).mean("head").transpose("layer", "token"),
            "position, mean over heads",
            "positions",
        ),
        **{
            f"example_{name}": with_attrs(xr.DataArray(of, dims="token"), what, "1")
            for name, (of, what) in of_example.items()
        },
    )


def _of_positions(position: xr.DataArray, prompts: Sequence[Any]) -> xr.Dataset:
    """The statistics of every text, by layer and mean over heads, from `position [prompt, layer,
    head, token]`.
    """
    values = position.transpose("layer", "prompt", "head", "token").values.astype(float)
    mirrors = np.full((*values.shape[:3], len(Mirror._fields)), np.nan)
    spreads = np.full((*values.shape[:3], 3), np.nan)
    for layer, number, head in np.ndindex(values.shape[:3]):
        prompt, z = prompts[number], values[layer, number, head]
        words = prompt.spans["words"]
        instruction = list(prompt.spans["instruction"])
        copies = prompt.generated
        mirrors[layer, number, head] = mirror(z, prompt.tokens, prompt.attributes["source"], copies)
        spreads[layer, number, head] = (
            flatness(z, instruction, words),
            np.ptp(z[instruction]),
            np.ptp(z[[*words, *copies]]),
        )
    axes = ("layer", "prompt")
    long_names = {
        "flatness": ("range of the instruction over that of as many words", "1"),
        "instruction_range": ("range over the instruction", "positions"),
        "text_range": ("range over words and copies", "positions"),
    }
    found: dict[str, Any] = {
        name: (axes, spreads[..., place].mean(axis=2), {"long_name": long_name, "units": unit})
        for place, (name, (long_name, unit)) in enumerate(long_names.items())
    }
    what = (
        "mean |dz| of copies to their source, to other words, to the same word "
        "elsewhere; correlation of copy and source"
    )
    found["mirror"] = (
        (*axes, "kind"),
        mirrors.mean(axis=2),
        {"long_name": what, "units": "positions"},
    )
    return xr.Dataset(found, {"layer": position["layer"].values, "kind": list(Mirror._fields)})


# ---- tabulated --------------------------------------------------------------------------------------


def tabulate(data: xr.Dataset) -> Iterator[Evidence]:
    """R2 from the distances of copies, R3 from the range of the instruction."""
    yield _mirror_effect(data)
    yield _near_constant(data, R3, FLATNESS, data["flatness"], "as many consecutive words")
    yield _near_constant(
        data,
        R3_OF_ALL,
        FLATNESS_OF_ALL,
        data["instruction_range"] / data["text_range"],
        "words and copies",
    )


def _mirror_effect(data: xr.Dataset) -> Evidence:
    """R2 from the layer, other than 0, whose copies are nearest to their source against other
    words.
    """
    by_text = data["mirror"].sel(layer=data["layer"] > 0)
    if by_text.sel(weights="trained", kind="random").notnull().all("layer").sum("prompt") < 2:
        return unmeasured(
            R2, data.attrs["checkpoint"], "its tokenizer does not tell the words apart"
        )
    means = by_text.mean("prompt")
    ratios = nearness(means)
    layer = int(ratios["layer"].values[int(np.nanargmin(ratios.sel(weights="trained").values))])
    spread = nearness(by_text.sel(weights="trained", layer=layer)).values
    by_layer = {
        str(of_weights["weights"].item()): {
            int(each["layer"]): dict(zip(QUANTITIES.values(), each.values.tolist(), strict=True))
            for each in of_weights
        }
        for of_weights in means.sel(kind=list(QUANTITIES)).transpose("weights", "layer", "kind")
    }
    mirroring = {
        name: [layer for layer, values in of.items() if MIRRORS.holds(values)]
        for name, of in by_layer.items()
    }
    by_chance = sum(len(layers) for name, layers in mirroring.items() if name != "trained")
    return evidence(
        R2,
        data.attrs["checkpoint"],
        "|dz| of copies over |dz| to other words, in the layer other than 0 where that is least",
        {LATER_LAYERS: list(by_layer["trained"].values())},
        ratios.sel(weights="trained", layer=layer),
        np.std(spread[np.isfinite(spread)], ddof=1),
        "texts",
        data.sizes["prompt"],
        "random weights: "
        + ", ".join(f"{float(each):.3g}" for each in ratios.sel(layer=layer).values[1:]),
        f"layers that mirror: {', '.join(map(str, mirroring['trained'])) or 'none'} of 0 to "
        f"{data.attrs['layers'] - 1} (random weights: {by_chance}); layer {layer}: "
        + ", ".join(f"{name} {value:.2f}" for name, value in by_layer["trained"][layer].items()),
        unmeasurable=_lost(data),
    )


def nearness(mirrors: xr.DataArray) -> xr.DataArray:
    """How far copies are from their source over how far from other words, from `mirror` of every
    text, or its mean over texts.
    """
    return mirrors.sel(kind="copies", drop=True) / mirrors.sel(kind="random", drop=True)


def strengths(data: xr.Dataset) -> xr.DataArray:
    """How many times nearer copies are to their source than to other words, in every layer other
    than 0 of the trained weights.
    """
    means = data["mirror"].sel(weights="trained", layer=data["layer"] > 0, drop=True).mean("prompt")
    return with_attrs(1 / nearness(means), "strength of the mirror", "1")


def _lost(data: xr.Dataset) -> str:
    """Why the positions of a model say nothing on mirrors: it does not reverse words; empty where
    it does.
    """
    share = float(data["reversed"].mean())
    few = (
        f"it predicts {share:.3f} of the answer's tokens when it is to reverse "
        f"{data.attrs['longest']} words"
    )
    return f"{few} (wanted at least {LEAST_REVERSED:g})" if share < LEAST_REVERSED else ""


def _near_constant(
    data: xr.Dataset, claim: Claim, quantity: str, ratios: xr.DataArray, others: str
) -> Evidence:
    """R3 from `ratios [weights, layer, prompt]` of the instruction's range over that of
    `others`.
    """
    ratios = ratios.sel(layer=data["layer"] > 0)
    own, *random = ratios.mean("prompt").median("layer").values
    by_layer = ratios.sel(weights="trained").mean("prompt")
    few = by_layer if len(by_layer) <= SHOWN_LAYERS else by_layer.sortby(by_layer)[[0, -1]]
    note = "; ".join(
        f"layer {layer}: {float(few.sel(layer=layer)):.2f}" for layer in few["layer"].values
    )
    return evidence(
        claim,
        data.attrs["checkpoint"],
        f"range of the instruction's positions over that of {others}, median over {LATER_LAYERS}",
        {quantity: float(own), BESIDE_TWINS: Observed(float(own), random)},
        own,
        ratios.sel(weights="trained").median("layer").std("prompt", ddof=1),
        "texts",
        data.sizes["prompt"],
        "random weights: " + ", ".join(f"{each:.3g}" for each in random),
        note if len(few) == len(by_layer) else f"least and most of {len(by_layer)} layers: {note}",
        unmeasurable=_lost(data),
    )


def across(by_seed: Mapping[int, xr.Dataset]) -> Iterator[Evidence]:
    """R2 (strength by seed), where enough seeds have recorded scores of longer texts."""
    known = {seed: data for seed, data in by_seed.items() if np.isfinite(data["longer"])}
    if len(known) < FEWEST:
        return
    strength = np.array([float(strengths(data).max()) for data in known.values()])
    score = np.array([float(data["longer"]) for data in known.values()])
    ranks = stats.rankdata(score)
    tested = stats.permutation_test(
        (stats.rankdata(strength),),
        lambda each: np.corrcoef(each, ranks)[0, 1],
        permutation_type="pairings",
        n_resamples=ORDERS,
        rng=np.random.default_rng(0),
    )
    observed = Observed(float(tested.statistic), tested.null_distribution)
    yield evidence(
        R2_STRENGTH,
        next(iter(known.values())).attrs["checkpoint"],
        "rank correlation over seeds of the mirror's strength with the mean exact match of "
        "longer texts than trained on",
        {STRENGTH: observed},
        observed.value,
        n=len(known),
        seeds=len(known),
        control=beside_null(observed, ".2f"),
        note="; ".join(
            f"seed {seed}: strength {own:.1f}, exact match {share:.2f}"
            for seed, own, share in zip(known, strength, score, strict=True)
        ),
    )


def units(data: xr.Dataset) -> xr.Dataset:
    """By text; `near`, `same_word` and `along` [layer], what the rule of R2 asks for, of the
    trained weights; `share` and `flat` [layer, prompt], of these by text, are small enough to be
    kept for a single seed.
    """
    own = data[["mirror", "flatness", "instruction_range", "text_range", "reversed", "longer"]]
    by_text = data["mirror"].sel(weights="trained", drop=True)
    copies, others, same, along = (
        by_text.mean("prompt").sel(kind=kind, drop=True) for kind in QUANTITIES
    )
    found = {
        "near": copies / others,
        "same_word": copies / same,
        "along": along,
        "share": nearness(by_text),
    }
    return own.assign(found | {"flat": data["flatness"].sel(weights="trained", drop=True)})


# ---- drawn ---------------------------------------------------------------------------------------

SHOWN_LAYERS = 4
"""Panels that a page has room for."""
_LINK = "#9A9A9A"
_PARTS = ("words", "generated")


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Fig. 6: all layers, or of many those whose copies are nearest to their source against other
    words.
    """
    ratios = nearness(data["mirror"].sel(weights="trained").mean("prompt"))
    layers = sorted(int(layer) for layer in ratios.sortby(ratios)["layer"].values[:SHOWN_LAYERS])
    many = (
        f" Of {len(ratios)} layers with learned positions, the {SHOWN_LAYERS} whose "
        "copies are nearest to their source."
    )
    yield Drawing(
        f"mirror_{data.attrs['stem']}",
        partial(
            mirrored_texts,
            data[["mirror", *(name for name in data if str(name).startswith("example"))]],
            layers,
        ),
        f"{data.attrs['checkpoint']}: positions of a text of {data.attrs['example_words']} words "
        "by layer (RePo fig. 6; green words, pink copies); in the titles means of |dz| of copies "
        f"to their source and to other words, over {data.sizes['prompt']} texts of "
        f"{data.attrs['longest']} words." + (many if len(ratios) > SHOWN_LAYERS else ""),
        data,
    )


def mirrored_texts(data: xr.Dataset, layers: Sequence[int]) -> PaperFigure:
    """One panel per layer: z_i against i of one text, with means of `mirror` over many in the
    titles.
    """
    means = data["mirror"].sel(weights="trained").mean("prompt")
    colours = span_colours(_PARTS)
    with style():
        figure = paper_figure(PAGE_WIDTH, 2.3)
        axes = figure.subplots(1, len(layers), squeeze=False)[0]
        for ax, layer in zip(axes, layers, strict=True):
            _example(ax, data.sel(layer=layer))
            copies, others = (
                float(means.sel(layer=layer, kind=kind)) for kind in ("copies", "random")
            )
            ax.set_title(f"Layer {layer}: |Δz| {copies:.2g}; others {others:.2g}", fontsize=6)
        axes[0].set_ylabel("position z (positions)")
        legend_below(
            figure,
            [
                Patch(facecolor=colours["words"], alpha=0.3, label="words"),
                Patch(facecolor=colours["generated"], alpha=0.3, label="copies, reversed"),
                Line2D([], [], color=_LINK, linewidth=0.5, label="joins a word and its copy"),
            ],
        )
    return figure


def _example(ax: Axes, of_layer: xr.Dataset) -> None:
    values = of_layer["example"].values
    part = of_layer["example_part"].values.astype(str)
    colours = span_colours(_PARTS)
    words, copies = np.flatnonzero(part == "words"), np.flatnonzero(part == "copies")
    for places, colour in ((words, colours["words"]), (copies, colours["generated"])):
        for first, last in contiguous(places.tolist()):
            ax.axvspan(first - 0.5, last + 0.5, facecolor=colour, alpha=0.3, linewidth=0, zorder=0)
    source = of_layer["example_source"].values
    for copy in copies:
        ax.plot(
            [source[copy], copy],
            values[[source[copy], copy]],
            color=_LINK,
            linewidth=0.4,
            zorder=1,
            gid="link",
        )
    ax.plot(
        range(len(values)),
        values,
        "o",
        markersize=2.2,
        markeredgewidth=0,
        color=scheme_colour("repo"),
        gid="positions",
    )
    ax.set_xticks(
        range(len(values)),
        [token_label(str(text)) for text in of_layer["example_text"].values],
        rotation=90,
    )
    ax.tick_params(axis="x", labelsize=3.6, length=1)
    ax.grid(axis="y")


MIRROR = over_seeds(
    Experiment(
        "mirror effect",
        (R2, R3, R3_OF_ALL, R2_STRENGTH),
        Needs(
            each(can_be_asked_to_mirror),
            "no checkpoint trained on text reversal, or that reads text, with learned "
            "positions in a layer other than 0 was given",
            ("reversal/repo",),
            otherwise_of={
                R2_STRENGTH.label: f"needs {FEWEST} seeds of text reversal with weights, and "
                "scores of longer texts"
            },
            why_not=why_not,
        ),
        measure,
        tabulate,
        draw,
        GPT2,
    ),
    units,
    across,
)
