"""Readers of a run: a group, a prompt's tokens and spans, the scheme of a layer.

A run is an `xarray.DataTree` as `definitions.md` describes it; a group that it lacks, or a layer,
head or prompt that it does not hold, is an InputError that lists the present ones. This module
knows nothing about how a run came about, nor how it is drawn.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from repo_interp.errors import InputError, quoted
from repo_interp.plots.style import scheme_colour, scheme_name
from repo_interp.positions.layouts import LEARNED
from repo_interp.run import require_run

BACKGROUND = "rest"
"""The span that is never shaded."""
_PLACES = {"needle": 0, "query": 1, BACKGROUND: 2, "generated": 4}
_OTHERS = 3
NAMES = 16
"""Most names of an axis in one figure."""
UNKNOWN = "unknown"
"""Scheme of the layers of a run that records none."""


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of one prompt: their number, their texts, and the tokens of all spans."""

    prompt: int
    count: int
    texts: tuple[str, ...] | None
    """Their texts; without a tokenizer their ids as ⟨94⟩; None if neither is known."""
    texts_are: str
    """Kind of `texts`: "text" or "id"."""
    spans: dict[str, tuple[int, ...]]

    def text(self, token: int) -> str:
        """Return the text of a token.

        Args:
            token: Index of the token.

        Returns:
            The text; the index if there is no text.
        """
        return str(token) if self.texts is None else self.texts[token]

    @property
    def top_spans(self) -> dict[str, tuple[int, ...]]:
        """The spans that are no part of another one, without the background."""
        return {
            name: tokens
            for name, tokens in self.spans.items()
            if "." not in name and name != BACKGROUND
        }


def group(run: xr.DataTree, name: str) -> xr.Dataset:
    """Return a group of a run.

    Args:
        run: Tree of a run, a group per measure.
        name: Name of the measure.

    Returns:
        The group as a dataset.

    Raises:
        InputError: The run was made without this measure.
    """
    require_run(run)
    if name not in run.children:
        has = ", ".join(run.children) or "none"
        raise InputError(
            f"this figure needs the measure {name!r}; the run has: {has}. Analyse again with it"
        )
    return run[name].to_dataset()


def has_groups(run: xr.DataTree, names: Sequence[str]) -> bool:
    """Tell whether a run holds some measures.

    Args:
        run: Tree of a run, a group per measure.
        names: Names of the measures.

    Returns:
        True if all are there.
    """
    return all(name in run.children for name in names)


def checkpoint_name(run: xr.DataTree) -> str:
    """Return the name of the checkpoint that a run was measured on.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The name; "a model" for a model made in memory.
    """
    return str(run.attrs.get("checkpoint") or "a model")


def pick(array: xr.DataArray, **labels: int | str) -> xr.DataArray:
    """Select from an array by coordinate labels.

    Args:
        array: Array with these axes.
        **labels: Label by the name of its axis.

    Returns:
        The array without these axes.

    Raises:
        InputError: The run lacks a label.
    """
    for axis, label in labels.items():
        present = array[axis].values.tolist()
        if not isinstance(label, str | int | float | np.generic) or label not in present:
            raise InputError(f"this run has no {axis} {quoted(label)}; it has {_listed(present)}")
    return array.sel(labels)


def described_prompts(run: xr.DataTree) -> xr.Dataset | None:
    """Find the group that describes most prompts of a run.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        The group; None if no group describes prompts.
    """
    groups = [
        node.to_dataset() for node in run.children.values() if "token_count" in node.data_vars
    ]
    # `attention_rows` describes only its first prompts, and `positions` all of them
    return max(groups, key=lambda dataset: dataset.sizes["prompt"], default=None)


def prompt_tokens(positions: xr.Dataset, prompt: int) -> PromptTokens:
    """Read the tokens and spans of a prompt.

    Args:
        positions: Group `positions`, or another one that describes prompts.
        prompt: Label of the prompt.

    Returns:
        Tokens and spans.
    """
    count = int(pick(positions["token_count"], prompt=prompt))
    texts, texts_are, spans = None, "text", {}
    if "token_text" in positions:
        texts = tuple(
            str(text) for text in positions["token_text"].sel(prompt=prompt).values[:count]
        )
    elif "token_id" in positions:
        texts, texts_are = (
            tuple(
                f"⟨{token}⟩" for token in positions["token_id"].sel(prompt=prompt).values[:count]
            ),
            "id",
        )
    if "span_mask" in positions:
        mask = positions["span_mask"].sel(prompt=prompt)
        for name in ordered_spans(map(str, positions["span"].values)):
            # -1 is padding
            members = np.flatnonzero(mask.sel(span=name).values[:count] > 0)
            if members.size:
                spans[name] = tuple(members.tolist())
    return PromptTokens(prompt, count, texts, texts_are, spans)


