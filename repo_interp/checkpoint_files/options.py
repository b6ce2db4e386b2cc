"""Choices within position schemes, one record per model, and the schemes that they change.

Part of a checkpoint's configuration (`position_layout`). Loads no torch: `schemes` builds the
choices.

    functions     {SCHEME: {"function": NAME, "sha256": DIGEST}} of schemes that no package provides

DIGEST is the digest of the function's file, or of the text of the function if it is in a notebook
or the main program. A checkpoint contains the digest and no code: the user who opens it provides
the function.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from repo_interp.entry_points import SCHEMES as SCHEME_GROUP
from repo_interp.errors import InputError
from repo_interp.installed_points import RegisteredPoint, installed_points
from repo_interp.positions.layouts import CONTEXTUAL, LEARNED, SCHEMES, GateSource
from repo_interp.storage.records import abbreviate
from repo_interp.values import Finite, PositiveOrZero, TokensOrNone, check_fields

_USED_BY: dict[str, tuple[str, ...]] = {
    "assignment": tuple(scheme for scheme in LEARNED if scheme != "continuous"),
    "gates": CONTEXTUAL,
    "map": CONTEXTUAL,
    "p_max": ("cope", "cope_rope", "cope_relative"),
    "slopes": ("cope_alibi",),
    "first_slope": ("cope_alibi",),
    "slope_ratio": ("cope_alibi",),
    "training_length": (
        "learned",
        "fire",
        "repo_fire",
        "cope",
        "cope_rope",
        "cope_relative",
        "rope_high",
        "hope",
        "hope_ab1",
        "hope_ab2",
        "hope_ab3",
    ),
}
"""The schemes that each option changes.

`scheme_deviation` is part of every training's record, whatever the scheme, so it is not among
these.
"""

Assignment = Literal["kv_head", "head", "layer"]
"""Sharing of learned positions: one row per key-value head, per head, or per layer."""


@dataclass(frozen=True)
class SchemeOptions:
    """Choices within schemes, the same for all layers of a model; part of its configuration."""

    assignment: Assignment = "kv_head"
    gates: GateSource = "keys"
    """Source of CoPE's gates."""
    map: Literal["layer", "model"] = "layer"
    """Sharing of the map from CoPE's positions: one per layer, or one per model."""
    p_max: TokensOrNone = 0
    """Whole positions of CoPE's map; 0: the training length."""
    slopes: Literal["fixed", "learned"] = "fixed"
    """Slopes of CoPE-ALiBi; learned ones start at 0."""
    first_slope: Finite = 0.0
    """Fixed slope of the first head, in logits per position; 0: -2^(-8 / heads)."""
    slope_ratio: PositiveOrZero = 0.0
    """Ratio of the fixed slopes of neighboring heads; 0: 2^(-8 / heads)."""
    scheme_deviation: PositiveOrZero = 0.0
    """Standard deviation of fresh parameters of schemes; 0: the configuration's
    initializer_range.
    """
    training_length: TokensOrNone = 0
    """L of HoPE, of FIRE's threshold and of the learned table, in tokens; 0: the configuration's.
    """

    def __post_init__(self) -> None:
        check_fields(self)


def scheme_options(stated: Mapping[str, Any]) -> SchemeOptions:
    """Make options of schemes from a table.

    Args:
        stated: Values by name of the option.

    Returns:
        The options.

    Raises:
        InputError: A name is unknown, or a value out of range.
    """
    known = [field.name for field in dataclasses.fields(SchemeOptions)]
    unknown = sorted(set(stated) - set(known))
    if unknown:
        raise InputError(f"schemes have no option {unknown[0]!r}; they have {', '.join(known)}")
    return SchemeOptions(**stated)


