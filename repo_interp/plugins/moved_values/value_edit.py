"""Scale the values of tokens inside a context: v_j <- factor v_j.

The hook is `hook_v`, so the factor applies to all heads that share a value. Attention weights do
not change: with factor 0 a key still gets attention, but adds nothing to the output (a sink without
its value). With a cache, values that were cached before are not changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from repo_interp.errors import InputError
from repo_interp.interventions.replacing import (
    Heads,
    Layers,
    Tokens,
    choose_heads,
    token_table,
    tokens_at,
)
from repo_interp.models.attention import RepositionedAttention
from repo_interp.models.decoder import as_decoder
from repo_interp.models.lasting import called_at, intervention, model_edit
from repo_interp.values import Finite, checked


@model_edit
def scaled_values(
    model: nn.Module,
    factor: float,
    heads: Heads = None,
    *,
    layers: Layers = None,
    tokens: Tokens = None,
) -> Iterator[None]:
    """Multiply values by a factor inside a `with` block.

        with iv.scaled_values(model, 0.0, tokens=[0]):  # the first token moves nothing

    Args:
        model: Repositioned model or bridge.
        factor: Any finite number; 0: the values are zero.
        heads: (layer, head) pairs, one or several; None: all heads of the layers. Heads that share
            a value are named together.
        layers: One layer or several, instead of `heads`; None: all.
        tokens: Indices in the prompt, for all prompts or one sequence per prompt; None: all.

    Yields:
        None.

    Raises:
        InputError: The factor is not a finite number, the model lacks the heads or layers, or a
            head shares its values with one that is not named.
    """
    decoder = as_decoder(model)
    factor = checked(factor, Finite, "the factor that values are scaled by")
    chosen = choose_heads(decoder, heads, layers, decoder.by_layer)
    table = None if tokens is None else token_table(tokens)
    rows = {}
    for attention in decoder.attentions(chosen):
        group, named = attention.heads // attention.kv_heads, chosen[attention.layer_idx]
        shared = [{*range(row * group, (row + 1) * group)} for row in range(attention.kv_heads)]
        if any(len(some & named) not in (0, group) for some in shared):
            raise InputError(
                f"heads of layer {attention.layer_idx} share values, {group} each, and some of "
                "them are not named; name all of them"
            )
        rows[attention.layer_idx] = torch.tensor([some <= named for some in shared])

    def scale(attention: RepositionedAttention, values: Tensor) -> Tensor:
        # [prompt, kv_head, token, d_value]
        scaled = rows[attention.layer_idx].to(values.device)[:, None, None]
        if table is not None:
            index = attention.active_pass.index.expand(len(values), -1)
            if len(table) not in (1, len(values)):
                raise InputError(
                    f"tokens of {len(table)} prompts were named, but {len(values)} prompts came; "
                    "name those of each"
                )
            scaled = scaled & tokens_at(table, index)[:, None, :, None]
        return torch.where(scaled, factor * values, values)

    with intervention(decoder), called_at(decoder, "values", scale, chosen):
        yield
