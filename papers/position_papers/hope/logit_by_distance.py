"""H1: the mean logit by distance is U-shaped and rises again, within L and over all layers and
heads (HoPE fig. 2, 6, 8).

m(t)   mean logit at distance t; smoothed over L/16 distances, without distance 0, which is a token with itself

fall = m(left end) - min m      rise = m(right end) - min m

A rise contradicts a global decay; a U shape requires more. Both are judged, on sequences of
independent tokens and of one repeated token. The rise is judged without the last L/16 distances,
which only a few pairs have, all with the first tokens: the curves of learned positions, KERPLE and
ALiBi rise only there.

A few waves at random phases also fall and rise again. For RoPE both claims are therefore compared
with its components at random phases (`random_phases`), each with its strength after smoothing. The
compared quantity is the depth of an interior minimum, which is the smaller of fall and rise. Only
RoPE's curve consists of such components.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from position_papers.hope import replicates
from position_papers.hope.component_figures import logit_by_distance
from position_papers.hope.mean_curves import NAME, random_phases, smoothed, turning
from position_papers.hope.replicates import Sampling, bands, evidence_of, is_analysed
from position_papers.hope.wording import capped_caption, labelled, parts_caption
from position_papers.kit import (
    All,
    AtLeast,
    BeyondNull,
    Cache,
    Claim,
    Custom,
    Difference,
    Drawing,
    Evidence,
    Experiment,
    Needs,
    Observed,
    Significant,
    Subject,
    beside_null,
    together,
    unmeasured,
)
from repo_interp.measures.labels import with_attrs
from repo_interp.plots.views.component_bands import FEW_PAIRS
from repo_interp.positions.layouts import format_layout
from repo_interp.tasks.random_tokens import Kind

U_SHAPED = ("learned", "rope", "kerple")
"""The schemes that H1 is about."""
FALL, RISE, RATIO = "the fall on the left", "the rise on the right", "the rise over the fall"
INSIDE = "the minimum lies strictly inside"

_U = All(
    Custom(lambda values: values[INSIDE], f"smoothed over L/16 distances, {INSIDE}"),
    AtLeast(RATIO, 0.25),
    Significant(FALL, 3),
    Significant(RISE, 3),
)
_RISES = All(
    Custom(
        lambda values: values[INSIDE],
        f"smoothed over L/16 distances, without the last 1/{FEW_PAIRS} of them, {INSIDE}",
    ),
    Significant(RISE, 3),
)
_SCHEMES = {
    name.partition("/")[2]: (name,)
    for name in ("language/learned", "language/rope", "language/kerple")
}
DEPTH = "the depth of the minimum inside, the smaller of fall and rise in q·k,"
BEYOND_PHASES = "beyond random phases"


def _claim(kind: Kind, statement: str, rule: All, part: str = "") -> Claim:
    also = (labelled(kind, part, BEYOND_PHASES),)
    return Claim(
        "H1",
        statement,
        "HoPE fig. 2",
        "figure",
        rule,
        labelled(kind, part),
        also=also,
        about=_SCHEMES,
    )


CLAIMS = {
    kind: (
        _claim(
            kind,
            "mean logit by distance is U-shaped for learned APE, RoPE and KERPLE, no global decay",
            _U,
        ),
        _claim(
            kind,
            "mean logit by distance rises again for learned APE, RoPE and KERPLE",
            _RISES,
            "no decay",
        ),
    )
    for kind in replicates.KINDS
}
BESIDE_NULL = {
    claim: claim.beyond(
        f"{claim.statement}, of RoPE with a deeper minimum than geometry makes it",
        BeyondNull(DEPTH, 0.95, NAME),
    )
    for claims in CLAIMS.values()
    for claim in claims
}
"""The same claims for RoPE alone, compared with the effect of geometry alone."""


@dataclass(frozen=True)
class UShape:
    """The fall and the rise of a curve."""

    fall: float
    """From the left end to the minimum, in the curve's unit."""
    rise: float
    """From the minimum to the right end."""
    minimum: int
    """Index of the minimum among the points of the curve."""
    inside: bool
    """Whether the minimum lies strictly between the ends."""

    @property
    def ratio(self) -> float:
        """Rise over fall: 0 for a decay, 1 for a symmetric U; 0 without a fall."""
        return self.rise / self.fall if self.fall > 0 else 0.0

    @property
    def depth(self) -> float:
        """The smaller of fall and rise; 0 if the minimum is at an end."""
        return min(self.fall, self.rise) if self.inside else 0.0

    def values(self, errors: tuple[float, float], replicates: int) -> dict[str, Any]:
        """Return the values for the rule, with the standard errors of fall and rise and the number
        of replicates.
        """
        over, degrees = "replicates", replicates - 1
        return {
            INSIDE: self.inside,
            RATIO: self.ratio,
            FALL: Difference(self.fall, errors[0], over, degrees),
            RISE: Difference(self.rise, errors[1], over, degrees),
        }


