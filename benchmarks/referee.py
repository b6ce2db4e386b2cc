"""The numbers and outcomes of figures/README.md, recomputed from the CSVs beside the figures:
`python -m benchmarks.referee [FIGURES]`.

    figures/**/numbers.csv.gz, verdicts.csv -> a line per claim and checkpoint; exit code 1 where a
    recomputed value differs

`CLAIMS` has, for every claim, where its values are, how they are reduced, and its rule with the
thresholds of the column `rule`. Nothing of the packages is imported. A value is compared with the
digits that verdicts.csv prints. What the CSVs do not hold is named, and never taken from
verdicts.csv.

Every test has the level of 2 normal standard errors, one-sided. A difference holds where its lower
limit is above 0 and it is above what the rule wants (0, or 0.005 nats), fails where its upper limit
is not above that, and is undecided else. Equal seeds are paired; of others those that both have, at
least three, are correlated (Derrick et al. 2017).
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

DIRECTORIES = {
    "toy": "",
    "SmolLM2-135M": "smollm2-135m",
    "Gemma 3 270M": "gemma3-270m",
    "RePo adapter": "smollm2-135m-repo",
}
"""The columns of figures/README.md, and the directories of the real models."""
PAPERS = {"R": "repo", "H": "hope", "C": "cope", "P": "position-generalization"}
"""The directory of each paper, by the letter of its claims."""
LEVEL = float(stats.norm.sf(2))
FIXED = ["figure", "variable", "value", "text", "units"]
"""The columns of numbers.csv.gz that are no axes."""
NAMES = {"ours": "number", "spread": "spread", "outcome": "outcome"}
"""What is compared, by column of verdicts.csv."""
LINE = "{claim} {model:12} {checkpoint:26} {printed:27} {recomputed:27} {result:14} {missing}"


class Missing(LookupError):
    """The CSVs do not hold a value."""


class Difference(NamedTuple):
    """How far one quantity is above another, with its limits and its p-value; `more`: how far it
    has to be.
    """

    margin: float
    low: float
    high: float
    p: float
    more: float = 0.0

    @property
    def state(self) -> str:
        """Whether it holds, fails or leaves both open."""
        if self.low > 0 and self.margin > self.more:
            return "holds"
        return "undecided" if self.high > self.more else "fails"


@dataclass(frozen=True)
class Values:
    """The numbers of one directory, for one row of its verdicts."""

    numbers: pd.DataFrame
    row: dict[str, str]
    figure: str

    @property
    def ends(self) -> list[int]:
        """The last two whole numbers in the description of what was measured, ascending: "at 21 to
        30 words".
        """
        return sorted(int(each) for each in re.findall(r"\b\d+\b", self.row["measured"])[-2:])

    def __call__(self, variable: str, *axes: str, figure: str = "", **where: Any) -> xr.DataArray:
        """A variable by its axes, where others have the given values.

        Raises Missing where it is not there, or not by `axes`.
        """
        figure = (figure or self.figure).format(self.row["checkpoint"].replace("/", "_"))
        own: Any = self.numbers[self.numbers["variable"].eq(variable)]
        held: Any = own[[fnmatch(name, figure) for name in own["figure"]]].dropna(axis=1, how="all")
        for axis in (*axes, *where):
            if axis not in held:
                raise Missing(f"{variable} by {axis}" if len(held) else f"{variable} of {figure}")
        chosen = {
            axis: [str(wanted)] for axis, wanted in where.items() if isinstance(wanted, str | int)
        }
        for axis, wanted in where.items():
            held = held[held[axis].isin(chosen.get(axis) or [str(each) for each in wanted])]
        if held.empty:
            raise Missing(f"{variable} of {', '.join(map(str, where.values()))}")
        left = (
            held.drop(columns=[*FIXED, *chosen], errors="ignore")
            .dropna(axis=1, how="all")
            .apply(_typed)
        )
        values = held["value"].astype(float) if "value" in held else held["text"]
        return (
            values.set_axis(pd.MultiIndex.from_frame(left)).to_xarray()
            if len(left.columns)
            else xr.DataArray(values.item())
        )

    def by_seed(self, variable: str, **where: Any) -> xr.DataArray:
        """A variable by training seed; of a checkpoint that has one, by this."""
        found = self(variable, **where)
        return found if "seed" in found.dims else found.expand_dims("seed")

    def beside(self, scheme: str) -> str:
        """The checkpoint of another scheme that is compared with the row's."""
        return re.sub(r"(repo|cope)(?=_|$)", scheme, self.row["checkpoint"])

    def seeds(self, checkpoint: str, *sets: Any) -> xr.DataArray:
        """The scores of a checkpoint by seed, mean over test sets: all between `ends` where none is
        named.
        """
        chosen = sets or range(self.ends[0], self.ends[1] + 1)
        return (
            self("score", "seed", checkpoint=checkpoint, test_set=chosen)
            .mean("test_set")
            .dropna("seed")
        )

    def errors(self, test_set: str) -> list[xr.DataArray]:
        """Errors of CoPE, RoPE and learned positions in per cent, by seed."""
        return [self.seeds(self.beside(scheme), test_set) for scheme in ("cope", "rope", "learned")]

    def nats(self, scheme: str, length: int = 256) -> xr.DataArray:
        """Log perplexity by seed."""
        perplexity: Any = self.seeds(f"language/{scheme}", length)
        return np.log(perplexity)

    def rise(self, scheme: str) -> xr.DataArray:
        """Rise of log perplexity from the shorter to the longer length, by seed."""
        return self.nats(scheme, self.ends[1]) - self.nats(scheme, self.ends[0])

    def needles(self, scheme: str, variable: str = "score") -> xr.DataArray:
        """The share of needles that a scheme finds at the shortest length, its training length, by
        seed.
        """
        every = self(
            variable, figure="haystack_by_length_*", checkpoint=self.beside(scheme), method="plain"
        )
        return every.isel(test_set=0)

    def mass(self, scheme: str, span: str) -> xr.DataArray:
        """Attention mass per token from the rows of the generated tokens, by seed."""
        return self(
            "mass_per_token", "seed", checkpoint=self.beside(scheme), rows="generated", span=span
        ).dropna("seed")

    def judged(self, variable: str, **where: Any) -> xr.DataArray:
        """Without layer 0, of the seeds whose positions spread, depend on more than the token, and
        are used by more than 0.02 nats.
        """
        lost = (self("used_loss_frozen", "seed") - self("used_loss", "seed")).transpose("seed", ...)
        is_moved = (
            (self("used_range", "seed") >= 1) & (self("used_from_token", "seed") < 0.9)
        ).any(["used_layer", "used_head"])
        is_used = (lost.mean("used_prompt") > 0.02) & (
            np.array(stats.ttest_1samp(lost, 0, 1, alternative="greater"))[1] < LEVEL
        )
        values = self(variable, "seed", **where).sel(seed=lost["seed"][(is_moved & is_used).values])
        return (
            values.where(values["layer"] > 0, drop=True)
            if "layer" in values.dims
            else values.transpose("seed", ...)
        )

    def following(self) -> xr.DataArray:
        """How many heads follow the examples, by weights: at most 5 % of the shuffles do as
        well.
        """
        return (self("variance_between_chance", "weights").fillna(1) <= 0.05).sum(HEADS)

    def height(self, variable: str) -> xr.DataArray:
        """VAF of the activated components above that of the others, in standard deviations of
        these, by seed and weights or replicate.
        """
        vaf, activated = self.by_seed(variable), self("activated") == 1
        others = vaf.where(~activated)
        return (vaf.where(activated).mean("component") - others.mean("component")) / others.std(
            "component"
        )

    def swing(self, variable: str, **where: str) -> xr.DataArray:
        """Peak to peak of the lower component that swings most, over the mean of the activated
        ones, by seed.
        """
        swing = self.by_seed(variable, **where)
        return swing.where(self("low_frequency") == 1).max("component") / swing.where(
            self("activated") == 1
        ).mean("component")

    def curves(self) -> xr.DataArray:
        """The smoothed mean logit of every replicate."""
        return (
            self("smoothed", "repeat", "middle", checkpoint=self.row["checkpoint"])
            .transpose("repeat", "middle")
            .dropna("repeat")
        )

    def lowest(self) -> xr.DataArray:
        """Of every replicate, where their mean is lowest."""
        return self.curves()[:, int(self.curves().mean("repeat").argmin("middle"))]

    def outside(self, *over: str) -> xr.DataArray:
        """The share of the distances beyond L where smoothed components leave their range within
        it, which is widened by 5 %.
        """
        curve, length = self("smoothed", "repeat", "chosen", "middle").mean(over), self("length")
        near, far = (
            curve.where(beyond, drop=True)
            for beyond in (curve["middle"] < length, curve["middle"] >= length)
        )
        low, high = near.min("middle"), near.max("middle")
        return (abs(far - (low + high) / 2) > 0.55 * (high - low)).mean(["middle", "chosen"])

    def segment(self, variable: str) -> xr.DataArray:
        """On odd texts, the kind of segment that stands out on even ones, of the head that each
        seed is judged by.
        """
        mass, shuffled, own = (
            self.by_seed(name, weights="trained")
            for name in ("last_segment_mass", "last_segment_shuffled", variable)
        )
        even, odd = (
            (mass - shuffled).where(mass["prompt"] % 2 == half, drop=True) for half in (0, 1)
        )
        known = (even.notnull().sum("prompt") >= 2) & (odd.notnull().sum("prompt") >= 2)
        return (
            own.where(odd.notnull())
            .sel(kind=even.mean("prompt").where(known).idxmax("kind"))
            .dropna("prompt", how="all")
        )

    def slow(self) -> xr.DataArray:
        """The share of slow dominating components of the heads that have some, by seed."""
        return self.by_seed("slow_components").where(lambda share: share > 0)

    def outputs(self, method: str) -> xr.DataArray:
        """KL at the longer length above that at the shorter one, by seed and layer."""
        kl = self.by_seed("kl", method=method)
        return kl.sel(length=self.ends[1]) - kl.sel(length=self.ends[0])

    def perplexity(self, method: str) -> xr.DataArray:
        """Log perplexity at the longer length, by seed."""
        return self.by_seed("log_perplexity", method=method, length=self.ends[1])


