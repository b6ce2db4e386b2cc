"""A measure, and its sufficient statistics for one layer and batch, with an exact merge.

    merge(observe(A), observe(B)) = observe(A and B)

`sums` add; `per_prompt` concatenate along `prompt`; `first_prompt` comes from the one batch that
has prompt number 0. So many prompts, long prompts, several processes and a resumed run all work the
same way. Axes that grow with the prompt (`token`, `distance`, `chunk`) are
aligned by their coordinate: absent entries of a sum count 0, absent entries of a per-prompt array
are NaN (-1 for integers).

This module knows nothing about single measures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.inputs import TENSORS, AttentionInputs, Predictions, Spans
from repo_interp.measures.fitting import AnyPrompt, Layers, PromptLabels
from repo_interp.measures.gap import Gap
from repo_interp.measures.kernels.heads import Reduction
from repo_interp.measures.labels import Arrays, concat_arrays, sum_arrays
from repo_interp.values import check_fields

STATISTICS = ("per_prompt", "sums", "first_prompt")
"""The parts of `Statistics`."""


class Statistics:
    """Labeled arrays of some layers and prompts.

    Every variable has the axis `layer` with its coordinate; or, of predictions, none has.

    A part is given as `labels.Arrays` or as a Dataset, and read as a Dataset, made on first access.
    """

    def __init__(
        self,
        per_prompt: Arrays | xr.Dataset | None = None,
        sums: Arrays | xr.Dataset | None = None,
        first_prompt: Arrays | xr.Dataset | None = None,
    ) -> None:
        given = zip(STATISTICS, (per_prompt, sums, first_prompt), strict=True)
        # Kept as Arrays: making and aligning Datasets takes longer than most measures
        self.arrays: dict[str, Arrays] = {
            name: Arrays() if part is None else Arrays.of(part) for name, part in given
        }

    @cached_property
    def per_prompt(self) -> xr.Dataset:
        """Variables with the axis `prompt` and its coordinate; never added over prompts."""
        return self.arrays["per_prompt"].dataset()

    @cached_property
    def sums(self) -> xr.Dataset:
        """Variables without the axis `prompt`: float64 sums and counts over prompts."""
        return self.arrays["sums"].dataset()

    @cached_property
    def first_prompt(self) -> xr.Dataset:
        """Variables of prompt number 0, without the axis `prompt`; empty for other prompts."""
        return self.arrays["first_prompt"].dataset()

    def variables(self) -> tuple[dict[str, xr.Variable], dict[str, np.ndarray]]:
        """Return the variables of all parts by name, and the labels of their axes.

        Arithmetic of variables looks at no labels: aligning them takes longer than most of it.

        Returns:
            Variables with the names of their axes; and labels by axis, which all parts share.

        Raises:
            ValueError: Two parts label an axis differently.
        """
        labels: dict[str, np.ndarray] = {}
        for part in self.arrays.values():
            for axis, some in part.labels.items():
                if not np.array_equal(labels.setdefault(axis, some), some):
                    raise ValueError(f"parts of the statistics label the axis {axis!r} differently")
        return {
            name: xr.Variable(axes, array)
            for part in self.arrays.values()
            for name, (axes, array) in part.values.items()
        }, labels


@dataclass(frozen=True)
class Needs:
    """Requirements of a measure, and the variables that may be undefined."""

    spans: tuple[str, ...] = ()
    """Spans without which a prompt cannot be measured; checked before the first forward pass."""
    segments: tuple[str, ...] = ()
    """Kinds of segments ("lines", "sentences", ...) that `observe` finds among its spans, from the
    prompt's spans or its text.

    For every kind K there are `segments.K` (tokens inside) and `segments.K.starts` (first tokens),
    and `separator` besides.
    """
    sources: bool = False
    """Whether `observe` gets `source` among its spans if every token of an answer has a separate
    needle: the token that it copies, -1 elsewhere, int64 [prompt, token].
    """
    tokens: int = 1
    """Tokens that a prompt needs; checked before the first forward pass."""
    schemes: tuple[str, ...] = ()
    """Schemes of layers that the measure is about; it skips others, and the run notes them. Empty:
    any.
    """
    heads: Mapping[int, Sequence[int] | None] | None = None
    """Heads of the measure by layer (None: all), independent of other measures; None: the heads of
    the analysis.
    """
    tensors: tuple[str, ...] = TENSORS
    """Which tensors of the attention inputs it reads: where one of them is not finite, the measure
    stops.
    """
    documents: bool = False
    """Whether its numbers are right where a prompt holds several documents, which do not see each
    other (`AttentionInputs.documents`), or further keys are hidden (`AttentionInputs.hidden`);
    others are refused such prompts, and stop in such layers.
    """
    layer: bool = False
    """Whether the measure is refused if it has no result in any layer (`Measure.gap`); else its
    numbers are NaN, and a warning says why.
    """
    by_pair: bool = False
    """Whether the measure supports positions that differ by rotary pair; else it stops there."""
    predictions: bool = False
    """Whether to call `observe_predictions`; the forward pass then runs through all layers.
    """
    nan: tuple[str, ...] = ()
    """Statistics per prompt in which NaN stands for absent or undefined values.

    Others may be NaN at padding, and in layers without positions or rotation; where they are
    elsewhere, the measure stops.
    """
    infinite: tuple[str, ...] = ()
    """Statistics in which infinity is a value like any other, such as a bound that a scheme does
    not set.
    """


@dataclass(frozen=True)
class HeadScore:
    """A number for each head of one prompt, as a live view maps it."""

    values: xr.DataArray
    """Scores [prompt, layer, head]."""
    meaning: str = ""
    """What it says, where its name does not."""
    by_index: bool = False
    """Whether it follows from the token index in heads whose positions are that; the map hides it
    there where other heads have positions of their own.
    """


class Measure(ABC):
    """Base of measures: a frozen dataclass with its parameters as fields.

    A measure reduces attention inputs to small labeled arrays.

    A field states its type and range (`Annotated[float, Interval(gt=0)]`, see `values`); an object
    with another value is refused. A field `training_length` that is None gets the length that the
    model was trained on (`of_training_length`). Its needs are stated beside its base, `class
    Mine(Measure, needs=Needs(...))`, or, where its fields decide, by overriding `needs`. Subclasses
    may also override `reductions` and `observe_predictions`. An object of another package need not
    inherit from this class: `as_measure` takes `name`, `required_spans`, `parameters`, `observe`
    and `conclude`.
    """

    name: str
    """The group in the run file; may be a field, so that a run can have two of one class."""

    describes: ClassVar[str] = ""
    """A few words on the measured quantity, for `--help`."""
    topic: ClassVar[str] = ""
    """A name by which `--measures` asks for it and all others of that topic; empty: none."""
    option: ClassVar[str] = ""
    """An option of `repo-interp analyze` that takes the measure in addition to others and sets one
    of its fields: "--option field EXAMPLE"; empty: none.
    """
    option_help: ClassVar[str] = ""
    """The help of that option."""
    offers: ClassVar[str] = ""
    """What a live view may ask it for, in words with blanks between, in one line of the source:
    `head_positions` (its variable `position` [prompt, layer, head, token]), `head_scores` (the
    method), `prompt_tokens` (its group has those of `add_tokens`); empty: nothing.
    """
    _stated: ClassVar[Needs] = Needs()

    def __init_subclass__(cls, needs: Needs | None = None, **further: Any) -> None:
        """`needs`: requirements of every measure of the class."""
        super().__init_subclass__(**further)
        if needs is not None:
            # On the class: a field `needs` would be a parameter of the measure
            cls._stated = needs

    def __post_init__(self) -> None:
        """Raises InputError for a field that is not of the type and range that it states."""
        check_fields(self, self.name)  # pyright: ignore[reportArgumentType]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Values of the fields by name, as the group's attributes record them."""
        if not is_dataclass(self):
            raise InputError(
                f"the measure {type(self).__name__} is no dataclass; put "
                "@dataclass(frozen=True) above its class"
            )
        values = {
            field.name: getattr(self, field.name)
            for field in fields(self)  # pyright: ignore[reportArgumentType]
            if field.name != "name"
        }
        # netCDF attributes have no None
        return {name: "not given" if value is None else value for name, value in values.items()}

    @property
    def needs(self) -> Needs:
        """Requirements besides the attention inputs; none unless a subclass states them."""
        return self._stated

    def fits(self, layers: Layers, prompts: Sequence[AnyPrompt]) -> bool:
        """Return whether an analysis that names no measures takes this one.

        Args:
            layers: Layers that are measured.
            prompts: Prompts of the analysis.

        Returns:
            False unless a subclass overrides this.
        """
        return False

    def beside(self, names: Collection[str]) -> Measure:
        """Return the measure adapted to the other measures, if it was given by name.

        Args:
            names: Names of all measures of the analysis.

        Returns:
            The measure itself unless a subclass overrides this.
        """
        return self

    def reductions(self, inputs: AttentionInputs, spans: Spans) -> Sequence[Reduction]:
        """Return the reductions that `observe` will need (`heads.reduced`).

        The reductions of all measures are computed in one pass over the heads.

        Args:
            inputs: A layer and a batch.
            spans: Masks of the spans of the batch.

        Returns:
            Reductions; none unless a subclass overrides this.
        """
        return ()

    def gap(self, inputs: AttentionInputs) -> Gap | None:
        """State what `observe` has no result for in a layer, by the layer's properties.

        The run notes it. `observe` is called for the layer all the same, and gives NaN there;
        layers of other schemes than `Needs.schemes` are skipped.

        Args:
            inputs: A layer, with any content.

        Returns:
            The gap; None, unless a subclass overrides this.
        """
        return None

    @abstractmethod
    def observe(self, inputs: AttentionInputs, spans: Spans) -> Statistics:
        """Statistics of one layer and one batch."""

    def observe_predictions(self, predictions: Predictions, spans: Spans) -> Statistics:
        """Return statistics of the model's predictions for one batch.

        Args:
            predictions: Next-token logits of the batch, by rows.
            spans: Masks of the spans of the batch.

        Returns:
            Statistics without the axis `layer`; empty unless a subclass overrides this.
        """
        return Statistics()

    @abstractmethod
    def conclude(self, statistics: Statistics) -> xr.Dataset:
        """Return the group of the run file from the merged statistics.

        Every variable has the attributes `units` and `long_name`.
        """

    def add_tokens(self, group: xr.Dataset, tokens: PromptLabels) -> xr.Dataset:
        """Return the concluded group with the tokens of its prompts, if it needs tokens.

        Args:
            group: Group that `conclude` gave.
            tokens: Tokens of the prompts of the analysis.

        Returns:
            The group as it is unless a subclass overrides this.
        """
        return group

    def head_scores(self, group: xr.Dataset) -> Mapping[str, HeadScore]:
        """Return scores of heads for a live view of one prompt (`offers`).

        Args:
            group: Group that `conclude` gave.

        Returns:
            Scores by the name that a reader sees; none unless a subclass overrides this.
        """
        return {}


