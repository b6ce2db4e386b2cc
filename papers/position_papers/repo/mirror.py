"""The mirror effect in text reversal (RePo app. C, fig. 6): R2 and R3, from the positions of texts as long as the longest trained on.

    mirror    mean |z_copy - z_word| over mean |z_copy - z_other word|, and over |z_copy - z_same word elsewhere|; correlation of the pairs
    flat      range of the instruction's tokens over that of equally many consecutive words
    reversed  share of the answer's tokens that are likeliest, teacher-forced

A position that depends on the word alone is the same for a copy and its source, but for the same word elsewhere too: the second ratio
tells a mirror from that. Positions are measured on the trained checkpoint and on random-weight controls. A layer's numbers
are means over its heads. Layer 0 is measured and shown, but is no finding: its position depends on the word alone. A model that
reads text is asked to reverse texts as long as those of the paper's models, in its own tokens. R2 is not judged of one that does not
reverse texts: its positions say nothing about how that is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from position_papers.kit.cache import Cache
from position_papers.kit.claims import EVERY_SEED, Claim, Verdict, unmeasured, verdict
from position_papers.kit.experiment import Drawing, Experiment, Needs, each
from position_papers.kit.learned_positions import why_not
from position_papers.kit.rules import All, AtLeast, AtMost, BeyondNull, Custom, Observed
from position_papers.kit.subjects import Subject
from position_papers.repo.checkpoints import GPT2, can_be_asked_to_mirror, reversal_of, reversals
from position_papers.repo.options import Options
from repo_interp.analysis.analyze import analyze
from repo_interp.experiments.prompt_sets import Answers
from repo_interp.experiments.responses import forced_responses
from repo_interp.measures.kernels.mirror import Mirror, mirror
from repo_interp.measures.labels import described
from repo_interp.models.checkpoints import load_model
from repo_interp.models.load import load
from repo_interp.plots.marks.drawing import contiguous, counted, legend_below, token_label
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, scheme_colour, span_colours, style

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
FLATNESS = f"the instruction's range over that of equally many consecutive words, median over {LATER_LAYERS},"
R2 = Claim(
    "R2",
    "mirror effect: a word and its reversed copy get the same position",
    "RePo fig. 6",
    "layers 0, 2, 3 of 4",
    Custom(lambda values: any(map(MIRRORS.holds, values[LATER_LAYERS])), f"in one of the {LATER_LAYERS}: {MIRRORS.words}"),
    also=(EVERY_SEED, "needed"),
)
R3 = Claim(
    "R3", "opening instruction tokens get near-constant positions", R2.source, "layers 1 to 3 of 4", AtMost(FLATNESS, 0.25)
)
LEAST_REVERSED = 0.5
"""Share of the answer's tokens that a model predicts, below which it does not reverse texts."""
BESIDE_TWINS = "this share"
FLATNESS_OF_ALL = f"the instruction's range over that of words and copies, median over {LATER_LAYERS},"
R3_OF_ALL = Claim(
    "R3",
    "opening instruction tokens get positions in a small part of the text's range",
    R2.source,
    "layers 1 to 3 of 4",
    All(AtMost(FLATNESS_OF_ALL, 0.25), BeyondNull(BESIDE_TWINS, 0.95, relation="below")),
    "over all words and copies",
    also=("over all words and copies, every seed", "needed"),
)
_TOGETHER: Any = {"join": "exact", "coords": "minimal", "compat": "override"}


# ---- measured -------------------------------------------------------------------------------------------------------


