"""How far learned positions spread (RePo sec. 5.2, fig. 2): R5.

Ranges of every learned head on prompts of L/4, L/2, L, 2L and 4L tokens, L the training length; the
claim is judged within L, as in the paper.

    far below    max over heads of d / L, by prompt of L tokens: the number that is shown is its mean, its spread that over the same prompts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from torch import nn

from position_papers.kit import (
    Above,
    All,
    AtLeast,
    AtMost,
    BeyondNull,
    Cache,
    Claim,
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
    mean_of,
    over_seeds,
    welch_difference,
    why_not,
)
from position_papers.repo.checkpoints import LEARNED, NO_LEARNED, OLMO, learns_long_positions
from position_papers.repo.options import Options
from repo_interp.analysis.analyze import analyze
from repo_interp.errors import InputError
from repo_interp.measures.labels import with_attrs
from repo_interp.plots.marks.axis_scales import plain_decades
from repo_interp.plots.marks.drawing import counted, legend_below
from repo_interp.plots.style import COLUMN_WIDTH, PaperFigure, paper_figure, scheme_colour, style
from repo_interp.tasks import Prompt

SHARES = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4))
"""Context lengths, in training lengths."""
JUDGED = (Fraction(1, 2), Fraction(1))
"""Those that the claim is judged at."""
GROWS = Above("the mean range at the training length", ("half that length",))
FAR_BELOW = AtMost(
    "the largest range of a head over the context length, mean over prompts of the training length,",
    0.5,
)
UNEVEN = AtLeast("standard deviation over mean of the heads' ranges", 0.25)
R5 = Claim(
    "R5",
    "the range of positions grows with the context but stays far below its length; it is "
    "uneven over heads",
    "RePo fig. 2",
    "figure",
    All(GROWS, FAR_BELOW, UNEVEN),
    also=("beyond random weights",),
)
BESIDE_TWINS = (
    "the growth of the mean range, in positions, beside random weights,",
    "the heads' variation, beside random weights,",
)
R5_NULL = R5.beyond(
    "ranges grow with the context and are uneven over heads, both more than with random weights",
    *(BeyondNull(quantity, 0.95) for quantity in BESIDE_TWINS),
)


# ---- measured ------------------------------------------------------------------------------------


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset | None:
    """`range [length, prompt, unit]` of every learned head of one checkpoint; None where half the
    training length allows no prompts.
    """
    (subject,) = subjects
    data = subject.measured(
        cache,
        _ranges,
        options,
        prompts=options.prompts,
        controls=options.controls,
        control_prompts=options.control_prompts,
    )
    length = subject.training_length
    if not {length, length // 2} <= set(data["length"].values.tolist()):
        return None
    return data.assign_attrs(training_length=length, checkpoint=subject.name, stem=subject.stem)


def _ranges(subject: Subject, options: Options) -> xr.Dataset:
    """`range [length, prompt, unit]`, and `random_range [weights, judged, prompt, unit]` of
    controls at the two judged lengths.
    """
    lengths, judged = (
        [int(subject.training_length * share) for share in shares] for shares in (SHARES, JUDGED)
    )
    prompts: dict[int, list[Prompt]] = {}
    for length in lengths:
        # shorter than a prompt of this task can be, or longer than a document of its corpus
        with suppress(InputError):
            count = options.prompts
            if length > subject.training_length:
                count = min(count, options.control_prompts)
            prompts[length] = subject.prompts(length, count, options.seed)
    if not prompts:
        raise InputError(
            f"{subject.name}: no prompts could be made of {lengths[0]} to {lengths[-1]} tokens"
        )
    own = xr.DataArray()
    random: list[xr.DataArray] = []
    for weights, bridge in subject.bridges(options):
        if weights == "trained":
            own = _by_length(bridge, prompts, subject.learned, options)
        elif set(judged) <= set(prompts):
            of_judged = {length: prompts[length][: options.control_prompts] for length in judged}
            found = _by_length(bridge, of_judged, subject.learned, options)
            random.append(found.rename(length="judged"))
    data = {"range": with_attrs(own, "largest minus smallest position of a prompt", "positions")}
    if random:
        # NaN for the prompts that random weights were not given
        beside = xr.concat(random, "weights", coords="minimal").reindex(prompt=own["prompt"])
        data["random_range"] = with_attrs(beside, "the same with random weights", "positions")
    return xr.Dataset(data, {"judged": judged})


def _by_length(
    bridge: nn.Module,
    prompts: Mapping[int, Sequence[Prompt]],
    layers: Sequence[int],
    options: Options,
) -> xr.DataArray:
    """Ranges [length, prompt, unit], NaN where a length has fewer prompts than another."""
    found: dict[int, xr.DataArray] = {}
    for length, of_length in prompts.items():
        run = analyze(bridge, of_length, ("positions",), layers, batch_size=options.batch_size)
        ranges = run["positions"].to_dataset()["position_range"].stack(unit=("layer", "head"))
        units = [f"layer {layer} head {head}" for layer, head in ranges["unit"].values]
        values = ranges.transpose("prompt", "unit").values
        axes = {"prompt": np.arange(len(values)), "unit": units}
        found[length] = xr.DataArray(values, axes, ("prompt", "unit"))
    return joined(found, "length", "outer")


# ---- tabulated --------------------------------------------------------------------------------------


def spreading(
    short: Float[np.ndarray, "prompt head"],
    long: Float[np.ndarray, "prompt head"],
    lengths: tuple[int, int],
) -> dict[str, Any]:
    """What the rule of R5 asks for, of the ranges of learned heads at two lengths.

    The prompts differ, so errors of their means add.
    """
    growth = welch_difference(
        long.mean(axis=1), short.mean(axis=1), f"{len(long)} prompts of each length"
    )
    heads = long.mean(axis=0)
    return {
        GROWS.quantity: {GROWS.rivals[0]: growth},
        FAR_BELOW.quantity: float((long.max(axis=1) / lengths[1]).mean()),
        UNEVEN.quantity: float(heads.std() / heads.mean()) if heads.mean() > 0 else 0.0,
    }


def tabulate(data: xr.Dataset) -> Iterator[Evidence]:
    """R5 at the training length, against half of it, and beside random-weight controls."""
    long = int(data.attrs["training_length"])
    lengths = (long // 2, long)
    ranges = data["range"].transpose("length", "prompt", "unit")
    values = _spreading_of(ranges.sel(length=list(lengths)))
    growth = values[GROWS.quantity][GROWS.rivals[0]]
    parts = {"grows": GROWS, "stays far below": FAR_BELOW, "uneven": UNEVEN}
    means = ranges.mean(("prompt", "unit"))
    largest = (ranges.sel(length=long).max("unit") / long).dropna("prompt").values
    judged = evidence(
        R5,
        data.attrs["checkpoint"],
        f"largest range of a head over the context length, mean over prompts of {long} tokens",
        values,
        **mean_of(largest, f"prompts of {long} tokens"),
        control="RoPE: 1, the same in every head",
        note="; ".join(
            f"{part}: {'yes' if rule.holds(values) else 'no'}" for part, rule in parts.items()
        )
        + f"; growth {growth.margin:+.3g} positions (standard error "
        f"{growth.standard_error:.2g}); over heads, deviation over mean "
        f"{values[UNEVEN.quantity]:.2f}; mean range "
        + ", ".join(f"{float(mean):.3g} at {int(mean['length'])}" for mean in means),
    )
    yield judged
    of_random = data["random_range"].transpose("weights", "judged", "prompt", "unit")
    random = [_spreading_of(each.rename(judged="length")) for each in of_random]
    beside = {
        BESIDE_TWINS[0]: Observed(
            growth.margin, [each[GROWS.quantity][GROWS.rivals[0]].margin for each in random]
        ),
        BESIDE_TWINS[1]: Observed(
            values[UNEVEN.quantity], [each[UNEVEN.quantity] for each in random]
        ),
    }
    note = "; ".join(
        f"{name} {beside_null(each)}"
        for name, each in zip(("growth", "variation"), beside.values(), strict=True)
    )
    yield judged.on(R5_NULL, beside, note, control="random weights")


def _spreading_of(ranges: xr.DataArray) -> dict[str, Any]:
    """`spreading` of ranges [length, prompt, unit] at two lengths, without prompts that have none."""
    short, long = (each.dropna("prompt").values for each in ranges)
    return spreading(short, long, tuple(ranges["length"].values.tolist()))


def units(data: xr.Dataset) -> xr.Dataset:
    """`range`, and by prompt the mean over heads and the largest."""
    own = data["range"]
    return data[["range"]].assign(
        mean_range=own.mean("unit", keep_attrs=True), largest_range=own.max("unit", keep_attrs=True)
    )


# ---- drawn ---------------------------------------------------------------------------------------


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Fig. 2."""
    name, length = data.attrs["checkpoint"], int(data.attrs["training_length"])
    counts = data["range"].notnull().any("unit").sum("prompt").values.tolist()
    prompts = " or ".join(map(str, sorted(set(counts), reverse=True)))
    yield Drawing(
        f"ranges_{data.attrs['stem']}",
        partial(ranges_by_length, data["range"].mean("prompt").to_dataset(), name, length),
        f"{name}: range of positions of every learned head by context length (RePo fig. 2), "
        f"mean over {prompts} prompts. The claim is judged at {length // 2} and {length} tokens.",
        data,
    )


