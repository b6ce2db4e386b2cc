"""What CoPE's gates count in a language model, and where position alone sends attention (CoPE sec.
5.4, fig. 4 and 6): C6.

The paper's figures are of gates with keys of their own ("sep-keys").

Held-out windows of the training length go through the checkpoint and through a random-weight
control. The measure `gates` gives, for every head, the separators' share of the gates' sum and the
attention that stays in the query's own segment, each with its control by chance: as many random
tokens, and shuffled segments. The head that is judged, or the head and kind of segment, is chosen
on the even windows and judged on the odd ones: the best of many is no finding where it was chosen.
That separators have more of the gates' sum than random tokens does not say that they have it alone:
other tokens with high gates are counted in the figure.

    chosen   argmax over places of the mean, over even prompts, of observed - control
    judged   observed, control and chance of that place, means over odd prompts

The evidence holds both: the margin of every place on even prompts, and all three numbers of the
chosen one on every odd prompt, so that another choice or bound is judged without a model.

Shuffled segments are needed as a control: a head that never left its segment would keep most of its
attention in a shuffled one too, since both hold the nearest tokens. Random weights are shown, and
decide nothing: their gates are near 1/2 whatever the token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.lines import Line2D

from position_papers.cope.perplexity import LANGUAGE
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
    ScoreOptions,
    Subject,
    each,
    evidence,
    joined,
    mean_of,
    of_tasks,
    over_seeds,
    unmeasured,
)
from repo_interp.analysis.analyze import analyze
from repo_interp.errors import InputError
from repo_interp.measures.labels import with_attrs
from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.style import COLUMN_WIDTH, PaperFigure, paper_figure, scheme_colour, style
from repo_interp.plugins.cope.gates import KINDS, Gates
from repo_interp.plugins.cope.view import draw_attention_map, draw_gates
from repo_interp.values import Count

WITHIN = (
    "in the head and kind of segment that stand out on half of the texts, on the other half, the "
    "share of attention from position alone within the query's own segment"
)
KEPT = "the share of shuffled segments that keep as much"
REACHED = (
    "in the head that stands out on half of the texts, on the other half, the share of draws of "
    "random tokens that have as large a share of the gates' sum as the separators"
)
CHANCE = 0.05
NUMBERS = ("observed", "control", "chance")
BY_TEXT = "these numbers by text"
BY_PLACE = "on the half of the texts that it is chosen on, what is observed above its control"
"""Values of the evidence that no rule asks for: what the judged numbers are means of, and what the
head is chosen by.
"""
HALF = 0.5
"""A token whose gate is above it is counted more than not."""

C6 = Claim(
    "C6",
    "attention from position alone stays within the last paragraph or section",
    "CoPE fig. 4",
    "figure",
    All(AtLeast(WITHIN, 0.5), AtMost(KEPT, CHANCE)),
)
C6_SEPARATORS = Claim(
    "C6",
    "gates fall on separators",
    "CoPE fig. 6",
    "figure",
    AtMost(REACHED, CHANCE),
    "separators",
)


@dataclass(frozen=True)
class GateOptions(ScoreOptions):
    """How much is measured of gates. Raises InputError for too few texts."""

    gate_texts: Count = 32
    """Texts whose gates are measured."""
    controls: Count = 1
    """Copies with random weights of every checkpoint whose gates are measured: all of them are near
    1/2, so that one is as good as ten.
    """
    draws: Count = 40
    """Random choices of separators, and shuffled segments, of each text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate_texts < 4:
            raise InputError(
                f"gate_texts is {self.gate_texts}; wanted at least 4, two to choose a head "
                "on and two to judge it"
            )


# ---- measuring -----------------------------------------------------------------------------------

SHARES = ("separator_share", "separator_share_shuffled", "separator_share_chance")
MASSES = ("last_segment_mass", "last_segment_shuffled", "last_segment_chance")
_BY_HEAD = (*SHARES, *MASSES, "separator_share_even", "last_segment_even")
_OF_FIRST_TEXT = ("position_attention", "gate_by_token", "counted", "separator")


def measure(
    subjects: Sequence[Subject], options: GateOptions, cache: Cache
) -> tuple[str, xr.Dataset]:
    """The name of the checkpoint and its gates, as `measure_gates` describes them."""
    (subject,) = subjects
    assert subject.configuration is not None and subject.task is not None, subject.path
    return subject.name, subject.measured(
        cache,
        measure_gates,
        options,
        gate_texts=options.gate_texts,
        draws=options.draws,
        controls=options.controls,
        tokenizer=subject.tokenizer_digest,
    )


