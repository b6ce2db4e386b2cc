"""English prose for haystacks: a file of the user, or docstrings of Python's standard library.

White space is collapsed to single spaces. The docstrings are read on demand, module by module in
the order of names, so the first n words do not depend on the number of words that are taken.
Paragraphs that are not prose (code, tables, signatures) are left out. The text depends on the
Python version. This module knows nothing about needles or tokens.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import sysconfig
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.storage.files import regular

# Lookbehinds in re have a fixed width, so every abbreviation has one
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.) (?=[\"'(]?[A-Z0-9])")
_LEFT_OUT = {
    *(
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "site-packages",
        "dist-packages",
        "__pycache__",
    ),
    *("encodings", "pydoc_data"),  # tables
}


class Essay:
    """Words of an endless text, which repeats from its beginning."""

    def __init__(self, read: Callable[[], Iterator[str]]) -> None:
        """Take paragraphs from the iterator that `read` returns."""
        self._read = read
        self._begin()

    def _begin(self) -> None:
        self._source = self._read()
        self._words: list[str] = []
        self._period = 0

    def words(self, count: int) -> list[str]:
        """Read words from the beginning.

        Args:
            count: Number of words.

        Returns:
            The first `count` words.
        """
        try:
            while len(self._words) < count:
                paragraph = next(self._source, None)
                if paragraph is not None:
                    self._words.extend(paragraph.split())
                    continue
                # The source has ended, so words repeat; the period is the number of words.
                self._period = self._period or len(self._words)
                self._words.extend(
                    itertools.islice(self._words[: self._period], count - len(self._words))
                )
        except BaseException:
            # An interrupted iterator would look like the end of the text, and change the text.
            self._begin()
            raise
        return self._words[:count]

    def sentences(self, count: int) -> list[str]:
        """Read sentences from the beginning.

        Args:
            count: Number of words.

        Returns:
            The first `count` words as sentences; the last one may be cut.
        """
        return SENTENCE_END.split(" ".join(self.words(count)))


def essay(path: str | Path | None = None) -> Essay:
    """Open a prose text.

    Args:
        path: UTF-8 file; None: the docstrings of the standard library.

    Returns:
        The text.

    Raises:
        InputError: The file cannot be read or is empty, or Python comes without sources.
    """
    return _standard_library() if path is None else _file(str(path))


def _file(path: str) -> Essay:
    try:
        text = regular(Path(path)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(
            f"{path}: wanted a text file for the haystack, but {reason}; name a UTF-8 text file"
        ) from error
    if not text.split():
        raise InputError(
            f"{path}: wanted prose for the haystack, the file is empty; name a file with text"
        )
    return _of(text)


# By content, not by path: a file that changed is read again, and its words are split once
@functools.lru_cache(maxsize=4)
def _of(text: str) -> Essay:
    return Essay(lambda: iter([text]))


@functools.cache
def _standard_library() -> Essay:
    root = Path(sysconfig.get_paths()["stdlib"])
    # Read here, so that a Python without sources is refused before a prompt is begun
    if next(_docstring_prose(root), None) is None:
        raise InputError(
            "this Python comes without the standard library's sources; name a text file for "
            "the haystack"
        )
    return Essay(lambda: _docstring_prose(root))


def standard_library_sources(root: Path) -> Iterator[Path]:
    """Find source files of the standard library, without its tests and tables.

    Args:
        root: Folder of the standard library.

    Yields:
        Files, folder by folder in the order of their names.
    """
    for folder, folders, files in os.walk(root):
        # Changed in place: os.walk descends into the remaining folders in this order.
        folders[:] = sorted(
            name for name in folders if name not in _LEFT_OUT and not name.startswith("config-")
        )
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _docstring_prose(root: Path) -> Iterator[str]:
    seen = set()
    for path in standard_library_sources(root):
        for prose in docstring_prose(path):
            # Overriding methods repeat the docstrings of their bases
            if prose not in seen:
                seen.add(prose)
                yield prose


_BLOCKS = frozenset({"body", "handlers", "orelse", "finalbody", "cases"})
"""Fields of statements that hold statements; expressions have no docstrings."""


def docstring_prose(path: Path | zipfile.Path) -> Iterator[str]:
    """Read paragraphs of prose in the docstrings of a module.

    Args:
        path: Source file; one that this Python cannot parse has no prose.

    Yields:
        Paragraphs, all in one line.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings are for the author of the module
            tree = ast.parse(path.read_bytes())
    # Packages contain files for other Python versions, and files that are broken on purpose.
    except (SyntaxError, ValueError, OSError, RecursionError):
        return
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                if _is_prose(paragraph):
                    yield " ".join(paragraph.split())


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Iterate over a module's statements in the order of `ast.walk`, in a quarter of the time."""
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        yield (node := waiting.popleft())
        for name in node._fields:
            if name in _BLOCKS:
                waiting.extend(getattr(node, name))


def _is_prose(paragraph: str) -> bool:
    """Whether a paragraph has whole sentences of mostly letters: no code, tables or lists."""
    text = " ".join(paragraph.split())
    if (
        len(text.split()) < 12
        or text[-1] not in ".!?"
        or not text[0].isupper()
        or not text.isascii()
    ):
        return False
    # Doctests, markup, rules, calls, and two indented lines in a row: lists or code
    if re.search(r">>>|::|[{}<>|\\*`@#$]|[=_/~^]{2}|\w\(|  \S.*\n  \S", paragraph):
        return False
    # Digits and signs are a few per cent of English prose, but more in tables and lists.
    return sum(character.isalpha() or character == " " for character in text) > 0.93 * len(text)
