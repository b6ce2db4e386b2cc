"""The base of measures of segments: sentences, lines and whatever else divides a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from repo_interp.measures.kernels.segmentation import Kinds
from repo_interp.measures.statistics import Measure


class SegmentMeasure(Measure):
    """A measure of segments of the kinds in its field `kinds`."""

    kinds: Kinds

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The fields, with the kinds as one text."""
        return {**super().parameters, "kinds": ",".join(self.kinds)}
