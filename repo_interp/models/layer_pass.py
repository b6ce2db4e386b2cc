"""One call of an attention module: its tensors, and the points where hooks read or replace them.

    hidden states -> positions, queries, keys, values -> rotated queries and keys -> scores ->
    pattern -> attended

Except for the rotation, this module does not know how the tensors are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor, nn

from repo_interp.positions.rotary import expand_heads, turn


@dataclass(frozen=True)
class Content:
    """Tensors before any rotation and after the transform, on which position logits may depend.

    Keys that a cache holds rotated are rotated here too; their layer adds no logits.
    """

    queries: Float[Tensor, "batch head row d_head"]
    keys: Float[Tensor, "batch kv_head key d_head"]
    values: Float[Tensor, "batch kv_head key d_head"]
    gate_keys: Float[Tensor, "batch kv_head key d_head"] | None

    def added(
        self,
        scheme: Any,
        rows: Any,
        positions: Tensor,
        key_positions: Tensor,
        seen: Tensor,
        logit_scale: float,
    ) -> Float[Tensor, "batch head row key"]:
        """Compute the logits that a scheme adds.

        Args:
            scheme: Adds to the logits, or gives the remainder of rows from the same.
            rows: Index or slice of the queries that are asked for.
            positions: Positions of these rows.
            key_positions: Positions of all keys.
            seen: Which keys a row may attend to [batch, 1 or head, row, key].
            logit_scale: Factor of the dot products of queries and keys.

        Returns:
            Added logits [batch, head, row, key].
        """
        queries = self.queries[:, :, rows]
        return scheme(
            queries,
            self.keys,
            positions,
            key_positions,
            seen,
            logit_scale,
            self.values,
            self.gate_keys,
        )


@dataclass(frozen=True)
class LogitsOfRows:
    """Logits that a scheme or the stock module adds to some rows of a pass, with their content."""

    position_logits: Any
    """A `PositionLogits`, or the remainder of a scheme, with the same arguments; None: neither."""
    content: Content
    positions: Num[Tensor, "any *row token"]
    """Positions of all tokens, in rows; the index if the layer assigns none."""
    logit_scale: float
    bias: Float[Tensor, "any any row key"] | None = None
    """Bias of the stock module."""
    key_positions: Num[Tensor, "any *row token"] | None = None
    """Positions of all tokens as keys; None: the same as queries."""

    def __call__(
        self, rows: Int[Tensor, "row"], seen: Bool[Tensor, "batch 1 row key"]
    ) -> Float[Tensor, "batch head row key"]:
        """Added logits of `rows` and all keys; `seen` is the mask of visible keys."""
        # A bias of the module may have one row for all prompts and heads.
        bias = self.bias
        if bias is not None:
            bias = bias[:, :, rows].expand(
                len(self.content.keys), self.content.queries.shape[1], -1, -1
            )
        if self.position_logits is None:
            assert bias is not None
            return bias
        added = self.content.added(
            self.position_logits,
            rows,
            # A fourth axis has components, since positions may differ by component.
            self.positions[..., rows] if self.positions.ndim < 4 else self.positions[:, :, rows],
            self.positions if self.key_positions is None else self.key_positions,
            seen,
            self.logit_scale,
        )
        return added if bias is None else added + bias


class HookSites:
    """Points inside attention where a hook may read or replace a tensor, as modules.

    A site is called with its tensor, and attention continues with the result. Without a bridge a
    site is the identity; a bridge sets TransformerLens' HookPoints.
    """

    queries: nn.Module
    """[batch, head, token, d_head], after all steps of the module and the scheme's transform,
    before rotation.
    """
    keys: nn.Module
    """Keys of this pass [batch, kv_head, token, d_head]."""
    values: nn.Module
    """Values of this pass [batch, kv_head, token, d_value]."""
    positions: nn.Module
    """[batch, P, token], P in {1, key-value heads, heads}."""
    key_positions: nn.Module
    """The same for tokens as keys, if these differ from the positions as queries."""
    cosines: nn.Module
    """[batch, P, token, d_head/2], of this pass."""
    sines: nn.Module
    rotated_queries: nn.Module
    """[batch, head, token, d_head]."""
    rotated_keys: nn.Module
    position_logits: nn.Module
    """[batch, head, query, key]: logits that the scheme adds."""
    scores: nn.Module
    """[batch, head, query, key], before the softmax, masked."""
    pattern: nn.Module
    """[batch, head, query, key], after the softmax."""
    attended: nn.Module
    """[batch, token, head, d_value]: weighted values, before the output projection."""

    def __init__(self, **sites: nn.Module) -> None:
        """Set `sites`, by name; the others are the identity."""
        # Plain attributes, not children, so that iterating over the model's modules skips them.
        vars(self).update({name: nn.Identity() for name in type(self).__annotations__} | sites)

    def call(self, site: str, act: Callable[[Tensor], Tensor | None]) -> Callable[[], None]:
        """Call a function with the tensor at a site in every pass.

        Args:
            site: Name of the site.
            act: Called with the tensor; attention continues with the result unless it is None.

        Returns:
            A function that ends this.
        """
        return (
            getattr(self, site)
            # torch takes a hook's result, unless it is None, as the output of the module.
            .register_forward_hook(lambda module, arguments, tensor: act(tensor))
            .remove
        )

    @property
    def needs_eager(self) -> bool:
        """Whether a hook reads or edits scores or pattern, so that they must be materialised."""
        return any(
            site._forward_hooks or site._backward_hooks for site in (self.scores, self.pattern)
        )


@dataclass
class PassRotation:
    """Rotated queries and keys of a pass, made once for the layer and for measures.

    Measures see a layer before it attends. The layer then uses the queries and keys that they have
    rotated. Only for passes without cached keys, in which a token has one position.
    """

    queries: Float[Tensor, "batch head token d_head"]
    """Unrotated queries."""
    keys: Float[Tensor, "batch kv_head token d_head"]
    make_tables: Callable[[], tuple[Tensor, Tensor]]

    @cached_property
    def tables(self) -> tuple[Float[Tensor, "any any token component"], Tensor]:
        """Cosines and sines of all tokens."""
        return self.make_tables()

    @cached_property
    def turned_queries(self) -> Float[Tensor, "batch head token d_head"]:
        """Rotated queries, before their hooks."""
        return turned(self.queries, *self.tables)

    def turned_rows(self, rows: Int[Tensor, "row"]) -> Float[Tensor, "batch head row d_head"]:
        """Rotate the queries of some tokens alone.

        Args:
            rows: Numbers of the tokens.

        Returns:
            Rotated queries.
        """
        return turned(self.queries[:, :, rows], *(table[..., rows, :] for table in self.tables))

    @cached_property
    def turned_keys(self) -> Float[Tensor, "batch kv_head token d_head"]:
        """Rotated keys, before their hooks."""
        return turned(self.keys, *self.tables)


def turned(
    features: Float[Tensor, "batch any token d_head"], cosines: Tensor, sines: Tensor
) -> Float[Tensor, "batch any token d_head"]:
    """Rotate features of all heads by tables of one row, of key-value heads, or of heads.

    Args:
        features: Queries or keys.
        cosines: [batch, row, token, component].
        sines: [batch, row, token, component].

    Returns:
        Rotated features.
    """
    if cosines.shape[1] > 1:
        cosines, sines = (
            expand_heads(cosines, features.shape[1]),
            expand_heads(sines, features.shape[1]),
        )
    return turn(features, cosines, sines)


@dataclass
class LayerPass:
    """Tensors of one call of the module, from the hook before it to the hook after it."""

    hidden_states: Float[Tensor, "batch token d_model"]
    attention_mask: Tensor | None
    index: Int[Tensor, "any token"]
    start: int
    """Tokens in the cache, before those of this pass."""
    length: int | None = None
    """Tokens up to the last one of this pass, if frequencies depend on it."""
    positions: Float[Tensor, "batch P token *component"] | None = None
    of_keys: Float[Tensor, "batch P token *component"] | None = None
    """Positions of this pass's tokens as keys, if they differ from the positions as queries."""
    by_axis: bool = False
    """Whether tokens have one position per axis of an image."""
    memory: Float[Tensor, "batch token feature"] | None = None
    """The assigner's memory of the tokens of this pass."""
    gate_keys: Tensor | None = None
    stock_sinks: Float[Tensor, "head"] | None = None
    """Sinks of the stock module (gpt-oss)."""
    sinks: Float[Tensor, "head"] | Float[Tensor, "batch head row"] | None = None
    """Logits of the module and the scheme that take a part of the softmax and move no value."""
    remainder: LogitsOfRows | None = None
    """The scheme's remainder for rows, if the pass is observed."""
    plain_keys: Tensor | None = None
    """Keys of this pass before the scheme's transform, if it has one."""
    new_keys: Tensor | None = None
    """Keys and values of this pass only, if there are cached ones."""
    new_values: Tensor | None = None
    content: Content | None = None
    """Queries of this pass, keys and values of all tokens, as soon as they are available."""
    hidden: Bool[Tensor, "any any row key"] | None = None
    """`CallMask.hidden`."""
    key_positions: Float[Tensor, "batch P key"] | None = None
    """Positions of all keys, including cached ones."""
    key_numbers: Int[Tensor, "key"] | None = None
    """Indices of the keys of a cache that drops some; None: they are consecutive."""
    key_lengths: Float[Tensor, "batch key"] | None = None
    """`length` of the pass that cached the key."""
    tables: Any = None
    """Rotation tables that the decoder passed to the module."""
    turning: tuple[Tensor, Tensor] | None = None
    """Cosines and sines by which a cache has rotated the keys of this pass; None: it has not."""
    rotation: PassRotation | None = None
    """The rotation that measures share with the layer; None: they share none."""
    handed_on: bool = False
    """Whether the layer may hand its keys on to later layers."""
    attended: bool = False

    @property
    def new_key_positions(self) -> Float[Tensor, "batch P token *component"] | None:
        """Positions of this pass's tokens as keys."""
        return self.positions if self.of_keys is None else self.of_keys

    def end(self, keys: int) -> int:
        """Return the place behind the last token's key: a static cache has slots without a token.

        Args:
            keys: Number of keys, at most a window of the last ones.

        Returns:
            `keys`, or fewer.
        """
        return min(self.start + self.hidden_states.shape[1], keys)

    def counted_index(self, keys: int) -> Int[Tensor, "any key"]:
        """Number all keys: the last token's is right whatever the padding, and others count from it.

        Args:
            keys: Number of keys.

        Returns:
            Their numbers in their prompts.
        """
        if self.key_numbers is not None:
            return self.key_numbers[None]
        after = torch.arange(keys, device=self.index.device) + 1 - self.end(keys)
        return after + self.index[:, -1:]

    def cut(self, keys: int) -> None:
        """Drop the data of all keys after the first ones.

        Args:
            keys: How many stay.
        """
        if self.key_positions is not None:
            self.key_positions = self.key_positions[:, :, :keys]
        if self.key_lengths is not None:
            self.key_lengths = self.key_lengths[:, :keys]
        if self.gate_keys is not None:
            self.gate_keys = self.gate_keys[:, :, :keys]
