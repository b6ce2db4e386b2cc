"""Outputs of attention in a pass, and of one query over sliding windows.

    o_s = sum_{j = s .. s + L - 1} softmax_j(w(q, k_j, distance)) v_j

The windows are from Position Generalization, sec. 4.2, fig. 6. The query takes the last place of
every window, so distances are L - 1 .. 0, as with length extension; if positions are learned,
distances are from the query's learned position to the keys'. This module knows nothing about the
choice of queries and windows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder
from repo_interp.models.lasting import called_at
from repo_interp.models.layer_pass import Content
from repo_interp.models.rotation_numbers import rows_of
from repo_interp.positions.assigners import TokenIndex
from repo_interp.positions.logits import cap_logits
from repo_interp.positions.rotary import expand_heads
from repo_interp.positions.sinks import join_sinks, weights_of


def attention_outputs(
    decoder: Decoder,
    receive: Callable[[int, Float[Tensor, "batch token width"]], object],
    layers: Collection[int] | None = None,
) -> AbstractContextManager[None]:
    """Hand the outputs of layers, sum_j w_ij v_j before Wo, to a receiver in every pass.

    Args:
        decoder: Decoder of the model.
        receive: Called with layer and outputs [batch, token, width], heads side by side.
        layers: Numbers of layers; None: all.

    Returns:
        A context manager, inside which this holds.
    """

    def hand_on(attention: RepositionedAttention, attended: Tensor) -> None:
        receive(attention.layer_idx, attended.flatten(2))

    return called_at(decoder, "attended", hand_on, layers)


def attention_values(
    decoder: Decoder, receive: Callable[[int, Float[Tensor, "batch kv_head token d_head"]], object]
) -> AbstractContextManager[None]:
    """Hand the values v_j of all layers to a receiver in every pass.

    Args:
        decoder: Decoder of the model.
        receive: Called with layer and values [batch, kv_head, token, d_head].

    Returns:
        A context manager, inside which this holds.
    """

    def hand_on(attention: RepositionedAttention, values: Tensor) -> None:
        receive(attention.layer_idx, values)

    return called_at(decoder, "values", hand_on)


@dataclass
class LayerTensors:
    """Unrotated queries, keys and values, and positions, of one layer in a pass of one prompt."""

    content: Content | None = None
    positions: Float[Tensor, "1 any token"] | None = None
    key_positions: Float[Tensor, "1 any token"] | None = None
    sinks: Float[Tensor, "head"] | None = None


@contextmanager
def layer_tensors(decoder: Decoder, layer: int) -> Iterator[LayerTensors]:
    """Keep the tensors of a layer's latest pass.

    Args:
        decoder: Decoder of the model.
        layer: Number of the layer.

    Yields:
        The tensors, filled by every pass.
    """
    seen = LayerTensors()

    def keep(attention: RepositionedAttention, attended: Tensor) -> None:
        current = attention.active_pass
        seen.content, seen.positions = current.content, current.positions
        seen.sinks = current.stock_sinks
        seen.key_positions = current.new_key_positions

    with called_at(decoder, "attended", keep, [layer]):
        yield seen


def outputs_over_windows(
    decoder: Decoder,
    layer: int,
    tensors: LayerTensors,
    query: int,
    starts: Sequence[int],
    window: int,
) -> Float[Tensor, "start width"]:
    """Compute the outputs of one query over sliding windows of keys.

    Args:
        decoder: Decoder of the model.
        layer: Number of the layer.
        tensors: Tensors of a pass of that layer.
        query: Token of the query.
        starts: First tokens of the windows.
        window: Number of keys of a window.

    Returns:
        Outputs [start, width], heads side by side.
    """
    (attention,) = decoder.attentions([layer])
    content = tensors.content
    assert content is not None
    heads = content.queries.shape[1]
    # [1, head, 1, d_head]
    asked = content.queries[:, :, query, None]
    # Without an assigner (NoPE, or logits added by distance) places in the window count too.
    learned = not isinstance(attention.assigner, TokenIndex | None)
    index = torch.arange(window, device=asked.device)[None]
    outputs = []
    for start in starts:
        part = slice(start, start + window)
        raw, values = content.keys[:, :, part], content.values[:, :, part]
        # Learned positions stay with their tokens; others count from the window.
        if learned:
            assert tensors.positions is not None and tensors.key_positions is not None
            at, here = tensors.key_positions[:, :, part], tensors.positions[:, :, [query]]
        else:
            at = here = None if tensors.positions is None else index[:, None].to(torch.float32)
            here = None if here is None else here[..., -1:]
        rows = rows_of(attention.frequencies)
        if at is not None and here is not None and rows > at.shape[1]:
            at, here = expand_heads(at, rows), expand_heads(here, rows)
        # `rotate` needs queries and keys; one key is a placeholder, and its result is dropped.
        turned = attention.rotate(asked, raw[:, :, :1], here)[0]
        # Heads that share a key but have different positions rotate it differently.
        keys = (
            expand_heads(raw, at.shape[1]) if at is not None and at.shape[1] > raw.shape[1] else raw
        )
        logits = (
            turned @ expand_heads(attention.rotate(keys, keys, at)[1], heads).mT * attention.scaling
        )
        logits = cap_logits(logits, attention.attn_logit_softcapping)
        seen = torch.ones(1, 1, 1, window, dtype=torch.bool, device=asked.device)
        places = (index[:, -1:], index) if at is None else (here, at)
        given = asked, raw, *places, seen, attention.scaling, values, None
        if attention.position_logits is not None:
            logits = logits + attention.position_logits(*given)
        sinks = tensors.sinks
        if attention.remainder is not None:
            sinks = join_sinks(sinks, attention.remainder(*given))
        outputs.append((weights_of(logits, sinks) @ expand_heads(values, heads))[0, :, 0].flatten())
    return torch.stack(outputs)
