"""How far learned positions spread (RePo sec. 5.2, fig. 2): R5.

Ranges of every learned head on prompts of L/4, L/2, L, 2L and 4L tokens, L the training length; the claim is judged within L, as in the
paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.lines import Line2D

from position_papers.kit.cache import Cache
from position_papers.kit.claims import EVERY_SEED, Claim, Verdict, verdict
from position_papers.kit.differences import Difference, welch_difference
from position_papers.kit.experiment import Drawing, Experiment, Needs, each
from position_papers.kit.learned_positions import why_not
from position_papers.kit.rules import Above, All, AtLeast, AtMost, BeyondNull, Observed, beside_null
from position_papers.kit.subjects import Subject
from position_papers.repo.checkpoints import LEARNED, NO_LEARNED, OLMO, learns_long_positions
from position_papers.repo.options import Options
from repo_interp.analysis.analyze import analyze
from repo_interp.errors import InputError
from repo_interp.measures.labels import described
from repo_interp.plots.marks.drawing import counted, legend_below, plain_decades
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, scheme_colour, style
from repo_interp.tasks import Prompt

SHARES = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4))
"""Context lengths, in training lengths."""
JUDGED = (Fraction(1, 2), Fraction(1))
"""Those that the claim is judged at."""
GROWS = Above("the mean range at the training length", ("half that length",))
FAR_BELOW = AtMost("the largest range of a head over the context length", 0.5)
UNEVEN = AtLeast("standard deviation over mean of the heads' ranges", 0.25)
R5 = Claim(
    "R5",
    "the range of positions grows with the context but stays far below its length; it is uneven over heads",
    "RePo fig. 2",
    "figure",
    All(GROWS, FAR_BELOW, UNEVEN),
    also=("beyond random weights", EVERY_SEED),
)
BESIDE_TWINS = (
    "the growth of the mean range, in positions, beside random weights,",
    "the heads' variation, beside random weights,",
)
R5_NULL = Claim(
    "R5",
    "ranges grow with the context and are uneven over heads, both more than with random weights",
    R5.source,
    "none",
    All(R5.rule, *(BeyondNull(quantity, 0.95) for quantity in BESIDE_TWINS)),
    "beyond random weights",
)


# ---- measured -------------------------------------------------------------------------------------------------------


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset | None:
    """`range [length, prompt, unit]` of every learned head of one checkpoint; None where half the training length allows no prompts."""
    (subject,) = subjects
    data = subject.measured(cache, _ranges, options, prompts=options.prompts, controls=options.controls)
    length = subject.training_length
    if not {length, length // 2} <= set(data["length"].values.tolist()):
        return None
    return data.assign_attrs(training_length=length, checkpoint=subject.name, stem=subject.stem)


def _ranges(subject: Subject, options: Options) -> xr.Dataset:
    """`range [length, prompt, unit]`, and `random_range [weights, judged, prompt, unit]` of controls at the two judged lengths."""
    prompts: dict[int, list[Prompt]] = {}
    judged = [int(subject.training_length * share) for share in JUDGED]
    for length in (int(subject.training_length * share) for share in SHARES):
        with suppress(InputError):  # shorter than a prompt of this task can be, or longer than a document of its corpus
            prompts[length] = subject.prompts(length, options.prompts, options.seed)
    parts: list[xr.DataArray] = []
    random: dict[int, list[np.ndarray]] = {length: [] for length in judged if length in prompts}

    def range_of(bridge: Any, length: int) -> xr.DataArray:
        run = analyze(bridge, prompts[length], ("positions",), subject.learned, batch_size=options.batch_size)
        return run["positions"].to_dataset()["position_range"].transpose("prompt", "layer", "head")

    for weights, bridge in subject.bridges(options) if prompts else ():
        if weights == "trained":
            parts = [range_of(bridge, length) for length in prompts]
            continue
        for length, ranges in random.items():
            ranges.append(range_of(bridge, length).values.reshape(len(prompts[length]), -1))
    if not parts:
        wanted = f"{subject.training_length // 4} to {4 * subject.training_length} tokens"
        raise InputError(f"{subject.name}: no prompts could be made of {wanted}")
    units = [f"layer {layer} head {head}" for layer in parts[0]["layer"].values for head in parts[0]["head"].values]
    values = np.stack([part.values.reshape(part.shape[0], -1) for part in parts]).astype(float)
    array = xr.DataArray(values, {"length": list(prompts), "unit": units}, ("length", "prompt", "unit"))
    data = described(array, "largest minus smallest position of a prompt", "positions").to_dataset(name="range")
    if len(random) < len(JUDGED):
        return data
    of_twins = xr.DataArray(np.array(list(random.values())), {"judged": list(random)}, ("judged", "weights", "prompt", "unit"))
    return data.assign(random_range=described(of_twins, "the same with random weights", "positions"))


# ---- judged ---------------------------------------------------------------------------------------------------------


class Spreading(NamedTuple):
    """What the rule of R5 asks for."""

    growth: Difference
    """Of the mean range, in positions."""
    largest: float
    """Largest range over the context length."""
    variation: float
    """Standard deviation over mean of the heads' ranges."""

    @property
    def values(self) -> dict[str, object]:
        """By the names of the rule."""
        return {
            GROWS.quantity: {GROWS.rivals[0]: self.growth},
            FAR_BELOW.quantity: self.largest,
            UNEVEN.quantity: self.variation,
        }


