"""Change the positions of chosen heads and tokens during forward passes; nothing is left behind.

    linearised     z_i <- i                         the token's index: plain RoPE for that head
    frozen         z_i <- c                         one position for all tokens: no rotation relative to each other, as in NoPE
    permuted       z_i <- z_order(i)                the same positions, given to other tokens
    swapped_tokens z_i <-> z_j
    swapped_heads  z^h <-> z^g                      of two heads of one layer
    scaled         z_i <- s z_i
    rounded        z_i <- d round(z_i / d)
    clipped        z_i <- min(max(z_i, low), high)
    shifted        z_i <- z_i + b                   for a span: a shift of all tokens changes nothing
    copied         z_i <- z_j                       of one token of the same prompt
    transplanted   z_i <- z_i of another prompt, head or checkpoint, as `positions_of` recorded them
    set_positions  z_i <- given values, or any function of the positions

Every one takes `heads` as (layer, head) pairs, or `layer`, or neither for all that assign
positions, and `tokens` by index; what they mean is said by `replaced`, which all are made of.
RoPE's index is a position like any other. Learned positions: RePo eq. 4-7.

With a cache new tokens get: their index (linearised), the constant of the prompt (frozen, copied),
what their own position becomes (scaled, rounded, clipped, shifted), the recorded position where
there is one, else their own (transplanted), their own (permuted, swapped). Greedy text is then the
same with and without a cache, but for orders that are drawn anew for a prompt that has grown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.errors import InputError, one_line
from repo_interp.interventions.replacing import (
    MOST_TOKENS,
    Change,
    Heads,
    Here,
    Layers,
    Tokens,
    finite_positions,
    layer_and_head,
    replaced,
)
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.capture import decode
from repo_interp.models.decoder import as_decoder
from repo_interp.models.reposition import called_at
from repo_interp.positions.rotary import expand_heads
from repo_interp.values import Finite, Seed, TokensOrNone, checked

if TYPE_CHECKING:
    from transformer_lens import ActivationCache

FLOAT32 = torch.finfo(torch.float32)
_Step = Annotated[float, Interval(ge=1e-30, le=1e9)]
HOOK = "blocks.{}.attn.hook_positions"
"""Name of a layer's positions in a bridge's cache."""


def linearised(
    model: nn.Module, heads: Heads = None, *, layer: Layers = None, tokens: Tokens = None
) -> AbstractContextManager:
    """While it lasts, positions are the token index: what plain RoPE gives."""
    return replaced(model, to_index, heads, layer=layer, tokens=tokens)


def frozen(
    model: nn.Module,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
    value: float | None = None,
) -> AbstractContextManager:
    """While it lasts, positions are the constant `value`; None: each row's mean over the chosen
    tokens of the prompt.

    Frozen over all tokens a head computes as without positions (NoPE), whatever the value. Raises
    InputError for a value that is no finite number.
    """
    value = (
        None if value is None else checked(value, Finite, "the value that positions are frozen at")
    )
    return replaced(
        model, to_mean() if value is None else to_value(value), heads, layer=layer, tokens=tokens
    )


def permuted(
    model: nn.Module,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
    order: Sequence[int] | Tensor | None = None,
    seed: int = 0,
) -> AbstractContextManager:
    """While it lasts, token i has the position of token order[i]; the same for all heads.

    `order`: a permutation of the first tokens' indices, [token] or [prompt, token]; tokens after it
    keep theirs. None: the chosen tokens of every prompt change places at random, by `seed` - also
    with padding on the right, unless an attention mask or `tokens` leave it out; where prompts are
    analysed and scored it is left out. Raises InputError for an order that is none or stands beside
    a seed, and inside for tokens of it that are in the cache or that a prompt lacks.
    """
    if order is None:
        seed = checked(seed, Seed, "seed")
        return replaced(model, shuffled(seed), heads, layer=layer, tokens=tokens)
    if seed:
        raise InputError(f"seed {seed} draws an order, and one was given; leave one of the two out")
    try:
        indices = torch.as_tensor(order)
    except (TypeError, ValueError, RuntimeError):
        indices = torch.empty(0)
    whole = indices.dtype in (torch.int32, torch.int64) and indices.numel() > 0
    if (
        not whole
        or indices.ndim not in (1, 2)
        or not torch.equal(
            indices.sort(-1).values, torch.arange(indices.shape[-1]).expand_as(indices)
        )
    ):
        raise InputError(
            "an order names each of the first tokens once, [token] or [prompt, token]; got "
            f"{order!r}"
        )
    prompts = len(indices) if indices.ndim == 2 else 1
    return replaced(model, reordered(indices), heads, layer=layer, tokens=tokens, prompts=prompts)


def swapped_tokens(
    model: nn.Module,
    one: int | Sequence[int],
    other: int | Sequence[int],
    heads: Heads = None,
    *,
    layer: Layers = None,
) -> AbstractContextManager:
    """While it lasts, the tokens `one` and `other` - or two spans of as many tokens, pair by pair -
    have each other's positions.
    """
    first, second = (list(each) if isinstance(each, Iterable) else [each] for each in (one, other))
    named: list[Any] = [*first, *second]
    if (
        not all(
            hasattr(each, "__index__")
            and not isinstance(each, bool | np.bool_)
            and each < MOST_TOKENS
            for each in named
        )
        or len(first) != len(second)
        or len(set(named)) < len(named)
        or not named
        or min(named) < 0
    ):
        raise InputError(
            f"two tokens, or two spans of as many different tokens, change places; got {one} "
            f"and {other}"
        )
    order = torch.arange(max(named) + 1)
    order[first], order[second] = torch.tensor(second), torch.tensor(first)
    return replaced(model, reordered(order), heads, layer=layer)


def swapped_heads(
    model: nn.Module, one: tuple[int, int], other: tuple[int, int], *, tokens: Tokens = None
) -> AbstractContextManager:
    """While it lasts, the heads `one` and `other`, (layer, head) of one layer, have each other's
    positions.

    Heads of different layers: record with `positions_of`, then `transplanted(..., from_head=...)`
    both ways.
    """
    one, other = layer_and_head(one), layer_and_head(other)
    if one[0] != other[0]:
        raise InputError(
            f"heads of layers {one[0]} and {other[0]} cannot be swapped while the earlier "
            "layer runs; "
            "record them with positions_of, then transplant each with from_head"
        )
    if one[1] == other[1]:
        raise InputError(f"two different heads were wanted; got {one} twice")
    return replaced(model, lambda positions, here: positions.flip(1), [one, other], tokens=tokens)


def scaled(
    model: nn.Module,
    factor: float,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
) -> AbstractContextManager:
    """While it lasts, positions are `factor` times what they are.

    Raises InputError for a factor that is no finite number.
    """
    factor = checked(factor, Finite, "the factor that positions are scaled by")
    return replaced(
        model, lambda positions, here: factor * positions, heads, layer=layer, tokens=tokens
    )


def rounded(
    model: nn.Module,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
    step: float = 1.0,
) -> AbstractContextManager:
    """While it lasts, positions are rounded to multiples of `step`, halves to the even one."""
    step = checked(step, _Step, "the step that positions are rounded to multiples of")
    return replaced(model, to_multiples(step), heads, layer=layer, tokens=tokens)


def clipped(
    model: nn.Module,
    low: float,
    high: float,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
) -> AbstractContextManager:
    """While it lasts, positions below `low` are `low`, those above `high` are `high`; either may be
    infinite: no end.
    """
    whole = all(
        isinstance(end, int | float) and (abs(end) <= FLOAT32.max or abs(end) == math.inf)
        for end in (low, high)
    )
    if not whole or not low <= high or low == math.inf or high == -math.inf:
        shown = " and ".join(one_line(repr(end), 40) for end in (low, high))
        raise InputError(
            f"positions are clipped between a lower and an upper end, not {shown}; wanted "
            f"numbers up to {FLOAT32.max:.2g}, or infinity"
        )
    return replaced(
        model, lambda positions, here: positions.clamp(low, high), heads, layer=layer, tokens=tokens
    )


def shifted(
    model: nn.Module, by: float, heads: Heads = None, *, layer: Layers = None, tokens: Tokens = None
) -> AbstractContextManager:
    """While it lasts, the chosen tokens - a needle's, say - are `by` positions further on.

    Raises InputError for no finite number.
    """
    by = checked(by, Finite, "the number of positions that tokens are shifted by")
    return replaced(
        model, lambda positions, here: positions + by, heads, layer=layer, tokens=tokens
    )


def copied(
    model: nn.Module,
    source: int,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
) -> AbstractContextManager:
    """While it lasts, tokens have the position of token `source`.

    Raises InputError, inside, for a prompt that lacks this token.
    """
    return replaced(
        model, to_token(checked(source, TokensOrNone, "source")), heads, layer=layer, tokens=tokens
    )


def transplanted(
    model: nn.Module,
    recorded: Mapping[Any, Tensor] | ActivationCache,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
    from_head: tuple[int, int] | None = None,
) -> AbstractContextManager:
    """While it lasts, tokens have the positions that `recorded` holds for the same layer, head and
    index.

    `recorded`: what `positions_of` returns for another prompt or checkpoint, or a bridge's cache;
    one prompt serves all. Tokens beyond it keep theirs. `from_head`: the (layer, head) that all
    chosen heads get theirs from. Raises InputError, inside, where `recorded` lacks the layer, has
    another number of rows or prompts, or a longer prompt, and before for what is no finite
    positions of all rows of a model.
    """
    by_layer = _by_layer(model, recorded)
    from_head = None if from_head is None else layer_and_head(from_head)
    least = (
        1
        if from_head is not None
        else max((positions.shape[1] for positions in by_layer.values()), default=1)
    )
    decoder = as_decoder(model)
    heads_here = decoder.heads
    for name, positions in by_layer.items():
        if positions.shape[1] not in (1, decoder.kv_heads, heads_here):
            raise InputError(
                f"recorded positions have {positions.shape[1]} rows, which {heads_here} "
                "heads cannot share; record a model of this shape"
            )
        finite_positions(positions, torch.zeros(1), f"recorded positions of layer {name}")
    prompts = max((len(positions) for positions in by_layer.values()), default=1)
    change = from_recorded(by_layer, heads_here, from_head)
    return replaced(model, change, heads, layer=layer, tokens=tokens, rows=least, prompts=prompts)


def set_positions(
    model: nn.Module,
    layer: int,
    head: int | None,
    values: float | Sequence[float] | Tensor | Callable[[Tensor], Tensor],
) -> AbstractContextManager:
    """While the context lasts, `values` replace the positions of one head (None: all heads) in
    `layer`.

        with ri.set_positions(bridge, layer=2, head=1, values=torch.arange(20.0)):
            logits, cache = bridge.run_with_cache(tokens)

    `values` broadcast to [prompt, token], in positions, or are a function of the positions [prompt,
    row, token] there. Other heads keep theirs, also where heads share them. Raises InputError as
    `replaced` does.
    """
    try:
        shape = np.shape(values)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (TypeError, ValueError, RuntimeError):  # the pass says what is wrong with them
        shape = ()
    prompts = int(shape[0]) if len(shape) == 2 else 1
    if head is None:
        return replaced(model, to_values(values), layer=layer, prompts=prompts)
    return replaced(model, to_values(values), [(layer, head)], prompts=prompts)


@torch.no_grad()
def positions_of(
    model: nn.Module, tokens: Int[Tensor, "prompt token"] | Sequence[Sequence[int]]
) -> dict[int, Float[Tensor, "prompt row token"]]:
    """The positions of every layer that has some, by layer, of `tokens` padded on the right or not
    at all; interventions are seen.

    Raises InputError for what is no table of the model's tokens, a row per prompt.
    """
    given = token_ids(model, tokens)
    recorded: dict[int, Tensor] = {}

    def record(attention: RepositionedAttention, positions: Tensor) -> None:
        recorded[attention.layer_idx] = positions.clone()

    with called_at(model, "positions", record):
        decode(model, given, torch.ones_like(given, dtype=torch.bool))
    return recorded


def token_ids(model: nn.Module, tokens: Any) -> Int[Tensor, "prompt token"]:
    """`tokens` on the device of `model`.

    Raises InputError for what is no table of the model's tokens, a row per prompt.
    """
    decoder = as_decoder(model)
    vocabulary = decoder.vocabulary_size
    try:
        given = torch.as_tensor(tokens, device=decoder.device)
        whole = given.dtype in (torch.int32, torch.int64) and given.ndim == 2 and given.numel() > 0
        known = whole and int(given.min()) >= 0 and int(given.max()) < vocabulary
    except (TypeError, ValueError, RuntimeError):
        given, known = torch.empty(0), False
    if not known:
        raise InputError(
            f"tokens are a table [prompt, token] of numbers from 0 to {vocabulary - 1}, as "
            "ri.tokens gives it; "
            f"got {one_line(repr(tokens), 160)}"
        )
    return given


def to_index(positions: Tensor, here: Here) -> Tensor:
    """The token index."""
    return here.index[:, None]


def to_value(value: float) -> Change:
    """One position for all."""
    return lambda positions, here: torch.full_like(positions, value)


def to_values(values: float | Sequence[float] | Tensor | Callable[[Tensor], Tensor]) -> Change:
    """Given positions, or a function of those that are there."""

    def change(positions: Tensor, here: Here) -> Tensor:
        given = values(positions) if callable(values) else values
        new = finite_positions(given, positions, f"positions to set in layer {here.layer}")
        return new[:, None] if new.ndim == 2 else new

    return change


def to_mean() -> Change:
    """The mean over the chosen tokens of the prompt; new tokens of a cache get that of the
    prompt.
    """

    def mean(positions: Tensor, here: Here) -> Tensor:
        weight = (
            torch.ones_like(positions[:, :1])
            if here.chosen is None
            else here.chosen[:, None].to(positions)
        )
        return (positions * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp_min(
            1
        )

    return _of_prompt(
        mean,
        "the mean of a prompt in the cache is not known; enter the context before the "
        "prompt, or give a value",
    )


def to_token(source: int) -> Change:
    """The position of token `source`; new tokens of a cache get that of the prompt."""

    def position(positions: Tensor, here: Here) -> Tensor:
        shortest = int(here.index[:, -1].min()) + 1
        if shortest <= source:
            raise InputError(
                f"token {source} gives its position, and a prompt has {shortest} tokens; "
                "name an earlier one"
            )
        return _from_tokens(positions, here.index.new_full((len(here.index), 1), source), here)

    return _of_prompt(
        position,
        "the position of a token in the cache is not known; enter the context before the prompt",
    )


def _of_prompt(find: Change, lacking: str) -> Change:
    """What `find` gives for a prompt, also for new tokens when the prompt is in the cache.

    Raises InputError, `lacking`, where no pass began with the prompt.
    """
    known: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def change(positions: Tensor, here: Here) -> Tensor:
        where = here.layer, here.heads
        if here.start == 0:
            known[where] = find(positions, here)
        elif where not in known or len(known[where]) != len(positions):
            raise InputError(lacking)
        return known[where]

    return change


def _from_tokens(positions: Tensor, source: Int[Tensor, "prompt token"], here: Here) -> Tensor:
    """The positions of tokens `source` of the same prompts."""
    # The last token is in the last column, whatever the padding.
    column = source + positions.shape[-1] - 1 - here.index[:, -1:]
    return positions.gather(-1, column[:, None].expand(-1, positions.shape[1], -1))


def to_multiples(step: float) -> Change:
    """Multiples of `step`."""
    return lambda positions, here: step * torch.round(positions / step)


def reordered(order: Int[Tensor, "prompt token"] | Int[Tensor, "token"]) -> Change:
    """Token i has the position of token order[i]."""

    def change(positions: Tensor, here: Here) -> Tensor:
        count = order.shape[-1]
        if order.ndim == 2 and len(order) not in (1, len(positions)):
            raise InputError(
                f"orders of {len(order)} prompts came to {len(positions)}; give one for all, "
                "or that of each"
            )
        if here.start > 0:
            if int(here.index.min()) < count:
                raise InputError(
                    "positions of tokens in the cache cannot change places with new ones; "
                    "generate without a cache"
                )
            return positions
        shortest = int(here.index[:, -1].min()) + 1
        if shortest < count:
            raise InputError(
                f"an order of {count} tokens came to a prompt of {shortest}; give one that "
                "is no longer"
            )
        by_prompt = order.to(here.index.device).expand(len(here.index), -1)
        source = torch.where(
            here.index < count, by_prompt.gather(1, here.index.clamp_max(count - 1)), here.index
        )
        return _from_tokens(positions, source, here)

    return change


def shuffled(seed: int) -> Change:
    """The chosen tokens of every prompt change places at random; new tokens of a cache keep their
    positions.
    """

    def change(positions: Tensor, here: Here) -> Tensor:
        if here.start > 0:
            return positions
        generator = torch.Generator().manual_seed(seed)
        columns = torch.arange(positions.shape[-1]).repeat(len(positions), 1)
        chosen = (
            torch.ones_like(columns, dtype=torch.bool) if here.chosen is None else here.chosen.cpu()
        )
        drawn: dict[int, Tensor] = {}
        for row, which in zip(columns, chosen, strict=True):
            count = int(which.sum())
            places = row[which]
            # Prompts with as many chosen tokens are shuffled alike: the draw does not depend on the
            # other prompts of a batch.
            drawn.setdefault(count, torch.randperm(count, generator=generator.manual_seed(seed)))
            row[which] = places[drawn[count]]
        return positions.gather(-1, columns.to(positions.device)[:, None].expand_as(positions))

    return change


def from_recorded(
    recorded: Mapping[int, Tensor], heads: int, from_head: tuple[int, int] | None = None
) -> Change:
    """Recorded positions [prompt, row, token] by layer, for a model of `heads` heads."""

    def change(positions: Tensor, here: Here) -> Tensor:
        layer, row = (here.layer, None) if from_head is None else from_head
        if layer not in recorded:
            there = ", ".join(map(str, recorded)) or "none"
            raise InputError(
                f"positions of layer {layer} were not recorded; there are those of {there}"
            )
        source = expand_heads(recorded[layer].to(positions), heads)
        if row is not None and not 0 <= row < heads:
            raise InputError(f"head {row} was asked for; the model's are 0 to {heads - 1}")
        source = source[:, list(here.heads)] if row is None else source[:, [row]]
        count = source.shape[-1]
        if here.start == 0 and int(here.index.max()) + 1 < count:
            raise InputError(
                f"positions of {count} tokens came to prompts of "
                f"{int(here.index.max()) + 1}; cut them to as many"
            )
        if len(source) not in (1, len(positions)):
            raise InputError(
                f"positions of {len(source)} prompts came to {len(positions)}; give one "
                "prompt's, or those of each"
            )
        source = source.expand(len(positions), positions.shape[1], -1)
        index = here.index[:, None].expand_as(positions)
        return torch.where(index < count, source.gather(-1, index.clamp_max(count - 1)), positions)

    return change


def _by_layer(
    model: nn.Module, recorded: Mapping[Any, Tensor] | ActivationCache
) -> dict[int, Tensor]:
    """Recorded positions by the number of their layer, from either form."""
    # an ActivationCache
    if not isinstance(recorded, Mapping) and not hasattr(recorded, "cache_dict"):
        raise InputError(
            "recorded positions are what positions_of returns, or a cache; got "
            f"{one_line(repr(recorded), 160)}"
        )
    try:
        given: dict[Any, Tensor] = {name: torch.as_tensor(each) for name, each in recorded.items()}
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            "recorded positions are no numbers; wanted what positions_of returns, got "
            f"{one_line(repr(recorded), 160)}"
        ) from None
    by_layer = {
        layer: given[name]
        for layer in as_decoder(model).by_layer
        for name in (layer, HOOK.format(layer))
        if name in given
    }
    for layer, positions in by_layer.items():
        if positions.ndim != 3:
            raise InputError(
                f"recorded positions of layer {layer} are {list(positions.shape)}; wanted "
                "[prompt, row, token]"
            )
    return by_layer
