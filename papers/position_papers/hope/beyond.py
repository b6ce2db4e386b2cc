"""H4: beyond L the activated components of the first layer leave their range of values within L
(HoPE fig. 3c, sec. 3.3.2).

    C_r(t)   of the first layer, smoothed over L/16 distances, without distance 0      range   from the lowest to the highest within [0, L)

Both halves come from the same sequences of 2 L tokens, so every distance within L has at least L
pairs of tokens. In sequences of L tokens the last distances have only a few pairs, all with the
first tokens, which would count as full points of the range.

The paper states that beyond L the components are in their upper half-cycle, which is above the
middle of their range. With theta L > pi a cosine passes its lowest point within L and takes most of
its values there. A single component without phase can then satisfy the paper's statement, but
cannot leave its range. Both statements are therefore judged, on sequences of independent tokens and
of one repeated token, and are compared with the same components at random phases (`random_phases`),
which are in their upper half beyond L in many draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from position_papers.hope import replicates
from position_papers.hope.component_figures import beyond_training_length
from position_papers.hope.mean_curves import NAME, random_phases, smoothed, turning
from position_papers.hope.replicates import NEEDS_ROPE, Sampling, bands, evidence_of
from position_papers.hope.wording import labelled, named_bands
from position_papers.kit import (
    All,
    AtLeast,
    BeyondNull,
    Cache,
    Claim,
    Drawing,
    Evidence,
    Experiment,
    Observed,
    Rule,
    Subject,
    beside_null,
)
from repo_interp.measures.labels import with_attrs
from repo_interp.tasks.random_tokens import Kind

TOLERANCE = 0.05
"""A value is outside if it exceeds the range within L by more than this share of the range."""
OUTSIDE = (
    "the share of the distances in [L, 2L) where their value is outside the range "
    f"within L, widened by {TOLERANCE} of it,"
)
UPPER = (
    "the share of the distances in [L, 2L) where they are above the middle of their range within L"
)
UPPER_MORE = "this share minus that in the second half of [0, L)"


WITHIN_CURVES, BEYOND_CURVES = "the smoothed components within L", "the same beyond L"
"""Names of the judged curves, means over replicates. No rule reads these values of the evidence;
`shares` computes its numbers from them again.
"""
BESIDE_PHASES, BEYOND_PHASES = "the first of these shares", "beyond random phases"


def _claim(kind: Kind, statement: str, source: str, rule: Rule, part: str = "") -> Claim:
    statement = f"beyond L the activated components {statement} in the first layer"
    also = (labelled(kind, part, BEYOND_PHASES),)
    return Claim("H4", statement, source, "figure", rule, labelled(kind, part), also=also)


_UPPER = All(AtLeast(UPPER, 0.5), AtLeast(UPPER_MORE, 0.25))
CLAIMS = {
    kind: (
        _claim(kind, "leave their training range", "HoPE fig. 3c", AtLeast(OUTSIDE, 0.25)),
        _claim(kind, "are in the upper half-cycle", "HoPE sec. 3.3.2 (2)", _UPPER, "wording"),
    )
    for kind in replicates.KINDS
}
BESIDE_NULL = {
    claim: claim.beyond(
        f"{claim.statement}, more than geometry makes them", BeyondNull(BESIDE_PHASES, 0.95, NAME)
    )
    for claims in CLAIMS.values()
    for claim in claims
}
"""The same claims, compared with the effect of geometry alone."""
Points = Float[np.ndarray, "... point"]


def shares(within: Points, beyond: Points) -> dict[str, np.ndarray]:
    """Return shares of the points of smoothed curves beyond L: outside the range `within`, above
    its middle, and the latter minus the same share in the second half within L.
    """
    low, high = within.min(-1, keepdims=True), within.max(-1, keepdims=True)
    margin, middle = TOLERANCE * (high - low), (low + high) / 2
    upper = (beyond > middle).mean(-1)
    return {
        OUTSIDE: ((beyond < low - margin) | (beyond > high + margin)).mean(-1),
        UPPER: upper,
        UPPER_MORE: upper - (within[..., within.shape[-1] // 2 :] > middle).mean(-1),
    }


def halves(curves: xr.DataArray, length: int) -> tuple[xr.DataArray, xr.DataArray]:
    """Return `curves` [..., distance] within L and beyond L, each smoothed."""
    return smoothed(curves.sel(distance=slice(length - 1)), length), smoothed(
        curves.sel(distance=slice(length, None)), length
    )


def measure(subjects: Sequence[Subject], options: Sampling, cache: Cache) -> xr.DataTree | None:
    """Measure replicates of the checkpoint on sequences of 2 L tokens of each kind; None if it has
    no activated component, or if a window hides distances beyond L from the first layer.
    """
    if (first := replicates.beyond(subjects[0], options, cache)) is None or not bands(first)[
        "activated"
    ].any():
        return None
    repeated = replicates.beyond(subjects[0], options, cache, "repeated")
    return xr.DataTree.from_dict({"independent": first, "repeated": repeated})


def tabulate(tree: xr.DataTree) -> Iterable[Evidence]:
    """Yield evidence on the claim and on the paper's wording of it, for both kinds of sequences."""
    for kind in replicates.KINDS:
        yield from _evidence(tree[kind].to_dataset(), kind)


