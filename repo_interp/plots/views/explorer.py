"""Positions of every head, packed for the page's explorer.

They are float32 as base64, equal rows once, and not more than fits.

    values[prompt][layer]: rows x tokens, little-endian float32
    row[prompt][layer][head]: which of the rows is the head's

RoPE layers and grouped heads share rows, so they are packed once. Texts and spans are plain JSON.
Prompts that do not fit into the budget are left out whole. If the first prompt alone is too long,
layers are left out, and the map of heads shows outlines of these: the smallest and largest position
of `OUTLINE` stretches. Omissions are listed. For a run without positions, as for a RoPE model, only
the text of the first prompt and the heads are packed. This module knows nothing about pages;
`explorer.js` and `pages/page/stored.js` are the other half.
"""

from __future__ import annotations

import base64
from importlib.resources import files
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.plots.marks import (
    PromptTokens,
    contiguous,
    evenly_spaced,
    focused_range,
    global_range,
    group,
    head_axes,
    ordered_spans,
    over_prompts,
    pick,
    prompt_tokens,
    ranked_heads,
    schemes,
)
from repo_interp.plots.style import darker, span_colours
from repo_interp.plots.view import Interactive, PageOptions
from repo_interp.plots.views.attention_mass import ranked_span
from repo_interp.plots.views.ranges import heads_to_show

OUTLINE = 48
"""Stretches of a prompt of which the outline of a head keeps the smallest and the largest position.
"""
NEXT = 64
"""Heads that "Add a head" offers one after the other."""
_MEASURES = {"rows": "attention_rows", "next": "predictions"}
"""By kind of chart, the measure that a reader is pointed to where a run lacks it."""


