"""Logged evaluations as prompts: logs of lm-evaluation-harness and of inspect-ai.

Of samples_TASK_DATE.jsonl, a sample per line, or .json and .eval:

    text           the input of the model, then its answer; `text.chat_text` converts messages of a
                   chat to text
    generated      the answer; for a choice, the right one
    needle         the target, if it occurs in the input exactly once, as whole words
    attributes     document or sample, target, and all scores, which distinguish right from wrong
                   answers; `left_out`: parts that the model read or wrote but that are missing in
                   the text (reasoning, tool calls, images, ...)

Unlike prompts.jsonl, a log may contain additional data. This module knows nothing about files on
disk and about tokenizers.
"""

from __future__ import annotations

import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict

from repo_interp.errors import InputError
from repo_interp.storage.records import parse_json, validate
from repo_interp.tasks.prompt import GENERATED, Intervals

MOST_BYTES = 1 << 30
"""Most bytes of the unpacked samples of a log."""


class LoggedText(BaseModel):
    """The parts of one sample that are read."""

    given: str = ""
    messages: list[dict[str, str]] = []
    """Roles and contents of a chat, instead of `given`."""
    answer: str
    targets: list[str]
    attributes: dict[str, Any]

    def characters(self, given: str) -> dict[str, Intervals]:
        """Character ranges of the answer, and of the target if it occurs exactly once.

        Args:
            given: Text before the answer.

        Returns:
            Ranges by name of the span.
        """
        found: dict[str, Intervals] = {}
        for target in filter(None, map(str.strip, self.targets)):
            places = [
                match.span() for match in re.finditer(rf"(?<!\w){re.escape(target)}(?!\w)", given)
            ]
            # If it occurs twice, it is unknown which place the model needed
            if len(places) == 1:
                found["needle"] = (places[0],)
                break
        if self.answer:
            found[GENERATED] = ((len(given), len(given) + len(self.answer)),)
        return found


class _Read(BaseModel):
    # Logs have many more fields, which differ by version
    model_config = ConfigDict(strict=True, extra="ignore")


class _HarnessSample(_Read):
    doc_id: int
    doc: dict[str, Any]
    target: Any = None
    # Older versions wrote lists of arguments, newer ones dictionaries
    arguments: dict[str, dict[str, Any]] | list[list[Any]]
    resps: list[Any] = []
    filter: str = "none"
    metrics: list[str] = []


class _Content(_Read):
    type: str = "text"
    text: str = ""


class _Message(_Read):
    role: str
    content: str | list[_Content]
    tool_calls: list[Any] | None = None


class _Output(_Read):
    completion: str = ""


class _InspectSample(_Read):
    id: int | str
    epoch: int = 1
    input: str | list[_Message]
    target: str | list[str] = ""
    messages: list[_Message] = []
    events: list[dict[str, Any]] = []
    output: _Output = _Output()
    scores: dict[str, dict[str, Any]] | None = None


class _InspectLog(_Read):
    samples: list[dict[str, Any]]


def is_harness_sample(record: Any) -> bool:
    """Tell whether a JSON object is a logged sample of lm-evaluation-harness.

    Args:
        record: Parsed JSON.

    Returns:
        True if it has the fields of a sample.
    """
    return isinstance(record, dict) and {"doc_id", "doc", "arguments"} <= set(record)


def from_harness(record: dict[str, Any]) -> LoggedText:
    """Read a logged sample of lm-evaluation-harness.

    Args:
        record: Parsed JSON.

    Returns:
        Input, answer, targets and scores.

    Raises:
        InputError: The sample lacks a part or has no text, or the log does not determine the right
            text.
    """
    sample = validate(record, _HarnessSample)
    named = sample.arguments.values() if isinstance(sample.arguments, dict) else sample.arguments
    calls = [list(call.values()) if isinstance(call, dict) else list(call) for call in named]
    if not calls or not all(call and isinstance(call[0], str) for call in calls):
        raise InputError(
            "the sample has no text among its arguments; wanted one of generate_until or "
            "loglikelihood"
        )
    # Text and options are two; multimodal tasks have a third
    if max(map(len, calls)) > 2:
        raise InputError(
            "the model was given more than text (images or sound); wanted a sample of text alone"
        )
    # All calls of a sample have one text, except choices among inputs (see below)
    given, answer = calls[0][0], ""
    # the harness writes the text None
    targets = [] if sample.target in (None, "None") else [str(sample.target)]
    # loglikelihood has (context, continuation); generate_until has (context, options)
    choices = [call for call in calls if len(call) == 2 and isinstance(call[1], str)]
    if choices:
        right = _right_choice(
            sample, record.get("acc"), [text for _, text in choices], "".join(targets).strip()
        )
        if right is not None:
            given, answer = choices[right]
        elif len({call[0] for call in calls}) > 1:
            raise InputError(
                f"the sample has {len(calls)} inputs, and nothing in it says which is right; "
                "leave it out"
            )
        targets = [answer.strip()]
    elif len(calls[0]) > 1:
        said: Any = sample.resps
        # Answers are nested by request and by repeat: the first of each
        while isinstance(said, list) and said:
            said = said[0]
        answer = said if isinstance(said, str) else ""
    else:  # a text that is only scored: responses are log-likelihoods
        targets = []
    of_filter = "" if sample.filter == "none" else f",{sample.filter}"
    # Without a list of metrics (older versions), floats of the record are its scores
    scores = {
        name + of_filter: value
        for name, value in record.items()
        if name in sample.metrics or (not sample.metrics and isinstance(value, float))
    }
    attributes = {"doc_id": sample.doc_id, "targets": targets, "scores": scores}
    return LoggedText(given=given, answer=answer, targets=targets, attributes=attributes)


