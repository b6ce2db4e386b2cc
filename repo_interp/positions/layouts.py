"""The layout language: which layer assigns positions how.

    rope | nope | hope | ...       that scheme in every layer
    repo                           learned positions in every layer
    repo@1/3                       RoPE below, learned positions from 0-based layer floor(L/3) (RePo sec. 4.1: 5 of 16, 10 of 32)
    repo@5                         ... from layer 5
    r2n1, n2r1                     two RoPE layers then a NoPE layer, repeated; two NoPE layers then a RoPE layer
    rope,rope,repo,...             an explicit list, one scheme a layer

`@START` works for every scheme and for the two that repeat: `r2n1@1/3` counts its periods from
there. Other packages add schemes by entry points of the group `repo_interp.schemes`; here only
their names are read. Knows nothing about how a scheme is built.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Literal

from repo_interp.installed_points import installed_points

SCHEMES: dict[str, str] = {
    "rope": "rotation by the token index",
    "nope": "no position",
    "repo": "rotation by learned positions (RePo)",
    "repo_alibi": "ALiBi's slopes times the distance of learned positions, added to the logits",
    "continuous": "rotation by one linear map of the hidden state, shared by all heads",
    "multihead_continuous": "rotation by one linear map of the hidden state per head",
    "learned": "a learned vector per position, added to the token embeddings; for all layers "
    "at once",
    "alibi": "a slope per head times the distance, added to the logits",
    "kerple": "minus a learned logarithm of the distance, added to the logits",
    "fire": "a learned function of the relative distance, added to the logits",
    "cope": "contextual positions: gates counted along the keys, interpolated embeddings "
    "added to the logits",
    "cope_alibi": "contextual positions times a slope per head",
    "cope_mlp": "contextual positions through a small network",
    "cope_rope": "contextual positions beside rotation by the token index",
    "hope": "rotation by the high frequencies only; the other components "
    "position-independent (HoPE)",
    "hope_ab1": "HoPE's ablation: activated components position-independent, low ones rotated",
    "hope_ab2": "HoPE's ablation: low components position-independent, activated ones rotated",
    "hope_ab3": "HoPE's ablation: activated and low components given high frequencies",
    "rope_high": "HoPE's ablation: activated and low components removed from the dot product",
}
"""Every scheme of ours that a layer can have, with what it is."""

PARAMETERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("repo", "repo_alibi"), ("gate_map", "content_map", "final_map")),
    "continuous": ("dynamic_map",),
    "multihead_continuous": ("dynamic_map",),
    "kerple": ("log_rate", "log_scale"),
    "fire": ("curvature", "hidden", "output", "threshold_factor"),
    **dict.fromkeys(
        ("cope", "cope_alibi", "cope_mlp", "cope_rope"), ("position_map", "gate_projection")
    ),
}
"""The modules and parameters in which schemes keep what they learn in a layer, as checkpoints name
them under `self_attn`.
"""

LEARNED = ("repo", "repo_alibi", "continuous", "multihead_continuous")
"""Schemes that learn positions from the hidden state."""

CONTEXTUAL = ("cope", "cope_alibi", "cope_mlp", "cope_rope")
"""Schemes whose positions are counts of gates."""

ROTATED_BY_INDEX = ("rope", "rope_high", "hope", "hope_ab1", "hope_ab2", "hope_ab3")
"""Schemes that rotate by the token index."""

FIXED = tuple(scheme for scheme in SCHEMES if scheme not in (*LEARNED, *CONTEXTUAL))
"""Schemes of ours whose positions are the token index, or none, whatever the text."""

GateSource = Literal["keys", "separate_keys", "values", "open"]
"""What a query of CoPE is held against to decide which tokens it counts; "open": it counts all."""

NO_ATTENTION = "-"
"""Stands for a layer without attention, in a hybrid: it has no scheme, whatever the layout."""

_PERIODS = {"r2n1": ("rope", "rope", "nope"), "n2r1": ("nope", "nope", "rope")}


def scheme_names() -> tuple[str, ...]:
    """Every scheme that a layer can have: ours, then those that other packages add.

    Imports none of theirs.
    """
    points = installed_points("repo_interp.schemes")
    return (*SCHEMES, *sorted({point.name for point in points if point.name not in SCHEMES}))


def meaning(scheme: str) -> str:
    """What a scheme is, in a few words."""
    return SCHEMES.get(scheme, "a scheme of another package")


def parse_layout(text: str, layers: int) -> tuple[str, ...]:
    """The scheme of each of `layers` layers.

    Raises ValueError naming what is unknown or does not fit.
    """
    text = text.strip()
    if "," in text:
        schemes = tuple(part.strip() for part in text.split(","))
        if len(schemes) != layers:
            raise ValueError(
                f"layout {text!r:.80} names {len(schemes)} layers; the model has {layers}"
            )
        for scheme in schemes:
            _known(scheme)
        _whole(schemes, text)
        return schemes
    scheme, at, start_text = text.partition("@")
    if scheme not in _PERIODS:
        _known(scheme)
    period = _PERIODS.get(scheme, (scheme,))
    start = _start(start_text, layers, text) if at else 0
    schemes = _repeated(period, start, layers)
    _whole(schemes, text)
    return schemes


def named_schemes(text: str) -> tuple[str, ...]:
    """The schemes that a layout names, however many layers it is for, each once; RoPE below
    `@START` is not named.

    Raises ValueError naming what is unknown.
    """
    scheme = text.strip().partition("@")[0]
    named = (
        tuple(part.strip() for part in text.split(","))
        if "," in text
        else _PERIODS.get(scheme, (scheme,))
    )
    for each in named:
        _known(each)
    return tuple(dict.fromkeys(named))


def format_layout(schemes: tuple[str, ...]) -> str:
    """The shortest text that `parse_layout` reads back as `schemes`, but for layers without
    attention.
    """
    layers = len(schemes)
    for name in (*SCHEMES, *_PERIODS):
        if _fit(parse_layout(name, layers), schemes):
            return name
    # all rope has a name
    start = next(
        layer for layer, scheme in enumerate(schemes) if scheme not in ("rope", NO_ATTENTION)
    )
    for name, period in ((schemes[start], (schemes[start],)), *_PERIODS.items()):
        first = start - next(place for place, scheme in enumerate(period) if scheme != "rope")
        if first >= 0 and _fit(_repeated(period, first, layers), schemes):
            return f"{name}@{first}" if first else name
    return ",".join(schemes)


def _fit(named: tuple[str, ...], schemes: tuple[str, ...]) -> bool:
    return all(scheme in (name, NO_ATTENTION) for name, scheme in zip(named, schemes, strict=True))


def _repeated(period: tuple[str, ...], start: int, layers: int) -> tuple[str, ...]:
    return ("rope",) * start + tuple(period[layer % len(period)] for layer in range(layers - start))


def _known(scheme: str) -> None:
    if scheme not in SCHEMES and scheme != NO_ATTENTION and scheme not in scheme_names():
        raise ValueError(
            f"unknown position scheme {scheme!r:.80}; known are "
            f"{', '.join((*scheme_names(), *_PERIODS))}"
        )


def _whole(schemes: tuple[str, ...], layout: str) -> None:
    if "learned" in schemes and not set(schemes) <= {"learned", NO_ATTENTION}:
        raise ValueError(
            f"layout {layout!r}: learned absolute positions enter at the model's input, so "
            "they are for all layers or none"
        )


def _start(text: str, layers: int, layout: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}(/0*[1-9][0-9]{0,8})?", text):
        raise ValueError(
            f"layout {layout!r:.80}: after @ stands a layer (5) or a share of the layers "
            f"(1/3), not {text!r:.80}"
        )
    start = math.floor(Fraction(text) * layers) if "/" in text else int(text)
    if start >= layers:
        raise ValueError(
            f"layout {layout!r} starts at layer {start}; the model's layers are 0 to {layers - 1}"
        )
    return start