def explorer_data(run: xr.DataTree, options: PageOptions) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Prepare the data of the explorer within the budget of the page.

    Args:
        run: Tree of a run, a group per measure.
        options: Limits and prompts of the page.

    Returns:
        The data, and a sentence for every part that was left out.

    Raises:
        InputError: The run lacks one of the prompts of `options`.
    """
    if "positions" not in run.children:
        data, prompts = _without_positions(run), int(run.attrs.get("prompts", 1))
        kept = [prompt["prompt"] for prompt in data["prompts"]]
        note = f"The run keeps the texts of {len(kept)} of {prompts} prompts: {_stretches(kept)}."
        return data, (note,) if prompts > len(kept) else ()
    positions, budget = group(run, "positions"), options.budget
    asked = [
        int(prompt)
        for prompt in (positions["prompt"].values if options.prompts is None else options.prompts)
    ]
    named = schemes(positions)
    embedded, left, spent = [], [], 0
    for prompt in asked:
        # Refuses a prompt that the run lacks before any is packed.
        pick(positions["token_count"], prompt=prompt)
    for place, prompt in enumerate(asked):
        whole = {layer: pack_layer(positions, prompt, layer) for layer in named}
        if place and spent + _size(whole) > budget:
            left = asked[place:]
            break
        # The first prompt is always there, with fewer layers if need be: an explorer needs one.
        blocks = whole if place else _some_layers(whole, budget)
        outlines = {layer: _outline(block) for layer, block in whole.items() if layer not in blocks}
        spent += _size(blocks)
        embedded.append(
            {**_described(prompt_tokens(positions, prompt)), "layers": blocks, "outlines": outlines}
        )
    data = _data(positions, embedded, _order(run, embedded))
    return data, _left_out(asked, left, embedded, list(named), positions.sizes["prompt"], spent)


def _data(
    described: xr.Dataset, embedded: list[dict[str, Any]], order: list[list[int]]
) -> dict[str, Any]:
    """Prepare prompts, and the layers, heads and spans of the group that describes them."""
    spans = ordered_spans(map(str, described["span"].values)) if "span" in described.coords else []
    colours = span_colours(spans)
    return {
        "prompts": embedded,
        **head_axes(described),
        "spans": {
            name: {"colour": colours[name], "ink": darker(colours[name], 0.6)} for name in spans
        },
        "start": order[:2],
        "order": order,
        "measures": _MEASURES,
    }


def _without_positions(run: xr.DataTree) -> dict[str, Any]:
    """Prepare prompts without positions.

    Heads are sorted by their mass on the span that the prompts are about, if it was measured.
    """
    rows, span = group(run, "attention_rows"), ranked_span(run)
    heads = [int(head) for head in rows["head"].values]
    # In the form of `pack_layer`: one row without values, which all heads share.
    nothing = {"values": "", "row": [0] * len(heads), "global": [None], "focused": [None]}
    layers = dict.fromkeys(schemes(rows), nothing)
    prompts = [
        {**_described(prompt_tokens(rows, int(prompt))), "layers": layers, "outlines": {}}
        for prompt in rows["prompt"].values
    ]
    order = (
        []
        if span is None
        else ranked_heads(over_prompts(group(run, "attention_mass")["mass"].sel(span=span)))
    )
    return {**_data(rows, prompts, [list(head) for head in order][:NEXT]), "bare": True}


def pack_layer(positions: xr.Dataset, prompt: int, layer: int) -> dict[str, Any]:
    """Pack the positions of a layer over a prompt.

    Args:
        positions: Group `positions` of a run.
        prompt: Label of the prompt.
        layer: Label of the layer.

    Returns:
        `values` (base64 of the distinct rows), `row` by head, and both ranges of every row (or
        null).
    """
    count = int(positions["token_count"].sel(prompt=prompt))
    values = (
        positions["position"]
        .sel(prompt=prompt, layer=layer)
        .transpose("head", "token")
        .values[:, :count]
    )
    # The page reads the bytes as a Float32Array, which is little-endian on all usual machines.
    values = np.ascontiguousarray(values, dtype="<f4")
    numbers: dict[bytes, int] = {}
    # `setdefault` numbers a row when its bytes are new; [head]
    row = [numbers.setdefault(head.tobytes(), len(numbers)) for head in values]
    rows = values[[row.index(number) for number in range(len(numbers))]]
    return {
        "values": base64.b64encode(rows.tobytes()).decode("ascii"),
        "row": row,
        "global": [global_range(head) for head in rows],
        "focused": [focused_range(head) for head in rows],
    }


def _described(tokens: PromptTokens) -> dict[str, Any]:
    return {
        "prompt": tokens.prompt,
        "count": tokens.count,
        "texts": None if tokens.texts is None else list(tokens.texts),
        "joint": _joint(tokens),
        "spans": {name: contiguous(members) for name, members in tokens.spans.items()},
    }


def _joint(tokens: PromptTokens) -> str:
    """Choose the separator between tokens when the prompt is shown as text.

    It is a space if tokens are words and no token holds one.
    """
    words = tokens.texts is not None and not any(
        character.isspace() for text in tokens.texts for character in text
    )
    return " " if words else ""


def _some_layers(blocks: dict[int, dict[str, Any]], budget: int) -> dict[int, dict[str, Any]]:
    """As many layers as fit, spread evenly, at least one."""
    for count in range(len(blocks), 1, -1):
        chosen = {layer: blocks[layer] for layer in evenly_spaced(list(blocks), count)}
        if _size(chosen) <= budget:
            return chosen
    # Not even two layers fit: only the last one, even over budget.
    return dict(list(blocks.items())[-1:])


def _size(blocks: dict[int, dict[str, Any]]) -> int:
    """Characters of the positions of `blocks`."""
    return sum(len(block["values"]) for block in blocks.values())


def _order(run: xr.DataTree, embedded: list[dict[str, Any]]) -> list[list[int]]:
    """Choose up to `NEXT` heads of embedded layers, ranked by `heads_to_show`.

    Heads with positions equal to another head's come last.
    """
    blocks, heads = embedded[0]["layers"], group(run, "positions")["head"].values.tolist()
    order = [[layer, head] for layer, head in heads_to_show(run) if layer in blocks]
    rows = [(layer, blocks[layer]["row"][heads.index(head)]) for layer, head in order]
    # The sort below is stable, so both parts keep their ranking.
    again = [row in rows[:place] for place, row in enumerate(rows)]
    return [head for _, head in sorted(zip(again, order, strict=True), key=lambda pair: pair[0])][
        :NEXT
    ]


def _outline(block: dict[str, Any]) -> dict[str, Any]:
    """Reduce packed positions to the smallest and the largest of `OUTLINE` stretches.

    They follow one another in this order.
    """
    rows = np.frombuffer(base64.b64decode(block["values"]), dtype="<f4").reshape(
        max(block["row"]) + 1, -1
    )
    parts = np.array_split(rows, min(OUTLINE, rows.shape[1]), axis=1)
    # [row, 2 x stretch]: smallest, largest, smallest, ...
    ends = np.stack([end(part, axis=1) for part in parts for end in (np.min, np.max)], axis=1)
    return {
        **block,
        "values": base64.b64encode(np.ascontiguousarray(ends, dtype="<f4").tobytes()).decode(
            "ascii"
        ),
    }


def _left_out(
    asked: list[int],
    left: list[int],
    embedded: list[dict[str, Any]],
    layers: list[int],
    prompts: int,
    spent: int,
) -> tuple[str, ...]:
    notes = []
    if left or len(asked) < prompts:
        shown = _stretches([prompt["prompt"] for prompt in embedded])
        note = f"Positions of {len(embedded)} of {prompts} prompts are in this page: {shown}."
        if left:
            note += (
                f" Left out, since positions already fill {spent / 1e6:.1f} MB: {_stretches(left)}."
            )
        notes.append(f"{note} Tables and figures are about all prompts.")
    if missing := [layer for layer in layers if layer not in embedded[0]["layers"]]:
        note = (
            f"Prompt {embedded[0]['prompt']} is long: its layers {_stretches(missing)} are left out"
        )
        notes.append(f"{note}, but for outlines in the map of heads.")
    if notes:
        notes.append("To choose others: report_page(run, path, prompts=[...], megabytes=...).")
    return (" ".join(notes),) if notes else ()


def _stretches(numbers: list[int]) -> str:
    return ", ".join(
        str(first) if first == last else f"{first}–{last}" for first, last in contiguous(numbers)
    )


_FILES = files("repo_interp.plots.views")
EXPLORER = Interactive(_FILES / "explorer.html", _FILES / "explorer.js", explorer_data)