def measure_gates(subject: Subject, options: GateOptions) -> xr.Dataset:
    """Shares and masses [weights, prompt, layer, head, kind] of the checkpoint and of random-weight
    controls; of the first window with the trained weights `position_attention`, `gate_by_token`,
    `counted`, `separator`, and `text [key]`.
    """
    assert subject.task is not None, subject.path
    prompts = subject.prompts(subject.training_length, options.gate_texts, options.seed)
    datasets = dict[str, xr.Dataset]()
    for name, bridge in subject.bridges(options):
        maps, tokens = int(name == "trained"), len(prompts[0].tokens)
        gates = Gates(
            kinds=KINDS, maps=maps, map_tokens=tokens, draws=options.draws, seed=options.seed
        )
        run = analyze(bridge, prompts, [gates], batch_size=options.batch_size)  # pyright: ignore[reportArgumentType]
        datasets[name] = run["gates"].to_dataset()
    by_head = joined(
        {name: dataset[list(_BY_HEAD)] for name, dataset in datasets.items()}, "weights", "outer"
    )
    first = {name: datasets["trained"][name].isel(prompt=0, drop=True) for name in _OF_FIRST_TEXT}
    words = xr.DataArray(list(prompts[0].token_text or map(str, prompts[0].tokens)), dims="key")
    return by_head.assign(first).assign(text=with_attrs(words, "text of a token", "1"))


# ---- the place that stands out on even prompts, judged on odd ones -------------------------------


class Chosen(NamedTuple):
    """What stands out on one half of the prompts, as it is on the other half."""

    place: tuple[int, ...]
    """Where it is: layer, head, and kind where there are kinds."""
    observed: float
    """Mean over the other half."""
    control: float
    """The same for random separators or shuffled segments."""
    chance: float
    """Share of their draws that are at least as high, mean over the other half."""
    by_prompt: Float[np.ndarray, "number prompt"]
    """The three on every prompt of the other half."""
    margins: Float[np.ndarray, "*place"]
    """Observed - control, mean over even prompts: what it is chosen by; -inf where a place has too
    few.
    """


def stands_out(
    observed: Float[np.ndarray, "prompt *place"],
    control: Float[np.ndarray, "prompt *place"],
    chance: Float[np.ndarray, "prompt *place"],
) -> Chosen | None:
    """The place whose observed value is furthest above its control on even prompts, measured on odd
    ones.

    A prompt without separators or segments has NaN; a place needs two prompts with values in each
    half. None where no place has them.
    """
    margins = observed - control
    enough = np.minimum(np.isfinite(margins[::2]).sum(0), np.isfinite(margins[1::2]).sum(0)) >= 2
    if not enough.any():
        return None
    means = np.nanmean(np.where(enough, margins[::2], -np.inf), axis=0)
    place = np.unravel_index(means.argmax(), means.shape)
    known = np.isfinite(margins[(slice(1, None, 2), *place)])
    other = [array[(slice(1, None, 2), *place)][known] for array in (observed, control, chance)]
    value, expected, reached = (float(array.mean()) for array in other)
    return Chosen(tuple(map(int, place)), value, expected, reached, np.stack(other), means)


# ---- judging -------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """One of the two claims, with what its verdict and its figure are made of."""

    claim: Claim
    stem: str
    variables: tuple[str, str, str]
    """Observed, control, chance."""
    measured: str
    where: str
    """The same in short."""
    control: str


_WITHIN = "attention from position alone within the query's own segment"
_PARTS = (
    _Part(C6, "position_attention", MASSES, _WITHIN, "in own segment", "in shuffled ones"),
    _Part(
        C6_SEPARATORS,
        "gates",
        SHARES,
        "separators' share of the gates' sum",
        "gates on separators",
        "on random tokens",
    ),
)


def tabulate(measured: tuple[str, xr.Dataset]) -> Iterator[Evidence]:
    """The verdicts on C6: of the head whose attention stays in a segment most, and of the one whose
    gates mark separators most.
    """
    name, data = measured
    for part in _PARTS:
        trained, *controls = (
            _chosen(data, part, str(weights)) for weights in data["weights"].values
        )
        if trained is None:
            yield unmeasured(part.claim, name, "too few of the texts have separators or segments")
            continue
        random = ", ".join(f"{each.observed:.3g}" for each in controls if each is not None)
        sizes = data[part.variables[0]].sizes
        kinds = f" and {sizes['kind']} kinds of segments" if "kind" in sizes else ""
        yield evidence(
            part.claim,
            name,
            f"{part.measured}, in the head where it stands out most",
            {
                WITHIN: trained.observed,
                KEPT: trained.chance,
                REACHED: trained.chance,
                BY_TEXT: [
                    dict(zip(NUMBERS, map(float, each), strict=True))
                    for each in trained.by_prompt.T
                ],
                BY_PLACE: [
                    {
                        _place(data, place): float(margin)
                        for place, margin in np.ndenumerate(trained.margins)
                        if np.isfinite(margin)
                    }
                ],
            },
            **mean_of(trained.by_prompt[0], "texts"),
            control=f"{part.control} {trained.control:.3g}; random weights {random}",
            note=f"{_place(data, trained.place)}: {part.control} {trained.control:.3g}, as high in "
            f"{100 * trained.chance:.3g} % of the draws; "
            f"the head was chosen among {sizes['layer'] * sizes['head']} heads{kinds} on the "
            "other half of the texts",
        )


def _chosen(data: xr.Dataset, part: _Part, weights: str = "trained") -> Chosen | None:
    arrays = [data[variable].sel(weights=weights) for variable in part.variables]
    return stands_out(*(array.transpose("prompt", "layer", "head", ...).values for array in arrays))