def _typed(column: pd.Series) -> pd.Series:
    numeric: Any = pd.to_numeric(column, errors="coerce")
    return column if numeric.isna().any() else numeric


def above(
    high: xr.DataArray,
    low: xr.DataArray,
    more: float = 0.0,
    paired: bool | None = None,
    errors: float = 2,
) -> Difference:
    """How far `high` is above `low`, seed by seed where both have the same, else with the seeds
    that both have correlated.

    `paired`: by the seeds of both alone, or not at all. `errors`: the normal standard errors whose
    level the test has; p is for the level of two.
    """
    both = xr.align(high, low, join="inner")
    if paired or (paired is None and both[0].size == high.size == low.size):
        high, low = both
    if min(high.size, low.size) < 2:
        raise Missing("scores by prompt of a single seed")
    count, sizes = both[0].size, (high.size, low.size)
    margin, parts = (
        float(high.mean() - low.mean()),
        [float(each.var(ddof=1)) / each.size for each in (high, low)],
    )
    variance, freedom = (
        sum(parts),
        sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True)),
    )
    # Welch and Satterthwaite's
    degrees = variance**2 / freedom if freedom else float(sum(sizes) - 2)
    if paired is not False and (count > 2 or sizes == (count, count)):
        pairs = float(xr.corr(*both)) if min(float(each.std()) for each in both) else 0.0
        variance = max(
            0.0,
            variance
            - 2 * pairs * float(high.std(ddof=1) * low.std(ddof=1)) * count / math.prod(sizes),
        )
        degrees = count - 1 + (degrees - count + 1) * (sum(sizes) - 2 * count) / sum(sizes)
    level, error = float(stats.norm.sf(errors)), math.sqrt(variance)
    reach = float(stats.t.isf(level, degrees)) * error
    p = float(stats.t.sf(margin / error, degrees)) * LEVEL / level if error else float(margin <= 0)
    return Difference(margin, margin - reach, margin + reach, p, more)


