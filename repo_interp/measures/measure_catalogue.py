"""Measures by name, with their default parameters.

Ours and those of other packages are entry points of the group `repo_interp.measures`
(`entry_points`): a callable without arguments that returns a `measures.statistics.Measure`, or an
object with the same parts.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from repo_interp.entry_points import MEASURES, OWN, attribute_texts, find, named, names
from repo_interp.errors import InputError
from repo_interp.measures.border import PARTS
from repo_interp.measures.statistics import Measure


def measure_names() -> tuple[str, ...]:
    """Return the names that `measure_named` knows.

    Returns:
        Built-in names, then those of other packages.
    """
    return names(MEASURES)


def measure_named(name: str) -> Measure:
    """Return a measure with its default parameters.

    Args:
        name: Name of an entry point of the group `repo_interp.measures`.

    Returns:
        The measure.

    Raises:
        InputError: No measure has this name; the message lists the names.
    """

    def is_one(made: Any) -> bool:
        # By its parts too: a measure of another package need not inherit from ours
        return isinstance(made, Measure) or all(hasattr(made, part) for part in PARTS)

    return named(MEASURES, name, is_one, f"an object of that name with {', '.join(PARTS[1:])}")


def measures_offering(*offers: str) -> tuple[str, ...]:
    """List the measures that declare one of some offers (`Measure.offers`); imports none of ours.

    Args:
        *offers: Words of the declaration, such as "head_scores".

    Returns:
        Our names, then those of other packages; broken packages are skipped.
    """
    stated = dict(attribute_texts(MEASURES, "offers"))
    for name in names(MEASURES)[len(OWN[MEASURES]) :]:
        with suppress(InputError):
            stated[name] = str(getattr(find(MEASURES, name), "offers", ""))
    return tuple(name for name, text in stated.items() if {*offers} & {*text.split()})