def flatness(positions: Float[np.ndarray, " token"], instruction: Sequence[int], words: Sequence[int]) -> float:
    """Range over the instruction's tokens over the mean range of windows of equally many consecutive words; NaN for constant words."""
    z = np.asarray(positions, dtype=float)
    width = min(len(instruction), len(words))
    windows = np.lib.stride_tricks.sliding_window_view(z[list(words)], width)
    of_words = float(np.ptp(windows, axis=1).mean())
    return float(np.ptp(z[list(instruction)])) / of_words if of_words > 0 else np.nan


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset:
    """What `_of_texts` measures of one checkpoint; attributes: its name and number of layers, and the lengths of the texts."""
    (subject,) = subjects
    depends = {"prompts": options.prompts, "controls": options.controls, "example": options.example_words}
    data = subject.measured(cache, _of_texts, options, **depends)
    attributes = {"checkpoint": subject.name, "stem": subject.stem, "layers": len(subject.schemes)}
    return data.assign_attrs(**attributes, longest=reversal_of(subject).longest, example_words=options.example_words)


def _of_texts(subject: Subject, options: Options) -> xr.Dataset:
    """`mirror [weights, layer, prompt, kind]`; `flatness`, `instruction_range`, `words_range`, `text_range [weights, layer, prompt]`; from
    the trained weights `reversed [prompt]`, `pair [layer, point, end]` for the scatter, and `example [layer, token]` with `example_part`,
    `example_text` and `example_source`, the token that each copies, or -1.
    """
    prompts = reversals(subject, reversal_of(subject).longest, options.prompts, options.seed)
    by_weights = {}
    for name, bridge in subject.bridges(options):
        run = analyze(bridge, prompts, ("positions",), subject.learned, batch_size=options.batch_size)
        by_weights[name] = _of_positions(run["positions"].to_dataset()["position"], prompts)
    weights = xr.IndexVariable("weights", list(by_weights))
    data = xr.concat([part.drop_vars("pair") for part in by_weights.values()], dim=weights, **_TOGETHER)
    (example,) = reversals(subject, options.example_words, 1, options.seed)
    trained = load(subject.path, options.device)
    shown = analyze(trained, [example], ("positions",), subject.learned)["positions"].to_dataset()["position"]
    parts = ["words" if place in example.spans["words"] else "other" for place in range(len(example.tokens))]
    parts = ["copies" if place in example.generated else part for place, part in enumerate(parts)]
    sources = np.full(len(example.tokens), -1)
    sources[list(example.generated)] = example.attributes["source"]
    answers = forced_responses(load_model(subject.path, options.device), Answers(), prompts, options.batch_size)
    right = [predicted.mean() for predicted in Answers().right(answers, prompts)]
    return data.assign(
        pair=by_weights["trained"]["pair"],
        reversed=described(xr.DataArray(right, dims="prompt"), "share of the answer's tokens that are likeliest", "1"),
        example=described(
            shown.isel(prompt=0, drop=True).mean("head").transpose("layer", "token"), "position, mean over heads", "positions"
        ),
        example_part=described(xr.DataArray(parts, dims="token"), "part of the text", "1"),
        example_text=described(xr.DataArray(list(example.token_text or ()), dims="token"), "word", "1"),
        example_source=described(xr.DataArray(sources, dims="token"), "token that a copy copies, else -1", "1"),
    )