def rise(curves: xr.DataArray) -> xr.DataArray:
    """From the lowest to the last over from the first to the lowest: 0 or infinite where the lowest
    is at an end.
    """
    return (curves[..., -1] - curves.min("middle")) / (curves[..., 0] - curves.min("middle"))


def wilson(share: float, n: int, z: float) -> tuple[float, float]:
    """Wilson's limits of a share of `n` prompts, at `z` normal standard errors."""
    middle, reach = (
        share + z**2 / (2 * n),
        z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)),
    )
    return (middle - reach) / (1 + z**2 / n), (middle + reach) / (1 + z**2 / n)


def of_share(by_seed: xr.DataArray, n: int) -> np.ndarray:
    """The shares by seed; of a single one two values, whose standard deviation is half of Wilson's
    interval.
    """
    return (
        by_seed.values
        if by_seed.size > 1
        else np.array(wilson(by_seed.item(), n, 1)) / math.sqrt(2)
    )


def more_needles(v: Values, number: float) -> Difference:
    """RePo above RoPE over seeds.

    Of single ones over prompts, where RePo finds none: the paired error is that of RoPE.
    """
    own, rope = v.needles("repo"), v.needles("rope")
    if max(own.size, rope.size) > 1 or number > 0:
        return above(own, rope)
    margin, error, student = (
        -rope.item(),
        v.needles("rope", "standard_error").item(),
        stats.t(int(v.row["n"]) - 1),
    )
    return Difference(
        margin,
        margin - (reach := error * float(student.isf(LEVEL))),
        margin + reach,
        float(student.sf(margin / error)),
    )


