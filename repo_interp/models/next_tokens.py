"""Logits of next tokens, from the last hidden states of a pass.

    logits = head(h)        with the soft caps, scales and biases of the family

The model's own forward is run with a decoder that returns the known states.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from repo_interp.inputs import Predictions
from repo_interp.models.decoder import Decoder


def next_token_logits(
    decoder: Decoder, hidden: Float[Tensor, "row width"]
) -> Float[Tensor, "row token_id"]:
    """Return the logits of the next token.

    Args:
        decoder: Decoder of the model.
        hidden: Last hidden states, as `decode` gives them [row, width].

    Returns:
        Logits [row, token_id], float32.
    """
    owner: Any = decoder.owner
    # The head's forward applies soft caps, scales and biases of a family. No hook
    # on the decoder is called.
    prefix = owner.base_model_prefix
    name = prefix if prefix in owner._modules else "model"  # Llama 4's prefix names another model
    stack = owner._modules[name]
    owner._modules[name] = _FixedDecoder(hidden[None], stack)
    try:
        return owner(inputs_embeds=hidden[None], use_cache=False).logits[0].float()
    finally:
        owner._modules[name] = stack


class _FixedDecoder:
    """Replacement of a decoder that returns known hidden states; has its constants (Falcon H1)."""

    def __init__(self, hidden: Tensor, decoder: nn.Module) -> None:
        self._hidden, self._decoder = hidden, decoder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._decoder, name)
        return self if isinstance(found, nn.Module) else found  # OPT has its decoder inside

    def __call__(self, *arguments: Any, **keywords: Any) -> _FixedStates:
        return _FixedStates((self._hidden,))


class _FixedStates(tuple):
    """Output of a decoder with only the last hidden states."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


def predictions_of(
    decoder: Decoder,
    hidden: Float[Tensor, "prompt token width"],
    tokens: Int[Tensor, "prompt token"],
    valid: Bool[Tensor, "prompt token"],
    prompts: Int[Tensor, "prompt"],
) -> Predictions:
    """Return the predictions of a model for the next tokens.

    Args:
        decoder: Decoder of the model.
        hidden: Last hidden states [prompt, token, width].
        tokens: Token ids [prompt, token].
        valid: Tokens that are no padding [prompt, token].
        prompts: Numbers of the prompts [prompt].

    Returns:
        Predictions; their logits are computed row by row on demand.
    """
    vocabulary = decoder.vocabulary_size
    return Predictions(
        tokens,
        valid,
        prompts,
        vocabulary,
        lambda row, rows: next_token_logits(decoder, hidden[row, rows]),
    )
