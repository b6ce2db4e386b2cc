"""Requests of a page, with checked types and ranges; the same over HTTP and in a notebook.

    {"ask": "open", "model": 0}                       the model, its heads, the number of prompts, kinds of edits, a table of heads
    {"ask": "prompt", "prompt": 0}                    tokens, spans, the map of heads, and the initial head and token
    {"ask": "view", "heads": [[2, 0]], "token": 17, "edits": [...], ...}     `Session.look`, or, with active edits, `Session.changed`
    {"ask": "continue", ...}  {"ask": "suggest", ...}                        events, one after the other
    {"ask": "python", ...}  {"ask": "csv", ...}  {"ask": "netcdf", ...}      the cell, and the numbers of the view as files

`model` is an index of the compared models. `prompt` is an index of the given prompts, or a text. A
message names no file and contains no code; an invalid message raises an InputError.
`explored.Explored` answers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from pydantic import BaseModel, BeforeValidator, ConfigDict

from repo_interp.explorer.session import NEXT
from repo_interp.explorer.session_edits import Edit, Index, as_tuple
from repo_interp.storage.records import validate

MOST_TOKENS = 8192
"""Tokens of a prompt."""
MOST_TEXT = 1 << 20
"""Characters of a text."""
# Limits of a message: edits, and heads side by side
MOST_EDITS, MOST_SHOWN = 64, 6


class Asked(BaseModel):
    """A message: the question, and the whole state of its page."""

    # Strict: values from a browser are not converted, so that a text never passes for a number
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    ask: Literal["open", "prompt", "view", "continue", "suggest", "python", "csv", "netcdf"]
    tab: Annotated[str, Len(0, 64)] = ""
    """The page that asks: its newer view ends its older one."""
    model: Index = 0
    """0 for the explored model, or the index of a model to compare with."""
    prompt: Index = 0
    text: Annotated[str, Len(0, MOST_TEXT)] | None = None
    """Text that is used instead of a numbered prompt."""
    heads: Annotated[
        tuple[tuple[Index, Index], ...], Len(0, MOST_SHOWN), BeforeValidator(as_tuple)
    ] = ()
    token: Index = 0
    selection: Annotated[tuple[Index, Index], BeforeValidator(as_tuple)] | None = None
    """The first and the last selected token."""
    looking: Literal["token", "answer"] = "token"
    """The rows whose attention to the selection is returned for every head."""
    answer: Annotated[tuple[Index, ...], Len(0, MOST_TOKENS), BeforeValidator(as_tuple)] = ()
    edits: Annotated[tuple[Edit, ...], Len(0, MOST_EDITS), BeforeValidator(as_tuple)] = ()
    count: Annotated[int, Interval(ge=1, le=100)] = NEXT
    """Likeliest next tokens."""


def message(value: Any) -> Asked:
    """Read a message.

    Args:
        value: The message as JSON gives it.

    Returns:
        The message, its fields checked.

    Raises:
        InputError: A field is unknown, of another type or out of range.
    """
    return validate(value, Asked, "the request")
