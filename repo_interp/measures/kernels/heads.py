"""Heads of a layer in blocks, so that several measures share one computation.

    reduced(inputs, reductions)    results over all heads from one pass, kept with `inputs`
    Reduction                      result that a measure needs of every head; equal ones are shared
    HeadBlock                      some heads: rotated features, and results on first access

One pass rotates every head once. Products within chunks, Grams, sums and spectra are computed when
the first reduction needs them, and freed with the block, so no large array (n x n, a profile of
every head, rotated features of a layer) ever exists as a whole.

Products of float32 features lose digits where large terms cancel in a variance - a mean that dwarfs
the spread, dimensions that cancel. Such heads, and only they, are gone through in float64.

This module knows nothing about reductions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs
from repo_interp.measures.kernels.causal_pairs import CausalPairs, chunk_size
from repo_interp.measures.kernels.profiles import component_profiles
from repo_interp.measures.kernels.seen_pairs import PairCounts, is_whole, once, pair_counts
from repo_interp.positions.rotary import by_pair, pair_tables
from repo_interp.runtime.memory import CORE, SHARED, memory_for, working_memory
from repo_interp.runtime.tensor_changes import changes_of

ILL_CONDITIONED = 26.0
"""Sum of the absolute terms over the sum that they give, from where on float32 features are treated
in float64.

