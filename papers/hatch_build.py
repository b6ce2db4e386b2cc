"""Puts the zoo, which stands beside the package, into a wheel as position_papers/zoo; an editable
installation reads it where it is.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ZooInWheel(BuildHookInterface):
    """Called by hatchling before it builds."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the zoo to `build_data` of a "standard" wheel, and not of an "editable" one."""
        if version == "standard":
            build_data["force_include"]["zoo"] = "position_papers/zoo"
