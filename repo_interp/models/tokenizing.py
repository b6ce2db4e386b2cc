"""The tokenizer that reads text for a model, and the special tokens that it puts around one.

Needs no TransformerLens.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from repo_interp.models.decoder import Decoder


def set_tokenizer(decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Remember the tokenizer of a model, and the BOS that it puts before a text.

    Args:
        decoder: Decoder of the model.
        tokenizer: Reads text for the model; None: no tokenizer.
    """
    prepends = tokenizer is not None and special_tokens_around(tokenizer)[0]
    object.__setattr__(decoder.module, "tokenizer", tokenizer)
    bos: Any = tokenizer.bos_token_id if tokenizer is not None and prepends else None
    decoder.prepended = bos


def special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Return whether a tokenizer puts special tokens around a text.

    Args:
        tokenizer: A tokenizer.

    Returns:
        Whether it puts BOS before a text, and EOS behind it.
    """
    special = set(tokenizer.all_special_ids)
    words = (token for token in range(len(tokenizer)) if token not in special)
    encoded: list[int] = []
    # "a" may not be a word of a closed vocabulary
    for text in ("a", str(tokenizer.convert_ids_to_tokens(next(words)))):
        try:
            encoded = list(tokenizer(text)["input_ids"])  # pyright: ignore[reportArgumentType, reportCallIssue]
            break
        except Exception:  # tokenizers raise a bare one
            continue
    around = len(encoded) > 1
    return around and encoded[0] == tokenizer.bos_token_id, around and encoded[
        -1
    ] == tokenizer.eos_token_id
