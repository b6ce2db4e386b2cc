"""Documents of the named corpora: prose and code of the installed packages, or of packages that are
pinned by version and SHA-256.

    installed: the standard library and every package
        a module with an even number      its source, if the package has given less than CODE characters of code so far
        a module with an odd number       the prose of its docstrings, if the package has given less than PROSE characters so far
        the README in the metadata        whole, as are the package's other texts (.md, .rst, .txt) except licences
    pinned-prose    the prose of docstrings; a document joins several modules until it has PAGES characters
    pinned-code     sources of modules, one module per document

So no module is included both as code and as prose. A module's number is a checksum of its path, and
modules are taken in the order of their numbers, so a package that reaches the limit is sampled from
all its folders. The text of `installed` depends on the installed packages and their versions; the
adapters were trained on it. Models that were trained on other texts are measured on the pinned
corpora, which are the same on every machine; they share no package with each other, and none with
the dependencies of this project. Paragraphs that occurred in an earlier document are left out.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import sysconfig
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import Distribution, distributions
from pathlib import Path

from repo_interp.storage.files import cache_directory, digest_of, replace_whole, sealed, unsealed
from repo_interp.tasks import essay, pinned
from repo_interp.tasks.essay import docstring_prose, standard_library_sources
from repo_interp.tasks.pinned import TEXTS, pinned_modules

CODE, PROSE = 60_000, 60_000
"""The largest number of characters of code and of prose from one package, which the last document
may exceed. The standard library, as large as hundreds of packages, has no limit.
"""
_TEXTS = (".md", ".rst", ".txt")
_LICENCE = re.compile(
    r"licen[cs]e|copying|notice|authors|entry_points|top_level|requires|sources|record",
    re.IGNORECASE,
)
PAGES = 10_000
"""A document of prose has this number of characters or slightly more; the last has fewer."""
SHORTEST, LONGEST = 400, 200_000
"""The smallest and largest number of characters of a document. Longer files are tables."""


@functools.cache
def installed_texts() -> tuple[str, ...]:
    """The documents of the standard library, then those of the packages in the order of their
    names. They are read once per process.
    """
    root, everything = Path(sysconfig.get_paths()["stdlib"]), 1 << 62
    texts = [*_of_modules(list(standard_library_sources(root)), root, everything, everything)]
    named = {(one.name or "").lower(): one for one in distributions()}
    texts += [text for name in sorted(named) for text in _of_package(named[name])]
    return tuple(without_repeats(texts))


def _of_package(package: Distribution) -> Iterator[str]:
    readme = (package.read_text("METADATA") or "").partition("\n\n")[2]
    if len(readme) >= SHORTEST:
        yield readme
    files = [Path(str(package.locate_file(file))) for file in package.files or ()]
    for file in sorted(files):
        if file.suffix in _TEXTS and not _LICENCE.search(
            file.as_posix().rpartition("site-packages")[2]
        ):
            yield from _read(file)
    modules = [
        file
        for file in files
        if file.suffix == ".py" and not {"tests", "test", "testing"} & set(file.parts)
    ]
    yield from _of_modules(modules, Path(str(package.locate_file(""))), CODE, PROSE)


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
            if len(text) >= SHORTEST:
                prose -= len(text)
                yield text


def _number(file: Path, root: Path) -> int:
    return (
        zlib.crc32(file.relative_to(root).as_posix().encode()) if file.is_relative_to(root) else 0
    )


def _read(file: Path) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return  # the file has another encoding or no longer exists
    if SHORTEST <= len(text) <= LONGEST:
        yield text


@functools.cache
def pinned_texts(corpus: str) -> tuple[str, ...]:
    """The documents of one of the corpora in `PINNED`, read once per process.

    Raises InputError when the corpus was not downloaded.
    """
    if corpus == "pinned-prose":
        return _prose(corpus)
    modules = pinned_modules(corpus, LONGEST)
    return tuple(without_repeats(module.read_text(encoding="utf-8") for module in modules))


def _prose(corpus: str) -> tuple[str, ...]:
    """The documents of prose. They are cached next to the wheels, since parsing takes 20 seconds."""
    deque(pinned_modules(corpus, LONGEST), maxlen=0)  # raises InputError for incomplete wheels
    wheels = ",".join(wheel.digest for wheel in pinned.PINNED[corpus])
    code = (Path(__file__), Path(essay.__file__), sys.version.encode(), wheels.encode())
    file = cache_directory() / TEXTS / f"{corpus}-{digest_of(*code)}.json"
    with suppress(OSError, ValueError):  # if the cache is missing or damaged, read the wheels
        return tuple(json.loads(unsealed(file.read_bytes(), file)))
    modules = pinned_modules(corpus, LONGEST)
    texts = tuple(
        _joined(without_repeats("\n\n".join(docstring_prose(module)) for module in modules))
    )
    with (
        suppress(OSError),
        replace_whole(file) as unfinished,
    ):  # the disk may be full or read-only
        for earlier in file.parent.glob(f"{corpus}-*.json"):
            earlier.unlink()
        unfinished.write_bytes(sealed(json.dumps(texts).encode()))
    return texts


def without_repeats(documents: Iterable[str]) -> Iterator[str]:
    """The documents without paragraphs of at least 80 characters that occurred in an earlier
    document, such as licences and copied modules.
    """
    seen: set[str] = set()
    for document in documents:
        paragraphs = re.split(r"\n\s*\n", document)
        fresh = [
            paragraph
            for paragraph in paragraphs
            if len(paragraph) < 80 or paragraph.strip() not in seen
        ]
        seen.update(paragraph.strip() for paragraph in paragraphs if len(paragraph) >= 80)
        text = document if len(fresh) == len(paragraphs) else "\n\n".join(fresh)
        if len(text) >= SHORTEST:
            yield text


def _joined(texts: Iterable[str]) -> Iterator[str]:
    """Join texts into documents. A document ends when it has at least `PAGES` characters."""
    page: list[str] = []
    for text in texts:
        page.append(text)
        if sum(map(len, page)) >= PAGES:
            yield "\n\n".join(page)
            page = []
    if page:
        yield "\n\n".join(page)