def _of_positions(position: xr.DataArray, prompts: Sequence[Any]) -> xr.Dataset:
    """The statistics of every text, by layer, from `position [prompt, layer, head, token]`."""
    values = position.transpose("layer", "prompt", "head", "token").values.astype(float)
    layers, count, heads, _ = values.shape
    mirrors = np.full((layers, count, heads, len(Mirror._fields)), np.nan)
    spreads = np.full((4, layers, count, heads), np.nan)
    ends = []
    for number, prompt in enumerate(prompts):
        words, source, copies = prompt.spans["words"], prompt.attributes["source"], prompt.generated
        ends.append(values[:, number].mean(axis=1)[:, [list(copies), list(source)]].transpose(0, 2, 1))
        for layer, head in np.ndindex(layers, heads):
            z = values[layer, number, head]
            mirrors[layer, number, head] = mirror(z, prompt.tokens, source, copies)
            flat = flatness(z, prompt.spans["instruction"], words)
            places = (list(prompt.spans["instruction"]), list(words), [*words, *copies])
            spreads[:, layer, number, head] = flat, *(np.ptp(z[part]) for part in places)
    coords = {"layer": position["layer"].values}
    axes = ("layer", "prompt")
    flat, inside, outside, whole = (xr.DataArray(values, coords, axes) for values in spreads.mean(axis=-1))
    return xr.Dataset(
        {
            "mirror": described(
                xr.DataArray(mirrors.mean(axis=2), coords | {"kind": list(Mirror._fields)}, (*axes, "kind")),
                "mean |dz| of copies to their source, to other words, to the same word elsewhere; correlation of copy and source",
                "positions",
            ),
            "flatness": described(flat, "range of the instruction over that of as many words", "1"),
            "instruction_range": described(inside, "range over the instruction", "positions"),
            "words_range": described(outside, "range over the words", "positions"),
            "text_range": described(whole, "range over words and copies", "positions"),
            "pair": described(
                xr.DataArray(np.concatenate(ends, axis=1), coords | {"end": ["copy", "source"]}, ("layer", "point", "end")),
                "positions of a copy and of its source, mean over heads",
                "positions",
            ),
        }
    )


# ---- judged ---------------------------------------------------------------------------------------------------------


def judge(data: xr.Dataset) -> Iterator[Verdict]:
    """R2 from the distances of copies, R3 from the range of the instruction."""
    yield _mirror_effect(data)
    ranges = data[["instruction_range", "words_range"]].sel(weights="trained").mean("prompt")
    remarks = {
        int(layer): f" (instruction {float(ranges['instruction_range'].sel(layer=layer)):.2f}, "
        f"all words {float(ranges['words_range'].sel(layer=layer)):.1f} positions)"
        for layer in data["layer"].values
    }
    yield _near_constant(data, R3, FLATNESS, data["flatness"], "as many consecutive words", remarks)
    yield _near_constant(data, R3_OF_ALL, FLATNESS_OF_ALL, data["instruction_range"] / data["text_range"], "words and copies", {})


def _mirror_effect(data: xr.Dataset) -> Verdict:
    """R2 from the layer, other than 0, whose copies are nearest to their source against other words."""
    if data["mirror"].sel(weights="trained", kind="random").notnull().all("layer").sum("prompt") < 2:
        return unmeasured(R2, data.attrs["checkpoint"], "its tokenizer does not tell the words apart")
    by_text = data["mirror"].sel(layer=data["layer"] > 0)
    means, ratios = by_text.mean("prompt"), _ratios(by_text)
    random = [str(name) for name in data["weights"].values if name != "trained"]
    layer = int(ratios["layer"].values[int(np.nanargmin(ratios.sel(weights="trained").values))])
    of_layer = by_text.sel(weights="trained", layer=layer)
    spread = (of_layer.sel(kind="copies") / of_layer.sel(kind="random")).values
    at = {kind: float(of_layer.sel(kind=kind).mean()) for kind in QUANTITIES}

    def by_layer(weights: str) -> dict[int, dict[str, float]]:
        """What the rule asks for of every layer."""
        return {
            int(layer): {name: float(means.sel(weights=weights, layer=layer, kind=kind)) for kind, name in QUANTITIES.items()}
            for layer in means["layer"].values
        }

    mirroring = [layer for layer, values in by_layer("trained").items() if MIRRORS.holds(values)]
    by_chance = sum(MIRRORS.holds(values) for name in random for values in by_layer(name).values())
    return verdict(
        R2,
        data.attrs["checkpoint"],
        "|dz| of copies over |dz| to other words, in the layer other than 0 where that is least",
        {LATER_LAYERS: list(by_layer("trained").values())},
        float(ratios.sel(weights="trained", layer=layer)),
        float(np.std(spread[np.isfinite(spread)], ddof=1)),
        "texts",
        data.sizes["prompt"],
        "random weights: " + ", ".join(f"{float(ratios.sel(weights=name, layer=layer)):.3g}" for name in random),
        f"layers that mirror: {', '.join(map(str, mirroring)) or 'none'} of 0 to {data.attrs['layers'] - 1} (random weights: "
        f"{by_chance}); layer {layer}: copies {at['copies']:.2f}, other words {at['random']:.2f}, the same word elsewhere "
        f"{at['elsewhere']:.2f} positions, correlation {at['correlation']:.2f}; one training seed",
        unmeasurable=_lost(data),
    )


