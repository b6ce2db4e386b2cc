"""Prose and code of what is installed: the standard library and every package, as documents of one corpus.

    a module with an even number      its source, if the package has given less than CODE characters of code so far
    another one                       the prose of its docstrings, less than PROSE characters per package
    a package's own README            as its metadata has it, with its other texts (.md, .rst, .txt) but licences

So no text stands there twice as code and as prose. A module's number is a checksum of its path, and they are taken in that order: a package
that is cut off is sampled everywhere. Paragraphs that stood in an earlier document are left out. The text depends on what is installed, in
which versions: the adapters were trained on it. `pinned` has texts that are the same everywhere. Knows nothing about tokens.
"""

from __future__ import annotations

import functools
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from position_papers.tasks.pinned import LONGEST, SHORTEST, without_repeats
from repo_interp.tasks.essay import docstring_prose, standard_library_sources

CODE, PROSE = 60_000, 60_000
"""Characters of one package; the standard library, which is what hundreds of them are, gives as much as it has."""
_TEXTS = (".md", ".rst", ".txt")
_LICENCE = re.compile(r"licen[cs]e|copying|notice|authors|entry_points|top_level|requires|sources|record", re.IGNORECASE)


@functools.cache
def installed_texts() -> tuple[str, ...]:
    """The documents: the standard library's, then the packages' in the order of their names; read once per process."""
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
        if file.suffix in _TEXTS and not _LICENCE.search(file.as_posix().rpartition("site-packages")[2]):
            yield from _read(file)
    modules = [file for file in files if file.suffix == ".py" and not {"tests", "test", "testing"} & set(file.parts)]
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
    return zlib.crc32(file.relative_to(root).as_posix().encode()) if file.is_relative_to(root) else 0


def _read(file: Path) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return  # another encoding, or gone
    if SHORTEST <= len(text) <= LONGEST:
        yield text
