"""prompts.jsonl: prompts with named spans, one per line, in characters or in token indices.

    {"text": "...", "spans": {"needle": [[start, end], ...], "query": ...}, "generated": [[start,
    end]]} {"tokens": [...], "spans": {"needle": [indices], "query": [...]}, "generated": [indices]}

with `answers` (texts), `attributes` (any JSON), `position_ids` (one per token, or [time, height,
width] per token, if they are not the token index), `documents` (their number, if the default of
`Prompt.documents` is wrong) and, with tokens, optionally `token_text`. Logged evaluations
(`logged`) and plain texts are recognized by their content. Reading is strict: other content is
refused with the name of the file and the number of the line. This module knows nothing about
models, measures or tasks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from annotated_types import Interval, Len
from pydantic import BaseModel, ConfigDict

from repo_interp.errors import InputError, quoted, warn
from repo_interp.storage.files import path_of, regular, write_text
from repo_interp.storage.records import abbreviate, parse_json, validate
from repo_interp.tasks.prompt import GENERATED, Intervals, Prompt
from repo_interp.tasks.prompt.logged import (
    LoggedText,
    from_harness,
    from_inspect,
    inspect_samples,
    is_harness_sample,
)
from repo_interp.tasks.prompt.text import chat_text, prompt_from_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STANDARD_INPUT = "-"
Index = Annotated[int, Interval(ge=0, lt=1 << 31)]
"""A token id, or the number of a token or a character."""
Characters = Annotated[list[Index], Len(2, 2)]
"""[start, end): characters."""


class _Line(BaseModel):
    """Fields that all lines may have."""

    # A misspelled field would be a prompt without its spans
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    answers: list[str] = []
    attributes: dict[str, Any] = {}
    position_ids: list[Index] | list[Annotated[list[Index], Len(3, 3)]] | None = None
    documents: Annotated[int, Interval(ge=1)] | None = None


class TextLine(_Line):
    """A prompt as text, its spans in characters."""

    text: str
    spans: dict[str, list[Characters]] = {}
    generated: list[Characters] = []


class TokenLine(_Line):
    """A prompt as token ids, its spans as numbers of tokens."""

    tokens: list[Index]
    spans: dict[str, list[Index]] = {}
    generated: list[Index] = []
    token_text: list[str] | None = None


_FORMS: dict[str, type[TextLine | TokenLine]] = {"text": TextLine, "tokens": TokenLine}


def read_prompts(
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    vocab_size: int | None = None,
) -> list[Prompt]:
    """Read prompts.jsonl, a log of an evaluation (see `logged`), or a plain text.

    A file that does not begin with a brace is plain text: one prompt without spans. Blank lines are
    skipped.

    Args:
        path: The file; "-": standard input.
        tokenizer: Fast Hugging Face tokenizer for lines of text; for lines of tokens it adds a
            missing token_text.
        vocab_size: Bound of token ids; None: the size of the tokenizer, else no bound.

    Returns:
        Prompts in the order of the file.

    Raises:
        InputError: A line is not as described; the message names file and line.
    """
    path = path_of(path, "a prompts.jsonl")
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise InputError(
            f"a tokenizer was wanted, such as model.tokenizer; got {quoted(tokenizer)}"
        )
    if vocab_size is None and tokenizer is not None:
        vocab_size = len(tokenizer)
    content = _content(path)
    prompts: list[Prompt] = []
    with _named(path):
        # By content, not by name: logs are renamed, and .json is the name of several forms
        samples = inspect_samples(content)
    if samples is not None:
        for name, sample in samples:
            with _named(f"{path}, {name}"):
                prompts.append(_logged(from_inspect(sample), tokenizer))
        return prompts or _none(path)
    lines = list(_lines(path, content))
    if (
        lines
        # There, a line without a brace is a mistake to report, not a text
        and path.suffix not in (".jsonl", ".json")
        and not lines[0][1].lstrip().startswith("{")
    ):
        return [prompt_from_text("\n".join(_texts(lines)), {}, tokenizer)]
    # By document and text, since one id may belong to two texts
    scores: dict[tuple[int, str | None], dict[str, Any]] = {}
    for number, line in lines:
        with _named(f"{path}, line {number}"):
            record = parse_json(line)
            prompt = _prompt(record, tokenizer, vocab_size)
            if is_harness_sample(record):
                # The harness logs a sample once per filter of its answer; only scores differ
                new = prompt.attributes["scores"]
                known = scores.setdefault((prompt.attributes["doc_id"], prompt.text), new)
                if known is not new and not known.keys() & new.keys():
                    known.update(new)
                    continue
            prompts.append(prompt)
    return prompts or _none(path)


@contextmanager
def _named(where: object) -> Iterator[None]:
    """Prepend the place to messages of InputErrors raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _none(path: Path) -> NoReturn:
    raise InputError(f"{path}: wanted a text, or one prompt per line in JSON; the file is empty")