def ranges_by_length(means: xr.Dataset, name: str, training_length: int) -> PaperFigure:
    """Draw the range of every learned head by context length, and their mean.

    Dashed: the context length itself, the range of RoPE. Dotted: the training length.
    """
    values = means["range"].transpose("length", "unit").values
    lengths, black = means["length"].values, {"color": "#222222"}
    one = {"color": scheme_colour("repo"), "linewidth": 0.5, "markersize": 1.8}
    drawn: dict[str, Any] = {
        "a head": (values, {**one, "marker": "o", "alpha": 0.45}),
        "mean": (values.mean(1), {**black, "linewidth": 1.2}),
        "context length (RoPE)": (lengths, {**black, "linestyle": "--", "linewidth": 0.8}),
    }
    with style():
        figure = paper_figure(COLUMN_WIDTH, 2.5)
        ax = figure.subplots()
        lines = [ax.plot(lengths, y, **look, label=text)[0] for text, (y, look) in drawn.items()]
        dotted = {**black, "linewidth": 0.6, "linestyle": (0, (1, 1.5))}
        lines.append(ax.axvline(training_length, **dotted, label="training length"))
        ax.set(xscale="log", yscale="log", xlabel="context length (tokens)")
        ax.set_ylabel("range of positions d")
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
        ax.minorticks_off()
        plain_decades(ax.yaxis)
        ax.grid(axis="y")
        ax.set_title(f"{name}: {counted(values.shape[1], 'learned head')}")
        legend_below(figure, lines)
    return figure


RANGES = over_seeds(
    Experiment(
        "ranges of positions",
        (R5, R5_NULL),
        Needs(each(learns_long_positions), NO_LEARNED, LEARNED, why_not=why_not),
        measure,
        tabulate,
        draw,
        OLMO,
    ),
    units,
)
