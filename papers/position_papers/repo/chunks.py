"""How learned positions run in chunks (RePo sec. 5.2, fig. 3): R6.

Patterns of chunks of 16 tokens on prompts of the training length, with a grid of other chunk sizes
and tolerances, and on twins with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from position_papers.kit import (
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
    Significant,
    Subject,
    Values,
    beside_null,
    each,
    evidence,
    joined,
    over_seeds,
    paired_difference,
    why_not,
)
from position_papers.repo.checkpoints import LEARNED, NO_LEARNED, OLMO, learns_long_positions
from position_papers.repo.options import Options
from position_papers.repo.pattern_figures import stacked_shares
from repo_interp.analysis.analyze import analyze
from repo_interp.measures.labels import with_attrs
from repo_interp.plots.views.patterns import pattern_sensitivity
from repo_interp.run import make_run

PATTERNS = ("constant", "mono", "hybrid")
SHARE = {pattern: f"the share of {pattern} chunks" for pattern in ("mono", "hybrid")}
ABOVE_HALF = "the share of hybrid chunks less one half, over prompts,"
ABOVE_MONO = (
    "the share of constant chunks less that of mono ones (chunks of 16 tokens, "
    "epsilon 0.2), over prompts,"
)
RARE = 0.1
BESIDE_TWINS = f"{SHARE['hybrid']}, beside random weights,"


def _shares(values: Values) -> str:
    """The shares beside the paper's."""
    mono = values[SHARE["mono"]]
    hybrid, constant = 0.5 + values[ABOVE_HALF].margin, mono + values[ABOVE_MONO].margin
    return (
        f"hybrid {100 * hybrid:.3g} %, constant {100 * constant:.2g} % where the paper has 22, "
        f"mono {100 * mono:.2g} % where it has 4"
    )


R6 = Claim(
    "R6",
    "chunks of positions: hybrid dominates, mono is rare, constant more frequent than mono",
    "RePo fig. 3",
    "constant 22 %, mono 4 %",
    All(Significant(ABOVE_HALF), AtMost(SHARE["mono"], RARE), Significant(ABOVE_MONO)),
    also=("beyond random weights",),
    says=_shares,
)
CELLS = (
    "the share of the pairs of chunk size and epsilon with which hybrid dominates, mono "
    "is rare, constant more frequent than mono"
)
R6_CELLS = Claim(
    "R6",
    "other chunk sizes and tolerances give the same conclusion",
    "RePo footnote 5",
    "all",
    AtLeast(CELLS, 1),
    "other chunk sizes and tolerances",
)
R6_NULL = R6.beyond(
    "hybrid dominates more than it does with random weights", BeyondNull(BESIDE_TWINS, 0.95)
)


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.Dataset:
    """The measure `patterns` of one checkpoint, and `random_share [weights, pattern]` of controls;
    attributes: name, learned layers.
    """
    (subject,) = subjects
    data = subject.measured(
        cache,
        _patterns,
        options,
        prompts=options.prompts,
        controls=options.controls,
        control_prompts=options.control_prompts,
    )
    return data.assign_attrs(
        checkpoint=subject.name,
        stem=subject.stem,
        training_length=subject.training_length,
        learned=list(subject.learned),
    )


def _patterns(subject: Subject, options: Options) -> xr.Dataset:
    prompts = subject.prompts(subject.training_length, options.prompts, options.seed)
    counts = {"trained": options.prompts}
    trained, *twins = (
        analyze(
            bridge,
            prompts[: counts.get(weights, options.control_prompts)],
            ("patterns",),
            batch_size=options.batch_size,
        )["patterns"].to_dataset()
        for weights, bridge in subject.bridges(options)
    )
    random = xr.concat([twin["pattern_share_all"] for twin in twins], dim="weights")
    return trained.assign(random_share=with_attrs(random, "the same with random weights", "1"))


