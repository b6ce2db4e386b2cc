"""How far the logits are a sum of a position and a semantic part (Position Generalization sec. 3.1,
3.2, fig. 2, 3): P1, P2, P3.

    three axes       W_ij ~ a_{i-j} + b_i + c_j            fake distance    W'_dj ~ a_d + b_j        r: correlation with the fit

At short lengths random weights are fitted by chance: 3 n axes for n^2 / 2 pairs give an r of about
sqrt(6 / n). The paper's number for random weights is below this value for 4,096 tokens;
`random_weights` shows the conditions under which that number can be obtained.

The paper speaks of "the great majority of the variance". The weakest reading of it is half, so r is
at least sqrt(0.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import xarray as xr

from position_papers.kit import (
    All,
    AtLeast,
    AtMost,
    BeyondNull,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Observed,
    Significant,
    Values,
    beside_null,
    each,
    evidence,
    groups_of,
    joined,
    limit,
    mean_of,
    paired_difference,
    why_not,
)
from position_papers.position_generalization.measured import (
    MODEL,
    SOURCE,
    TEXT_MODELS,
    Measured,
    fits,
    is_language_model,
)
from repo_interp.plugins.fake_distance.view import fake_distance_fit
from repo_interp.plugins.rotation.view import rotating_heads
from repo_interp.plugins.three_axis.fit_figure import three_axis_fit
from repo_interp.plugins.three_axis.view import example_heads, fit_correlations

THREE_AXIS_R = "the mean r of the three-axis fit over heads and prompts"
LOWEST_R = (
    "the mean r of the fake-distance fit over heads and prompts, in each layer that "
    "rotates (it is 1 by construction in others),"
)
RANDOM_R = "the mean r of the three-axis fit of the same decoder with random weights"
TRAINED_R = "that of the trained weights"

R_BESIDE_TWINS = "this r"
PAPER_LENGTH = 4096
"""Number of tokens in the paper's fits."""


def by_chance(tokens: int) -> float:
    """The approximate r of a fit of independent logits: sqrt(6 / n)."""
    return math.sqrt(6 / tokens)


def _beside_random(values: Values) -> str:
    """Format r together with the mean r of random weights."""
    if R_BESIDE_TWINS not in values:
        return ""
    r, null = values[R_BESIDE_TWINS]
    nothing = ", so that r tells nothing" if r <= limit(null, 0.95) else ""
    return f"r {r:.3g}, with random weights {np.mean(null):.3g}{nothing}"


P1 = Claim(
    "P1",
    "logits are a sum of a distance, a query and a key axis",
    f"{SOURCE} sec. 3.1",
    "0.8650",
    AtLeast(THREE_AXIS_R, math.sqrt(0.5)),
    also=("beyond nulls",),
    shows_control=True,
    says=_beside_random,
)
P2 = Claim(
    "P2",
    "fake-distance logits are a sum of a position and a semantic axis, in every layer",
    f"{SOURCE} sec. 3.2",
    "0.9470 (0.914 - 0.967 over layers)",
    AtLeast(LOWEST_R, 0.9),
    also=("beyond random weights",),
    shows_control=True,
)
R_ABOVE_SHUFFLED = "this r minus that with the distances shuffled, prompt by prompt,"
P1_NULL = P1.beyond(
    "the distance axis takes part: r is above that of random weights, and of shuffled distances",
    BeyondNull(R_BESIDE_TWINS, 0.95),
    Significant(R_ABOVE_SHUFFLED),
)
P2_NULL = P2.beyond(
    "fake-distance logits are more of a sum of two axes than with random weights",
    BeyondNull(R_BESIDE_TWINS, 0.95),
)
P3 = Claim(
    "P3",
    "the three axes fit logits of random weights near 0: what is fitted is learned, not built in",
    f"{SOURCE} sec. 3.2",
    "0.028",
    All(AtMost(RANDOM_R, 0.2), AtMost("this r", 0.5, of=TRAINED_R)),
    says=lambda values: (
        f"the paper's 0.028 lies below what the fit has by chance, {by_chance(PAPER_LENGTH):.3f} at "
        f"{PAPER_LENGTH:,} tokens"
    ),
    apart=("by layer, length and text",),
)


