"""Prose or code of packages that are pinned by version and SHA-256, as documents of one corpus.

    pinned-prose    the prose of docstrings, of so many modules in a document that it has PAGES characters: one alone is short
    pinned-code     sources of modules, one a document

Paragraphs that stood in an earlier document are left out. Models that were trained on other texts are measured on these: the corpora share
no package, and have none that this project needs. Knows nothing about tokens.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

from repo_interp.tasks.essay import docstring_prose
from repo_interp.tasks.pinned import pinned_modules

PAGES = 10_000
"""Characters, or a little more, of a document of prose."""
SHORTEST, LONGEST = 400, 200_000
"""Characters of a document. Longer files are tables."""


@functools.cache
def pinned_texts(corpus: str) -> tuple[str, ...]:
    """The documents of one of `PINNED`; read once per process. Raises InputError where it was not fetched."""
    modules = pinned_modules(corpus, LONGEST)
    if corpus == "pinned-prose":
        return tuple(_joined(without_repeats("\n\n".join(docstring_prose(module)) for module in modules)))
    return tuple(without_repeats(module.read_text(encoding="utf-8") for module in modules))


def without_repeats(documents: Iterable[str]) -> Iterator[str]:
    """The documents without paragraphs, of 80 characters or more, that stood in an earlier one: licences, copied modules."""
    seen: set[str] = set()
    for document in documents:
        paragraphs = re.split(r"\n\s*\n", document)
        fresh = [paragraph for paragraph in paragraphs if len(paragraph) < 80 or paragraph.strip() not in seen]
        seen.update(paragraph.strip() for paragraph in paragraphs if len(paragraph) >= 80)
        text = document if len(fresh) == len(paragraphs) else "\n\n".join(fresh)
        if len(text) >= SHORTEST:
            yield text


def _joined(texts: Iterable[str]) -> Iterator[str]:
    """Texts one after the other, cut where `PAGES` characters are reached."""
    page: list[str] = []
    for text in texts:
        page.append(text)
        if sum(map(len, page)) >= PAGES:
            yield "\n\n".join(page)
            page = []
    if page:
        yield "\n\n".join(page)