def _ratios(by_text: xr.DataArray) -> xr.DataArray:
    """How far copies are from their source over how far from other words, by weights and layer, from `mirror`: means over texts."""
    means = by_text.mean("prompt")
    return means.sel(kind="copies") / means.sel(kind="random")


def _lost(data: xr.Dataset) -> str:
    """Why the positions of a model say nothing on mirrors: it does not reverse words; empty where it does."""
    share = float(data["reversed"].mean())
    few = f"it predicts {share:.3f} of the answer's tokens when it is to reverse {data.attrs['longest']} words"
    return f"{few} (wanted at least {LEAST_REVERSED:g})" if share < LEAST_REVERSED else ""


def _near_constant(
    data: xr.Dataset, claim: Claim, quantity: str, ratios: xr.DataArray, others: str, remarks: Mapping[int, str]
) -> Verdict:
    """R3 from `ratios [weights, layer, prompt]` of the instruction's range over that of `others`; `remarks` by layer go on the note."""
    ratios = ratios.sel(layer=data["layer"] > 0)
    median = ratios.mean("prompt").median("layer")
    trained = ratios.sel(weights="trained")
    by_layer = trained.mean("prompt")
    return verdict(
        claim,
        data.attrs["checkpoint"],
        f"range of the instruction's positions over that of {others}, median over {LATER_LAYERS}",
        {
            quantity: float(median.sel(weights="trained")),
            BESIDE_TWINS: Observed(float(median.sel(weights="trained")), median.values[data["weights"].values != "trained"]),
        },
        float(median.sel(weights="trained")),
        float(trained.median("layer").std("prompt", ddof=1)),
        "texts",
        data.sizes["prompt"],
        "random weights: " + ", ".join(f"{float(median.sel(weights=name)):.3g}" for name in data["weights"].values[1:]),
        _by_layer(by_layer, remarks),
    )


def _by_layer(by_layer: xr.DataArray, remarks: Mapping[int, str]) -> str:
    """The number of every layer with its remark; of many layers the smallest and the largest."""
    numbers = by_layer.sortby(by_layer)[[0, -1]] if by_layer.sizes["layer"] > SHOWN_LAYERS else by_layer
    told = "; ".join(
        f"layer {layer}: {float(numbers.sel(layer=layer)):.2f}{remarks.get(layer, '')}" for layer in numbers["layer"].values
    )
    return told if len(numbers) == len(by_layer) else f"least and most of {len(by_layer)} layers: {told}"


# ---- drawn ----------------------------------------------------------------------------------------------------------

