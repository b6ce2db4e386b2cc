"""Cost of reusing the cached keys of a chunk of text at another offset.

    cost(w) = mean over prompts of  loss(w) - loss(dense)          nats per token after the chunk
    interval: Student's, of the paired differences of prompts

A prompt is a prefix, the chunk, and tokens after it. The dense pass reads all of it. In the other
cases the chunk's keys were computed with the chunk `shift` tokens earlier:

    turned            with the same prefix, then moved by R(shift): no cost but rounding
    not turned        with the same prefix, left at the earlier positions
    sink dropped      the chunk's first tokens are left out
    scaled            positions counted from the chunk's last token, times `scale`
    isolated          without the prefix, then moved by R(shift), as in a cache of chunks
    isolated, not turned; isolated, sink dropped
    chunk dropped     without the chunk: the cost of losing it

Only keys that a layer rotates by the token index turn; see `chunk_cache`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from repo_interp.analysis.coercion import Prompts, as_prompts, require_known_tokens
from repo_interp.errors import InputError, quoted
from repo_interp.experiments.responses import MOST_LOGITS
from repo_interp.intervals import half_interval
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.load import open_model
from repo_interp.models.reposition import observable
from repo_interp.plugins.reuse.chunk_cache import (
    Cached,
    cache_of,
    losses_after,
    placed,
    require_movable,
    turned,
    without,
)
from repo_interp.runtime.console import Console
from repo_interp.runtime.progress import steps
from repo_interp.storage.store import Progress
from repo_interp.tasks import Prompt
from repo_interp.values import Tokens, checked

DENSE = "dense"
TEXTS = {
    "loss": "loss of the tokens after the chunk",
    "mean_loss": "loss of the tokens after the chunk, mean of prompts",
    "change": "loss less that of the dense pass",
    "change_low": "lower end of the 95 % interval of the change",
    "change_high": "upper end of the 95 % interval of the change",
}


def reuse_cost(
    model: Any,
    prompts: Prompts,
    chunk: tuple[int, int],
    shift: int | None = None,
    *,
    sink: int = 1,
    scale: float = 2.0,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure the cost of reusing the cached keys of a chunk at another offset.

        ri.reuse_cost(model, texts, chunk=(128, 208))["change"].to_series()

    Args:
        model: Bridge or model of Hugging Face, or the path of a checkpoint.
        prompts: Prompts in any form that `analysis.coercion` takes.
        chunk: First token of the chunk, and the token after its last one; at least two more tokens
            follow.
        shift: Number of tokens by which the chunk was earlier when its keys were computed; None:
            the chunk began at position 0.
        sink: Number of first tokens of the chunk that "sink dropped" leaves out.
        scale: Factor of the positions in "scaled".
        progress: Called with prompts done and in all; None: a bar on standard error.

    Returns:
        `loss [reuse, prompt]` in nats per token after the chunk; `mean_loss`, `change`, `change_low`
        and `change_high [reuse]`, the dense pass first.

    Raises:
        InputError: The chunk does not fit into a prompt, the shift would begin before 0, or keys
            of a layer cannot be moved.
    """
    decoder, given, shift = checked_reuse(model, prompts, chunk, shift)
    sink = checked(sink, Tokens, "the tokens of the sink")
    scale = checked(scale, float, "the factor of positions")
    if not 0 < sink < chunk[1] - chunk[0]:
        raise InputError(f"the sink has {sink} tokens, and the chunk {chunk[1] - chunk[0]}")
    rows, names = [], []
    with steps(Console(stderr=True)) as step:
        tell = partial(step, "reusing") if progress is None else progress
        for prompt in given:
            caches = _caches(decoder, torch.tensor(prompt.tokens), chunk, shift, sink, scale)
            names = list(caches)
            rows.append(losses_of(decoder, list(caches.values()), prompt, chunk))
            tell(len(rows), len(given))
    attrs = {"first": chunk[0], "stop": chunk[1], "shift": shift, "sink": sink, "scale": scale}
    return costs(np.stack(rows, -1), {"reuse": names}).assign_attrs(attrs)


