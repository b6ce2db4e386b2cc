r"""Messages of a chat as one text, by the template of a tokenizer.

    [{"role": "user", "content": "..."}, ...]  ->  "<|im_start|>user\n...<|im_end|>\n..."

Behind a last message that is not the assistant's stands what its answer begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from repo_interp.errors import InputError, quoted
from repo_interp.tasks.prompt.text import chat_text


def is_chat(given: Any) -> bool:
    """Return whether something is a list of messages.

    Args:
        given: Anything.

    Returns:
        True for a sequence, not empty, of mappings alone.
    """
    return (
        isinstance(given, Sequence)
        and not isinstance(given, str | bytes)
        and len(given) > 0
        and all(isinstance(message, Mapping) for message in given)
    )


def text_of_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase | None
) -> str:
    """Write messages as the model was trained to read them.

    Args:
        messages: Messages with "role" and "content", both texts.
        tokenizer: Tokenizer with a chat template.

    Returns:
        The text, special tokens in it.

    Raises:
        InputError: There is no template, it refuses the messages, or one is no message.
    """
    for number, message in enumerate(messages):
        if not all(isinstance(message.get(part), str) for part in ("role", "content")):
            raise InputError(
                f"message {number} of the chat is {quoted(dict(message))}; wanted texts "
                'as {"role": "user", "content": "..."}'
            )
    if not getattr(tokenizer, "chat_template", None):
        name = "this model has no tokenizer" if tokenizer is None else "its tokenizer has none"
        raise InputError(
            f"a list of messages needs a chat template, and {name}; give the text as the model "
            "was trained to read it"
        )
    return chat_text([dict(message) for message in messages], tokenizer)
