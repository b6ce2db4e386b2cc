"""Slow dominating components, which are rotary pairs with large, stable means that turn little, and
the logits that follow from them alone (Position Generalization sec. 3.4, theorem 2, fig. 4, 9): P4,
P5.

The rule of P5 was written after an exploratory run on one half-trained checkpoint. "A few"
components are read as at most a quarter, and "usually" as half. "Small" and "close to pi" have the
thresholds of the measure for slow dominating components (`Rotation`). The rotation of a component
is computed over the training length, as in the paper, or over a layer's window if that is shorter,
even for shorter sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import xarray as xr

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
    Subject,
    beside_null,
    each,
    evidence,
    groups_of,
    over_seeds,
    why_not,
)
from position_papers.position_generalization.fits import by_weights, of_heads, rotating_layers
from position_papers.position_generalization.measured import (
    MODEL,
    SOURCE,
    TEXT_MODELS,
    Measured,
    Options,
    fits,
    is_language_model,
)
from repo_interp.checkpoint_files.inspected import inspect_checkpoint
from repo_interp.measures.labels import with_attrs
from repo_interp.models.configuration import make_config
from repo_interp.plots.marks.drawing import counted
from repo_interp.plugins.rotation.view import CHOICES, rotating_heads, rotation_grid

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
)


STILL = "of slow, prominent and stable components that start near pi, the share that turn little"
P4_NEAR_PI = Claim(
    "P4",
    "components that start close to pi are mostly static",
    f"{SOURCE} sec. 3.4, observation 1",
    "figure",
    AtLeast(STILL, 0.5),
    "near pi",
)
R_BESIDE_TWINS = "this r"
_P5 = Claim(
    "P5",
    "the closed form f + g from those components alone gives the logits",
    f"{SOURCE} theorem 2",
    "r 0.959",
    AtLeast(CLOSED_FORM_R, 0.9),
    also=("beyond random weights",),
)
P5 = {"rotation": _P5, "rotation_printed": replace(_P5, part="g as printed", also=())}
"""By group: the claim for g with the sign that the proof needs, and for g as printed."""
P5_NULL = _P5.beyond(_P5.statement, BeyondNull(R_BESIDE_TWINS, 0.95))


def measure(subjects: Sequence[Subject], options: Options, cache: Cache) -> Measured | None:
    """Measure the rotary pairs of a checkpoint and its controls; None if no layer rotates."""
    (subject,) = subjects
    measured = fits(subject, options, cache)
    return measured if rotating_heads(measured.group("rotation")) else None


def tabulate(measured: Measured) -> Iterator[Evidence]:
    """The evidence on P4, on its part about components near pi, and on P5 if a head has slow
    dominating components.
    """
    rotation = measured.group("rotation")
    shares, *of_twins = (
        _slow_shares(measured, group) for group in (rotation, *measured.of_twins("rotation"))
    )
    heads, twins = float((shares > 0).mean()), [float((each > 0).mean()) for each in of_twins]
    components = float(shares.where(shares > 0).mean()) if heads else 0.0
    sequences = rotation.sizes["prompt"]
    yield evidence(
        P4,
        measured.name,
        "share of heads with slow dominating components",
        {HEADS: heads, COMPONENTS: components, HEADS_BESIDE_TWINS: Observed(heads, twins)},
        heads,
        n=sequences,
        control=f"random weights {np.mean(twins):.2g}",
        note=f"{100 * components:.2g} % of the components of a head that has some",
    )
    yield _still(measured)
    for group, claim in P5.items():
        closed = measured.group(group)["closed_form_r"]
        twins = _finite_means(measured.of_twins(group))
        by_prompt = closed.mean(("layer", "head")).values
        if not np.isfinite(by_prompt).any():
            continue
        r = float(np.nanmean(by_prompt))
        judged = evidence(
            claim,
            measured.name,
            "mean r of logits and f + g",
            {CLOSED_FORM_R: r},
            r,
            np.nanstd(by_prompt, ddof=1) if np.isfinite(by_prompt).sum() > 1 else None,
            "sequences",
            sequences,
            f"random weights {np.mean(twins):.3g}"
            if twins
            else "no twin with random weights has such components",
            f"heads {of_heads(closed)}; {100 * float(np.isfinite(closed).mean()):.0f} % of heads "
            "and sequences have such components",
        )
        yield judged
        if group == "rotation":
            observed = Observed(r, twins)
            values = {R_BESIDE_TWINS: observed}
            few = (
                f"{len(twins)} of {len(measured.twins)} twins with random weights have "
                "such components"
            )
            why_not = few if 2 * len(twins) < len(measured.twins) or not twins else ""
            if why_not:
                yield replace(judged.without_a_number(why_not), claim=P5_NULL)
            else:
                yield judged.on(P5_NULL, values, beside_null(observed))


def _still(measured: Measured) -> Evidence:
    """P4 (near pi): the share of components that turn little among those that start near pi."""
    groups = [
        _slow(measured, group)
        for group in (measured.group("rotation"), *measured.of_twins("rotation"))
    ]
    near = groups[0][1]
    share, *twins = (float(still.where(near).mean()) for _, near, still in groups)
    control = f"random weights {np.nanmean(twins):.2g}" if np.isfinite(twins).any() else ""
    none = "" if near.any() else "no component starts near pi"
    note = f"{int(near.sum())} components start near pi"
    what = "share of components near pi that turn little"
    prompts = measured.group("rotation").sizes["prompt"]
    return evidence(
        P4_NEAR_PI,
        measured.name,
        what,
        {STILL: share},
        share,
        n=prompts,
        control=control,
        note=note,
        unmeasurable=none,
    )


def draw(measured: Measured) -> Iterator[Drawing]:
    """Draw the mean pairs of queries and keys in the plane (fig. 4, 9)."""
    sequences = measured.group("rotation").sizes["prompt"]
    caption = (
        f"{measured.name}: mean pairs of queries and keys in the plane (fig. 4, 9), over "
        f"{counted(sequences, 'sequence')}. {CHOICES} Behind r: of how many sequences it is the "
        "mean, where not of all. Circle: deviation of the key; arc: rotation over the largest "
        "distance. Every head on its own scale."
    )
    yield Drawing(
        f"rotation_{measured.name}",
        partial(rotation_grid, groups_of(measured.run, rotation=measured.group("rotation"))),
        caption,
        measured.group("rotation"),
    )


def units(measured: Measured) -> xr.Dataset:
    """The numbers behind P4 and P5 for one seed."""
    rotation = measured.group("rotation")
    return xr.Dataset(
        {
            "slow_components": _slow_shares(measured, rotation),
            "slow_heads": by_weights(
                measured, "rotation", lambda group: (_slow_shares(measured, group) > 0).mean("head")
            ),
            "closed_form_r_of_prompts": rotation["closed_form_r"].mean(("layer", "head")),
        }
    )


def _finite_means(twins: Sequence[xr.Dataset]) -> list[float]:
    """The mean r for every control with slow dominating components."""
    every = [twin["closed_form_r"].values for twin in twins]
    return [float(np.nanmean(values)) for values in every if np.isfinite(values).any()]


def _slow_shares(measured: Measured, rotation: xr.Dataset) -> xr.DataArray:
    """The share of slow dominating components for every head in layers that rotate."""
    slow = _slow(measured, rotation)[0].sel(layer=rotating_layers(measured))
    return with_attrs(
        slow.mean("component").reset_coords(drop=True), "slow dominating components of a head", "1"
    )


def _slow(
    measured: Measured, rotation: xr.Dataset
) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
    """Masks of three kinds of components: slow dominating over the training length (the measure
    uses the length of its prompts); starting near pi, and otherwise slow dominating; and turning
    little.
    """
    subject = measured.subject
    chosen = rotation.attrs
    checkpoint = inspect_checkpoint(measured.subject.path, make_config)
    longer = []
    for layer in rotation["layer"].values:
        window = checkpoint.window(layer) or subject.training_length
        trained, turned = min(window, subject.training_length), min(window, measured.length)
        longer.append(1.0 if layer in subject.learned else trained / turned)
    turned = rotation["max_rotation"] * xr.DataArray(longer, dims="layer")
    products = rotation["query_norm"] * rotation["key_norm"]
    stable = rotation["key_deviation"] <= chosen["stability"] * np.hypot(
        rotation["key_mean_re"], rotation["key_mean_im"]
    )
    slow = (
        (products >= chosen["prominence"] * products.median("component"))
        & stable
        & (turned <= chosen["slow"])
    )
    near = np.pi - abs(rotation["start_angle"]) <= chosen["near_pi"]
    still = turned <= chosen["still"]
    return slow & (~near | still), slow & near, still


ROTATION = over_seeds(
    Experiment(
        "rotation",
        (P4, P4_NEAR_PI, *P5.values(), P5_NULL),
        Needs(
            each(is_language_model),
            "needs a language model that rotates, such as language/rope",
            TEXT_MODELS,
            why_not=why_not,
        ),
        measure,
        tabulate,
        draw,
        MODEL,
    ),
    units,
)
