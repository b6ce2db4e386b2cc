"""Layouts: texts that state the position scheme of every layer.

    rope | nope | hope | ...    the same scheme in every layer
    repo                        learned positions in every layer
    repo@1/3                    RoPE below, learned positions from 0-based layer floor(L/3)
                                (RePo sec. 4.1: 5 of 16, 10 of 32)
    repo@5                      ... from layer 5
    r2n1, n2r1, r3n1, ...       two RoPE layers then a NoPE layer, repeated; two NoPE, one RoPE
    rope,rope,repo,...          an explicit list, one scheme a layer

`@START` works for every scheme and for periods: `r2n1@1/3` counts its periods from the start layer.
Other packages add schemes by entry points of the group `repo_interp.schemes`; this module reads
only their names. It knows nothing about how a scheme is built.
"""

from __future__ import annotations

import math
import re
from difflib import get_close_matches
from fractions import Fraction
from typing import Literal

from repo_interp.installed_points import installed_points

SCHEMES: dict[str, str] = {
    "rope": "rotation by the token index",
    "nope": "no position",
    "repo": "rotation by learned positions (RePo)",
    "repo_alibi": "ALiBi's slopes times the distance of learned positions, added to the logits",
    "repo_kerple": "minus a learned logarithm of the distance of learned positions, added to the "
    "logits",
    "repo_fire": "a learned function of the relative distance of learned positions, added to the "
    "logits",
    "repo_index": "rotation by positions learned from the hidden state and the token index",
    "repo_attention": "rotation by positions learned with attention over earlier tokens",
    "repo_convolution": "rotation by positions learned with a convolution over earlier tokens",
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
    "cope_relative": "contextual positions beside a learned vector per distance",
    "hope": "rotation by the high frequencies only; the other components "
    "position-independent (HoPE)",
    "hope_ab1": "HoPE's ablation: activated components position-independent, low ones rotated",
    "hope_ab2": "HoPE's ablation: low components position-independent, activated ones rotated",
    "hope_ab3": "HoPE's ablation: activated and low components given high frequencies",
    "rope_high": "HoPE's ablation: activated and low components removed from the dot product",
}
"""The schemes of repo_interp that a layer can have, with a description each."""

_MAPS = ("gate_map", "content_map", "final_map")
_KERPLE = ("log_rate", "log_scale")
_FIRE = ("curvature", "hidden", "output", "threshold_factor")
_COPE = ("position_map", "gate_projection")

# Listed here, without torch, so that `inspect` can read a checkpoint by the names of its tensors
PARAMETERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("repo", "repo_alibi", "repo_index"), _MAPS),
    "repo_kerple": (*_MAPS, *_KERPLE),
    "repo_fire": (*_MAPS, *_FIRE),
    "repo_attention": (*_MAPS, "query_map", "key_map", "value_map"),
    "repo_convolution": (*_MAPS, "taps"),
    "continuous": ("dynamic_map",),
    "multihead_continuous": ("dynamic_map",),
    "kerple": _KERPLE,
    "fire": _FIRE,
    **dict.fromkeys(("cope", "cope_alibi", "cope_mlp", "cope_rope"), _COPE),
    "cope_relative": (*_COPE, "relative_map"),
}
"""Names of the modules and parameters with the weights of schemes, under `self_attn` in
checkpoints.
"""

LEARNED = (
    *("repo", "repo_alibi", "repo_kerple", "repo_fire", "repo_index"),
    *("repo_attention", "repo_convolution"),
    *("continuous", "multihead_continuous"),
)
"""Schemes that learn positions from the hidden state."""

CONTEXTUAL = ("cope", "cope_alibi", "cope_mlp", "cope_rope", "cope_relative")
"""Schemes with counts of gates as positions."""


# Only our schemes: positions in schemes of other packages are unknown.
FIXED = tuple(scheme for scheme in SCHEMES if scheme not in (*LEARNED, *CONTEXTUAL))
"""Our schemes in which positions do not depend on the text: the token index, or no positions."""

GateSource = Literal["keys", "separate_keys", "values", "open"]
"""Tensor that gives the gates of CoPE together with a query; "open": all gates are 1."""

NO_ATTENTION = "-"
"""Entry of a layer without attention in a hybrid model, which has no scheme in any layout."""

_PUBLISHED = ("r2n1", "n2r1")
"""Periods of RePo's baselines, which layouts use even if the period fits only once."""
_LETTERS = {"r": "rope", "n": "nope"}
_PERIODS = [
    f"{letters[0]}{first}{letters[1]}{total - first}"
    # Runs of 1 to 9 layers each, since `_period` reads one digit per run
    for total in range(2, 19)
    for letters in ("rn", "nr")
    for first in range(max(1, total - 9), min(10, total))
]
"""Names of layouts with two alternating runs, the shortest periods first."""


def scheme_names() -> tuple[str, ...]:
    """List the schemes that a layer can have, without importing other packages.

    Returns:
        Our names, then names from other packages.
    """
    # Only names are read, since importing a package would take seconds and run its code.
    points = installed_points("repo_interp.schemes")
    return (*SCHEMES, *sorted({point.name for point in points if point.name not in SCHEMES}))