def _right_choice(sample: _HarnessSample, acc: Any, choices: list[str], target: str) -> int | None:
    """Which of `choices` is right: the target is its number or its text."""
    # With several inputs, the accuracy shows whether the likeliest one was right.
    if len(set(choices)) == 1 < len(choices):
        with suppress(TypeError, ValueError, LookupError):
            order = sorted(range(len(choices)), key=lambda place: float(sample.resps[place][0][0]))
            # Of two, the less likely one is right if the other is wrong; of more, it is unknown
            return order[-1] if acc == 1 else order[0] if (acc, len(order)) == (0, 2) else None
        return None
    if target.isdecimal() and int(target) < len(choices):
        return int(target)
    texts = [choice.strip() for choice in choices]
    return texts.index(target) if target in texts else 0 if len(texts) == 1 else None


def inspect_samples(content: bytes) -> list[tuple[str, Any]] | None:
    """List the samples of an inspect-ai log; nothing is unpacked to the disk.

    Args:
        content: Bytes of the file.

    Returns:
        Names and samples; None for another kind of file.

    Raises InputError for an archive that is damaged, too large, or packed in an unknown way.
    """
    # An .eval log is a zip archive
    if content.startswith(b"PK"):
        return list(_unpacked(content))
    if (
        # Looked for in the bytes first: parsing a large prompts.jsonl as one object would fail late
        not content.lstrip().startswith(b"{")
        or b'"samples"' not in content
        or b'"eval"' not in content
    ):
        return None
    try:
        log = parse_json(content.decode("utf-8"))
    except (InputError, UnicodeDecodeError):
        return None  # lines of another form
    if not isinstance(log, dict) or not {"samples", "eval"} <= set(log):
        return None
    return [
        (f"sample {number}", sample)
        for number, sample in enumerate(validate(log, _InspectLog).samples)
    ]


def from_inspect(record: Any) -> LoggedText:
    """Read a sample of an inspect-ai log; its answer is the last message of the model.

    Raises InputError for one that lacks a part, or has no text.

    Args:
        record: Parsed JSON.

    Returns:
        Messages before the answer, answer, targets and scores.
    """
    sample = validate(record, _InspectSample)
    answer = sample.output.completion
    asked = (
        sample.input
        if isinstance(sample.input, list)
        else [_Message(role="user", content=sample.input)]
    )
    # `read` also has the model's answer; tool calls and images in it are missing in the text
    given = read = sample.messages or asked
    written = [
        place for place, message in enumerate(sample.messages) if message.role == "assistant"
    ]
    if answer and written:
        given, read = read[: written[-1]], read[: written[-1] + 1]
    parts = {
        part.type
        for message in read
        if isinstance(message.content, list)
        for part in message.content
    }
    parts |= {"tool calls"} if any(message.tool_calls for message in read) else set()
    parts |= {"tools"} if any(event.get("tools") for event in sample.events) else set()
    targets = [sample.target] if isinstance(sample.target, str) else sample.target
    scores = {
        name: score["value"] for name, score in (sample.scores or {}).items() if "value" in score
    }
    attributes: dict[str, Any] = {
        "id": sample.id,
        "targets": targets,
        "scores": scores,
        "epoch": sample.epoch,
    }
    if parts - {"text"}:
        attributes["left_out"] = sorted(parts - {"text"})
    messages = [{"role": message.role, "content": _text(message)} for message in given]
    return LoggedText(messages=messages, answer=answer, targets=targets, attributes=attributes)


def _text(message: _Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content if part.type == "text")


def _unpacked(content: bytes) -> Iterator[tuple[str, Any]]:
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        members = sorted(
            (
                member
                for member in archive.infolist()
                if re.fullmatch(r"samples/[^/]+\.json", member.filename)
            ),
            key=lambda member: member.filename,
        )
        # Before anything is unpacked: a small archive may hold terabytes
        if sum(member.file_size for member in members) > MOST_BYTES:
            raise InputError(
                f"the log unpacks to more than {MOST_BYTES >> 30} GiB; convert a part of it "
                "to JSON (inspect log convert)"
            )
        for member in members:
            yield member.filename, parse_json(archive.read(member).decode("utf-8"), member.filename)
    # zipfile raises it for a method of compression that it lacks
    except NotImplementedError:
        raise InputError(
            "the log is packed with zstandard, which this Python cannot unpack; convert it: "
            "inspect log convert --to json"
        ) from None
    except (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        # An InputError is a ValueError, and has its message already
        if isinstance(error, InputError):
            raise
        # zipfile has no separate class for it, only a RuntimeError with this word
        if "encrypted" in str(error):
            raise InputError(
                "the archive is encrypted; wanted a log of inspect-ai, .eval, without a password"
            ) from None
        raise InputError(
            f"the archive is damaged ({error}); wanted a log of inspect-ai, .eval"
        ) from None
