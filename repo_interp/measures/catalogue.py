"""The measures by name, with their default parameters.

Another package adds its own by an entry point of the group `repo_interp.measures` - a callable without arguments that returns an
object following `measures.statistics.Measure` - and `repo-interp analyze --measures` knows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from typing import Any

from repo_interp.entry_points import added, added_names
from repo_interp.errors import InputError
from repo_interp.measures.statistics import Measure

_OWN = {
    "positions": ("repo_interp.measures.positions", "Positions"),
    "patterns": ("repo_interp.measures.patterns", "Patterns"),
    "attention_mass": ("repo_interp.measures.attention_mass", "AttentionMass"),
    "components": ("repo_interp.measures.components", "Components"),
    "three_axis": ("repo_interp.measures.three_axis", "ThreeAxis"),
    "fake_distance": ("repo_interp.measures.fake_distance", "FakeDistance"),
    "rotation": ("repo_interp.measures.rotation", "Rotation"),
    "maps": ("repo_interp.measures.maps", "Maps"),
    "gates": ("repo_interp.measures.gates", "Gates"),
    "segments": ("repo_interp.measures.segments", "Segments"),
}
_PARTS = ("required_spans", "parameters", "observe", "conclude")


def measure_names() -> tuple[str, ...]:
    """Every measure that `measure_named` knows: ours, then those of other packages."""
    return (*_OWN, *(name for name in added_names("repo_interp.measures") if name not in _OWN))


def measure_named(name: str) -> Measure:
    """The measure `name` with its default parameters. Raises InputError naming those there are."""
    measure = _factory(name)()
    if getattr(measure, "name", None) != name or not all(hasattr(measure, part) for part in _PARTS):
        raise InputError(f"the measure {name!r} is {measure!r:.80}; wanted an object of that name with {', '.join(_PARTS)}")
    return measure


def for_training_length(measure: Measure, training_length: int) -> Measure:
    """`measure` with the checkpoint's training length, in tokens, where it has such a parameter and nobody set it."""
    asked: Any = measure
    if getattr(asked, "training_length", 0) is not None:
        return measure
    return dataclasses.replace(asked, training_length=training_length)


def with_parameter(measure: Measure, name: str, text: str) -> Measure:
    """`measure` with one parameter changed, its value given as text, with commas where it takes several. Raises InputError."""
    changed: Any = measure
    fields = getattr(type(changed), "__dataclass_fields__", {})
    known = [field for field in fields if field not in ("name", "required_spans")]
    if name not in known:
        raise InputError(f"the measure {measure.name!r} has no parameter {name!r}; it has {', '.join(known) or 'none'}")
    present = getattr(measure, name)
    try:
        if isinstance(present, tuple):
            value: object = tuple(part for part in text.split(",") if part)
        elif isinstance(present, float):
            value = float(text)
        elif isinstance(present, int) or "int" in str(fields[name].type):
            value = int(text)
        else:
            value = text
        return dataclasses.replace(changed, **{name: value})
    except ValueError as error:
        raise InputError(f"{measure.name}.{name}={text}: {error}") from None


def _factory(name: str) -> Callable[[], Measure]:
    if name in _OWN:
        module, attribute = _OWN[name]
        return getattr(import_module(module), attribute)
    factory = added("repo_interp.measures", name)
    if factory is not None:
        return factory
    raise InputError(f"there is no measure {name!r}; there are {', '.join(measure_names())}")