def tabulate(measured: Measured) -> Iterator[Evidence]:
    """The evidence on P1 and P3, and on P2 if a layer rotates."""
    yield from _three_axes(measured)
    yield _random_weights(measured)
    yield from _fake_distances(measured)


def _three_axes(measured: Measured) -> Iterator[Evidence]:
    """P1: r of the three-axis fit, alone and compared with random weights and shuffled distances."""
    three, random = measured.group("three_axis"), _r_of_twins(measured)
    by_prompt = three["r"].mean(("layer", "head")).values
    shuffled = three["r_shuffled"].mean(("layer", "head")).values
    r = float(by_prompt.mean())
    observed, above = Observed(r, random), paired_difference(by_prompt, shuffled)
    judged = evidence(
        P1,
        measured.name,
        "mean r of the three-axis fit",
        {THREE_AXIS_R: r, R_BESIDE_TWINS: observed},
        **mean_of(by_prompt, "sequences"),
        control=f"random weights {random.mean():.3g}",
        note=f"distances shuffled {_mean(three['r_shuffled']):.3g}; R² on held-out rows "
        f"{_mean(three['r2_held_out']):.3g}; heads "
        f"{of_heads(three['r'])}",
    )
    yield judged
    note = (
        f"{beside_null(observed)}; above shuffled distances by {above.margin:.3g} (standard error "
        f"{above.standard_error:.2g})"
    )
    yield judged.on(P1_NULL, {R_ABOVE_SHUFFLED: above}, note)


def _random_weights(measured: Measured) -> Evidence:
    """P3: r of the three-axis fit of the random-weight controls."""
    random, r = _r_of_twins(measured), _mean(measured.group("three_axis")["r"])
    return evidence(
        P3,
        measured.name,
        "mean r of the three-axis fit with random weights",
        {RANDOM_R: random.mean(), "this r": random.mean(), TRAINED_R: r},
        **mean_of(random, "draws of weights", measured.of_twins("three_axis")[0].sizes["prompt"]),
        control=f"trained {r:.3g}",
        note=f"by chance about {by_chance(measured.length):.2g} at {measured.length} tokens",
    )


def _fake_distances(measured: Measured) -> Iterator[Evidence]:
    """P2: r of the fake-distance fit in layers that rotate, alone and compared with random weights.
    No evidence if no layer rotates.
    """
    fake, rotating = measured.group("fake_distance"), rotating_layers(measured)
    if not rotating:
        return
    layers = fake["r"].mean(("prompt", "head")).sel(layer=rotating).values
    prompts = fake["r"].sel(layer=rotating).mean(("layer", "head")).values
    twins = [_mean(twin["r"].sel(layer=rotating)) for twin in measured.of_twins("fake_distance")]
    judged = evidence(
        P2,
        measured.name,
        "mean r of the fake-distance fit",
        {LOWEST_R: layers.min()},
        layers.mean(),
        prompts.std(ddof=1),
        "sequences",
        len(prompts),
        f"random weights {np.mean(twins):.3g}",
        f"layers {layers.min():.3g} to {layers.max():.3g}",
    )
    yield judged
    observed = Observed(float(layers.mean()), twins)
    yield judged.on(P2_NULL, {R_BESIDE_TWINS: observed}, beside_null(observed))