def first_prompt(run: xr.DataTree) -> PromptTokens | None:
    """Read the first prompt of a run.

    Args:
        run: Tree of a run, a group per measure.

    Returns:
        Tokens and spans; None if the run does not describe its prompts.
    """
    described = described_prompts(run)
    return (
        None if described is None else prompt_tokens(described, int(described["prompt"].values[0]))
    )


def schemes(dataset: xr.Dataset | xr.DataArray) -> dict[int, str]:
    """Read the position scheme of every layer.

    Args:
        dataset: Group of a run.

    Returns:
        Scheme by layer; `UNKNOWN` if none was recorded.
    """
    layers = [int(layer) for layer in dataset["layer"].values]
    names = dataset["scheme"].values if "scheme" in dataset.coords else [UNKNOWN] * len(layers)
    return dict(zip(layers, map(str, names), strict=True))


def layer_scheme(dataset: xr.Dataset | xr.DataArray, layer: int) -> str:
    """Return the position scheme of a layer in the spelling of papers.

    Args:
        dataset: Group of a run.
        layer: Label of the layer.

    Returns:
        Name of the scheme, such as "RePo".
    """
    return scheme_name(schemes(dataset)[layer])


def layer_colour(dataset: xr.Dataset | xr.DataArray, layer: int) -> str:
    """Return the color of the position scheme of a layer.

    Args:
        dataset: Group of a run.
        layer: Label of the layer.

    Returns:
        Color of matplotlib.
    """
    return scheme_colour(schemes(dataset)[layer])


def head_axes(dataset: xr.Dataset | xr.DataArray) -> dict[str, list]:
    """List layers, schemes and heads for the scripts of the page.

    Args:
        dataset: Group of a run.

    Returns:
        Layers with the names and colors of their schemes, and heads.
    """
    layers = [
        {"layer": layer, "name": scheme_name(kind), "colour": scheme_colour(kind)}
        for layer, kind in schemes(dataset).items()
    ]
    return {"layers": layers, "heads": [int(head) for head in dataset["head"].values]}


def learned_schemes(dataset: xr.Dataset | xr.DataArray) -> set[str]:
    """List the schemes that learn positions, including schemes of other packages in the layers.

    Args:
        dataset: Group of a run.

    Returns:
        Names of schemes.
    """
    stated = dataset["scheme"].attrs.get("learned", "") if "scheme" in dataset.coords else ""
    return {*LEARNED, *stated.split(",")} - {""}


def learned_layers(dataset: xr.Dataset | xr.DataArray) -> list[int]:
    """List the layers with learned positions.

    Args:
        dataset: Group of a run.

    Returns:
        Labels of the layers.
    """
    learned = learned_schemes(dataset)
    return [layer for layer, scheme in schemes(dataset).items() if scheme in learned]


def ordered_spans(names: Iterable[str]) -> list[str]:
    """Sort spans: needle, query, rest, others by name, generated.

    Args:
        names: Names of spans.

    Returns:
        The names; a part follows its parent.
    """

    def place(name: str) -> tuple[int, list[tuple[int, str]]]:
        parts = name.split(".")
        # Numbers sort as numbers ("needle.2" before "needle.10"), and pairs let both kinds compare
        numbered = [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
        return _PLACES.get(parts[0], _OTHERS), numbered

    return sorted(names, key=place)


def names_along(values: xr.DataArray, axis: Hashable) -> list[str]:
    """List the names along an axis that have a finite value.

    Args:
        values: Array with the axis.
        axis: Axis of names; spans come in reading order.

    Returns:
        At most `NAMES` names.
    """
    names = [
        str(name)
        for name in values[axis].values
        if np.isfinite(values.sel({axis: name}).values).any()
    ]
    if axis == "span":
        names = ordered_spans(names)
        names = [name for name in names if "." not in name] if len(names) > NAMES else names
    return names[:NAMES]


def unit_label(name: str, array: xr.DataArray) -> str:
    """Write a name with the units of its array in brackets.

    Pure numbers have no units, and a unit that repeats the name is left out.

    Args:
        name: Name to write.
        array: Array with an attribute `units`.

    Returns:
        The label.
    """
    units = str(array.attrs.get("units", ""))
    # "token index" needs no "(tokens)" behind it
    return name if units in ("", "1") or units == f"{name.split()[0]}s" else f"{name} ({units})"


def axis_name(axis: Hashable) -> str:
    """Write an axis as a label: "query_block" -> "query block".

    Args:
        axis: Name of the axis.

    Returns:
        The label.
    """
    return str(axis).replace("_", " ")


def axis_label(array: xr.DataArray, axis: str) -> str:
    """Write the label of an axis with its units.

    Args:
        array: Array with the axis.
        axis: Name of the axis.

    Returns:
        The `long_name` of its coordinate, or the axis' name, with the units.
    """
    return unit_label(str(array[axis].attrs.get("long_name", axis_name(axis))), array[axis])


def _listed(labels: list) -> str:
    if len(labels) > 8 and all(isinstance(label, int) for label in labels):
        return f"{labels[0]}-{labels[-1]} ({len(labels)})"
    return ", ".join(map(str, labels)) or "none"
