"""The checkpoints that the RePo authors released: the layers that `pe_config` repositions.

    dynamic_pe_mode                                 the scheme of the repositioned layers
    dynmaic_pe_start_layer, dynmaic_pe_layer_ids    which layers those are; the released code reads
                                                    this misspelling, and files have the correct one
                                                    too, with the same value

The layers from the start layer on are repositioned; if layer ids are given, only those among them.
The rest is RoPE. Modes that the released code does not know silently run RoPE there; here
they are refused.

"cope" is a mode of the authors' training code only. It learns a table [p_max, d_head] for every
layer, `dynamic_map`, with p_max = min(training length, 4096); a file without these tables is
refused when its weights are read. Knows nothing about the rest of config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from repo_interp.errors import InputError

_MODES = {
    "none": "rope",
    "nope": "nope",
    "swigluex_multihead": "repo",
    "continuous": "continuous",
    "multihead_continuous": "multihead_continuous",
    "cope": "cope",
}
_MOST_COUNTED = 4096
"""Largest p_max of CoPE in the authors' training code."""
_KEYS = (
    "dynamic_pe_mode",
    *(
        f"{spelling}_pe_{key}"
        for spelling in ("dynmaic", "dynamic")
        for key in ("start_layer", "layer_ids")
    ),
    "dynamic_pe_init_pdrop",
    "dynamic_pe_dropout_anneal_step",  # Used by training alone
)


def released_layout(pe_config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Read the schemes that `pe_config` states.

    Args:
        pe_config: The key of config.json.
        layers: Number of layers of the model.

    Returns:
        Scheme by layer.

    Raises:
        InputError: A key or mode is unknown, a layer is missing, or two spellings disagree.
    """
    # others are not about positions
    unknown = [key for key in pe_config if key.startswith(("dyn", "pe_")) and key not in _KEYS]
    if unknown:
        raise InputError(
            f"pe_config has {unknown[0]!r}, which the released format does not have; it has "
            f"{', '.join(_KEYS)}"
        )
    mode = pe_config.get("dynamic_pe_mode", "none")
    if mode not in _MODES:
        raise InputError(f"pe_config has dynamic_pe_mode {mode!r}; known are {', '.join(_MODES)}")
    start = _either_spelling(pe_config, "start_layer", 0)
    # true would pass as layer 1.
    if not isinstance(start, int) or isinstance(start, bool) or not 0 <= start <= layers:
        raise InputError(
            f"pe_config starts repositioning at layer {start!r}; the model's layers are 0 to "
            f"{layers - 1}"
        )
    # Both conditions of the released code hold together: from the start on, and named.
    chosen = set(range(start, layers)) & _layer_ids(
        _either_spelling(pe_config, "layer_ids", ""), layers
    )
    return tuple(_MODES[mode] if layer in chosen else "rope" for layer in range(layers))


def released_options(schemes: Sequence[str], length: int) -> dict[str, Any]:
    """Return the options of schemes that the authors' code fixes.

    Args:
        schemes: Scheme by layer.
        length: `max_position_embeddings`.

    Returns:
        Options by name, as `reposition` takes them: of CoPE, p_max.
    """
    return {"p_max": min(length, _MOST_COUNTED)} if "cope" in schemes else {}


def released_key(name: str) -> str:
    """Return the authors' name of a weight, which may differ: CoPE's table is `dynamic_map`.

    Args:
        name: Name in one of our files.

    Returns:
        Name in one of their files.
    """
    return name.replace(".self_attn.position_map", ".self_attn.dynamic_map")


def _either_spelling(pe_config: Mapping[str, Any], key: str, default: Any) -> Any:
    misspelt, correct = f"dynmaic_pe_{key}", f"dynamic_pe_{key}"
    if misspelt in pe_config and correct in pe_config and pe_config[misspelt] != pe_config[correct]:
        raise InputError(
            f"pe_config says {misspelt} {pe_config[misspelt]!r} but {correct} "
            f"{pe_config[correct]!r}; "
            "make them equal (the released code reads the former)"
        )
    # The misspelt one goes first, as the released code reads that alone.
    return pe_config.get(misspelt, pe_config.get(correct, default))


def _layer_ids(text: Any, layers: int) -> set[int]:
    # Empty is the released default: all layers.
    if text in ("", None):
        return set(range(layers))
    if not isinstance(text, str) or not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise InputError(
            f"pe_config has layer ids {text!r}; wanted layer numbers with commas, such as '1,3'"
        )
    chosen = {int(part) for part in text.split(",")}
    if max(chosen) >= layers:
        raise InputError(
            f"pe_config repositions layer {max(chosen)}; the model's layers are 0 to {layers - 1}"
        )
    return chosen