def of_training_length(measure: Measure, tokens: int) -> Measure:
    """Fill in the field `training_length` of a measure where it is None.

    Args:
        measure: Any measure.
        tokens: Tokens that the model was trained on.

    Returns:
        A copy with the field set, or the measure where it has no such field or a value.
    """
    # The default is the number itself, so a measure without the field does not change
    unknown = is_dataclass(measure) and getattr(measure, "training_length", tokens) is None
    return replace(measure, training_length=tokens) if unknown else measure  # pyright: ignore[reportCallIssue, reportArgumentType]


def merge(parts: Sequence[Statistics]) -> Statistics:
    """Merge statistics of disjoint (layer, prompt) pairs.

    Exact for any order of the parts.

    Args:
        parts: Statistics of batches or layers.

    Returns:
        Statistics of all layers and prompts.

    Raises:
        ValueError: Two parts hold the same prompt of the same layer.
    """
    combined = {"per_prompt": _concatenate_prompts, "sums": sum_arrays, "first_prompt": _only}
    given = {
        name: [part.arrays[name] for part in parts if part.arrays[name].given]
        for name in STATISTICS
    }
    return Statistics(**{name: _by_layer(given[name], combined[name]) for name in STATISTICS})


def accumulate(parts: list[Statistics], later: Statistics) -> None:
    """Append the statistics of one more batch, so that sums take the memory of one batch.

    Args:
        parts: Statistics so far, of which `merge` makes the total; the first holds all sums.
        later: Statistics of other prompts.
    """
    arrays = later.arrays
    # Sums merge at once; values of prompts wait for one concatenation at the end.
    # In place, since the caller holds the list
    parts[:1] = [merge([*parts[:1], Statistics(sums=arrays["sums"])])]
    if arrays["per_prompt"].given or arrays["first_prompt"].given:
        parts.append(Statistics(arrays["per_prompt"], None, arrays["first_prompt"]))


