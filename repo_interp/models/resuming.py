"""A forward pass that keeps the residual stream at every layer, and passes that start from there.

    residuals[l] = hidden states [prompt, token, d_model] that enter layer l
    resumed(l)   = layers l, l+1, ... applied to residuals[l]: the result of a whole pass while
                   nothing below l differs

An intervention in layer l changes only layers from l on, so L - l of L layers run again. The
skipped layers return their input. Masks and rotation tables come from the decoder, so all families
are supported. Prompts are whole, padded on the right, without a cache. This module knows nothing
about the kind of change.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from repo_interp.models.decoder import Decoder
from repo_interp.models.lasting import at_rest
from repo_interp.models.observing import entering


@dataclass(frozen=True)
class Recording:
    """One forward pass of `tokens`."""

    tokens: Int[Tensor, "prompt token"]
    residuals: tuple[Float[Tensor, "prompt token d_model"], ...]
    """Hidden states that entered the layers."""
    last_hidden: Float[Tensor, "prompt token d_model"]
    """After the final norm."""


@torch.no_grad()
def record_pass(decoder: Decoder, tokens: Int[Tensor, "prompt token"]) -> Recording:
    """Run a forward pass and keep the hidden states that enter every layer.

    Args:
        decoder: Decoder of the model.
        tokens: Token ids [prompt, token].

    Returns:
        The recording: one array [prompt, token, d_model] per layer.
    """
    residuals: list[Tensor] = []
    with at_rest(decoder), entering(decoder, residuals.append):
        output = decoder.stack(input_ids=tokens, use_cache=False)
    return Recording(tokens, tuple(residuals), output.last_hidden_state)


@torch.no_grad()
def resume_pass(
    decoder: Decoder, recording: Recording, first_layer: int, copies: int = 1
) -> Float[Tensor, "copy_and_prompt token d_model"]:
    """Run the layers of a recorded pass again, from one of them on.

    Args:
        decoder: Decoder of the model.
        recording: A pass of the same model.
        first_layer: The first layer that runs.
        copies: How often the prompts are repeated in the batch: all prompts, then all again.

    Returns:
        Last hidden states [copy and prompt, token, d_model].
    """
    entering = recording.residuals[first_layer].repeat(copies, 1, 1)

    def enter(
        layer: nn.Module, arguments: tuple, keywords: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        keywords.pop("hidden_states", None)
        return (entering, *arguments[1:]), keywords

    with at_rest(decoder), ExitStack() as undo:
        # The forward is exchanged, not a hook added: the layer must not compute.
        for layer in decoder.blocks[:first_layer]:
            # The __setattr__ of a bridge would set it on the layer inside.
            object.__setattr__(layer, "forward", _return_input)
            undo.callback(object.__delattr__, layer, "forward")
        first = decoder.blocks[first_layer]
        # Before other hooks, which shall see the recorded states too.
        handle = first.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        undo.callback(handle.remove)
        # The tokens run through the decoder again only for its masks and rotation tables.
        tokens = recording.tokens.repeat(copies, 1)
        return decoder.stack(input_ids=tokens, use_cache=False).last_hidden_state


def _return_input(hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    return hidden_states
