"""Record and set positions, and exchange positions of tokens or heads.

Edits with a common set of arguments (heads, layers and tokens) are in `edits`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.errors import InputError, quoted
from repo_interp.interventions.edits import Permuted
from repo_interp.interventions.replacing import (
    Heads,
    Layers,
    PassContext,
    Tokens,
    finite_positions,
    layer_and_head,
    replaced,
    token_table,
)
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.capture import decode
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import ModelEdit, called_at


def swapped_tokens(
    model: nn.Module,
    one: int | Sequence[int],
    other: int | Sequence[int],
    heads: Heads = None,
    *,
    layer: Layers = None,
) -> ModelEdit:
    """Exchange the positions of two tokens, or of two spans pair by pair.

    Args:
        model: Repositioned model or bridge.
        one: Index of a token, or indices of a span.
        other: Another token, or a span of equal length without common tokens.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several, instead of `heads`; None: all that assign positions.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: Tokens occur twice, or the spans differ in length.
    """
    first, second = (list(some) if isinstance(some, Iterable) else [some] for some in (one, other))
    table = token_table([first, second])
    # Fewer different tokens than named tokens: a token occurs twice, or in both spans.
    if len(first) != len(second) or int(table.any(0).sum()) < len(first) + len(second):
        raise InputError(
            f"two tokens, or two spans of as many different tokens, change places; got {one} "
            f"and {other}"
        )
    order = torch.arange(table.shape[1])
    order[first], order[second] = torch.tensor(second), torch.tensor(first)
    return Permuted(order=order).on(model, heads, layer=layer)


def swapped_heads(
    model: nn.Module,
    one: tuple[int, int],
    other: tuple[int, int],
    *,
    tokens: Tokens = None,
) -> ModelEdit:
    """Exchange the positions of two heads of one layer.

    For heads of different layers, record positions with `positions_of`, then use
    `transplanted(..., from_head=...)` for each of the two heads.

    Args:
        model: Repositioned model or bridge.
        one: (layer, head).
        other: Another head of the same layer.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: The heads are equal, or in different layers.
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
    # `replaced` passes only the chosen rows, which are the two heads.
    return replaced(model, lambda z, here: z.flip(1), [one, other], tokens=tokens)


def set_positions(
    model: nn.Module,
    layer: int,
    head: int | None = None,
    values: float | Sequence[float] | Tensor | Callable[[Tensor], Tensor] | None = None,
) -> ModelEdit:
    """Set the positions of one head, or of all heads of a layer.

        with ri.set_positions(bridge, layer=2, head=1, values=torch.arange(20.0)):
            logits, cache = bridge.run_with_cache(tokens)

    Other heads keep their positions, even if heads share positions.

    Args:
        model: Repositioned model or bridge.
        layer: Index of the layer.
        head: Index of the head; None: all heads.
        values: Positions that broadcast to [prompt, token], or a function of the layer's positions
            [prompt, row, token].

    Returns:
        A context manager; positions are changed while it lasts.

    Raises:
        InputError: The model lacks the layer or head; or, in the pass, `values` are not finite or
            have another shape.
    """
    try:
        # () for a function, whose result is not known yet
        shape = np.shape(values)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (TypeError, ValueError, RuntimeError):  # the pass raises a better error
        shape = ()
    prompts = int(shape[0]) if len(shape) == 2 else 1

    def change(z: Tensor, here: PassContext) -> Tensor:
        given = values(z) if callable(values) else values
        new = finite_positions(given, z, f"positions to set in layer {here.layer}")
        return new[:, None] if new.ndim == 2 else new

    where: dict[str, Any] = {"layer": layer} if head is None else {"heads": [(layer, head)]}
    return replaced(model, change, **where, prompts=prompts)


@torch.no_grad()
def positions_of(
    model: nn.Module, tokens: Int[Tensor, "prompt token"] | Sequence[Sequence[int]]
) -> dict[int, Float[Tensor, "prompt row token"]]:
    """Record the positions that a model assigns to tokens, including active interventions.

    Args:
        model: Repositioned model or bridge.
        tokens: Ids of the prompts, without padding or padded on the right.

    Returns:
        By layer, the positions [prompt, row, token] of layers that have positions, with one row for
        all heads, per key-value head or per head.

    Raises:
        InputError: `tokens` is not a table of token ids of the model.
    """
    decoder = as_decoder(model)
    given = token_ids(decoder, tokens)
    recorded: dict[int, Tensor] = {}

    def record(attention: RepositionedAttention, positions: Tensor) -> None:
        # Cloned: layers may share a tensor of positions, and a later hook may write into it.
        recorded[attention.layer_idx] = positions.clone()

    with called_at(decoder, "positions", record):
        decode(decoder, given)
    return recorded


def token_ids(decoder: Decoder, tokens: Any) -> Int[Tensor, "prompt token"]:
    """Check tokens, and move them to the device of a model.

    Args:
        decoder: Decoder of the model.
        tokens: Ids, one row per prompt.

    Returns:
        The ids as a tensor.

    Raises:
        InputError: `tokens` is not a table of token ids of the model.
    """
    vocabulary = decoder.vocabulary_size
    try:
        # as_tensor fails for ragged lists and texts, which get the message below too.
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
