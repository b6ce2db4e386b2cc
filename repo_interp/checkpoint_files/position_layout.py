"""`position_layout` in config.json: the scheme of every layer in our format, and its options.

    "model_type": "repo_interp", "num_hidden_layers": COUNTED,
    "position_layout": {"layers": ["rope", "repo"], OPTION: VALUE, "functions": {SCHEME: SOURCE}}

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from repo_interp.checkpoint_files.options import other_functions, read_functions, scheme_options
from repo_interp.errors import InputError, nearest
from repo_interp.positions.layouts import NO_ATTENTION, scheme_names
from repo_interp.storage.records import abbreviate

OURS = "repo_interp"
COUNTED = (
    "one for each scheme of position_layout; load it with repo_interp, since no other "
    "class has its positions"
)
"""The value of num_hidden_layers in our format: no class of another library can be built
with it.
"""


def resolve_layers(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """Replace the text in the field for the number of layers by the number.

    Args:
        raw: Keys of config.json.
        source: The file, for errors.

    Returns:
        `raw`, or a copy with `num_hidden_layers`.

    Raises:
        InputError: The layout names no layers.
    """
    if raw.get("num_hidden_layers") != COUNTED:
        return raw
    named = raw.get("position_layout")
    layers = named.get("layers") if isinstance(named, Mapping) else None
    if not isinstance(layers, list) or not layers:
        raise InputError(
            f"{source}: position_layout is {abbreviate(named)}; wanted one known scheme for each layer"
        )
    return raw | {"num_hidden_layers": len(layers)}


def read_layout(
    raw: Mapping[str, Any], layers: int, source: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Read the schemes and options of `position_layout`.

    Args:
        raw: Keys of config.json.
        layers: Number of layers of the model.
        source: The file, for errors.

    Returns:
        Scheme by layer, and options by name.

    Raises:
        InputError: A scheme or an option is unknown.
    """
    stored = raw.get("position_layout")
    options = dict(stored) if isinstance(stored, Mapping) else {}
    schemes = options.pop("layers", None)
    # One scheme per layer, without counting on defaults: a wrong layout runs without an error.
    if (
        not isinstance(schemes, list)
        or len(schemes) != layers
        or not all(isinstance(scheme, str) for scheme in schemes)
    ):
        raise InputError(
            f"{source}: position_layout is {stored!r}; wanted one known scheme for each of "
            f"{layers} layers"
        )
    known = (*scheme_names(), NO_ATTENTION)
    functions = options.pop("functions", {})
    for layer, scheme in enumerate(schemes):
        if scheme not in known:
            raise InputError(
                f"{source}: the scheme {scheme!r:.80} of layer {layer} is not known here; "
                f"{nearest(scheme, known)}install the package that has it, name its file "
                "by --scheme, or its function by ri.register_scheme before the checkpoint is loaded"
            )
    read_functions(functions, schemes, source)
    # Checked now although `reposition` checks too: here the message can name the file.
    try:
        scheme_options(options)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    return tuple(schemes), options


def function_remark(raw: Mapping[str, Any]) -> str:
    """Compare the functions that made a checkpoint with those that open it.

    Args:
        raw: Keys of config.json, whose layout was read.

    Returns:
        The differences, for the user; "" if there is none.
    """
    layout = raw.get("position_layout")
    others = other_functions(layout.get("functions", {}) if isinstance(layout, Mapping) else {})
    return others and (
        f"was made with another function of a scheme ({others}): what it computes may differ from "
        "what was trained"
    )
