"""Change the positions of chosen heads and tokens during forward passes; nothing is left behind.

    linearised     z_i <- i                         the token's index: plain RoPE for that head
    straightened   z_i <- a + b i                   the line fitted to the positions of the head
    frozen         z_i <- c                         one position for all: no rotation, as NoPE
    permuted       z_i <- z_order(i)                the same positions, given to other tokens
    swapped_tokens z_i <-> z_j
    swapped_heads  z^h <-> z^g                      of two heads of one layer
    scaled         z_i <- s z_i
    rounded        z_i <- d round(z_i / d)
    clipped        z_i <- min(max(z_i, low), high)
    shifted        z_i <- z_i + b                   for a span: shifting all changes nothing
    copied         z_i <- z_j                       of one token of the same prompt
    transplanted   z_i <- z_i of another prompt, head or checkpoint, as `positions_of` recorded them
    segmented      z_i <- step (i - s_i) + jump s_i    s_i: segments that begin among tokens 1 .. i
    ranked         z_i <- its rank among the positions of the prompt
    set_positions  z_i <- given values, or any function of the positions

Every function takes `heads` as (layer, head) pairs, or `layer`, or neither for all heads with
positions, and `tokens` by index, as `replaced` does. It makes an edit (`edits.PositionEdit`), which
`replaced` applies. RoPE's index is a position like any other. Learned positions: RePo eq. 4-7.

With a cache new tokens get positions as `edits` says. Greedy text is then the same with and without
a cache, but for orders and ranks, which are made anew for a prompt that has grown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.errors import InputError, quoted
from repo_interp.interventions.edits import EditKind, PositionEdit, recorded_at
from repo_interp.interventions.replacing import (
    Heads,
    Layers,
    Tokens,
    finite_positions,
    heads_by_layer,
    layer_and_head,
    replaced,
    token_table,
)
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.capture import decode
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import called_at
from repo_interp.positions.rotary import expand_heads
from repo_interp.values import Finite, Seed, checked

if TYPE_CHECKING:
    from transformer_lens import ActivationCache

FLOAT32 = torch.finfo(torch.float32)
HOOK = "blocks.{}.attn.hook_positions"
"""Name of a layer's positions in a bridge's cache."""


def linearised(
    model: nn.Module,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
) -> AbstractContextManager:
    """Set positions to the token index, as plain RoPE has them.

    Args:
        model: Repositioned model or bridge.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: The model lacks the layers or heads, or they have no positions.
    """
    return _edited(model, "linearised", None, heads, layer, tokens)


def straightened(
    model: nn.Module,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
) -> AbstractContextManager:
    """Set positions to the straight line over the token index that fits them best.

    The line is fitted by least squares, for every prompt and row of positions by itself: RoPE with
    the head's slope.

    Args:
        model: Repositioned model or bridge.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

    Returns:
        A context manager; positions are changed while it lasts. New tokens after a cached prompt
        are on its line.

    Raises:
        InputError: The model lacks the layers, heads or tokens; or, in the pass, the prompt is in
            the cache.
    """
    return _edited(model, "straightened", None, heads, layer, tokens)


def frozen(
    model: nn.Module,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
    value: float | None = None,
) -> AbstractContextManager:
    """Set positions to one constant.

    Frozen over all tokens a head computes as without positions (NoPE), whatever the value.

    Args:
        model: Repositioned model or bridge.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.
        value: The constant; None: the mean of every row over the chosen tokens of the prompt.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: `value` is no finite number, or the model lacks the layers, heads or tokens.
    """
    return _edited(model, "frozen", value, heads, layer, tokens)


def permuted(
    model: nn.Module,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
    order: Sequence[int] | Tensor | None = None,
    seed: int = 0,
) -> AbstractContextManager:
    """Give token i the position of token order[i], in all heads alike.

    Args:
        model: Repositioned model or bridge.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.
        order: Permutation of the first tokens' indices, [token] or [prompt, token]; later tokens
            keep their positions. None: a random order of the chosen tokens of every prompt. Padding
            on the right changes places too, unless an attention mask or `tokens` leave it out;
            where prompts are analyzed and scored it is left out.
        seed: Seed of the random order.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: `order` is no permutation or stands beside a seed; or, in the pass, its tokens
            are in the cache or a prompt lacks them.
    """
    if order is None:
        return _edited(model, "permuted", seed, heads, layer, tokens)
    if checked(seed, Seed, "seed"):
        raise InputError(f"seed {seed} draws an order, and one was given; leave one of the two out")
    # The zeros only say on which device the indices are wanted: the processor, to be checked here
    indices = finite_positions(order, torch.zeros(1), "the tokens of an order")
    if (
        indices.dtype not in (torch.int32, torch.int64)
        or indices.ndim not in (1, 2)
        or not indices.numel()
        or not (indices.sort(-1).values == torch.arange(indices.shape[-1])).all()
    ):
        raise InputError(
            "an order names each of the first tokens once, [token] or [prompt, token]; got "
            f"{quoted(order)}"
        )
    prompts = len(indices) if indices.ndim == 2 else 1
    return _edited(model, "reordered", indices, heads, layer, tokens, prompts=prompts)


def swapped_tokens(
    model: nn.Module,
    one: int | Sequence[int],
    other: int | Sequence[int],
    heads: Heads = None,
    *,
    layer: Layers = None,
) -> AbstractContextManager:
    """Exchange the positions of two tokens, or of two spans pair by pair.

    Args:
        model: Repositioned model or bridge.
        one: Index of a token, or indices of a span.
        other: Another token, or a span of as many other tokens.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: The two are no different tokens, or no spans of one length.
    """
    first, second = (list(some) if isinstance(some, Iterable) else [some] for some in (one, other))
    table = token_table([first, second])
    # Fewer different tokens than were named: one occurs twice, or in both spans
    if len(first) != len(second) or int(table.any(0).sum()) < len(first) + len(second):
        raise InputError(
            f"two tokens, or two spans of as many different tokens, change places; got {one} "
            f"and {other}"
        )
    order = torch.arange(table.shape[1])
    order[first], order[second] = torch.tensor(second), torch.tensor(first)
    return _edited(model, "reordered", order, heads, layer)


def swapped_heads(
    model: nn.Module,
    one: tuple[int, int],
    other: tuple[int, int],
    *,
    tokens: Tokens = None,
) -> AbstractContextManager:
    """Exchange the positions of two heads of one layer.

    Heads of different layers: record with `positions_of`, then `transplanted(..., from_head=...)`
    both ways.

    Args:
        model: Repositioned model or bridge.
        one: (layer, head).
        other: Another head of this layer.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: The two are the same, or of different layers.
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
    return _edited(model, "swapped_heads", None, [one, other], tokens=tokens)


