"""Whether learned positions follow the structure of a prompt (RePo app. D, fig. 8): R8, on few-shot examples and on lines of code.

    variance_between, boundary_f1 of every learned head (measures.segments), each against shuffled edges of the same prompt

A checkpoint of our tasks that knows no text is left out. Few-shot prompts are sentences with labels in the checkpoint's own tokens: five of
them and then meaningless sentences, or - as the paper's prompts are - as many as fit. Code is held-out text of its corpus, where it was
trained on one; the paper has no such prompts. The paper draws single heads (fig. 8b), so the claim is judged by how many heads follow the
examples, beside random weights; the mean over all heads is a part of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from position_papers.kit.cache import Cache
from position_papers.kit.claims import Claim, Verdict, verdict
from position_papers.kit.differences import paired_difference
from position_papers.kit.experiment import Drawing, Experiment, Needs, each
from position_papers.kit.learned_positions import why_not
from position_papers.kit.rules import Above, All, BeyondNull, Observed, beside_null
from position_papers.kit.subjects import Subject
from position_papers.repo.checkpoints import OLMO
from position_papers.repo.options import Options
from repo_interp.analysis.analyze import analyze
from repo_interp.errors import InputError
from repo_interp.measures.labels import described
from repo_interp.measures.segments import Segments
from repo_interp.models.load import load
from repo_interp.plots.marks.drawing import legend_below
from repo_interp.plots.style import PAGE_WIDTH, PaperFigure, paper_figure, scheme_colour, style
from repo_interp.plots.views.positions import draw_positions
from repo_interp.plots.views.segments import SHADE, shade_segments
from repo_interp.tasks import Prompt, few_shot_prompts

SHOTS = 5
SHUFFLED = "shuffled segment edges"
SCORES = {
    "variance_between": Above("the share of position variance between segments, mean over the learned heads,", (SHUFFLED,)),
    "boundary_f1": Above("the boundary F1 of position jumps, mean over the learned heads,", (SHUFFLED,)),
}
"""The scores of `measures.segments` that count, and what is asked of each."""
BESIDE_TWINS = {
    "variance_between": "the share of position variance between segments, above that of shuffled edges,",
    "boundary_f1": "the boundary F1 of position jumps, above that of shuffled edges,",
}
"""The same scores, as they are set beside random weights, whose positions may lie above shuffled edges, too: they follow the tokens."""
BEYOND_TWINS = "beyond random weights"
FOLLOWS = 0.05
"""Share of shuffles that do as well, mean over prompts, up to which a head is said to follow its segments."""
FOLLOWING = BeyondNull("the number of heads whose variance between examples beats 95 % of the shuffles, mean over prompts,", 0.95)
R8 = Claim(
    "R8",
    "positions of some heads align with the examples of a few-shot prompt",
    "RePo fig. 8b",
    "figure",
    FOLLOWING,
)
R8_MEAN = Claim(
    "R8",
    "positions align with the examples of a few-shot prompt, mean over heads",
    "RePo fig. 8",
    "figure",
    All(*SCORES.values()),
    part="mean over heads",
    also=(f"mean over heads, {BEYOND_TWINS}",),
)
R8_CODE = Claim(
    "R8",
    "positions align with the lines of code, mean over heads",
    "ours",
    "none",
    R8_MEAN.rule,
    part="lines of code",
    also=(f"lines of code, {BEYOND_TWINS}",),
)
R8_THROUGHOUT = Claim(
    "R8",
    R8_MEAN.statement + ", of prompts that have nothing else",
    R8_MEAN.source,
    R8_MEAN.paper_number,
    R8_MEAN.rule,
    part="examples throughout",
    also=(f"examples throughout, {BEYOND_TWINS}",),
)


def _beyond_twins(claim: Claim) -> Claim:
    rules = (BeyondNull(quantity, 0.95) for quantity in BESIDE_TWINS.values())
    return Claim(
        "R8",
        f"{claim.statement}, more than with random weights",
        R8_MEAN.source,
        "none",
        All(R8_MEAN.rule, *rules),
        claim.also[0],
    )


EXAMPLES, THROUGHOUT, LINES = "examples", "examples throughout", "lines"
CLAIMS: Mapping[str, Claim] = {EXAMPLES: R8_MEAN, LINES: R8_CODE, THROUGHOUT: R8_THROUGHOUT}
"""By kind of prompt."""
BESIDE_NULL = {claim: _beyond_twins(claim) for claim in CLAIMS.values()}
SEGMENTS_OF = {EXAMPLES: EXAMPLES, LINES: LINES, THROUGHOUT: EXAMPLES}
"""The kind of segment, as `measures.segments` knows it, by kind of prompt."""


# ---- measured -------------------------------------------------------------------------------------------------------


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> dict[str, xr.Dataset] | None:
    """What `_scores` measures of one checkpoint by kind of prompt; None where it can be given no prompts of any kind."""
    (subject,) = subjects
    by_kind = {}
    for kind in CLAIMS:
        prompts = segment_prompts(subject, kind, options)
        if prompts:
            depends = {"kind": kind, "prompts": options.prompts, "controls": options.controls}
            data = subject.measured(cache, _scores, options, SEGMENTS_OF[kind], prompts, **depends)
            by_kind[kind] = data.assign_attrs(checkpoint=subject.name, stem=subject.stem, training_length=subject.training_length)
    return by_kind or None


def segment_prompts(subject: Subject, kind: str, options: Options) -> list[Prompt]:
    """Prompts of a kind that `CLAIMS` has; empty where the checkpoint can be given none."""
    length = subject.training_length
    if kind == LINES:
        return subject.prompts(length, options.prompts, options.seed) if subject.kind == "language" else []

    def few_shot(shots: int) -> list[Prompt]:
        try:
            return few_shot_prompts(subject.tokenizer, None, length, options.prompts, shots, options.seed)
        except InputError:  # the examples are longer than what the checkpoint was trained on, or more than there are
            return []

    if kind == EXAMPLES:
        return few_shot(SHOTS)
    most = bisect_left(range(SHOTS + 1, length), True, key=lambda shots: not few_shot(shots)) + SHOTS
    return few_shot(most)


def _scores(subject: Subject, options: Options, kind: str, prompts: Sequence[Prompt]) -> xr.Dataset:
    """Scores [weights, prompt, layer, head], the segments of the first prompt, and its positions in the trained weights."""
    segments: Any = Segments(kinds=(kind,), seed=options.seed)
    by_weights = {}
    for name, bridge in subject.bridges(options):
        run = analyze(bridge, prompts, [segments], subject.learned, batch_size=options.batch_size)
        by_weights[name] = run["segments"].to_dataset().sel(kind=kind, drop=True).drop_vars("segment")
    scores = xr.concat(
        list(by_weights.values()),
        dim=xr.IndexVariable("weights", list(by_weights)),
        data_vars="all",
        join="exact",
        coords="minimal",
        compat="override",
    )
    first = analyze(load(subject.path, options.device), prompts[:1], ("positions", segments), subject.learned)
    positions = first["positions"].to_dataset()
    labels = first["segments"].to_dataset()["segment"].sel(kind=kind, drop=True).isel(prompt=0, drop=True)
    return scores.drop_attrs(deep=False).assign(
        example=described(
            positions["position"].isel(prompt=0, drop=True), "position of each token of the first prompt", "positions"
        ),
        example_segment=described(labels, "segment of each token of the first prompt, -1 for none", "1"),
    )


# ---- judged ---------------------------------------------------------------------------------------------------------


def judge(by_kind: Mapping[str, xr.Dataset]) -> Iterator[Verdict]:
    """R8 by heads where examples fill the prompt, as in the paper, and its means over heads by kind of prompt."""
    if THROUGHOUT in by_kind:
        yield _by_heads(by_kind[THROUGHOUT])
    for kind, data in by_kind.items():
        yield from _aligned(data, kind)


def _by_heads(data: xr.Dataset) -> Verdict:
    """R8: how many follow the examples, beside as many of every random-weight control."""
    chance = data["variance_between_chance"].mean("prompt", skipna=False).fillna(1.0)  # a constant head follows nothing
    counts = (chance <= FOLLOWS).sum(("layer", "head")).transpose("weights").values
    observed = Observed(float(counts[0]), counts[1:].astype(float))
    best = chance.sel(weights="trained").transpose("layer", "head")
    row, column = np.unravel_index(int(best.values.argmin()), best.shape)
    return verdict(
        R8,
        data.attrs["checkpoint"],
        f"heads of {best.size} that follow the examples",
        {FOLLOWING.quantity: observed},
        observed.value,
        n=data.sizes["prompt"],
        control=f"random weights {', '.join(map(str, counts[1:]))}",
        note=f"{beside_null(observed)}; layer {int(best['layer'].values[row])}, head {int(best['head'].values[column])} follows them most: "
        f"{100 * float(best.values[row, column]):.1f} % of the shuffles do as well",
    )


def _aligned(data: xr.Dataset, kind: str) -> Iterator[Verdict]:
    """R8 for one kind of prompt: scores beside those of shuffled edges, over prompts; and how far above them beside random weights."""
    trained = data.sel(weights="trained")
    means = {name: trained[name].mean(("layer", "head")).values for score in SCORES for name in (score, f"{score}_shuffled")}
    known = _known(trained)
    above = {score: paired_difference(means[score][known], means[f"{score}_shuffled"][known]) for score in SCORES}
    own = means["variance_between"][known]
    random = [
        ", ".join(f"{float(data[score].sel(weights=name).mean()):.3f}" for score in SCORES) for name in data["weights"].values[1:]
    ]
    chance = trained["variance_between_chance"].mean("prompt")
    judged = verdict(
        CLAIMS[kind],
        data.attrs["checkpoint"],
        f"share of position variance between {SEGMENTS_OF[kind]}, mean over learned heads",
        {rule.quantity: {SHUFFLED: above[score]} for score, rule in SCORES.items()},
        float(own.mean()),
        float(own.std(ddof=1)),
        "prompts",
        int(known.sum()),
        f"shuffled edges {means['variance_between_shuffled'][known].mean():.3f}; token index "
        f"{float(trained['variance_between_index'].mean()):.3f}; random weights (variance, F1): {'; '.join(random)}",
        f"above shuffled by {above['variance_between'].margin:+.3f} (standard error {above['variance_between'].standard_error:.2g}); "
        f"boundary F1 {means['boundary_f1'][known].mean():.3f}, above shuffled by {above['boundary_f1'].margin:+.3f} (standard error "
        f"{above['boundary_f1'].standard_error:.2g}); heads that beat 95 % of the shuffles on average: "
        f"{int((chance <= FOLLOWS).sum())} of {chance.size}",
    )
    yield judged
    excess = {score: data[score] - data[f"{score}_shuffled"] for score in SCORES}
    by_weights = {score: each.isel(prompt=known).mean(("prompt", "layer", "head")) for score, each in excess.items()}
    beside = {score: Observed(float(each[0]), each.values[1:]) for score, each in by_weights.items()}
    values = {BESIDE_TWINS[score]: observed for score, observed in beside.items()}
    yield judged.on(BESIDE_NULL[CLAIMS[kind]], values, *(f"{name} {beside_null(observed)}" for name, observed in values.items()))


def _known(trained: xr.Dataset) -> np.ndarray:
    """Which prompts have scores: one with fewer than two segments has no edges to follow."""
    names = [name for score in SCORES for name in (score, f"{score}_shuffled")]
    scores = np.array([trained[name].mean(("layer", "head")).values for name in names])
    return np.asarray(np.isfinite(scores).all(axis=0))


# ---- drawn ----------------------------------------------------------------------------------------------------------

_TEXTS = {
    EXAMPLES: f"few-shot prompts of {SHOTS} examples",
    LINES: "held-out code",
    THROUGHOUT: "few-shot prompts with as many examples as fit",
}


def draw(by_kind: Mapping[str, xr.Dataset]) -> Iterator[Drawing]:
    """Fig. 8."""
    for kind, data in by_kind.items():
        name, segments = data.attrs["checkpoint"], SEGMENTS_OF[kind]
        yield Drawing(
            f"segments_{kind.replace(' ', '_')}_{data.attrs['stem']}",
            _figure(data, name, segments),
            f"{name}: positions and {segments} of {_TEXTS[kind]}, up to {data.attrs['training_length']} tokens. Left: the head whose "
            f"variance lies most between {segments}, above shuffled edges (RePo fig. 8), on the first prompt; bands: {segments}. Right: "
            f"every learned head, mean over {int(_known(data.sel(weights='trained')).sum())} prompts, against shuffled edges; hollow: "
            "random weights.",
            data,
        )


def _figure(data: xr.Dataset, name: str, kind: str) -> PaperFigure:
    """The positions of the head that follows segments most on one prompt, and two panels with all learned heads."""
    trained = data.sel(weights="trained")
    excess = (trained["variance_between"] - trained["variance_between_shuffled"]).mean("prompt").transpose("layer", "head")
    row, column = np.unravel_index(int(np.nanargmax(excess.values)), excess.shape)
    layer, head = int(excess["layer"].values[row]), int(excess["head"].values[column])
    scheme = str(data["scheme"].values[row]) if "scheme" in data.coords else "repo"
    colour = scheme_colour(scheme)
    with style():
        figure = paper_figure(PAGE_WIDTH, 2.3)
        left, middle, right = figure.subplots(1, 3, width_ratios=(2.2, 1, 1))
        first = data[["example", "example_segment"]].dropna("token", subset=["example_segment"])  # others may be longer
        draw_positions(left, first["example"].sel(layer=layer, head=head).values, colour)
        shade_segments(left, first["example_segment"].values)
        left.set(xlabel="token", ylabel="position z (positions)")
        left.set_title(f"{name}, layer {layer}, head {head}")
        for ax, score, title in ((middle, "variance_between", f"Variance between {kind}"), (right, "boundary_f1", "Boundary F1")):
            _against(ax, data, score, colour)
            ax.set_title(title)
        middle.set_ylabel("measured")
        dot: Any = {"linestyle": "none", "marker": "o", "markersize": 3}
        legend_below(
            figure,
            [
                Patch(facecolor=SHADE, alpha=0.3, label=f"every second of the {kind}"),
                Line2D([], [], color=colour, label="a head", **dot),
                Line2D([], [], color="#5A5A5A", markerfacecolor="none", label="a head, random weights", **dot),
                Line2D([], [], color="#222222", linewidth=0.6, linestyle="--", label="as shuffled edges"),
            ],
        )
    return figure


def _against(ax: Axes, data: xr.Dataset, score: str, colour: str) -> None:
    """Every head's score over that of shuffled edges: trained weights in `colour`, twins grey."""
    means = data[[score, f"{score}_shuffled"]].mean("prompt")
    for weights in reversed(data["weights"].values.astype(str).tolist()):
        of_weights = means.sel(weights=weights)
        look = (
            {"color": colour, "markeredgewidth": 0} if weights == "trained" else {"color": "#5A5A5A", "markerfacecolor": "none"}
        )
        x, y = of_weights[f"{score}_shuffled"].values.ravel(), of_weights[score].values.ravel()
        ax.plot(x, y, "o", markersize=3, **{"markeredgewidth": 0.6, **look}, gid=f"heads {weights}")
    top = 1.08 * max(float(np.nanmax(means[name].values)) for name in means)
    ax.plot([0, top], [0, top], "--", color="#222222", linewidth=0.6)
    ax.set(xlim=(0, top), ylim=(0, top), xlabel="shuffled edges")
    ax.grid()


SEGMENTS = Experiment(
    "segments",
    (R8, *CLAIMS.values(), *BESIDE_NULL.values()),
    Needs(
        each(lambda subject: bool(subject.learned) and subject.kind in ("language", "text")),
        "no checkpoint with learned positions that knows text was given, or its training length is too short for five examples",
        ("language/repo",),
        otherwise_of={
            claim.label: "no language model with learned positions and a corpus was given"
            for claim in (R8_CODE, BESIDE_NULL[R8_CODE])
        },
        why_not=why_not,
    ),
    measure,
    judge,
    draw,
    OLMO,
)