def _place(data: xr.Dataset, place: Sequence[int]) -> str:
    """A head in words, with the kind of segment where there are kinds."""
    axes = ("layer", "head", "kind")
    layer, head, *kind = (
        data[axis].values[index] for axis, index in zip(axes, place, strict=False)
    )
    return ", segments: ".join([f"head {head} of layer {layer}", *map(str, kind)])


# ---- drawing: the map of one head above the gates of its keys, separators marked (fig. 4 and 6) --


def draw(measured: tuple[str, xr.Dataset]) -> Iterator[Drawing]:
    """Attention from position alone, and gates, of the head that each claim is about."""
    name, data = measured
    short = name.split("/")[-1]
    for part in _PARTS:
        if (chosen := _chosen(data, part)) is None:
            continue
        shown = data.isel(layer=chosen.place[0], head=chosen.place[1]).drop_vars(
            "scheme", errors="ignore"
        )
        above, words = _counted(shown)
        texts = shown["text"].values[above & (shown["separator"].values != 1)].tolist()
        often = (
            ", ".join(f"{text!r} ({times})" for text, times in Counter(texts).most_common(4))
            or "none"
        )
        caption = (
            f"{name}, {_place(data, chosen.place)}: attention from position alone on the first text, "
            "every row scaled to a maximum of 1 (CoPE fig. 4), and below it the mean gate of each "
            "token over the queries that see it (fig. 6). Plus signs and dark bars: separators - "
            "line breaks, ends of sentences, beginnings of blocks. "
            f"{part.measured[:1].upper()}{part.measured[1:]}, mean over the texts that it was not "
            f"chosen on: {chosen.observed:.3g}; {part.control}: {chosen.control:.3g}. On the first "
            f"text, {words}, most often {often}."
        )
        title = (
            f"{short}, {_place(data, chosen.place)}\n{part.where} {chosen.observed:.2f}, "
            f"{part.control} {chosen.control:.2f}"
        )
        maps = shown[["position_attention", "gate_by_token", "separator"]]
        chart = partial(position_attention_and_gates, maps, title)
        yield Drawing(f"{part.stem}_{short}", chart, caption, shown)


def _counted(data: xr.Dataset) -> tuple[np.ndarray, str]:
    """Which tokens have a gate above `HALF` in `gate_by_token [key]`, and how many separators and
    others do, in words.
    """
    above, separators = data["gate_by_token"].values > HALF, data["separator"].values == 1
    counts = [f"{above[which].sum()} of {which.sum()}" for which in (separators, ~separators)]
    return above, f"gate above {HALF}: {counts[0]} separators, {counts[1]} others"


@style()
def position_attention_and_gates(data: xr.Dataset, title: str) -> PaperFigure:
    """`position_attention [query, key]` of one head above `gate_by_token [key]`, on one axis of
    keys; `separator [key]` is 1 where a token separates, `text [key]` is what it is.
    """
    figure = paper_figure(COLUMN_WIDTH, 4.6)
    attention, gates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    separators = data["separator"].values == 1
    values = data["position_attention"].transpose("query", "key").values
    image = draw_attention_map(
        attention,
        np.where(np.tri(*values.shape, dtype=bool), values, np.nan),
        np.flatnonzero(separators),
    )
    figure.colorbar(image, ax=attention, fraction=0.05, pad=0.02).set_label(
        "attention from position alone (row maximum 1)"
    )
    attention.set(aspect="auto", xlabel="", title=title)
    draw_gates(gates, data["gate_by_token"].values, separators, scheme_colour("cope")).set_xlabel(
        "key (token)"
    )
    gates.axhline(HALF, color="#222222", linewidth=0.7, linestyle="--", gid="half")
    gates.set_title(_counted(data)[1].capitalize(), fontsize=6.5)
    legend_below(
        figure,
        [
            Line2D(
                [], [], linestyle="none", marker="+", color="black", markersize=4, label="separator"
            )
        ],
    )
    return figure


def _has_gates(subject: Subject) -> bool:
    """Whether the gates of a checkpoint can be judged: not where all are open."""
    if subject.configuration is None or "cope" not in subject.schemes:
        return False
    return (
        of_tasks("language")(subject)
        and subject.configuration.scheme_options.get("gates") != "open"
    )


def units(measured: tuple[str, xr.Dataset]) -> xr.Dataset:
    """`MASSES` of one seed [weights, prompt, kind], in the head that C6 is judged by; nothing where
    no head can be.
    """
    _, data = measured
    chosen = _chosen(data, _PARTS[0])
    return (
        data[[]]
        if chosen is None
        else data[list(MASSES)].isel(layer=chosen.place[0], head=chosen.place[1], drop=True)
    )


GATES = over_seeds(
    Experiment(
        "gates",
        (C6, C6_SEPARATORS),
        Needs(
            each(_has_gates),
            "no checkpoint with CoPE and its weights, trained on language, was given",
            ("language/cope_sep_keys", "language/cope", "language/cope_16"),
            "language",
        ),
        measure,
        tabulate,
        draw,
        LANGUAGE,
    ),
    units,
)