def scaled(
    model: nn.Module,
    factor: float,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
) -> AbstractContextManager:
    """Multiply positions by a factor.

    Args:
        model: Repositioned model or bridge.
        factor: Any finite number.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: `factor` is no finite number, or the model lacks the layers, heads or tokens.
    """
    return _edited(model, "scaled", factor, heads, layer, tokens)


def rounded(
    model: nn.Module,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
    step: float = 1.0,
) -> AbstractContextManager:
    """Round positions to multiples of a step, halves to the even one.

    Args:
        model: Repositioned model or bridge.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.
        step: Distance of two multiples, in positions.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: `step` is no positive number, or the model lacks the layers, heads or tokens.
    """
    return _edited(model, "rounded", step, heads, layer, tokens)


def clipped(
    model: nn.Module,
    low: float,
    high: float,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
) -> AbstractContextManager:
    """Clip positions between two ends.

    Args:
        model: Repositioned model or bridge.
        low: Lower end; -infinity: none.
        high: Upper end; infinity: none.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: `low` is above `high`, both are the same infinity, or one is no number of float32.
    """
    if (
        not all(
            # NaN fails both comparisons
            isinstance(end, int | float) and (abs(end) <= FLOAT32.max or abs(end) == math.inf)
            for end in (low, high)
        )
        or not low <= high
        or low == math.inf
        or high == -math.inf
    ):
        shown = " and ".join(quoted(end, 40) for end in (low, high))
        raise InputError(
            f"positions are clipped between a lower and an upper end, not {shown}; wanted "
            f"numbers up to {FLOAT32.max:.2g}, or infinity"
        )
    return _edited(model, "clipped", (low, high), heads, layer, tokens)


def shifted(
    model: nn.Module,
    by: float,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
) -> AbstractContextManager:
    """Move the chosen tokens - of a needle, say - by a number of positions.

    Args:
        model: Repositioned model or bridge.
        by: Number of positions, added.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: `by` is no finite number, or the model lacks the layers, heads or tokens.
    """
    return _edited(model, "shifted", by, heads, layer, tokens)