def learned(v: Values, test_set: str) -> bool:
    """Whether an error on a test set is above 1 %, and one in distribution at most half that of
    always giving the most frequent answer.
    """
    floor = float(v("floor", checkpoint=v.row["checkpoint"], test_set=TRAINED))
    errors = [[float(each.mean()) for each in v.errors(name)] for name in (test_set, TRAINED)]
    return max(errors[0]) > 1 and min(errors[1]) <= floor / 2


def copied(v: Values, judged: Sequence[str], compared: Sequence[str]) -> bool:
    """Whether something is copied beyond L, and what is judged is copied at every length within."""
    within = [
        v("score", checkpoint=each, test_set=range(v.ends[0])).mean("seed").min() for each in judged
    ]
    return bool(max(v.seeds(each).mean() for each in compared) >= 0.05 and min(within) >= 0.5)


def random(by_weights: xr.DataArray) -> xr.DataArray:
    """The values of random weights."""
    return by_weights[{"weights": by_weights["weights"].values != "trained"}]


def attempt(compute: Callable[..., Any], *arguments: Any) -> Any:
    """What `compute` returns, or what it lacks."""
    try:
        return compute(*arguments)
    except Missing as missing:
        return missing


@dataclass(frozen=True)
class Claim:
    """Where the values of a claim are, and how they are reduced."""

    toys: Sequence[str]
    """The small models that decide on it."""
    figure: str
    """The name in numbers.csv.gz, the checkpoint's in braces."""
    units: Callable[[Values], Any]
    """What the spread is the standard deviation of."""
    number: Callable[[Values], Any] | None = None
    """None: the mean of the units."""
    rule: Callable[[Values, float], Sequence[Any]] = lambda v, n: []
    """What has to hold, from the values and the number: truth values and differences, Missing among
    them.
    """
    measurable: Callable[[Values], Any] | None = None


def of_seeds(toys, figure, numbers, by_prompt, rule, measurable=lambda v: True) -> Claim:
    """A claim whose number is the mean over seeds, and whose rule has to hold in each; a single one
    spreads over prompts.
    """
    units = (
        lambda v: numbers(v) if numbers(v).size > 1 else by_prompt(v),
        lambda v: numbers(v).mean(),
    )
    return Claim(
        toys,
        figure,
        *units,
        lambda v, n: rule(v, numbers(v)),
        lambda v: measurable(v) and numbers(v).size,
    )


