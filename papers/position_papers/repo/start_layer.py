"""The layer that RePo starts at, in a needle in a haystack (RePo fig. 4): R9's start layer, on what `needles` measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

from position_papers.kit.cache import Cache
from position_papers.kit.claims import Claim, Verdict, verdict
from position_papers.kit.experiment import Drawing, Experiment, Needs, asked_the_same
from position_papers.kit.learned_positions import why_not
from position_papers.kit.rules import All, AtMost, Below, Where
from position_papers.kit.subjects import Subject
from position_papers.repo.checkpoints import HAYSTACKS, OLMO, finds_needles, needles_of, omits_positions
from position_papers.repo.needles import CEILING, METHODS, NEEDS_POSITIONS, NOPE, found_without_positions, search
from position_papers.repo.options import Options
from repo_interp.plots.style import COLUMN_WIDTH, PaperFigure, paper_figure, scheme_colour, style

TOLD_APART = Below("the lowest of these means", CEILING)
ROBUST = AtMost("the largest difference between starting layers of the mean share over L, 2L and 4L (YaRN beyond L)", 0.05)
R9_START = Claim(
    "R9",
    "needle in a haystack: robust to the layer that RePo starts at",
    "RePo fig. 4",
    "figure",
    Where(All(NEEDS_POSITIONS, TOLD_APART), ROBUST),
    part="start layer",
)


def starting_layer(subject: Subject) -> int | None:
    """The layer from which all layers are RePo, those below RoPE; None for other layouts."""
    if "repo" not in subject.schemes:
        return None
    start = subject.schemes.index("repo")
    expected = ("rope",) * start + ("repo",) * (len(subject.schemes) - start)
    return start if subject.schemes == expected else None


def _groups(subjects: Sequence[Subject]) -> Sequence[Sequence[Subject]]:
    """Checkpoints that get the same prompts and start RePo at different layers, with NoPE where it gets them too."""

    def fits(subject: Subject) -> bool:
        return finds_needles(subject) and (_starts(subject) or omits_positions(subject.layout))

    groups = asked_the_same(fits)(subjects)
    return [group for group in groups if len({starting_layer(subject) for subject in group if _starts(subject)}) > 1]


def _starts(subject: Subject) -> bool:
    return starting_layer(subject) is not None


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset:
    """`score`, `standard_error [method, checkpoint, length]` by `start (checkpoint)`, with the number of `seeds [method, checkpoint]`."""
    order = sorted(filter(_starts, subjects), key=lambda subject: (starting_layer(subject) or 0, subject.name))
    without = found_without_positions([search(subject, options, cache) for subject in subjects])
    unused = [subject.name for subject in order if why_not(subject, options, cache)]
    untrained = (
        f"{', '.join(unused)} not shown to use learned positions, which the paper's models were trained to" if unused else ""
    )
    searched = [search(subject, options, cache) for subject in order]
    lengths = searched[0].lengths
    samples = [[[each.sample([length], method) for length in lengths] for each in searched] for method in METHODS]
    scores = np.array([[[sample.mean for sample in row] for row in rows] for rows in samples])
    errors = np.array([[[sample.spread or 0.0 for sample in row] for row in rows] for rows in samples])
    axes = ("method", "checkpoint", "length")
    return xr.Dataset(
        {
            "score": (axes, scores, {"long_name": "share of needles found", "units": "1"}),
            "standard_error": (
                axes,
                errors,
                {
                    "long_name": "standard deviation over seeds, or of one seed's mean its standard error over prompts",
                    "units": "1",
                },
            ),
        },
        {
            "method": list(METHODS.values()),
            "checkpoint": [subject.name for subject in order],
            "length": lengths,
            "start": ("checkpoint", [starting_layer(subject) for subject in order]),
            "seeds": (axes[:2], [[max(len(sample.seeds) for sample in row) for row in rows] for rows in samples]),
        },
        {
            "task": needles_of(order[0]),
            "training_length": order[0].training_length,
            "layers": len(order[0].schemes),
            "prompts": searched[0].scores.sizes["prompt"],
            "found_by_nope": without.share,
            "why_not": without.why_not or untrained,
        },
    )


def judge(data: xr.Dataset) -> Iterator[Verdict]:
    """The means over all lengths, with YaRN, of all starting layers."""
    plain, yarn = data["score"].mean("length").values
    at_length = data["score"].values[0, :, 0]
    bare_seeds, yarn_seeds = (" or ".join(map(str, sorted(set(seeds)))) for seeds in data["seeds"].values.tolist())
    text = (
        "; ".join(
            f"from layer {start}: {mean:.3f}, without YaRN {bare:.3f}"
            for start, mean, bare in zip(data["start"].values, yarn, plain, strict=True)
        )
        + f"; at L alone {at_length.min():.3f} to {at_length.max():.3f}; seeds: {bare_seeds} without YaRN, {yarn_seeds} with it"
    )
    values = {NOPE: data.attrs["found_by_nope"], TOLD_APART.quantity: yarn.min(), ROBUST.quantity: np.ptp(yarn)}
    reason = data.attrs["why_not"] or (
        "" if TOLD_APART.holds(values) else "all find nearly all of them, so they cannot be told apart"
    )
    yield verdict(
        R9_START,
        ", ".join(data["checkpoint"].values.tolist()),
        "largest difference of the mean score over L, 2L, 4L between starting layers",
        values,
        float(np.ptp(yarn)),
        n=data.attrs["prompts"] * data.sizes["length"],
        note=text,
        unmeasurable=(reason, text) if reason else (),
    )


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Fig. 4."""
    yield Drawing(
        f"haystack_start_layer_{data.attrs['task']}_{data.attrs['training_length']}",
        _figure(data),
        f"Needles found by the layer (0-based) from which RePo replaces RoPE (RePo fig. 4), {data.attrs['prompts']} prompts per length, "
        "without and with YaRN beyond the training length L; bar: standard deviation over seeds, or of one seed's mean its standard error.",
        data,
    )


def _figure(data: xr.Dataset) -> PaperFigure:
    """One panel per method, one line per length over the layer that RePo starts at."""
    starts = data["start"].values
    colour = scheme_colour("repo")
    with style():
        figure = paper_figure(COLUMN_WIDTH, 2.1)
        panels = figure.subplots(1, data.sizes["method"], sharey=True, squeeze=False)[0]
        for ax, method in zip(panels, data["method"].values, strict=True):
            chosen = data.sel({"method": method}, drop=True)
            scores, errors = (chosen[name].transpose("length", "checkpoint").values for name in ("score", "standard_error"))
            for place, length in enumerate(data["length"].values):
                look: dict[str, Any] = {"color": colour, "marker": "os^D"[place % 4], "markersize": 3}
                line = ("-", "--", ":", "-.")[place % 4]
                ax.plot(starts, scores[place], linestyle=line, label=f"{length:,} tokens", gid=f"length {length}", **look)
                ax.vlines(starts, scores[place] - errors[place], scores[place] + errors[place], color=colour, linewidth=0.7)
            ax.set(xlabel=f"first RePo layer of {data.attrs['layers']}", ylim=(-0.03, 1.03), title=str(method))
            ax.set_xticks(sorted(set(starts.tolist())))
            ax.grid(axis="y")
        panels[0].set_ylabel("share of needles found")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


START_LAYER = Experiment(
    "layer that RePo starts at",
    (R9_START,),
    Needs(
        _groups,
        "checkpoints with RePo from several layers on were not given",
        HAYSTACKS,
    ),
    measure,
    judge,
    draw,
    OLMO,
)
