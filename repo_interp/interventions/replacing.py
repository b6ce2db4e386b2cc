"""Replace rows of `hook_positions` by a function, for chosen heads and tokens.

All interventions on positions use this module:

    z[b, h, i] <- change(z)[b, h, i]        for chosen heads h and chosen tokens i; others do not change

A key has one position per key-value head, and heads that share an f_phi share a row. If only some
of the heads of a row are chosen, rows are repeated as far as necessary: `hook_positions` then has a
row per key-value head, or per head, and keys are repeated too, so that every head rotates a copy.
The number of rows depends only on the chosen heads, never on values, so keys in a cache keep their
shape.

Tokens are counted by their index in the prompt, for any padding and any number of cached tokens.
Padding is never chosen if the pass marks it (`models.padding`), as analyses, scores and attention
masks do. During generation with a cache, a change sees only the new tokens. Positions in half
precision are converted to float32 first. This module knows nothing about the effects of a change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from repo_interp.errors import InputError, one_line, quoted, warn
from repo_interp.models.attention import RepositionedAttention, require_one_position
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import intervention, model_edit
from repo_interp.models.padding import valid_tokens
from repo_interp.models.precision import float32_by_default
from repo_interp.models.tables import change_index, position_table
from repo_interp.positions.logits import exact
from repo_interp.positions.rotary import expand_heads

Heads = Sequence[tuple[int, int]] | tuple[int, int] | None
"""Heads as (layer, head), one or several; None: all heads of the layers."""
Layers = int | Sequence[int] | None
"""Layers, one or several; None: every layer that assigns positions."""
Tokens = Sequence[int] | Sequence[Sequence[int]] | None
"""Indices of tokens in a prompt: the same for all prompts, or one sequence per prompt; None: all,
including generated tokens.
"""


MOST_TOKENS = 1 << 24
"""Largest token index; a table for more tokens would not fit in memory."""


@dataclass(frozen=True)
class PassContext:
    """Context of a change: one layer in one forward pass."""

    layer: int
    heads: tuple[int, ...]
    """The first head of every row that the change gets."""
    index: Int[Tensor, "prompt token"]
    """Index of every token of this pass in its prompt; 0 for padding on the left."""
    start: int
    """Number of cached tokens before this pass."""
    chosen: Bool[Tensor, "prompt token"] | None
    """The tokens whose positions are replaced, without padding that the pass marks
    (`models.padding`); None: all.
    """


Change = Callable[[Float[Tensor, "prompt row token"], PassContext], Tensor]
"""Function from positions of chosen rows to new positions; the result is broadcast to the rows.
"""


@model_edit
def replaced(
    model: nn.Module,
    change: Change,
    heads: Heads = None,
    *,
    layer: Layers = None,
    tokens: Tokens = None,
    rows: int = 1,
    prompts: int = 1,
    sets: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> Iterator[None]:
    """Replace the positions of chosen heads and tokens by a function inside a `with` block.

        with replaced(bridge, lambda positions, here: positions.flip(-1), heads=[(2, 0), (2, 1)]):
            logits, cache = bridge.run_with_cache(tokens)

    In nested contexts the inner change gets the result of the outer one. If positions are learned
    vectors at the model's input, `change` gets the index of every token, and its result is rounded.
    Measures, caches and hooks on `hook_positions` that are attached inside see the new positions.
    Hooks are removed at the end of the context, also after an error. If no pass reached some of the
    `tokens`, a Note warns at the end.

    Args:
        model: Repositioned model or bridge.
        change: Function from positions and `PassContext` to new positions.
        heads: (layer, head) pairs; None: all heads of the layers.
        layer: One layer or several, instead of `heads`; None: all that assign positions.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.
        rows: Least number of rows of positions that the change needs: 1, the number of key-value
            heads, or the number of heads.
        prompts: Number of prompts for which the change has values; 1: any number.
        sets: Instead of `heads`, the pairs of each prompt of the batch, for many edits in one pass.

    Yields:
        None.

    Raises:
        InputError: The model lacks the layers, heads or tokens, or a layer has no positions; or, in
            the pass, new positions are not finite or have another length.
    """
    if not callable(change):
        raise InputError(
            f"a change is a function of positions and their context; got {quoted(change)}"
        )
    if sets is not None:
        # Rows are made for the heads of all prompts; `of_prompts` has the heads of each prompt.
        heads, prompts = [head for some in sets for head in some], len(sets)
    named = _Named(None if tokens is None else token_table(tokens), prompts)
    decoder = as_decoder(model)
    # Learned absolute positions are one table at the input of the whole model.
    learned = None if decoder.positioned else position_table(decoder.stack)
    chosen: dict[int, frozenset[int]] = {}
    if learned is None or heads is not None or layer is not None:
        if heads is None and layer is None and not decoder.positioned:
            schemes = dict.fromkeys(attention.scheme for attention in decoder.layers)
            raise InputError(
                f"no layer of this model ({', '.join(schemes)}) assigns positions, so none "
                "can be set"
            )
        chosen = choose_heads(decoder, heads, layer, decoder.positioned)
    with intervention(decoder) as undo:
        if learned is not None and not chosen:
            undo.callback(change_index(learned, partial(_changed_index, change, named)).remove)
        for attention in decoder.attentions(chosen):
            if not attention.uses_positions:
                raise InputError(
                    f"layer {attention.layer_idx} ({attention.scheme}) assigns no positions, so "
                    "none can be set; choose another layer"
                )
            # `require_named_tokens` reads the active interventions here before a job begins.
            attention.interventions.append(named)
            undo.callback(attention.interventions.remove, named)
            layer_idx = attention.layer_idx
            of_prompts = [
                frozenset(head for at, head in some if at == layer_idx) for some in sets or ()
            ]
            put = partial(
                _changed_positions, attention, chosen[layer_idx], of_prompts, change, named, rows
            )
            undo.callback(attention.sites.call("positions", put))
        yield
    missed = named.beyond(named.longest) if named.longest else []
    if missed:
        warn(
            f"positions of token {missed[0]} were to be changed, and no prompt had more than "
            f"{named.longest} tokens: "
            "nothing changed there"
        )


def require_named_tokens(
    decoder: Decoder, count: int, lengths: Sequence[int], generated: Sequence[int] = (0,)
) -> None:
    """Check that the active interventions fit the prompts that will be measured.

    Args:
        decoder: Decoder of the model.
        count: Number of prompts.
        lengths: Number of tokens of each prompt.
        generated: Number of generated tokens of each prompt.

    Raises:
        InputError: An intervention names tokens beyond the end of all prompts, or has values for
            another number of single prompts, or for prompts of several lengths.
    """
    under_way = [
        named
        for layer in decoder.repositioned
        for named in layer.interventions
        if isinstance(named, _Named)
    ]
    # Without prompts no token can be reached.
    for named in under_way if lengths else ():
        if missed := named.beyond(max(lengths)):
            raise InputError(
                f"an intervention names token {missed[0]}, and no prompt has more than "
                f"{max(lengths)} tokens, so that nothing would "
                "change there; name tokens within the prompts"
            )
        prompts = named.prompts
        if prompts > 1 and prompts != count:
            raise InputError(
                f"an intervention has separate values for each of {prompts} prompts, and {count} "
                f"are measured, so values would apply to wrong prompts; measure these {prompts}, "
                "or give the same values for all"
            )
        # Batches are sorted by length, so row k of a pass need not be prompt k.
        if prompts > 1 and (min(lengths) < max(lengths) or min(generated) < max(generated)):
            raise InputError(
                f"an intervention has separate values for each of {prompts} prompts, and prompts "
                "of several lengths do not pass the model in the given order; give the same "
                "values for all, or measure one prompt at a time"
            )


def heads_with_positions(model: nn.Module) -> list[tuple[int, int]]:
    """List the heads that `replaced` accepts: their rotation or bias depends on positions.

    Args:
        model: Repositioned model or bridge.

    Returns:
        (layer, head) pairs in the order of the model.
    """
    return as_decoder(model).positioned_heads


def changed_rows(
    positions: Float[Tensor, "prompt row token"], change: Change, here: PassContext
) -> Float[Tensor, "prompt row token"]:
    """Apply a change to the positions of chosen tokens.

    Args:
        positions: Positions of the chosen rows.
        change: Function from positions and `here` to new positions.
        here: Layer, heads and tokens of the pass.

    Returns:
        New positions.

    Raises:
        InputError: New positions are not finite numbers, or have another length.
    """
    new = finite_positions(
        change(positions, here), positions, f"positions to set in layer {here.layer}"
    ).to(positions.dtype)
    try:
        # May also make `new` larger than the positions; the shape is checked below.
        new = torch.broadcast_tensors(new, positions)[0]
    except RuntimeError:
        # An impossible shape, so that the message below covers this case too
        new = new.new_empty(0, 0, 0)
    if new.shape != positions.shape:
        raise InputError(
            f"wanted positions that broadcast to {list(positions[:, 0].shape)} [prompt, "
            f"token] in layer {here.layer}; "
            "give one per token of the prompt"
        )
    return new if here.chosen is None else torch.where(here.chosen[:, None], new, positions)


def finite_positions(given: Any, positions: Tensor, name: str) -> Tensor:
    """Make a tensor of finite real numbers on the device of `positions`.

    Args:
        given: Numbers of any form and shape.
        positions: Positions that determine the device and the range of finite numbers.
        name: Name of the numbers in messages.

    Returns:
        The numbers, in their original type.

    Raises:
        InputError: `given` are not real numbers, or are NaN or infinite while `positions` are
            finite.
    """
    try:
        with float32_by_default():  # numbers of Python
            new = torch.as_tensor(given, device=positions.device)
        if new.layout != torch.strided or new.is_quantized:
            raise TypeError("they are sparse, nested or quantised")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} are no numbers: {one_line(error)}") from None
    if new.is_complex() or new.dtype == torch.bool:
        raise InputError(
            f"{name} are {'complex' if new.is_complex() else 'true and false'}; give real numbers"
        )
    # Checked in the type of the positions, where 1e300 is infinite. If positions were NaN before,
    # the change is not the cause.
    if not new.to(positions.dtype).isfinite().all() and positions.isfinite().all():
        raise InputError(f"{name} are NaN or infinite; give finite ones")
    return new


def tokens_at(
    table: Bool[Tensor, "prompt token"], index: Int[Tensor, "prompt token"]
) -> Bool[Tensor, "prompt token"]:
    """Look tokens up in a table by their index in the prompt.

    Args:
        table: Mask of named tokens from `token_table`, one row for all prompts or one per prompt.
        index: Indices of the tokens of a pass.

    Returns:
        True for tokens of the pass that are named.
    """
    count = table.shape[1]
    rows = table.to(index.device).expand(len(index), -1)
    # Clamped only for `gather`; tokens beyond the table are not named.
    return rows.gather(1, index.clamp(0, count - 1)) & (index < count)


class _Named:
    """The tokens that an intervention names, and the longest prompt so far."""

    def __init__(self, table: Bool[Tensor, "prompt token"] | None, prompts: int) -> None:
        """Keep the tokens of `table` (None: all); `prompts` is the number that the change fits."""
        self.table = table
        self.prompts = max(prompts, 1 if table is None else len(table))
        self.longest = 0
        """Length of the longest prompt so far; only counted if tokens are named."""

    def chosen(self, index: Int[Tensor, "prompt token"]) -> Bool[Tensor, "prompt token"] | None:
        """Mask of the named tokens of a pass; None: all."""
        if self.table is None:
            return None
        # Used only for the warning at the end of `replaced`.
        self.longest = max(self.longest, int(index.max()) + 1)
        prompts = len(self.table)
        if prompts not in (1, len(index)):
            raise InputError(
                f"tokens of {prompts} prompts were named, but {len(index)} prompts came; "
                "name those of each"
            )
        return tokens_at(self.table, index)

    def beyond(self, count: int) -> list[int]:
        """Indices of tokens from `count` on that are named for some prompt."""
        return (
            []
            if self.table is None
            else [count + number for number in self.table.any(0)[count:].nonzero()[:, 0].tolist()]
        )


def _changed_positions(
    attention: RepositionedAttention,
    chosen: frozenset[int],
    of_prompts: Sequence[frozenset[int]],
    change: Change,
    named: _Named,
    least: int,
    positions: Float[Tensor, "prompt row token"],
) -> Float[Tensor, "prompt row token"]:
    """Return positions of a layer with those of the `chosen` heads replaced.

    `of_prompts`: heads of each prompt; empty: `chosen` in all prompts. `least`: least number of
    rows of the result.
    """
    require_one_position(attention, positions)
    now, heads = attention.active_pass, attention.heads
    index = now.index.expand(len(now.hidden_states), -1)
    rows = _rows(positions.shape[1], attention.kv_heads, heads, {chosen, *of_prompts}, least)
    # [prompt, row, token]; the token index has the shape [1, 1, token], for all prompts.
    positions = expand_heads(exact(positions), rows).expand(len(index), -1, -1)
    # Heads of a row are neighbors; `_rows` ensures that all or none of them are chosen.
    firsts = [row * (heads // rows) for row in range(rows)]
    selected = [row for row, first in enumerate(firsts) if first in chosen]
    valid, tokens = (
        valid_tokens(now.hidden_states, now.attention_mask, now.start),
        named.chosen(index),
    )
    tokens = valid if tokens is None else tokens if valid is None else tokens & valid
    here = PassContext(
        attention.layer_idx, tuple(firsts[row] for row in selected), index, now.start, tokens
    )
    old = positions[:, selected]
    new = changed_rows(old, change, here)
    if of_prompts:
        if len(of_prompts) != len(index):
            raise InputError(
                f"heads of {len(of_prompts)} prompts were named, but {len(index)} prompts "
                "came; name those of each"
            )
        edited = torch.tensor(
            [[head in some for head in here.heads] for some in of_prompts], device=new.device
        )
        new = torch.where(edited[:, :, None], new, old)
    if len(selected) == rows:
        return new
    parts = dict(zip(selected, new.unbind(1), strict=True))
    return torch.stack([parts.get(row, old) for row, old in enumerate(positions.unbind(1))], dim=1)


def _changed_index(
    change: Change, named: _Named, index: Int[Tensor, "any token"]
) -> Float[Tensor, "prompt token"]:
    """Return the changed index for the table of learned absolute positions of the whole model.

    An index below 0 marks padding.
    """
    # One row serves all prompts, unless the change differs between prompts.
    index = index.expand(max(len(index), named.prompts), -1)
    # The last token's index is correct for any padding; tokens before this pass are cached.
    start = int(index[:, -1].max()) + 1 - index.shape[1]
    here = PassContext(0, (0,), index, max(0, start), named.chosen(index))
    return changed_rows(index[:, None].to(torch.float32), change, here)[:, 0]


def _rows(
    present: int, kv_heads: int, heads: int, apart: Collection[frozenset[int]], least: int
) -> int:
    """Return the least number of rows in which no row mixes heads of a set in `apart` with others.

    The number is at least `least` and the present number of rows.
    """
    # Attention can rotate one shared row, one row per key-value head, or one row per head.
    for rows in sorted({present, kv_heads, heads}):
        group = heads // rows
        together = [
            len(some.intersection(range(row * group, (row + 1) * group)))
            for some in apart
            for row in range(rows)
        ]
        if rows >= max(present, least) and all(count in (0, group) for count in together):
            return rows
    raise InputError(
        f"a change needs {least} rows of positions, but this model has {heads} heads; give it fewer"
    )


def choose_heads(
    decoder: Decoder, heads: Heads, layer: Layers, default: Collection[int]
) -> dict[int, frozenset[int]]:
    """Find the heads of every layer that an intervention changes.

    Args:
        decoder: Decoder of the model.
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layer: One layer or several; None: the layers of `default`, unless `heads` are given.
        default: Layers that can be changed.

    Returns:
        By layer, the indices of the heads.

    Raises:
        InputError: Both `heads` and `layer` are given, one of them is empty, or the model lacks a
            head or layer.
    """
    if heads is not None and layer is not None:
        raise InputError(
            "heads as (layer, head) pairs or a layer were wanted, not both; leave one out"
        )
    layers = decoder.by_layer
    if heads is not None:
        chosen = heads_by_layer(decoder, heads)
    else:
        named: Any = default if layer is None else [layer] if np.ndim(layer) == 0 else layer  # pyright: ignore[reportArgumentType, reportCallIssue]
        numbers = [number_of(number, "a layer") for number in named]
        decoder.attentions(numbers)  # refuses a layer that the model lacks
        chosen = {number: frozenset(range(layers[number].heads)) for number in numbers}
    if not chosen:
        raise InputError("no layer was named; name some, or leave them out for all")
    return chosen


def heads_by_layer(decoder: Decoder, heads: Any) -> dict[int, frozenset[int]]:
    """Group heads by layer.

    Args:
        decoder: Decoder of the model.
        heads: (layer, head) pairs, one or several.

    Returns:
        By layer, the indices of the heads.

    Raises:
        InputError: The model lacks a head.
    """
    pairs = head_pairs(heads)
    named = decoder.attentions({layer for layer, _ in pairs})
    counts = {attention.layer_idx: attention.heads for attention in named}
    chosen: dict[int, frozenset[int]] = {}
    for layer, head in pairs:
        if not 0 <= head < counts[layer]:
            raise InputError(f"head {head} was asked for; the model's are 0 to {counts[layer] - 1}")
        chosen[layer] = chosen.get(layer, frozenset()) | {head}
    return chosen


def head_pairs(heads: Any) -> list[tuple[int, int]]:
    """Check (layer, head) pairs.

    Args:
        heads: One pair or several.

    Returns:
        The pairs without repetitions, in order.

    Raises:
        InputError: There is no pair, or a pair is not two whole numbers.
    """
    pairs = (
        [heads]
        # (2, 0) is one pair, and ((2, 0), (2, 3)) are two
        if isinstance(heads, tuple) and len(heads) == 2 and not hasattr(heads[0], "__len__")
        else heads
    )
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise InputError(
            f"heads are (layer, head) pairs, such as [(2, 0), (2, 3)]; got {quoted(heads)}"
        )
    found = list(dict.fromkeys(layer_and_head(pair) for pair in pairs))
    if not found:
        raise InputError("no head was named; name (layer, head) pairs, such as [(2, 0), (2, 3)]")
    return found


def layer_and_head(pair: Any) -> tuple[int, int]:
    """Check one (layer, head) pair.

    Args:
        pair: Two whole numbers.

    Returns:
        The indices of the layer and of the head.

    Raises:
        InputError: `pair` is not two whole numbers.
    """
    if isinstance(pair, str) or not hasattr(pair, "__len__") or len(pair) != 2:
        raise InputError(
            f"heads are (layer, head) pairs, such as [(2, 0), (2, 3)]; got {quoted(pair)}"
        )
    return number_of(pair[0], "a layer"), number_of(pair[1], "a head")


def number_of(value: Any, name: str) -> int:
    """Check a whole number, which may be a number of numpy or torch.

    Args:
        value: Any value.
        name: Name of the number in messages.

    Returns:
        The number as an int.

    Raises:
        InputError: `value` is a boolean, a fraction, or not a number.
    """
    # Not isinstance(int): numbers of numpy and torch have __index__, but True has it too
    if isinstance(value, bool | np.bool_):
        raise InputError(f"{name} is a whole number from 0; got {value!r}")
    try:
        return operator.index(value)
    except TypeError:  # not a number, a fraction, or an array
        raise InputError(f"{name} is a whole number from 0; got {quoted(value)}") from None


def token_table(tokens: Any) -> Bool[Tensor, "prompt token"]:
    """Mark named tokens in a table.

    Args:
        tokens: Indices for all prompts, or one sequence per prompt.

    Returns:
        Mask of named tokens, one row for all prompts or one per prompt.

    Raises:
        InputError: `tokens` are not indices, or are negative or too large.
    """
    named = []
    if isinstance(tokens, range):  # not expanded to a list, which may be huge by mistake
        named = [tokens]
    elif isinstance(tokens, Iterable):
        named = [item.tolist() if isinstance(item, Tensor) else item for item in tokens]
    by_prompt: list[Any] = named if all(hasattr(item, "__len__") for item in named) else [named]
    # A range holds whole numbers, so only its ends are checked.
    indices: list[Any] = [
        token
        for row in by_prompt
        for token in ((row[0], row[-1]) if isinstance(row, range) and row else row)
    ]
    if any(isinstance(token, bool | np.bool_) for token in indices):
        raise InputError(
            "tokens are indices from 0, and a mask was given; give mask.nonzero()[:, 0], or "
            "a sequence for each prompt"
        )
    if not indices or not all(hasattr(token, "__index__") for token in indices) or min(indices) < 0:
        raise InputError(
            f"tokens are indices from 0, for all prompts or a sequence for each; got {quoted(tokens)}"
        )
    if max(indices) >= MOST_TOKENS:
        raise InputError(f"token {max(indices)} was named; no prompt has more than {MOST_TOKENS:,}")
    table = torch.zeros(len(by_prompt), max(indices) + 1, dtype=torch.bool)
    for number, row in enumerate(by_prompt):
        table[number, [*map(int, row)]] = True
    return table
