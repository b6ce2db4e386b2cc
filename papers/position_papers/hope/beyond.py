"""H4: beyond L the activated components of the first layer leave the range of values that they had within L (HoPE fig. 3c, sec. 3.3.2).

    C_r(t)   of the first layer, smoothed over L/16 distances, without distance 0      range   from the lowest to the highest within [0, L)

Both halves are of the same sequences, of 2 L tokens, so that every distance within L has at least L pairs of tokens: on sequences of L the
last distances have a few, all of them with the first token, which counted as whole points of the range.

As the paper words it, they are in their upper half-cycle there: above the middle of their range. A cosine that passes its lowest point
within L, as theta L > pi makes it, has seen most of its values there: of a lone component without phase the wording can hold, and the range
of values cannot be left. So both are judged, on sequences of independent tokens and of one repeated token - and beside what the same
components show with random phases (`random_phases`), which are in their upper half beyond L in many draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float

from position_papers.hope import replicates
from position_papers.hope.mean_curves import NAME, random_phases, smoothed
from position_papers.hope.replicates import NEEDS_ROPE, Sampling, bands
from position_papers.hope.wording import OVER_REPLICATES, capped, labelled, named_bands, random_weights
from position_papers.kit.cache import Cache
from position_papers.kit.claims import Claim, Verdict, verdict
from position_papers.kit.experiment import Drawing, Experiment
from position_papers.kit.rules import All, AtLeast, BeyondNull, Observed, beside_null
from position_papers.kit.subjects import Subject
from repo_interp.measures.labels import described
from repo_interp.plots.views.component_curves import beyond_training_length
from repo_interp.tasks.random_tokens import Kind

TOLERANCE = 0.05
"""Share of the range within L by which a value has to be outside of it."""
OUTSIDE = f"the share of the distances in [L, 2L) where their value is outside the range within L, widened by {TOLERANCE} of it,"
UPPER = "the share of the distances in [L, 2L) where they are above the middle of their range within L"
UPPER_MORE = "this share minus that in the second half of [0, L)"


BESIDE_PHASES, BEYOND_PHASES = "the first of these shares", "beyond random phases"


def _range(kind: Kind) -> Claim:
    statement = "beyond L the activated components leave their training range in the first layer"
    also = (labelled(kind, BEYOND_PHASES),)
    return Claim("H4", statement, "HoPE fig. 3c", "figure", AtLeast(OUTSIDE, 0.25), labelled(kind), also=also)


def _wording(kind: Kind) -> Claim:
    statement = "beyond L the activated components are in the upper half-cycle in the first layer"
    rule = All(AtLeast(UPPER, 0.5), AtLeast(UPPER_MORE, 0.25))
    also = (labelled(kind, f"wording, {BEYOND_PHASES}"),)
    return Claim("H4", statement, "HoPE sec. 3.3.2 (2)", "figure", rule, labelled(kind, "wording"), also=also)


def _beyond_phases(claim: Claim) -> Claim:
    """The same claim, beyond what geometry makes of it."""
    rule = All(claim.rule, BeyondNull(BESIDE_PHASES, 0.95, NAME))
    statement = f"{claim.statement}, more than geometry makes them"
    return Claim("H4", statement, claim.source, "none", rule, claim.also[0])


CLAIMS = {kind: (_range(kind), _wording(kind)) for kind in replicates.KINDS}
BESIDE_NULL = {claim: _beyond_phases(claim) for claims in CLAIMS.values() for claim in claims}
Curve = Float[np.ndarray, " distance"]


def outside(within: Curve, beyond: Curve) -> dict[str, float]:
    """Share of the distances beyond L where a curve is outside the range that it had `within`; both are smoothed first."""
    near, far = _both_smoothed(within, beyond)
    margin = TOLERANCE * (near.max() - near.min())
    return {OUTSIDE: float(((far < near.min() - margin) | (far > near.max() + margin)).mean())}


def upper(within: Curve, beyond: Curve) -> dict[str, float]:
    """Share of the distances beyond L where a curve is above the middle of its range `within`, and by how much it is more than there."""
    near, far = _both_smoothed(within, beyond)
    middle = (near.min() + near.max()) / 2
    share = float((far > middle).mean())
    return {UPPER: share, UPPER_MORE: share - float((near[len(near) // 2 :] > middle).mean())}


def measure(subjects: Sequence[Subject], options: Sampling, cache: Cache) -> xr.DataTree | None:
    """Replicates of the checkpoint on sequences of 2 L tokens of each kind; None where it has no activated component, and where a window
    hides distances beyond L from the first layer.
    """
    (subject,) = subjects
    data = {kind: replicates.beyond(subject, options, cache, kind) for kind in replicates.KINDS}
    first = data["independent"]
    if first is None or not bands(first)["activated"].any():
        return None
    seen = first["first_layer_by_distance"].sel(weights="trained").notnull().all()
    return xr.DataTree.from_dict(data) if seen else None


def judge(tree: xr.DataTree) -> Iterable[Verdict]:
    """Verdict on the checkpoint, on the claim and on how it is worded, for both kinds of sequences."""
    for kind in replicates.KINDS:
        yield from _evidence(tree[kind].to_dataset(), kind)


def _evidence(data: xr.Dataset, kind: Kind) -> Iterator[Verdict]:
    by_distance, length = data["first_layer_by_distance"], data.attrs["length"]
    activated = np.flatnonzero(bands(data)["activated"].values)

    def averaged(shares: Callable[[Curve, Curve], dict[str, float]], **chosen: object) -> dict[str, float]:
        """Shares of the chosen weights, and replicate if one is chosen, as means over the activated components."""
        curves = by_distance.sel(chosen)
        curves = curves.mean("repeat") if "repeat" in curves.dims else curves
        each = [
            shares(curve[:length], curve[length:])
            for curve in curves.isel(component=activated).transpose("component", ...).values
        ]
        return {quantity: float(np.mean([values[quantity] for values in each])) for quantity in each[0]}

    criteria = ((OUTSIDE, outside, "outside"), (UPPER, upper, "in the upper half of"))
    for claim, (quantity, shares, where) in zip(CLAIMS[kind], criteria, strict=True):
        by_weights = {str(weights): averaged(shares, weights=weights) for weights in by_distance["weights"].values}
        of_replicates = [averaged(shares, weights="trained", repeat=repeat)[quantity] for repeat in by_distance["repeat"].values]
        ours = by_weights["trained"]
        judged = verdict(
            claim,
            data.attrs["checkpoint"],
            f"share of distances in [L, 2L) {where} the range within L",
            ours,
            ours[quantity],
            float(np.std(of_replicates, ddof=1)),
            OVER_REPLICATES,
            data.attrs["sequences"],
            random_weights({weights: values[quantity] for weights, values in by_weights.items()}),
            f"in the second half of [0, L): {ours[UPPER] - ours[UPPER_MORE]:.2f}"
            if shares is upper
            else "a cosine without phase passes its lowest value within L and cannot leave its range: only phases can",
            capped(data),
        )
        yield judged
        null = random_phases(
            bands(data)["frequency"].values[activated],
            2 * length,
            lambda curves, shares=shares, name=quantity: float(
                np.mean([shares(curve[:length], curve[length:])[name] for curve in curves])
            ),
        )
        observed = Observed(ours[quantity], null)
        values = {**ours, BESIDE_PHASES: observed}
        yield judged.on(BESIDE_NULL[claim], values, beside_null(observed))


def draw(tree: xr.DataTree) -> Iterator[Drawing]:
    """Fig. 3c: the first layer and the later ones on sequences of 2 L tokens."""
    data = tree["independent"].to_dataset()
    name, length, band, trained = (
        data.attrs["checkpoint"],
        data.attrs["length"],
        bands(data),
        data.sel(weights="trained").mean("repeat"),
    )
    drawn = band.assign(
        component_by_distance=described(trained["first_layer_by_distance"], "mean component", "q·k"),
        logit_by_distance=described(trained["logit"], "mean logit", "q·k"),
    )
    few = f"The first {trained.sizes['layer']} layers. " if data.attrs["training_length"] > replicates.LONG else ""
    caption = (
        f"{name} on sequences of 2L = {2 * length} random tokens: components and mean logit of the first layer, and mean logit of the "
        "later ones (HoPE fig. 3c), smoothed over L/32. Orange band: the range of the activated component within L. "
        f"{few}{named_bands(band, data)}"
    )
    yield Drawing(f"beyond_training_length_{name}", beyond_training_length(drawn, length), caption, drawn)


BEYOND = Experiment(
    "beyond",
    tuple(each for claims in CLAIMS.values() for claim in claims for each in (claim, BESIDE_NULL[claim])),
    NEEDS_ROPE,
    measure,
    judge,
    draw,
)


def _both_smoothed(within: Curve, beyond: Curve) -> tuple[Curve, Curve]:
    return smoothed(within[1:], len(within)), smoothed(beyond, len(within))
