"""A stock attention module whose positions come from a scheme.

    z = assign(h)                                   positions, or none
    q, k = transform(q, k, z)                       per head, or none
    S = logit_scale * rotate(q, z) rotate(k, z)^T
        + position_logits(q, k, z, ...)             masked to the past
    out = softmax([S, remainder(q, k, z, ...)]) v   the last column moves no value

The stock module stays in place and computes everything else: projections, norms, gates, the output.
`RepositionedAttention` attaches to it by two hooks and by the attention function of transformers:

    before the module    positions are assigned from the hidden states; the module's tables are
                         replaced by the identity, so that queries and keys stay unrotated; what
                         a key-value cache keeps of them: `cached`
    attention function   queries and keys are put into half-split order, rotated by the
                         positions, and attend
    after the module     the tensors of the pass are dropped

A scheme is a choice of five parts: an assigner of positions, a transform of queries and keys,
frequencies to rotate by, logits to add, and a remainder of rows; any may be absent. Keys are transformed before a cache
takes them, so that the cache is the stock model's. Knows nothing about layouts, checkpoints or
measures.
"""

from __future__ import annotations

import copy
import inspect
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from repo_interp.errors import InputError
from repo_interp.models.cached import (
    CacheOfPositions,
    assign_with_memory,
    cached_tokens,
    index_by_axis,
    positions_of_keys,
)
from repo_interp.models.identity_tables import first_table, identity_tables, skip_rotation
from repo_interp.models.layer_pass import (
    Content,
    HookSites,
    LayerPass,
    LogitsOfRows,
    PassRotation,
    turned,
)
from repo_interp.models.masks import CallMask, apply_mask, call_mask, chunk_of, visible, window_of
from repo_interp.models.recomputed import require_same_interventions
from repo_interp.models.rotation import SHARED, TABLES, Rotation, of_chosen
from repo_interp.models.rotation_numbers import (
    CHANGED,
    RotationNumber,
    learned_numbers,
    rows_of,
    shared_copy,
    with_changes,
)
from repo_interp.models.scheme_parts import PARTS, SchemeParts
from repo_interp.positions.assigners import RememberingAssigner
from repo_interp.positions.logits import PositionLogits, cap_logits
from repo_interp.positions.rotary import by_pair, expand_heads, keep_components, pair_tables
from repo_interp.positions.sinks import join_sinks, with_sinks

NAME = "repo_interp"
"""Of our attention function among those of transformers, in the configuration of a stock attention
module.
"""
CACHES = ("cache", "past_key_values", "layer_past")
"""Names of the argument that takes the cache: of transformers from 5.24 on, before it, and of older
families.
"""

_THREAD = "_thread"
"""Where a layer keeps which thread runs a pass in it."""
_ATTACHED = "repositioned"
"""The attribute of a stock attention module that holds its `RepositionedAttention`; of the module
and no `Decoder`, since its hooks run where no model is known, and a copy of the module alone keeps
them.
"""


Observer = Callable[
    ["RepositionedAttention", Tensor, Tensor, Tensor | None, "LogitsOfRows | None"], None
]
"""Called with the layer, its queries and keys before rotation, its positions and added
logits, before it attends.
"""