def _caches(
    decoder: Decoder,
    tokens: Tensor,
    chunk: tuple[int, int],
    shift: int,
    sink: int,
    scale: float,
) -> dict[str, Cached]:
    first, stop = chunk
    dense = cache_of(decoder, tokens[:stop])
    # The prefix then has negative positions, for which rotation is defined too.
    earlier = cache_of(decoder, tokens[:stop], -shift)
    not_turned = placed(dense, _chunk_of(earlier, first), first)
    by = torch.full((stop - first,), float(shift))
    away = torch.arange(first, stop, dtype=torch.float32) - (stop - 1)
    raw = placed(dense, cache_of(decoder, tokens[first:stop], first - shift), first)
    isolated = turned(decoder, raw, first, by)
    sinks = range(first, first + sink)
    return {
        DENSE: dense,
        "turned": turned(decoder, not_turned, first, by),
        "not turned": not_turned,
        "sink dropped": without(dense, sinks),
        f"scaled by {scale:g}": turned(decoder, dense, first, (scale - 1) * away),
        "isolated": isolated,
        "isolated, not turned": raw,
        "isolated, sink dropped": without(isolated, sinks),
        "chunk dropped": without(dense, range(first, stop)),
    }


def _chunk_of(cached: Cached, first: int) -> Cached:
    return {
        layer: (keys[:, :, first:], values[:, :, first:])
        for layer, (keys, values) in cached.items()
    }


def checked_reuse(
    model: Any, prompts: Prompts, chunk: tuple[int, int], shift: int | None
) -> tuple[Decoder, list[Prompt], int]:
    """Check the arguments of `reuse_cost`.

    Args:
        model: As in `reuse_cost`.
        prompts: As in `reuse_cost`.
        chunk: As in `reuse_cost`.
        shift: As in `reuse_cost`.

    Returns:
        Decoder of the model, prompts, and the shift.

    Raises:
        InputError: As in `reuse_cost`.
    """
    opened = open_model(model) if isinstance(model, str | os.PathLike) else model
    decoder = as_decoder(observable(opened))
    given = as_prompts(prompts, as_decoder(opened).tokenizer)
    if not given:
        raise InputError("there are no prompts")
    require_known_tokens([prompt.tokens for prompt in given], decoder.vocabulary_size)
    if any(prompt.position_ids is not None for prompt in given):
        raise InputError("prompts have position ids of their own; give one text without them")
    shortest = min(len(prompt.tokens) for prompt in given)
    whole = isinstance(chunk, Sequence) and [type(end) for end in chunk] == [int, int]
    if not whole or not 0 < chunk[0] < chunk[1] <= shortest - 2:
        raise InputError(
            f"the chunk is {quoted(chunk)}; wanted (first, stop) with 1 <= first < stop <= "
            f"{shortest - 2}, two tokens before the end of the shortest prompt"
        )
    shift = chunk[0] if shift is None else shift
    if type(shift) is not int or not shift <= chunk[0]:
        raise InputError(
            f"the shift is {quoted(shift)}; wanted a whole number of tokens, at most {chunk[0]}, "
            "where the chunk began at 0"
        )
    require_movable(decoder, max(len(prompt.tokens) for prompt in given))
    return decoder, given, shift


def losses_of(
    decoder: Decoder, caches: Sequence[Cached], prompt: Prompt, chunk: tuple[int, int]
) -> np.ndarray:
    """Return the loss of a prompt after several caches.

    Args:
        decoder: Decoder of the model.
        caches: Caches of the prompt's tokens up to the chunk's end.
        prompt: The prompt.
        chunk: First token of the chunk, and the token after its last one.

    Returns:
        Nats per token, by cache.
    """
    after = torch.tensor(prompt.tokens[chunk[1] :])
    at_once = max(1, MOST_LOGITS // (decoder.vocabulary_size * len(after)))
    losses = np.full(len(caches), np.nan)
    lengths = [next(iter(one.values()))[0].shape[2] for one in caches]
    for length in {*lengths}:  # caches of one length share a pass
        places = [place for place, found in enumerate(lengths) if found == length]
        for begin in range(0, len(places), at_once):
            some = places[begin : begin + at_once]
            rows = [caches[place] for place in some]
            losses[some] = losses_after(decoder, rows, after, chunk[1]).numpy()
    return losses


def costs(losses: np.ndarray, coords: dict[str, Any]) -> xr.Dataset:
    """Subtract the first of several losses from all of them.

    Args:
        losses: [reuse, prompt], the dense pass first.
        coords: Labels of the first axis.

    Returns:
        The dataset that `reuse_cost` returns.
    """
    (axis,) = coords
    differences = losses - losses[:1]
    change, half = differences.mean(-1), half_interval(differences)
    half[0] = 0.0  # the dense pass minus itself, also with one prompt
    arrays = {
        "loss": ((axis, "prompt"), losses),
        "mean_loss": ((axis,), losses.mean(-1)),
        "change": ((axis,), change),
        "change_low": ((axis,), change - half),
        "change_high": ((axis,), change + half),
    }
    return xr.Dataset(
        {
            name: (dims, values, {"long_name": TEXTS[name], "units": "nat"})
            for name, (dims, values) in arrays.items()
        },
        coords,
    )
