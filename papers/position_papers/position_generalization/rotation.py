"""Slow dominating components: rotary pairs with large, stable means that turn little, and what they alone make of the logits (Position
Generalization sec. 3.4, theorem 2, fig. 4, 9): P4, P5.

The rule of P5 was written after an exploratory run on one half-trained checkpoint had been seen. "A few" components are read as at most
a quarter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from position_papers.kit.cache import Cache
from position_papers.kit.claims import EVERY_SEED, Claim, Verdict, verdict
from position_papers.kit.experiment import Drawing, Experiment, Needs, each
from position_papers.kit.learned_positions import why_not
from position_papers.kit.rules import All, AtLeast, AtMost, BeyondNull, Observed, beside_null
from position_papers.kit.subjects import Subject
from position_papers.position_generalization.fits import of_heads
from position_papers.position_generalization.measured import (
    MODEL,
    SOURCE,
    TEXT_MODELS,
    Measured,
    Options,
    fits,
    is_language_model,
)
from repo_interp.plots.marks.drawing import counted
from repo_interp.plots.views.rotation import CHOICES, rotating_heads, rotation_grid

HEADS = "the share of heads that have slow dominating components"
COMPONENTS = "their share of the components of a head that has some"
HEADS_BESIDE_TWINS = "the share of heads"
CLOSED_FORM_R = "the mean r over the heads and prompts that have slow dominating components"

P4 = Claim(
    "P4",
    "a few slow dominating components with large, stable means",
    f"{SOURCE} sec. 3.4, fig. 4",
    "figure",
    All(AtLeast(HEADS, 0.5), AtMost(COMPONENTS, 0.25), BeyondNull(HEADS_BESIDE_TWINS)),
    also=(EVERY_SEED,),
)


CLOSE = AtLeast(CLOSED_FORM_R, 0.9)


def _closed_form(part: str = "") -> Claim:
    statement = "the closed form f + g from those components alone gives the logits"
    return Claim("P5", statement, f"{SOURCE} theorem 2", "0.959", CLOSE, part)


def _beyond_twins(claim: Claim) -> Claim:
    """The same claim, a question of ours to it: more than with random weights."""
    rule, part = All(claim.rule, BeyondNull(R_BESIDE_TWINS, 0.95)), "beyond random weights"
    return replace(claim, paper_number="none", rule=rule, part=part, also=())


R_BESIDE_TWINS = "this r"
P5 = {
    "rotation": replace(_closed_form(), also=("beyond random weights",)),
    "rotation_printed": _closed_form("g as printed"),
    "rotation_wider": _closed_form("more components"),
}
"""By group: g with the sign that the proof needs, as it is printed, and with components that are less prominent."""
P5_NULL = _beyond_twins(P5["rotation"])


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> Measured | None:
    """Rotary pairs of a checkpoint and its controls; None where no layer rotates."""
    (subject,) = subjects
    measured = fits(subject, options, cache)
    return measured if rotating_heads(measured.group("rotation")) else None


def judge(measured: Measured) -> Iterator[Verdict]:
    """The verdicts on P4, and on P5 where a head has slow dominating components."""
    rotation = measured.group("rotation")
    layers = sorted({layer for layer, _ in rotating_heads(rotation)})
    heads, components = _slow_dominating(rotation, layers)
    twins = [_slow_dominating(twin, layers)[0] for twin in measured.of_twins("rotation")]
    sequences = rotation.sizes["prompt"]
    yield verdict(
        P4,
        measured.name,
        "share of heads with slow dominating components",
        {HEADS: heads, COMPONENTS: components, HEADS_BESIDE_TWINS: Observed(heads, twins)},
        heads,
        n=sequences,
        control=f"random weights {np.mean(twins):.2g}",
        note=f"{100 * components:.2g} % of the components of a head that has some",
    )
    for group, claim in P5.items():
        closed, twins = measured.group(group)["closed_form_r"], _finite_means(measured.of_twins(group))
        by_prompt = closed.mean(("layer", "head")).values
        if not np.isfinite(by_prompt).any():
            continue
        r = float(np.nanmean(closed.values))
        judged = verdict(
            claim,
            measured.name,
            "mean r of logits and f + g",
            {CLOSED_FORM_R: r},
            r,
            float(np.nanstd(by_prompt, ddof=1)) if np.isfinite(by_prompt).sum() > 1 else None,
            "sequences",
            sequences,
            f"random weights {np.mean(twins):.3g}" if twins else "no twin with random weights has such components",
            f"heads {of_heads(closed)}; "
            f"{100 * float(np.isfinite(closed).mean()):.0f} % of heads and sequences have such components",
        )
        yield judged
        if group == "rotation":
            observed = Observed(r, twins)
            values = {R_BESIDE_TWINS: observed}
            few = f"{len(twins)} of {len(measured.twins)} twins with random weights have such components"
            why_not = few if 2 * len(twins) < len(measured.twins) or not twins else ""
            if why_not:
                yield replace(judged.without_a_number(why_not), claim=P5_NULL)
            else:
                yield judged.on(P5_NULL, values, beside_null(observed))


def draw(measured: Measured) -> Iterator[Drawing]:
    """Mean pairs of queries and keys in the plane (fig. 4, 9)."""
    sequences = measured.group("rotation").sizes["prompt"]
    caption = (
        f"{measured.name}: mean pairs of queries and keys in the plane (fig. 4, 9), over {counted(sequences, 'sequence')}. {CHOICES} "
        "Behind r: of how many sequences it is the mean, where not of all. Circle: deviation of the key; arc: rotation over the largest "
        "distance. All heads on one scale; insets are magnified."
    )
    yield Drawing(f"rotation_{measured.name}", rotation_grid(measured.run), caption, measured.group("rotation"))


def _finite_means(twins: Sequence[xr.Dataset]) -> list[float]:
    """The mean r of every control that has slow dominating components."""
    every = [twin["closed_form_r"].values for twin in twins]
    return [float(np.nanmean(values)) for values in every if np.isfinite(values).any()]


def _slow_dominating(rotation: xr.Dataset, layers: Sequence[int]) -> tuple[float, float]:
    """Share of heads with slow dominating components, and of the components of a head that has some (0 where none has)."""
    shares = (rotation["slow_dominating"].sel(layer=list(layers)) == 1).mean("component").values
    return float((shares > 0).mean()), float(shares[shares > 0].mean()) if (shares > 0).any() else 0.0


ROTATION = Experiment(
    "rotation",
    (P4, *P5.values(), P5_NULL),
    Needs(each(is_language_model), "needs a language model that rotates, such as language/rope", TEXT_MODELS, why_not=why_not),
    measure,
    judge,
    draw,
    MODEL,
)
