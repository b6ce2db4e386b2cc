"""Prose and code of what is installed: the standard library and every package, as documents of one corpus.

    a module with an even number      its source, if the package has given less than CODE characters of code so far
    another one                       the prose of its docstrings, less than PROSE characters per package
    a package's own README            as its metadata has it, with its other texts (.md, .rst, .txt) but licences

So no text stands there twice as code and as prose. A module's number is a checksum of its path, and they are taken in that order: a package
that is cut off is sampled everywhere. Paragraphs that stood in an earlier document are left out; what still repeats is counted by lines
(`repeated`). The text depends on what is installed, in which versions. Knows nothing about tokens.

One kind alone, for models that were trained on other texts: the modules' sources as above, or the prose of docstrings, of so many modules
in a document that it has PAGES characters, since one alone has too little for long windows; and without READMEs, since these are half code.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Literal

from repo_interp.tasks.essay import docstring_prose, standard_library_sources

CODE, PROSE = 60_000, 60_000
"""Characters of one package; the standard library, which is what hundreds of them are, gives as much as it has."""
PAGES = 10_000
"""Characters, or a little more, of a document of prose alone."""
Kind = Literal["both", "prose", "code"]
_TEXTS = (".md", ".rst", ".txt")
_SHORTEST, _LONGEST = 400, 200_000
"""Characters of a document. Longer files are tables."""
_LICENCE = re.compile(r"licen[cs]e|copying|notice|authors|entry_points|top_level|requires|sources|record", re.IGNORECASE)


@functools.cache
def installed_texts(kind: Kind = "both") -> tuple[str, ...]:
    """The documents: the standard library's, then the packages' in the order of their names; read once per process."""
    root, everything = Path(sysconfig.get_paths()["stdlib"]), 1 << 62
    library = list(standard_library_sources(root))
    named = {(one.name or "").lower(): one for one in distributions()}
    packages = [named[name] for name in sorted(named)]
    if kind == "both":
        texts = [*_of_modules(library, root, everything, everything)]
        texts += [text for package in packages for text in _of_package(package)]
        return tuple(_without_repeats(texts))
    code, prose = (everything, 0) if kind == "code" else (0, everything)
    texts = [*_of_modules(library, root, code, prose)]
    for package in packages:
        texts += _of_modules(_modules(package), Path(str(package.locate_file(""))), min(code, CODE), min(prose, PROSE))
    fresh = _without_repeats(texts)
    return tuple(fresh if kind == "code" else _joined(fresh))


def text_record(kind: Kind = "both") -> dict[str, str]:
    """How many documents and characters there are, what share of them repeats, and the SHA-256 of all, in hexadecimal."""
    texts = installed_texts(kind)
    return {
        "corpus_documents": str(len(texts)),
        "corpus_characters": str(sum(map(len, texts))),
        "corpus_repeated": f"{repeated(texts):.4f}",
        "corpus_sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
    }


def repeated(documents: Iterable[str]) -> float:
    """The share of characters that stand in lines, of 20 characters or more, which stood there before."""
    seen: set[str] = set()
    again = total = 0
    for document in documents:
        for line in document.splitlines():
            total += len(line)
            if len(line) >= 20:
                again += len(line) if line in seen else 0
                seen.add(line)
    return again / max(1, total)


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


def _of_package(package: Distribution) -> Iterator[str]:
    readme = (package.read_text("METADATA") or "").partition("\n\n")[2]
    if len(readme) >= _SHORTEST:
        yield readme
    files = [Path(str(package.locate_file(file))) for file in package.files or ()]
    for file in sorted(files):
        if file.suffix in _TEXTS and not _LICENCE.search(file.as_posix().rpartition("site-packages")[2]):
            yield from _read(file)
    yield from _of_modules(_modules(package), Path(str(package.locate_file(""))), CODE, PROSE)


def _modules(package: Distribution) -> list[Path]:
    files = [Path(str(package.locate_file(file))) for file in package.files or ()]
    return [file for file in files if file.suffix == ".py" and not {"tests", "test", "testing"} & set(file.parts)]


def _of_modules(modules: Sequence[Path], root: Path, code: int, prose: int) -> Iterator[str]:
    for file in sorted(modules, key=lambda file: (_number(file, root), str(file))):
        if code <= 0 and prose <= 0:
            return
        if _number(file, root) % 2 == 0:
            for text in _read(file) if code > 0 else ():
                code -= len(text)
                yield text
        elif prose > 0:
            text = "\n\n".join(docstring_prose(file))
            if len(text) >= _SHORTEST:
                prose -= len(text)
                yield text


def _number(file: Path, root: Path) -> int:
    return zlib.crc32(file.relative_to(root).as_posix().encode()) if file.is_relative_to(root) else 0


def _read(file: Path) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return  # another encoding, or gone
    if _SHORTEST <= len(text) <= _LONGEST:
        yield text


def _without_repeats(documents: Iterable[str]) -> Iterator[str]:
    """The documents without paragraphs, of 80 characters or more, that stood in an earlier one: licences, copied modules."""
    seen: set[str] = set()
    for document in documents:
        paragraphs = re.split(r"\n\s*\n", document)
        fresh = [paragraph for paragraph in paragraphs if len(paragraph) < 80 or paragraph.strip() not in seen]
        seen.update(paragraph.strip() for paragraph in paragraphs if len(paragraph) >= 80)
        text = document if len(fresh) == len(paragraphs) else "\n\n".join(fresh)
        if len(text) >= _SHORTEST:
            yield text
