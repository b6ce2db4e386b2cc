"""Replace the output of heads by zero or a mean inside a `with` block.

The output before the output projection:

    o_h = sum_j w_ij v_j   <-   0, or m_h      at `hook_z`; all other heads of the layer keep theirs

If all heads of a layer are zero, the layer writes only the bias of its output projection. Their
attention is still computed, so measures see it. With `pairs`, rotary pairs of a head's queries and
keys are removed instead, before rotation:

    q_r, k_r   <-   0, or their means       at `hook_q`, `hook_k`: pair r is the dimensions r, r + d/2

A pair with a query of 0 adds nothing to a logit. Keys, which other heads may share, therefore stay
unless `means` are given. This module knows no task and no measure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.interventions.frequencies import require_rotation
from repo_interp.interventions.positions import token_ids
from repo_interp.interventions.replacing import heads_by_layer
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.capture import decode
from repo_interp.models.decoder import Decoder, as_decoder
from repo_interp.models.lasting import called_at, intervention, model_edit
from repo_interp.values import TokensOrNone, checked

HeadMeans = Mapping[int, Float[Tensor, "head d_head"]]
"""By layer, the mean output of every head."""
PairMeans = Mapping[int, tuple[Float[Tensor, "head d_head"], Float[Tensor, "kv_head d_head"]]]
"""By layer, the means of queries and of keys before rotation."""


@model_edit
def ablate(
    model: nn.Module,
    heads: Sequence[tuple[int, int]] | tuple[int, int] = (),
    means: HeadMeans | PairMeans | None = None,
    *,
    sets: Sequence[Sequence[tuple[int, int]]] | None = None,
    pairs: Sequence[int] | None = None,
) -> Iterator[None]:
    """Remove the output of heads, or rotary pairs of their queries and keys, inside a `with` block.

        with ri.ablate(bridge, [(0, 1), (2, 3)]):
            logits, cache = bridge.run_with_cache(tokens)

    Args:
        model: Repositioned model or bridge.
        heads: (layer, head) pairs, one or several.
        means: Replacements: `ri.head_means(bridge, prompts)`, or, with `pairs`,
            `query_key_means(model, tokens)`; None: zero.
        sets: Instead of `heads`, the heads of each prompt of the batch.
        pairs: Indices of rotary pairs, 0 the fastest; None: outputs are removed.

    Yields:
        None.

    Raises:
        InputError: The model lacks heads or pairs, a layer does not rotate, the means have another
            shape, or means of keys are given for heads that share keys with heads not named.
    """
    decoder = as_decoder(model)
    if pairs is not None and sets is not None:
        raise InputError("pairs of heads are the same in all prompts; leave sets out")
    given = [heads] if sets is None else sets
    # An empty set leaves its prompt unchanged, but empty `heads` are a mistake.
    by_prompt = [
        {}
        if sets is not None and hasattr(some, "__len__") and not len(some)
        else heads_by_layer(decoder, some)
        for some in given
    ]
    if pairs is not None:
        written = _pairs_removed(decoder, by_prompt[0], pairs, means)
    else:
        chosen = {layer for some in by_prompt for layer in some}
        written = {
            ("attended", attention.layer_idx): _outputs_removed(
                attention, [some.get(attention.layer_idx, frozenset()) for some in by_prompt], means
            )
            for attention in decoder.attentions(chosen)
        }

    def put(site: str, attention: RepositionedAttention, tensor: Tensor) -> Tensor:
        mask, value = written[site, attention.layer_idx]
        # Known only in the pass: in some families values and queries differ in width.
        if value.ndim and value.shape[-1] != tensor.shape[-1]:
            raise InputError(
                f"means of layer {attention.layer_idx} have {value.shape[-1]} numbers per "
                f"head, which writes {tensor.shape[-1]}; "
                "give what ri.head_means(bridge, prompts) returns for this model"
            )
        return torch.where(mask.to(tensor.device), value.to(tensor), tensor)

    with intervention(decoder) as undo:
        for site, layer in written:
            undo.enter_context(called_at(decoder, site, partial(put, site), [layer]))
        yield


def _outputs_removed(
    attention: RepositionedAttention,
    by_prompt: Sequence[Collection[int]],
    means: HeadMeans | PairMeans | None,
) -> tuple[Tensor, Tensor]:
    """Mask of the chosen heads of a layer [prompt, 1, head, 1], and their new outputs."""
    count, layer = attention.heads, attention.layer_idx
    # One row for all prompts, or one per prompt with `sets`
    mask = torch.tensor([[[[head in some] for head in range(count)]] for some in by_prompt])
    if means is None:
        return mask, torch.zeros(())
    value = means.get(layer) if isinstance(means, Mapping) else None
    if (
        not isinstance(value, Tensor)
        or value.ndim != 2
        or len(value) != count
        # Only the chosen heads: means of a part of a model may be NaN elsewhere
        or not bool(value[mask.any(0).flatten()].isfinite().all())
    ):
        raise InputError(
            f"means lack finite ones of the {count} heads of layer {layer}; give what "
            "ri.head_means(bridge, prompts) returns"
        )
    return mask, value


@torch.no_grad()
def query_key_means(
    model: nn.Module, tokens: Int[Tensor, "prompt token"] | Sequence[Sequence[int]]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Average queries and keys over tokens and prompts, for `ablate` with `pairs`.

    Args:
        model: Repositioned model or bridge.
        tokens: Ids of prompts of one length.

    Returns:
        By layer, means of queries [head, d_head] and of keys [kv_head, d_head] before rotation, in
        half-split order.

    Raises:
        InputError: `tokens` is not a table of token ids of the model.
    """
    decoder = as_decoder(model)
    given = token_ids(decoder, tokens)
    means: dict[str, dict[int, Tensor]] = {"queries": {}, "keys": {}}

    def record(site: str, attention: RepositionedAttention, vectors: Tensor) -> None:
        # [head, d_head], over [prompt, token]
        means[site][attention.layer_idx] = vectors.double().mean((0, 2))

    with ExitStack() as stack:
        for site in means:
            stack.enter_context(called_at(decoder, site, partial(record, site)))
        decode(decoder, given)
    return {layer: (mean, means["keys"][layer]) for layer, mean in means["queries"].items()}


