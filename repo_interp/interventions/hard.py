"""Hard attention inside a context (CoPE, app. C): a query reads the key with the largest logit.

    w_ij  <-  1 for j = argmax_j W_ij, the first of ties, else 0        softmax(W_i / tau) as tau -> 0

Since the argmax has no gradient, gradients are those of the softmax (straight-through), so models
can be trained with hard attention. Gates of CoPE count as before. Measures see the logits and the
soft weights. A sink is never read. This module knows no task and no measure.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from repo_interp.interventions.replacing import Layers, choose_heads
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import called_at, intervention, model_edit


@model_edit
def hard_attention(model: nn.Module, layers: Layers = None) -> Iterator[None]:
    """Make attention hard inside a `with` block.

    Args:
        model: Repositioned model or bridge.
        layers: One layer or several; None: all.

    Yields:
        None.

    Raises:
        InputError: The model lacks a layer.
    """
    decoder = as_decoder(model)
    chosen = choose_heads(decoder, None, layers, decoder.by_layer)

    def harden(attention: RepositionedAttention, pattern: Tensor) -> Tensor:
        hard = torch.zeros_like(pattern).scatter(-1, pattern.argmax(-1, keepdim=True), 1)
        # The value is `hard`, but the derivative is that of `pattern` (straight-through)
        return hard + pattern - pattern.detach()

    with intervention(decoder), called_at(decoder, "pattern", harden, chosen):
        yield