def draw(measured: Measured) -> Iterator[Drawing]:
    """Draw r of both fits over layers and heads, and each fit for the head with the median r (fig.
    2, 3).
    """
    name, three, fake, maps = (
        measured.name,
        *(measured.group(group) for group in ("three_axis", "fake_distance", "maps")),
    )
    caption = (
        f"{name}: correlation of the logits and the three-axis fit (sec. 3.1), and of "
        "fake-distance logits and their two axes (sec. 3.2), by layer and head, mean over "
        f"{three.sizes['prompt']} sequences of {measured.tokens} of held-out text. Colours from 0 "
        "to 1 in all figures; grey: an exact fit by construction."
    )
    correlations = {
        f"three_axis_{variable}": three[variable]
        for variable in ("r", "r_position", "r_shuffled", "r2_held_out")
    }
    judged = {
        "three_axis_r_of_prompts": three["r"].mean(("layer", "head")),
        "three_axis_r_of_weights": by_weights(
            measured, "three_axis", lambda group: group["r"].mean()
        ),
        "fake_distance_r_of_layers": fake["r"]
        .sel(layer=rotating_layers(measured))
        .mean("head")
        .reset_coords(drop=True),
        "tokens": measured.length,
        "training_tokens": measured.subject.training_length,
    }
    data = xr.Dataset({**correlations, "fake_distance_r": fake["r"], **judged})
    run = groups_of(measured.run, three_axis=three[["r"]], fake_distance=fake[["r"]])
    yield Drawing(f"fits_{name}", partial(fit_correlations, run), caption, data)

    parts = {
        "three_axis": (
            ("logit_map", "distance_axis", "query_axis", "key_axis"),
            f"{name}, the head with the median r: its logits, distance, query and key axis, and "
            f"their sum (fig. 2), on the first of {three.sizes['prompt']} sequences. Axes have a "
            "meaning up to a level and a common slope.",
        ),
        "fake_distance": (
            ("fake_map", "position_axis", "semantic_axis"),
            f"{name}, the head with the median r: logits that the last query would give every key "
            "at every distance, with their two axes, and the sum of these (fig. 3), on the first "
            f"of {three.sizes['prompt']} sequences.",
        ),
    }
    fake = fake.sel(layer=rotating_layers(measured) or fake["layer"].values)
    for (part, ((shown, *axes), caption)), fit, chart in zip(
        parts.items(), (three, fake), (three_axis_fit, fake_distance_fit), strict=True
    ):
        layer, head = (example_heads(fit)[:2] or [(0, 0)])[-1]
        of_head = {"layer": [layer], "head": [head]}
        fit, of_map = fit[["r", *axes]].sel(of_head), maps[[shown, "block_size"]].sel(of_head)
        run = groups_of(measured.run, **{part: fit, "maps": of_map})
        data = of_map.assign(fit[axes]).isel(layer=0, head=0)
        yield Drawing(f"{part}_{name}", partial(chart, run, layer, head), caption, data)


def by_weights(
    measured: Measured, name: str, reduced: Callable[[xr.Dataset], xr.DataArray]
) -> xr.DataArray:
    """The result of `reduced` on a group along `weights`: for the trained weights, then for the
    controls random 0, random 1, ...
    """
    groups = {"trained": measured.group(name)}
    groups |= {f"random {number}": twin for number, twin in enumerate(measured.of_twins(name))}
    return joined(
        {name: reduced(group).reset_coords(drop=True) for name, group in groups.items()}, "weights"
    )


def rotating_layers(measured: Measured) -> list[int]:
    """The layers with a head that rotates."""
    return sorted({layer for layer, _ in rotating_heads(measured.group("rotation"))})


def _r_of_twins(measured: Measured) -> np.ndarray:
    """The mean r of the three-axis fit for every random-weight control."""
    return np.array([_mean(twin["r"]) for twin in measured.of_twins("three_axis")])


def of_heads(values: xr.DataArray) -> str:
    """Format the lowest and the highest mean over prompts among all heads."""
    means = values.mean("prompt")
    return f"{float(means.min()):.3g} to {float(means.max()):.3g}"


def _mean(values: xr.DataArray) -> float:
    return float(np.nanmean(values.values))


FITS = Experiment(
    "fits",
    (P1, P1_NULL, P2, P2_NULL, P3),
    Needs(
        each(is_language_model),
        "needs a language model, such as language/rope",
        (*TEXT_MODELS, "language/alibi"),  # sec. 3.3
        otherwise_of=dict.fromkeys(
            (P2.label, P2_NULL.label), "needs a language model that rotates, such as language/rope"
        ),
        why_not=why_not,
    ),
    lambda subjects, options, cache: fits(subjects[0], options, cache),
    tabulate,
    draw,
    MODEL,
)
