"""What figures, tables and the page take out of a run: a group, a prompt's tokens and spans, the scheme of a layer, the heads to show.

A run is an `xarray.DataTree` as `definitions.md` describes it; a group that it lacks, or a layer, head or prompt that it does not hold, is
an InputError that says what there is. Knows nothing about how a run came about, nor how it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.plots.marks.arrays import over_prompts, ranked_heads

LEARNED_SCHEMES = ("repo", "continuous", "multihead_continuous")
"""Schemes whose positions are learned: the ones that ranges and patterns say something about."""
ALIKE = 0.98
"""Correlation of two heads' positions over a prompt from which they show the same."""
BACKGROUND = "rest"
"""The span that is never shaded."""
_PLACES = {"needle": 0, "query": 1, BACKGROUND: 2, "generated": 4}
_OTHERS = 3


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of one prompt: how many, what they are called, and which of them each span holds."""

    prompt: int
    count: int
    texts: tuple[str, ...] | None
    """Their texts; without a tokenizer their ids as ⟨94⟩; None where neither is known."""
    texts_are: str
    """What `texts` are: "text" or "id"."""
    spans: dict[str, tuple[int, ...]]

    def text(self, token: int) -> str:
        """Text of a token; its index where there is no text."""
        return str(token) if self.texts is None else self.texts[token]

    @property
    def top_spans(self) -> dict[str, tuple[int, ...]]:
        """The spans that are no part of another one, without the background."""
        return {name: tokens for name, tokens in self.spans.items() if "." not in name and name != BACKGROUND}


def group(run: xr.DataTree, name: str) -> xr.Dataset:
    """The group `name` of the run. Raises InputError when the run was made without that measure."""
    if name not in run.children:
        has = ", ".join(run.children) or "none"
        raise InputError(f"this figure needs the measure {name!r}; the run has: {has}. Analyse again with it")
    return run[name].to_dataset()


def has_positions(run: xr.DataTree) -> bool:
    """Whether any layer of a run with the group `positions` gives tokens positions; those of CoPE and NoPE do not."""
    return bool(group(run, "positions")["position_range"].notnull().any())


def positions_of(run: xr.DataTree) -> xr.Dataset:
    """The group `positions` of a run. Raises InputError where it is not there, and where no layer has positions."""
    positions = group(run, "positions")
    if not has_positions(run):
        named = ", ".join(dict.fromkeys(schemes(positions).values()))
        raise InputError(
            f"no layer of this run gives tokens positions ({named}), so there are none to draw; leave this figure out"
        )
    return positions


def has_groups(run: xr.DataTree, names: Sequence[str]) -> bool:
    """Whether the run holds all these measures."""
    return all(name in run.children for name in names)


def checkpoint_name(run: xr.DataTree) -> str:
    """The name of the checkpoint that `run` was measured on; "a model" for one made in memory."""
    return str(run.attrs.get("checkpoint") or "a model")


def pick(array: xr.DataArray, **labels: int | str) -> xr.DataArray:
    """`array` at these coordinate labels. Raises InputError when a label is not in the run."""
    for axis, label in labels.items():
        present = array[axis].values.tolist()
        if label not in present:
            raise InputError(f"this run has no {axis} {label}; it has {_listed(present)}")
    return array.sel(labels)


def described_prompts(run: xr.DataTree) -> xr.Dataset | None:
    """The group of `run` that says what its prompts are - `positions` all, `attention_rows` the first; None where neither is there."""
    named = (group(run, name) for name in ("positions", "attention_rows") if name in run.children)
    return next((dataset for dataset in named if "token_count" in dataset), None)


def prompt_tokens(positions: xr.Dataset, prompt: int) -> PromptTokens:
    """Tokens and spans of `prompt`, from the group `positions`, or another that says what prompts are."""
    count = int(pick(positions["token_count"], prompt=prompt))
    texts, texts_are, spans = None, "text", {}
    if "token_text" in positions:
        texts = tuple(str(text) for text in positions["token_text"].sel(prompt=prompt).values[:count])
    elif "token_id" in positions:
        texts, texts_are = tuple(f"⟨{token}⟩" for token in positions["token_id"].sel(prompt=prompt).values[:count]), "id"
    if "span_mask" in positions:
        mask = positions["span_mask"].sel(prompt=prompt)
        for name in ordered_spans(map(str, positions["span"].values)):
            members = np.flatnonzero(mask.sel(span=name).values[:count] > 0)
            if members.size:
                spans[name] = tuple(members.tolist())
    return PromptTokens(prompt, count, texts, texts_are, spans)


def schemes(dataset: xr.Dataset | xr.DataArray) -> dict[int, str]:
    """The position scheme of every layer of `dataset`; "unknown" where none was recorded."""
    layers = [int(layer) for layer in dataset["layer"].values]
    names = dataset["scheme"].values if "scheme" in dataset.coords else ["unknown"] * len(layers)
    return dict(zip(layers, map(str, names), strict=True))


def learned_layers(dataset: xr.Dataset | xr.DataArray) -> list[int]:
    """Layers whose positions are learned."""
    return [layer for layer, scheme in schemes(dataset).items() if scheme in LEARNED_SCHEMES]


def ordered_spans(names: Iterable[str]) -> list[str]:
    """Span names in reading order: needle, query, rest, others by name, generated; a part after its parent."""

    def place(name: str) -> tuple[int, list[tuple[int, str]]]:
        parts = name.split(".")
        numbered = [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
        return _PLACES.get(parts[0], _OTHERS), numbered

    return sorted(names, key=place)


def main_span(run: xr.DataTree) -> str | None:
    """The span that heads are ranked by: the one that the prompts are about, as the run says. None where nothing was measured of it.

    Of a run that does not say, the needle, else the first one that is neither the rest nor generated.
    """
    if not has_groups(run, ["attention_mass"]):
        return None
    dataset = group(run, "attention_mass")
    declared = run.attrs.get("main_span")
    for name in [declared] if declared else ordered_spans(map(str, dataset["span"].values)):
        if name not in dataset["span"]:
            continue
        if name not in (BACKGROUND, "generated") and np.isfinite(dataset["table"].sel(span=name)):
            return name
    return None


def heads_to_show(run: xr.DataTree) -> list[tuple[int, int]]:
    """Heads (layer, head) with positions, those that show most first: by their range, and by what they send to the needle above chance.

        score = range / largest range + max(0, mass - chance) / largest such mass        means over prompts

    Only heads of layers that learn positions where any does. Of heads of a layer that share their positions the one with the best score
    stands for all; a head whose curve over the first prompt is nearly that of one before it (|r| >= `ALIKE`) comes after those that differ.
    Raises InputError when the run has no positions.
    """
    positions = group(run, "positions")
    ranges = over_prompts(positions["position_range"])
    scores = ranges / max(float(ranges.max()), np.finfo(float).tiny)
    if main_span(run) == "needle":
        attention = group(run, "attention_mass").sel(span="needle", drop=True)
        chance = over_prompts(attention["chance"]) if "chance" in attention else 0.0
        excess = (over_prompts(attention["mass"]) - chance).clip(min=0).reindex(layer=ranges["layer"], head=ranges["head"])
        scores = scores + (excess / max(float(excess.max()), np.finfo(float).tiny)).fillna(0)
    layers = learned_layers(positions) or ranges["layer"].values
    order = ranked_heads(scores.where(np.isfinite(ranges)).sel(layer=layers))
    curves = {head: _curve(positions, *head) for head in order}
    first: list[tuple[int, int]] = []
    alike: list[tuple[int, int]] = []
    for head in order:
        if any(head[0] == other[0] and np.array_equal(curves[head], curves[other]) for other in (*first, *alike)):
            continue
        near = any(abs(float(curves[head] @ curves[other])) >= ALIKE for other in first)
        (alike if near else first).append(head)
    return [*first, *alike]


def _curve(positions: xr.Dataset, layer: int, head: int) -> np.ndarray:
    """Positions of the first prompt without their mean, of length 1; 0 where they do not vary."""
    values = positions["position"].isel(prompt=0).sel(layer=layer, head=head).values.astype(float)
    values = values[np.isfinite(values)]
    centred = values - values.mean() if values.size else values
    length = float(np.linalg.norm(centred))
    return centred / length if length > 1e-9 * (1 + np.abs(values).max(initial=0.0)) else np.zeros_like(centred)


def unit_label(name: str, array: xr.DataArray) -> str:
    """`name` with the array's units in brackets; pure numbers have none, and a unit that repeats the name is left out."""
    units = str(array.attrs.get("units", ""))
    return name if units in ("", "1") or units == f"{name.split()[0]}s" else f"{name} ({units})"


def _listed(labels: list) -> str:
    if len(labels) > 8 and all(isinstance(label, int) for label in labels):
        return f"{labels[0]}-{labels[-1]} ({len(labels)})"
    return ", ".join(map(str, labels)) or "none"
