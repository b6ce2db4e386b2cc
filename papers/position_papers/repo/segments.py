"""Whether learned positions follow the structure of a prompt (RePo app.

D, fig. 8): R8, on few-shot examples.

    variance_between, boundary_f1 of every learned head (plugins.segments.segments), each against shuffled
    edges of the same prompt
    outlying   |z - median of the head's positions| > 5 times their median absolute deviation: share of punctuation and function words

Heads that share a key share its positions: such a row of positions is counted once. A checkpoint of
our tasks that knows no text is left out. Prompts are sentences with labels in the
checkpoint's own tokens, as many as fit. The paper draws single heads (fig. 8b), so the claim is
judged by how many heads follow the examples, beside random weights; the mean over heads is a part
of its own.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from position_papers.kit import (
    Above,
    All,
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
    beside_null,
    each,
    evidence,
    groups_of,
    in_words,
    joined,
    mean_of,
    over_seeds,
    paired_difference,
    why_not,
)
from position_papers.repo.checkpoints import OLMO, learns_from_hidden_states
from position_papers.repo.options import Options
from repo_interp.analysis.analyze import analyze
from repo_interp.errors import InputError
from repo_interp.measures.labels import with_attrs
from repo_interp.measures.positions import Positions
from repo_interp.plugins.segments.segments import Segments
from repo_interp.plugins.segments.view import segment_positions, segment_scores
from repo_interp.tasks import Prompt, few_shot_prompts

FEWEST = 5
"""Examples of a few-shot prompt."""
SHUFFLED = "shuffled segment edges"
SCORES = {
    "variance_between": Above(
        "the share of position variance between segments, mean over the learned heads,", (SHUFFLED,)
    ),
    "boundary_f1": Above(
        "the boundary F1 of position jumps, mean over the learned heads,", (SHUFFLED,)
    ),
}
"""The scores of `plugins.segments.segments` that count, and what is asked of each."""
BESIDE_TWINS = {
    "variance_between": "the share of position variance between segments, above that of "
    "shuffled edges,",
    "boundary_f1": "the boundary F1 of position jumps, above that of shuffled edges,",
}
"""The same scores, as they are set beside random weights, whose positions may lie above shuffled
edges, too: they follow the tokens.
"""
FOLLOWS = 0.05
"""Share of shuffles that do as well, mean over prompts, up to which a head is said to follow its
segments.
"""
FOLLOWING = BeyondNull(
    "the number of rows of positions whose variance between examples beats 95 % of the "
    "shuffles, mean over prompts,",
    0.95,
)
R8 = Claim(
    "R8",
    "positions of some heads align with the examples of a few-shot prompt",
    "RePo fig. 8b",
    "figure",
    FOLLOWING,
    shows_control=True,
)
R8_MEAN = Claim(
    "R8",
    "positions align with the examples of a few-shot prompt, mean over heads, more than with "
    "random weights",
    "RePo fig. 8",
    "figure",
    All(*SCORES.values(), *(BeyondNull(quantity, 0.95) for quantity in BESIDE_TWINS.values())),
    "mean over heads",
)
OUTLYING = (
    "the share of punctuation and function words among outlying positions less that "
    "among all tokens, over prompts,"
)
R8_OUTLYING = Claim(
    "R8",
    "outlying positions belong to punctuation and function words",
    "RePo fig. 8c",
    "examples: . and such",
    Significant(OUTLYING),
    "outlying positions",
)
FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the this that these those such some any all both each every no not nor and or but if "
        "so as than then of in on at by for from to with into onto over under about after before "
        "between through during without within is are was were be been being am do does did has "
        "have had will would can could may might must shall should i you he she it we they me him "
        "her us them my your his its our their who whom whose which what when where why how there "
        "here also too very just only",
    )
)
FARTHEST = 5.0
"""Median absolute deviations of a head's positions; about 3.4 standard deviations of a normal
sample.
"""
EXAMPLES = "examples"
"""The kind of segment, as `plugins.segments.segments` knows it."""
NAMES = [
    *(name for score in SCORES for name in (score, f"{score}_shuffled")),
    "variance_between_chance",
]
"""The variables of `plugins.segments.segments` that are read."""


# ---- measured ------------------------------------------------------------------------------------


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> xr.DataTree | None:
    """What `_scores` measures of one checkpoint; None where it can be given no prompts."""
    (subject,) = subjects
    prompts = prompts_for(subject, options)
    if not prompts:
        return None
    tree = subject.measured(
        cache, _scores, options, prompts, prompts=options.prompts, controls=options.controls
    )
    tree.attrs = {
        "checkpoint": subject.name,
        "stem": subject.stem,
        "training_length": subject.training_length,
    }
    return tree


def prompts_for(subject: Subject, options: Options) -> list[Prompt]:
    """Few-shot prompts with as many examples as fit; empty where fewer than five do."""
    length = subject.training_length

    def few_shot(shots: int) -> list[Prompt]:
        try:
            return few_shot_prompts(
                subject.tokenizer, None, length, options.prompts, shots, options.seed
            )
        except InputError:
            # the examples are longer than what the checkpoint was trained on, or more than there
            # are
            return []

    fitting = bisect_left(range(FEWEST, length), True, key=lambda shots: not few_shot(shots))
    return few_shot(FEWEST + fitting - 1) if fitting else []


def _scores(subject: Subject, options: Options, prompts: Sequence[Prompt]) -> xr.DataTree:
    """The groups `segments`, of the trained weights; `positions`, of the first prompt; and
    `scores`: those that count, by weights, with what `_outlying` gives.
    """
    segments: Any = Segments(kinds=(EXAMPLES,), seed=options.seed)
    by_weights, positions = {}, xr.Dataset()
    for name, bridge in subject.bridges(options):
        measures = [Positions(), segments] if name == "trained" else [segments]
        run = analyze(bridge, prompts, measures, subject.learned, batch_size=options.batch_size)
        by_weights[name] = run["segments"].to_dataset()
        if name == "trained":
            positions = run["positions"].to_dataset()
    scores = joined(
        {name: each[NAMES].sel(kind=EXAMPLES, drop=True) for name, each in by_weights.items()},
        "weights",
    )
    return xr.DataTree.from_dict(
        {
            "segments": by_weights["trained"],
            "positions": positions.isel(prompt=slice(1)),
            "scores": scores.assign(
                _outlying(positions["position"], prompts, subject.tokenizer)
            ).assign(first_of_row=first_of_row(positions["position"])),
        }
    )


def first_of_row(position: xr.DataArray) -> xr.DataArray:
    """Which heads are the first of those of their layer with the same positions, as [layer, head],
    from `position [prompt, layer, head, token]`.
    """
    z = position.transpose("layer", "head", "prompt", "token")
    first = [
        [
            not any(np.array_equal(own, other, equal_nan=True) for other in heads[:place])
            for place, own in enumerate(heads)
        ]
        for heads in z.values
    ]
    axes = {axis: z[axis].values for axis in ("layer", "head")}
    return with_attrs(
        xr.DataArray(first, axes, ("layer", "head")), "first head of a row of positions", "1"
    )


def _outlying(position: xr.DataArray, prompts: Sequence[Prompt], tokenizer: Any) -> xr.Dataset:
    """`function_words [prompt, tokens]`: the share of punctuation and function words among a
    prompt's outlying positions, of all learned heads, and among all its tokens; `negative [layer,
    head]`, the share of positions below 0.
    """
    z = position.transpose("prompt", "layer", "head", "token")
    away = abs(z - z.median("token"))
    outlying = (away > FARTHEST * away.median("token")).values
    shares = np.full((len(prompts), 2), np.nan)
    for row, prompt in enumerate(prompts):
        words = [tokenizer.decode([token]).strip().lower() for token in prompt.tokens]
        plain = np.array(
            [word in FUNCTION_WORDS or not any(map(str.isalnum, word)) for word in words]
        )
        count = outlying[row, ..., : len(plain)].sum((0, 1))
        shares[row] = (plain @ count) / count.sum() if count.any() else np.nan, plain.mean()
    words = xr.DataArray(
        shares, {"prompt": z["prompt"], "tokens": ["outlying", "all"]}, ("prompt", "tokens")
    )
    negative = (z < 0).sum(("prompt", "token")) / z.count(("prompt", "token"))
    return xr.Dataset(
        {
            "function_words": with_attrs(words, "share of punctuation and function words", "1"),
            "negative": with_attrs(negative, "share of positions below 0", "1"),
        }
    )


# ---- tabulated --------------------------------------------------------------------------------------


def tabulate(tree: xr.DataTree) -> Iterator[Evidence]:
    """R8 by heads, by what lies apart, and its mean over heads."""
    data = tree["scores"].to_dataset().assign_attrs(tree.attrs)
    yield _by_heads(data)
    yield _apart(data)
    yield _aligned(data)


def _apart(data: xr.Dataset) -> Evidence:
    """R8 (outlying positions), prompt by prompt."""
    shares = data["function_words"].dropna("prompt")
    apart, every = (shares.sel(tokens=tokens).values for tokens in ("outlying", "all"))
    more = paired_difference(apart, every) if len(apart) else None
    return evidence(
        R8_OUTLYING,
        data.attrs["checkpoint"],
        "share of punctuation and function words among outlying positions",
        {OUTLYING: more},
        **mean_of(apart, "prompts"),
        control=f"all tokens {every.mean():.3f}" if len(apart) else "",
        note=f"negative positions in {int((data['negative'] > 0).sum())} of "
        f"{data['negative'].size} heads",
    )


def _by_heads(data: xr.Dataset) -> Evidence:
    """R8: how many rows of positions follow the examples, beside as many of every random-weight
    control.
    """
    chance, first = _chance(data), data["first_of_row"].astype(bool)
    counts = ((chance <= FOLLOWS) & first).sum(("layer", "head")).transpose("weights").values
    observed = Observed(float(counts[0]), counts[1:].astype(float))
    layer, head = _best_head(chance)
    return evidence(
        R8,
        data.attrs["checkpoint"],
        f"rows of positions of {int(first.sum())} that follow the examples",
        {FOLLOWING.quantity: observed},
        observed.value,
        n=data.sizes["prompt"],
        control=f"random weights {', '.join(map(str, np.unique(counts[1:])))}",
        note=f"{beside_null(observed)}; layer {layer}, head {head} follows them most: "
        f"{100 * float(chance.sel(weights='trained').min()):.1f} % of the shuffles do as well",
    )


def _chance(data: xr.Dataset) -> xr.DataArray:
    """Share of shuffles that do as well as a head [weights, layer, head], mean over prompts."""
    # a constant head follows nothing
    return data["variance_between_chance"].mean("prompt", skipna=False).fillna(1.0)


def _best_head(chance: xr.DataArray) -> tuple[int, int]:
    """Layer and head of the trained weights that the fewest shuffles reach."""
    best = chance.sel(weights="trained").transpose("layer", "head")
    row, column = np.unravel_index(int(best.values.argmin()), best.shape)
    return int(best["layer"].values[row]), int(best["head"].values[column])


def _aligned(data: xr.Dataset) -> Evidence:
    """R8 (mean over heads): scores beside those of shuffled edges, over prompts; and how far above
    them beside random weights.
    """
    trained = data.sel(weights="trained")
    means = {name: trained[name].mean(("layer", "head")).values for name in NAMES[:-1]}
    above = {score: paired_difference(means[score], means[f"{score}_shuffled"]) for score in SCORES}
    own = means["variance_between"]
    excess = {
        score: (data[score] - data[f"{score}_shuffled"]).mean(("prompt", "layer", "head")).values
        for score in SCORES
    }
    beside = {score: Observed(float(each[0]), each[1:]) for score, each in excess.items()}
    return evidence(
        R8_MEAN,
        data.attrs["checkpoint"],
        "share of position variance between examples, mean over learned heads",
        {rule.quantity: {SHUFFLED: above[score]} for score, rule in SCORES.items()}
        | {quantity: beside[score] for score, quantity in BESIDE_TWINS.items()},
        **mean_of(own, "prompts"),
        control=f"shuffled edges {means['variance_between_shuffled'].mean():.3f}",
        note=[
            f"{name}: {in_words({'shuffled edges': above[score]}, 'above', '')}; beside "
            f"random weights {beside_null(beside[score])}"
            for score, name in (("variance_between", "variance"), ("boundary_f1", "boundary F1"))
        ],
    )


# ---- drawn ---------------------------------------------------------------------------------------


def draw(tree: xr.DataTree) -> Iterator[Drawing]:
    """Fig. 8: all heads, and the one that follows the examples most."""
    stem = tree.attrs["stem"]
    segments, positions = (tree[name].to_dataset() for name in ("segments", "positions"))
    texts = (
        f"{tree.attrs['checkpoint']}: positions and the examples of few-shot prompts of "
        f"up to {tree.attrs['training_length']} tokens"
    )
    yield Drawing(
        f"segments_{stem}",
        partial(segment_scores, groups_of(tree, segments=segments.drop_vars("segment")), EXAMPLES),
        f"{texts}. Every learned head, mean over prompts, against shuffled edges (RePo fig. "
        "8, measured).",
        tree["scores"].to_dataset(),
    )
    layer, head = _best_head(_chance(tree["scores"].to_dataset()))
    of_head = {"layer": [layer], "head": [head]}
    run = groups_of(
        tree, segments=segments.isel(prompt=[0]).sel(of_head), positions=positions.sel(of_head)
    )
    yield Drawing(
        f"segments_best_head_{stem}",
        partial(segment_positions, run, layer, head, 0, EXAMPLES),
        f"{texts}: the first prompt, and the head that the fewest shuffled edges "
        "reach, over all prompts (RePo fig. 8b).",
        positions[["position"]].sel(of_head),
    )


SEGMENTS = over_seeds(
    Experiment(
        "segments",
        (R8, R8_OUTLYING, R8_MEAN),
        Needs(
            each(
                lambda subject: (
                    learns_from_hidden_states(subject) and subject.kind in ("language", "text")
                )
            ),
            "no checkpoint with learned positions that knows text was given, or its training "
            "length is too short for five examples",
            ("language/repo",),
            why_not=why_not,
        ),
        measure,
        tabulate,
        draw,
        OLMO,
    ),
    lambda tree: xr.Dataset(),
)