def of_errors(toys, figure, test_set) -> Claim:
    """A claim whose number is CoPE's error on a test set, which has to be below those of its
    rivals.
    """
    rule = lambda v, n: [above(rival, v.errors(test_set)[0]) for rival in v.errors(test_set)[1:]]  # noqa: E731
    return Claim(
        toys, figure, lambda v: v.errors(test_set)[0], None, rule, lambda v: learned(v, test_set)
    )


HEADS, TRAINED, UNMEASURABLE = ("layer", "head"), "in_distribution", "not measurable"
SCHEMES, ABLATED = ("HoPE", "RoPE", "ALiBi", "KERPLE", "FIRE"), ("HoPE AB1", "HoPE AB2", "RoPE")
MASSES = (
    ("repo", "rope", "needle"),
    ("rope", "repo", "query"),
    ("rope", "nope", "needle"),
    ("nope", "repo", "query"),
)
"""More, less, where: the last two only where NoPE finds needles."""
REVERSAL, ROPE, KEYS, MOVED = (
    ["reversal/repo"],
    ["language/rope"],
    ["niah_keys/repo"],
    {"disturbance": "text_order"},
)
COUNTING = [f"counting/cope{variables}_256" for variables in ("", "_3", "_5")]
CLAIMS = {
    "R1": Claim(
        *(REVERSAL, "reversal_by_length", lambda v: v.seeds("reversal/repo")),
        rule=lambda v, n: [
            above(v.seeds("reversal/repo"), v.seeds(f"reversal/{rival}"))
            for rival in ("rope", "nope")
        ],
    ),
    "R2": of_seeds(
        *(
            REVERSAL,
            "mirror_{}",
            lambda v: v.judged("near").min("layer"),
            lambda v: v.judged("share").min("layer"),
        ),
        lambda v, each: [
            (
                (v.judged("near") <= 0.25)
                & (v.judged("same_word") <= 0.5)
                & (v.judged("along") >= 0.9)
            ).any("layer")
        ],
        lambda v: v("reversed").mean() >= 0.5,
    ),
    "R3": of_seeds(
        *(REVERSAL, "mirror_{}", lambda v: v.judged("flatness", weights="trained").median("layer")),
        *(lambda v: v.judged("flat").median("layer"), lambda v, each: [each <= 0.25]),
    ),
    "R4": Claim(
        *(KEYS, "attention_mass_*", lambda v: v.mass("repo", "needle")),
        rule=lambda v, n: [
            above(v.mass(high, span), v.mass(low, span), paired=True)
            for high, low, span in MASSES[: 4 if v.needles("nope").mean() >= 0.5 else 2]
        ],
        measurable=lambda v: (
            min(v.needles("repo")[0], v.needles("rope")[0]) >= 0.5
            and v.needles("nope").mean() < 0.9
        ),
    ),
    "R5": of_seeds(
        *(
            KEYS,
            "ranges_{}",
            lambda v: (v.judged("largest_range", length=v.ends).max("prompt") / v.ends).max(
                "length"
            ),
        ),
        lambda v: v.judged("largest_range", length=v.ends[1]) / v.ends[1],
        lambda v, each: [
            each <= 0.5,
            v.judged("range", length=v.ends[1]).std("unit")
            >= 0.25 * v.judged("range", length=v.ends[1]).mean("unit"),
            *(
                above(*own.transpose("length", ...)[::-1], paired=False)
                for own in v.judged("mean_range", length=v.ends)
            ),
        ],
    ),
    "R6": of_seeds(
        *(KEYS, "patterns_{}", lambda v: 100 * v.judged("pattern_share_all", pattern="hybrid")),
        lambda v: 100 * v.judged("share_by_prompt", pattern="hybrid"),
        lambda v, each: [
            v.judged("pattern_share_all", pattern="mono") <= 0.1,
            *(
                above(own, xr.full_like(own, 0.5))
                for own in v.judged("share_by_prompt", pattern="hybrid")
            ),
            *map(
                above,
                *(v.judged("share_by_prompt", pattern=pattern) for pattern in ("constant", "mono")),
            ),
        ],
    ),
    "R7": Claim(
        *(["OLMo-2 1B (configuration)"], "efficiency"),
        lambda v: (
            100
            * (
                v("parameters", size="OLMo-2 1B", scheme="repo")
                / v("parameters", size="OLMo-2 1B", scheme="rope")
                - 1
            )
        ),
        rule=lambda v, n: [n <= 1],
    ),
    "R8": Claim(
        *(["language/repo"], "segments_{}", lambda v: v.following().sel(weights="trained")),
        rule=lambda v, n: [n > random(v.following()).quantile(0.95, method="higher")],
        measurable=lambda v: v.judged("used_loss").size,
    ),
    "R9": Claim(
        *(KEYS, "haystack_by_length_*", lambda v: of_share(v.needles("repo"), int(v.row["n"]))),
        lambda v: v.needles("repo").mean(),
        rule=lambda v, n: [more_needles(v, n)],
        measurable=lambda v: v.needles("nope").mean() < 0.9 and v.needles("rope").mean() < 0.99,
    ),
    "H1": Claim(
        *(
            [*ROPE, "language/learned", "language/kerple"],
            "logit_by_distance",
            lambda v: rise(v.curves()),
        ),
        number=lambda v: rise(v.curves().mean("repeat")),
        rule=lambda v, n: [
            0.25 <= n < np.inf,
            *(above(v.curves()[:, end], v.lowest(), errors=3) for end in (0, -1)),
        ],
    ),
    "H2": of_seeds(
        *(
            ROPE,
            "vaf_{}",
            lambda v: v.height("vaf").sel(weights="trained"),
            lambda v: v.height("vaf_of_replicate"),
        ),
        lambda v, each: [each >= 2, each > random(v.height("vaf")).max("weights")],
    ),
    "H3": Claim(
        *(ROPE, "vaf_over_training_{}", lambda v: v("vaf", "seed")),
        measurable=lambda v: v("vaf", "step")["step"].max() >= 25_000,
    ),
    "H4": Claim(
        *(ROPE, "beyond_training_length_{}", lambda v: v.outside(), lambda v: v.outside("repeat")),
        rule=lambda v, n: [n >= 0.25],
    ),
    "H5": of_seeds(
        *(
            ROPE,
            "components_{}",
            lambda v: v.swing("swing", weights="trained"),
            lambda v: v.swing("swing_of_replicate"),
        ),
        lambda v, each: [each <= 0.1],
    ),
    "H6": Claim(
        *(["copying/hope_scattered"], "copying_205", lambda v: 100 * v.seeds("HoPE")),
        rule=lambda v, n: [above(v.seeds("HoPE"), v.seeds(rival)) for rival in SCHEMES[1:]],
        measurable=lambda v: copied(v, SCHEMES[:2], SCHEMES),
    ),
    "H7": Claim(
        *(["copying/hope_ab1_scattered"], "copying_205", lambda v: 100 * v.seeds("HoPE AB1")),
        rule=lambda v, n: [
            above(v.seeds("HoPE AB1"), v.seeds("HoPE AB2")),
            above(v.seeds("HoPE AB2"), v.seeds("RoPE")).high >= 0,
        ],
        measurable=lambda v: copied(v, ABLATED, ABLATED),
    ),
    "C1": of_errors(["flip_flop/cope_256"], "flip_flop_*", "sparse"),
    "C2": Claim(
        *(["selective_copy/cope"], "selective_copy"),
        lambda v: max(
            (v.seeds("selective_copy/cope", each) for each in (TRAINED, "dense", "sparse")),
            key=np.mean,
        ),
        rule=lambda v, n: [
            n <= 1,
            min(v.seeds("selective_copy/rope", each).mean() for each in ("dense", "sparse")) >= 50,
        ],
    ),
    "C3": of_errors(COUNTING, "counting_256", TRAINED),
    "C4": Claim(
        *(
            ["language/cope"],
            "perplexity",
            lambda v: v.nats("cope") * np.exp(v.nats("cope").mean()),
        ),
        number=lambda v: np.exp(v.nats("cope").mean()),
        rule=lambda v, n: [
            above(v.nats("cope_open"), v.nats("cope"), 0.005),
            above(v.nats("learned"), v.nats("cope_open"), 0.005),
        ],
    ),
    "C5": Claim(
        *(["language/cope"], "perplexity", lambda v: v.rise("cope")),
        rule=lambda v, n: [above(v.rise("cope_open"), v.rise("cope"), 0.005)],
    ),
    "C6": of_seeds(
        *(["language/cope_sep_keys"], "position_attention_cope_sep_keys"),
        *(
            lambda v: v.segment("last_segment_mass").mean("prompt"),
            lambda v: v.segment("last_segment_mass"),
        ),
        lambda v, each: [each >= 0.5, v.segment("last_segment_chance").mean("prompt") <= 0.05],
    ),
    "P1": Claim(
        *(ROPE, "fits_{}", lambda v: v("three_axis_r_of_prompts")),
        rule=lambda v, n: [n >= 0.5**0.5],
    ),
    "P2": Claim(
        *(ROPE, "fits_{}", lambda v: v("fake_distance_r_of_layers", "prompt").mean("layer")),
        rule=lambda v, n: [v("fake_distance_r_of_layers").mean("prompt").min() >= 0.9],
    ),
    "P3": Claim(
        *(ROPE, "fits_{}", lambda v: random(v("three_axis_r_of_weights", "weights"))),
        rule=lambda v, n: [n <= 0.2, n <= 0.5 * v("three_axis_r_of_weights", weights="trained")],
    ),
    "P4": of_seeds(
        *(
            ROPE,
            "rotation_{}",
            lambda v: v.slow().notnull().mean(HEADS),
            lambda v: v.slow().notnull(),
        ),
        lambda v, each: [
            *(each >= 0.5, v.slow().mean(HEADS) <= 0.25),
            each > random(v.by_seed("slow_heads").mean("layer")).max("weights"),
        ],
    ),
    "P5": of_seeds(
        *(ROPE, "rotation_{}", lambda v: v.by_seed("closed_form_r_of_prompts").mean("prompt")),
        *(lambda v: v.by_seed("closed_form_r_of_prompts"), lambda v, each: [each >= 0.9]),
    ),
    "P6": Claim(
        *(
            ROPE,
            "perturbation_{}",
            lambda v: (
                100 * np.expm1(v("judged_log_perplexity", **MOVED) - v("judged_plain", **MOVED))
            ),
        ),
        rule=lambda v, n: [n <= 2],
    ),
    "P7": of_seeds(
        *(
            ROPE,
            "extrapolation_{}",
            lambda v: v.outputs("lm_infinite").mean("layer"),
            lambda v: v.outputs("lm_infinite"),
        ),
        lambda v, each: [
            *(v.outputs("plain").mean("layer") > 0, each <= 0.5 * v.outputs("plain").mean("layer")),
            v.perplexity("lm_infinite") < v.perplexity("plain"),
        ],
        measurable=lambda v: (
            isinstance(attempt(v, "kl"), xr.DataArray)
            or v("tokens", figure="fits_{}") == v("training_tokens", figure="fits_{}")
        ),
    ),
}