def copied(
    model: nn.Module,
    source: int,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
) -> AbstractContextManager:
    """Give tokens the position of one token of their prompt.

    Args:
        model: Repositioned model or bridge.
        source: Index of that token.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: `source` is no index, or, in the pass, a prompt lacks this token.
    """
    return _edited(model, "copied", source, heads, layer, tokens)


def transplanted(
    model: nn.Module,
    recorded: Mapping[Any, Tensor] | ActivationCache,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
    from_head: tuple[int, int] | None = None,
) -> AbstractContextManager:
    """Give tokens the positions that were recorded for the same layer, head and index.

    Args:
        model: Repositioned model or bridge.
        recorded: Result of `positions_of` for another prompt or checkpoint, or a bridge's cache; one
            prompt serves all, and tokens beyond it keep their positions.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.
        from_head: (layer, head) whose recorded positions all chosen heads get.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: `recorded` holds no finite positions [prompt, row, token] of a model of this
            shape; or, in the pass, it lacks the layer, or has other prompts or a longer one.
    """
    decoder = as_decoder(model)
    by_layer = _by_layer(decoder, recorded)
    # Before rows are repeated for all heads: where prompts were recorded with one row for all
    # heads, `replaced` need not repeat the rows of the pass
    rows = max((positions.shape[1] for positions in by_layer.values()), default=1)
    prompts = max((len(positions) for positions in by_layer.values()), default=1)
    counts = {number: attention.heads for number, attention in decoder.by_layer.items()}
    by_layer = {number: expand_heads(given, counts[number]) for number, given in by_layer.items()}
    if from_head is not None:
        ((source, (head,)),) = heads_by_layer(decoder, [layer_and_head(from_head)]).items()
        given = recorded_at(by_layer, source)[:, [head]]
        # One row goes to all chosen heads, so these may go on sharing theirs
        rows = 1
        by_layer = {number: given.expand(-1, count, -1) for number, count in counts.items()}
    return _edited(
        model, "transplanted", by_layer, heads, layer, tokens, rows=rows, prompts=prompts
    )


def segmented(
    model: nn.Module,
    starts: Sequence[int] | Sequence[Sequence[int]],
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
    step: float = 0.0,
    jump: float = 1.0,
) -> AbstractContextManager:
    """Set positions to a prior of segments: steps between them, a line within.

    Positions begin at 0, grow by `jump` at the first token of a segment and by `step` at all
    others. Constant positions (NoPE) have step = jump = 0, the token index (RoPE) step = jump = 1.

    Args:
        model: Repositioned model or bridge.
        starts: Index of the first token of every segment, for all prompts or one sequence per
            prompt; token 0 begins the first one also where it is not named.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.
        step: Positions from a token to the next one of its segment.
        jump: Positions from the last token of a segment to the first one of the next.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: `starts` are no indices, a number is not finite, or the model lacks the layers,
            heads or tokens.
    """
    table = token_table(starts)
    value = (
        table,
        checked(step, Finite, "the step within segments"),
        checked(jump, Finite, "the jump between segments"),
    )
    return _edited(model, "segmented", value, heads, layer, tokens, prompts=len(table))


def ranked(
    model: nn.Module,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
) -> AbstractContextManager:
    """Sort tokens by their positions: every token gets its rank, from 0, and ties their mean.

    The order of learned positions remains, their spacing does not; the token index is its own rank.

    Args:
        model: Repositioned model or bridge.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, in place of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

    Returns:
        A context manager; positions are changed while it lasts. New tokens after a cached prompt
        are ranked among the tokens of the prompt.

    Raises:
        InputError: The model lacks the layers, heads or tokens; or, in the pass, the prompt is in
            the cache.
    """
    return _edited(model, "ranked", None, heads, layer, tokens)


