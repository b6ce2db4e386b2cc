"""Split a learned position by the components that write the hidden state that f_phi reads.

    z_i - z(mean) = sum_c contribution_ci        contribution_ci = G_i . (c_i - mean c)
    G_i           = integral_0^1 grad f(mean + a (x_i - mean)) da      f = f_phi(norm(x))
    clock_share   = cov(contribution_c, index) / cov(z, index)         within prompts
    word_share    = cov(contribution_c, z | word) / var(z | word)

These are integrated gradients (Sundararajan et al. 2017) along the straight path from the mean
residual stream. G_i is one vector for all components, since they add up to the stream (`stream`).
The integral is a Gauss-Legendre sum, and shares add up to 1 except for its error (`remainder`). A
share is an attribution. `resolution`, `trend` and `change` measure the causal effect: components
are set to their means, for f_phi alone or for all readers, and compared with random sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.analysis.batches import PaddedBatch, make_batch
from repo_interp.analysis.coercion import Prompts
from repo_interp.errors import InputError
from repo_interp.experiments.grid import stack_padded
from repo_interp.measures.labels import described_group
from repo_interp.models.capture import decode
from repo_interp.models.decoder import as_decoder
from repo_interp.plugins.edits.token_losses import checked_prompts
from repo_interp.plugins.writers.at_means import (
    READERS,
    choose_components,
    component_name,
    components_at_means,
)
from repo_interp.plugins.writers.stream import Assign, Means, Stream
from repo_interp.runtime.console import Console
from repo_interp.runtime.progress import steps
from repo_interp.storage.store import Progress
from repo_interp.tasks import Prompt
from repo_interp.values import Count, CountOrNone, Seed, checked

NODES = 48
"""Number of points of the Gauss-Legendre sum."""
_TEXTS = {
    "contribution": "what a component adds to the position, from its mean on [position]",
    "position": "position of a token [position]",
    "position_of_mean": "position of the mean residual stream [position]",
    "clock_share": "share of the covariance of positions with the token index",
    "clock_share_by_prompt": "the same in one prompt",
    "word_share": "share of the variance of positions given the word",
    "remainder": "largest part of a position that the sum leaves [position]",
    "resolution": "least distance from which 90 % of pairs stand in one order [tokens]",
    "trend": "rise of positions by token, within prompts [position]",
    "loss": "loss [nat]",
    "change": "change of the loss with components at their means [nat]",
    "change_low": "lower end of the 95 % interval of the change [nat]",
    "change_high": "upper end of the 95 % interval of the change [nat]",
}


def position_writers(
    model: nn.Module,
    prompts: Prompts,
    layer: int,
    row: int,
    *,
    together: int = 1,
    draws: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Split the positions of a head by the components that write the hidden state f_phi reads.

        found = ri.position_writers(model, text, layer=13, row=1)
        print(found.attrs["finding"])
        ri.plots.position_writers(found)

    Args:
        model: Bridge or model.
        prompts: Prompts in any form that `analysis.coercion` takes; a resolution needs several
            hundred tokens in each.
        layer: A layer that learns positions; not the first.
        row: Row of its positions: a key-value head, a head, or 0 if the layer has one row.
        together: Number of heads and MLPs, those with the largest `clock_share`, that are set to
            their means together.
        draws: Number of random sets of the same number of other components, of the same kinds if
            there are enough.
        seed: Seed of these sets.
        progress: Called with finished passes and all passes; None: a bar on standard error.

    Returns:
        `contribution [component, prompt, token]`, `clock_share` and `word_share [component]`, and
        `clock_share_by_prompt`, with the coordinates `writer_layer` and `writer_head` (-1: MLP;
        both -1: embedding). `resolution`, `trend`, `loss` and `change` [reader, removed], the last
        with a paired 95 % interval over prompts, or over blocks of a single text. The attribute
        `finding` is a sentence.

    Raises:
        InputError: The layer does not learn positions from hidden states or lacks the row, the
            family has no single residual stream, or there are too few components or tokens.
    """
    decoder = as_decoder(model)
    prompt_list = checked_prompts(decoder, prompts)
    stream = Stream(decoder, checked(layer, CountOrNone, "layer"))
    stream.require_positions()
    row = checked(row, CountOrNone, "row")
    together, draws = checked(together, Count, "together"), checked(draws, CountOrNone, "draws")
    seed = checked(seed, Seed, "seed")
    if min(len(prompt.tokens) for prompt in prompt_list) < 2:
        raise InputError("a prompt has 1 token; wanted 2 or more, whose positions differ")
    components = stream.components
    if together * (1 + bool(draws)) >= len(components):
        raise InputError(
            f"{together} components together, and as many others, were asked for; layer {layer} "
            f"has {len(components) - 1} before it"
        )
    batches = [
        make_batch(prompt_list, [number], len(prompt.tokens), decoder.device)
        for number, prompt in enumerate(prompt_list)
    ]
    passes = len(prompt_list) * (3 + 2 * (1 + draws))
    done = 0
    with steps(Console(stderr=True)) as step, torch.no_grad():
        tell = partial(step, "taking apart") if progress is None else progress

        def advance() -> None:
            nonlocal done
            done += 1
            tell(done, passes)

        means = _means(stream, batches, advance)
        parts = [_apart(stream, means, batch, row, advance) for batch in batches]
        contribution = [part[1] for part in parts]
        values = _shares(prompt_list, [part[0] for part in parts], contribution)
        writers, controls = choose_components(
            components, values["clock_share"], together, draws, seed
        )
        checks = components_at_means(
            stream, means, prompt_list, batches, row, [writers, *controls], advance
        )
    names = [component_name(component) for component in components]
    removed = ["nothing", *(" + ".join(map(component_name, some)) for some in (writers, *controls))]
    width = max(len(prompt.tokens) for prompt in prompt_list)
    group: dict[str, Any] = {name: (("component",), values[name]) for name in ("word_share",)}
    group |= {
        "clock_share": (("component",), values["clock_share"]),
        "clock_share_by_prompt": (("component", "prompt"), values["by_prompt"]),
        "contribution": (
            ("component", "prompt", "token"),
            np.stack(
                [
                    np.pad(c, ((0, 0), (0, width - c.shape[1])), constant_values=np.nan)
                    for c in contribution
                ],
                axis=1,
            ),
        ),
        "position": (("prompt", "token"), stack_padded([part[0] for part in parts], np.nan, float)),
        "position_of_mean": ((), parts[0][2]),
        "remainder": ((), max(np.abs(z - zero - c.sum(0)).max() for z, c, zero in parts)),
        **{name: (("reader", "removed"), value) for name, value in checks.items()},
    }
    found = described_group(
        group, _TEXTS, {"component": names, "reader": list(READERS), "removed": removed}
    )
    found = found.assign_coords(
        writer_layer=("component", [one[0] for one in components]),
        writer_head=("component", [one[1] for one in components]),
    )
    found.attrs |= {"layer": layer, "row": row, "scheme": stream.reader.scheme}
    found.attrs["finding"] = _finding(found, [component_name(one) for one in writers])
    return found