def _logged(logged: LoggedText, tokenizer: PreTrainedTokenizerBase | None) -> Prompt:
    given = logged.given
    if logged.messages:
        given = chat_text(logged.messages, tokenizer)
        lacking = ", ".join(logged.attributes.get("left_out", ["nothing"]))
        warn(
            "the log holds messages, not the text that the model read; they are put into the "
            "tokenizer's chat template, or lines "
            f"`role: text` where it has none; left out: {lacking}"
        )
    answers, characters = [target for target in logged.targets if target], logged.characters(given)
    return prompt_from_text(
        given + logged.answer, characters, tokenizer, answers, logged.attributes
    )


def _texts(lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    """The lines of a plain text, the blank ones between them too."""
    before = 0
    for number, line in lines:
        yield from [""] * (number - before - 1 if before else 0)
        yield line
        before = number


def require_readable(path: str | os.PathLike[str]) -> None:
    """Refuse a file of prompts that cannot be read, before a model is loaded for it.

    Args:
        path: The file; "-", standard input, can be read once and is not.

    Raises:
        InputError: It cannot be read.
    """
    if str(path) != STANDARD_INPUT:
        _content(path_of(path, "a prompts.jsonl"))


def _content(path: Path) -> bytes:
    try:
        return (
            sys.stdin.buffer.read() if str(path) == STANDARD_INPUT else regular(path).read_bytes()
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"{path}: wanted a prompts file, got {reason}; name a readable .jsonl file"
        ) from error


def _lines(path: Path, content: bytes) -> Iterator[tuple[int, str]]:
    # Bytes are split only at \n: str.splitlines would also split at U+2028 inside a JSON text
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            decoded = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}, line {number}: wanted UTF-8, got byte 0x{line[error.start]:02x}; "
                "save the file as UTF-8"
            ) from error
        if decoded.strip():
            yield number, decoded


def _prompt(
    record: Any, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None
) -> Prompt:
    if is_harness_sample(record):
        return _logged(from_harness(record), tokenizer)
    # The form is chosen first, so that messages are about one form, not about a union of two
    forms = [form for form in _FORMS if isinstance(record, dict) and form in record]
    if len(forms) != 1:
        raise InputError(
            f'wanted an object with either "text" or "tokens", got {abbreviate(record)}; give one '
            "prompt in one form"
        )
    line = validate(record, _FORMS[forms[0]])
    if "generated" in line.model_fields_set and not line.generated:
        raise InputError('"generated" is empty: give it something, or leave it out')
    if isinstance(line, TextLine):
        characters = {name: _intervals(places) for name, places in line.spans.items()}
        if GENERATED in characters:
            raise InputError(
                '"generated" is not a name for a span: move it out of "spans", next to it'
            )
        if line.generated:
            characters[GENERATED] = _intervals(line.generated)
        prompt = prompt_from_text(line.text, characters, tokenizer, line.answers, line.attributes)
        _check_vocabulary(prompt.tokens, vocab_size)
        # Their number is checked against the tokens, which exist from here on
        return replace(prompt, position_ids=line.position_ids, documents=line.documents)
    _check_vocabulary(line.tokens, vocab_size)
    texts = line.token_text
    if texts is None and tokenizer is not None:
        texts = [str(tokenizer.decode([token])) for token in line.tokens]
    return Prompt(
        tokens=tuple(line.tokens),
        spans={name: tuple(places) for name, places in line.spans.items()},
        generated=tuple(line.generated),
        token_text=None if texts is None else tuple(texts),
        answers=tuple(line.answers),
        attributes=line.attributes,
        position_ids=line.position_ids,  # pyright: ignore[reportArgumentType]
        documents=line.documents,
    )