def spreading(
    short: Float[np.ndarray, "prompt head"], long: Float[np.ndarray, "prompt head"], short_length: int, long_length: int
) -> Spreading:
    """How ranges of the learned heads spread from prompts of one length to those of another. The prompts differ, so errors add."""
    means = short.mean(axis=1), long.mean(axis=1)
    growth = welch_difference(means[1], means[0], f"{len(means[1])} prompts of each length")
    largest = max(float(short.max()) / short_length, float(long.max()) / long_length)
    heads = long.mean(axis=0)
    return Spreading(growth, largest, float(heads.std() / heads.mean()) if heads.mean() > 0 else 0.0)


def judge(data: xr.Dataset) -> Iterator[Verdict]:
    """R5 at the training length, against half of it, and beside random-weight controls."""
    long = int(data.attrs["training_length"])
    short = long // 2
    ranges = data["range"].transpose("length", "prompt", "unit")
    at_length = ranges.sel(length=long)
    spread = spreading(ranges.sel(length=short).values, at_length.values, short, long)
    means = ranges.mean(("prompt", "unit"))
    parts = {"grows": GROWS, "stays far below": FAR_BELOW, "uneven": UNEVEN}
    judged = verdict(
        R5,
        data.attrs["checkpoint"],
        f"largest range of a head over the context length, {short} and {long} tokens",
        spread.values,
        spread.largest,
        float((at_length.max("unit") / long).std("prompt", ddof=1)),
        f"prompts of {long} tokens",
        2 * ranges.sizes["prompt"],
        "RoPE: 1, the same in every head",
        "; ".join(f"{part}: {'yes' if rule.holds(spread.values) else 'no'}" for part, rule in parts.items())
        + f"; growth {spread.growth.margin:+.3g} positions (standard error {spread.growth.standard_error:.2g}); over heads, deviation "
        f"over mean {spread.variation:.2f}; mean range "
        + ", ".join(
            f"{float(mean):.3g} at {int(length)}" for length, mean in zip(means["length"].values, means.values, strict=True)
        ),
    )
    yield judged
    twins = data["random_range"].transpose("weights", "judged", "prompt", "unit").values
    spreads = [spreading(at_short, at_long, short, long) for at_short, at_long in twins]
    growth = Observed(spread.growth.margin, [each.growth.margin for each in spreads])
    variation = Observed(spread.variation, [each.variation for each in spreads])
    values: dict[str, Observed] = dict(zip(BESIDE_TWINS, (growth, variation), strict=True))
    note = f"growth in positions: {beside_null(growth)}; deviation over mean of heads: {beside_null(variation)}"
    yield judged.on(R5_NULL, values, note, control="twins with random weights")


# ---- drawn ----------------------------------------------------------------------------------------------------------


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Fig. 2."""
    name, length = data.attrs["checkpoint"], int(data.attrs["training_length"])
    yield Drawing(
        f"ranges_{data.attrs['stem']}",
        _figure(data, name),
        f"{name}: range of positions of every learned head by context length (RePo fig. 2), mean over {data.sizes['prompt']} prompts each, "
        f"and its share of the length: a box has the middle half of heads, its line their median, whiskers those within 1.5 box lengths. "
        f"The claim is judged at {length // 2} and {length} tokens.",
        data,
    )


def _figure(data: xr.Dataset, name: str) -> PaperFigure:
    """Left every learned head by context length, right how uneven they are at each length.

    Dashed: the context length itself, the range of RoPE. Dotted: training length.
    """
    ranges = data["range"].transpose("length", "prompt", "unit")
    lengths = ranges["length"].values
    means = ranges.values.mean(axis=1)
    colour = scheme_colour("repo")
    with style():
        figure = paper_figure(PAGE_WIDTH, 2.3)
        left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
        for place in range(means.shape[1]):
            left.plot(lengths, means[:, place], "-o", color=colour, alpha=0.45, linewidth=0.5, markersize=1.8, gid="head")
        left.plot(lengths, means.mean(axis=1), color="#222222", linewidth=1.2, gid="mean")
        left.plot(lengths, lengths, "--", color="#222222", linewidth=0.8, gid="context length")
        left.set(xscale="log", yscale="log", ylabel="range of positions d")
        for ax in (left, right):
            ax.set_xlabel("context length (tokens)")
        left.set_xticks(lengths, [f"{length:,}" for length in lengths])
        left.minorticks_off()
        plain_decades(left.yaxis)
        left.axvline(float(data.attrs["training_length"]), color="#222222", linewidth=0.6, linestyle=(0, (1, 1.5)))
        left.grid(axis="y")
        left.set_title(
            f"{name}: {counted(means.shape[1], 'learned head')}, mean over {counted(ranges.sizes['prompt'], 'prompt')}"
        )
        right.boxplot(
            list(means / lengths[:, None]),
            positions=range(len(lengths)),
            widths=0.5,
            showfliers=True,
            medianprops={"color": colour},
            flierprops={"markersize": 2},
        )
        right.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        right.set_title("Range over context length, by head")
        right.set_ylim(0, None)
        right.grid(axis="y")
        legend_below(
            figure,
            [
                Line2D([], [], color=colour, marker="o", markersize=2, linewidth=0.5, label="a head"),
                Line2D([], [], color="#222222", linewidth=1.2, label="mean"),
                Line2D([], [], color="#222222", linestyle="--", linewidth=0.8, label="the context length (RoPE)"),
                Line2D([], [], color="#222222", linestyle=(0, (1, 1.5)), linewidth=0.6, label="training length"),
            ],
        )
    return figure


RANGES = Experiment(
    "ranges of positions",
    (R5, R5_NULL),
    Needs(each(learns_long_positions), NO_LEARNED, LEARNED, why_not=why_not),
    measure,
    judge,
    draw,
    OLMO,
)