def tabulate(data: xr.Dataset) -> Iterator[Evidence]:
    """R6 on all learned heads together, with other chunk sizes and tolerances, and beside
    random-weight controls.
    """
    share = {pattern: float(data["pattern_share_all"].sel(pattern=pattern)) for pattern in PATTERNS}
    by_prompt = _by_prompt(data)
    hybrid, constant, mono = (
        by_prompt.sel(pattern=pattern).values for pattern in ("hybrid", "constant", "mono")
    )
    agreement = same_as_claimed(
        data["sensitivity"]
        .sel(pattern=list(PATTERNS))
        .transpose(..., "pattern")
        .values.reshape(-1, 3)
    )
    random = data["random_share"].sel(pattern=list(PATTERNS)).transpose("weights", "pattern").values
    judged = evidence(
        R6,
        data.attrs["checkpoint"],
        "share of hybrid chunks, per cent",
        {
            ABOVE_HALF: paired_difference(hybrid, np.full_like(hybrid, 0.5)),
            ABOVE_MONO: paired_difference(constant, mono),
            SHARE["mono"]: share["mono"],
        },
        100 * share["hybrid"],
        100 * float(hybrid.std(ddof=1)),
        "prompts",
        data.sizes["prompt"],
        "random weights (mean, lowest to highest): "
        + ", ".join(
            f"{pattern} {100 * of.mean():.0f} % ({100 * of.min():.0f} to {100 * of.max():.0f})"
            for pattern, of in zip(PATTERNS, random.T, strict=True)
        ),
        f"constant {100 * share['constant']:.2g} %, mono {100 * share['mono']:.2g} %",
    )
    yield judged
    yield evidence(
        R6_CELLS,
        data.attrs["checkpoint"],
        CELLS,
        {CELLS: agreement.mean()},
        agreement.mean(),
        n=data.sizes["prompt"],
        note=f"{int(agreement.sum())} of {len(agreement)}, over prompts together",
    )
    null = random[:, PATTERNS.index("hybrid")]
    values = {BESIDE_TWINS: Observed(share["hybrid"], null)}
    yield judged.on(R6_NULL, values, beside_null(Observed(100 * share["hybrid"], 100 * null)))


def _by_prompt(data: xr.Dataset) -> xr.DataArray:
    """The shares [prompt, pattern] of the chunks of learned layers."""
    labels = data["chunk_pattern"].sel(layer=data.attrs["learned"])
    axes = ("layer", "head", "chunk")
    shares = {
        pattern: (labels == place).sum(axes) / (labels >= 0).sum(axes)
        for place, pattern in enumerate(PATTERNS)
    }
    return with_attrs(joined(shares, "pattern"), "share of a prompt's chunks", "1")


def units(data: xr.Dataset) -> xr.Dataset:
    """The shares of all prompts together, of each, of random weights, and with other chunk sizes
    and tolerances.
    """
    return data[["pattern_share_all", "sensitivity", "random_share"]].assign(
        share_by_prompt=_by_prompt(data)
    )


def same_as_claimed(shares: Float[np.ndarray, "cell pattern"]) -> Bool[np.ndarray, " cell"]:
    """For each cell of a grid of (constant, mono, hybrid) shares, whether they are in the order of
    R6, whatever their errors.
    """
    constant, mono, hybrid = shares.T
    return (hybrid > 0.5) & (mono <= RARE) & (constant > mono)


def draw(data: xr.Dataset) -> Iterator[Drawing]:
    """Fig. 3, and its sensitivity (footnote 5)."""
    run = make_run({"patterns": data.drop_vars("random_share")}, {})
    name = data.attrs["checkpoint"]
    prompts = f"{data.sizes['prompt']} prompts of {data.attrs['training_length']} tokens"
    yield Drawing(
        f"patterns_{data.attrs['stem']}",
        partial(stacked_shares, run),
        f"{name}: patterns of chunks (RePo fig. 3), {prompts}.",
        data.drop_vars("chunk_pattern"),
    )
    yield Drawing(
        f"pattern_sensitivity_{data.attrs['stem']}",
        partial(pattern_sensitivity, run),
        f"{name}: shares of constant and hybrid chunks in learned layers with other chunk sizes "
        f"and tolerances ε (RePo footnote 5), {prompts}; framed: the paper's.",
        data[["sensitivity"]],
    )


CHUNKS = over_seeds(
    Experiment(
        "chunks of positions",
        (R6, R6_CELLS, R6_NULL),
        Needs(each(learns_long_positions), NO_LEARNED, LEARNED, why_not=why_not),
        measure,
        tabulate,
        draw,
        OLMO,
    ),
    units,
)