SHOWN = 600
"""Points of a scatter."""
SHOWN_LAYERS = 4
"""Panels that a page has room for."""
_LINK = "#9A9A9A"
_PARTS = ("words", "generated")


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Fig. 6."""
    name = data.attrs["checkpoint"]
    yield Drawing(
        f"mirror_{data.attrs['stem']}",
        _figure(data, name),
        f"{name}: positions of a text of {data.attrs['example_words']} words by layer (above; RePo fig. 6; green words, pink copies), and "
        f"of every copy against its source (below) on {data.sizes['prompt']} texts of {data.attrs['longest']} words, with means of |dz|."
        + _which_layers(data),
        data,
    )


def _layers_shown(data: xr.Dataset) -> list[int]:
    """All layers, or of many those whose copies are nearest to their source against other words, ascending."""
    ratios = _ratios(data["mirror"]).sel(weights="trained")
    nearest = ratios.sortby(ratios)["layer"].values[:SHOWN_LAYERS]
    return sorted(int(layer) for layer in nearest)


def _which_layers(data: xr.Dataset) -> str:
    """Of which layers `_figure` has a column, where it has not one of each."""
    if data.sizes["layer"] <= SHOWN_LAYERS:
        return ""
    return (
        f" Of {data.sizes['layer']} layers with learned positions, the {SHOWN_LAYERS} whose copies are nearest to their source."
    )


def _figure(data: xr.Dataset, name: str) -> PaperFigure:
    """One column per layer: z_i against i of one text above, z_copy against z_source of many below; means of `mirror` in the titles."""
    layers = _layers_shown(data)
    means = data["mirror"].sel(weights="trained").mean("prompt")
    colours = span_colours(_PARTS)
    with style():
        figure = paper_figure(PAGE_WIDTH, 3.7)
        axes = figure.subplots(2, len(layers), squeeze=False, height_ratios=(1.15, 1))
        for column, layer in enumerate(layers):
            of_layer = data.sel(layer=layer)
            _example(axes[0, column], of_layer)
            axes[0, column].set_title(f"Layer {layer}")
            _scatter(axes[1, column], of_layer["pair"])
            copies, random, elsewhere = (float(means.sel(layer=layer, kind=kind)) for kind in ("copies", "random", "elsewhere"))
            axes[1, column].set_title(
                f"|Δz| {copies:.2g}; to others {random:.2g}\nsame word elsewhere {elsewhere:.2g}", fontsize=6
            )
        for ax in axes[1]:
            ax.set_xlabel("z of the word (positions)")
        axes[0, 0].set_ylabel("position z (positions)")
        axes[1, 0].set_ylabel("z of the copy (positions)")
        figure.suptitle(f"{name}: one text above, {counted(data.sizes['prompt'], 'text')} below", x=0.01, ha="left")
        legend_below(
            figure,
            [
                Patch(facecolor=colours["words"], alpha=0.3, label="words"),
                Patch(facecolor=colours["generated"], alpha=0.3, label="copies, reversed"),
                Line2D([], [], color=_LINK, linewidth=0.5, label="joins a word and its copy"),
                Line2D([], [], color="#222222", linewidth=0.6, linestyle="--", label="same position"),
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
        ax.plot([source[copy], copy], values[[source[copy], copy]], color=_LINK, linewidth=0.4, zorder=1, gid="link")
    ax.plot(range(len(values)), values, "o", markersize=2.2, markeredgewidth=0, color=scheme_colour("repo"), gid="positions")
    ax.set_xticks(range(len(values)), [token_label(str(text)) for text in of_layer["example_text"].values], rotation=90)
    ax.tick_params(axis="x", labelsize=3.6, length=1)
    ax.grid(axis="y")


def _scatter(ax: Axes, pair: xr.DataArray) -> None:
    copy, source = (pair.sel(end=end).values for end in ("copy", "source"))
    step = max(1, len(copy) // SHOWN)
    low, high = float(min(copy.min(), source.min())), float(max(copy.max(), source.max()))
    room = 0.05 * (high - low) or 1.0
    ax.plot([low - room, high + room], [low - room, high + room], "--", color="#222222", linewidth=0.6)
    look: Any = {"markersize": 1.3, "markeredgewidth": 0, "alpha": 0.5, "color": scheme_colour("repo")}
    ax.plot(source[::step], copy[::step], "o", gid="pairs", **look)
    ax.set(xlim=(low - room, high + room), ylim=(low - room, high + room))
    ax.grid()


MIRROR = Experiment(
    "mirror effect",
    (R2, R3, R3_OF_ALL),
    Needs(
        each(can_be_asked_to_mirror),
        "no checkpoint trained on text reversal, or that reads text, with learned positions in a layer other than 0 was given",
        ("reversal/repo",),
        why_not=why_not,
    ),
    measure,
    judge,
    draw,
    GPT2,
)