def _intervals(pairs: list[list[int]]) -> Intervals:
    return tuple((start, end) for start, end in pairs)


def _check_vocabulary(tokens: Sequence[int], vocab_size: int | None) -> None:
    largest = max(tokens, default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise InputError(
            f"token id {largest} is beyond the vocabulary of {vocab_size} (ids 0 to "
            f"{vocab_size - 1}); "
            "the prompts were made for another tokenizer"
        )


def write_prompts(prompts: Iterable[Prompt], path: str | os.PathLike[str]) -> None:
    """Write prompts.jsonl, whole or not at all.

    Prompts made from text are written as text and characters, others as tokens. Reading the file
    with the same tokenizer returns the same prompts.

    Args:
        prompts: Prompts, at least one.
        path: The file.

    Raises:
        InputError: The file cannot be written, there is no prompt, or attributes are not plain
            JSON.
    """
    path = path_of(path, "such as prompts.jsonl")
    if isinstance(prompts, Prompt) or not isinstance(prompts, Iterable):
        raise InputError(f"several prompts were wanted, as a list; got {quoted(prompts)}")
    prompts = list(prompts)
    if others := [prompt for prompt in prompts if not isinstance(prompt, Prompt)]:
        raise InputError(f"prompts were wanted, as ri.prompt makes them; got {quoted(others[0])}")
    # All lines are made before writing, so that a prompt that fails leaves no file
    lines = [json.dumps(_record(prompt), ensure_ascii=False, allow_nan=False) for prompt in prompts]
    if not lines:
        raise InputError("there is no prompt to write: give at least one")
    try:
        write_text(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}); choose another place"
        ) from error


def _record(prompt: Prompt) -> dict[str, Any]:
    if prompt.text is not None and prompt.characters is not None:
        characters = {
            name: [list(pair) for pair in intervals]
            for name, intervals in prompt.characters.items()
        }
        # In a file it is separate from the spans, in memory it is one of them
        generated = characters.pop(GENERATED, [])
        record: dict[str, Any] = {"text": prompt.text, "spans": characters}
    else:
        record = {
            "tokens": list(prompt.tokens),
            "spans": {name: list(at) for name, at in prompt.spans.items()},
        }
        generated = list(prompt.generated)
        if prompt.token_text is not None:
            record["token_text"] = list(prompt.token_text)
    if generated:
        record[GENERATED] = generated
    if prompt.position_ids is not None:
        record["position_ids"] = list(prompt.position_ids)
    if prompt.documents is not None:
        record["documents"] = prompt.documents
    if prompt.answers:
        record["answers"] = list(prompt.answers)
    if prompt.attributes:
        record["attributes"] = dict(prompt.attributes)
        try:
            # There and back: json writes a tuple as a list and a numeric key as text
            plain = json.loads(json.dumps(record["attributes"], allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InputError(f"attributes of a prompt must be plain JSON, but {error}") from error
        if plain != record["attributes"]:
            raise InputError(
                "attributes of a prompt must be plain JSON: use lists, not tuples, and text as keys"
            )
    return record
