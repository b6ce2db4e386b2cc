"""Results that measures cannot give for layers of a model, found before any pass.

`Measure.gap` states the gap for one layer from a sample of its inputs (`models.layer_probe`). Notes
of a run name the layers. If a measure has no result in any layer, a warning says so, or the measure
is refused if it needs a layer (`Needs.layer`). This module knows no single measure and no scheme.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from repo_interp.analysis.layer_statistics import is_about
from repo_interp.errors import InputError
from repo_interp.measures.gap import NOTHING, Gap
from repo_interp.measures.statistics import Measure
from repo_interp.models.decoder import Decoder
from repo_interp.models.layer_probe import sample
from repo_interp.tasks.prompt import Prompt
from repo_interp.values import format_ranges


class Gaps:
    """The gaps of measures in the layers of a model."""

    def __init__(
        self,
        decoder: Decoder,
        measures: Sequence[Measure],
        prompts: Sequence[Prompt] = (),
        layers: Collection[int] | None = None,
    ) -> None:
        """Ask every measure about every layer.

        Args:
            decoder: Decoder of the model.
            measures: Measures of the analysis.
            prompts: Prompts of the analysis, of which some may hold images.
            layers: Layers that are measured; None: all.
        """
        by_axis = any(
            isinstance(place, tuple) and len({*place}) > 1
            for prompt in prompts
            for place in prompt.position_ids or ()
        )
        self._schemes = decoder.schemes
        self._asked = decoder.attentions(decoder.by_layer if layers is None else layers)
        self._measures = measures
        self._by_name = {measure.name: measure for measure in measures}
        self._found: dict[str, dict[Gap, list[int]]] = {measure.name: {} for measure in measures}
        """Layers by gap, by measure."""
        self._skipped: dict[str, list[int]] = {measure.name: [] for measure in measures}
        """Layers of schemes that a measure is not about (`Needs.schemes`)."""
        for attention in self._asked:
            inputs, layer = sample(attention, by_axis), attention.layer_idx
            for measure in measures:
                if not _names(measure, layer):
                    continue
                if not is_about(measure, attention.scheme):
                    self._skipped[measure.name].append(layer)
                elif (gap := measure.gap(inputs)) is not None:
                    self._found[measure.name].setdefault(gap, []).append(layer)

    def of(self, measure: str) -> list[str]:
        """Describe the gaps of a measure and their reasons.

        Args:
            measure: Its name.

        Returns:
            Words after "gives", such as "nothing in layers 0-1 (nope), which do not rotate".
        """
        left_out = [
            f"{gap.what} in layers {self._named(layers)}, which {gap.reason}"
            for gap, layers in self._found[measure].items()
        ]
        if skipped := self._skipped[measure]:
            wanted = ", ".join(self._by_name[measure].needs.schemes)
            left_out.insert(
                0, f"{NOTHING} in layers {self._named(skipped)}, which are not of {wanted}"
            )
        return left_out

    @property
    def notes(self) -> list[str]:
        """A line for everything that a measure leaves out."""
        silent, lines = self.silent, []
        for measure in self._measures:
            name = measure.name
            if name in silent:
                lines.append(silent[name])
                continue
            lines += [f"{name} gives {gap}" for gap in self.of(name)]
        return lines

    @property
    def silent(self) -> dict[str, str]:
        """Reasons by name, for measures without a result in any layer."""
        silent = {}
        for measure in self._measures:
            skipped = self._skipped[measure.name]
            gaps = self._found[measure.name].items()
            whole = {gap: layers for gap, layers in gaps if gap.what == NOTHING}
            named = sum(_names(measure, attention.layer_idx) for attention in self._asked)
            if named and len(skipped) + sum(map(len, whole.values())) == named:
                reasons = [f"{self._named(layers)} {gap.reason}" for gap, layers in whole.items()]
                if skipped:
                    wanted = ", ".join(measure.needs.schemes)
                    reasons.append(f"{self._named(skipped)} are not of {wanted}, which it is about")
                silent[measure.name] = (
                    f"{measure.name} gives nothing here: layers {'; layers '.join(reasons)}"
                )
        return silent

    def require_layers(self) -> None:
        """Refuse a measure that needs a layer of which it gives something, and has none.

        Raises:
            InputError: There is one, or a measure skips all layers.
        """
        for measure in self._measures:
            needs_one = measure.needs.layer or not self._found[measure.name]
            if needs_one and measure.name in self.silent:
                raise InputError(f"{self.silent[measure.name]}; leave the measure out")

    def _named(self, layers: Sequence[int]) -> str:
        """Numbers of layers, with their schemes."""
        schemes = dict.fromkeys(self._schemes[layer] for layer in layers)
        return f"{format_ranges(layers)} ({', '.join(schemes)})"


def _names(measure: Measure, layer: int) -> bool:
    """Whether a layer is among those of a measure (`Needs.heads`)."""
    return measure.needs.heads is None or layer in measure.needs.heads
