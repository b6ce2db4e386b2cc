"""Measures by name, with their default parameters.

Ours and those of other packages are entry points of the group `repo_interp.measures` (`entry_points`): a callable without arguments that
returns a `measures.statistics.Measure`, or an object with the same parts.
"""

from __future__ import annotations

from repo_interp.entry_points import MEASURES, called, made, names
from repo_interp.errors import InputError
from repo_interp.measures.statistics import PARTS, Measure


def measure_names() -> tuple[str, ...]:
    """Every measure that `measure_named` knows: ours, then those of other packages."""
    return names(MEASURES)


def measure_named(name: str) -> Measure:
    """The measure `name` with its default parameters. Raises InputError naming those there are."""
    measure = made(MEASURES, name)
    if measure is None:
        raise InputError(f"there is no measure {name!r}; there are {', '.join(measure_names())}")
    whole = isinstance(measure, Measure) or all(hasattr(measure, part) for part in PARTS)
    if getattr(measure, "name", None) != name or not whole:
        raise InputError(
            f"{called(MEASURES, name)} is a {type(measure).__name__}; wanted an object of that name with {', '.join(PARTS[1:])}"
        )
    return measure