def _activated(data: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Return the smoothed activated components of the first layer [weights, repeat, component,
    middle], within L and beyond.
    """
    curves = data["first_layer_by_distance"].isel(component=bands(data)["activated"].values)
    return halves(
        curves.transpose("weights", "repeat", "component", "distance"), data.attrs["length"]
    )


def _evidence(data: xr.Dataset, kind: Kind) -> Iterator[Evidence]:
    (near, far), length, band = _activated(data), data.attrs["length"], bands(data)
    # Shares are means over the activated components, for the mean curves of all weights and for
    # the replicates of the trained weights.
    of_weights = {
        name: each.mean(-1)
        for name, each in shares(near.mean("repeat").values, far.mean("repeat").values).items()
    }
    of_replicates = {
        name: each.mean(-1) for name, each in shares(near[0].values, far[0].values).items()
    }
    ours: dict[str, Any] = {name: float(values[0]) for name, values in of_weights.items()}
    curves = {
        name: _points(half.sel(weights="trained").mean("repeat"))
        for name, half in ((WITHIN_CURVES, near), (BEYOND_CURVES, far))
    }
    waves = xr.concat(
        halves(turning(band["frequency"].values[band["activated"]], 2 * length), length), "middle"
    ).values
    split = near.sizes["middle"]
    for claim, quantity, where in zip(
        CLAIMS[kind], (OUTSIDE, UPPER), ("outside", "in the upper half of"), strict=True
    ):
        judged = evidence_of(
            claim,
            data,
            f"share of distances in [L, 2L) {where} the range within L",
            ours | curves,
            ours[quantity],
            of_replicates[quantity],
            of_weights[quantity][1:],
            f"in the second half of [0, L): {ours[UPPER] - ours[UPPER_MORE]:.2f}"
            if quantity is UPPER
            else "a cosine without phase passes its lowest value within L and cannot leave "
            "its range: only phases can",
        )
        yield judged
        null = random_phases(
            waves,
            lambda drawn, name=quantity: float(
                shares(drawn[:, :split], drawn[:, split:])[name].mean()
            ),
        )
        observed = Observed(ours[quantity], null)
        beside = replace(judged, estimate=replace(judged.estimate, values=ours))
        yield beside.on(BESIDE_NULL[claim], {BESIDE_PHASES: observed}, beside_null(observed))


def _points(curves: xr.DataArray) -> list[dict[str, float]]:
    """Return the curves [component, middle] as one record of values by component for every point."""
    names = [f"component {component}" for component in curves["component"].values]
    points = curves.transpose("middle", "component").values
    return [dict(zip(names, map(float, point), strict=True)) for point in points]


def shares_of_points(values: Mapping[str, Any]) -> dict[str, float]:
    """Return `shares` of the curves in evidence on H4, as means over components."""
    within, beyond = (
        np.array([list(point.values()) for point in values[name]]).T
        for name in (WITHIN_CURVES, BEYOND_CURVES)
    )
    return {name: float(each.mean()) for name, each in shares(within, beyond).items()}


def draw(tree: xr.DataTree) -> Iterator[Drawing]:
    """Draw figure 3c: the first layer and the later ones on sequences of 2 L tokens."""
    data = tree["independent"].to_dataset()
    name, length, band = data.attrs["checkpoint"], data.attrs["length"], bands(data)
    trained = data.sel(weights="trained").mean("repeat")
    drawn = band.assign(
        component_by_distance=with_attrs(
            trained["first_layer_by_distance"], "mean component", "q·k"
        ),
        logit_by_distance=with_attrs(trained["logit"], "mean logit", "q·k"),
    )
    near, far = (half.sel(weights="trained", drop=True) for half in _activated(data))
    found = shares(near.mean("repeat").values, far.mean("repeat").values)
    outside, upper, more = (
        100 * float(found[quantity].mean()) for quantity in (OUTSIDE, UPPER, UPPER_MORE)
    )
    few = (
        f"The first {trained.sizes['layer']} layers. "
        if data.attrs["training_length"] > replicates.LONG
        else ""
    )
    caption = (
        f"{name} on sequences of 2L = {2 * length} random tokens (HoPE fig. 3c), smoothed over "
        "L/16 distances as it is judged: the activated components of the first layer, each in "
        "units of its range within L (orange band), and the mean logit of every layer, each on a "
        "scale of its own. Beyond L the components are above the middle of that range at "
        f"{upper:.0f} % of the distances, in the second half within L at {upper - more:.0f} %; "
        f"they are outside of the range at {outside:.0f} %. {few}{named_bands(band, data)}"
    )
    # On a separate axis, since a table of all components would be too large.
    judged = xr.concat([near, far], "middle").rename(component="chosen")
    judged = with_attrs(judged, "activated component of the first layer, smoothed over L/16", "q·k")
    yield Drawing(
        f"beyond_training_length_{name}",
        partial(beyond_training_length, drawn, length),
        caption,
        drawn.assign(smoothed=judged, length=length),
    )


BEYOND = Experiment(
    "beyond",
    tuple(chain.from_iterable(BESIDE_NULL.items())),
    replace(
        NEEDS_ROPE,
        otherwise=f"{NEEDS_ROPE.otherwise} whose first layer has activated components and "
        "sees beyond L",
    ),
    measure,
    tabulate,
    draw,
)
