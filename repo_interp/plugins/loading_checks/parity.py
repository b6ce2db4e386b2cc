"""Whether a model attends as measures see it.

    max |o_i - sum_j softmax_j(W_ij) v_j| / max |sum|        by layer, over a few tokens

W are `AttentionInputs.logits`: scale, window, soft cap, positions, added logits.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from repo_interp.errors import InputError
from repo_interp.inputs import AttentionInputs
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import Decoder
from repo_interp.models.lasting import at_rest, called_at
from repo_interp.models.observing import observing, require_finite
from repo_interp.positions.logits import exact
from repo_interp.positions.rotary import expand_heads

_TOKENS = 12
_TOLERANCE, _TOLERANCE_HALF = 5e-3, 0.5
"""Largest difference of outputs over the largest output: rounding of large logits stays below,
another window or scale does not.
"""


@torch.no_grad()
def parity_errors(decoder: Decoder, tokens: Int[Tensor, "1 token"]) -> list[float]:
    """Compare attention's outputs with outputs recomputed from the captured inputs.

    Costs a forward pass and maps of these tokens, one layer at a time.

    Args:
        decoder: Decoder of the model.
        tokens: Token ids [1, token].

    Returns:
        By layer, the largest difference over the largest output.
    """
    values: dict[int, Tensor] = {}
    expected: dict[int, Tensor] = {}
    errors: dict[int, float] = {}

    def receive_inputs(inputs: AttentionInputs) -> None:
        require_finite(inputs)
        inputs = replace(inputs, tokens=tokens)
        # The whole map, for a few tokens of one layer.
        # [prompt, head, row, key]
        pattern = inputs.pattern(torch.arange(tokens.shape[1], device=tokens.device))
        # `pop` frees a layer's tensors at once: of all layers they would be as large as a cache.
        of_heads = expand_heads(exact(values.pop(inputs.layer)), inputs.heads)
        expected[inputs.layer] = (pattern.to(of_heads.dtype) @ of_heads).transpose(1, 2).flatten(2)

    def receive_values(attention: RepositionedAttention, of_layer: Tensor) -> None:
        values[attention.layer_idx] = of_layer

    def receive_outputs(attention: RepositionedAttention, attended: Tensor) -> None:
        # A layer reports values, then inputs, then outputs, so both sides are available now.
        remade = expected.pop(attention.layer_idx)
        errors[attention.layer_idx] = float(
            (attended.flatten(2) - remade).abs().amax()
            / remade.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
        )

    valid, prompts = torch.ones_like(tokens, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    with (
        called_at(decoder, "values", receive_values),
        called_at(decoder, "attended", receive_outputs),
        observing(decoder, valid, prompts, receive_inputs),
        at_rest(decoder),
    ):
        # The whole model: a caller may want the logits of this pass
        decoder.owner(input_ids=tokens, use_cache=False)
    return [errors[layer] for layer in sorted(errors)]


def require_parity(decoder: Decoder) -> None:
    """Refuse a model whose attention differs from the inputs of measures, tested on a few tokens.

    Windows longer than 64 tokens are not tested.

    Args:
        decoder: Decoder of the model.

    Raises:
        InputError: Outputs of a layer differ from the outputs recomputed from its captured inputs.
    """
    layers = decoder.layers
    # A window is confirmed only by prompts that are longer.
    windows = [
        layer.sliding_window
        for layer in layers
        if layer.sliding_window is not None and layer.sliding_window <= 64
    ]
    # A decoder with a learned table cannot take more tokens than that holds.
    count = min(
        max([_TOKENS, *(window + 4 for window in windows)]), decoder.longest_prompt or sys.maxsize
    )
    weight = decoder.weight
    # A stride by a prime spreads the tokens over the vocabulary.
    tokens = torch.arange(count, device=decoder.device)[None] * 7919 % layers[0].config.vocab_size
    tolerance = _TOLERANCE if torch.finfo(weight.dtype).bits >= 32 else _TOLERANCE_HALF
    for layer, error in zip(layers, parity_errors(decoder, tokens), strict=True):
        # So written, NaN is refused too.
        if not error <= tolerance:
            raise InputError(
                f"layer {layer.layer_idx} ({layer.scheme}) attends differently from its captured "
                "queries, keys and positions "
                f"(outputs differ by {error:.2g} of their size): measures would be wrong; "
                "report it with the checkpoint's config.json"
            )
