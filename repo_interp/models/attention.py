"""The one attention module of a repositioned layer.

    z = assign(h)                                   positions, or none
    S = logit_scale * rotate(q, z) rotate(k, z)^T + position_logits(q, k, ...)       masked to the past
    out = softmax(S) v Wo

It takes over the projections (and QK-norms) of a stock Hugging Face attention module, so their weights keep their names and values.
A scheme is a choice of three parts: an assigner of positions, frequencies to rotate by, and logits to add; each may be absent.
Knows nothing about layouts, checkpoints or measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from repo_interp.errors import InputError
from repo_interp.models.families import Kernel, kernel
from repo_interp.positions.hope import keep_components
from repo_interp.positions.logits import PositionLogits, soft_capped
from repo_interp.positions.rotary import expand_heads, rotation_tables, turn


@dataclass(frozen=True)
class SchemeParts:
    """The parts that a position scheme puts into a layer."""

    name: str
    assigner: nn.Module | None
    """Gives positions; None where the scheme has none."""
    frequencies: Float[Tensor, "component"] | None
    """Rotation frequencies in radians per position; None where nothing is rotated."""
    attention_scaling: float = 1.0
    components: Bool[Tensor, "component"] | None = None
    """Rotary components that take part in the dot product; None: all."""
    position_logits: PositionLogits | None = None
    """Adds to the logits; None where the scheme adds nothing."""


Observer = Callable[["RepositionedAttention", Tensor, Tensor, Tensor | None, "LogitsOfRows | None"], None]
"""Shown the layer, its queries and keys before rotation, its positions and what it adds to the logits, before attention is computed."""


@dataclass(frozen=True)
class Content:
    """What position logits may depend on, before any rotation."""

    queries: Float[Tensor, "batch head row d_head"]
    keys: Float[Tensor, "batch kv_head key d_head"]
    values: Float[Tensor, "batch kv_head key d_head"]
    gate_keys: Float[Tensor, "batch kv_head key d_head"] | None


@dataclass(frozen=True)
class LogitsOfRows:
    """What a scheme adds to the logits of some rows of one pass, and the content that this depends on."""

    position_logits: PositionLogits
    content: Content
    index: Int[Tensor, "any token"]
    logit_scale: float

    def __call__(self, rows: Int[Tensor, "row"], seen: Bool[Tensor, "batch 1 row key"]) -> Float[Tensor, "batch head row key"]:
        """Position logits of `rows` against all keys, given which keys each may see."""
        return self.position_logits(
            self.content.queries[:, :, rows],
            self.content.keys,
            self.index[:, rows],
            self.index,
            seen,
            self.logit_scale,
            self.content.values,
            self.content.gate_keys,
        )


@dataclass
class HookSites:
    """The points inside attention where a hook may read a tensor or replace it: one module per point.

    Each is called with the tensor named, and attention goes on with its result. Without a bridge every point is the identity; the bridge
    puts TransformerLens' HookPoints there.
    """

    queries: nn.Module = field(default_factory=nn.Identity)
    """After any QK-norm, before rotation, in the layout in which the norm works."""
    keys: nn.Module = field(default_factory=nn.Identity)
    positions: nn.Module = field(default_factory=nn.Identity)
    """[batch, P, token], P in {1, key-value heads, heads}."""
    cosines: nn.Module = field(default_factory=nn.Identity)
    """[batch, P, token, d_head/2]."""
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

    @property
    def needs_eager(self) -> bool:
        """Whether a hook reads or edits scores or pattern, so that they must be materialised."""
        return any(site._forward_hooks or site._backward_hooks for site in (self.scores, self.pattern))


class RepositionedAttention(nn.Module):
    """Causal self-attention whose positions come from a scheme. Same weights, same interface as the stock module it replaces."""

    def __init__(self, stock: Any, scheme: SchemeParts) -> None:
        """Take over the projections of `stock`, a Hugging Face attention module with q_proj, k_proj, v_proj, o_proj."""
        super().__init__()
        self.config: Any = stock.config
        self.layer_idx: int = stock.layer_idx
        self.scheme = scheme.name
        self.d_head: int = stock.d_head if isinstance(stock, RepositionedAttention) else stock.head_dim
        settings = stock.kernel if isinstance(stock, RepositionedAttention) else kernel(stock)
        self.scaling: float = settings.scaling
        self.sliding_window: int | None = settings.window
        self.attn_logit_softcapping: float | None = settings.softcap
        self.attention_dropout: float = stock.attention_dropout
        self.is_causal = True
        self.num_key_value_groups: int = stock.num_key_value_groups
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            stock.q_proj,
            stock.k_proj,
            stock.v_proj,
            stock.o_proj,
        )
        self.q_norm: nn.Module | None = getattr(stock, "q_norm", None)
        self.k_norm: nn.Module | None = getattr(stock, "k_norm", None)
        weight: Tensor | None = getattr(self.q_norm, "weight", None)  # pyright: ignore[reportAssignmentType]
        self.norm_spans_heads = weight is not None and weight.shape[-1] != self.d_head
        self.assigner: nn.Module | None = scheme.assigner
        # Not a buffer: `.to(bfloat16)` would round it, and angles at position 4096 with it.
        self.frequencies = scheme.frequencies
        self.attention_scaling = scheme.attention_scaling
        self.components = scheme.components
        self.position_logits: PositionLogits | None = scheme.position_logits
        self.sites = HookSites()
        self.observers: list[Observer] = []
        self.interventions: list[object] = []
        """The contexts under way that change what this layer computes (`interventions.lasting`)."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What `copy` and `pickle` are given. Raises InputError inside an intervention, whose changes a copy would keep for good."""
        if self.interventions:
            raise InputError(
                "a model is copied while an intervention lasts, which the copy would never leave; copy it outside of it"
            )
        return super().__reduce_ex__(protocol)

    @property
    def head_dim(self) -> int:
        """Raises InputError: code that reads it re-implements attention, and would silently rotate by the token index."""
        raise InputError(
            f"layer {self.layer_idx} assigns positions by {self.scheme!r}, which a stock TransformerLens adapter would lose; "
            "make the bridge with repo_interp.load(path) or repo_interp.bridge(model)"
        )

    @property
    def kernel(self) -> Kernel:
        """Scale, window and soft cap of this layer."""
        return Kernel(self.scaling, self.sliding_window, self.attn_logit_softcapping)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch token d_model"],
        position_embeddings: object = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_ids: Int[Tensor, "batch token"] | None = None,
        **kwargs,
    ) -> tuple[Float[Tensor, "batch token d_model"], Tensor | None]:
        """Outputs of attention, and the pattern where it was materialised.

        `position_embeddings`, the stock model's tables of the token index, are ignored: the scheme makes its own.
        """
        batch, tokens, _ = hidden_states.shape
        queries, keys, values = self.project(hidden_states)
        index = self.token_index(hidden_states, position_ids, past_key_values)
        positions = None if self.assigner is None else self._assign(hidden_states, index)
        content = Content(queries, keys, values, self._gate_keys(hidden_states))
        for observe in self.observers:
            observe(self, queries, keys, positions, self._logits_of_rows(content, index))
        if positions is not None and positions.shape[1] > keys.shape[1]:
            # One position per head: heads that share a key need it rotated each in its own way.
            keys, values = expand_heads(keys, positions.shape[1]), expand_heads(values, positions.shape[1])
        queries, keys = self.rotate(queries, keys, positions)
        if past_key_values is not None:
            keys, values, content = self._cached(keys, values, content, past_key_values)
        added = self._added(content, index, keys.shape[2], attention_mask)
        attended, pattern = self.attend(queries, keys, values, attention_mask, added, kwargs)
        return self.o_proj(attended.reshape(batch, tokens, -1)), pattern

    def _assign(self, hidden_states: Tensor, index: Tensor) -> Float[Tensor, "batch any token"]:
        assert self.assigner is not None
        positions = self.assigner(hidden_states, index)
        if self.sites.positions._backward_hooks and torch.is_grad_enabled() and not positions.requires_grad:
            positions = positions.detach().requires_grad_()  # the token index: without this the hook would never be called
        return self.sites.positions(positions)

    def project(
        self, hidden_states: Float[Tensor, "batch token d_model"]
    ) -> tuple[
        Float[Tensor, "batch head token d_head"],
        Float[Tensor, "batch kv_head token d_head"],
        Float[Tensor, "batch kv_head token d_head"],
    ]:
        """Queries and keys after any QK-norm, and values, split into heads."""
        queries = self._normed(self.q_proj(hidden_states), self.q_norm, self.sites.queries)
        if self.components is not None:  # a pair that is 0 stays 0 when rotated
            queries = keep_components(queries, self.components.to(queries.device))
        keys = self._normed(self.k_proj(hidden_states), self.k_norm, self.sites.keys)
        return queries, keys, self.split_heads(self.v_proj(hidden_states))

    def rotate(self, queries: Tensor, keys: Tensor, positions: Float[Tensor, "batch any token"] | None) -> tuple[Tensor, Tensor]:
        """Queries and keys turned by their positions; as they are where the scheme does not rotate."""
        if positions is not None and self.frequencies is not None:
            if self.frequencies.device != queries.device:
                self.frequencies = self.frequencies.to(queries.device)
            cosines, sines = rotation_tables(positions, self.frequencies, self.attention_scaling, queries.dtype)
            cosines, sines = self.sites.cosines(cosines), self.sites.sines(sines)
            queries = turn(queries, expand_heads(cosines, queries.shape[1]), expand_heads(sines, queries.shape[1]))
            keys = turn(keys, expand_heads(cosines, keys.shape[1]), expand_heads(sines, keys.shape[1]))
        return self.sites.rotated_queries(queries), self.sites.rotated_keys(keys)

    @property
    def attends_as_built(self) -> bool:
        """Whether `attend` is this class's: False while an intervention stands in its place."""
        return "attend" not in vars(self)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor | None,
        added: Float[Tensor, "batch head row key"] | None,
        kwargs: dict,
    ) -> tuple[Float[Tensor, "batch token head d_head"], Tensor | None]:
        """Weighted values of every query, and the pattern where it was materialised. `added` goes onto the scaled logits."""
        implementation = self.config._attn_implementation
        dropout = self.attention_dropout if self.training else 0.0
        if implementation == "eager" or self.attn_logit_softcapping is not None or self.sites.needs_eager:
            return self.attend_eager(queries, keys, values, attention_mask, added, dropout)
        if added is not None:
            # Fused kernels take one additive mask, with a row of it for every head.
            attention_mask = masked(added, attention_mask).to(queries.dtype)
            keys, values = expand_heads(keys, queries.shape[1]), expand_heads(values, queries.shape[1])
        self.num_key_value_groups = queries.shape[1] // keys.shape[1]  # read by the kernel
        return ALL_ATTENTION_FUNCTIONS[implementation](
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )

    def attend_eager(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor | None,
        added: Float[Tensor, "batch head row key"] | None,
        dropout: float,
    ) -> tuple[Float[Tensor, "batch token head d_head"], Float[Tensor, "batch head token key"]]:
        """As `attend`, with scores and pattern materialised so that hooks can read or edit them."""
        return self.weigh(self.scores(queries, keys, attention_mask, added), values, dropout)

    def scores(
        self,
        queries: Float[Tensor, "batch head row d_head"],
        keys: Float[Tensor, "batch any key d_head"],
        attention_mask: Tensor | None,
        added: Float[Tensor, "batch head row key"] | None,
    ) -> Float[Tensor, "batch head row key"]:
        """Scores of rotated queries and keys: scaled, soft-capped, with `added`, and masked."""
        scores = queries @ expand_heads(keys, queries.shape[1]).transpose(-1, -2) * self.scaling
        scores = soft_capped(scores, self.attn_logit_softcapping)
        if added is not None:
            scores = scores + added.to(scores.dtype)
        return masked(scores, attention_mask)

    def weigh(
        self, scores: Float[Tensor, "batch head row key"], values: Float[Tensor, "batch any key d_head"], dropout: float
    ) -> tuple[Float[Tensor, "batch row head d_head"], Float[Tensor, "batch head row key"]]:
        """Values weighted by the softmax of `scores`, and these weights, the pattern; hooks see, and may replace, both."""
        scores = self.sites.scores(scores)
        pattern = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        pattern = self.sites.pattern(torch.dropout(pattern, dropout, train=dropout > 0.0))
        return (pattern @ expand_heads(values, scores.shape[1])).transpose(1, 2), pattern

    def _added(
        self, content: Content, index: Tensor, keys: int, attention_mask: Tensor | None
    ) -> Float[Tensor, "batch head row key"] | None:
        if self.position_logits is None:
            return None
        queries = content.queries
        rows = queries.shape[2]
        # The last token's index is right whatever the padding; earlier ones count back from it.
        key_index = torch.arange(1 - keys, 1, device=queries.device) + index[:, -1:]
        seen = visible(rows, keys, attention_mask, queries.device)
        added = self.position_logits(
            queries,
            content.keys,
            key_index[:, -rows:],
            key_index,
            seen,
            self.scaling,
            content.values,
            content.gate_keys,
        )
        return self.sites.position_logits(added)

    def _logits_of_rows(self, content: Content, index: Tensor) -> LogitsOfRows | None:
        return None if self.position_logits is None else LogitsOfRows(self.position_logits, content, index, self.scaling)

    def _gate_keys(self, hidden_states: Tensor) -> Tensor | None:
        return None if self.position_logits is None else self.position_logits.gate_keys(hidden_states)

    def _cached(self, keys: Tensor, values: Tensor, content: Content, past_key_values) -> tuple[Tensor, Tensor, Content]:
        """Keys and values of all tokens so far. What position logits read of a key is cached beside it, in one wider key."""
        rotated = self.frequencies is not None
        beside = [content.keys] if self.position_logits is not None and rotated else []
        beside += [] if content.gate_keys is None else [content.gate_keys]
        beside = [
            expand_heads(each, keys.shape[1]) for each in beside
        ]  # heads that share a key may rotate it each in its own way
        stored, values = past_key_values.update(torch.cat([keys, *beside], dim=-1), values, self.layer_idx)
        keys, *rest = stored.split(self.d_head, dim=-1)
        unrotated = rest.pop(0) if self.position_logits is not None and rotated else keys
        return keys, values, Content(content.queries, unrotated, values, rest[0] if rest else None)

    def _normed(self, flat: Tensor, norm: nn.Module | None, site: nn.Module) -> Tensor:
        if norm is None:
            return self.split_heads(flat)
        if self.norm_spans_heads:  # OLMo-2: one norm over all heads jointly
            return self.split_heads(site(norm(flat)))
        return site(norm(self.split_heads(flat)))  # Qwen3, Gemma 3: one norm, head by head

    def split_heads(self, flat: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch any token d_head"]:
        """What a projection gives, split into the heads that stand side by side in it."""
        return flat.view(*flat.shape[:2], -1, self.d_head).transpose(1, 2)

    def token_index(self, hidden_states: Tensor, position_ids: Tensor | None, past_key_values) -> Int[Tensor, "any token"]:
        """The number of every token of this pass in its prompt: as given, else counted on from what the cache holds."""
        if position_ids is not None:
            return position_ids
        start = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        return torch.arange(start, start + hidden_states.shape[1], device=hidden_states.device)[None]


def visible(rows: int, keys: int, attention_mask: Tensor | None, device: torch.device) -> Bool[Tensor, "batch 1 row key"]:
    """Which of the keys the last `rows` tokens may see: `attention_mask` boolean, additive, or none (plainly causal)."""
    if attention_mask is None:
        return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)[None, None]
    attention_mask = attention_mask[..., :keys]
    return attention_mask if attention_mask.dtype == torch.bool else attention_mask > torch.finfo(attention_mask.dtype).min / 2


def masked(scores: Float[Tensor, "batch head row key"], attention_mask: Tensor | None) -> Tensor:
    """Scores with what may not be seen at the lowest finite value."""
    seen = visible(scores.shape[-2], scores.shape[-1], attention_mask, scores.device)
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
