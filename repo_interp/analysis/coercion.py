"""Prompts from any form: Prompts, texts, token ids; one or many.

    "a text"    ["a text", ...]    [5, 17, 3]    tensor [token]    array [prompt, token]    Prompt
    a generator of any, or the result of a tokenizer  ->  [Prompt, ...]

Text is encoded by the checkpoint's tokenizer, with the special tokens that it puts before a text
and none else. Brings together bridges and prompts; knows nothing about measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from repo_interp.errors import InputError, quoted, warn
from repo_interp.models.decoder import as_decoder
from repo_interp.tasks import Prompt, prompt_from_text
from repo_interp.tasks.prompt import require_index
from repo_interp.tasks.prompt.text import EncodedText, encode, is_chat, text_of_chat
from repo_interp.values import shortened

Prompts = Prompt | str | Tensor | np.ndarray | Iterable[Any]
"""Forms that `as_prompts` takes."""
_WANTED = "wanted a Prompt, a text, or whole numbers of tokens"


def as_prompts(prompts: Prompts, tokenizer: PreTrainedTokenizerBase | None) -> list[Prompt]:
    """Return prompts as a list of `Prompt`, in order.

    Args:
        prompts: Prompts in any form of the module.
        tokenizer: Encodes texts; None: texts are refused.

    Returns:
        The prompts.

    Raises:
        InputError: An object is no prompt.
    """
    # Before anything iterable: a text is one prompt, not one per character
    if isinstance(prompts, Prompt | str):
        _note_file(prompts)
        return [_prompt(prompts, tokenizer, "the prompt")]
    # The BatchEncoding that a tokenizer returns, which is a Mapping but no dict
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        prompts = _without_padding(prompts["input_ids"], prompts.get("attention_mask"))
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise InputError(f"prompts are a {type(prompts).__name__}; {_WANTED}, or several of these")
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind in "OUT":
        return as_prompts(prompts.tolist(), tokenizer)  # texts
    if isinstance(prompts, Tensor | np.ndarray):
        rows = prompts[None] if prompts.ndim == 1 else prompts
        if rows.ndim != 2:
            raise InputError(
                f"prompts are an array of {list(prompts.shape)}; wanted [token] or [prompt, token]"
            )
        return [_prompt(row, tokenizer, f"prompt {number}") for number, row in enumerate(rows)]
    given = list(prompts)
    # A list of numbers is one prompt, and a list of anything else holds a prompt per item
    if given and all(isinstance(item, int | np.integer) for item in given):
        return [_prompt(given, tokenizer, "the prompt")]
    return [_prompt(item, tokenizer, f"prompt {number}") for number, item in enumerate(given)]


def _note_file(text: Prompt | str) -> None:
    """Warn where a text is the name of a file, which is not read."""
    with suppress(OSError, ValueError):
        if isinstance(text, str) and len(text) < 256 and Path(text).is_file():
            warn(
                f"{shortened(text)} is measured as a text, and there is a file of this name; "
                "ri.read_prompts reads prompts from it"
            )


def _without_padding(ids: Any, mask: Any) -> Any:
    """Drop the padding of a tokenized batch, on either side."""
    if mask is None:
        return ids
    try:
        ids, mask = (rows.tolist() if hasattr(rows, "tolist") else rows for rows in (ids, mask))
        # A tokenizer returns one flat list for one text
        if isinstance(ids[0], int):
            ids, mask = [ids], [mask]
        return [
            [token for token, kept in zip(row, keep, strict=True) if kept]
            for row, keep in zip(ids, mask, strict=True)
        ]
    except (TypeError, ValueError, LookupError):
        raise InputError("input_ids and attention_mask are not of one shape") from None


def indexed_prompts(prompts: Prompts, tokenizer: PreTrainedTokenizerBase | None) -> list[Prompt]:
    """Return prompts as `as_prompts` does, for passes with the token index as positions.

    Args:
        prompts: Prompts in any form of the module.
        tokenizer: Encodes texts; None: texts are refused.

    Returns:
        The prompts.

    Raises:
        InputError: An object is no prompt, or a prompt has position ids.
    """
    found = as_prompts(prompts, tokenizer)
    require_index(found)
    return found


def require_known_tokens(sequences: Iterable[Sequence[int]], vocabulary: int) -> None:
    """Refuse prompts with tokens that a model lacks.

    Args:
        sequences: Token ids of each prompt.
        vocabulary: Number of tokens that the model knows.

    Raises:
        InputError: A token is not in the vocabulary.
    """
    for number, sequence in enumerate(sequences):
        if max(sequence) >= vocabulary:
            raise InputError(
                f"prompt {number} has token {max(sequence)}; the model's tokens are 0 to "
                f"{vocabulary - 1}"
            )


def tokens(
    prompts: Prompts, bridge: nn.Module
) -> tuple[Int[Tensor, "prompt token"], Bool[Tensor, "prompt token"]]:
    """Encode prompts and pad them on the right with 0.

        tokens, valid = ri.tokens(prompts, bridge)
        logits, cache = bridge.run_with_cache(tokens)

    They are the tokens that `analyze` measures. No token sees a later one, so that padding changes
    nothing before it.

    Args:
        prompts: Prompts in any form that `as_prompts` takes.
        bridge: Bridge or Hugging Face model.

    Returns:
        Token ids [prompt, token], and the mask of tokens that are no padding, on the model's
        device.

    Raises:
        InputError: There are no prompts, an object is no prompt, a prompt has position ids, or the
            model lacks a token.
    """
    decoder = as_decoder(bridge)
    sequences = [prompt.tokens for prompt in indexed_prompts(prompts, decoder.tokenizer)]
    if not sequences:
        raise InputError("there are no prompts")
    require_known_tokens(sequences, decoder.vocabulary_size)
    device = decoder.device
    rows = [torch.tensor(sequence, device=device) for sequence in sequences]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return padded, torch.arange(padded.shape[1], device=device) < lengths[:, None]


def prompt(
    text: str | Sequence[int] | Sequence[Mapping[str, str]],
    bridge: nn.Module,
    generated: int | str | None = None,
    answers: Sequence[str] = (),
    position_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    documents: int | None = None,
    **spans: str | tuple[int, int] | Sequence[str | tuple[int, int]],
) -> Prompt:
    """Make a prompt of a text, messages of a chat, or numbers of tokens, with named spans.

        ri.prompt("The first man on the moon was Neil Armstrong.", bridge,
                  needle="Neil Armstrong", generated=-2)
        ri.prompt([{"role": "user", "content": "Who was the first man on the moon?"}], bridge)

    Args:
        text: Text of the prompt, numbers of its tokens, or messages, which the tokenizer's chat
            template writes as one text; behind a last one that is not the assistant's, its turn begins.
        bridge: Bridge, or model with a tokenizer.
        generated: Generated tokens: -k for the last k tokens, or a part of the text; None: none.
        answers: Texts that count as correct answers.
        position_ids: Position of every token, for the model and its rotation; or (time, height,
            width) of every token beside an image; None: the token index.
        documents: How many documents the position ids tell apart, which are hidden from each
            other: 1, or one per jump and one; None: documents begin at each jump where all of
            them lead back to 0 or to the first position, else it is one text.
        **spans: By name, a part of the text that occurs once, or once outside of the generated tokens,
            a pair of characters (start, end), or several of these. Of a prompt of tokens a pair of tokens, or several pairs; `end` is not
            among them.

    Returns:
        The prompt.

    Raises:
        InputError: The text or an answer is no text, a part occurs never or more than once, a
            pair is outside of the prompt, messages have no template, or position ids are not one
            number per token.
    """
    tokenizer = getattr(bridge, "tokenizer", None)
    if not isinstance(text, str | Sequence | Tensor | np.ndarray):
        raise InputError(
            f"the text of a prompt is {quoted(text)}; wanted a text, or numbers of tokens"
        )
    if is_chat(text):
        text = text_of_chat(cast("Sequence[Mapping[str, str]]", text), tokenizer)
    if not isinstance(answers, Iterable) or not all(isinstance(answer, str) for answer in answers):
        raise InputError(f"answers are {quoted(answers)}; wanted texts")
    if not isinstance(text, str):
        made = _of_tokens(_prompt(text, tokenizer, "the prompt"), generated, answers, spans)
        return replace(made, position_ids=position_ids, documents=documents)
    answer: tuple[tuple[int, int], ...] = ()
    if isinstance(generated, str):
        answer = _intervals(text, "generated", generated)
    elif generated is not None:
        answer = (_last_tokens(encode(text, tokenizer), generated),)
    characters = {name: _intervals(text, name, parts, answer) for name, parts in spans.items()}
    characters |= {"generated": answer} if answer else {}
    made = prompt_from_text(
        text, characters, tokenizer, (answers,) if isinstance(answers, str) else answers
    )
    return replace(made, position_ids=position_ids, documents=documents)


def _of_tokens(
    given: Prompt, generated: int | str | None, answers: Sequence[str], spans: Mapping[str, Any]
) -> Prompt:
    """A prompt of tokens with spans [start, end) of tokens."""
    count, marked = len(given.tokens), {}
    for name, parts in spans.items():
        several = isinstance(parts, list | tuple) and all(isinstance(x, tuple) for x in parts)
        pairs: list[Any] = list(parts) if several else [parts]
        for pair in pairs:
            whole = (
                isinstance(pair, tuple)
                and len(pair) == 2
                # True and False are ints too
                and all(isinstance(end, int | np.integer) for end in pair)
                and not any(isinstance(end, bool) for end in pair)
            )
            if not whole or not 0 <= pair[0] < pair[1] <= count:
                raise InputError(
                    f"the span {name!r} is {quoted(pair)}; of a prompt of tokens wanted "
                    f"is a pair (start, end) of tokens from 0 to {count}"
                )
        marked[name] = tuple(sorted({token for pair in pairs for token in range(*pair)}))
    last = 0 if generated is None else generated
    if not isinstance(last, int) or isinstance(last, bool) or not -count < last <= 0:
        raise InputError(
            f"generated is {quoted(generated)}; of a prompt of {count} tokens wanted is "
            f"-k for the last k, at most {count - 1}"
        )
    return replace(
        given,
        spans={**given.spans, **marked},
        generated=tuple(range(count + last, count)),
        answers=(answers,) if isinstance(answers, str) else tuple(answers),
    )


def _prompt(given: Any, tokenizer: Any, name: str) -> Prompt:
    if isinstance(given, Prompt):
        return given
    if isinstance(given, str):
        return prompt_from_text(given, {}, tokenizer)
    if isinstance(given, Tensor | np.ndarray):
        kind = str(given.dtype)
        try:
            given = given.tolist()
        except RuntimeError:  # on "meta", sparse, quantized
            raise InputError(
                f"{name} is a tensor of {kind} whose numbers cannot be read; {_WANTED}, on a "
                "device and dense"
            ) from None
        # An array of no axes gives a number, and tolist keeps fractions and truth values apart
        if not isinstance(given, list) or any(
            isinstance(token, list | float | bool) for token in given
        ):
            raise InputError(f"{name} is an array of {kind}; {_WANTED}")
    if isinstance(given, Mapping) and "role" in given:
        raise InputError(
            f"{name} is a message of a chat; ri.prompt(messages, bridge) makes one prompt of a list"
        )
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise InputError(f"{name} is of type {type(given).__name__}; {_WANTED}")
    wrong = [
        item
        for item in given
        if not isinstance(item, int | np.integer) or isinstance(item, bool) or item < 0
    ]
    if wrong:
        raise InputError(f"{name} holds {str(wrong[0])[:40]!r}; {_WANTED}")
    numbers = tuple(int(token) for token in given)
    # No vocabulary is that large, and beyond int64 torch would end in a traceback
    if numbers and max(numbers) >= 1 << 31:
        raise InputError(f"{name} holds {max(numbers)}; {_WANTED}")
    texts = (
        None if tokenizer is None else tuple(str(tokenizer.decode([token])) for token in numbers)
    )
    return Prompt(tokens=numbers, token_text=texts)


def _intervals(
    text: str, name: str, parts: Any, answer: tuple[tuple[int, int], ...] = ()
) -> tuple[tuple[int, int], ...]:
    """Characters of the parts of a span; one that occurs several times, where `answer` is not."""
    if isinstance(parts, str) or (
        isinstance(parts, tuple) and all(isinstance(end, int) for end in parts)
    ):
        parts = [parts]
    intervals = []
    for part in parts if isinstance(parts, Iterable) else [parts]:
        if not isinstance(part, str):
            if not isinstance(part, Sequence) or len(part) != 2 or not all(map(_is_whole, part)):
                raise InputError(
                    f"the span {name!r}: {quoted(part)} is no part of the text; "
                    "give a text, or (start, end)"
                )
            intervals.append((int(part[0]), int(part[1])))
            continue
        starts = _occurrences(text, part)
        if len(starts) > 1:
            outside = [
                start
                for start in starts
                if not any(start < end and first < start + len(part) for first, end in answer)
            ]
            starts = outside if len(outside) == 1 else starts
        count = len(starts)
        if count != 1:
            how_often = "does not occur" if count == 0 else f"occurs {count} times"
            raise InputError(
                f"the span {name!r}: {part[:40]!r} {how_often} in the text; give a part that "
                "occurs once, or (start, end)"
            )
        intervals.append((starts[0], starts[0] + len(part)))
    return tuple(intervals)


def _occurrences(text: str, part: str) -> list[int]:
    """Where a part begins in a text, one occurrence behind the other; none for an empty part."""
    starts, at = [], text.find(part) if part else -1
    while at >= 0:
        starts.append(at)
        at = text.find(part, at + len(part))
    return starts


def _is_whole(number: Any) -> bool:
    return hasattr(number, "__index__") and not isinstance(number, bool)


def _last_tokens(encoded: EncodedText, count: int) -> tuple[int, int]:
    """Return the characters of the last -`count` tokens that cover some.

    If a character has several tokens, all are included.
    """
    # Special tokens cover no characters, so they are not counted
    covering = [(start, end) for start, end in encoded.offsets if start < end]
    if not _is_whole(count) or not -len(covering) <= count < 0:
        raise InputError(
            f"generated is {quoted(count)}; wanted -1 to -{len(covering)}, minus "
            "the number of last tokens, or a part of the text"
        )
    return covering[count][0], covering[-1][1]