def _pairs_removed(
    decoder: Decoder, chosen: Mapping[int, frozenset[int]], pairs: Any, means: Any
) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    """By site and layer, a mask of chosen entries [head, 1, d_head], and their new values."""
    removed = {}
    some = list(pairs) if isinstance(pairs, range) else pairs
    pairs = checked(some, tuple[TokensOrNone, ...], "pairs")
    for attention in decoder.attentions(chosen):
        require_rotation(attention)
        layer, half = attention.layer_idx, attention.d_head // 2
        if not pairs or max(pairs) >= half:
            raise InputError(f"pairs of layer {layer} are 0 to {half - 1}; got {list(pairs)}")
        group = attention.heads // attention.kv_heads
        if means is not None and any(
            # A mean key replaces the key of all heads that share it, so all of these must be
            # chosen.
            len(chosen[layer] & {*range(first, first + group)}) not in (0, group)
            for first in range(0, attention.heads, group)
        ):
            raise InputError(
                f"heads of layer {layer} share keys, {group} each, and some of them are not "
                "named; name all of them, or leave the means out"
            )
        # Without means the query is 0, so the keys need no change.
        sites = {"queries": attention.heads, "keys": attention.kv_heads}
        for place, (site, count) in enumerate([*sites.items()][: 1 if means is None else 2]):
            # Rows of queries are heads; rows of keys are key-value heads.
            rows = sorted({head * count // attention.heads for head in chosen[layer]})
            mask = torch.zeros(count, 1, 2 * half, dtype=torch.bool)
            mask[
                # Half-split order: pair r is the dimensions r and r + d / 2
                torch.tensor(rows)[:, None], 0, torch.tensor([*pairs, *(r + half for r in pairs)])
            ] = True
            value = torch.zeros(count, 2 * half) if means is None else _mean_of(means, layer, place)
            if value.shape != (count, 2 * half):
                raise InputError(
                    f"means of layer {layer} are no finite {[count, 2 * half]}; give "
                    "query_key_means(model, tokens) of this model"
                )
            removed[site, layer] = mask, value[:, None]
    return removed


def _mean_of(means: Any, layer: int, place: int) -> Tensor:
    """Means of queries (0) or keys (1) of a layer; an empty tensor if they are missing."""
    try:
        value = torch.as_tensor(means[layer][place])
    except (TypeError, ValueError, RuntimeError, LookupError):
        return torch.empty(0)
    return value if bool(value.isfinite().all()) else torch.empty(0)
