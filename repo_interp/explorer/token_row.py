"""The row of one token in some heads, the next tokens, and both without and with edits.

    position [shown, token]   weight, logit [shown, key]   span_mass [shown, span]
    probability, next_token [rank]   log_probability, logit_difference, score

    spans_of_row(prompt, token)       spans of the prompt, and the row's own needle and query
    attention_of(heads, ...)          weights, logits and mass by span of the row
    with_difference(clean, edited)    axis `state`, and the difference of the weights

This module knows nothing about passes and edits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from repo_interp.inputs import AttentionInputs
from repo_interp.positions.sinks import weights_of
from repo_interp.tasks import Prompt
from repo_interp.tasks.prompt import REST, copies_next

STATES = ("clean", "changed")
TEXTS = {
    "position": ("position of each token", "positions"),
    "logit": ("logit of each key", "logits"),
    "weight": ("attention to each key", "1"),
    "span_mass": ("attention to each span", "1"),
    "probability": ("of the next token", "1"),
    "next_token": ("likeliest next tokens", "1"),
    "log_probability": ("log-probability of the answer", "nat"),
    "logit_difference": ("the answer's logit less the next one's", "logit"),
}
"""Long names and units of the variables."""
_COMPARED = {
    "weight_difference": ("attention under the edits less attention without them", "1"),
    "curve": ("log-probability of the answer, mean over its tokens, after each edit", "nat"),
}


def spans_of_row(
    prompt: Prompt, token: int, selection: tuple[int, int] | None
) -> dict[str, list[int]]:
    """Return the tokens of each span that a row is summed over.

    Args:
        prompt: The prompt.
        token: The query token.
        selection: First and last token of an extra span; None: none.

    Returns:
        Token indices by span: the selection, spans of the prompt, and, if the next token of the row
        copies another one, `needle` and `query`. `rest` lacks the selected tokens.
    """
    spans = {name: list(places) for name, places in prompt.all_spans().items()}
    generated, sources = prompt.generated, prompt.sources
    # As measures of attention have them: the token that is copied, and the row itself
    if sources is not None and copies_next([prompt]) and token + 1 in generated:
        spans |= {"needle": [sources[generated.index(token + 1)]], "query": [token]}
    if selection is None:
        return spans
    first, last = sorted(selection)
    selected = range(first, last + 1)
    # The rest is of no span, also not of this one; so a table does not count twice
    if REST in spans:
        spans[REST] = [place for place in spans[REST] if place not in selected]
    return {"selection": list(selected), **spans}


def attention_of(
    heads: Sequence[tuple[int, int]],
    token: int,
    spans: Mapping[str, Sequence[int]],
    inputs: Callable[[int], AttentionInputs],
) -> dict[str, Any]:
    """Read the row of one token in some heads.

    Args:
        heads: (layer, head) pairs.
        token: The query token.
        spans: Token indices by span.
        inputs: Function of a layer that returns the inputs of its attention, of one prompt.

    Returns:
        Axes and values of `logit` and `weight` [shown, key] and `span_mass` [shown, span].
    """
    logits, weights, masses = [], [], []
    for layer, head in heads:
        logit, weight = row_of(inputs(layer), head, token)
        logits.append(logit)
        weights.append(weight)
        # NaN: keys that this row does not see
        masses.append([float(np.nansum(weight[places])) for places in spans.values()])
    return {
        "logit": (("shown", "key"), np.stack(logits)),
        "weight": (("shown", "key"), np.stack(weights)),
        "span_mass": (("shown", "span"), masses),
    }


def row_of(inputs: AttentionInputs, head: int, token: int) -> tuple[np.ndarray, np.ndarray]:
    """Read logits and attention of one row of one head.

    Args:
        inputs: Inputs of attention of one prompt.
        head: Number of the head.
        token: The query token.

    Returns:
        Logits and weights [key]; NaN for keys that the row does not see.
    """
    rows = torch.tensor([token], device=inputs.queries.device)
    logits = inputs.logits(rows)
    seen = inputs.visible(rows)[0, 0]

    def plain(values: Tensor) -> np.ndarray:
        return values[0, head, 0].masked_fill(~seen, torch.nan).float().cpu().numpy()

    return plain(logits), plain(weights_of(logits, inputs.sinks_of(rows)))


def with_difference(clean: xr.Dataset, edited: xr.Dataset, curve: Sequence[float]) -> xr.Dataset:
    """Put a row without and with edits into one Dataset.

    Args:
        clean: Variables without edits.
        edited: The same under the edits.
        curve: Log-probability of the answer after each edit.

    Returns:
        The variables with the axis `state`, `weight_difference` [shown, key] and `curve` [edit].
    """
    # Stacked by hand: `xr.concat` would align coordinates that are the same in both
    both: dict[Any, Any] = {
        name: (
            ("state", *array.dims),
            np.stack([array.values, edited[name].values]),
            array.attrs,
        )
        for name, array in clean.data_vars.items()
    }
    difference = edited["weight"].values - clean["weight"].values
    both["weight_difference"] = (clean["weight"].dims, difference)
    both["curve"] = ("edit", curve)
    group = xr.Dataset(
        both,
        {"state": list(STATES), **clean.coords, "edit": np.arange(len(curve))},
        clean.attrs,
    )
    for name, (long_name, units) in _COMPARED.items():
        group[name].attrs.update(long_name=long_name, units=units)
    return group