def _means(stream: Stream, batches: Sequence[PaddedBatch], advance: Callable[[], None]) -> Means:
    """Means over all tokens of the inputs of layers and the outputs of heads."""
    means, tokens = Means(), sum(batch.tokens.shape[1] for batch in batches)

    def add(sums: dict[int, Tensor], layer: int, vectors: Tensor) -> None:
        some = vectors.double().sum((0, 1)) / tokens
        sums[layer] = sums[layer] + some if layer in sums else some

    entered, wrote = partial(add, means.entered), partial(add, means.wrote)
    for batch in batches:
        with stream.observed(entered, wrote):
            _decode(stream, batch)
        advance()
    for sums in (means.entered, means.wrote):
        sums.update({layer: mean.float() for layer, mean in sums.items()})
    return means


def _decode(stream: Stream, batch: PaddedBatch) -> None:
    decode(
        stream.decoder,
        batch.tokens,
        batch.valid,
        stream.layer,
        batch.position_ids,
        batch.attention_mask,
    )


def _apart(
    stream: Stream, means: Means, batch: PaddedBatch, row: int, advance: Callable[[], None]
) -> tuple[Float[np.ndarray, " token"], Float[np.ndarray, "component token"], float]:
    """Return positions of a prompt, contributions to them, and the position of the mean."""
    entered: dict[int, Tensor] = {}
    wrote: dict[int, Tensor] = {}
    found: list[Any] = []

    def reached(hidden: Tensor, assign: Assign) -> None:
        hidden = hidden.float()
        mean = means.entered[stream.layer].to(hidden).expand_as(hidden)
        plain, zero = (assign(some)[0].double() for some in (hidden, mean))
        if row >= len(plain):
            raise InputError(
                f"row {row} of positions was asked for; those of layer {stream.layer} are 0 to "
                f"{len(plain) - 1}"
            )
        size = plain[row].abs().max()
        if bool((zero[row] - zero[row, :1]).abs().max() > 1e-4 * size):
            raise InputError(
                f"layer {stream.layer} ({stream.reader.scheme}) reads the token index and the hidden "
                "state, so components alone do not determine its positions"
            )
        points, weights = np.polynomial.legendre.leggauss(NODES)
        gradient = torch.zeros_like(hidden)
        for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
            with torch.enable_grad():
                # Detached, so that the gradient ends at this point of the path.
                between = torch.lerp(mean, hidden, float(point)).detach().requires_grad_()
                total = assign(between)[0, row].sum()
                gradient += float(weight) * torch.autograd.grad(total, between)[0]
        found.extend((plain[row], zero[row, 0], gradient[0].double()))

    with stream.observed(entered.__setitem__, wrote.__setitem__, reached):
        _decode(stream, batch)
    advance()
    position, zero, gradient = found

    def along(layer: int) -> Tensor:
        return ((entered[layer][0] - means.entered[layer]).double() * gradient).sum(-1)

    rows = [before := along(0)]
    for layer in range(stream.layer):
        heads = gradient.new_zeros(0, len(gradient))
        if layer in wrote:
            outputs = (wrote[layer][0] - means.wrote[layer]).double()
            pulled = gradient @ stream.matrix(layer, outputs.shape[-1]).double().mT
            count = stream.attentions[layer].heads
            heads = (pulled * outputs).unflatten(-1, (count, -1)).sum(-1).mT
        after = along(layer + 1)
        rows += [*heads, after - before - heads.sum(0)]
        before = after
    contribution = torch.stack(rows).cpu().numpy()
    return position.cpu().numpy(), contribution, float(zero)


