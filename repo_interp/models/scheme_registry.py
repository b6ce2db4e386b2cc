"""Position schemes that a program names itself, without a package that declares them.

Knows which names layouts can hold and which are taken; knows nothing about how layers are built.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from repo_interp.entry_points import SCHEMES as SCHEME_GROUP
from repo_interp.errors import InputError
from repo_interp.installed_points import installed_points, register
from repo_interp.models.attention import SchemeParts
from repo_interp.models.rotation import Rotation
from repo_interp.models.schemes import SchemeBuilder
from repo_interp.positions.layouts import SCHEMES, parse_period


def register_scheme(
    name: str, build: Callable[[SchemeBuilder, Rotation, int], SchemeParts]
) -> None:
    """Give a scheme a name in layouts, until the process ends.

    A package declares an entry point instead, so that every process and command knows the name.

    Args:
        name: Name in lower case, with digits and underscores; a scheme that was registered under it
            is replaced in models to come.
        build: Function of a builder, the rotation of a layer and the width of a head that gives
            `SchemeParts`.

    Raises:
        InputError: The name is taken or cannot stand in a layout, or `build` cannot be called.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise InputError(
            f"a scheme is called {name!r:.80}; wanted lower-case letters, digits and underscores, "
            "beginning with a letter"
        )
    if not callable(build):
        raise InputError(
            f"the scheme {name!r} is a {type(build).__name__}; wanted a function that gives "
            "SchemeParts"
        )
    known = {*SCHEMES, *(point.name for point in installed_points(SCHEME_GROUP) if point.dist)}
    if name in known or len(parse_period(name)) > 1:
        raise InputError(f"layouts know {name!r} already; give your scheme another name")
    register(SCHEME_GROUP, name, build)
