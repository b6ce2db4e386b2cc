"""Requests of a page, held to types and ranges; the same over HTTP and in a notebook.

    {"ask": "open", "model": 0}                       the model, its heads, how many prompts there are, kinds of edits, a table of heads
    {"ask": "prompt", "prompt": 0}                    tokens, spans, the map of heads, and which head and token to begin with
    {"ask": "view", "heads": [[2, 0]], "token": 17, "edits": [...], ...}     `Session.look`, or with edits that are on `Session.changed`
    {"ask": "continue", ...}  {"ask": "suggest", ...}                        events, one after the other
    {"ask": "python", ...}  {"ask": "csv", ...}  {"ask": "netcdf", ...}      the cell, and the numbers of the view as files

A model is a number of those that are compared. A prompt is a number of those that were given, or a
text. A message names no file and holds no code; one that does not fit is an InputError.
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
# Of one message: edits, and heads side by side
MOST_EDITS, MOST_SHOWN = 64, 6


class Asked(BaseModel):
    """A message: the question, and the whole state of its page."""

    # Strict: values from a browser are not converted, so that a text never passes for a number
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    ask: Literal["open", "prompt", "view", "continue", "suggest", "python", "csv", "netcdf"]
    tab: Annotated[str, Len(0, 64)] = ""
    """Which page asks: its newer view ends its older one."""
    model: Index = 0
    """0, or the place of one that the explored model is compared with."""
    prompt: Index = 0
    text: Annotated[str, Len(0, MOST_TEXT)] | None = None
    """Read in place of a numbered prompt."""
    heads: Annotated[
        tuple[tuple[Index, Index], ...], Len(0, MOST_SHOWN), BeforeValidator(as_tuple)
    ] = ()
    token: Index = 0
    selection: Annotated[tuple[Index, Index], BeforeValidator(as_tuple)] | None = None
    """The first and the last of the tokens that are selected."""
    looking: Literal["token", "answer"] = "token"
    """Whose attention to the selection the answer to "view" has for every head."""
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
