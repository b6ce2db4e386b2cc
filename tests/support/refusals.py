"""A refusal: an `InputError` of one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from repo_interp.errors import InputError


@contextmanager
def refused(line: str, kind: type[InputError] = InputError) -> Iterator[pytest.ExceptionInfo]:
    """Expect that the block is refused in one line, in which the pattern `line` is found."""
    with pytest.raises(kind, match=line) as error:
        yield error
    assert "\n" not in str(error.value)