def outcome(claim: Claim, values: Values, number: Any, tests: list[Difference]) -> str:
    """What the rule comes to before Holm's correction; its differences are added to `tests`."""
    if claim.measurable is not None and not claim.measurable(values):
        return UNMEASURABLE
    if isinstance(number, Missing) or (
        claim.measurable is None and values.row["outcome"] == UNMEASURABLE
    ):
        raise number if isinstance(number, Missing) else Missing("reason why it is not measurable")
    parts = claim.rule(values, number)
    tests += [part for part in parts if isinstance(part, Difference)]
    states = [
        part.state
        if isinstance(part, Difference)
        else part
        if isinstance(part, Missing)
        else bool(np.all(part))
        for part in parts
    ]
    if False in states or "fails" in states:
        return "fails"
    for missing in (state for state in states if isinstance(state, Missing)):
        raise missing
    return "undecided" if "undecided" in states else "holds"


def recomputed(claim: Claim, values: Values) -> tuple[dict[str, Any], list[Difference]]:
    """The number, its spread and the outcome, as far as they are printed, and the differences
    behind the outcome.
    """
    tests: list[Difference] = []
    number = attempt(
        lambda: float(claim.number(values) if claim.number else claim.units(values).mean())
    )
    spread = (
        attempt(lambda: float(np.std(claim.units(values), ddof=1)))
        if values.row["spread"]
        else None
    )
    found = {
        "ours": number,
        "spread": spread,
        "outcome": attempt(outcome, claim, values, number, tests),
    }
    return {name: value for name, value in found.items() if values.row[name]}, tests


