"""Change the distances of pairs of tokens, for chosen heads and rotary pairs.

    W_ij = sum_r Re(q_ir conj(k_jr) e^(i theta_r D_ij)) + B(D_ij)        D_ij = z_i - z_j

    D_ij   <-   function(D_ij, pair)

q_ir and k_jr are rotary pair r of query i and key j as complex numbers before rotation. z are
positions (the index, or learned ones). B is the bias that a scheme adds by distance (ALiBi, KERPLE,
FIRE; FIRE's normalizer, which depends on the query, stays). LM-Infinite, InfLLM (`extension`),
ReRoPE and Self-Extend are functions of this kind (Han et al. 2024; Xiao et al. 2024; Su 2023; Jin
et al. 2024).

Pairs with an unchanged distance keep the model's logits. Other logits are computed from queries and
keys before rotation, by the first of three methods that is exact:

    D of one size (a cap)          rotate(q_i, D) . k_j                  one product a sign
    D_ij = a_i - b_j               rotate(q_i, a_i) . rotate(k_j, b_j)   one product
    any D                          rotate(q_i, D_ij) . k_j               pair by pair

Scores are computed for ROWS queries at a time, and for the keys that any of them sees. The whole
map is made only if a hook reads the pattern. A cache must begin inside the context. In pairs with a
changed distance, `moved_keys` has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.interventions.replacing import Heads, Layers, choose_heads, finite_positions
from repo_interp.interventions.token_pairs import TokenPairs, chosen_rows, token_pairs
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.cached import positions_of_keys
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import intervention, model_edit, patch_attribute
from repo_interp.models.layer_probe import differs_by_pair, logits_by_content
from repo_interp.models.masks import apply_mask, visible
from repo_interp.models.rotation_numbers import of_heads
from repo_interp.positions.logits import cap_logits, exact
from repo_interp.positions.rotary import expand_heads, rotate
from repo_interp.values import TokensOrNone, checked

Distance = Callable[[Float[Tensor, "any any row key"], TokenPairs], Tensor]
"""Function from distances of pairs to new distances."""
ROWS = 256
"""Number of queries whose scores are computed at once."""
_NUMBERS = 1 << 24
"""Most numbers of queries that are rotated pair by pair at once."""


@model_edit
def distances(
    model: nn.Module,
    function: Distance,
    heads: Heads = None,
    *,
    layers: Layers = None,
    pairs: Sequence[int] | None = None,
) -> Iterator[None]:
    """Change the distances of pairs of tokens inside a `with` block.

        with iv.distances(model, lambda distance, pair: distance.clamp(max=512)):  # ReRoPE
            ri.loss(model, prompts)

    In nested contexts the inner function gets the distances of the outer one.

    Args:
        model: Repositioned model or bridge.
        function: Function of the distances z_i - z_j [prompt, row of positions, query, key], in
            positions, and of `TokenPairs`. It returns new distances, which broadcast to [prompt,
            head, query, key].
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layers: One layer or several, instead of `heads`; None: all layers with distances.
        pairs: Indices of the rotary pairs that use the new distances, 0 the fastest; None: all
            pairs, and also biases by distance.

    Yields:
        None.

    Raises:
        InputError: The model lacks the heads, layers or pairs, or a layer has no distances of pairs
            of tokens; or, in the pass, new distances are not finite or have another shape, the
            cache began outside the context, or its keys were rotated by other frequencies.
    """
    decoder = as_decoder(model)
    if not callable(function):
        raise InputError("new distances are a function of distances and TokenPairs")
    chosen = choose_heads(decoder, heads, layers, layers_with_distances(decoder))
    some = list(pairs) if isinstance(pairs, range) else pairs
    some = None if some is None else frozenset(checked(some, tuple[TokensOrNone, ...], "pairs"))
    with intervention(decoder) as undo:
        for attention in decoder.attentions(chosen):
            require_distances(attention, "distances")
            half = attention.d_head // 2
            if some is not None and (
                attention.frequencies is None or not some or max(some) >= half
            ):
                raise InputError(
                    f"rotary pairs of layer {attention.layer_idx} ({attention.scheme}) are "
                    f"{'none' if attention.frequencies is None else f'0 to {half - 1}'}; got "
                    f"{sorted(some)}"
                )
            edit = _Edit(function, chosen[attention.layer_idx], some)
            patch_attribute(
                undo,
                attention,
                "attend",
                lambda present, attention=attention, edit=edit: _Distances(
                    attention, (*getattr(present, "edits", ()), edit)
                ),
            )
        yield


def layers_with_distances(decoder: Decoder) -> list[int]:
    """List the layers whose logits depend on distances of pairs of tokens.

    Args:
        decoder: Decoder of the model.

    Returns:
        Numbers of layers.

    Raises:
        InputError: A layer uses positions that have no distance, or no layer has distances.
    """
    found = []
    for attention in decoder.layers:
        if (reason := reason_against_distances(attention)) and not reason.startswith("has no"):
            require_distances(attention, "the method")
        if not reason:
            found.append(attention.layer_idx)
    if not found:
        raise InputError(
            "no layer of this model rotates or adds logits by distance, so no distance can change; "
            "leave it out"
        )
    return found


def reason_against_distances(attention: RepositionedAttention) -> str:
    """Give the reason why a layer has no distance of two tokens.

    Args:
        attention: A layer.

    Returns:
        A clause for messages; empty if there is a distance.
    """
    if logits_by_content(attention):
        return "counts positions by context, or adds or transforms by contents and positions"
    if attention.remainder is not None:
        return "leaves a share of its rows to no key, which may depend on all of them"
    if differs_by_pair(attention):
        return "gives every rotary pair its own position"
    rotates = attention.frequencies is not None and attention.assigner is not None
    return "" if rotates or attention.position_logits is not None else "has no positions"


def require_distances(attention: RepositionedAttention, method: str) -> None:
    """Refuse a layer without distances of pairs of tokens.

    Args:
        attention: A layer.
        method: Name of the method that needs distances, for the message.

    Raises:
        InputError: The layer has no distances.
    """
    if reason := reason_against_distances(attention):
        raise InputError(
            f"layer {attention.layer_idx} ({attention.scheme}) {reason}: {method} has no distance "
            "to change there"
        )


@dataclass(frozen=True)
class _Edit:
    """One context in one layer."""

    function: Distance
    heads: frozenset[int]
    pairs: frozenset[int] | None
    """Rotary pairs that use the new distances; None: all, and biases by distance."""

    def applied(self, distance: Tensor, pairs: TokenPairs, heads: int) -> Tensor:
        """New distances of all heads."""
        new = finite_positions(
            self.function(distance, pairs), distance, f"distances of layer {pairs.layer}"
        ).to(distance.dtype)
        shape = (len(pairs.queries), heads, *distance.shape[2:])
        sizes = (*(1,) * (4 - new.ndim), *new.shape)
        # One per row of positions, as in the input, or one per head
        allowed = [{1, size} for size in shape]
        allowed[1].add(distance.shape[1])
        if len(sizes) != 4 or any(
            size not in some for size, some in zip(sizes, allowed, strict=False)
        ):
            raise InputError(
                f"distances of layer {pairs.layer} are {list(new.shape)}; wanted an array that "
                f"broadcasts to {list(shape)} [prompt, head, query, key]"
            )
        new = new.reshape(sizes).expand(-1, -1, *shape[2:])
        rows = max(new.shape[1], distance.shape[1])
        new, distance = expand_heads(new, rows), expand_heads(distance, rows)
        only = chosen_rows(heads, self.heads, new.device)
        if only is None:
            return new
        return torch.where(only, expand_heads(new, heads), expand_heads(distance, heads))


@dataclass(frozen=True)
class _Distances:
    """Attention of one layer with other distances; replaces the layer's `attend`."""

    attention: RepositionedAttention
    edits: tuple[_Edit, ...]

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor | None,
        added: Tensor | None,
        keywords: dict[str, Any],
    ) -> tuple[Float[Tensor, "batch token head d_head"], Tensor | None]:
        """Attend from every query to the keys that it sees, and make a pattern for hooks."""
        attention = self.attention
        content, count = attention.active_pass.content, keys.shape[2]
        assert content is not None
        of_queries, of_keys = self._positions(content.keys)
        rows, device = queries.shape[2], queries.device
        seen = visible(rows, count, attention_mask, device)
        added = None if added is None else added.expand(-1, -1, rows, count)
        pairs = token_pairs(attention, content)
        # A hook on the pattern gets all rows at once, as from the layer's `attend`
        whole = attention.sites.needs_eager
        parts, pattern = [], None
        for start in range(0, rows, rows if whole else ROWS):
            block = slice(start, min(rows, start + (rows if whole else ROWS)))
            some = seen[..., block, :]
            # Only keys that some row of this block sees
            shown = torch.arange(count, device=device)
            shown = shown if whole else shown[some.flatten(0, 2).any(0)]
            some = some[..., shown]
            scores = self._scores(
                (queries[:, :, block], keys[:, :, shown]),
                pairs.part(block, shown),
                (of_queries[:, :, block], of_keys[:, :, shown]),
                some,
                None if added is None else added[..., block, :][..., shown],
            )
            attended, of_rows = attention.weigh(
                apply_mask(scores, some),
                values[:, :, shown],
                keywords.get("dropout") or 0.0,
                attention.active_pass.sinks,
            )
            parts.append(attended)
            pattern = of_rows if whole else None
        return torch.cat(parts, dim=1), pattern

    def _positions(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of the queries and of all keys, [any, row of positions, token]."""
        attention, now = self.attention, self.attention.active_pass
        if now.turning is not None:
            raise InputError(
                f"the cache holds rotated keys of layer {attention.layer_idx}, whose distances "
                "cannot change; begin a new cache inside of the interventions that last"
            )
        if attention.follows_length and now.start:
            raise InputError(
                f"frequencies of layer {attention.layer_idx} depend on the length of the pass, so "
                "cached keys have no distance from new queries; pass use_cache=False"
            )
        positions, of_keys = now.positions, positions_of_keys(attention, keys)
        if positions is None or of_keys is None:
            # Layers that only add a bias have no positions; their distance is that of the index.
            count = keys.shape[2]
            index = now.index if now.index.shape[-1] == count else now.counted_index(count)
            positions, of_keys = (each[:, None].float() for each in (now.index, index))
        return exact(positions), exact(of_keys)

    def _scores(
        self,
        rotated: tuple[Tensor, Tensor],
        pairs: TokenPairs,
        positions: tuple[Tensor, Tensor],
        seen: Bool[Tensor, "any any row key"],
        added: Tensor | None,
    ) -> Float[Tensor, "batch head row key"]:
        """Scores of some queries and keys before the mask."""
        attention, heads = self.attention, pairs.queries.shape[1]
        given = positions[0][..., :, None] - positions[1][..., None, :]
        scores: Any = 0.0
        for some in self._groups():
            queries, keys = rotated
            if some is not None:
                queries = queries * some.to(queries)
            of_pairs = queries @ expand_heads(keys, heads).mT
            distance, changed = self._changed(given, pairs, some, seen)
            if attention.frequencies is not None and bool(changed.any()):
                of_pairs = self._at(pairs, distance, changed, some, of_pairs)
            scores = scores + of_pairs
        scores = cap_logits(scores * attention.scaling, attention.attn_logit_softcapping)
        if added is None:
            return scores
        if attention.position_logits is not None:
            distance, changed = self._changed(given, pairs, None, seen)
            if bool(changed.any()):
                at = self._added(pairs, positions[0], distance)
                added = torch.where(changed, at, added)
        return scores + added.to(scores.dtype)

    def _groups(self) -> list[Tensor | None]:
        """Masks [d_head] of rotary pairs with the same distances; None: all pairs."""
        half = self.attention.d_head // 2
        by_edits: dict[tuple[bool, ...], list[int]] = {}
        for pair in range(half):
            acting = tuple(edit.pairs is None or pair in edit.pairs for edit in self.edits)
            by_edits.setdefault(acting, []).append(pair)
        if len(by_edits) == 1 and all(next(iter(by_edits))):
            return [None]
        masks = []
        for some in by_edits.values():
            mask = torch.zeros(2, half, dtype=torch.bool)
            mask[:, some] = True
            # Half-split order: pair r is the dimensions r and r + d / 2
            masks.append(mask.flatten())
        return masks

    def _changed(
        self, given: Tensor, pairs: TokenPairs, some: Tensor | None, seen: Tensor
    ) -> tuple[Tensor, Bool[Tensor, "any any row key"]]:
        """Distances after the edits of the rotary pairs of a mask, and a mask of changed distances.

        None selects the edits of all rotary pairs. Both results have one row for all heads, or one
        row per head.
        """
        distance, heads = given, self.attention.heads
        for edit in self.edits:
            # An edit has either all rotary pairs of a mask, or none of them.
            if edit.pairs is None or (some is not None and bool(some[[*edit.pairs]].any())):
                distance = edit.applied(distance, pairs, heads)
        if distance.shape[1] > 1:
            distance, given = expand_heads(distance, heads), expand_heads(given, heads)
        return distance, (distance != given) & seen

    def _at(
        self, pairs: TokenPairs, distance: Tensor, changed: Tensor, some: Tensor | None, own: Tensor
    ) -> Tensor:
        """Products of queries and keys at changed distances; all others keep their `own` value."""
        # Keys with unchanged distances from all queries are left out.
        columns = changed.flatten(0, 2).any(0).nonzero()[:, 0]
        distance, changed = distance.expand_as(changed)[..., columns], changed[..., columns]
        at = self._products(pairs.part(slice(None), columns), distance, changed, some)
        found = own.clone()
        found[..., columns] = torch.where(changed, at.to(own.dtype), own[..., columns])
        return found

    def _products(
        self, pairs: TokenPairs, distance: Tensor, changed: Tensor, some: Tensor | None
    ) -> Float[Tensor, "batch head row key"]:
        """Products of queries and keys at their distances; arbitrary for unchanged pairs."""
        queries, heads = pairs.queries, pairs.queries.shape[1]
        queries = queries if some is None else queries * some.to(queries)
        keys = expand_heads(pairs.keys, heads)
        frequencies: Any = of_heads(self.attention.frequencies, heads)
        scaling = self.attention.attention_scaling
        low, high = distance.detach()[changed].aminmax()
        if bool((~changed | (distance == low) | (distance == high)).all()):
            # Keys lack the attention scaling, so queries get its square.
            at_low, at_high = (
                rotate(
                    queries,
                    size.expand_as(queries[..., 0]),
                    frequencies,
                    scaling**2,
                )
                @ keys.mT
                for size in (low, high)
            )
            return torch.where(distance == low, at_low, at_high)
        if (ends := _separated(distance, changed)) is not None:
            at, origin = (expand_heads(each, heads) for each in ends)
            turned = rotate(queries, at, frequencies, scaling)
            return turned @ rotate(keys, origin, frequencies, scaling).mT
        distance = expand_heads(distance, heads)
        rows, columns = changed.flatten(0, 1).any(0).nonzero(as_tuple=True)
        at_once = max(1, _NUMBERS // queries[:, :, 0].numel())
        parts = [
            (
                rotate(queries[:, :, i], distance[..., i, j], frequencies, scaling**2)
                * keys[:, :, j]
            ).sum(-1)
            for i, j in zip(rows.split(at_once), columns.split(at_once), strict=True)
        ]
        found = queries.new_zeros(*queries.shape[:3], keys.shape[2])
        found[:, :, rows, columns] = torch.cat(parts, -1)
        return found

    def _added(
        self, pairs: TokenPairs, positions: Tensor, distance: Tensor
    ) -> Float[Tensor, "batch head row key"]:
        """Biases of the scheme at new distances, computed for keys at exactly these distances."""
        attention = self.attention
        assert attention.position_logits is not None
        prompts, heads, rows, width = pairs.queries.shape
        places = expand_heads(positions, distance.shape[1])[..., None]
        places = places.expand(prompts, *places.shape[1:]).transpose(1, 2).flatten(0, 1)
        distance = distance.expand(prompts, -1, -1, -1).transpose(1, 2).flatten(0, 1)
        # The bias does not depend on contents, so one query per prompt suffices, as a separate row.
        queries = pairs.queries.new_zeros(prompts * rows, heads, 1, width)
        keys = pairs.keys.new_zeros(1, pairs.keys.shape[1], 1, width)
        keys = keys.expand(prompts * rows, -1, distance.shape[-1], -1)
        all_seen = torch.ones(1, 1, 1, distance.shape[-1], dtype=torch.bool, device=queries.device)
        added = attention.position_logits(
            queries, keys, places, places - distance, all_seen, attention.scaling
        )
        added = added.expand(prompts * rows, -1, -1, -1)
        return added[:, :, 0].unflatten(0, (prompts, rows)).transpose(1, 2)


def _separated(
    distance: Float[Tensor, "any any row key"], changed: Bool[Tensor, "any any row key"]
) -> tuple[Tensor, Tensor] | None:
    """Find a_i and b_j with D_ij = a_i - b_j for all changed pairs; None if there is no solution."""
    # The row and the column with the most changed pairs determine a and b.
    row = changed.sum(-1).argmax(-1)[..., None, None]
    column = changed.sum(-2).argmax(-1)[..., None, None]
    of_row = distance.gather(-2, row.expand(-1, -1, 1, distance.shape[-1]))
    of_column = distance.gather(-1, column.expand(-1, -1, distance.shape[-2], 1))
    corner = of_row.gather(-1, column)
    error = (of_column - corner + of_row - distance).masked_fill(~changed, 0.0).abs().amax()
    # Rounding of sums of three numbers of this size
    rounding = 4 * torch.finfo(distance.dtype).eps * distance.abs().amax()
    if bool(error > rounding):
        return None
    return (of_column - corner)[..., 0], -of_row[..., 0, :]
