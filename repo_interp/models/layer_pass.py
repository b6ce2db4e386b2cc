"""What one call of an attention module is about: its tensors, and the points at which hooks read or
replace them.

    hidden states -> positions, queries, keys, values -> rotated queries and keys -> scores ->
    pattern -> attended

Knows nothing about how they are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float, Int, Num
from torch import Tensor, nn

from repo_interp.positions.logits import PositionLogits


@dataclass(frozen=True)
class Content:
    """What position logits may depend on, before any rotation."""

    queries: Float[Tensor, "batch head row d_head"]
    keys: Float[Tensor, "batch kv_head key d_head"]
    values: Float[Tensor, "batch kv_head key d_head"]
    gate_keys: Float[Tensor, "batch kv_head key d_head"] | None

    def added(
        self,
        scheme: PositionLogits,
        rows: Any,
        positions: Tensor,
        key_positions: Tensor,
        seen: Tensor,
        logit_scale: float,
    ) -> Float[Tensor, "batch head row key"]:
        """What `scheme` adds to the logits of `rows` of the queries, which have `positions`."""
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
    """What a scheme, or the stock module, adds to the logits of some rows of one pass, and the
    content that this depends on.
    """

    position_logits: PositionLogits | None
    content: Content
    positions: Num[Tensor, "any *row token"]
    """Of all tokens, in rows; the index where the layer assigns none."""
    logit_scale: float
    bias: Float[Tensor, "any any row key"] | None = None
    """Of the stock module."""

    def __call__(
        self, rows: Int[Tensor, "row"], seen: Bool[Tensor, "batch 1 row key"]
    ) -> Float[Tensor, "batch head row key"]:
        """Position logits of `rows` against all keys, given which keys each may see."""
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
            self.positions[..., rows],
            self.positions,
            seen,
            self.logit_scale,
        )
        return added if bias is None else added + bias


@dataclass
class HookSites:
    """The points inside attention where a hook may read a tensor or replace it: one module per
    point.

    Each is called with the tensor named, and attention goes on with its result. Without a bridge
    every point is the identity; the bridge puts TransformerLens' HookPoints there.
    """

    queries: nn.Module = field(default_factory=nn.Identity)
    """[batch, head, token, d_head], after everything that the module does to them, before rotation.
    """
    keys: nn.Module = field(default_factory=nn.Identity)
    """[batch, kv_head, token, d_head], those of this pass."""
    values: nn.Module = field(default_factory=nn.Identity)
    """[batch, kv_head, token, d_value], those of this pass."""
    positions: nn.Module = field(default_factory=nn.Identity)
    """[batch, P, token], P in {1, key-value heads, heads}."""
    cosines: nn.Module = field(default_factory=nn.Identity)
    """[batch, P, token, d_head/2], of this pass."""
    sines: nn.Module = field(default_factory=nn.Identity)
    rotated_queries: nn.Module = field(default_factory=nn.Identity)
    """[batch, head, token, d_head]."""
    rotated_keys: nn.Module = field(default_factory=nn.Identity)
    position_logits: nn.Module = field(default_factory=nn.Identity)
    """[batch, head, query, key]: what the scheme adds to the logits."""
    scores: nn.Module = field(default_factory=nn.Identity)
    """[batch, head, query, key], before the softmax, masked."""
    pattern: nn.Module = field(default_factory=nn.Identity)
    """[batch, head, query, key], after the softmax."""
    attended: nn.Module = field(default_factory=nn.Identity)
    """[batch, token, head, d_value]: weighted values, before the output projection."""

    def call(self, site: str, act: Callable[[Tensor], Tensor | None]) -> Callable[[], None]:
        """Call `act` with the tensor at `site` in every pass, which goes on with what `act`
        returns, if anything; the result ends that.
        """
        return (
            getattr(self, site)
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
class Pass:
    """What one call of the module is about, from the hook before it to the hook after it."""

    hidden_states: Float[Tensor, "batch token d_model"]
    attention_mask: Tensor | None
    index: Int[Tensor, "any token"]
    start: int
    """Tokens in the cache, before those of this pass."""
    length: int | None = None
    """Tokens up to the last one of this pass, where frequencies depend on it."""
    positions: Float[Tensor, "batch P token"] | None = None
    gate_keys: Tensor | None = None
    sinks: Float[Tensor, "head"] | None = None
    new_keys: Tensor | None = None
    """Keys and values of this pass alone, where there are cached ones."""
    new_values: Tensor | None = None
    content: Content | None = None
    """Queries of this pass, keys and values of all tokens, as soon as they are there."""
    key_positions: Float[Tensor, "batch P key"] | None = None
    """Positions of all keys, cached ones too."""
    key_lengths: Float[Tensor, "batch key"] | None = None
    """`length` of the pass that each cached key came in."""
    tables: Any = None
    """Those that the decoder gave the module."""
    attended: bool = False
