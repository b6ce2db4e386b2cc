"""Hide keys from queries of chosen heads inside a `with` block.

    softmax_j over { j : seen_ij }   <-   softmax_j over { j : seen_ij and not hidden_ij }

Keys that the model hides stay hidden. Other hidden keys are treated like masked keys of the model:
gates of CoPE do not count them, and distances of ALiBi and FIRE stay. Positions do not change,
also in schemes whose f_phi remembers earlier tokens. Hidden keys stay in a cache, since a later
query may see them (a `StreamingCache` drops keys that no query sees). Measures take masks that are
the same for all heads of a layer, and refuse others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from repo_interp.errors import InputError, one_line, quoted
from repo_interp.interventions.replacing import Heads, Layers, choose_heads
from repo_interp.interventions.token_pairs import TokenPairs, chosen_rows, token_pairs
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import intervention, model_edit, patch_attribute
from repo_interp.models.layer_pass import Content
from repo_interp.models.masks import CallMask, visible

HiddenKeys = Callable[[TokenPairs], Bool[Tensor, "any any row key"]]
"""Mask of hidden keys by query, from pairs of tokens; axes of length 1 broadcast."""
PAIRS = 1 << 24
"""Most pairs of tokens per call of a function, in whole rows."""


@model_edit
def hidden_keys(
    model: nn.Module,
    hidden: HiddenKeys | Bool[Tensor, "*any row key"],
    heads: Heads = None,
    *,
    layers: Layers = None,
) -> Iterator[None]:
    """Hide keys from queries inside a `with` block, also with a cache and during generation.

        with iv.hidden_keys(model, lambda pair: (pair.distance >= 128) & (pair.key >= 4)):
            model.generate(**tokens, max_new_tokens=50)  # StreamingLLM: a window and four sinks

    Nested contexts hide the union of their keys. The function gets long prompts in blocks of
    queries, so it may compare keys with each other, but not queries.

    Args:
        model: Repositioned model or bridge.
        hidden: Function of `TokenPairs` that returns True for hidden keys [prompt, head, row, key],
            where axes of length 1 broadcast; or an array of booleans over the tokens of the
            prompts, [query, key], [head, query, key] or [prompt, head, query, key].
        heads: (layer, head) pairs, one or several; None: all heads of the layers.
        layers: One layer or several, instead of `heads`; None: all.

    Yields:
        None.

    Raises:
        InputError: The model lacks the heads or layers, or `hidden` is not a function or array of
            booleans; or, in the pass, it has another shape, all keys of a query are hidden, or the
            implementation of attention does not support the mask.
    """
    decoder = as_decoder(model)
    function = hidden if callable(hidden) else _by_number(hidden)
    chosen = choose_heads(decoder, heads, layers, decoder.by_layer)
    with intervention(decoder) as undo:
        for attention in decoder.attentions(chosen):
            hide = partial(_hide, attention, function, chosen[attention.layer_idx])
            patch_attribute(
                undo,
                attention,
                "mask_of",
                lambda present, hide=hide: (
                    lambda call, content: hide(present(call, content), content)
                ),
            )
        yield


def _hide(
    attention: RepositionedAttention,
    function: HiddenKeys,
    chosen: frozenset[int],
    call: CallMask,
    content: Content,
) -> CallMask:
    """Return the mask of a call with the hidden keys removed."""
    implementation = attention.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise InputError(
            f"{implementation} takes no mask of single keys; choose "
            "model.set_attn_implementation('sdpa') to hide some"
        )
    rows, keys = content.queries.shape[2], content.keys.shape[2]
    device = content.queries.device
    seen = visible(rows, keys, call.mask, device)
    pairs, at_once = token_pairs(attention, content), max(1, PAIRS // keys)
    hidden = torch.cat(
        [
            _checked(attention, function, pairs.part(slice(start, start + at_once)))
            for start in range(0, rows, at_once)
        ],
        dim=2,
    )
    only = chosen_rows(attention.heads, chosen, device)
    hidden = hidden if only is None else hidden & only
    left = seen & ~hidden
    empty = seen.any(-1) & ~left.any(-1)
    if bool(empty.any()):
        prompt, head, row = empty.nonzero()[0].tolist()
        token = int(pairs.query.expand(len(empty), -1, -1, -1)[prompt, 0, row])
        of_head = f" in head {head}" if empty.shape[1] > 1 else ""
        raise InputError(
            f"every key is hidden from token {token} of prompt {prompt} in layer "
            f"{attention.layer_idx}{of_head}; leave it one, such as its own"
        )
    others = seen & hidden
    return CallMask(left, call.bias, others if call.hidden is None else call.hidden | others)


def _checked(
    attention: RepositionedAttention, function: HiddenKeys, pairs: TokenPairs
) -> Bool[Tensor, "any any row key"]:
    """Return the mask of a function for pairs, with four axes; rows and keys are not broadcast."""
    prompts, _, rows, _ = pairs.queries.shape
    shape = prompts, attention.heads, rows, pairs.keys.shape[2]
    found = function(pairs)
    if not isinstance(found, Tensor) or found.dtype != torch.bool:
        kind = str(found.dtype) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(
            f"a function of hidden keys returns true and false [prompt, head, row, key]; got {kind}"
        )
    sizes = (*(1,) * (4 - found.ndim), *found.shape)
    if len(sizes) != 4 or any(
        size not in (1, wanted) for size, wanted in zip(sizes, shape, strict=False)
    ):
        raise InputError(
            f"hidden keys of layer {attention.layer_idx} are {list(found.shape)}; wanted an array "
            f"that broadcasts to {list(shape)} [prompt, head, row, key]"
        )
    return found.reshape(sizes).expand(-1, -1, rows, shape[3])


def _by_number(given: Any) -> HiddenKeys:
    """Make a function that looks up pairs in an array over the tokens of the prompts."""
    try:
        table = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"hidden keys are no array: {one_line(error)}") from None
    if table.dtype != torch.bool or not 2 <= table.ndim <= 4 or not table.numel():
        raise InputError(
            "hidden keys are a function of TokenPairs, or true and false [query, key], "
            f"[head, query, key] or [prompt, head, query, key]; got {quoted(given)}"
        )
    table = table.reshape(*(1,) * (4 - table.ndim), *table.shape)

    def look_up(pairs: TokenPairs) -> Tensor:
        prompts, heads = pairs.queries.shape[:2]
        # An axis of length 1 holds for all.
        places = [torch.arange(size)[:, None, None, None] for size in (prompts, heads)]
        places = [places[0], places[1].transpose(0, 1), pairs.query, pairs.key]
        names = ("prompts", "heads", "queries", "keys")
        for axis, (name, place) in enumerate(zip(names, places, strict=True)):
            size, largest = table.shape[axis], int(place.max()) + 1
            if size == 1:
                places[axis] = torch.zeros(1, dtype=torch.long)
            # A shorter prompt uses a part of the tokens of an array, but always all heads.
            elif largest > size or (largest < size and axis < 2):
                raise InputError(
                    f"hidden keys of {size} {name} came to {largest}; give those of all, or a "
                    "function of TokenPairs"
                )
        # Padding on the left has negative numbers; no query sees it.
        return table[tuple(place.clamp_min(0).cpu() for place in places)].to(pairs.query.device)

    return look_up
