"""Position schemes by name: ours, those of other packages, and those that a program registers.

This module knows valid names of layouts, taken names, and the parts that fit a layer; it knows no
scheme.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from repo_interp.checkpoint_files.options import describe_source
from repo_interp.entry_points import SCHEMES as SCHEME_GROUP
from repo_interp.entry_points import called, find
from repo_interp.errors import InputError
from repo_interp.installed_points import installed_points, register
from repo_interp.models.rotation import Rotation
from repo_interp.models.scheme_parts import PARTS, SchemeParts
from repo_interp.positions.layouts import SCHEMES


def register_scheme(name: str, build: Callable[[Any, Rotation, int], SchemeParts]) -> None:
    """Give a scheme a name in layouts, until the process ends.

    A package declares an entry point instead, so that every process and command knows the name.
    Checkpoints keep the SHA-256 of the function's source, and loading warns if another function
    has the name.

    Args:
        name: Name in lower case, with digits and underscores; a scheme that was registered with
            this name is replaced in later models.
        build: Function of a builder, the rotation of a layer and the width of a head that returns
            `SchemeParts`.

    Raises:
        InputError: The name is taken or invalid in a layout, or `build` cannot be called.
    """
    register_function(name, build, describe_source(build))


def register_function(
    name: str, build: Callable[[Any, Rotation, int], SchemeParts], source: Mapping[str, str]
) -> None:
    """Do what `register_scheme` does, for a function of a known source.

    Args:
        name: Name in layouts.
        build: The function.
        source: As `describe_source` describes it.

    Raises:
        InputError: As `register_scheme`.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise InputError(
            f"a scheme is called {name!r:.80}; wanted lower-case letters, digits and underscores, "
            "beginning with a letter"
        )
    if not callable(build):
        raise InputError(
            f"the scheme {name!r} is {type(build).__name__}; wanted a function that gives "
            "SchemeParts"
        )
    known = {*SCHEMES, *(point.name for point in installed_points(SCHEME_GROUP) if point.dist)}
    if name in known or re.fullmatch(r"([rn][1-9]){2}", name):  # such as r3n1, a period
        raise InputError(f"{name!r} is a known scheme already; give your scheme another name")
    register(SCHEME_GROUP, name, build, source)


def named_parts(builder: Any, scheme: str, rotation: Rotation, d_head: int) -> SchemeParts:
    """Build the parts of a scheme for one layer.

    Args:
        builder: The `SchemeBuilder`, for the function of the scheme.
        scheme: Name of the scheme.
        rotation: How the layer rotates.
        d_head: Width of a head.

    Returns:
        The parts.

    Raises:
        InputError: No package gives the scheme, or its parts do not fit a layer.
    """
    build = find(SCHEME_GROUP, scheme)
    if build is None:
        raise InputError(
            f"no installed package gives the scheme {scheme!r}; install the one that does"
        )
    parts = build(builder, rotation, d_head) if callable(build) else build
    if not isinstance(parts, SchemeParts):
        code = getattr(build, "__code__", None)
        source = f" by {code.co_name} of {os.path.basename(code.co_filename)}" if code else ""
        raise InputError(
            f"{called(SCHEME_GROUP, scheme)} gave {type(parts).__name__}{source}; wanted a "
            "function that returns SchemeParts"
        )
    for name in PARTS:
        part = getattr(parts, name)
        if not isinstance(part, nn.Module | None):
            raise InputError(
                f"{called(SCHEME_GROUP, scheme)} has {type(part).__name__} as {name}; wanted "
                "an nn.Module, or None"
            )
    _require_rotation(parts, called(SCHEME_GROUP, scheme), d_head // 2, rotation)
    return dataclasses.replace(parts, name=scheme)


def _require_rotation(parts: SchemeParts, source: str, pairs: int, rotation: Rotation) -> None:
    """Raise InputError for frequencies or a scaling that are no real numbers, one for each pair."""
    rows = [(rotation.heads, pairs), (rotation.kv_heads, pairs)]
    for name, shapes, wanted in (
        (
            "frequencies",
            [(pairs,), *rows],
            f"{pairs}, one for every rotary pair of a head, or {list(rows[0])} by head",
        ),
        ("attention_scaling", [(), (pairs,)], f"one number, or {pairs}"),
    ):
        given = getattr(parts, name)
        if given is None and name == "frequencies":
            continue
        if not isinstance(given, Tensor | int | float):
            raise InputError(f"{source} has {type(given).__name__} as {name}; wanted {wanted}")
        numbers = torch.as_tensor(given)
        if tuple(numbers.shape) not in shapes:
            raise InputError(f"{source} has {name} {list(numbers.shape)}; wanted {wanted}")
        if numbers.is_complex():
            raise InputError(f"{source} has complex {name}; wanted real numbers")
        if numbers.requires_grad and not isinstance(given, nn.Parameter):
            raise InputError(
                f"{source} has {name} that follow from a parameter, which the model would not "
                "have; give the nn.Parameter itself, or let an assigner give positions by pair"
            )