def meaning(scheme: str) -> str:
    """Describe a scheme in a few words.

    Args:
        scheme: Name of the scheme.

    Returns:
        The description.
    """
    return SCHEMES.get(scheme, "a scheme of another package or of a file")


def parse_layout(text: str, layers: int) -> tuple[str, ...]:
    """Parse a layout.

    Args:
        text: Such as "repo@1/3".
        layers: Number of layers of the model.

    Returns:
        The scheme of every layer.

    Raises:
        ValueError: A scheme is unknown, or the layout does not fit the number of layers.
    """
    text = text.strip()
    named_schemes(text)  # refuses unknown schemes
    if "," in text:
        schemes = tuple(part.strip() for part in text.split(","))
        if len(schemes) != layers:
            raise ValueError(
                f"layout {text!r:.80} names {len(schemes)} layers; the model has {layers}"
            )
    else:
        scheme, at, start_text = text.partition("@")
        start = _parse_start(start_text, layers, text) if at else 0
        period = _period(scheme)
        schemes = _repeat(period, start, layers)
    _require_uniform(schemes, text)
    return schemes


def named_schemes(text: str) -> tuple[str, ...]:
    """List the schemes that a layout names, for any number of layers.

    Args:
        text: Such as "repo@1/3".

    Returns:
        Schemes without duplicates; RoPE below `@START` is not among them.

    Raises:
        ValueError: A scheme is unknown.
    """
    scheme = text.strip().partition("@")[0]
    named = tuple(part.strip() for part in text.split(",")) if "," in text else _period(scheme)
    for name in named:
        _require_known(name)
    return tuple(dict.fromkeys(named))


def format_layout(schemes: tuple[str, ...]) -> str:
    """Format schemes as the shortest layout that `parse_layout` reads back.

    Args:
        schemes: Scheme of every layer.

    Returns:
        The layout; it does not state which layers lack attention.
    """
    layers = len(schemes)
    # A name is shortest, then a name with a start layer, then a list. Published periods come before
    # lists, even if they fit only once.
    for name in (*SCHEMES, *_PUBLISHED):
        if _matches(parse_layout(name, layers), schemes):
            return name
    # All layers with RoPE have a name.
    start = next(
        layer for layer, scheme in enumerate(schemes) if scheme not in ("rope", NO_ATTENTION)
    )
    for name in (schemes[start], *_PUBLISHED, *_PERIODS):
        period = _period(name)
        # RoPE layers before the start may belong to the period: r2n1 begins two layers before NoPE.
        first = start - next(place for place, scheme in enumerate(period) if scheme != "rope")
        if first >= 0 and _matches(_repeat(period, first, layers), schemes):
            return f"{name}@{first}" if first else name
    return ",".join(schemes)


def _period(name: str) -> tuple[str, ...]:
    """Schemes of one period: a single scheme, or the runs of a name such as "r3n1"."""
    if not re.fullmatch(r"(r[1-9]n[1-9])|(n[1-9]r[1-9])", name):
        return (name,)
    return (_LETTERS[name[0]],) * int(name[1]) + (_LETTERS[name[2]],) * int(name[3])


def _matches(named: tuple[str, ...], schemes: tuple[str, ...]) -> bool:
    # A layer without attention fits any scheme.
    return all(scheme in (name, NO_ATTENTION) for name, scheme in zip(named, schemes, strict=True))


def _repeat(period: tuple[str, ...], start: int, layers: int) -> tuple[str, ...]:
    return ("rope",) * start + tuple(period[layer % len(period)] for layer in range(layers - start))


def _require_known(scheme: str) -> None:
    if scheme not in SCHEMES and scheme != NO_ATTENTION and scheme not in (known := scheme_names()):
        if ".py" in scheme:
            raise ValueError(
                f"the scheme {scheme!r:.80} is of a file, which --scheme of a command alone runs; "
                "in Python give its function a name, by ri.register_scheme"
            )
        close = get_close_matches(scheme, known, n=1, cutoff=0.75)
        meant = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"unknown position scheme {scheme!r:.80}; {meant}known are {', '.join(known)}, and "
            "periods such as r2n1"
        )


def _require_uniform(schemes: tuple[str, ...], layout: str) -> None:
    if "learned" in schemes and not set(schemes) <= {"learned", NO_ATTENTION}:
        raise ValueError(
            f"layout {layout!r}: learned absolute positions enter at the model's input, so "
            "they are for all layers or none"
        )


def _parse_start(text: str, layers: int, layout: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}(/0*[1-9][0-9]{0,8})?", text):
        raise ValueError(
            f"layout {layout!r:.80}: after @ stands a layer (5) or a share of the layers "
            f"(1/3), not {text!r:.80}"
        )
    # Exact fractions, since floats would round 1/49 of 49 layers down to 0.
    start = math.floor(Fraction(text) * layers) if "/" in text else int(text)
    if start >= layers:
        raise ValueError(
            f"layout {layout!r} starts at layer {start}; the model's layers are 0 to {layers - 1}"
        )
    return start