def _shares(
    prompts: Sequence[Prompt],
    positions: Sequence[Float[np.ndarray, " token"]],
    contributions: Sequence[Float[np.ndarray, "component token"]],
) -> dict[str, np.ndarray]:
    """Shares of components in the covariance with the index, and in the variance given the word."""

    def centered(values: np.ndarray) -> np.ndarray:
        return values - values.mean(-1, keepdims=True)

    own = [centered(some) for some in contributions]
    places = [centered(np.arange(len(z), dtype=float)) for z in positions]
    with_index = np.stack([c @ i for c, i in zip(own, places, strict=True)], -1)
    of_positions = [z @ i for z, i in zip(positions, places, strict=True)]
    _, word = np.unique(np.concatenate([prompt.tokens for prompt in prompts]), return_inverse=True)
    counts = np.bincount(word)

    def given_word(values: np.ndarray) -> np.ndarray:
        return values - (np.bincount(word, values) / counts)[word]

    whole = given_word(np.concatenate([centered(z) for z in positions]))
    parts = np.stack([given_word(values) for values in np.concatenate(own, -1)])
    # Without repeated words, or without a trend of positions, there is no share.
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "clock_share": with_index.sum(-1) / sum(of_positions),
            "by_prompt": with_index / np.array(of_positions),
            "word_share": parts @ whole / (whole @ whole),
        }


def _finding(found: xr.Dataset, writers: Sequence[str]) -> str:
    """Name the components that write the clock, and the effect of setting them to their means."""
    who, by_prompt = " + ".join(writers), found["clock_share_by_prompt"].sel(component=[*writers])
    share = float(found["clock_share"].sel(component=[*writers]).sum())
    spread = by_prompt.sum("component").values
    between = f" ({spread.min():.0%} to {spread.max():.0%} by prompt)" if len(spread) > 1 else ""
    several = len(writers) > 1
    verb, at_mean = ("write", "at their means") if several else ("writes", "at its mean")
    clauses = []
    for reader, words in zip(READERS, ("f_phi alone", "all readers"), strict=True):
        of_reader = found.sel(reader=reader)
        resolution = of_reader["resolution"].values
        controls = sorted(resolution[2:])
        beside = (
            f" (controls {_tokens(controls[0])} to {_tokens(controls[-1])})" if controls else ""
        )
        clauses.append(f"{_tokens(resolution[1])} tokens {at_mean} for {words}{beside}")
    change = found.sel(reader="all").isel(removed=1)
    return (
        f"{who} {verb} {share:.0%} of the covariance with the token index{between} of the positions "
        f"of layer {found.attrs['layer']}, row {found.attrs['row']}, whose resolution is "
        f"{_tokens(float(found['resolution'][0, 0]))} tokens as it is, {', and '.join(clauses)}; the "
        f"loss changes by {float(change['change']):+.3f} [{float(change['change_low']):+.3f}, "
        f"{float(change['change_high']):+.3f}] nats"
    )


def _tokens(resolution: float) -> str:
    """A resolution in words: "none" if positions show the order at no distance."""
    return f"{resolution:.0f}" if np.isfinite(resolution) else "no"
