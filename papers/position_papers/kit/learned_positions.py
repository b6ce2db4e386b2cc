"""Whether learned positions are there to be judged: a model that does not use them, or whose
positions hardly differ, says nothing.

    range         largest minus smallest position of a head on a prompt, mean over prompts
    from token    share of a head's position variance that the token's identity explains, over the tokens of all prompts:
                  1 - sum (z - mean of z over equal tokens)^2 / sum (z - mean of z)^2
    use           rise of -log p per target, in nats, while every learned head has its mean as the position of all tokens (NoPE)
    harm          fall of -log p per target, in nats, while every learned head has the token index as its position (RoPE)

With a range below one position no rotation differs by more than a neighbour's. Positions that
follow from the token alone place nothing by its context. Where nothing is lost without the
positions, or something is gained by the token index in their place, training has not made the model
work by them. A checkpoint is valid when at least one learned head passes the first two, the loss
rises without the positions, and it does not fall with the token index; the last two are judged
prompt by prompt. Knows nothing about any paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from position_papers.kit.cache import Cache
from position_papers.kit.judge.differences import Difference, paired_difference
from position_papers.kit.subjects import Subject
from repo_interp.analysis.analyze import analyze
from repo_interp.errors import InputError
from repo_interp.experiments.prompt_sets import Windows
from repo_interp.experiments.responses import forced_responses
from repo_interp.interventions import frozen, linearised
from repo_interp.measures.labels import with_attrs
from repo_interp.models.checkpoints import load_model
from repo_interp.models.load import load
from repo_interp.tasks.task import log_perplexity

SMALLEST_RANGE = 1.0
"""Positions."""
FOLLOWS_FROM_TOKEN = 0.9
"""Share of variance from which on a head's positions are said to follow from the token alone."""
LEAST_RISE = 0.02
"""Nats per target, 2 % of perplexity: the change from which on positions are said to be used, or to
do harm.
"""
WINDOWS, PROMPTS = 16, 64
"""Of the training length: windows of text, in which every token is a target, and prompts of other
tasks, which have a few.
"""


def why_not(subject: Subject, options: Any, cache: Cache) -> tuple[str, ...]:
    """Why nothing can be said about learned positions of `subject`, and by which numbers; empty
    where something can or it learns none.
    """
    data = measured(subject, options, cache)
    return () if data is None else against(data)


def against(data: xr.Dataset) -> tuple[str, ...]:
    """Return why `data`, as `_measure` gives it, allows no claim about learned positions; empty
    where it does.
    """
    spans, shares = data["range"], data["from_token"]
    valid = (spans >= SMALLEST_RANGE) & (shares < FOLLOWS_FROM_TOKEN)
    if not bool(valid.any()):
        return (
            f"no learned head both spans {SMALLEST_RANGE:g} position and depends on more "
            "than the token",
            f"ranges {_interval(spans)} positions on prompts of {data.attrs['length']} tokens, of "
            f"whose variance the token alone explains {_interval(100 * shares)} %",
        )
    rise = paired_difference(data["frozen"].values, data["plain"].values)
    if not rise.exceeds(LEAST_RISE):
        return (
            "it is not shown that the learned positions are used",
            f"freezing those of all learned layers raises the loss by {_with_error(rise)}; wanted "
            f"more than {LEAST_RISE:g}, and two standard errors above 0",
        )
    fall = paired_difference(data["plain"].values, data["index"].values)
    if fall.exceeds(LEAST_RISE):
        return (
            "the learned positions do harm",
            f"the token index in their place lowers the loss by {_with_error(fall)}; wanted at "
            f"most {LEAST_RISE:g}, or less than two standard errors above 0",
        )
    return ()


def measured(subject: Subject, options: Any, cache: Cache) -> xr.Dataset | None:
    """What `_measure` measures; None of one that learns no positions, or where there are no prompts
    as long as those of training, so that nothing speaks against it.
    """
    with suppress(InputError):
        return (
            subject.measured(cache, _measure, options, positions_of=_count(subject))
            if subject.learned
            else None
        )
    return None


def _measure(subject: Subject, options: Any) -> xr.Dataset:
    """`range`, `from_token` [layer, head] of the learned layers; `plain`, `frozen`, `index`
    [prompt], the loss as it is, without positions and with the token index as the position of every
    learned layer.
    """
    length = (
        getattr(subject.task, "longest", 0)
        if subject.kind == "reversal"
        else subject.training_length
    )
    prompts = subject.prompts(length, _count(subject), options.seed)
    run = analyze(
        load(subject.path, options.device),
        prompts,
        ("positions",),
        subject.learned,
        batch_size=options.batch_size,
    )
    position = (
        run["positions"].to_dataset()["position"].transpose("layer", "head", "prompt", "token")
    )
    tokens = [np.asarray(prompt.tokens) for prompt in prompts]
    z = position.values.astype(float)
    valid = np.array([np.arange(z.shape[-1]) < len(each) for each in tokens])
    spans = np.stack(
        [np.ptp(z[:, :, row, : len(each)], axis=-1) for row, each in enumerate(tokens)]
    ).mean(axis=0)
    shares = np.array(
        [[from_token(head[valid], np.concatenate(tokens)) for head in layer] for layer in z]
    )
    axes = ("layer", "head")
    model, scoring = load_model(subject.path, options.device), subject.task or Windows()

    def loss_of(changed: AbstractContextManager[Any]) -> np.ndarray:
        with changed:
            return log_perplexity(
                scoring, forced_responses(model, scoring, prompts, options.batch_size), prompts
            )

    loss, layers = "-log p per target, mean over a prompt's targets", list(subject.learned)
    changes = {
        "plain": (nullcontext(), loss),
        "frozen": (frozen(model, layer=layers), f"{loss}, while learned positions are frozen"),
        "index": (linearised(model, layer=layers), f"{loss}, with the token index in their place"),
    }
    return xr.Dataset(
        {
            "range": with_attrs(
                xr.DataArray(spans, dims=axes), "range of positions, mean over prompts", "positions"
            ),
            "from_token": with_attrs(
                xr.DataArray(shares, dims=axes), "share of the variance between equal tokens", "1"
            ),
            **{
                name: with_attrs(xr.DataArray(loss_of(changed), dims="prompt"), words, "nat")
                for name, (changed, words) in changes.items()
            },
        },
        coords={"layer": position["layer"].values},
        attrs={"length": max(map(len, tokens))},
    )


def _count(subject: Subject) -> int:
    return WINDOWS if subject.kind in ("language", "text") else PROMPTS


def from_token(
    positions: Float[np.ndarray, " token"], tokens: Int[np.ndarray, " token"] | Sequence[int]
) -> float:
    """The share of the variance of `positions` that the identity of `tokens` explains; NaN where
    positions are constant.
    """
    _, identity = np.unique(np.asarray(tokens), return_inverse=True)
    centred = positions - positions.mean()
    means = np.bincount(identity, centred) / np.bincount(identity)
    total = centred.var()
    return float(1 - (centred - means[identity]).var() / total) if total > 0 else np.nan


def _with_error(change: Difference) -> str:
    return (
        f"{change.margin:.2g} nats per target (standard error "
        f"{change.standard_error:.2g} over {change.over})"
    )


def _interval(values: xr.DataArray) -> str:
    return f"{float(values.min()):.2g} to {float(values.max()):.2g}"
