"""prompts.jsonl: prompts with named spans in a file, one per line, in characters or in token indices.

    {"text": "...", "spans": {"needle": [[start, end], ...], "query": ...}, "generated": [[start, end]]}
    {"tokens": [...], "spans": {"needle": [indices], "query": [...]}, "generated": [indices]}

with `answers` (texts), `attributes` (anything JSON) and, beside tokens, `token_text` where wanted. Reading is strict: whatever is
not as described is refused with the file's name and the line's number. Knows nothing about models, measures or tasks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from repo_interp.errors import InputError
from repo_interp.files import write_text
from repo_interp.tasks.prompt import GENERATED, Intervals, Prompt
from repo_interp.tasks.prompt.text import prompt_from_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEYS = {
    "text": {"text", "spans", "generated", "answers", "attributes"},
    "tokens": {"tokens", "spans", "generated", "token_text", "answers", "attributes"},
}


def read_prompts(
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    vocab_size: int | None = None,
) -> list[Prompt]:
    """Read prompts.jsonl.

    `tokenizer` (Hugging Face, fast) is needed for lines of text; beside lines of tokens it fills in token_text where there is
    none. `vocab_size` bounds token ids (default: the tokenizer's size, else no bound). Blank lines are skipped. Raises
    InputError, one line with file and line number, for whatever is wrong.
    """
    path = Path(path)
    if vocab_size is None and tokenizer is not None:
        vocab_size = len(tokenizer)
    prompts = []
    for number, line in _lines(path):
        try:
            prompts.append(_prompt(_parse(line), tokenizer, vocab_size))
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise InputError(f"{path}: wanted one prompt per line, the file is empty; write some, or name another file")
    return prompts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: wanted a prompts file, got {error.strerror}; name a readable .jsonl file") from error
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            decoded = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}, line {number}: wanted UTF-8, got byte 0x{line[error.start]:02x}; save the file as UTF-8"
            ) from error
        if decoded.strip():
            yield number, decoded


def _parse(line: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f'the key "{name}" stands twice in one object; keep one')
        return dict(pairs)

    def constant(name: str) -> NoReturn:
        raise InputError(f"{name} is no JSON; give a finite number")

    try:
        record = json.loads(line, object_pairs_hook=once, parse_constant=constant)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise InputError(f"wanted a JSON object, got broken JSON ({reason}); mend the line") from error
    if not isinstance(record, dict):
        raise InputError(f'wanted a JSON object like {{"text": ...}}, got {_kind(record)}; one prompt is one object')
    return record


def _prompt(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None) -> Prompt:
    forms = [form for form in _KEYS if form in record]
    if len(forms) != 1:
        came = "both" if forms else f"neither but {sorted(record)}"
        raise InputError(f'wanted either "text" or "tokens", got {came}; give the prompt in exactly one of the two forms')
    unknown = sorted(record.keys() - _KEYS[forms[0]])
    if unknown:
        raise InputError(f'unknown key "{unknown[0]}" beside "{forms[0]}"; known are {", ".join(sorted(_KEYS[forms[0]]))}')
    spans = _typed(record.get("spans", {}), dict, '"spans"', "an object of named spans")
    answers = _texts(record.get("answers", []), '"answers"')
    attributes = _typed(record.get("attributes", {}), dict, '"attributes"', "an object")
    if forms == ["text"]:
        text = _text(record["text"], '"text"')
        characters = {name: _intervals(places, f'the span "{name}"') for name, places in spans.items()}
        if GENERATED in characters:
            raise InputError('"generated" is no name for a span: move it out of "spans", beside it')
        if GENERATED in record:
            characters[GENERATED] = _intervals(record[GENERATED], '"generated"')
        prompt = prompt_from_text(text, characters, tokenizer, answers, attributes)
        _check_vocabulary(prompt.tokens, vocab_size)
        return prompt
    tokens = _indices(record["tokens"], '"tokens"')
    if not tokens:
        raise InputError("the prompt is empty: give it at least one token")
    _check_vocabulary(tokens, vocab_size)
    generated = _indices(record.get(GENERATED, []), '"generated"')
    if GENERATED in record and not generated:
        raise InputError('"generated" is empty: give it at least one token, or leave it out')
    token_text = _texts(record["token_text"], '"token_text"') if "token_text" in record else None
    if token_text is None and tokenizer is not None:
        token_text = tuple(str(tokenizer.decode([token])) for token in tokens)
    return Prompt(
        tokens=tokens,
        spans={name: _indices(places, f'the span "{name}"') for name, places in spans.items()},
        generated=generated,
        token_text=token_text,
        answers=answers,
        attributes=attributes,
    )


def _check_vocabulary(tokens: Sequence[int], vocab_size: int | None) -> None:
    smallest, largest = min(tokens), max(tokens)
    if smallest < 0:
        raise InputError(f"token id {smallest} is negative; ids begin with 0")
    if vocab_size is not None and largest >= vocab_size:
        raise InputError(
            f"token id {largest} is beyond the vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}); "
            "the prompts were made for another tokenizer"
        )


def _typed(value: Any, kind: type, what: str, wanted: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(f"{what}: wanted {wanted}, got {_kind(value)}; mend the line")
    return value


def _text(value: Any, what: str) -> str:
    text = _typed(value, str, what, "text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{what}: character {error.start} is half of a surrogate pair; write whole characters") from error
    return text


def _texts(value: Any, what: str) -> tuple[str, ...]:
    return tuple(_text(item, what) for item in _typed(value, list, what, "a list of texts"))


def _indices(value: Any, what: str) -> tuple[int, ...]:
    items = _typed(value, list, what, "a list of whole numbers")
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool):
            raise InputError(f"{what}: wanted whole numbers, got {_kind(item)}; give token ids or indices")
        if abs(item) >= 2**31:
            raise InputError(f"{what}: {item:.3g} is too large for a token id or index; mend it")
    return tuple(items)


def _intervals(value: Any, what: str) -> Intervals:
    pairs = _typed(value, list, what, "a list of [start, end] pairs")
    intervals = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise InputError(f"{what}: wanted [start, end] pairs of characters, got {_kind(pair)}; mend the line")
        start, end = _indices(pair, what)
        intervals.append((start, end))
    return tuple(intervals)


def _kind(value: Any) -> str:
    """A short description of what came."""
    shown = json.dumps(value, ensure_ascii=True)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def write_prompts(prompts: Iterable[Prompt], path: str | os.PathLike[str]) -> None:
    """Write prompts.jsonl, whole or not at all. Prompts made from text are written as text and characters, others as tokens.

    Reading the file back with the same tokenizer gives the same prompts. Raises InputError where the file
    cannot be written, there is no prompt, or attributes are not plain JSON.
    """
    lines = [json.dumps(_record(prompt), ensure_ascii=False, allow_nan=False) for prompt in prompts]
    if not lines:
        raise InputError("there is no prompt to write: give at least one")
    try:
        write_text(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another place") from error


def _record(prompt: Prompt) -> dict[str, Any]:
    if prompt.text is not None and prompt.characters is not None:
        characters = {name: [list(pair) for pair in intervals] for name, intervals in prompt.characters.items()}
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
    if prompt.answers:
        record["answers"] = list(prompt.answers)
    if prompt.attributes:
        record["attributes"] = dict(prompt.attributes)
        try:
            plain = json.loads(json.dumps(record["attributes"], allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InputError(f"attributes of a prompt must be plain JSON, but {error}") from error
        if plain != record["attributes"]:
            raise InputError("attributes of a prompt must be plain JSON: use lists, not tuples, and text as keys")
    return record
