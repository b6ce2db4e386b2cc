"""Remove the direct path from heads to queries, keys, values or positions of heads of later layers.

    q, k, v, z of a receiver   <-   those that it computes of x - d
    x    the residual stream that enters the receiver's layer
    d    its part from the senders' outputs: r N(w) - r N(w'), w' attention's output without them

N is the norm of attention's output and r its factor, in families that have them. All other readers
of the residual stream, and other heads of the receiver's layer, see x: paths through layers in
between stay. Queries, keys and values of x - d come from a second run of the layer, up to where it
attends. TransformerLens' `get_act_patch_direct_path` needs inputs of heads one by one, which
repositioned attention does not offer, and takes no keys and values that heads share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from repo_interp.errors import InputError, quoted
from repo_interp.interventions.replacing import heads_by_layer
from repo_interp.models.attention import CACHES, RepositionedAttention
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import called_at, intervention, model_edit
from repo_interp.models.recomputed import backward_pass
from repo_interp.plugins.paths.direct_path import added_outputs, inner

SITES = ("queries", "keys", "values", "positions")
"""Tensors of the receiver that a path may lead into."""
Pairs = Sequence[tuple[int, int]] | tuple[int, int]


class _Recorded(Exception):
    """Ends the second run of a layer."""


@model_edit
def ablate_paths(
    model: nn.Module,
    senders: Pairs,
    receivers: Pairs,
    into: str | Sequence[str] = SITES[:3],
    outputs: Mapping[int, Float[Tensor, "*any head d_head"]] | None = None,
) -> Iterator[None]:
    """Remove, or patch, the direct path from heads into heads of later layers.

        with iv.ablate_paths(bridge, (0, 1), [(2, 0), (2, 1)], into="keys"):
            logits = bridge(tokens)

    Args:
        model: Repositioned model or bridge.
        senders: (layer, head) pairs whose outputs are removed.
        receivers: (layer, head) pairs of later layers, which read them no more.
        into: One or several of "queries", "keys", "values", and "positions" where these are
            learned.
        outputs: By layer, outputs of heads that the receivers read in place of the senders':
            `ri.head_means(bridge, prompts)`, or, to patch, `hook_z` of another prompt
            [prompt, token, head, d_head]; None: zeros.

    Yields:
        None.

    Raises:
        InputError: The model lacks heads, a sender is in no earlier layer than a receiver, a
            family's attention adds no outputs of heads to the residual stream, receivers share
            keys, values or positions with a head that is not named, a layer learns no positions, or
            outputs have another shape; or, in backward(), layers are computed again one by one.
    """
    decoder = as_decoder(model)
    sites = (into,) if isinstance(into, str) else tuple(into)
    if not sites or any(site not in SITES for site in sites):
        raise InputError(f"paths lead into some of {', '.join(SITES)}; got {quoted(into)}")
    sending, receiving = heads_by_layer(decoder, senders), heads_by_layer(decoder, receivers)
    if max(sending) >= min(receiving):
        raise InputError(
            f"a path leads from a layer to a later one; got one from layer {max(sending)} to layer "
            f"{min(receiving)}"
        )
    added = added_outputs(decoder)
    for layer in sending:
        if layer not in added:
            raise InputError(
                f"outputs of the heads of layer {layer} are not added to the residual stream one "
                "by one in this family, so no direct path begins there"
            )
        if outputs is not None and not isinstance(outputs.get(layer), Tensor):
            raise InputError(f"outputs lack layer {layer}, whose heads were to be patched")
    for attention in decoder.attentions(receiving):
        counts = {"queries": attention.heads, "keys": attention.kv_heads}
        for site in sites:
            if site != "positions":
                # For its refusal, before any pass: the mask itself is made in `put`
                _mask(attention, receiving, counts.get(site, attention.kv_heads))
            elif not attention.learned:
                raise InputError(
                    f"layer {attention.layer_idx} ({attention.scheme}) learns no positions, so no "
                    "path leads into them"
                )
    attended: dict[int, Tensor] = {}
    removed: dict[int, tuple[int | None, Tensor]] = {}
    recorded: dict[tuple[int, str], Tensor] = {}
    running: set[int] = set()

    def keep(attention: RepositionedAttention, tensor: Tensor) -> None:
        attended[attention.layer_idx] = tensor

    def send(
        attention: RepositionedAttention, projection: nn.Module, arguments: tuple, wrote: Tensor
    ) -> None:
        layer, plain = attention.layer_idx, attended.pop(attention.layer_idx)
        # [prompt, token, head, d_head]
        given, heads = arguments[0].reshape(plain.shape), sorted(sending[layer])
        without = given.clone()
        without[:, :, heads] = 0
        if outputs is not None:
            # Some families gate outputs before their projection (Qwen3-Next): the gate is read off,
            # and replaced outputs pass it too
            gate = torch.where(plain == 0, 1.0, given / plain)
            without[:, :, heads] = (gate * _outputs(outputs[layer], plain, layer))[:, :, heads]
        # `inner(...).forward`, so that this call does not come to this hook again
        both = [wrote, inner(projection).forward(without.reshape(arguments[0].shape))]
        norm, factor = added[layer]
        both = both if norm is None else [inner(norm).forward(written) for written in both]
        removed[layer] = backward_pass(), factor * (both[0] - both[1])

    def enter(
        attention: RepositionedAttention, block: nn.Module, arguments: tuple, keywords: dict
    ) -> None:
        layer = attention.layer_idx
        # The second run of the block below comes here again
        if layer in running:
            return
        given = {} if arguments else {"hidden_states": keywords["hidden_states"]}
        hidden = arguments[0] if arguments else given["hidden_states"]
        # All senders are in earlier layers, which this pass has run
        if any(computed != backward_pass() for computed, _ in removed.values()):
            raise _computed_alone(layer)
        changed = hidden - sum(part.reshape(hidden.shape) for _, part in removed.values())
        # A cache would get the new keys twice.
        further = keywords | {name: None for name in CACHES if name in keywords}
        further |= {"hidden_states": changed} if given else {}
        running.add(layer)
        try:
            block(*((changed, *arguments[1:]) if arguments else ()), **further)
        except _Recorded:
            pass
        finally:
            running.discard(layer)

    def put(site: str, attention: RepositionedAttention, tensor: Tensor) -> Tensor | None:
        layer = attention.layer_idx
        if layer not in running:
            # Queries are hooked in any case, since they end the second run
            if site not in sites:
                return None
            mask = _mask(attention, receiving, tensor.shape[1]).to(tensor.device)
            mask = mask.view(-1, *(1,) * (tensor.ndim - 2))
            # A checkpoint of transformers runs the block without its hooks
            if (layer, site) not in recorded:
                raise _computed_alone(layer)
            return torch.where(mask, recorded.pop((layer, site)), tensor)
        recorded[layer, site] = tensor
        # A layer assigns positions, then makes keys and values, and queries after those
        if site == "queries":  # the last of them
            raise _Recorded
        return None

    blocks = decoder.blocks
    with intervention(decoder) as undo:
        undo.enter_context(called_at(decoder, "attended", keep, sending))
        for attention in decoder.attentions(sending):
            hook: Any = partial(send, attention)
            projection = attention.output_projection
            assert projection is not None  # `added_outputs` has seen it
            undo.callback(projection.register_forward_hook(hook).remove)
        for attention in decoder.attentions(receiving):
            # The block, not the module: its norm comes first, and so it reads the residual stream
            block = next(part for part in blocks if attention.module in [*part.modules()])
            hook = partial(enter, attention)
            undo.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for site in dict.fromkeys((*sites, "queries")):
            undo.enter_context(called_at(decoder, site, partial(put, site), receiving))
        yield


def _computed_alone(layer: int) -> InputError:
    """For a layer that runs again without the layers in which paths begin."""
    return InputError(
        f"backward() computes layer {layer} again without the layers before it, in which removed "
        "paths begin (gradient checkpointing); call model.gradient_checkpointing_disable() before"
    )


def _mask(
    attention: RepositionedAttention, receiving: Mapping[int, Collection[int]], count: int
) -> Tensor:
    """Which of `count` rows the receivers of a layer read, which no other head may share."""
    chosen, group = receiving[attention.layer_idx], attention.heads // count
    rows = {head // group for head in chosen}
    if len(rows) * group != len(chosen):
        raise InputError(
            f"heads of layer {attention.layer_idx} share their keys, values or positions, {group} "
            "each, and some of them are not named; name all of them, or lead the path into queries"
        )
    return torch.tensor([row in rows for row in range(count)])


def _outputs(value: Tensor, plain: Tensor, layer: int) -> Tensor:
    """Outputs of heads that are patched, in the shape of those of the pass."""
    try:
        if value.ndim == 3:  # heads side by side
            value = value.reshape(*value.shape[:2], *plain.shape[2:])
        return value.to(plain).expand_as(plain)
    except RuntimeError:
        raise InputError(
            f"outputs of layer {layer} are {list(value.shape)}; wanted [head, d_head] or [prompt, "
            f"token, head, d_head] of {list(plain.shape)}"
        ) from None