def options_of(schemes: Collection[str]) -> tuple[str, ...]:
    """List the options that matter in a layout.

    Args:
        schemes: Names of schemes.

    Returns:
        Names of options; all of them if a scheme belongs to another package.
    """
    # A scheme of another package may use any option, so all of them are allowed.
    if not set(schemes) <= set(SCHEMES):
        return tuple(_USED_BY)
    return tuple(name for name, used_by in _USED_BY.items() if set(schemes) & set(used_by))


def require_useful(schemes: Collection[str], options: SchemeOptions) -> None:
    """Refuse an option that was set and changes nothing.

    Args:
        schemes: Names of the schemes of the layout.
        options: Options that the user set.

    Raises:
        InputError: No scheme of the layout reads the option.
    """
    useful = options_of(schemes)
    for name in _USED_BY:
        # Only a value other than the default was set on purpose;
        # a default is in every configuration.
        if name not in useful and getattr(options, name) != getattr(SchemeOptions(), name):
            named = ", ".join(dict.fromkeys(schemes))
            raise InputError(
                f"{name} changes nothing in {named}, which has "
                f"{', '.join(useful) or 'no options'}; leave it out"
            )


Functions = dict[str, dict[str, str]]
"""Name and digest of the function of a scheme, by scheme."""


def describe_source(function: Callable[..., Any]) -> dict[str, str]:
    """Describe a function by its name and the SHA-256 of its source.

    Args:
        function: Any function.

    Returns:
        `function` and `sha256`; nothing if the source cannot be read.
    """
    try:
        file = Path(inspect.getsourcefile(function) or "")
        # A program does more than to define its scheme, so its other lines do not count.
        whole = function.__module__ != "__main__" and file.is_file()
        source = file.read_bytes() if whole else inspect.getsource(function).encode()
    except (OSError, TypeError, AttributeError):
        return {}
    return {
        "function": getattr(function, "__qualname__", function.__class__.__name__),
        "sha256": hashlib.sha256(source).hexdigest(),
    }


def functions_of(schemes: Collection[str]) -> Functions:
    """Describe the functions that schemes have in this process.

    Args:
        schemes: Names of schemes.

    Returns:
        Those of registered schemes with a source, sorted by name.
    """
    sources = {
        point.name: dict(point.source)
        for point in installed_points(SCHEME_GROUP)
        if isinstance(point, RegisteredPoint) and point.source
    }
    return {name: sources[name] for name in sorted(set(schemes) & sources.keys())}


def read_functions(stated: Any, schemes: Collection[str], source: str) -> Functions:
    """Read `position_layout.functions`.

    Args:
        stated: The value.
        schemes: Names of the schemes of the layout.
        source: The file, for errors.

    Returns:
        The functions that are stated.

    Raises:
        InputError: The value is no such table.
    """
    fits = isinstance(stated, Mapping) and all(
        name in schemes
        and isinstance(of_one, Mapping)
        and of_one.keys() == {"function", "sha256"}
        and isinstance(of_one["function"], str)
        and re.fullmatch("[0-9a-f]{64}", str(of_one["sha256"]))
        for name, of_one in stated.items()
    )
    if not fits:
        raise InputError(
            f"{source} has functions {abbreviate(stated)}; wanted function and sha256 of schemes "
            "of the layout"
        )
    return {name: dict(of_one) for name, of_one in stated.items()}


def other_functions(stated: Functions) -> str:
    """Compare functions that a checkpoint or a training states with those of this process.

    Args:
        stated: Functions as `read_functions` returns them.

    Returns:
        Schemes whose function differs now, with both functions; "" if there is none.
    """
    present = functions_of(stated)
    return "; ".join(
        f"{name!r} was {source_in_words(known)}, and is {source_in_words(present.get(name))} now"
        for name, known in stated.items()
        if present.get(name) != known
    )


def source_in_words(function: Mapping[str, str] | None) -> str:
    """Describe a function in a few words.

    Args:
        function: Name and digest; None: no source is known.

    Returns:
        The words.
    """
    if function is None:
        return "of no source that is known"
    return f"{function['function']} of a source with SHA-256 {function['sha256'][:12]}..."