def correct(made: Sequence[tuple[dict[str, Any], list[Difference]]]) -> None:
    """Rows that decide on one claim together: those that hold by tests have to hold after Holm's
    correction over all that test.
    """
    tested, adjusted = (
        sorted(
            (max(each.p for each in tests), place) for place, (_, tests) in enumerate(made) if tests
        ),
        0.0,
    )
    for rank, (p, place) in enumerate(tested):
        adjusted = max(adjusted, p * (len(tested) - rank))
        if made[place][0]["outcome"] == "holds" and adjusted > LEVEL:
            made[place][0]["outcome"] = "undecided"


def same(printed: str, value: float | str) -> bool:
    """Whether a value has the three digits that are printed, or is not below a bound that is."""
    if isinstance(value, str):
        return printed == value
    if printed.startswith("≥ "):
        return value >= float(printed[2:])
    digit = 10.0 ** (math.floor(math.log10(abs(float(printed)))) - 2) if float(printed) else 1e-6
    return abs(float(printed) - value) <= 0.501 * digit


def compared(column: str, row: dict[str, str], found: dict[str, Any]) -> dict[str, str]:
    """A line: what is printed, what came out here, whether that is the same, and what the CSVs
    lack.
    """
    known = {name: value for name, value in found.items() if not isinstance(value, Missing)}
    lacking = dict.fromkeys(str(value) for value in found.values() if isinstance(value, Missing))
    result = "agrees" if not lacking else "agrees in part" if known else "not recomputed"
    if not all(same(row[name], value) for name, value in known.items()):
        result = "differs"
    again = [f"{value:.3g}" if isinstance(value, float) else value for value in known.values()]
    wanted = ", ".join(NAMES[name] for name in found if name not in known)
    return {
        **{
            "claim": row["claim"],
            "model": column,
            "checkpoint": row["checkpoint"],
            "result": result,
        },
        **{
            "printed": ", ".join(row[name] for name in found),
            "recomputed": ", ".join(again) or "–",
        },
        "missing": f"no {' and '.join(lacking)} for the {wanted}" if lacking else "",
    }


