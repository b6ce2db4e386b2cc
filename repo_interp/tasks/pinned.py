"""Modules of packages of PyPI, pinned by version and SHA-256: the same texts on every machine.

    `repo-interp fetch texts` -> CACHE/texts/{django-5.2.19.whl, ...}

Wheels are kept unchanged. Modules are read from the archive after a check of its digest; nothing is
unpacked, installed or run.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.storage.files import cache_directory
from repo_interp.storage.wheels import Wheel, digest_of, download

TEXTS = "texts"
"""Common name of the corpora in `repo-interp fetch`."""
PINNED = {
    "pinned-prose": (
        Wheel("django==5.2.19", "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00"),
        Wheel(
            "twisted==26.10.0", "3732f42af218925a0fe78d6668db55853f7fb532245a89a2669babe7d3000fa8"
        ),
        Wheel(
            "pennylane==0.45.1", "b8cc7f590c43281b6e35b3a35707e9583c6b7babeb31dcf6f1cbde32a754ab93"
        ),
        Wheel(
            "music21==10.5.1", "dc3309498c4c95cebdf8d4f20c868deb6b63bce1d929cad4f51a7ccc982987b1"
        ),
        Wheel(
            "openmdao==3.45.1", "2ac96fcd3ebd4f3096d527f6f792f4b5ddb8823093c2fff1f89f147159fab6da"
        ),
    ),
    "pinned-code": (
        Wheel("dask==2026.8.0", "ccc0c83a189b0398602435189771d28dad7b5773b6089bb8dce14ae732dd782c"),
        Wheel("sphinx==9.0.4", "5bebc595a5e943ea248b99c13814c1c5e10b3ece718976824ffa7959ff95fffb"),
    ),
}
"""Wheels by corpus: pure Python, so equal on every machine. No package is in two corpora, or among
our requirements.
"""


def fetch_texts() -> Path:
    """Fetch the wheels of `PINNED` that are missing or damaged.

    Raises InputError as `download` does.

    Returns:
        The directory with all wheels.
    """
    folder = cache_directory() / TEXTS
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in (wheel for wheels in PINNED.values() for wheel in wheels):
        file = _place(wheel)
        if not (file.is_file() and digest_of(file) == wheel.digest):
            # In the same folder, so that the move is a single rename, without partial wheels.
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                os.replace(download(wheel, Path(temporary)), file)
    return folder


def pinned_modules(corpus: str, most: int) -> Iterator[zipfile.Path]:
    """Read the modules of a corpus.

    Args:
        corpus: One of `PINNED`.
        most: Most bytes of a module.

    Yields:
        Modules, package by package in the order of their names.

    Raises:
        InputError: A wheel was not fetched, or has changed after that.
    """
    for wheel in PINNED[corpus]:
        file, command = _place(wheel), f"with: repo-interp fetch {TEXTS}"
        if not file.is_file():
            raise InputError(f"{corpus} has not been fetched yet; fetch it once {command}")
        # Checked at every reading, since the cache may have changed after the fetch.
        if digest_of(file) != wheel.digest:
            raise InputError(
                f"{file}, a part of {corpus}, is no longer what was fetched; fetch it again "
                f"{command}"
            )
        with zipfile.ZipFile(file) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            # Limited by unpacked size: large generated modules hold tables, not prose.
            names = sorted(
                name for name, size in sizes.items() if name.endswith(".py") and size <= most
            )
            yield from (zipfile.Path(archive, name) for name in names)


def packages(corpus: str) -> str:
    """List the packages of a corpus with their versions.

    Args:
        corpus: One of `PINNED`.

    Returns:
        Names and versions as text.
    """
    return ", ".join(wheel.requirement.replace("==", " ") for wheel in PINNED[corpus])


def _place(wheel: Wheel) -> Path:
    return cache_directory() / TEXTS / f"{wheel.requirement.replace('==', '-')}.whl"