def errors_of(smooth: Float[np.ndarray, "repeat point"]) -> tuple[float, float]:
    """Return the standard errors of fall and rise over replicates, each measured to and from the
    point where the mean of `smooth` is lowest.
    """
    depths = smooth[:, [0, -1]] - smooth[:, smooth.mean(0).argmin(), None]
    fall, rise = depths.std(0, ddof=1) / np.sqrt(len(depths))
    return float(fall), float(rise)


def u_shape(smooth: Float[np.ndarray, " point"]) -> UShape:
    """Return the shape of a smoothed curve."""
    lowest = int(smooth.argmin())
    fall, rise = float(smooth[0] - smooth[lowest]), float(smooth[-1] - smooth[lowest])
    return UShape(fall, rise, lowest, 0 < lowest < len(smooth) - 1)


def measure(subjects: Sequence[Subject], options: Sampling, cache: Cache) -> list[xr.DataTree]:
    """Measure every checkpoint "within" and "beyond" L, the latter not for positions that end at L,
    and judged checkpoints also within L on one "repeated" token.
    """
    both = [
        {
            "within": replicates.within(subject, options, cache),
            "beyond": replicates.beyond(subject, options, cache),
            "repeated": replicates.within(subject, options, cache, "repeated")
            if len(set(subject.schemes)) == 1 and subject.schemes[-1] in U_SHAPED
            else None,
        }
        for subject in subjects
    ]
    return [
        xr.DataTree.from_dict({name: data for name, data in each.items() if data is not None})
        for each in both
    ]