def table(figures: Path) -> list[dict[str, str]]:
    """Every claim on every checkpoint that figures/README.md shows: where some can be judged, on
    those.
    """
    numbers = cache(lambda directory: pd.read_csv(directory / "numbers.csv.gz", dtype=str))
    lines: list[dict[str, str]] = []
    for (name, claim), (column, model) in product(CLAIMS.items(), DIRECTORIES.items()):
        verdicts = f"{PAPERS[name[0]]}/verdicts.csv"
        every = [
            (file.parent, row)
            for file in sorted(figures.glob(f"{model}/*/{verdicts}" if model else verdicts))
            for row in pd.read_csv(file, dtype=str, keep_default_na=False).to_dict("records")
            if row["claim"] == name and row["checkpoint"] in ([model] if model else claim.toys)
        ]
        judged = [each for each in every if each[1]["outcome"] != UNMEASURABLE] or every
        made = [
            recomputed(claim, Values(numbers(directory), row, claim.figure))
            for directory, row in judged
        ]
        if not model:
            correct(made)
        lines += [
            compared(column, row, found) for (_, row), (found, _) in zip(judged, made, strict=True)
        ]
    return lines


def main(figures: Path) -> int:
    """Print every line, and how many there are of each result; 1 where one differs."""
    lines = table(figures)
    counts = Counter(line["result"] for line in lines)
    every = [LINE.format(**line).rstrip() for line in lines]
    every += [", ".join(f"{count} {result}" for result, count in counts.most_common())]
    sys.stdout.write("\n".join(every) + "\n")
    return int(counts["differs"] > 0)


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:2] or ["figures"])))
