"""A forward pass becomes a stream of `AttentionInputs`, one layer at a time.

`observing` hands them on inside a pass; here the pass is made, with or without it, up to the last
hidden states. `next_tokens` makes logits of these.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs
from repo_interp.models.decoder import Decoder
from repo_interp.models.feed_forward import in_blocks
from repo_interp.models.lasting import at_rest
from repo_interp.models.layer_probe import differs_by_pair, keys_apart
from repo_interp.models.observing import entering, observing, require_finite
from repo_interp.models.padding import known_padding
from repo_interp.models.tables import position_table, positions_in


@torch.no_grad()
def capture(
    decoder: Decoder,
    tokens: Int[Tensor, "prompt token"],
    valid: Bool[Tensor, "prompt token"],
    prompts: Int[Tensor, "prompt"],
    receive: Callable[[AttentionInputs], None],
    layers: Collection[int] | None = None,
    position_ids: Int[Tensor, "*axis prompt token"] | None = None,
) -> None:
    """Run tokens through a model and call a receiver with the attention inputs of its layers.

    The pass ends inside the last of `layers`, before it attends. Queries, keys and positions arrive in float32 or
    wider.

    Args:
        decoder: Decoder of the model.
        tokens: Token ids [prompt, token].
        valid: Tokens that are no padding [prompt, token]; padding may be on either side.
        prompts: Numbers of the prompts [prompt].
        receive: Called inside the pass, once a layer.
        layers: Layers to observe; None: all.
        position_ids: Positions of the tokens; None: the token index.

    Raises:
        NotFinite: A value is NaN or infinite; the message names layer and prompt.
    """

    def receive_finite(inputs: AttentionInputs) -> None:
        require_finite(inputs)
        receive(replace(inputs, tokens=tokens))

    with observing(decoder, valid, prompts, receive_finite, layers, position_ids):
        last = None if layers is None else max(layers, default=None)
        decode(decoder, tokens, valid, last, position_ids)


def layers_by_pair(decoder: Decoder) -> list[int]:
    """List the layers that give a token several positions: its rotary pairs, or query and key.

    Args:
        decoder: Decoder of the model.

    Returns:
        Numbers of layers.
    """
    return [
        layer
        for layer, attention in decoder.by_layer.items()
        if differs_by_pair(attention) or keys_apart(attention)
    ]


class _EndOfPass(Exception):
    """Ends a pass before its last layer is computed."""


def decode(
    decoder: Decoder,
    tokens: Int[Tensor, "prompt token"],
    valid: Bool[Tensor, "prompt token"] | None = None,
    last_layer: int | None = None,
    position_ids: Int[Tensor, "*axis prompt token"] | None = None,
    attention_mask: Int[Tensor, "prompt token"] | None = None,
) -> Tensor:
    """Return last hidden states: a pass without the unembedding, the largest array at long prompts.

    Feed-forward parts work in blocks of tokens.

    Args:
        decoder: Decoder of the model.
        tokens: Token ids [prompt, token].
        valid: Tokens that are no padding [prompt, token]; None: all.
        last_layer: The pass ends inside this layer, once its queries, keys and values were
            observed; None: after the final norm.
        position_ids: Positions of the tokens [prompt, token]; None: the token index.
        attention_mask: 1 for tokens that are no padding; None: none is given where padding is on
            the right, and transformers takes jumps of `position_ids` for documents.

    Returns:
        Hidden states [prompt, token, width]: the last ones, or the inputs of `last_layer`.

    Raises:
        InputError: Prompts are padded, or several have position ids, and frequencies depend on the
            length of the pass; or the decoder takes no such position ids.
    """
    valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
    if position_ids is not None:
        _require_taken(decoder, position_ids)
    with at_rest(decoder), in_blocks(decoder, tokens.numel()), known_padding(valid):
        return _run_stack(decoder, tokens, valid, last_layer, position_ids, attention_mask)


def _require_taken(decoder: Decoder, position_ids: Tensor) -> None:
    """Raise InputError for position ids that a decoder ignores or has no vectors for."""
    stack = decoder.stack
    if position_ids.ndim == 3 and all(layer.rotation.axes is None for layer in decoder.layers):
        raise InputError(
            f"{type(stack).__name__} takes one position id per token, and a prompt has "
            "three axes (an image's)"
        )
    if "position_ids" not in inspect.signature(stack.forward).parameters:
        raise InputError(
            f"{type(stack).__name__} takes no position ids; leave them out of the prompts"
        )
    table = position_table(stack)
    if table is not None and int(position_ids.max()) >= positions_in(table):
        raise InputError(
            f"a prompt has position id {int(position_ids.max())}; the table of the model has "
            f"positions 0 to {positions_in(table) - 1}"
        )
    if decoder.length_matters and position_ids.shape[-2] > 1:
        raise InputError(
            "frequencies of this model depend on the largest position of a pass; give prompts "
            "with position ids one by one (batch_size=1)"
        )


def _run_stack(
    decoder: Decoder,
    tokens: Tensor,
    valid: Tensor,
    last_layer: int | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> Tensor:
    # One question to the device
    whole, starts_early = torch.stack([valid.all(), valid[:, 0].all()]).tolist()
    if not whole and decoder.length_matters:
        raise InputError(
            "frequencies of this model depend on the length of a pass; give prompts of equal "
            "length to one pass"
        )
    starts_late = not starts_early
    # Right padding needs no mask, since no token sees a later one: then the fused causal kernel
    # runs.
    mask = valid.to(torch.long) if starts_late else attention_mask
    if position_ids is None and starts_late:
        position_ids = (valid.cumsum(1) - 1).clamp_min(0)
    inputs = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": position_ids,
        "use_cache": False,
    }
    inputs = {name: value for name, value in inputs.items() if value is not None}
    if last_layer is None:
        return decoder.stack(**inputs).last_hidden_state
    observers = decoder.by_layer[last_layer].observers

    def finish(*observed: Any) -> None:
        raise _EndOfPass

    # An exception ends the pass: the rest would cost time and memory.
    observers.append(finish)
    entered = deque[Tensor](maxlen=1)
    with entering(decoder, entered.append):
        try:
            decoder.stack(**inputs)
        except _EndOfPass:
            return entered[0]
        finally:
            observers.remove(finish)
    raise AssertionError(f"the pass did not reach the attention of layer {last_layer}")
