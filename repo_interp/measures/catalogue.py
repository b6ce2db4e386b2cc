"""The measures by name, with their default parameters.

Another package adds its own by an entry point of the group `repo_interp.measures` - a callable without arguments that returns an
object following `measures.statistics.Measure` - and `repo-interp analyze --measures` knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from repo_interp.errors import InputError
from repo_interp.measures.statistics import Measure

_OWN = {
    "positions": ("repo_interp.measures.positions", "Positions"),
    "patterns": ("repo_interp.measures.patterns", "Patterns"),
    "attention_mass": ("repo_interp.measures.attention_mass", "AttentionMass"),
}


def measure_names() -> tuple[str, ...]:
    """Every measure that `measure_named` knows: ours, then those of other packages."""
    return (
        *_OWN,
        *sorted(point.name for point in entry_points(group="repo_interp.measures") if point.name not in _OWN),
    )


def measure_named(name: str) -> Measure:
    """The measure `name` with its default parameters. Raises InputError naming those there are."""
    return _factory(name)()


def _factory(name: str) -> Callable[[], Measure]:
    if name in _OWN:
        module, attribute = _OWN[name]
        return getattr(import_module(module), attribute)
    for point in entry_points(group="repo_interp.measures", name=name):
        return point.load()
    raise InputError(f"there is no measure {name!r}; there are {', '.join(measure_names())}")