def tabulate(measured: Sequence[xr.DataTree]) -> Iterable[Evidence]:
    """Yield evidence on every checkpoint with a scheme of the claim, and for every scheme without a
    checkpoint the reason why there is none.
    """
    for scheme in U_SHAPED:
        if scheme not in [_scheme(tree["within"].to_dataset()) for tree in measured]:
            for claim in (*BESIDE_NULL, *(BESIDE_NULL.values() if scheme == "rope" else ())):
                yield unmeasured(claim, scheme, f"no checkpoint of scheme {scheme} was given")
    for name, kind in zip(("within", "repeated"), replicates.KINDS, strict=True):
        for data in (tree[name].to_dataset() for tree in measured if "repeated" in tree):
            for claim, few in zip(
                CLAIMS[kind], (0, data.attrs["length"] // FEW_PAIRS), strict=True
            ):
                yield from _evidence(data, claim, few)


def draw(measured: Sequence[xr.DataTree]) -> Iterator[Drawing]:
    """Draw figures 2, 6 and 8: the mean logit by distance of every checkpoint, within and beyond L."""
    every = [
        [tree[name].to_dataset() for name in ("within", "beyond") if name in tree]
        for tree in measured
    ]
    # Keep means over the same number of layers only: for long sequences, fewer layers are measured
    # beyond L.
    data = [
        [each for each in lengths if each.sizes["layer"] == lengths[0].sizes["layer"]]
        for lengths in every
    ]
    logit = xr.concat(
        [_by_length(lengths) for lengths in data], dim="checkpoint", join="outer", **_JOINED
    )
    logit = with_attrs(logit, "mean logit of the pairs at a distance", "q·k")
    notes = (capped_caption(lengths[0]) + parts_caption(lengths[0]) for lengths in data)
    caps = "".join(dict.fromkeys(notes))
    longer = "" if all(len(lengths) == 1 for lengths in data) else " and, paler, 2L"
    caption = (
        "Mean logit by distance, mean over all heads of the layers with this L, on "
        f"{data[0][0].attrs['sequences']} sequences of random tokens, for distances to L{longer} "
        "(HoPE fig. 2, 6, 8). Dashed: training length L; grey: the same architecture with random "
        "weights. A scheme with absolute positions ends at L. Yellow, with a thinner line: the "
        f"last 1/{FEW_PAIRS} of the distances, which few pairs have; a rise that is seen there "
        f"alone stands on these few.{caps}"
    )
    yield Drawing(
        "logit_by_distance",
        partial(logit_by_distance, logit),
        caption,
        logit.to_dataset(name="logit").assign(_judged_curves(measured)),
    )


LOGIT_BY_DISTANCE = Experiment(
    "logit_by_distance",
    tuple(chain.from_iterable(BESIDE_NULL.items())),
    Needs(
        together(is_analysed),
        "no checkpoint of a scheme that the claim is about was given",
        tuple(f"language/{scheme}" for scheme in ("rope", "learned", "kerple", "hope", "repo")),
    ),
    measure,
    tabulate,
    draw,
)
_JOINED: Any = {"coords": "minimal", "compat": "override"}


def _scheme(data: xr.Dataset) -> str:
    """Return the scheme of a checkpoint, which is that of its last layer."""
    return str(data["scheme"].values[-1])


def _judged_curves(measured: Sequence[xr.DataTree]) -> dict[str, xr.DataArray]:
    """Return the judged data: the smoothed curves of every replicate and of every control."""
    data = [tree["within"].to_dataset() for tree in measured if "repeated" in tree]
    curves = [_curves(each).expand_dims(checkpoint=[each.attrs["checkpoint"]]) for each in data]
    if not curves:
        return {}
    smooth = with_attrs(
        xr.concat(curves, dim="checkpoint", join="outer", **_JOINED),
        "mean logit, smoothed over L/16",
        "q·k",
    )
    trained = smooth.sel(weights="trained", drop=True)
    return {
        "smoothed": trained,
        "smoothed_control": smooth.drop_sel(weights="trained").mean("repeat", keep_attrs=True),
    }


def _by_length(lengths: Sequence[xr.Dataset]) -> xr.DataArray:
    first, length = lengths[0], lengths[0].attrs["length"]
    axis = xr.IndexVariable(
        "length", [length * (1 + place) for place in range(len(lengths))], {"units": "tokens"}
    )
    logits = xr.concat(
        [data["logit"].mean(("repeat", "layer")) for data in lengths],
        dim=axis,
        join="outer",
        **_JOINED,
    )
    layout = format_layout(tuple(str(scheme) for scheme in first["scheme"].values))
    named = {
        "scheme": ("checkpoint", [_scheme(first)]),
        "layout": ("checkpoint", [layout]),
        "training_length": ("checkpoint", [length]),
    }
    return logits.expand_dims(checkpoint=[first.attrs["checkpoint"]]).assign_coords(named)


def _curves(data: xr.Dataset, last: int | None = None) -> xr.DataArray:
    """Return the smoothed mean logit [weights, repeat, middle] over all layers and heads, for
    distances below `last`.
    """
    return smoothed(data["logit"].mean("layer").isel(distance=slice(last)), data.attrs["length"])


def _evidence(data: xr.Dataset, claim: Claim, few: int) -> Iterator[Evidence]:
    """Yield the evidence on `claim` from the curve without the last `few` distances, and for RoPE
    also the comparison with random phases.
    """
    length, last = data.attrs["length"], data.attrs["length"] - few
    smooth = _curves(data, last)
    of_replicates = smooth.sel(weights="trained").values
    shape, errors = u_shape(of_replicates.mean(0)), errors_of(of_replicates)
    # Curves of random weights vary about a flat line, so their rise is divided by the fall of the
    # trained curve.
    _, *rises = (u_shape(each).rise for each in smooth.mean("repeat").values)
    judged = evidence_of(
        claim,
        data,
        "rise on the right over the fall on the left"
        + (f", without the last 1/{FEW_PAIRS} of the distances" if few else ""),
        shape.values(errors, len(of_replicates)),
        shape.ratio,
        [u_shape(curve).ratio for curve in of_replicates],
        [rise / shape.fall if shape.fall > 0 else np.nan for rise in rises],
        f"fall {shape.fall:.3g}, rise {shape.rise:.3g} (q·k, standard errors {errors[0]:.2g} "
        f"and {errors[1]:.2g}), minimum at distance "
        f"{smooth['middle'].values[shape.minimum]:.0f} of {length}",
    )
    yield judged
    if _scheme(data) == "rope":
        components = (
            data["component_by_distance"]
            .sel(weights="trained")
            .mean("repeat")
            .isel(distance=slice(last))
        )
        deviations = smoothed(components, length).transpose("component", "middle").values.std(1)
        waves = smoothed(turning(bands(data)["frequency"].values, last), length).values
        null = random_phases(waves, lambda drawn: u_shape(drawn.sum(0)).depth, deviations)
        observed = Observed(shape.depth, null)
        yield judged.on(BESIDE_NULL[claim], {DEPTH: observed}, f"{DEPTH} {beside_null(observed)}")