class RepositionedAttention:
    """Positions from a scheme for a stock attention module, which keeps weights and interface."""

    frequencies: Any = RotationNumber()
    attention_scaling: Any = RotationNumber()

    def __init__(self, stock: Any, scheme: SchemeParts, rotation: Rotation) -> None:
        """Attach a scheme to a stock attention module, in place of an earlier scheme.

        Args:
            stock: Attention module of Hugging Face.
            scheme: Parts of the scheme.
            rotation: How `stock` rotates.
        """
        detach(stock)
        self.module: Any = stock
        self.config: Any = stock.config
        """The decoder's, with the implementation of attention that the user chose."""
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
        self.scheme, self.learned = scheme.name, scheme.learned
        for name in PARTS:
            setattr(stock, name, getattr(scheme, name))
        stock.rotation_parameters = learned_numbers(
            frequencies=scheme.frequencies, attention_scaling=scheme.attention_scaling
        )
        self.frequencies, self.attention_scaling = scheme.frequencies, scheme.attention_scaling
        learned = isinstance(scheme.frequencies, nn.Parameter)
        self._built = None if learned else scheme.frequencies
        self.components = scheme.components
        self.sites = HookSites()
        self.observers: list[Observer] = []
        self.interventions: list[object] = []
        """Contexts under way that change this layer (`lasting`)."""
        self.history: list[tuple[int, tuple[object, ...]]] = []
        """Those of earlier passes (`recomputed`)."""
        self.current_pass: LayerPass | None = None
        self._parameters = list(inspect.signature(type(stock).forward).parameters)[1:]
        # Attention modules ask their configuration which function attends; the model's stays
        # the user's.
        stock.config = copy.copy(self.config)
        stock.config._attn_implementation_internal = NAME
        skip_rotation(type(stock).forward)
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
        """Copy or pickle like any object; refuse inside an intervention: a copy would keep it."""
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
    def transform(self) -> nn.Module | None:
        """Maps queries and keys before they are rotated; None where they stay."""
        return self.module.transform

    @property
    def remainder(self) -> nn.Module | None:
        """Gives each row a logit that moves no value; None where keys alone share it."""
        return self.module.remainder

    @property
    def uses_positions(self) -> bool:
        """Whether the layer assigns positions and computes with them."""
        acting = (self.frequencies, self.position_logits, self.transform, self.remainder)
        return self.assigner is not None and any(part is not None for part in acting)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode: kernels ask."""
        return self.module.training

    @property
    def output_projection(self) -> nn.Module | None:
        """The map from the heads' outputs to the model's width; None where a family has none."""
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
    def active_pass(self) -> LayerPass:
        """The pass under way."""
        assert self.current_pass is not None
        return self.current_pass

    def _require_running(self, projection: nn.Module, arguments: tuple) -> None:
        if self.current_pass is None:
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
            require_same_interventions(self)
            self._require_one_thread()
        given = dict(zip(self._parameters, arguments, strict=False)) | keywords
        hidden_states: Tensor = given["hidden_states"]
        past = next((name for name in CACHES if given.get(name) is not None), None)
        cache = None if past is None else given[past]
        start = cached_tokens(cache, self.layer_idx, hidden_states.shape[1])
        index = self._token_index(hidden_states, given, cache, start)
        if index.is_complex():
            raise InputError("position ids are complex; wanted whole numbers")
        by_axis = index if index.ndim == 3 else None
        index = index if by_axis is None else by_axis[0]
        length = int(index.max()) + 1 if self.follows_length else None
        if (frequencies := self.frequencies_at(length)) is not None:
            # Moved here, not in `rotate`: the last measured layer ends before it rotates.
            self.frequencies = shared_copy(frequencies, hidden_states.device)
        mask = given.get("attention_mask")
        self.current_pass = LayerPass(
            hidden_states,
            mask if isinstance(mask, Tensor) else None,
            index,
            start,
            length,
            by_axis=by_axis is not None,
        )
        try:
            self.current_pass.positions = (
                None
                if self.assigner is None
                else self._assign(hidden_states, index, cache)
                if by_axis is None
                else self._assign_by_axis(hidden_states, by_axis)
            )
            self.current_pass.gate_keys = (
                None
                if self.position_logits is None
                else self.position_logits.gate_keys(hidden_states)
            )
        except BaseException:
            self.current_pass = None
            raise
        if given.get(TABLES) is not None:
            self.current_pass.tables = given[TABLES]
            given[TABLES] = _identity_tables(given[TABLES])
        self.current_pass.handed_on = given.get(SHARED) is not None
        if self.current_pass.handed_on and self.transform is not None:
            self.current_pass = None
            raise InputError(
                f"layers of this model share keys, which the transform of {self.scheme!r} would "
                f"reach twice in layer {self.layer_idx}; choose a scheme without one"
            )
        if past is not None:
            given[past] = CacheOfPositions(cache, self)
        return (), given

    def _require_one_thread(self) -> None:
        """Raise InputError where a pass of another thread has not ended in this layer."""
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
            TABLES: self.active_pass.tables
        }

    def _after(self, module: nn.Module, arguments: tuple, output: Any) -> None:
        if not torch.compiler.is_compiling():
            if vars(self).get(_THREAD, here := threading.get_ident()) != here:
                return  # refused: the pass of another thread goes on
            vars(self).pop(_THREAD, None)
        current, self.current_pass = self.current_pass, None
        if current is not None and output is not None and not current.attended:
            raise InputError(
                f"layer {self.layer_idx} attended without the attention function of its "
                f"scheme {self.scheme!r}, so positions were ignored"
            )

    @property
    def rotation_is_changed(self) -> bool:
        """Whether an intervention changes the frequencies."""
        return bool(vars(self).get(CHANGED, {}).get("frequencies"))

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on the length of the pass (dynamic NTK, longrope)."""
        source, known = self.rotation.source, self.rotation.frequencies
        return (
            self._built is not None
            and self._built.ndim == 1
            and source is not None
            and source.changes
            # Others than the decoder's are what the scheme says, at any length.
            and bool(torch.isin(self._built.cpu(), torch.cat([known, known.new_zeros(1)])).all())
        )

    def frequencies_at(self, length: int | None) -> Any:
        """Return the frequencies of a pass, with the changes of interventions.

        Args:
            length: Tokens up to the last one of the pass; None: the present frequencies.

        Returns:
            Radians per position [component]; with axes [row, 1] before it where heads have their
            own; None where the layer does not rotate.
        """
        if length is None or not self.follows_length:
            return self.frequencies
        assert self._built is not None and self.rotation.source is not None
        turning = self.rotation.source.at(length)
        frequencies = torch.cat([turning, turning.new_zeros(self.d_head // 2 - len(turning))])
        # A scheme may have left out some, or put others in their place (HoPE).
        frequencies = of_chosen(self._built.cpu(), self.rotation.frequencies, frequencies)
        return with_changes(self, "frequencies", frequencies)

    def frequencies_of_keys(self) -> Any:
        """Return the frequencies by which keys were rotated: cached ones keep theirs.

        Returns:
            Radians per position [component], [head, 1, component] or
            [prompt, head, key, component].
        """
        lengths = None if self.current_pass is None else self.current_pass.key_lengths
        if lengths is None:
            return self.frequencies
        passes, which = lengths.unique(return_inverse=True)
        # [component], or [head, 1, component]
        found = [self.frequencies_at(int(length)) for length in passes]
        by_pass = torch.stack([part.reshape(-1, part.shape[-1]) for part in found])
        return by_pass.to(lengths.device)[which].transpose(1, 2)  # [prompt, head, key, component]

    def _assign(
        self, hidden_states: Tensor, index: Tensor, cache: Any
    ) -> Float[Tensor, "batch any token *component"]:
        assert self.assigner is not None
        if isinstance(self.assigner, RememberingAssigner):
            positions = assign_with_memory(self, self.assigner, hidden_states, index, cache)
        else:
            positions = self.assigner(hidden_states, index)
        if isinstance(positions, tuple):
            positions, of_keys = positions
            self._require_positions(of_keys, hidden_states, "the assigner of")
            self.active_pass.of_keys = self.sites.key_positions(of_keys)
        self._require_positions(positions, hidden_states, "the assigner of")
        return self._after_hooks(positions, hidden_states)

    def _after_hooks(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        if (
            self.sites.positions._backward_hooks
            and torch.is_grad_enabled()
            and not positions.requires_grad
        ):
            # the token index: without this the hook would never be called
            positions = positions.detach().requires_grad_()
        hooked = self.sites.positions(positions)
        if hooked is not positions:
            self._require_positions(hooked, hidden_states, "a hook on the positions of")
        return hooked

    def _require_positions(self, positions: object, hidden_states: Tensor, source: str) -> None:
        """Raise InputError for anything but positions of the tokens of this pass."""
        batch, tokens = hidden_states.shape[:2]
        if not isinstance(positions, Tensor):
            raise InputError(
                f"{source} layer {self.layer_idx} ({self.scheme}) returns "
                f"{type(positions).__name__}; wanted positions [batch, row, token]"
            )
        if (
            positions.ndim not in (3, 4)
            or positions.shape[0] not in (1, batch)
            or positions.shape[2] != tokens
            or not positions.shape[1]
            or self.heads % positions.shape[1]
            or (
                positions.ndim == 4
                and self.frequencies is not None
                and positions.shape[3] not in (1, self.d_head // 2)
            )
        ):
            raise InputError(
                f"{source} layer {self.layer_idx} ({self.scheme}) gave positions "
                f"{list(positions.shape)}; wanted [batch, row, token], or [batch, row, token, "
                f"component], of {batch} prompts, as many rows as divide {self.heads} heads, "
                f"{tokens} tokens, and {self.d_head // 2} components"
            )
        if positions.is_complex():
            raise InputError(
                f"{source} layer {self.layer_idx} ({self.scheme}) gave complex positions, whose "
                "imaginary part would be lost; wanted real numbers"
            )

    def _assign_by_axis(
        self, hidden_states: Tensor, index: Int[Tensor, "axis batch token"]
    ) -> Float[Tensor, "batch 1 token component"]:
        """Positions of an image's tokens: every pair turns by time, height or width (mRoPE)."""
        if self.scheme != "rope" or self.rotation.axes is None:
            raise InputError(
                f"position_ids have {len(index)} axes, and layer {self.layer_idx} "
                f"({self.scheme}) assigns one position per token; give [prompt, token], or leave "
                "the layer's rotation (rope)"
            )
        by_pair = index[self.rotation.axes.to(index.device)]
        positions = by_pair.permute(1, 2, 0)[:, None].to(torch.float32)
        return self._after_hooks(positions, hidden_states)

    def process_new(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put new keys and values into the form in which they enter attention or a cache.

        Args:
            keys: Keys of this pass [batch, kv_head, token, d_head], in the module's order,
                unrotated.
            values: Values of this pass [batch, kv_head, token, d_value].

        Returns:
            Keys in half-split order, transformed, and values, both after their hooks.
        """
        keys = self._half_split(keys)
        if self.transform is not None:
            self.active_pass.plain_keys = keys
            # A cache takes keys before the module hands on its queries.
            keys = self._transformed(expand_heads(keys, self.heads), keys, 1)
        keys, values = self.sites.keys(keys), self.sites.values(values)
        self.active_pass.new_keys, self.active_pass.new_values = keys, values
        return keys, values

    def _transformed(self, queries: Tensor, keys: Tensor, which: int) -> Tensor:
        """Queries (0) or keys (1) of a pass after the transform of the scheme, checked."""
        assert self.transform is not None
        given = queries, keys
        made = self.transform(*given, self.active_pass.positions)
        pair = isinstance(made, tuple | list)
        shapes = [list(getattr(part, "shape", ())) for part in made] if pair else []
        if shapes != [list(part.shape) for part in given]:
            code = getattr(type(self.transform).forward, "__code__", None)
            place = f" in {os.path.basename(code.co_filename)}" if code else ""
            raise InputError(
                f"the transform of layer {self.layer_idx} ({self.scheme}) gave "
                f"{shapes if pair else type(made).__name__}; wanted that forward of "
                f"{type(self.transform).__name__}{place} returns a pair: queries "
                f"{list(queries.shape)} and keys {list(keys.shape)}, as it was given them"
            )
        # In the memory order of what was given, by which sums of measures round
        return torch.empty_like(given[which]).copy_(made[which])

    def _half_split(
        self, vectors: Float[Tensor, "*batch d_head"]
    ) -> Float[Tensor, "*batch d_head"]:
        return vectors if self.order is None else vectors[..., self.order.to(vectors.device)]

    def stock_order(
        self, vectors: Float[Tensor, "*batch d_head"]
    ) -> Float[Tensor, "*batch d_head"]:
        """Undo the half-split order: caches hold keys in the order of the stock module.

        Args:
            vectors: Queries or keys [..., d_head] in half-split order.

        Returns:
            The same in the order of the stock module.
        """
        return (
            vectors if self.order is None else vectors[..., self.order.argsort().to(vectors.device)]
        )

    def _entered(self, keys: Tensor, values: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Return all keys in half-split order, and values; those of this pass after their hooks."""
        if self.active_pass.new_keys is not None:
            return self._half_split(keys), values
        if keys.shape[2] == tokens:
            return self.process_new(keys, values)
        # Made of cached latents, or by an earlier layer: of earlier tokens too.
        if self.transform is not None:
            raise InputError(
                f"layer {self.layer_idx} makes keys of earlier tokens anew, or takes those of "
                f"another layer, which the transform of {self.scheme!r} does not reach; pass "
                "use_cache=False, or choose a scheme without one"
            )
        end = self.active_pass.end(keys.shape[2])
        begin = end - tokens
        new_keys, new_values = self.process_new(keys[:, :, begin:end], values[:, :, begin:end])
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
        """Attend with unrotated queries and keys; called by the stock module.

        Args:
            queries: [batch, head, token, d_head], in the module's order.
            keys: [batch, kv_head, key, d_head]; cached ones went through `process_new` already.
            values: [batch, kv_head, key, d_value].
            attention_mask: Boolean or additive; None: causal.
            keywords: Further arguments of the attention function.

        Returns:
            Weighted values [batch, token, head, d_value], and the pattern where it was
            materialised.

        Raises:
            InputError: The mask is no tensor.
        """
        current = self.active_pass
        current.attended = True
        if attention_mask is not None and not isinstance(attention_mask, Tensor):
            raise InputError(
                f"layer {self.layer_idx} was given a mask that is no tensor "
                f"({type(attention_mask).__name__}), as flex_attention makes it; choose "
                "model.set_attn_implementation('sdpa')"
            )
        keys, values = self._entered(keys, values, queries.shape[2])
        assert current.new_keys is not None and current.new_values is not None
        if attention_mask is None and keys.shape[2] > (filled := current.start + queries.shape[2]):
            # Slots of a static cache without a token: no mask means that the last key is the last
            # token's, for fused kernels too.
            keys, values = keys[:, :, :filled], values[:, :, :filled]
            current.cut(filled)
        queries = self._half_split(queries)
        if self.transform is not None:
            assert current.plain_keys is not None
            queries = self._transformed(queries, current.plain_keys, 0)
        queries = self.sites.queries(queries)
        if self.components is not None:  # a pair that is 0 stays 0 when rotated
            queries = keep_components(queries, self.components.to(queries.device))
        self.scaling = (
            queries.shape[-1] ** -0.5 if keywords.get("scaling") is None else keywords["scaling"]
        )
        self.sliding_window = chunk_of(self.module) or window_of(
            self.config, keywords, attention_mask, keys.shape[2]
        )
        self.attn_logit_softcapping = keywords.get("softcap")
        current.sinks = current.stock_sinks = keywords.get("s_aux")
        call = call_mask(
            self.module, queries, keys.shape[2], attention_mask, current.attention_mask, keywords
        )
        content = current.content = Content(queries, keys, values, current.gate_keys)
        call = self.mask_of(call, content)
        current.hidden = call.hidden
        of_rows = None
        if self.observers:
            new = Content(queries, current.new_keys, current.new_values, current.gate_keys)
            places = current.index if current.positions is None else current.positions
            given = new, places, self.scaling
            if self.position_logits is not None or call.bias is not None:
                of_rows = LogitsOfRows(self.position_logits, *given, call.bias, current.of_keys)
            if self.remainder is not None:
                current.remainder = LogitsOfRows(self.remainder, *given, None, current.of_keys)
            current.rotation = self._shared_rotation(queries, keys)
        for observe in self.observers:
            observe(self, queries, current.new_keys, current.positions, of_rows)
        positions, turning = current.positions, current.turning
        key_positions = None if turning is not None else positions_of_keys(self, keys)
        added = self._added(content, key_positions, call.mask)
        if self.remainder is not None:
            rest = self._of_content("remainder", content, key_positions, call.mask)
            current.sinks = join_sinks(current.sinks, rest)
        if positions is not None and key_positions is not None:
            rows = rows_of(self.frequencies)
            positions, key_positions = (
                expand_heads(z, rows) if rows > z.shape[1] else z
                for z in (positions, key_positions)
            )
        placed = positions if key_positions is None else key_positions
        if placed is not None and placed.shape[1] > keys.shape[1]:
            # One position per head: heads that share a key need it rotated differently.
            keys, values = (
                expand_heads(keys, placed.shape[1]),
                expand_heads(values, placed.shape[1]),
            )
        if turning is None:
            queries, keys = self.rotate(queries, keys, positions, key_positions)
        else:
            queries = self.sites.rotated_queries(turned(queries, *turning))
            keys = self.sites.rotated_keys(keys)
        if call.bias is not None:
            added = call.bias if added is None else added + call.bias
        attended, pattern = self.attend(queries, keys, values, call.mask, added, keywords)
        return self.sites.attended(attended), pattern

    def rotate(
        self,
        queries: Tensor,
        keys: Tensor,
        positions: Float[Tensor, "batch any token *component"] | None,
        key_positions: Float[Tensor, "batch any key *component"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by their positions, if the scheme rotates.

        Args:
            queries: [batch, head, token, d_head], half-split.
            keys: [batch, kv_head, key, d_head], half-split.
            positions: Positions of the queries, in rows, one per token or per token and pair;
                None: nothing is rotated.
            key_positions: Positions of the keys; None: those of the queries.

        Returns:
            Queries and keys after the hooks on rotated ones.
        """
        current = self.current_pass
        shared = None if current is None else current.rotation
        if shared is not None and shared.queries is queries and shared.keys is keys:
            queries, keys = shared.turned_queries, shared.turned_keys
        elif positions is not None and self.frequencies is not None:
            key_positions = positions if key_positions is None else key_positions
            cosines, sines = self._tables(positions, queries.dtype)
            queries = turned(queries, cosines, sines)
            apart = current is not None and current.of_keys is not None
            if apart or key_positions.shape[2] != positions.shape[2]:
                frequencies = self.frequencies_of_keys()
                cosines, sines = pair_tables(
                    by_pair(key_positions), frequencies, self.attention_scaling, keys.dtype
                )
            keys = turned(keys, cosines, sines)
        return self.sites.rotated_queries(queries), self.sites.rotated_keys(keys)

    def _shared_rotation(self, queries: Tensor, keys: Tensor) -> PassRotation | None:
        """The rotation of this pass for measures too; None where they take other numbers."""
        current, frequencies = self.active_pass, self.frequencies
        positions, tables = current.positions, (self.sites.cosines, self.sites.sines)
        if (
            positions is None
            or frequencies is None
            or frequencies.ndim > 1
            # The pass rotates a key for every head, or cached keys, or by hooked tables
            or positions.shape[1] > keys.shape[1]
            or keys is not current.new_keys
            or current.turning is not None
            or current.of_keys is not None
            or any(site._forward_hooks or site._forward_pre_hooks for site in tables)
            # Gradients of measures are not the pass's
            or torch.is_grad_enabled()
        ):
            return None
        return PassRotation(queries, keys, partial(self._tables, positions, queries.dtype))

    def rotate_new(self, keys: Tensor) -> Tensor:
        """Rotate the keys of a pass before a cache takes them, as the stock module does.

        Args:
            keys: [batch, kv_head, token, d_head], half-split.

        Returns:
            Rotated keys.
        """
        current = self.active_pass
        assert current.positions is not None
        current.turning = self._tables(current.positions, keys.dtype)
        return turned(keys, *current.turning)

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens of a pass, after their hooks."""
        assert self.frequencies is not None
        cosines, sines = pair_tables(
            by_pair(positions), self.frequencies, self.attention_scaling, dtype
        )
        return self.sites.cosines(cosines), self.sites.sines(sines)

    def mask_of(self, call: CallMask, content: Content) -> CallMask:
        """Return the mask of a call, which interventions may change (`hidden_keys`).

        Args:
            call: The mask of the stock module.
            content: Queries, keys and values of the call.

        Returns:
            The mask by which the layer attends.
        """
        return call

    @property
    def attends_unchanged(self) -> bool:
        """Whether no intervention replaces `attend`."""
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
        """Weigh values by the softmax of the logits.

        Args:
            queries: [batch, head, token, d_head], rotated.
            keys: [batch, kv_head or head, key, d_head], rotated.
            values: [batch, kv_head or head, key, d_value].
            attention_mask: Boolean or additive; None: causal.
            added: Added to the scaled logits [batch, head, token, key]; None: nothing.
            keywords: Further arguments of the attention function.

        Returns:
            Weighted values [batch, token, head, d_value], and the pattern where it was
            materialised.
        """
        implementation = self.config._attn_implementation
        sinks = self.active_pass.sinks
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
            attention_mask = apply_mask(added, attention_mask).to(queries.dtype)
        if added is not None or (queries.is_cuda and queries.dtype == torch.float32):
            # In float32 no fused kernel of CUDA shares keys between heads.
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
        """Compute scores: scaled, soft-capped, with added logits, masked.

        Args:
            queries: [batch, head, row, d_head], rotated.
            keys: [batch, kv_head or head, key, d_head], rotated.
            attention_mask: Boolean or additive; None: causal.
            added: Added to the scaled logits; None: nothing.

        Returns:
            Scores [batch, head, row, key].
        """
        scores = queries @ expand_heads(keys, queries.shape[1]).transpose(-1, -2) * self.scaling
        scores = cap_logits(scores, self.attn_logit_softcapping)
        if added is not None:
            scores = scores + added.to(scores.dtype)
        return apply_mask(scores, attention_mask)

    def weigh(
        self,
        scores: Float[Tensor, "batch head row key"],
        values: Float[Tensor, "batch any key d_head"],
        dropout: float,
        sinks: Float[Tensor, "*batch head *row"] | None = None,
    ) -> tuple[Float[Tensor, "batch row head d_head"], Float[Tensor, "batch head row key"]]:
        """Weigh values by the softmax of scores; hooks may replace scores and pattern.

        Args:
            scores: [batch, head, row, key].
            values: [batch, kv_head or head, key, d_value].
            dropout: Probability that an entry of the pattern is dropped.
            sinks: A logit for every head, or every row of heads, that takes part in the softmax
                and moves no value; None: none.

        Returns:
            Weighted values [batch, row, head, d_value], and the pattern [batch, head, row, key].
        """
        scores = self.sites.scores(scores)
        if sinks is None:
            pattern = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        else:
            columns = with_sinks(scores, sinks)
            pattern = torch.softmax(columns, dim=-1, dtype=torch.float32)[..., :-1].to(values.dtype)
        pattern = self.sites.pattern(torch.dropout(pattern, dropout, train=dropout > 0.0))
        return (pattern @ expand_heads(values, scores.shape[1])).transpose(
            1, 2
        ).contiguous(), pattern

    def _added(
        self, content: Content, key_positions: Tensor | None, attention_mask: Tensor | None
    ) -> Float[Tensor, "batch head row key"] | None:
        """Logits of the scheme after their hooks."""
        if self.position_logits is None:
            return None
        return self.sites.position_logits(
            self._of_content("position_logits", content, key_positions, attention_mask)
        )

    def _of_content(
        self,
        name: str,
        content: Content,
        key_positions: Tensor | None,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """Result of a part for all rows, by the positions of the pass, or by the index without any."""
        rows, keys, device = content.queries.shape[2], content.keys.shape[2], content.queries.device
        positions = self.active_pass.positions
        if positions is None or key_positions is None:
            current = self.active_pass
            index, end = current.index, current.end(keys)
            key_positions = index if index.shape[-1] == keys else current.counted_index(keys)
            positions = key_positions[:, end - rows : end]
        seen = visible(rows, keys, attention_mask, device)
        part = getattr(self, name)
        made = content.added(part, slice(None), positions, key_positions, seen, self.scaling)
        shape = [*getattr(made, "shape", ())]
        axes = "batch, head, row" if name == "remainder" else "batch, head, row, key"
        whole = [*content.queries.shape[:3], keys][: axes.count(",") + 1]
        if len(shape) != len(whole) or any(
            size not in (1, wanted) for size, wanted in zip(shape, whole, strict=True)
        ):
            raise InputError(
                f"{name} of layer {self.layer_idx} ({self.scheme}) returns "
                f"{shape or type(made).__name__}; wanted [{axes}], here "
                f"{whole}, axes of 1 allowed"
            )
        if made.is_complex():
            raise InputError(
                f"{name} of layer {self.layer_idx} ({self.scheme}) returns complex "
                "numbers; wanted real ones"
            )
        return made

    def _token_index(
        self, hidden_states: Tensor, given: dict[str, Any], cache: Any, start: int
    ) -> Int[Tensor, "any token"]:
        """Tokens' numbers in their prompts: as given, as their tables were made for, or counted."""
        index, tokens = given.get("position_ids"), hidden_states.shape[1]
        of_tables = getattr(first_table(given.get(TABLES)), "token_index", None)
        if self.rotation.axes is not None and of_tables is not None and of_tables.ndim == 3:
            return index_by_axis(of_tables[..., -tokens:], cache, start)
        index = of_tables if index is None else index
        if index is not None and index.ndim == 2 and index.shape[-1] == tokens:
            return index
        return torch.arange(start, start + tokens, device=hidden_states.device)[None]


def scheme_of(module: nn.Module) -> RepositionedAttention | None:
    """Return the `RepositionedAttention` that is attached to a stock attention module.

    Args:
        module: Any module.

    Returns:
        The attached object; None without one.
    """
    return vars(module).get(_ATTACHED)


def require_one_position(attention: RepositionedAttention, positions: Tensor) -> None:
    """Refuse positions that differ by rotary pair, or between a token's query and key.

    Args:
        attention: The layer.
        positions: Of a pass.

    Raises:
        InputError: A token has several positions.
    """
    current = attention.current_pass
    if current is not None and current.of_keys is not None:
        raise InputError(
            f"this changes one position per token, and the query and the key of a token have "
            f"positions of their own in layer {attention.layer_idx} ({attention.scheme}); leave "
            "the layer out"
        )
    if positions.ndim == 4:
        raise InputError(
            f"this changes one position per token, and the rotary pairs of a token have different "
            f"positions in layer {attention.layer_idx} ({attention.scheme}); leave the layer out"
        )


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
    """Remove the scheme of a stock attention module, if it has one.

    Args:
        stock: Attention module of Hugging Face.
    """
    present = scheme_of(stock)
    if present is None:
        return
    for handle in present._handles:
        handle.remove()
    stock.config = present.config
    for name in (*PARTS, "rotation_parameters"):
        delattr(stock, name)
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
    present = scheme_of(module)
    assert present is not None
    return present.attention(queries, keys, values, attention_mask, keywords)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)


def _identity_tables(tables: Any) -> Any:
    """Tables of angle 0 like `tables`, made once per pass: all layers are given the same."""
    first = first_table(tables)
    if not hasattr(first, "repo_interp_identity_tables"):
        # On the tensor and no field of a `Decoder`: it lasts as long as the tables of a pass, which
        # every pass makes anew.
        first.repo_interp_identity_tables = identity_tables(tables)
    return first.repo_interp_identity_tables


def remember_index(
    rotary: nn.Module, arguments: tuple, keywords: dict[str, Any], tables: Any
) -> None:
    """Keep the token index on the tables that a rotary module makes: its forward hook.

    Args:
        rotary: Module that makes the tables.
        arguments: Its positional arguments.
        keywords: Its keyword arguments.
        tables: Its output.
    """
    index = keywords.get("position_ids", arguments[1] if len(arguments) > 1 else None)
    if index is not None:
        first_table(tables).token_index = index  # on the tensor, since every pass makes tables