Where nothing but the mean is large this is mean^2 / variance > 25.
"""

WHOLE_PATTERN = 512
"""Most tokens of a prompt for which the logits of one head are made as a whole."""


class Reduction(ABC):
    """A result over the heads of a layer: a frozen dataclass with its parameters as fields.

    It depends only on its fields and the inputs. `start` makes an empty result, and `add` adds the
    blocks of the layer, every head once, in any order.
    """

    @abstractmethod
    def start(self, inputs: AttentionInputs) -> Any:
        """Return the result of no heads.

        Args:
            inputs: A layer and a batch.

        Returns:
            Tensors, or a dataclass of tensors, that `add` changes in place.
        """

    @abstractmethod
    def add(self, result: Any, inputs: AttentionInputs, block: HeadBlock) -> None:
        """Add the heads of a block to a result, in place.

        Args:
            result: From `start`.
            inputs: The same layer and batch.
            block: Some heads; they are shared with other reductions and must not be changed.
        """

    def ill_conditioned(
        self, inputs: AttentionInputs, block: HeadBlock
    ) -> Bool[Tensor, "key member"] | None:
        """Mark the heads with a result that needs float64.

        Args:
            inputs: A layer and a batch.
            block: Some heads, in float32.

        Returns:
            Mask [key, member]; None where float32 is enough for all heads.
        """
        return None

    def by_rows(self, inputs: AttentionInputs) -> Any:
        """Return the result of logits that are no dot product, from some rows at a time.

        Args:
            inputs: A layer and a batch whose `is_bilinear` is False.

        Returns:
            The result; None where the reduction is over dot products there too.
        """
        return None


@dataclass(frozen=True)
class HeadBlock:
    """Query heads of some prompts by shared key: [key, member].

    Features are 0 where a token does not take part.
    """

    prompt: Int[Tensor, "key 1"]
    """Row of the batch."""
    head: Int[Tensor, "key member"]
    queries: Float[Tensor, "key member token d_head"]
    """Rotated; float32, or float64 where the inputs are, or for the sake of digits."""
    keys: Float[Tensor, "key 1 token d_head"]
    """Rotated."""
    rows: Bool[Tensor, "key 1 token"]
    """Tokens with queries that take part."""
    tokens: Bool[Tensor, "key 1 token"]
    """Tokens with keys that take part."""
    counts: PairCounts
    """Numbers of seen pairs [key, 1, ...]."""
    window: int | None

    @cached_property
    def pairs(self) -> CausalPairs:
        """Sums over the seen pairs of queries and keys."""
        return CausalPairs(self.queries, self.keys, self.window, chunk_size(self.queries.shape[-1]))

    @cached_property
    def well_conditioned(self) -> Float[Tensor, "key member"]:
        """Largest terms of the sum of squares that float32 is enough for, by the variation."""
        return ILL_CONDITIONED * self.pairs.scatter(self.counts.total)

    @cached_property
    def profiles(self) -> Float[Tensor, "key member component distance"]:
        """Sum of every component over the seen pairs at a distance, float64."""
        return component_profiles(self.queries, self.keys, self.window)

    @cached_property
    def by_distance(self) -> Float[Tensor, "key member distance"]:
        """Sum of the logits over the seen pairs at a distance, float64."""
        return self.profiles.sum(-2)

    @cached_property
    def extras(self) -> dict[Any, Any]:
        """Intermediate results of reductions, by their keys; they live as long as the block."""
        return {}

    def between(self, first: int, last: int | None) -> HeadBlock:
        """Return the block restricted to some valid tokens of every prompt.

        Args:
            first: Number of the first token among the valid ones.
            last: Number of the last token + 1; None for all that follow.

        Returns:
            A block of the same shape with the other tokens hidden; the block itself where none is.
        """
        if first == 0 and last is None:
            return self
        if (first, last) not in self.extras:
            some = tokens_between(self.tokens, first, last)
            hidden = ~some[..., None]
            self.extras[first, last] = replace(
                self,
                queries=self.queries.masked_fill(hidden, 0),
                keys=self.keys.masked_fill(hidden, 0),
                rows=self.rows & some,
                tokens=some,
                counts=pair_counts(some, self.window, self.rows & some),
            )
        return self.extras[first, last]

    def heads(self, chosen: Bool[Tensor, "key member"], dtype: torch.dtype) -> HeadBlock:
        """Return a block of some heads, without sharing of keys.

        Args:
            chosen: Mask [key, member] of the heads.
            dtype: Of queries and keys.

        Returns:
            A block [head, 1].
        """
        key, member = chosen.nonzero().unbind(-1)
        # Heads of one key may be separated here, so every head becomes the only member of its key
        of_key = {name: getattr(self, name)[key] for name in ("prompt", "rows", "tokens")}
        return replace(
            self,
            head=self.head[key, member, None],
            queries=self.queries[key, member, None].to(dtype),
            keys=self.keys[key].to(dtype),
            counts=self.counts.of(key),
            **of_key,
        )


def tokens_between(
    valid: Bool[Tensor, "... token"], first: int, last: int | None
) -> Bool[Tensor, "... token"]:
    """Return a mask of some valid tokens of every prompt.

    Args:
        valid: Mask [..., token] of the prompts' tokens.
        first: Number of the first token among the valid ones.
        last: Number of the last token + 1; None for all that follow.

    Returns:
        Mask [..., token]; `valid` itself where it is the same.
    """
    if first == 0 and last is None:
        return valid
    # Counted among valid tokens, whichever side the padding is on
    number = valid.cumsum(-1) - 1
    some = valid & (number >= first)
    return some if last is None else some & (number < last)


def reduced(
    inputs: AttentionInputs,
    reductions: Sequence[Reduction],
    rows: Bool[Tensor, "prompt token"] | None = None,
) -> list[Any]:
    """Return results of reductions, from one pass over the heads for those not yet in `inputs`.

    Blocks of heads are as large as the device's memory allows. Where that was too large, the pass
    starts again with half of it.

    Args:
        inputs: A layer and a batch; keeps the results.
        reductions: Results to compute; equal ones are computed once.
        rows: Mask [prompt, token] of the queries that take part; None for all. With a mask,
            `inputs` keep nothing.

    Returns:
        Results in the order of `reductions`.

    Raises:
        InputError: A reduction changes queries or keys in place.
    """
    # A mask of rows is no part of the reduction's key, so its results must not be kept
    known = inputs.results if rows is None else {}
    missing = [reduction for reduction in dict.fromkeys(reductions) if reduction not in known]
    if not inputs.is_bilinear:
        # Reductions that answer None go on with the dot products, as on any other layer
        known |= {
            reduction: made
            for reduction in missing
            if (made := reduction.by_rows(inputs)) is not None
        }
    missing = [reduction for reduction in missing if reduction not in known]
    if missing:
        known |= _of_all_heads(inputs, missing, rows)
    return [known[reduction] for reduction in reductions]


def _of_all_heads(
    inputs: AttentionInputs,
    reductions: Sequence[Reduction],
    rows: Bool[Tensor, "prompt token"] | None,
) -> dict[Reduction, Any]:
    """Return results of `reductions` from one pass over the heads."""
    # Made again for a second attempt: a failed one may have added some blocks
    begun = {reduction: reduction.start(inputs) for reduction in reductions}
    try:
        for block in head_blocks(inputs, rows):
            for part in _well_conditioned(inputs, block, begun):
                # Versions of tensors, which torch counts: no copy, no comparison, no wait
                present = changes_of(part.queries) + changes_of(part.keys)
                for reduction, result in begun.items():
                    reduction.add(result, inputs, part)
                    if changes_of(part.queries) + changes_of(part.keys) > present:
                        raise InputError(
                            f"{type(reduction)} changes heads in place, which other "
                            "reductions go on with; change a copy"
                        )
    except torch.OutOfMemoryError:
        # The retry is outside of `except`: an active exception keeps the tensors of its frames
        half = memory_for(inputs.queries.device, SHARED) // 2
        if half < CORE:
            raise
    else:
        return begun
    with working_memory(half):
        return _of_all_heads(inputs, reductions, rows)


def _well_conditioned(
    inputs: AttentionInputs, block: HeadBlock, reductions: Iterable[Reduction]
) -> Iterator[HeadBlock]:
    """Yield `block`, or its well-conditioned heads and then the others in float64."""
    # Float64 features are exact already, so they need no check
    exact = block.queries.dtype == torch.float64
    found = [] if exact else [reduction.ill_conditioned(inputs, block) for reduction in reductions]
    judged = [some for some in found if some is not None]
    ill = torch.stack(judged).any(0) if judged else None
    if ill is None or not bool(ill.any()):
        yield block
        return
    if not bool(ill.all()):
        # Reductions write or add by head, so two parts in any order give one result
        yield block.heads(~ill, block.queries.dtype)
    yield block.heads(ill, torch.float64)


def head_blocks(
    inputs: AttentionInputs,
    rows: Bool[Tensor, "prompt token"] | None = None,
) -> Iterator[HeadBlock]:
    """Yield all heads of all prompts once, in blocks that fit a kernel's memory.

    Args:
        inputs: A layer and a batch.
        rows: Mask [prompt, token] of the queries that take part; None for all valid tokens.

    Yields:
        Blocks with rotated features; at least one head per block.

    Raises:
        ValueError: The number of heads is no multiple of the number of keys.
    """
    exact = torch.promote_types(inputs.queries.dtype, torch.float32)
    prompts, heads, length, width = inputs.queries.shape
    positions, frequencies = inputs.positions, inputs.frequencies
    # Heads share a rotated key only where they share its positions, too
    position_rows = 1 if positions is None or frequencies is None else positions.shape[1]
    by_head = frequencies is not None and frequencies.ndim == 3
    shared = heads if by_head else max(inputs.kv_heads, position_rows)
    keeps = inputs.keeps_rotated and inputs.queries.dtype == exact
    turned_rows = inputs.rotated_keys.shape[1] if keeps else shared
    if heads % shared:
        raise ValueError(f"{heads} heads do not pair with {shared} keys: wanted a multiple")
    group, memory = heads // shared, memory_for(inputs.queries.device, SHARED)
    # Four tensors of a head's features: as given, rotated, and two on the way
    at_once = max(1, memory // (4 * length * width * exact.itemsize))
    # The key takes the memory of one more head
    members = min(group, max(1, at_once - 1))
    keys_at_once = max(1, at_once // (members + 1))
    taking_part = inputs.valid if rows is None else inputs.valid & rows
    whole = is_whole(inputs.valid)
    counts = pair_counts(inputs.valid, inputs.window, taking_part)
    # [key, member]: numbers prompt * heads + head; a row holds the heads that share a key
    every = np.arange(prompts * heads).reshape(-1, group)

    def places(some: np.ndarray) -> tuple[Any, ...]:
        head = some % heads
        # Indices are made on the processor and copied, once per mask: see `once` below
        rows_of = inputs.kv_heads, position_rows, turned_rows
        of_rows = (head[:, :1] * rows // heads for rows in rows_of)
        made = np.concatenate([some[:, :1] // heads, *of_rows, head], 1)
        indices = torch.from_numpy(made).to(inputs.valid.device)
        row, key, position, turned, head = indices.split([1, 1, 1, 1, head.shape[1]], 1)
        of_row = inputs.valid[row], taking_part[row], counts.of(row)
        return row, head, key, position, turned, *of_row

    for start, first in product(range(0, len(every), keys_at_once), range(0, group, members)):
        some = every[start : start + keys_at_once, first : first + members]
        name, make = (
            # All that `places` reads beside the mask itself, which `once` keeps it with
            ("places", inputs.window, heads, shared, position_rows, turned_rows, some.tobytes()),
            partial(places, some),
        )
        row, head, key, position, turned, tokens, taking, of_rows = (
            # A mask of rows lasts for one call; kept results would outlive it
            once(name, make, inputs.valid) if rows is None else make()
        )
        tables, key_tables, sources = None, None, (inputs.queries, inputs.keys)
        if keeps:
            # Of all measures together; heads share a rotated key as they share blocks
            sources = inputs.rotated_queries, inputs.rotated_keys
            key = turned
        elif positions is not None and frequencies is not None:
            # Heads with frequencies of their own share no rotated key: `turned` is their number
            rates = frequencies if frequencies.ndim == 1 else frequencies[turned]
            tables, key_tables = (
                None
                if z is None
                else pair_tables(by_pair(z)[row, position], rates, inputs.attention_scaling, exact)
                for z in (positions, inputs.key_positions)
            )
        # No mask where all tokens take part: filling would copy the features
        no_rows = None if whole and rows is None else ~taking
        yield HeadBlock(
            prompt=row,
            head=head,
            queries=_features(sources[0][row, head], tables, no_rows, exact),
            keys=_features(
                sources[1][row, key], key_tables or tables, None if whole else ~tokens, exact
            ),
            rows=taking,
            tokens=tokens,
            counts=of_rows,
            window=inputs.window,
        )


def _features(
    features: Float[Tensor, "key any token d_head"],
    tables: tuple[Tensor, Tensor] | None,
    hidden: Bool[Tensor, "key 1 token"] | None,
    exact: torch.dtype,
) -> Float[Tensor, "key any token d_head"]:
    """Return `features` rotated, with 0 where a token is hidden."""
    features = features.to(exact)
    if tables is not None:
        (first, second), (cosines, sines) = features.chunk(2, -1), tables
        # x cos - y sin and y cos + x sin, in place where it can be: one temporary per half
        real = (first * cosines).addcmul_(second, sines, value=-1)
        features = torch.cat([real, (second * cosines).addcmul_(first, sines)], -1)
    return features if hidden is None else features.masked_fill(hidden[..., None], 0)


def over_heads(
    parts: Float[Tensor, "prompt head *axes"],
    block: HeadBlock,
    values: Float[Tensor, "key member *axes"],
) -> None:
    """Write values of the heads of a block into a tensor of all heads, in place.

    Args:
        parts: Tensor [prompt, head, ...] of all heads.
        block: The heads.
        values: Values [key, member, ...] of the block.
    """
    parts[block.prompt, block.head] = values