def set_positions(
    model: nn.Module,
    layer: int,
    head: int | None,
    values: float | Sequence[float] | Tensor | Callable[[Tensor], Tensor],
) -> AbstractContextManager:
    """Set the positions of one head, or of all heads of a layer.

        with ri.set_positions(bridge, layer=2, head=1, values=torch.arange(20.0)):
            logits, cache = bridge.run_with_cache(tokens)

    Other heads keep their positions, also where heads share them.

    Args:
        model: Repositioned model or bridge.
        layer: Number of the layer.
        head: Number of the head; None: all heads.
        values: Positions that broadcast to [prompt, token], or a function of the positions
            [prompt, row, token] of the layer.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: The model lacks the layer or head; or, in the pass, `values` are not finite or
            of another shape.
    """
    try:
        # () for a function, whose result nobody knows yet
        shape = np.shape(values)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (TypeError, ValueError, RuntimeError):  # the pass says what is wrong with them
        shape = ()
    prompts = int(shape[0]) if len(shape) == 2 else 1
    if head is None:
        return _edited(model, "set", values, None, layer, prompts=prompts)
    return _edited(model, "set", values, [(layer, head)], prompts=prompts)


@torch.no_grad()
def positions_of(
    model: nn.Module, tokens: Int[Tensor, "prompt token"] | Sequence[Sequence[int]]
) -> dict[int, Float[Tensor, "prompt row token"]]:
    """Record the positions that a model gives to tokens, interventions included.

    Args:
        model: Repositioned model or bridge.
        tokens: Ids of the prompts, padded on the right or not at all.

    Returns:
        Positions of every layer that has some, by layer, with one row for all heads, per key-value
        head or per head.

    Raises:
        InputError: `tokens` is no table of ids that the model knows.
    """
    decoder = as_decoder(model)
    given = token_ids(decoder, tokens)
    recorded: dict[int, Tensor] = {}

    def record(attention: RepositionedAttention, positions: Tensor) -> None:
        # Layers may share one tensor of positions, and a hook after this one may write into it
        recorded[attention.layer_idx] = positions.clone()

    with called_at(decoder, "positions", record):
        decode(decoder, given)
    return recorded


def token_ids(decoder: Decoder, tokens: Any) -> Int[Tensor, "prompt token"]:
    """Check tokens, and place them on the device of a model.

    Args:
        decoder: Decoder of the model.
        tokens: Ids, one row per prompt.

    Returns:
        The ids as a tensor.

    Raises:
        InputError: `tokens` is no table of ids that the model knows.
    """
    vocabulary = decoder.vocabulary_size
    try:
        # as_tensor fails on ragged lists and texts: they get the message below as well
        given = torch.as_tensor(tokens, device=decoder.device)
        whole = given.dtype in (torch.int32, torch.int64) and given.ndim == 2 and given.numel() > 0
        known = whole and int(given.min()) >= 0 and int(given.max()) < vocabulary
    except (TypeError, ValueError, RuntimeError):
        given, known = torch.empty(0), False
    if not known:
        raise InputError(
            f"tokens are a table [prompt, token] of numbers from 0 to {vocabulary - 1}, as "
            "ri.tokens gives it; "
            f"got {quoted(tokens)}"
        )
    return given


def _edited(
    model: nn.Module,
    kind: EditKind,
    value: Any,
    heads: Heads,
    layer: Layers = None,
    tokens: Tokens = None,
    **counts: Any,
) -> AbstractContextManager:
    edit = PositionEdit(kind, value)
    return replaced(model, edit, heads, layer=layer, tokens=tokens, **counts)


def _by_layer(
    decoder: Decoder, recorded: Mapping[Any, Tensor] | ActivationCache
) -> dict[int, Tensor]:
    """Recorded positions by the number of their layer, from either form."""
    if not isinstance(recorded, Mapping) and not hasattr(recorded, "cache_dict"):
        raise InputError(
            f"recorded positions are a result of positions_of, or a cache; got {quoted(recorded)}"
        )
    given = dict(recorded.items())
    by_layer = {}
    for layer, attention in decoder.by_layer.items():
        shapes = (1, attention.kv_heads, attention.heads)
        # `positions_of` names layers by number, a cache of TransformerLens by hook
        for name in given.keys() & {layer, HOOK.format(layer)}:
            positions = finite_positions(
                given[name],
                torch.zeros(1, device=decoder.device),
                f"recorded positions of layer {layer}",
            )
            if positions.ndim != 3 or positions.shape[1] not in shapes:
                raise InputError(
                    f"recorded positions of layer {layer} are {list(positions.shape)}; wanted "
                    f"[prompt, row, token] with {', '.join(map(str, sorted({*shapes})))} rows"
                )
            by_layer[layer] = positions
    return by_layer
