"""Logged evaluations as prompts: lm-evaluation-harness' samples_TASK_DATE.jsonl, a sample per line, and inspect-ai's logs (.json, .eval).

    text           what the model was given, then what it answered; the messages of a chat with a blank line between them, no chat template
    generated      the answer; of a choice, the right one
    needle         the target, where it stands in what was given exactly once, as whole words
    attributes     document or sample, target, and every score, so that right answers can be told from wrong ones

Unlike prompts.jsonl, a log may say more than is read here. Knows nothing about files on the disk, nor about tokenizers.
"""

from __future__ import annotations

import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from repo_interp.errors import InputError
from repo_interp.records import modelled, parsed
from repo_interp.tasks.prompt import GENERATED, Intervals

MOST_BYTES = 1 << 30
"""Of the samples of a log, unpacked."""


class LoggedText(BaseModel):
    """What is read of one sample."""

    given: str
    answer: str
    targets: list[str]
    attributes: dict[str, Any]

    @property
    def characters(self) -> dict[str, Intervals]:
        """The answer, and the target where it stands in the text exactly once."""
        found: dict[str, Intervals] = {}
        for target in filter(None, map(str.strip, self.targets)):
            places = [each.span() for each in re.finditer(rf"(?<!\w){re.escape(target)}(?!\w)", self.given)]
            if len(places) == 1:
                found["needle"] = (places[0],)
                break
        if self.answer:
            found[GENERATED] = ((len(self.given), len(self.given) + len(self.answer)),)
        return found


class _Read(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _HarnessSample(_Read):
    doc_id: int
    doc: dict[str, Any]
    target: Any = None
    arguments: dict[str, dict[str, Any]] | list[list[Any]]
    resps: list[Any] = []
    metrics: list[str] = []


class _Content(_Read):
    type: str = "text"
    text: str = ""


class _Message(_Read):
    role: str
    content: str | list[_Content]


class _Output(_Read):
    completion: str = ""


class _InspectSample(_Read):
    id: int | str
    epoch: int = 1
    input: str | list[_Message]
    target: str | list[str] = ""
    messages: list[_Message] = []
    output: _Output = _Output()
    scores: dict[str, dict[str, Any]] | None = None


class _InspectLog(_Read):
    samples: list[dict[str, Any]]


def is_harness_sample(record: Any) -> bool:
    """Whether a JSON object is a logged sample of lm-evaluation-harness."""
    return isinstance(record, dict) and {"doc_id", "doc", "arguments"} <= set(record)


def from_harness(record: dict[str, Any]) -> LoggedText:
    """A logged sample of lm-evaluation-harness. Raises InputError for one that lacks a part, or has no text."""
    sample = modelled(record, _HarnessSample)
    named = sample.arguments.values() if isinstance(sample.arguments, dict) else sample.arguments
    calls = [list(each.values()) if isinstance(each, dict) else list(each) for each in named]
    if not calls or not all(call and isinstance(call[0], str) for call in calls):
        raise InputError("the sample has no text among its arguments; wanted one of generate_until or loglikelihood")
    choices = [call[1] for call in calls if len(call) > 1 and isinstance(call[1], str)]
    target = str(sample.target)
    if choices:  # the target is the number of a choice, or its text
        numbered = len(choices) > 1 and target.isdigit() and int(target) < len(choices)
        right = choices[int(target)] if numbered else next((each for each in choices if each.strip() == target.strip()), "")
        answer = right or (choices[0] if len(choices) == 1 else "")
        target = answer.strip()
    else:
        said: Any = sample.resps
        while isinstance(said, list) and said:
            said = said[0]
        answer = said if isinstance(said, str) else ""
    scores = {
        name: value
        for name, value in record.items()
        if name in sample.metrics or (not sample.metrics and isinstance(value, float))
    }
    given = calls[choices.index(answer) if answer in choices else 0][0]
    return LoggedText(
        given=given, answer=answer, targets=[target], attributes=_attributes("doc_id", sample.doc_id, [target], scores)
    )


def inspect_samples(content: bytes) -> list[tuple[str, Any]] | None:
    """The samples of an inspect-ai log with their names, of the bytes of its file; None for a file that is none.

    Nothing is unpacked to the disk. Raises InputError for an archive that is damaged, too large, or packed in a way that is not known here.
    """
    if content.startswith(b"PK"):
        return list(_unpacked(content))
    if not content.lstrip().startswith(b"{") or b'"samples"' not in content or b'"eval"' not in content:
        return None
    try:
        log = parsed(content.decode("utf-8"))
    except (InputError, UnicodeDecodeError):
        return None  # lines of another form
    if not isinstance(log, dict) or not {"samples", "eval"} <= set(log):
        return None
    return [(f"sample {number}", sample) for number, sample in enumerate(modelled(log, _InspectLog).samples)]


def from_inspect(record: Any) -> LoggedText:
    """A sample of an inspect-ai log. Raises InputError for one that lacks a part, or has no text."""
    sample = modelled(record, _InspectSample)
    answer = sample.output.completion
    messages = sample.messages or (sample.input if isinstance(sample.input, list) else [])
    if answer and messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    texts = [_text(message) for message in messages] or [str(sample.input)]
    targets = [sample.target] if isinstance(sample.target, str) else sample.target
    scores = {name: score["value"] for name, score in (sample.scores or {}).items() if "value" in score}
    attributes = {**_attributes("id", sample.id, targets, scores), "epoch": sample.epoch}
    return LoggedText(given="\n\n".join(filter(None, texts)), answer=answer, targets=targets, attributes=attributes)


def _text(message: _Message) -> str:
    return message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)


def _attributes(name: str, number: int | str, targets: Sequence[str], scores: dict[str, Any]) -> dict[str, Any]:
    return {name: number, "targets": list(targets), "scores": scores}


def _unpacked(content: bytes) -> Iterator[tuple[str, Any]]:
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        members = sorted(
            (each for each in archive.infolist() if re.fullmatch(r"samples/[^/]+\.json", each.filename)),
            key=lambda each: each.filename,
        )
        if sum(each.file_size for each in members) > MOST_BYTES:
            raise InputError(
                f"the log unpacks to more than {MOST_BYTES >> 30} GiB; convert a part of it to JSON (inspect log convert)"
            )
        for each in members:
            yield each.filename, parsed(archive.read(each).decode("utf-8"), each.filename)
    except NotImplementedError:
        raise InputError(
            "the log is packed with zstandard, which this Python cannot unpack; convert it: inspect log convert --to json"
        ) from None
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        if "encrypted" in str(error):
            raise InputError("the archive is encrypted; wanted a log of inspect-ai, .eval, without a password") from None
        raise InputError(f"the archive is damaged ({error}); wanted a log of inspect-ai, .eval") from None
