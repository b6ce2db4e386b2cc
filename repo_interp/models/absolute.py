"""Learned absolute positions in a Hugging Face decoder: a vector a position, added to the token embeddings.

They enter at the decoder's input, so they are no part of any attention layer, whose scheme is then "learned": no rotation.
The table is `model.position_table`; the token embeddings are looked up as ever (a bridge's hook_embed fires), then the vectors added.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from repo_interp.errors import InputError
from repo_interp.positions.embedding import AbsoluteEmbedding

TABLE = "position_table"
_HANDLE = "_position_table_hook"


def learn_absolute_positions(model: PreTrainedModel, length: int | None) -> None:
    """Give `model` a table of `length` positions, freshly drawn, in place of any it has; None takes it away."""
    decoder = model.model
    if hasattr(decoder, TABLE):
        decoder.__dict__.pop(_HANDLE).remove()
        delattr(decoder, TABLE)
    if length is not None:
        setattr(
            decoder,
            TABLE,
            AbsoluteEmbedding(length, model.config.hidden_size, model.config.initializer_range),
        )
        decoder.__dict__[_HANDLE] = decoder.register_forward_pre_hook(_add_vectors, with_kwargs=True)


def _add_vectors(decoder: Any, arguments: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    names = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds")
    given = dict(zip(names, arguments, strict=False)) | keywords
    tokens, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    if embeddings is None:
        embeddings = decoder.embed_tokens(tokens)
    index = given.get("position_ids")
    if index is None:
        cache = given.get("past_key_values")
        start = 0 if cache is None else cache.get_seq_length()
        index = torch.arange(start, start + embeddings.shape[1], device=embeddings.device)[None]
    try:
        with_positions = getattr(decoder, TABLE)(embeddings, index)
    except ValueError as error:
        raise InputError(str(error)) from None
    return (), given | {"input_ids": None, "inputs_embeds": with_positions}
