"""Topics of measures: one name by which `--measures` asks for several.

    topic -> the measures whose field `topic` it is        ours first, then other packages'

This module imports no measure of ours: topics are read from their source.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from repo_interp.entry_points import OWN, attribute_texts, find, names
from repo_interp.errors import InputError


def topics(group: str) -> dict[str, tuple[str, ...]]:
    """Collect our objects of a group by the topic that they state; imports nothing.

    Args:
        group: Group of entry points.

    Returns:
        Names by topic.
    """
    by_topic: dict[str, tuple[str, ...]] = {}
    for name, topic in attribute_texts(group, "topic").items():
        by_topic[topic] = (*by_topic.get(topic, ()), name)
    return by_topic


def expand_topics(group: str, given: Iterable[Any]) -> list[Any]:
    """Replace each topic by its names.

    Args:
        group: Group of entry points.
        given: Names, topics, and other values, which stay.

    Returns:
        Names; names that are in `given` already are not added again. Unknown names stay.
    """
    expanded, given = [], list(given)
    named = {value for value in given if isinstance(value, str)}
    for value in given:
        if not isinstance(value, str) or value in OWN[group] or value in names(group):
            expanded.append(value)
            continue
        members = topics(group).get(value, ()) + _of_others(group, value)
        expanded += [name for name in members if name not in (*named, *expanded)] or [value]
    return expanded


def _of_others(group: str, topic: str) -> tuple[str, ...]:
    """Names from other packages for objects with a topic; broken packages are skipped."""
    found = []
    for name in names(group)[len(OWN[group]) :]:
        with suppress(InputError):
            if getattr(find(group, name), "topic", "") == topic:
                found.append(name)
    return tuple(found)
