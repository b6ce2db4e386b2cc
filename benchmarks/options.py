"""Options of a family: every field of its configuration class with another value, tried on a tiny
random model.

    values     the other value of a switch, None if it is allowed, a factor times one and a half,
               0.1 for an epsilon, and those of families.toml
    tested     logits and each layer's output equal the stock model's, also for a copy that
               `ri.save` wrote and in the bridge of `ri.load`, whose hook points of attention are
               called; the layout equals the one read from config.json alone

An option that changes neither logits nor weights of the stock model does not count; an option that
transformers does not build or run is skipped.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from transformers import PretrainedConfig

import repo_interp as ri
from benchmarks.running import said_of
from benchmarks.tiny_models import SIZES, TOKENS, computed, small_configuration, small_model
from repo_interp.errors import InputError
from repo_interp.models.configuration import identify
from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.loading_checks.parity import parity_errors
from repo_interp.positions.layouts import format_layout

REFUSED, UNKNOWN = "refused: ", "transformers: "
"""Beginning of the reason why a scaling or an option is not tested: `ri.load` refuses it, or the
stock model does not run with it.
"""
IDLE = "changes nothing"


def options(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and change of every option of a family's small configuration, one field at a time."""
    small = small_configuration(family)
    # num_attention_heads for the n_head of GPT-2
    common = {own: name for name, own in type(small).attribute_map.items()}
    for field, value in _own_fields(small):
        name = common.get(field.name, field.name)
        # MPT's and DBRX' attention
        if isinstance(value, PretrainedConfig):
            stated = SIZES["family"].get(family, {}).get(name, {})
            for part, inner in _own_fields(value):
                for other in _others(part, inner):
                    yield f"{name}.{part.name}={other}", {name: stated | {part.name: other}}
        elif field.name == "rope_parameters":
            for key, other in SIZES["rotation"].items() if value else ():
                yield f"{name}.{key}={other}", {name: _rotated(value, {key: other})}
        else:
            for other in _others(field, value):
                yield f"{name}={other}", {name: other}
    for name, change in SIZES["together"].items():
        if all(hasattr(small, field) for field in change):
            yield name, change


def _own_fields(config: Any) -> Iterator[tuple[Any, Any]]:
    """Fields that only this configuration has, and their values, except sizes and similar ones."""
    common = {field.name for field in dataclasses.fields(PretrainedConfig)}
    for field in dataclasses.fields(config):
        if field.name not in common and not re.search(SIZES["passed_over"], field.name):
            # Not getattr, which refuses values that differ by layer (Gemma 4's head_dim).
            yield field, vars(config).get(field.name)


def _others(field: Any, value: Any) -> list[Any]:
    """Other values of a field, by its type and from families.toml."""
    union = isinstance(field.type, UnionType) or get_origin(field.type) is Union
    kinds = {*get_args(field.type)} if union else {field.type}
    named = {word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)}
    others = sorted(named, key=str)
    if bool in kinds:
        others.append(not value)
    if NoneType in kinds:
        others.append(None)
    if field.name in SIZES["options"]:
        others += SIZES["options"][field.name]
    elif "_eps" in field.name:
        others.append(0.1)
    elif float in kinds and not isinstance(value, list):
        others.append(float(f"{1.5 * value:g}") if value else 0.5)
    return [
        other
        for other in others
        # A list names kinds of layers that the family has.
        if other != value
        and not (isinstance(value, list) and isinstance(other, list) and {*other} - {*value})
    ]


def _rotated(stated: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` with a change, in every type of layers that rotates."""
    if any(isinstance(value, dict) for value in stated.values()):
        return {kind: value and value | change for kind, value in stated.items()}
    return stated | change


def tried_options(family: str) -> dict[str, str]:
    """The result of every option of `family`: "yes", a number or an error, `IDLE`, or the reason
    why it is not tested.
    """
    plain = computed(small_model(family))
    return {name: tried_option(family, change, plain) for name, change in options(family)}


@torch.no_grad()
def tried_option(
    family: str, change: dict[str, Any], plain: tuple[torch.Tensor, str] | None = None
) -> str:
    """The result of a change of the configuration of `family`; `plain` is the result of its model
    without the change.
    """

    def off(logits: torch.Tensor) -> float:
        return float((logits - expected).abs().max() / expected.abs().max())

    with tempfile.TemporaryDirectory() as directory:
        try:
            stock = small_model(family, small_configuration(family, **change))
            expected, shapes = computed(stock)
            stock.save_pretrained(directory)
            if not expected.isfinite().all():
                raise ValueError("its logits are not finite")
        except Exception as error:
            return f"{UNKNOWN}{said_of(error)}"
        if plain is not None and shapes == plain[1] and torch.equal(expected, plain[0]):
            return IDLE
        try:
            model = ri.open_model(directory)
            if said := misread(directory, model):
                return said
            errors = [
                off(model(TOKENS, use_cache=False).logits),
                max(parity_errors(as_decoder(model), TOKENS[:1])) / 2,
            ]
            ri.save(model, f"{directory}/saved")
            given, cache = ri.load(f"{directory}/saved").run_with_cache(TOKENS)
        except InputError as error:
            return f"{REFUSED}{' '.join(str(error).replace(f'{directory}/', '').split())}"
        except Exception as error:
            return said_of(error)
    return lacking(as_decoder(model).layers[0].layer_idx, cache) or within(
        max(*errors, off(given)), 1e-5
    )


def misread(directory: str, model: Any) -> str:
    """The layout that `inspect` reads from config.json alone; empty if it equals that of the opened
    `model`.
    """
    stated = identify(directory).layout
    return "" if stated == ri.layout(model) else f"config.json is read as {format_layout(stated)}"


def lacking(layer: int, cache: Any) -> str:
    """Hook points of the attention of a layer that were not called; empty if all were."""
    missing = [name for name in SIZES["hooks"] if f"blocks.{layer}.attn.{name}" not in cache]
    return f"without {', '.join(missing)}" if missing else ""


def summed(outcomes: dict[str, str]) -> str:
    """The cell of the options of a family."""
    tried = {name: came for name, came in outcomes.items() if not came.startswith((IDLE, UNKNOWN))}
    good = sum(came == "yes" for came in tried.values())
    skipped = sum(came.startswith(UNKNOWN) for came in outcomes.values())
    return f"{good} of {len(tried)}" + (f", {skipped} skipped" if skipped else "")


def within(error: float, limit: float) -> str:
    """ "yes", or the error if it is larger."""
    return "yes" if error <= limit else f"{error:.1e}"
