"""A stock attention module whose positions come from a scheme.

    z = assign(h)                                   positions, or none
    S = logit_scale * rotate(q, z) rotate(k, z)^T + position_logits(q, k, z, ...)    masked to the past
    out = softmax(S) v

The stock module stays in place and computes everything else: projections, norms, gates, the output.
`RepositionedAttention` attaches to it by two hooks and by the attention function of transformers:

    before the module    positions are assigned from the hidden states; the module's tables are replaced by the identity, so that queries,
                         keys and the key-value cache stay unrotated; positions of keys are cached
                         beside them (`cached`)
    attention function   queries and keys are put into half-split order, rotated by the positions, and attend
    after the module     the tensors of the pass are dropped

A scheme is a choice of three parts: an assigner of positions, frequencies to rotate by, and logits
to add; each may be absent. Knows nothing about layouts, checkpoints or measures.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from repo_interp.errors import InputError
from repo_interp.models.cached import CacheOfPositions
from repo_interp.models.layer_pass import Content, HookSites, LogitsOfRows, Pass
from repo_interp.models.masks import masked, masked_by, visible, window_of
from repo_interp.models.rotation import TABLES, Rotation, identity
from repo_interp.positions.hope import keep_components
from repo_interp.positions.logits import PositionLogits, soft_capped
from repo_interp.positions.rotary import expand_heads, rotation_tables, turn

NAME = "repo_interp"
"""Of our attention function among those of transformers, in the configuration of a stock attention
module.
"""
CACHES = ("cache", "past_key_values", "layer_past")
"""Names of the argument that takes the cache: of transformers from 5.24 on, before it, and of older
families.
"""
CHANGED = "_repo_interp_changed"
"""Where a layer keeps, by attribute, the value as built and the changes that last (`lasting.put`).
"""

_THREAD = "_thread"
"""Where a layer keeps which thread runs a pass in it."""
_ATTACHED = "repositioned"
"""The attribute of a stock attention module that holds its `RepositionedAttention`; of the module
and no `Decoder`, since its hooks run where no model is known, and a copy of the module alone keeps
them.
"""


@dataclass(frozen=True)
class SchemeParts:
    """The parts that a position scheme puts into a layer."""

    name: str
    assigner: nn.Module | None
    """Gives positions; None where the scheme has none."""
    frequencies: Float[Tensor, "component"] | None
    """Rotation frequencies in radians per position; None where nothing is rotated."""
    attention_scaling: float | Float[Tensor, "component"] = 1.0
    """Factor of queries and keys by rotation: a number, or one for each pair."""
    components: Bool[Tensor, "component"] | None = None
    """Rotary components that take part in the dot product; None: all."""
    position_logits: PositionLogits | None = None
    """Adds to the logits; None where the scheme adds nothing."""


Observer = Callable[
    ["RepositionedAttention", Tensor, Tensor, Tensor | None, "LogitsOfRows | None"], None
]
"""Called with the layer, its queries and keys before rotation, its positions and what it adds to
the logits, before it attends.
"""


class RepositionedAttention:
    """Positions from a scheme for one stock attention module, which goes on with the same weights
    and the same interface.
    """

    def __init__(self, stock: Any, scheme: SchemeParts, rotation: Rotation) -> None:
        """Attach `scheme` to `stock`, a Hugging Face attention module that turns as `rotation`
        says, in place of an earlier scheme.
        """
        detach(stock)
        self.module: Any = stock
        self.config: Any = stock.config
        """The decoder's own, with the implementation of attention that the user chose."""
        self.layer_idx: int = stock.layer_idx
        self.rotation = rotation
        self.heads, self.kv_heads = rotation.heads, rotation.kv_heads
        self.d_head = 2 * len(rotation.frequencies)
        self.order = rotation.order
        self.scaling: float = rotation.scaling
        self.sliding_window: int | None = rotation.window
        self.attn_logit_softcapping: float | None = rotation.softcap
        self.is_causal = True
        self.num_key_value_groups = self.heads // self.kv_heads
        self.scheme = scheme.name
        # Modules of the scheme are the stock module's children, so that they are trained, moved and
        # saved with it.
        stock.assigner = scheme.assigner
        stock.position_logits = scheme.position_logits
        # Not a buffer: `.to(bfloat16)` would round it, and angles at position 4096 with it.
        self.frequencies = self._built = scheme.frequencies
        self.attention_scaling = scheme.attention_scaling
        self.components = scheme.components
        self.sites = HookSites()
        self.observers: list[Observer] = []
        self.interventions: list[object] = []
        """The contexts under way that change what this layer computes (`lasting`)."""
        self.now: Pass | None = None
        self._parameters = list(inspect.signature(type(stock).forward).parameters)[1:]
        # Attention modules ask their configuration which function attends; the model's own stays
        # the user's.
        stock.config = copy.copy(self.config)
        stock.config._attn_implementation_internal = NAME
        setattr(stock, _ATTACHED, self)
        self._handles = [
            stock.register_forward_pre_hook(self._before, with_kwargs=True),
            stock.register_forward_hook(self._after, always_call=True),
        ]
        # Parts that rotate something else, such as DeepSeek's indexer of keys, go on with the
        # tables of the decoder.
        self._handles += [
            part.register_forward_pre_hook(self._with_tables, with_kwargs=True)
            for part in stock.modules()
            if part is not stock and TABLES in inspect.signature(part.forward).parameters
        ]
        projection = next(
            (
                module
                for module in stock.modules()
                if isinstance(getattr(module, "weight", None), nn.Parameter)
            ),
            None,
        )
        if projection is not None:
            self._handles.append(projection.register_forward_pre_hook(self._require_running))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What `copy` and `pickle` are given.

        Raises InputError inside an intervention, whose changes a copy would keep for good.
        """
        if self.interventions:
            raise InputError(
                "a model is copied while an intervention lasts, which the copy would never "
                "leave; copy it outside of it"
            )
        return super().__reduce_ex__(protocol)

    @property
    def assigner(self) -> nn.Module | None:
        """Gives positions; None where the scheme has none."""
        return self.module.assigner

    @property
    def position_logits(self) -> PositionLogits | None:
        """Adds to the logits; None where the scheme adds nothing."""
        return self.module.position_logits

    @property
    def uses_positions(self) -> bool:
        """Whether what the layer computes depends on positions that it assigns: it rotates by them,
        or adds to the logits by them.
        """
        return self.assigner is not None and (
            self.frequencies is not None or self.position_logits is not None
        )

    @property
    def training(self) -> bool:
        """Whether the module is in training mode: kernels ask."""
        return self.module.training

    @property
    def output_projection(self) -> nn.Module | None:
        """What maps the heads' weighted values to the model's width; None where a family has no
        such module.
        """
        names = ("o_proj", "out_proj", "dense", "c_proj", "wo", "Wo")
        return next(
            (
                projection
                for name in names
                if (projection := getattr(self.module, name, None)) is not None
            ),
            None,
        )

    @property
    def running(self) -> Pass:
        """The pass under way."""
        assert self.now is not None
        return self.now

    def _require_running(self, projection: nn.Module, arguments: tuple) -> None:
        if self.now is None:
            raise InputError(
                f"layer {self.layer_idx} assigns positions by {self.scheme!r}, and other "
                "code, such as a stock TransformerLens adapter, "
                "computes its attention without them; make the bridge with "
                "repo_interp.load(path) or repo_interp.bridge(model)"
            )

    def _before(
        self, module: nn.Module, arguments: tuple, keywords: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Assign positions, and let the module compute without rotation."""
        if not torch.compiler.is_compiling():
            self._require_one_thread()
        given = dict(zip(self._parameters, arguments, strict=False)) | keywords
        hidden_states: Tensor = given["hidden_states"]
        past = next((name for name in CACHES if given.get(name) is not None), None)
        cache = None if past is None else given[past]
        start = self._cached_tokens(cache, hidden_states.shape[1])
        index = self._token_index(hidden_states, given, start)
        length = int(index.max()) + 1 if self.follows_length else None
        self.frequencies = self.frequencies_at(length)
        mask = given.get("attention_mask")
        self.now = Pass(
            hidden_states, mask if isinstance(mask, Tensor) else None, index, start, length
        )
        try:
            self.now.positions = (
                None if self.assigner is None else self._assign(hidden_states, index)
            )
            self.now.gate_keys = (
                None
                if self.position_logits is None
                else self.position_logits.gate_keys(hidden_states)
            )
        except BaseException:
            self.now = None
            raise
        if given.get(TABLES) is not None:
            self.now.tables = given[TABLES]
            given[TABLES] = _identity(given[TABLES])
        if past is not None:
            given[past] = CacheOfPositions(cache, self)
        return (), given

    def _require_one_thread(self) -> None:
        """Raise InputError where a pass of another thread, which has not ended, is in this
        layer.
        """
        here = threading.get_ident()
        holder = vars(self).setdefault(_THREAD, here)
        if holder != here and any(thread.ident == holder for thread in threading.enumerate()):
            raise InputError(
                "another thread runs a pass of this model; run one at a time, or give each "
                "thread a copy"
            )
        vars(self)[_THREAD] = here

    def _with_tables(
        self, part: nn.Module, arguments: tuple, keywords: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        names = list(inspect.signature(part.forward).parameters)
        return (), dict(zip(names, arguments, strict=False)) | keywords | {
            TABLES: self.running.tables
        }

    def _after(self, module: nn.Module, arguments: tuple, output: Any) -> None:
        if not torch.compiler.is_compiling():
            if vars(self).get(_THREAD, here := threading.get_ident()) != here:
                return  # refused: the pass of another thread goes on
            vars(self).pop(_THREAD, None)
        now, self.now = self.now, None
        if now is not None and output is not None and not now.attended:
            raise InputError(
                f"layer {self.layer_idx} attended without the attention function of its "
                f"scheme {self.scheme!r}, so positions were ignored"
            )

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on the length of the pass (dynamic NTK, longrope)."""
        return (
            self._built is not None
            and self.rotation.source is not None
            and self.rotation.source.changes
        )

    def frequencies_at(self, length: int | None) -> Any:
        """Frequencies of a pass whose last token has the index `length` - 1, as interventions leave
        them; None: the present ones.
        """
        if length is None or not self.follows_length:
            return self.frequencies
        assert self._built is not None and self.rotation.source is not None
        turning = self.rotation.source.at(length)
        frequencies = torch.cat([turning, turning.new_zeros(self.d_head // 2 - len(turning))])
        # A scheme may have left out some, or put others in their place (HoPE).
        taken = (self._built.cpu()[:, None] == self.rotation.frequencies).to(torch.int8).argmax(1)
        frequencies = frequencies[taken].where(self._built.cpu() != 0, 0.0)
        _, changes = vars(self).get(CHANGED, {}).get("frequencies", (None, ()))
        for change in changes:
            frequencies = change(frequencies)
        return frequencies

    def _frequencies_of_keys(self) -> Any:
        """[key, component], with axes of prompts and heads before it: cached keys keep the
        frequencies of the pass that they came in.
        """
        lengths = None if self.now is None else self.now.key_lengths
        if lengths is None:
            return self.frequencies
        passes, which = lengths.unique(return_inverse=True)
        # [component], or [head, 1, component]
        found = [self.frequencies_at(int(length)) for length in passes]
        by_pass = torch.stack([each.reshape(-1, each.shape[-1]) for each in found])
        return by_pass.to(lengths.device)[which].transpose(1, 2)  # [prompt, head, key, component]

    def _assign(self, hidden_states: Tensor, index: Tensor) -> Float[Tensor, "batch any token"]:
        assert self.assigner is not None
        positions = self.assigner(hidden_states, index)
        if (
            self.sites.positions._backward_hooks
            and torch.is_grad_enabled()
            and not positions.requires_grad
        ):
            # the token index: without this the hook would never be called
            positions = positions.detach().requires_grad_()
        return self.sites.positions(positions)

    def entering(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of this pass as they enter attention, or a cache: in half-split order,
        after the hooks on them.
        """
        keys, values = self.sites.keys(self._half_split(keys)), self.sites.values(values)
        self.running.new_keys, self.running.new_values = keys, values
        return keys, values

    def _half_split(
        self, vectors: Float[Tensor, "*batch d_head"]
    ) -> Float[Tensor, "*batch d_head"]:
        return vectors if self.order is None else vectors[..., self.order.to(vectors.device)]

    def stock_order(
        self, vectors: Float[Tensor, "*batch d_head"]
    ) -> Float[Tensor, "*batch d_head"]:
        """The inverse of the half-split order: caches hold keys in the module's own."""
        return (
            vectors if self.order is None else vectors[..., self.order.argsort().to(vectors.device)]
        )

    def _entered(self, keys: Tensor, values: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """All keys, in half-split order, and values: those of this pass after the hooks on them."""
        if self.running.new_keys is not None:
            return self._half_split(keys), values
        if keys.shape[2] == tokens:
            return self.entering(keys, values)
        # Made of cached latents, or by an earlier layer: of earlier tokens too.
        begin = min(self.running.start, keys.shape[2] - tokens)
        end = begin + tokens
        new_keys, new_values = self.entering(keys[:, :, begin:end], values[:, :, begin:end])
        keys = torch.cat(
            [self._half_split(keys[:, :, :begin]), new_keys, self._half_split(keys[:, :, end:])],
            dim=2,
        )
        return keys, torch.cat([values[:, :, :begin], new_values, values[:, :, end:]], dim=2)

    def attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor | None,
        keywords: dict[str, Any],
    ) -> tuple[Float[Tensor, "batch token head d_head"], Tensor | None]:
        """What the stock module calls to attend, with unrotated queries and keys; cached keys went
        through `entering` already.
        """
        now = self.running
        now.attended = True
        keys, values = self._entered(keys, values, queries.shape[2])
        assert now.new_keys is not None and now.new_values is not None
        queries = self.sites.queries(self._half_split(queries))
        if self.components is not None:  # a pair that is 0 stays 0 when rotated
            queries = keep_components(queries, self.components.to(queries.device))
        self.scaling = (
            queries.shape[-1] ** -0.5 if keywords.get("scaling") is None else keywords["scaling"]
        )
        self.sliding_window = window_of(self.config, keywords, attention_mask, keys.shape[2])
        self.attn_logit_softcapping, now.sinks = keywords.get("softcap"), keywords.get("s_aux")
        own = masked_by(
            self.module, queries, keys.shape[2], attention_mask, now.attention_mask, keywords
        )
        for observe in self.observers:
            new, bias, of_rows = (
                Content(queries, now.new_keys, now.new_values, now.gate_keys),
                own.for_measures,
                None,
            )
            if self.position_logits is not None or bias is not None:
                places = now.index if now.positions is None else now.positions
                of_rows = LogitsOfRows(self.position_logits, new, places, self.scaling, bias)
            observe(self, queries, now.new_keys, now.positions, of_rows)
        content = now.content = Content(queries, keys, values, now.gate_keys)
        positions, key_positions = now.positions, self._positions_of_keys(keys)
        added = self._added(content, key_positions, own.mask)
        if (
            positions is not None
            and key_positions is not None
            and self.frequencies is not None
            and self.frequencies.ndim == 3
        ):
            # Each head has frequencies of its own, [head, 1, component]: `interventions.rescaled`.
            positions, key_positions = (
                expand_heads(positions, self.heads),
                expand_heads(key_positions, self.heads),
            )
        if positions is not None and positions.shape[1] > keys.shape[1]:
            # One position per head: heads that share a key need it rotated each in its own way.
            keys, values = (
                expand_heads(keys, positions.shape[1]),
                expand_heads(values, positions.shape[1]),
            )
        queries, keys = self.rotate(queries, keys, positions, key_positions)
        if own.bias is not None:
            added = own.bias if added is None else added + own.bias
        attended, pattern = self.attend(queries, keys, values, own.mask, added, keywords)
        return self.sites.attended(attended), pattern

    def _positions_of_keys(self, keys: Tensor) -> Tensor | None:
        """Positions of all keys: cached with them, or, of keys that another layer computed, counted
        back from the last token.
        """
        now = self.running
        if (
            now.key_positions is not None
            or now.positions is None
            or now.positions.shape[-1] == keys.shape[2]
        ):
            return now.positions if now.key_positions is None else now.key_positions
        if self.scheme != "rope" or self.follows_length:
            raise InputError(
                f"layer {self.layer_idx} ({self.scheme}) reads keys of another layer, which "
                "have no positions of its own"
            )
        count, tokens = keys.shape[2], now.positions.shape[-1]
        counted = (torch.arange(1 - count, 1 - tokens, device=keys.device) + now.index[:, -1:])[
            :, None
        ].to(now.positions.dtype)
        return torch.cat(
            [counted.expand(len(now.positions), now.positions.shape[1], -1), now.positions], dim=-1
        )

    def rotate(
        self,
        queries: Tensor,
        keys: Tensor,
        positions: Float[Tensor, "batch any token"] | None,
        key_positions: Float[Tensor, "batch any key"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys turned by their positions (`key_positions` None: the same); as they are
        where the scheme does not rotate.
        """
        if positions is not None and self.frequencies is not None:
            key_positions = positions if key_positions is None else key_positions
            if self.frequencies.device != queries.device:
                self.frequencies = self.frequencies.to(queries.device)
            tables = rotation_tables(
                positions, self.frequencies, self.attention_scaling, queries.dtype
            )
            cosines, sines = self.sites.cosines(tables[0]), self.sites.sines(tables[1])
            queries = _turned(queries, cosines, sines)
            if key_positions.shape[-1] != positions.shape[-1]:
                frequencies = self._frequencies_of_keys()
                cosines, sines = rotation_tables(
                    key_positions, frequencies, self.attention_scaling, keys.dtype
                )
            keys = _turned(keys, cosines, sines)
        return self.sites.rotated_queries(queries), self.sites.rotated_keys(keys)

    @property
    def attends_as_built(self) -> bool:
        """Whether `attend` is this class's: False while an intervention replaces it."""
        return "attend" not in vars(self)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor | None,
        added: Float[Tensor, "batch head row key"] | None,
        keywords: dict[str, Any],
    ) -> tuple[Float[Tensor, "batch token head d_head"], Tensor | None]:
        """Weighted values of every query, and the pattern where it was materialised.

        `added` goes onto the scaled logits.
        """
        implementation = self.config._attn_implementation
        sinks = self.running.sinks
        if (
            implementation == "eager"
            or self.attn_logit_softcapping is not None
            or sinks is not None
            or self.sites.needs_eager
        ):
            # With the pattern materialised: hooks may read or edit it.
            scores = self.scores(queries, keys, attention_mask, added)
            return self.weigh(scores, values, keywords.get("dropout") or 0.0, sinks)
        if added is not None:
            # Fused kernels take one additive mask, with a row of it for every head.
            attention_mask = masked(added, attention_mask).to(queries.dtype)
            keys, values = (
                expand_heads(keys, queries.shape[1]),
                expand_heads(values, queries.shape[1]),
            )
        self.num_key_value_groups = queries.shape[1] // keys.shape[1]  # read by the kernel
        return ALL_ATTENTION_FUNCTIONS[implementation](
            self, queries, keys, values, attention_mask, **keywords
        )

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
        self,
        scores: Float[Tensor, "batch head row key"],
        values: Float[Tensor, "batch any key d_head"],
        dropout: float,
        sinks: Float[Tensor, "head"] | None = None,
    ) -> tuple[Float[Tensor, "batch row head d_head"], Float[Tensor, "batch head row key"]]:
        """Values weighted by the softmax of `scores`, and these weights, the pattern; hooks see,
        and may replace, both.

        `sinks`: a logit of each head that takes a part of the softmax and moves no value.
        """
        scores = self.sites.scores(scores)
        if sinks is None:
            pattern = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        else:
            with_sinks = torch.cat(
                [scores, sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1
            )
            pattern = torch.softmax(with_sinks, dim=-1, dtype=torch.float32)[..., :-1].to(
                values.dtype
            )
        pattern = self.sites.pattern(torch.dropout(pattern, dropout, train=dropout > 0.0))
        return (pattern @ expand_heads(values, scores.shape[1])).transpose(
            1, 2
        ).contiguous(), pattern

    def _added(
        self, content: Content, key_positions: Tensor | None, attention_mask: Tensor | None
    ) -> Float[Tensor, "batch head row key"] | None:
        """What the scheme adds to the logits: by the positions of the pass, as hooks left them; by
        the index where there are none.
        """
        if self.position_logits is None:
            return None
        rows, keys, device = content.queries.shape[2], content.keys.shape[2], content.queries.device
        positions = self.running.positions
        if positions is None or key_positions is None:
            # The last token's index is right whatever the padding; earlier ones count back from it.
            key_positions = torch.arange(1 - keys, 1, device=device) + self.running.index[:, -1:]
            positions = key_positions[:, -rows:]
        seen = visible(rows, keys, attention_mask, device)
        added = content.added(
            self.position_logits, slice(None), positions, key_positions, seen, self.scaling
        )
        return self.sites.position_logits(added)

    def _cached_tokens(self, cache: Any, tokens: int) -> int:
        """Tokens in the cache before a pass of `tokens`."""
        if cache is None:
            return 0
        try:
            return int(cache.get_seq_length(self.layer_idx))
        except ValueError:
            # a layer that reads the keys of an earlier one, which has cached those of this pass,
            # and caches none
            return int(cache.get_seq_length()) - tokens

    def _token_index(
        self, hidden_states: Tensor, given: dict[str, Any], start: int
    ) -> Int[Tensor, "any token"]:
        """The number of every token of this pass in its prompt: as given to the module, else as its
        tables were made for, else counted.
        """
        index = given.get("position_ids")
        if index is None:
            index = getattr(_first(given.get(TABLES)), "token_index", None)
        if index is not None and index.ndim == 2 and index.shape[-1] == hidden_states.shape[1]:
            return index
        return torch.arange(start, start + hidden_states.shape[1], device=hidden_states.device)[
            None
        ]


def attached(module: nn.Module) -> RepositionedAttention | None:
    """The `RepositionedAttention` of a stock attention module; None where it has none."""
    return vars(module).get(_ATTACHED)


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name under which a forward function takes a key-value cache.

    Args:
        forward: Of a model or an attention module of transformers.

    Returns:
        One of `CACHES`.
    """
    taken = inspect.signature(forward).parameters
    return next((name for name in CACHES if name in taken), CACHES[0])


def detach(stock: Any) -> None:
    """Make a stock attention module as it was before a scheme was attached to it."""
    present = attached(stock)
    if present is None:
        return
    for handle in present._handles:
        handle.remove()
    stock.config = present.config
    del stock.assigner, stock.position_logits
    delattr(stock, _ATTACHED)


def _attend(
    module: nn.Module,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None = None,
    **keywords: Any,
) -> Any:
    """The attention function of a module with a scheme."""
    present = attached(module)
    assert present is not None
    return present.attention(queries, keys, values, attention_mask, keywords)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)


def _turned(features: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Features of all heads turned by tables of one row, of the key-value heads, or of all
    heads.
    """
    if cosines.shape[1] > 1:
        cosines, sines = (
            expand_heads(cosines, features.shape[1]),
            expand_heads(sines, features.shape[1]),
        )
    return turn(features, cosines, sines)


def _first(tables: Any) -> Any:
    return tables[0] if isinstance(tables, tuple | list) else tables


def _identity(tables: Any) -> Any:
    """Identity tables like `tables`, made once per pass: all layers are given the same tables."""
    first = _first(tables)
    if not hasattr(first, "repo_interp_identity"):
        # On the tensor and no field of a `Decoder`: it lasts as long as the tables of a pass, which
        # every pass makes anew.
        first.repo_interp_identity = identity(tables)
    return first.repo_interp_identity


def remember_index(
    rotary: nn.Module, arguments: tuple, keywords: dict[str, Any], tables: Any
) -> None:
    """A hook on a rotary module: its tables know the index of the tokens that they were made
    for.
    """
    index = keywords.get("position_ids", arguments[1] if len(arguments) > 1 else None)
    if index is not None:
        _first(tables).token_index = index  # on the tensor, since each pass has its own tables