def _by_layer(parts: Sequence[Arrays], combine: Callable[[Sequence[Arrays]], Arrays]) -> Arrays:
    if not parts:
        return Arrays()
    # Statistics of predictions belong to no layer
    if not any("layer" in part.labels for part in parts):
        return combine(parts)
    if len(parts) == 1 and (np.diff(parts[0].labels["layer"]) > 0).all():
        return combine(parts)
    # A part may have several layers, and parts are in any order
    layers: dict[int, list[Arrays]] = {}
    for part in parts:
        several = len(part.labels["layer"]) > 1
        for place, layer in enumerate(part.labels["layer"]):
            one = part.at("layer", place) if several else part
            layers.setdefault(int(layer), []).append(one)
    return concat_arrays([combine(layers[layer]) for layer in sorted(layers)], "layer")


def _concatenate_prompts(parts: Sequence[Arrays]) -> Arrays:
    if len(parts) == 1 and (np.diff(parts[0].labels["prompt"]) > 0).all():
        return parts[0]
    prompts = np.concatenate([part.labels["prompt"] for part in parts])
    if len(np.unique(prompts)) != len(prompts):
        raise ValueError(f"the same prompt was observed twice: {sorted(prompts.tolist())}")
    # Sorted, so that batches may end in any order and the file is the same
    return concat_arrays(parts, "prompt").sorted_by("prompt")


def _only(parts: Sequence[Arrays]) -> Arrays:
    if len(parts) > 1:
        raise ValueError("the first prompt was observed twice")
    return parts[0]
